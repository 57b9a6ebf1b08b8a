"""Says what better forecasts are worth: differences to exact estimates, with confidence over workloads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrain.scheduling.metrics import Metrics
from foretrain.scheduling.study import EXACT, Outcome, Quality

_CONFIDENCE = 0.95
Floats = NDArray[np.float64]


def _gpu_hours(found: Metrics) -> float | None:
    return found.held_gpu_s / 3600


FIGURES: dict[str, tuple[Callable[[Metrics], float | None], bool]] = {
    "average_jct_s": (lambda found: found.average_jct_s, True),
    "average_wait_s": (lambda found: found.average_wait_s, True),
    "missed_deadlines": (lambda found: found.missed_deadlines, False),
    "gpu_hours": (_gpu_hours, True),
    "dollars": (lambda found: found.cost, True),
}
"""What is compared, and whether as a share of what exact estimates give (else as a difference)."""


def share_more(ours: float | Floats, exact: float | Floats) -> float:
    """How much more it is over all workloads together, as a share: the ratio of the means that are shown."""
    return float(np.mean(ours) / np.mean(exact)) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A mean over workloads, and a half-width within which it lies 19 times of 20 (None of one workload)."""

    exact: float
    mean: float
    half_width: float | None
    relative: bool

    def text(self) -> str:
        """For people: +1.2% ±0.4%."""
        if self.relative:
            return f"{self.mean:+.1%}" + ("" if self.half_width is None else f" ±{self.half_width:.1%}")
        return f"{self.mean:+.1f}" + ("" if self.half_width is None else f" ±{self.half_width:.1f}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """What a source of estimates costs a policy beside exact ones."""

    policy: str
    estimates: str
    workloads: int
    figures: dict[str, Difference]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def worth(outcomes: Sequence[Outcome]) -> list[Worth]:
    """Of every policy and source of estimates but the exact one, workload by workload."""
    by_key: dict[tuple[str, Quality], dict[int, Metrics]] = {}
    for outcome in outcomes:
        key = (outcome.scenario.policy, outcome.scenario.quality)
        by_key.setdefault(key, {})[outcome.scenario.seed] = outcome.metrics
    answers = []
    for (policy, quality), of_seed in by_key.items():
        exact = by_key.get((policy, EXACT))
        if exact is None or quality == EXACT:
            continue
        seeds = sorted(of_seed.keys() & exact.keys())
        pairs = [(of_seed[seed], exact[seed]) for seed in seeds]
        figures = {
            name: difference
            for name, (value, relative) in FIGURES.items()
            if (difference := _difference(pairs, value, relative=relative)) is not None
        }
        answers.append(Worth(policy=policy, estimates=quality.text, workloads=len(seeds), figures=figures))
    return answers


def _difference(
    pairs: Sequence[tuple[Metrics, Metrics]], value: Callable[[Metrics], float | None], *, relative: bool
) -> Difference | None:
    values = [(value(ours), value(exact)) for ours, exact in pairs]
    known = [(ours, exact) for ours, exact in values if ours is not None and exact is not None]
    if not known or (relative and any(exact <= 0 for _, exact in known)):
        return None
    ours, exact = np.array(known).T
    mean = share_more(ours, exact) if relative else float((ours - exact).mean())
    half_width = None
    if len(known) > 1:
        from scipy.stats import t

        off = (ours - (1 + mean) * exact) / exact.mean() if relative else ours - exact
        quantile = float(t.ppf((1 + _CONFIDENCE) / 2, len(known) - 1))
        half_width = quantile * float(off.std(ddof=1)) / math.sqrt(len(known))
    return Difference(
        exact=float(exact.mean()),
        mean=mean,
        half_width=half_width,
        relative=relative,
    )
