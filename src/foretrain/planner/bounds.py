"""Bounds plans from below in microseconds: their time by what ranks must compute and issue, their memory by
states and saved activations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from foretrain.job import Job
from foretrain.plan import Plan, Recompute
from foretrain.step.block_memory import kept_bytes
from foretrain.step.held_states import (
    SHARDS_GRADIENTS,
    SHARDS_STATE,
    Held,
    Sizes,
    held,
    state_sizes,
    weight_bytes,
)
from foretrain.step.layout import Layout
from foretrain.step.partition import Stage, blocks
from foretrain.step.passes import kind_of, passes_by_kind
from foretrain.step.play import straggling
from foretrain.step.schedules import SPLIT, model_copies

_ROUNDING = 1.0 - 1e-9
_DEALT_OUT = 0.95
"""Of the parameters that ranks of a tensor team hold together, those that are not held by each of them."""
_MOST_CHUNKS = 8
"""That a rank of an interleaved pipeline has where the plan does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Least times and memory of the plans of one cut on one cluster."""

    job: Job
    """With any of these plans."""
    passes_s: dict[str, float]
    """Of a micro-batch through the whole model, by what is recomputed: the longer of what the device computes
    and what the host issues."""
    kept_bytes: dict[str, float]
    """Of a layer and micro-batch, from its forward to its backward pass, at least; by the same."""
    layers: int
    """Alike, that a pipeline deals out; 0 where its blocks differ."""
    parameters: Held
    """Of the whole model, as the cut leaves them on a rank."""
    trained: Held
    """Those of them that have gradients."""
    sizes: Sizes
    weight_bytes: int
    straggling: float
    """The wait for the slowest rank, as a factor."""

    @classmethod
    def of(cls, layout: Layout, recomputes: Sequence[Recompute]) -> Bounds:
        """From the layout of any plan of the cut that shards nothing."""
        job, graph = layout.job, layout.graph
        everything = Stage(index=0, chunks=(blocks(graph),))
        ranks = job.cluster.world_size if job.trains else 1
        return cls(
            job=job,
            passes_s={one: _passes_s(_recomputing(layout, one)) for one in recomputes},
            kept_bytes={one: _kept_bytes(_recomputing(layout, one)) for one in recomputes},
            layers=0 if graph.stack is None else graph.stack.layers,
            parameters=held(job, everything, 0),
            trained=held(job, everything, 0, trained=True),
            sizes=state_sizes(job, graph, layout.profile),
            weight_bytes=weight_bytes(graph),
            straggling=1.0 + straggling(ranks),
        )

    def least_s(self, plan: Plan) -> float:
        """Of a step: the busiest stage works on every micro-batch for its part of the passes or more, and the
        first and the last of them go through all other stages by themselves."""
        stage_s = self.passes_s[plan.recompute] / plan.pipeline * model_copies(plan)
        chunks = plan.virtual_stages or (1 if plan.schedule in ("gpipe", "1f1b") else _MOST_CHUNKS)
        filling = 0.0 if plan.schedule in SPLIT else (plan.pipeline - 1) / chunks
        passes = self._passes(plan) / model_copies(plan)
        return (passes + filling) * stage_s * self.straggling * _ROUNDING

    def least_bytes(self, plan: Plan) -> float:
        """Of the fullest rank, by the mean of all stages: weights, gradients and optimizer state, and what
        layers keep of the micro-batches that are under way."""
        job = dataclasses.replace(self.job, plan=plan)
        copies = model_copies(plan)
        together = (plan.data or 1) * plan.context * copies
        own, trained = (
            dataclasses.replace(
                held,
                replicas=max(1, together // plan.replicate),
                expert_replicas=max(1, job.expert_replicas * copies // plan.replicate),
            )
            for held in (self.parameters, self.trained)
        )
        states = self.weight_bytes * own.share(sharded=plan.shard == "zero3")
        if job.trains:
            states += self.sizes.gradient * trained.share(sharded=plan.shard in SHARDS_GRADIENTS)
            if not plan.offload:
                states += self.sizes.state * trained.share(sharded=plan.shard in SHARDS_STATE)
        kept = 0.0 if plan.offload_activations or not job.trains else self.kept_bytes[plan.recompute]
        stages = plan.pipeline / copies
        under_way = (min(self._passes(plan), plan.pipeline) + 1) / 2  # p on the first stage, 1 on the last
        return (states + under_way * kept * self.layers) / stages * _ROUNDING

    def least_of_all_bytes(self, *, offload: bool) -> float:
        """Of a rank under any plan of any cut: weights, gradients and optimizer state of the whole model, as
        if all of them were dealt out over all devices."""
        plan = self.job.plan
        held, trained = (
            one.dense * plan.tensor + one.experts * plan.expert * self.job.expert_tensor
            for one in (self.parameters, self.trained)
        )
        whole = held * self.weight_bytes
        if self.job.trains:
            whole += trained * (self.sizes.gradient + (0.0 if offload else self.sizes.state))
        return whole / self.job.cluster.world_size * _DEALT_OUT

    def _passes(self, plan: Plan) -> int:
        """Micro-batches of a step."""
        return self.job.workload.training.global_batch // ((plan.data or 1) * (plan.micro_batch or 1))


def _recomputing(layout: Layout, recompute: Recompute) -> Layout:
    plan = dataclasses.replace(layout.job.plan, recompute=recompute)
    return dataclasses.replace(layout, job=dataclasses.replace(layout.job, plan=plan))


def _passes_s(layout: Layout) -> float:
    passes = passes_by_kind(layout)
    spans = [one.span for block in blocks(layout.graph) for one in passes[kind_of(layout, block)]]
    return max(sum(span.device_s for span in spans), sum(span.host_s for span in spans))


def _kept_bytes(layout: Layout) -> float:
    plan, profile = layout.job.plan, layout.profile
    layers = [block for block in blocks(layout.graph) if block.is_layer]
    return min(kept_bytes(layout.graph, block, plan, profile) for block in layers) if layers else 0.0
