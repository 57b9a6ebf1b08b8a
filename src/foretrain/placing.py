"""Places the ranks of a plan on the groups of a cluster, and refuses teams and stages that lie on several."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from foretrain.cluster import Cluster
from foretrain.errors import InputError
from foretrain.plan import Plan


def stage_groups(cluster: Cluster, plan: Plan) -> tuple[int, ...]:
    """Say which of the cluster's distinct groups each stage of a pipeline lies on: ranks are numbered through
    the groups in their order, those of a stage one after another."""
    if len(cluster.groups) == 1 or plan.pipeline == 1:
        return (0,) * plan.pipeline
    ranks = ranks_of_stage(plan)
    return tuple(group for group, devices in _runs(cluster) for _ in range(devices // ranks))


def group_sizes(cluster: Cluster) -> tuple[int, ...]:
    """Devices of each group, those alike that follow one another together: what the ranks of a team or of a
    stage must divide."""
    return tuple(devices for _, devices in _runs(cluster))


def group_shares(cluster: Cluster) -> tuple[float, ...]:
    """Give the share of the cluster's devices that each of its distinct groups has."""
    runs = _runs(cluster)
    counts = [sum(size for own, size in runs if own == kind) for kind in range(len(cluster.distinct_groups))]
    return tuple(count / cluster.world_size for count in counts)


def ranks_of_stage(plan: Plan) -> int:
    return (plan.data or 1) * plan.tensor * plan.context


def check_groups(cluster: Cluster, plan: Plan, expert_tensor: int) -> None:
    """Refuse a plan one of whose teams or stages would lie on groups that differ."""
    if len(cluster.groups) == 1 or len(runs := _runs(cluster)) == 1:
        return
    for field, words, ranks in _units(plan, expert_tensor):
        for _, devices in runs:
            if devices % ranks:
                sizes = " and ".join(f"{one.world_size} x {one.device.name}" for one in cluster.groups)
                raise InputError(
                    f"plan.{field}: {words} would lie on groups that differ ({sizes}): {ranks} does not "
                    f"divide {devices}"
                )
    if plan.schedule == "dualpipe" and plan.pipeline > 1:
        raise InputError(
            "plan.schedule: 'dualpipe' has each part of the model on two stages, one from either end, and "
            "needs groups alike"
        )


def _units(plan: Plan, expert_tensor: int) -> Iterator[tuple[str, str, int]]:
    """List what must lie on groups alike: the field that says so, words, and how many ranks it is."""
    if plan.pipeline > 1:
        terms = f"data {plan.data} x tensor {plan.tensor} x context {plan.context}"
        yield "pipeline", f"stages of {terms} ranks", ranks_of_stage(plan)
        return
    team, experts = plan.tensor * plan.context, plan.expert * expert_tensor
    yield "tensor", f"teams of tensor {plan.tensor} x context {plan.context} ranks", team
    yield "expert", f"teams of expert {plan.expert} x expert_tensor {expert_tensor} ranks", experts


def _runs(cluster: Cluster) -> list[tuple[int, int]]:
    """Groups alike that follow one another: which of the distinct ones they are, and their devices."""
    distinct = cluster.distinct_groups
    kinds = (next(i for i, one in enumerate(distinct) if one.is_like(group)) for group in cluster.groups)
    runs = itertools.groupby(zip(kinds, cluster.groups, strict=True), key=lambda pair: pair[0])
    return [(kind, sum(group.world_size for _, group in alike)) for kind, alike in runs]
