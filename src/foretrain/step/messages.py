"""Costs the collectives that a graph holds: what each sends, and how long the network takes for it."""

from __future__ import annotations

import functools

from foretrain.cluster import Cluster
from foretrain.costs.collectives import Collectives, Kind, Team
from foretrain.costs.dispatch import KERNELS, Direction, exchange_s
from foretrain.dispatching import choices_of, distinct
from foretrain.graph import Operator, TensorSpec
from foretrain.plan import Choice, Dispatcher
from foretrain.step.teams import Teams

KINDS: dict[str, Kind] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "send_recv": "send",
}
"""What the collectives of a graph are to the network."""

network_of = functools.lru_cache(maxsize=64)(Collectives)
"""The network of a cluster, or of a group of it."""


def on_efa(site: Cluster) -> bool:
    """Whether nodes are joined by EFA, where the stalls of frameworks that are known were seen."""
    return any(group.inter_node.kind == "efa" for group in site.groups)


def collective_s(
    operator: Operator,
    network: Collectives,
    teams: Teams,
    tensor_message_s: float = 0.0,
    dispatcher: Dispatcher = "alltoall",
    routing: Choice = "random",
) -> float:
    """Time one call of a collective that the graph holds."""
    members = teams.named(operator.overload)
    if dispatcher in KERNELS and operator.name == "all_to_all" and operator.overload == "expert":
        return _token_exchange_s(operator, network, members, dispatcher, routing)
    least = tensor_message_s * members.size if operator.overload == "tensor" and members.nodes > 1 else 0.0
    return max(least, network.time_s(KINDS[operator.name], message_bytes(operator), members))


_LEAST_WIDTH = 256
"""Of what counts as a token: narrower rows are weights that travel along."""


def _token_exchange_s(
    operator: Operator, network: Collectives, members: Team, dispatcher: Dispatcher, routing: Choice
) -> float:
    """Time the exchange of tokens with their experts, where more rows come out than go in, or back. DeepEP
    gives a row for each rank that a token goes to, HybridEP for each expert."""
    given, taken = operator.inputs[0], operator.outputs[0]
    if len(given.shape) < 2 or given.shape[-1] < _LEAST_WIDTH:
        return 0.0
    placed, rates = network.placement(members), network.rates(members)
    tokens, rows = sorted((given.numel // given.shape[-1], taken.numel // taken.shape[-1]))
    copies = rows / tokens if dispatcher == "deepep" else distinct(rows / tokens, placed.size)
    if routing == "round-robin":
        reached = 1 + (copies - 1) / placed.per_domain
    else:
        reached = distinct(choices_of(copies, placed.size), placed.domains)
    times = [
        exchange_s(
            dispatcher,
            direction,
            tokens=tokens,
            copies=copies,
            reached=min(reached, placed.domains),
            width_bytes=given.size_bytes / given.numel * given.shape[-1],
            near=placed.per_domain,
            domains=placed.domains,
            inside_bytes_per_s=rates.inside_bytes_per_s,
            outside_bytes_per_s=rates.outside_bytes_per_s,
        )
        for direction in _directions(given, taken)
    ]
    return sum(times) / len(times)


def _directions(given: TensorSpec, taken: TensorSpec) -> tuple[Direction, ...]:
    """Tell which way tokens go; either, half of the time, where each goes to one rank alone."""
    if given.numel == taken.numel:
        return ("dispatch", "combine")
    return ("dispatch",) if taken.numel > given.numel else ("combine",)


def message_bytes(operator: Operator) -> float:
    """The size of a collective as ``Collectives`` counts it; of an all-to-all, the larger of what goes out
    and comes in."""
    inputs, outputs = (
        sum(spec.size_bytes for spec in specs) for specs in (operator.inputs, operator.outputs)
    )
    if operator.name == "all_to_all":
        return float(max(inputs, outputs))
    return float(outputs if operator.name == "all_gather" else inputs)
