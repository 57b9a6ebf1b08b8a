"""Has predictors forecast runs that they did not learn from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from foretrain.forecast import Estimate
from foretrain.job import Job
from foretrain.predictors.joined.choosing import Array, LeftOut
from foretrain.predictors.joined.members import Members, everyone
from foretrain.predictors.joined.relations import Known, Part, Relation, device_of
from foretrain.predictors.likeness import Key
from foretrain.predictors.seen import step_of
from foretrain.run import Run

STEP = "step_time_s"


def try_out(
    runs: Sequence[Run],
    parts: Sequence[Part],
    names: Sequence[str],
    *,
    families: frozenset[str] = frozenset(),
    devices: frozenset[str] = frozenset(),
    step: Callable[[], None] = lambda: None,
) -> tuple[LeftOut, Array]:
    """Forecast the runs of each part by every predictor that has learned from the others, and say whether its
    80 % interval held each (1 or 0, not a number where it refused; rows and columns as in ``misses``). What
    comes with a predictor stays, but for ``families`` and ``devices``; it is there when a user asks, too."""
    speakers = everyone(names)
    rows: list[tuple[Key, Relation, str, int, int, list[float]]] = []
    held: list[list[float]] = []
    for number, part in enumerate(parts):
        asked = [runs[i].job for i in part.test]
        known = Known.of([runs[i].job for i in part.train])
        train = [runs[i] for i in part.train]
        members = Members.learned(names, train, families=families, devices=devices, asked=asked, step=step)
        for i in part.test:
            job, measured_s = runs[i].job, runs[i].measured[STEP]
            estimates = [_step_time(members, name, job) for name in speakers]
            misses = [math.nan if one is None else math.log(one.median / measured_s) for one in estimates]
            held.append(
                [math.nan if one is None else float(one.low <= measured_s <= one.high) for one in estimates]
            )
            rows.append((Key.of(job), known.relation(job), device_of(job), number, i, misses))
    keys, kinds, places, numbers, positions, misses_of = zip(*rows, strict=True) if rows else ((),) * 6
    first: dict[str, int] = {}
    steps = tuple(first.setdefault(step_of(runs[i].job), i) for i in positions)
    left_out = LeftOut(
        members=speakers, keys=keys, relations=kinds, devices=places, parts=numbers, positions=positions,
        steps=steps,
        misses=np.array(misses_of, dtype=np.float64).reshape(len(rows), len(speakers)),
    )  # fmt: skip
    return left_out, np.array(held, dtype=np.float64).reshape(left_out.misses.shape)


def _step_time(members: Members, name: str, job: Job) -> Estimate | None:
    forecast = members.forecast(name, job) if name in members.by_name else None
    return None if forecast is None else forecast.quantities.get(STEP)
