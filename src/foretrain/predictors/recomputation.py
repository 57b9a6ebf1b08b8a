"""Says what recomputation saves in memory and costs in time: in all, and layer by layer."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from foretrain.errors import ForetrainError
from foretrain.forecast import Forecast
from foretrain.predictors.base import Predictor
from foretrain.step.layout import Layout
from foretrain.step.partition import Block
from foretrain.step.passes import backward_pass, is_recomputed
from foretrain.step.play import Step
from foretrain.step.sharded_memory import kept_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecomputation:
    """What one layer keeps less of a micro-batch, and what it computes again in a step."""

    name: str
    saved_bytes: float
    recomputed_s: float
    """On the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """The difference that recomputation makes to a job."""

    saved_bytes: float
    """Of the peak."""
    added_s: float
    """To the step."""
    layers: tuple[LayerRecomputation, ...]
    """Those that recompute."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def with_recomputation(forecast: Forecast, predictor: Predictor) -> Forecast:
    """The forecast with what its plan's recomputation saves and costs beside the same job without any."""
    job, step = forecast.job, forecast.step
    if job.plan.recompute == "none" or job.workload.training.mode == "infer" or step is None:
        return forecast
    kept = dataclasses.replace(job, plan=dataclasses.replace(job.plan, recompute="none", recompute_every=1))
    with contextlib.suppress(ForetrainError):
        plain = predictor.predict(kept)
        if plain.step is not None and not plain.step.layout.graph.recomputes:  # its own code does not
            found = Recomputation(
                saved_bytes=_more(plain, forecast, "peak_memory_bytes"),
                added_s=_more(forecast, plain, "step_time_s"),
                layers=tuple(_layers(step, plain.step)),
            )
            return dataclasses.replace(forecast, recomputation=found)
    return forecast


def _more(one: Forecast, other: Forecast, quantity: str) -> float:
    return one[quantity].median - other[quantity].median


def _layers(step: Step, plain: Step) -> Iterator[LayerRecomputation]:
    layout, times = step.layout, step.layout.job.accumulation
    before = {block.name: _kept(plain.layout, block) for block in _blocks(plain.layout)}
    for block in _blocks(layout):
        calls = backward_pass(layout, block)
        again = is_recomputed(layout.graph, calls.op)
        if again.any():
            saved = before.get(block.name, 0.0) - _kept(layout, block)
            yield LayerRecomputation(
                name=block.name,
                saved_bytes=max(0.0, saved),
                recomputed_s=float(calls.busy_s[again].sum()) * times,
            )


def _blocks(layout: Layout) -> Iterator[Block]:
    for stage in layout.stages:
        yield from (block for block in stage.blocks if block.is_layer)


def _kept(layout: Layout, block: Block) -> float:
    return kept_bytes(layout.graph, block, layout.job.plan, layout.profile)
