"""Names the teams of ranks that communicate under a plan, and says how their members lie on nodes."""

from __future__ import annotations

from dataclasses import dataclass

from foretrain.cluster import Cluster
from foretrain.costs.topology import Team, team
from foretrain.job import Job
from foretrain.step.schedules import model_copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Teams:
    """The communicators that a rank belongs to.

    Ranks are numbered tensor first, then context, data and pipeline; for experts, those of a stage once more:
    those that share an expert first, then the expert group, then those that hold the same experts.
    """

    tensor: Team
    context: Team
    expert: Team
    expert_tensor: Team
    """Those that share each expert."""
    data: Team
    """Those that hold the same dense parameters: data x context."""
    expert_data: Team
    """Those that hold the same experts."""
    stages: Team
    """A rank and its neighbour in the pipeline."""
    ends: Team
    """Its first and its last rank."""
    beyond: Team
    """A rank and one of a stage that lies on another group of the cluster."""

    @classmethod
    def of(cls, job: Job, site: Cluster | None = None) -> Teams:
        """Name the teams of the ranks that are on a part of the cluster; None for all of it. Over nodes that
        differ they lie as on the smallest ones."""
        site = site or job.cluster
        plan, per_node = job.plan, min(group.devices_per_node for group in site.groups)
        assert plan.data is not None
        replicas, shared = plan.data * plan.context, job.expert_tensor
        of_stage, grouped = plan.tensor * replicas, plan.expert * shared
        return cls(
            tensor=team(plan.tensor, 1, per_node),
            context=team(plan.context, plan.tensor, per_node),
            expert=team(plan.expert, shared, per_node),
            expert_tensor=team(shared, 1, per_node),
            data=team(replicas * model_copies(plan), plan.tensor, per_node),
            expert_data=team(job.expert_replicas * model_copies(plan), grouped, per_node),
            stages=team(min(2, plan.pipeline), of_stage, per_node),
            ends=team(min(2, plan.pipeline), of_stage * (plan.pipeline - 1 or 1), per_node),
            beyond=Team(per_node=1, nodes=2, sharing=min(of_stage, per_node), spacing=site.nodes),
        )

    def named(self, name: str) -> Team:
        return {
            "tensor": self.tensor,
            "context": self.context,
            "expert": self.expert,
            "expert_tensor": self.expert_tensor,
        }[name]
