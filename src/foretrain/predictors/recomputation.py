"""Says what recomputation saves in memory and costs in time: in all, and layer by layer."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from foretrain.errors import ForetrainError
from foretrain.forecast import Forecast, fullest_of
from foretrain.predictors.base import Predictor
from foretrain.step.block_memory import kept_bytes
from foretrain.step.layout import Layout
from foretrain.step.partition import Block, Stage
from foretrain.step.passes import backward_pass, is_recomputed, kind_of, passes_by_kind
from foretrain.step.play import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecomputation:
    """Says what one layer keeps less of a micro-batch, and what it computes again in a step."""

    name: str
    saved_bytes: float
    recomputed_s: float
    """On the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """The difference that recomputation makes to a job."""

    saved_bytes: float | None
    """Of the peak of the fullest rank, with CUDA graphs of what is reserved; None for checkpoints of the
    model's own code, which is not traced without them."""
    added_s: float
    """To the step; of the model's own code, on the device."""
    layers: tuple[LayerRecomputation, ...]
    """Those that recompute."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def with_recomputation(forecast: Forecast, predictor: Predictor) -> Forecast:
    """The forecast with what its plan's recomputation saves and costs beside the same job without any."""
    job, step = forecast.job, forecast.step
    if step is None or job.workload.training.mode == "infer":
        return forecast
    if step.layout.graph.recomputes and job.plan.recompute == "none":
        return dataclasses.replace(forecast, recomputation=_of_own_code(step))
    if job.plan.recompute == "none":
        return forecast
    plan = dataclasses.replace(job.plan, recompute="none", recompute_every=1, recompute_modules=())
    kept = dataclasses.replace(job, plan=plan)
    with contextlib.suppress(ForetrainError):
        plain = predictor.predict(kept)
        if plain.step is not None and not plain.step.layout.graph.recomputes:  # its own code does not
            recomputed = Recomputation(
                saved_bytes=_held(plain) - _held(forecast),
                added_s=forecast["step_time_s"].median - plain["step_time_s"].median,
                layers=tuple(_layers(step, plain.step)),
            )
            return dataclasses.replace(forecast, recomputation=recomputed)
        if step.layout.graph.recomputes:
            return dataclasses.replace(forecast, recomputation=_of_own_code(step))
    return forecast


def _held(forecast: Forecast) -> float:
    """The peak of the fullest rank."""
    if forecast.job.workload.training.hides_pools:
        return forecast["reserved_memory_bytes"].median
    if forecast.ranks:
        return fullest_of(forecast.ranks).allocated_bytes
    return forecast["peak_memory_bytes"].median


def _of_own_code(step: Step) -> Recomputation:
    """Say what checkpoints in the model's own code do; a layer would keep what the rest of its backward pass
    reads of what it computes again."""
    layout, times = step.layout, step.layout.job.accumulation
    layers, added_s = [], 0.0
    placed = [(layout.at(stage), block) for stage in layout.stages for block in stage.blocks]
    for own, block in placed:
        calls = backward_pass(own, block)
        again = is_recomputed(layout.graph, calls.op)
        seconds = float(calls.busy_s[again].sum()) * times
        added_s = added_s + seconds
        if block.is_layer and again.any():
            saved = _read_later(layout, set(calls.op[again].tolist()))
            layers.append(LayerRecomputation(name=block.name, saved_bytes=saved, recomputed_s=seconds))
    return Recomputation(saved_bytes=None, added_s=added_s, layers=tuple(layers))


def _read_later(layout: Layout, again: set[int]) -> float:
    """Bytes that calls which run again make for those that run once."""
    ops, buffers = layout.graph.ops, layout.graph.buffers
    results = {buffer for i in again for buffer in ops[i].writes}
    last = max(buffers[buffer].dies for buffer in results) if results else 0
    later = range(min(again), min(last + 1, len(ops)))
    read = {buffer for i in later if not ops[i].recomputed for buffer in ops[i].reads}
    return float(sum(buffers[buffer].size_bytes for buffer in results & read))


def _layers(step: Step, plain: Step) -> Iterator[LayerRecomputation]:
    layout, times = step.layout, step.layout.job.accumulation
    before = {block.name: _kept(plain.layout, block) for _, block in _blocks(plain.layout)}
    passes = passes_by_kind(layout)
    for stage, block in _blocks(layout):
        _, calls = passes[kind_of(layout, stage, block)]
        again = is_recomputed(layout.graph, calls.op)
        if again.any():
            saved = before.get(block.name, 0.0) - _kept(layout, block)
            yield LayerRecomputation(
                name=block.name,
                saved_bytes=max(0.0, saved),
                recomputed_s=float(calls.busy_s[again].sum()) * times,
            )


def _blocks(layout: Layout) -> Iterator[tuple[Stage, Block]]:
    """The layers of each stage."""
    for stage in layout.stages:
        yield from ((stage, block) for block in stage.blocks if block.is_layer)


def _kept(layout: Layout, block: Block) -> float:
    return kept_bytes(layout.graph, block, layout.job.plan, layout.profile)
