"""Gives the figures of a job's resources by whoever knows them best, and says who that is."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from foretrain.errors import ForetrainError
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.predictors.driple.cases import deletepop
from foretrain.predictors.driple.features import MEANS, RESOURCES, SPANS, TARGETS, TWELVE, Array
from foretrain.predictors.driple.predictor import DriplePredictor
from foretrain.predictors.driple.whitebox import (
    CPU_PERIOD_S,
    THRESHOLD,
    ResourceUse,
    Whitebox,
    figures_in,
    period_s,
    rank_link_bytes_per_s,
)

_DRAWN_STEPS = 3
_GROUPS = (RESOURCES[:1], RESOURCES[1:2], RESOURCES[2:])
"""Resources whose figures come from one and the same: what is received is what others sent."""
_NEARLY = 0.98
"""Of an average: learned spans and peaks that cannot make up so much belong to another step."""
_THROUGHOUT = 0.9
"""Of the window: a resource that has no time to be idle and is active for less belongs to another step."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Resources:
    """The figures of a job, who gave each, and the resources over a few steps."""

    figures: Mapping[str, float]
    """By the names in ``TARGETS``; idle and active spans in seconds."""
    by: Mapping[str, str]
    window_s: float
    steps: ResourceUse
    """A few steps as the schedule has them."""
    drawn_steps: int = _DRAWN_STEPS
    sampled_s: float = CPU_PERIOD_S
    """How long the samples are that idle and active times are made of."""


def resources(forecast: Forecast) -> Resources:
    """The resources of a forecast job, averages as it has them.

    Spans and peaks are those of the forecast where it gives them; else of the network that the package ships
    where it has learned them on this device and they agree with the averages; else of the forecast's
    schedule, or of DeletePop's where it has none.
    """
    job, shipped = forecast.job, deletepop()
    inside = forecast if forecast.step is not None else shipped.predict(job)
    whitebox = Whitebox(shipped)
    learned = np.full(len(TARGETS), math.nan)
    try:
        predictor = DriplePredictor()
        whitebox.levels = predictor.state().levels
        learned = predictor.figures(job)
    except ForetrainError:
        pass  # the schedule answers alone, as ``by`` says
    window = whitebox.use(inside)
    window_s = window.period_s * len(window.values["network_tx"])
    given = {name: one.median for name, one in forecast.quantities.items() if name in TARGETS}
    sources = (
        (forecast.predictor, given),
        (DriplePredictor.name, _in_seconds(learned, window_s)),
        (inside.predictor, _in_seconds(figures_in(window), window_s)),
    )
    link = rank_link_bytes_per_s(job)
    figures: dict[str, float] = {}
    by: dict[str, str] = {}
    for group in _GROUPS:
        means = [mean for resource, mean in zip(RESOURCES, MEANS, strict=True) if resource in group]
        twelve = [name for name in TWELVE if name.startswith(group)]
        for names in (means, twelve):
            giver, known = next(
                (giver, known)
                for giver, known in sources
                if known is sources[-1][1]
                or (
                    all(name in known for name in names)
                    and _agree(group, {**known, **figures}, names, window, link)
                )
            )
            figures |= {name: known[name] for name in names}
            by |= dict.fromkeys(names, giver)
        for resource, mean in zip(group, means, strict=True):
            peak = figures[f"{resource}_peak"]
            most = link if resource.startswith("network") else 1.0
            figures[f"{resource}_peak"] = max(min(peak, most), figures[mean])
            idle, active = f"{resource}_idle_s", f"{resource}_active_s"
            if figures[mean] > 0 and _throughout(figures[idle], figures[active], window):
                figures[idle], figures[active] = 0.0, window_s
    return Resources(
        figures=figures,
        by=by,
        window_s=window_s,
        steps=whitebox.use(inside, _DRAWN_STEPS, _DRAWN_STEPS * 100),
        sampled_s=period_s(job),
    )


def _agree(
    group: Sequence[str], known: Mapping[str, float], names: Sequence[str], window: ResourceUse, link: float
) -> bool:
    """Whether idle times, active times and peaks can be those of resources with these averages, over this
    link."""
    if not set(names) <= set(TWELVE):
        return True
    window_s = window.period_s * len(window.values["network_tx"])
    for resource in group:
        mean = known[MEANS[RESOURCES.index(resource)]]
        idle, active, peak = (known[f"{resource}_{figure}"] for figure in ("idle_s", "active_s", "peak"))
        most = peak * (active + THRESHOLD * idle) / ((active + idle) or 1.0)
        if most < _NEARLY * mean or (active > 0) != (mean > 0):
            return False
        if resource.startswith("network") and peak > link / _NEARLY:
            return False
        nearly = active >= _THROUGHOUT * window_s and idle <= (1 - _THROUGHOUT) * window_s
        if mean > 0 and _throughout(idle, active, window) and not nearly:
            return False
    return True


def _throughout(idle_s: float, active_s: float, window: ResourceUse) -> bool:
    """Whether there is no room for idle spans: shorter than a sample, or more than active ones leave."""
    window_s = window.period_s * len(window.values["network_tx"])
    return idle_s < window.period_s / 2 or idle_s + active_s > window_s * (1 + 1e-9)


def _in_seconds(figures: Array, window_s: float) -> dict[str, float]:
    """The figures that are known, by name; spans in seconds."""
    values = np.where(SPANS, figures * window_s, figures)
    return {name: value for name, value in zip(TARGETS, values.tolist(), strict=True) if math.isfinite(value)}


@functools.lru_cache(maxsize=4096)
def resource_figures(job: Job) -> Mapping[str, float]:
    """Forecast how busy a job keeps device, memory and network, by the names in ``TARGETS``: what
    ``resources`` finds with the usual forecast, remembered for every job. For those who place many jobs."""
    return MappingProxyType(dict(resources(deletepop().predict(job)).figures))
