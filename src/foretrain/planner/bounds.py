"""Bounds plans from below in microseconds: their time by what ranks must compute and issue, their memory by
states and saved activations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretrain.job import Job
from foretrain.placing import group_shares
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
from foretrain.step.spans import Column

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
    and what the host issues. Of stages on groups that differ, as many times what the busiest one takes at
    least."""
    through_s: dict[str, float]
    """The same through all stages one after another, each block where it takes least."""
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
    over_groups: bool = False
    """Whether stages lie on groups that differ, and so have layers by their speed."""

    @classmethod
    def of(cls, layout: Layout, recomputes: Sequence[Recompute]) -> Bounds:
        """Read the bounds off the layout of any plan of the cut that shards nothing."""
        job, graph = layout.job, layout.graph
        everything = Stage(index=0, chunks=(blocks(graph),))
        ranks = job.cluster.world_size if job.trains else 1
        times = {one: _times(_recomputing(layout, one)) for one in recomputes}
        return cls(
            job=job,
            passes_s={one: both[0] for one, both in times.items()},
            through_s={one: both[1] for one, both in times.items()},
            kept_bytes={one: _kept_bytes(_recomputing(layout, one)) for one in recomputes},
            layers=0 if graph.stack is None else graph.stack.layers,
            parameters=held(job, everything, 0),
            trained=held(job, everything, 0, trained=True),
            sizes=state_sizes(job, graph, layout.profile),
            weight_bytes=weight_bytes(graph),
            straggling=1.0 + straggling(ranks),
            over_groups=bool(layout.by_group),
        )

    def least_s(self, plan: Plan) -> float:
        """Bound the time of a step from below: the busiest stage works on every micro-batch for its part of
        the passes or more, and the first and the last of them go through all other stages by themselves."""
        stage_s = self.passes_s[plan.recompute] / plan.pipeline * model_copies(plan)
        chunks = plan.virtual_stages or (1 if plan.schedule in ("gpipe", "1f1b") else _MOST_CHUNKS)
        others_s = max(0.0, self.through_s[plan.recompute] - stage_s)
        filling_s = 0.0 if plan.schedule in SPLIT else others_s / chunks
        passes = self._passes(plan) / model_copies(plan)
        return (passes * stage_s + filling_s) * self.straggling * _ROUNDING

    def least_bytes(self, plan: Plan) -> float:
        """Bound the memory of the fullest rank from below, by the mean of all stages: weights, gradients and
        optimizer state, and what layers keep of the micro-batches that are under way. Of stages on groups
        that differ nobody knows which have most layers: each keeps one micro-batch at least."""
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
        on_first = 1 if self.over_groups else min(self._passes(plan), plan.pipeline)
        under_way = (on_first + 1) / 2  # 1 on the last
        return (states + under_way * kept * self.layers) / stages * _ROUNDING

    def least_of_all_bytes(self, *, offload: bool) -> float:
        """Bound the memory of a rank under any plan of any cut: weights, gradients and optimizer state of the
        whole model, as if all of them were dealt out over all devices."""
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
    job = dataclasses.replace(layout.job, plan=dataclasses.replace(layout.job.plan, recompute=recompute))
    views = tuple(dataclasses.replace(view, job=job) for view in layout.by_group)
    return dataclasses.replace(layout, job=job, by_group=views)


def _times(layout: Layout) -> tuple[float, float]:
    """Time a micro-batch: as many times what the busiest stage takes at least as there are stages, and what
    it takes through all of them; on device and host, the longer one."""
    groups = range(len(layout.by_group) or 1)
    whole = tuple(Stage(index=i, chunks=(blocks(layout.graph),), group=i) for i in groups)
    passes = passes_by_kind(dataclasses.replace(layout, stages=whole))
    spans = [
        [[one.span for one in passes[kind_of(layout, stage, block)]] for block in stage.blocks]
        for stage in whole
    ]
    both = []
    for name in ("device_s", "host_s"):
        seconds = np.array([[sum(getattr(span, name) for span in own) for own in group] for group in spans])
        both.append((_busiest_s(layout, seconds), float(seconds.min(axis=0).sum())))
    return max(busiest for busiest, _ in both), max(through for _, through in both)


def _busiest_s(layout: Layout, seconds: Column) -> float:
    """Time the busiest of the stages on these groups, by the seconds that each takes for each block: however
    blocks are dealt out, one of the stages takes as long as all would if each had work by its speed and no
    block were slower on its group beside others than the rest."""
    if len(seconds) == 1:
        return float(seconds.sum())
    work = seconds.mean(axis=0)
    slower = np.array([(own[work > 0] / work[work > 0]).min(initial=np.inf) for own in seconds])
    shares = group_shares(layout.job.cluster)
    return float(work.sum() / sum(share / each for share, each in zip(shares, slower, strict=True)))


def _kept_bytes(layout: Layout) -> float:
    plan, profile = layout.job.plan, layout.profile
    layers = [block for block in blocks(layout.graph) if block.is_layer]
    return min(kept_bytes(layout.graph, block, plan, profile) for block in layers) if layers else 0.0
