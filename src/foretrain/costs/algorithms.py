"""Gives what each algorithm of a collective puts on the links: bytes inside a node and between nodes, and the
messages that follow one another."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from foretrain.costs.transports import Library, Way
from foretrain.errors import unknown

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]

_MESSAGES_AT_ONCE = 8
"""Peers that a member of an NCCL all-to-all serves at a time."""
_SWITCH_HOPS = 25
"""What setting up the switch takes, in hops of NVLink: NCCL's tuning counts 25 us."""
_UP_AND_DOWN = 2
"""Messages that follow one another between a node and the top of the network's tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Says what an algorithm moves, as multiples of the call's size, and the messages that follow one
    another."""

    inside: float
    """Sent by each member over the links inside a node."""
    outside: float
    """Sent by the team's members on a node, together, over the network."""
    hops_inside: float
    hops_outside: float
    way: Way = "ring"
    own: float = 0.0
    """Part of the size that each member keeps, and copies."""
    to_all: bool = False
    """Whether a node's messages go to all others alike, not to a neighbour."""
    reduces: Literal["by members", "in switches", "in the network"] = "by members"
    one_way: bool = False
    """Whether each end only sends or only receives: no pipeline of members."""


Algorithm = Callable[[int, int], Load]
"""Given the members on each node and the number of nodes."""


def _around(times: int) -> Algorithm:
    """A ring gone round once (all-gather, reduce-scatter) or twice (all-reduce); it leaves each node once."""

    def load(per_node: int, nodes: int) -> Load:
        size = per_node * nodes
        share = times * (size - 1) / size
        return Load(
            inside=share,
            outside=share,
            hops_inside=times * (size - nodes),
            hops_outside=times * (nodes - 1),
            own=1 / size,
        )

    return load


def _tree(per_node: int, nodes: int) -> Load:
    """Two binary trees of nodes, each for half of the data, up and down (Sanders et al. 2009); the members of
    a node are a chain of each."""
    return Load(inside=2.0, outside=2.0, hops_inside=2 * (per_node - 1), hops_outside=2 * math.log2(nodes))


def _in_switch(per_node: int, nodes: int) -> Load:
    """NVLS: the switch adds up what members send once and hands all of them the sum; trees between nodes."""
    return dataclasses.replace(
        _tree(per_node, nodes),
        inside=1.0,
        hops_inside=_SWITCH_HOPS,
        way="switch",
        reduces="in switches",
    )


def _in_network(per_node: int, nodes: int) -> Load:
    """SHARP: switches of the network add up what each node sends once and hand all of them the sum; inside
    a node rings go round before and after it (NCCL's CollNet)."""
    inside = _around(2)(per_node, 1)
    return dataclasses.replace(inside, outside=1.0, hops_outside=_UP_AND_DOWN, reduces="in the network")


def _in_both(per_node: int, nodes: int) -> Load:
    """Add up in NVSwitch and in the switches of the network."""
    load = _in_switch(per_node, nodes)
    return dataclasses.replace(load, outside=1.0, hops_outside=_UP_AND_DOWN, reduces="in the network")


def _chain(per_node: int, nodes: int) -> Load:
    """A ring that passes the whole message on."""
    return Load(inside=1.0, outside=1.0, hops_inside=per_node * nodes - nodes, hops_outside=nodes - 1)


def _binomial(per_node: int, nodes: int) -> Load:
    """Whole messages to twice as many members each round."""
    inside, outside = math.ceil(math.log2(per_node)), math.ceil(math.log2(nodes))
    return Load(inside=inside, outside=outside, hops_inside=inside, hops_outside=outside)


def _pairwise(per_node: int, nodes: int) -> Load:
    """A message from each member to every other."""
    size = per_node * nodes
    return Load(
        inside=(per_node - 1) / size,
        outside=per_node * (size - per_node) / size,
        hops_inside=math.ceil((per_node - 1) / _MESSAGES_AT_ONCE),
        hops_outside=math.ceil((size - per_node) / _MESSAGES_AT_ONCE),
        way="exchange",
        own=1 / size,
        to_all=True,
    )


def by_rail(load: Load, per_node: int, nodes: int) -> Load:
    """Send what is for another rail to the member beside it first (NCCL's PXN), where adapters reach those of
    their own rail alone."""
    if not load.to_all or nodes == 1:
        return load
    detour = (nodes - 1) / nodes * (per_node - 1) / per_node
    return dataclasses.replace(load, inside=load.inside + detour)


def _message(per_node: int, nodes: int) -> Load:
    """Send one message from one member to another."""
    near, far = float(nodes == 1), float(nodes > 1)
    return Load(inside=near, outside=far, hops_inside=near, hops_outside=far, way="pair", one_way=True)


_COMMON: dict[Kind, tuple[Algorithm, ...]] = {
    "all_gather": (_around(1),),
    "reduce_scatter": (_around(1),),
    "all_to_all": (_pairwise,),
    "send": (_message,),
}
_ALGORITHMS: dict[Library, dict[Kind, tuple[Algorithm, ...]]] = {
    "nccl": {
        **_COMMON,
        "all_reduce": (_around(2), _tree, _in_switch, _in_network, _in_both),
        "broadcast": (_chain,),
    },
    "gloo": {**_COMMON, "all_reduce": (_around(2),), "broadcast": (_binomial,)},
}


def algorithms(library: Library, kind: Kind) -> tuple[Algorithm, ...]:
    if kind not in get_args(Kind):
        raise unknown("kind", kind, get_args(Kind))
    return _ALGORITHMS[library][kind]


def traffic(kind: Kind, size: int) -> float:
    """Give the bytes that one of ``size`` members sends, on average, as a multiple of the call's size."""
    return _TRAFFIC[kind](size)


_TRAFFIC: dict[Kind, Callable[[int], float]] = {
    "all_reduce": lambda size: 2 * (size - 1) / size,
    "all_gather": lambda size: (size - 1) / size,
    "reduce_scatter": lambda size: (size - 1) / size,
    "all_to_all": lambda size: (size - 1) / size,
    "broadcast": lambda size: (size - 1) / size,
    "send": lambda size: 1.0,
}
