"""Ranks on groups that differ: where stages lie, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from foretrain.errors import InputError
from foretrain.placing import group_shares, group_sizes, stage_groups
from planning import MIXTRAL, mixed

FAST, SLOW = "h100-sxm-80gb", "l4"


def test_stages_lie_on_groups_in_their_order() -> None:
    job = mixed((FAST, 4, 1), (SLOW, 2, 2), plan={"pipeline": 4})
    assert stage_groups(job.cluster, job.plan) == (0, 0, 1, 1)
    uneven = mixed((SLOW, 4, 1), (FAST, 4, 3), plan={"pipeline": 4})
    assert stage_groups(uneven.cluster, uneven.plan) == (0, 1, 1, 1)


def test_groups_alike_that_follow_one_another_are_one() -> None:
    cluster = mixed((FAST, 4, 1), (FAST, 4, 2), (SLOW, 4, 1)).cluster
    assert group_sizes(cluster) == (12, 4)
    assert group_shares(cluster) == (0.75, 0.25)
    apart = mixed((FAST, 4, 1), (SLOW, 4, 1), (FAST, 4, 1), global_batch=12).cluster
    assert group_sizes(apart) == (4, 4, 4)
    assert [group.device.name for group in apart.distinct_groups] == [FAST, SLOW]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"tensor": 8}, r"plan\.tensor: teams of tensor 8 x context 1 ranks .*: 8 does not divide 4$"),
        ({"tensor": 4, "context": 2}, r"plan\.tensor: teams of tensor 4 x context 2 ranks"),
        ({"expert": 8}, r"plan\.expert: teams of expert 8 x expert_tensor 1 ranks"),
        ({"pipeline": 2, "data": 6}, r"plan\.pipeline: stages of data 6 .*: 6 does not divide 4$"),
        ({"pipeline": 3, "schedule": "dualpipe"}, r"plan\.schedule: 'dualpipe' .* needs groups alike"),
    ],
)
def test_teams_and_stages_over_groups_that_differ_are_refused(plan: dict[str, Any], message: str) -> None:
    nodes = 2 if "pipeline" in plan else 1
    with pytest.raises(InputError, match=message) as caught:
        mixed((FAST, 4, 1), (SLOW, 4, nodes), config=MIXTRAL, global_batch=48, plan=plan)
    assert "\n" not in str(caught.value)


def test_what_is_refused_on_groups_that_differ_is_not_on_groups_alike() -> None:
    mixed((FAST, 4, 1), (FAST, 4, 1), plan={"tensor": 8})
    mixed((FAST, 4, 1), (FAST, 4, 2), plan={"pipeline": 2, "data": 6}, global_batch=12)
