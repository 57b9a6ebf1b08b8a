"""Lays a job out on its ranks: the graph of one, stages and teams, and what each call costs on host, device
and network."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from foretrain.cluster import Cluster
from foretrain.costs.base import CostModel, HostModel
from foretrain.costs.collectives import Collectives
from foretrain.costs.compiled_host import CompiledHost
from foretrain.graph import OpGraph
from foretrain.job import Job
from foretrain.recent import Fresh
from foretrain.step.calls import Calls, Rank, cost_calls, speeds
from foretrain.step.dealing import Dealt
from foretrain.step.frameworks import Profile, profile
from foretrain.step.graph import as_compiled, step_graph
from foretrain.step.messages import network_of
from foretrain.step.partition import Stage, stages
from foretrain.step.recomputed_modules import check_modules
from foretrain.step.teams import Teams
from foretrain.step.tuning import Tuning

_OF_PROCESSORS = 0.25
"""Processors that collectives take of registered buffers, over those of others: 6 or fewer instead of 16 to
24 (NVIDIA on NCCL 2.27)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """A job on its ranks, costed: what its step is played from."""

    job: Job
    graph: OpGraph
    profile: Profile
    stages: tuple[Stage, ...]
    teams: Teams
    calls: Calls
    network: Collectives
    step_overhead_s: float
    """Host time per step that belongs to no operator."""
    host_speed: float = 1.0
    """How much faster the host is than the one that figures come from."""
    tuning: Tuning = field(default_factory=Tuning)
    shares: tuple[float, ...] = ()
    """Of an even part of the batch, what a device of each group gets where it is split by speed."""
    part: Cluster | None = None
    """The group that its ranks are of, where stages lie on groups that differ; None for all of the
    cluster."""
    by_group: tuple[Layout, ...] = ()
    """Of a pipeline over groups that differ: the same as the ranks of each group see it."""
    dealt: Dealt | None = None
    """How layers were dealt out by the speed of such stages."""
    passes: Fresh = field(default_factory=Fresh, init=False, repr=False)
    """What ``step/passes.py`` has worked out of it."""

    @property
    def site(self) -> Cluster:
        """Name the cluster that its ranks are on."""
        return self.part or self.job.cluster

    def at(self, stage: Stage) -> Layout:
        """The layout as the ranks of a stage see it: calls, teams, network and host of their group."""
        return self.by_group[stage.group] if self.by_group else self

    def dealt_out(self, stages: tuple[Stage, ...], dealt: Dealt) -> Layout:
        """Lay other layers on its stages."""
        views = tuple(dataclasses.replace(view, stages=stages) for view in self.by_group)
        return dataclasses.replace(self, stages=stages, by_group=views, dealt=dealt)

    def of_job(self, job: Job) -> Layout:
        """Lay out a job that differs in its length alone."""
        views = tuple(view.of_job(job) for view in self.by_group)
        other = dataclasses.replace(self, job=job, by_group=views)
        other.passes.update(self.passes)
        return other

    @property
    def slowdown(self) -> float:
        """Give the share of hidden communication's time that it takes from the computation beside it."""
        return self.tuning.slowdown * (_OF_PROCESSORS if self.job.plan.registered_buffers else 1.0)

    def tuned(self, tuning: Tuning) -> Layout:
        """Apply factors; to be called on a layout without any."""
        if tuning == Tuning():
            return self
        overhead_s = self.step_overhead_s * tuning.host + tuning.step_s
        return dataclasses.replace(
            self,
            calls=self.calls.tuned(tuning),
            step_overhead_s=overhead_s,
            tuning=tuning,
            by_group=tuple(view.tuned(tuning) for view in self.by_group),
        )


def lay_out(
    job: Job, costs: CostModel, host: HostModel, *, hosts: Sequence[HostModel] = (), gap_s: float = 0.0
) -> Layout:
    """Capture, partition and cost a job; what it cannot be split into is an error that names the numbers.

    ``hosts`` are those of the cluster's distinct groups where they differ. Layers are dealt out as the plan
    or its framework says; ``step/balance.py`` deals them out by speed.
    """
    job = as_compiled(job)
    graph = step_graph(job)
    check_modules(job.plan, graph)
    dealt, groups = stages(job, graph, profile(job)), job.cluster.distinct_groups
    if len(groups) == 1 or job.plan.pipeline == 1:
        return _on(job, graph, dealt, costs, host, None, gap_s)
    views = tuple(
        _on(job, graph, dealt, costs, own, job.cluster.alone(group), gap_s)
        for group, own in zip(groups, hosts or [host] * len(groups), strict=True)
    )
    slowest = max(views, key=lambda view: float(view.calls.device_s.sum()))
    overhead_s = max(view.step_overhead_s for view in views)
    return dataclasses.replace(slowest, part=None, by_group=views, step_overhead_s=overhead_s)


def _on(
    job: Job,
    graph: OpGraph,
    dealt: tuple[Stage, ...],
    costs: CostModel,
    host: HostModel,
    part: Cluster | None,
    gap_s: float,
) -> Layout:
    """The layout as ranks on a part of the cluster see it, or all of its ranks."""
    habits, site = profile(job), part or job.cluster
    host = _compiled_host(job, graph, host) if job.workload.training.compile else host
    teams = Teams.of(job, site)
    rank = Rank.of(job, graph, costs, host, teams, site, gap_s)
    splits = part is None and job.balance == "speed"
    return Layout(
        job=job,
        graph=graph,
        profile=habits,
        stages=dealt,
        teams=teams,
        calls=cost_calls(rank),
        network=network_of(site),
        step_overhead_s=host.step_overhead_s + habits.step_s,
        host_speed=host.speed / habits.host,
        shares=tuple(speeds(job, site, graph, costs)[1]) if splits else (),
        part=part,
    )


def _compiled_host(job: Job, graph: OpGraph, host: HostModel) -> HostModel:
    training = job.workload.training
    stacked = graph.stack and training.mode == "train"
    trained = sum(weight.trainable for weight in graph.weights) if stacked else 0
    return CompiledHost(
        plain=host,
        parameters=trained or sum(buffer.category == "gradients" for buffer in graph.buffers),
        mode=training.mode,
        micro_batches=job.accumulation,
        graphs=training.cuda_graphs != "none",
    )


def memory_rate(layout: Layout) -> float:
    return min(group.device.memory_bytes_per_s for group in layout.site.groups)
