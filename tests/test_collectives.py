"""Collectives: no call beats its links, more bytes and more sharing never cost less, and teams lie on nodes
as ranks do."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from foretrain.cluster import Catalog, Cluster
from foretrain.costs.collectives import Collectives, Kind, Team, team
from foretrain.costs.transports import SERVER, TRANSPORTS
from foretrain.errors import InputError

KINDS = st.sampled_from(get_args(Kind))
SIZES = st.floats(0, 1e11)
COUNTS = st.integers(1, 64)
SECTIONS: dict[str, dict[str, Any]] = {
    "h100": {"node": "dgx-h100", "nodes": 64},
    "a100": {"node": "dgx-a100", "nodes": 64},
    "b200": {"node": "dgx-b200", "nodes": 64},
    "nvl72": {"node": "gb200-nvl72", "nodes": 64},
    "mi300x": {"node": "mi300x-8", "nodes": 64},
    "perlmutter": {"node": "perlmutter", "nodes": 64},
    "t4": {"node": "g4dn.12xlarge", "nodes": 64},
    "pairs": {
        "device": "a100-pcie-80gb",
        "devices_per_node": 4,
        "nodes": 64,
        "intra_node": {"kind": "nvlink-pair"},
    },
    "cpu": {"device": "cpu", "cores_per_device": 1, "devices_per_node": 8, "nodes": 64},
}
CLUSTERS = {name: Cluster.read(section, Catalog.load()) for name, section in SECTIONS.items()}
NETWORKS = {name: Collectives(cluster) for name, cluster in CLUSTERS.items()}
NAMES = st.sampled_from(sorted(CLUSTERS))


def placed(name: str, degree: int, stride: int = 1) -> Team:
    return team(degree, stride, CLUSTERS[name].devices_per_node)


def bus_bytes_per_s(name: str, members: Team, size: float = 8e9) -> float:
    return 2 * (members.size - 1) / members.size * size / NETWORKS[name].time_s("all_reduce", size, members)


# Teams


@given(degree=st.integers(1, 4096), stride=st.integers(1, 256), devices=st.integers(1, 16))
def test_a_team_holds_all_its_ranks_and_no_node_too_many(degree: int, stride: int, devices: int) -> None:
    members = team(degree, stride, devices)
    assert members.size == degree
    assert members.per_node * members.sharing <= devices


@pytest.mark.parametrize(
    ("degree", "stride", "expected"),
    [
        (8, 1, Team(per_node=8, nodes=1)),
        (16, 1, Team(per_node=8, nodes=2)),
        (4, 2, Team(per_node=4, nodes=1, sharing=2)),
        (16, 2, Team(per_node=4, nodes=4, sharing=2)),
        (16, 8, Team(per_node=1, nodes=16, sharing=8)),
        (4, 32, Team(per_node=1, nodes=4, sharing=8, spacing=4)),
        (12, 1, Team(per_node=6, nodes=2)),
    ],
)
def test_ranks_fill_nodes_one_after_another(degree: int, stride: int, expected: Team) -> None:
    assert team(degree, stride, 8) == expected


@pytest.mark.parametrize("field", ["per_node", "nodes", "sharing", "spacing"])
def test_a_team_without_members_is_refused(field: str) -> None:
    with pytest.raises(InputError, match=f"team.{field}: 0"):
        Team(**{"per_node": 2, "nodes": 2, field: 0})


# Any call


@given(NAMES, KINDS, SIZES)
def test_a_team_of_one_is_free(name: str, kind: Kind, size: float) -> None:
    assert NETWORKS[name].time_s(kind, size, Team(per_node=1, nodes=1)) == 0
    assert NETWORKS[name].traffic_bytes(kind, size, Team(per_node=1, nodes=1)) == 0


@given(NAMES, KINDS, SIZES, SIZES, COUNTS, COUNTS)
def test_more_bytes_never_cost_less(
    name: str, kind: Kind, one: float, other: float, degree: int, stride: int
) -> None:
    members = placed(name, degree, stride)
    small, large = (NETWORKS[name].time_s(kind, size, members) for size in sorted((one, other)))
    assert small <= large


@given(NAMES, KINDS, SIZES, st.integers(1, 8), st.integers(1, 64), st.integers(1, 7))
def test_more_sharing_is_never_faster(
    name: str, kind: Kind, size: float, per_node: int, nodes: int, sharing: int
) -> None:
    alone = Team(per_node=per_node, nodes=nodes, sharing=sharing)
    shared = dataclasses.replace(alone, sharing=sharing + 1)
    assert NETWORKS[name].time_s(kind, size, alone) <= NETWORKS[name].time_s(kind, size, shared) * (1 + 1e-12)


@given(NAMES, KINDS, st.lists(SIZES, min_size=1, max_size=5), COUNTS)
def test_a_column_of_sizes_costs_what_each_of_them_does(
    name: str, kind: Kind, sizes: list[float], degree: int
) -> None:
    members = placed(name, degree)
    column = NETWORKS[name].time_s(kind, np.array(sizes), members)
    assert column.tolist() == [NETWORKS[name].time_s(kind, size, members) for size in sizes]


@given(NAMES, SIZES, st.integers(2, 64))
def test_no_all_reduce_beats_the_links(name: str, size: float, degree: int) -> None:
    """Each member sends and receives the data at least once, and a node its sum."""
    members, group = placed(name, degree), CLUSTERS[name].groups[0]
    time_s = NETWORKS[name].time_s("all_reduce", size, members)
    if members.per_node > 1:
        assert time_s >= size / max(group.intra_node.bandwidth_bytes_per_s, group.device.pcie_bytes_per_s)
    if members.size > group.domain:
        assert time_s >= size / group.inter_node.bandwidth_bytes_per_s / (
            group.domain // group.devices_per_node
        )


@given(NAMES, SIZES, st.integers(2, 64))
def test_an_all_reduce_costs_at_most_its_two_halves(name: str, size: float, degree: int) -> None:
    members, network = placed(name, degree), NETWORKS[name]
    halves = network.time_s("reduce_scatter", size, members) + network.time_s("all_gather", size, members)
    assert network.time_s("all_reduce", size, members) <= halves * (1 + 1e-9)


@given(NAMES, SIZES, COUNTS)
def test_an_all_reduce_sends_what_its_two_halves_send(name: str, size: float, degree: int) -> None:
    members, network = placed(name, degree), NETWORKS[name]
    halves = network.traffic_bytes("reduce_scatter", size, members) + network.traffic_bytes(
        "all_gather", size, members
    )
    assert network.traffic_bytes("all_reduce", size, members) == pytest.approx(halves)
    assert halves <= 2 * size


def test_what_is_not_known_is_refused() -> None:
    network = NETWORKS["a100"]
    with pytest.raises(InputError, match="kind: 'gather'"):
        network.time_s("gather", 1.0, Team(per_node=2, nodes=1))  # type: ignore[call-overload]
    with pytest.raises(InputError, match="size_bytes"):
        network.time_s("send", -1.0, Team(per_node=2, nodes=1))
    with pytest.raises(InputError, match="library: 'mpi'"):
        Collectives(CLUSTERS["a100"], library="mpi")  # type: ignore[arg-type]


# Links


def test_a_send_takes_the_link_between_its_ends() -> None:
    near = NETWORKS["h100"].time_s("send", 1e9, Team(per_node=2, nodes=1))
    far = NETWORKS["h100"].time_s("send", 1e9, Team(per_node=1, nodes=2))
    assert 1e9 / 450e9 < near < 1.5e9 / 450e9
    assert 1e9 / 50e9 < far < 1.5e9 / 50e9


def test_devices_of_a_node_have_an_adapter_each() -> None:
    """Eight teams of one device per node are no slower than one, where each device has a NIC of its own."""
    alone, shared = (Team(per_node=1, nodes=8, sharing=sharing) for sharing in (1, 8))
    assert NETWORKS["h100"].time_s("all_reduce", 1e9, alone) == NETWORKS["h100"].time_s(
        "all_reduce", 1e9, shared
    )
    assert NETWORKS["t4"].time_s("all_reduce", 1e9, shared) > 7 * NETWORKS["t4"].time_s(
        "all_reduce", 1e9, alone
    )


def test_a_node_brings_all_its_adapters_into_a_ring() -> None:
    one, all_of_them = Team(per_node=1, nodes=8), Team(per_node=8, nodes=8)
    assert bus_bytes_per_s("a100", all_of_them) > 7 * bus_bytes_per_s("a100", one)


def test_a_mesh_gives_two_devices_only_the_links_between_them() -> None:
    assert bus_bytes_per_s("perlmutter", Team(per_node=4, nodes=1)) > 2.5 * bus_bytes_per_s(
        "perlmutter", Team(per_node=2, nodes=1)
    )
    assert bus_bytes_per_s("a100", Team(per_node=4, nodes=1)) == pytest.approx(
        bus_bytes_per_s("a100", Team(per_node=2, nodes=1)), rel=0.05
    )


def test_bridged_pairs_reach_each_other_by_pcie() -> None:
    assert bus_bytes_per_s("pairs", Team(per_node=2, nodes=1)) > 100e9
    assert bus_bytes_per_s("pairs", Team(per_node=4, nodes=1)) < 32e9


def test_the_switch_reduces_from_hopper_on() -> None:
    ring = {name: dataclasses.replace(transport, switch=1e-6) for name, transport in TRANSPORTS.items()}
    members = Team(per_node=8, nodes=1)
    for name, faster in {"h100": True, "b200": True, "a100": False}.items():
        without = Collectives(CLUSTERS[name], transports=ring).time_s("all_reduce", 1e9, members)
        assert (NETWORKS[name].time_s("all_reduce", 1e9, members) < without) == faster


def test_an_nvlink_domain_counts_as_one_node() -> None:
    inside, outside = Team(per_node=4, nodes=16), Team(per_node=4, nodes=16, spacing=32)
    assert NETWORKS["nvl72"].time_s("all_gather", 1e9, inside) < NETWORKS["nvl72"].time_s(
        "all_gather", 1e9, outside
    )
    pair = Team(per_node=1, nodes=2)
    assert NETWORKS["nvl72"].time_s("send", 1e9, pair) < 2e9 / 900e9
    assert NETWORKS["nvl72"].time_s("send", 1e9, dataclasses.replace(pair, spacing=18)) > 1e9 / 50e9


@pytest.mark.parametrize(
    ("degree", "stride", "per_node", "per_domain", "domains"),
    [(8, 1, 4, 8, 1), (64, 1, 4, 64, 1), (128, 1, 4, 64, 2), (16, 8, 1, 8, 2), (8, 64, 1, 1, 8)],
)
def test_teams_lie_in_domains(degree: int, stride: int, per_node: int, per_domain: int, domains: int) -> None:
    """64 trays of NVL72 are four domains of 16: ranks 64 apart have no NVLink between them."""
    found = NETWORKS["nvl72"].placement(placed("nvl72", degree, stride))
    assert (found.per_node, found.per_domain, found.domains) == (per_node, per_domain, domains)
    assert found.size == degree
    assert found.nodes_per_domain * found.per_node == per_domain


@given(*(st.integers(0, 6) for _ in range(3)))
def test_ranks_share_a_domain_where_their_numbers_say_so(degree: int, stride: int, domain: int) -> None:
    """Ranks are numbered through nodes and domains one after another."""
    members, size = team(1 << degree, 1 << stride, 4), 4 << domain
    cluster = Cluster.read({"device": "b200", "devices_per_node": 4, "nodes": 1024, "domain": size,
                            "intra_node": {"kind": "nvswitch"}})  # fmt: skip
    found = Collectives(cluster).placement(members)
    ranks = [i << stride for i in range(1 << degree)]
    assert found.domains == len({rank // size for rank in ranks})
    assert found.per_node == sum(rank < 4 for rank in ranks)


def test_a_smaller_domain_sends_more_over_the_network() -> None:
    members = team(64, 1, 4)
    times = [
        Collectives(Cluster.read({**SECTIONS["nvl72"], "domain": size})).time_s("all_to_all", 1e9, members)
        for size in (64, 32, 16, 4)
    ]
    assert times == sorted(times)
    # of 60/64 that leaves a tray of 4 with 4 adapters of 50 GB/s
    assert times[-1] > 4 * 60 / 64 * 1e9 / 200e9


def test_rates_of_a_member_are_its_link_and_its_part_of_the_adapters() -> None:
    rates = NETWORKS["nvl72"].rates(team(128, 1, 4))
    assert (rates.inside_bytes_per_s, rates.outside_bytes_per_s) == (900e9, 50e9)
    assert NETWORKS["h100"].rates(team(16, 8, 8)).outside_bytes_per_s == 50e9


def with_network(name: str, **network: Any) -> Collectives:
    return Collectives(Cluster.read({**SECTIONS[name], "inter_node": network}))


def test_a_narrow_spine_slows_what_goes_through_it() -> None:
    """All-to-alls send most of their messages above the leaf switches, rings one node's of each leaf."""
    members, narrow = team(256, 1, 8), with_network("h100", oversubscription=4, leaf_nodes=8)
    plain, worst = NETWORKS["h100"], with_network("h100", oversubscription=4)
    assert narrow.time_s("all_reduce", 1e9, members) == plain.time_s("all_reduce", 1e9, members)
    assert narrow.time_s("all_to_all", 1e9, members) > 2.5 * plain.time_s("all_to_all", 1e9, members)
    assert worst.time_s("all_reduce", 1e9, members) > 3 * plain.time_s("all_reduce", 1e9, members)
    assert narrow.time_s("all_to_all", 1e9, team(64, 1, 8)) == plain.time_s("all_to_all", 1e9, team(64, 1, 8))


def test_messages_to_another_rail_go_over_nvlink_first() -> None:
    members, fast = team(64, 1, 8), {"kind": "infiniband", "bandwidth": "40 Tb/s", "nics": 8}
    rails = with_network("h100", rails=True, **fast).time_s("all_to_all", 1e9, members)
    assert rails > 1.5 * with_network("h100", **fast).time_s("all_to_all", 1e9, members)
    gathers = [with_network("h100", rails=on).time_s("all_gather", 1e9, members) for on in (True, False)]
    assert gathers[0] == gathers[1]


def test_switches_that_add_up_halve_what_an_all_reduce_sends() -> None:
    sharp, one_each, all_of_them = with_network("h100", sharp=True), team(64, 8, 8), team(512, 1, 8)
    plain = NETWORKS["h100"].time_s("all_reduce", 1e9, one_each)
    assert sharp.time_s("all_reduce", 1e9, one_each) == pytest.approx(plain / 2, rel=0.05)
    assert sharp.time_s("all_reduce", 1e9, all_of_them) < NETWORKS["h100"].time_s(
        "all_reduce", 1e9, all_of_them
    )
    for kind in ("all_gather", "reduce_scatter"):
        assert sharp.time_s(kind, 1e9, one_each) == NETWORKS["h100"].time_s(kind, 1e9, one_each)


@pytest.mark.parametrize(
    ("name", "kind", "members", "times_us"),
    [  # of 1 KiB, 1 MiB, 32 MiB and 512 MiB: aiconfigurator's tables, NCCL 2.27 to 2.29
        ("a100", "all_reduce", 8, (22, 39, 367, 4226)),
        ("a100", "reduce_scatter", 4, (11, 21, 166, 1982)),
        ("h100", "all_reduce", 8, (16, 25, 200, 2111)),
        ("h100", "all_gather", 2, (5, 11, 93, 1039)),
        ("h100", "all_to_all", 8, (8, 16, 125, 1490)),
        ("b200", "all_reduce", 8, (25, 30, 168, 1335)),
        ("b200", "all_gather", 8, (16, 19, 114, 761)),
        ("b200", "all_to_all", 4, (10, 18, 74, 825)),
        ("nvl72", "all_reduce", 4, (16, 20, 123, 1282)),
        ("nvl72", "reduce_scatter", 2, (9, 12, 54, 657)),
    ],
)
def test_calls_in_a_node_take_what_nccl_takes(
    name: str, kind: Kind, members: int, times_us: tuple[float, ...]
) -> None:
    sizes = 1024.0 * np.array([1, 1 << 10, 32 << 10, 512 << 10])
    found = NETWORKS[name].time_s(kind, sizes, Team(per_node=members, nodes=1)) / np.array(times_us) * 1e6
    assert found.tolist() == pytest.approx([1.0] * 4, rel=0.35)
    assert found[-1] == pytest.approx(1.0, rel=0.13)


def test_trees_keep_short_messages_fast_on_thousands_of_devices() -> None:
    members = Team(per_node=8, nodes=512)
    assert NETWORKS["h100"].time_s("all_reduce", 1e3, members) < 0.2e-3
    assert NETWORKS["h100"].time_s("all_gather", 1e3, members) > 1e-3


def test_sockets_do_not_fill_a_fast_adapter() -> None:
    section = {
        "device": "a100-sxm-80gb",
        "devices_per_node": 4,
        "nodes": 2,
        "inter_node": {"kind": "ethernet", "bandwidth": "800 Gb/s", "nics": 4},
    }
    sockets = Collectives(Cluster.read(section)).time_s("all_reduce", 1e9, Team(per_node=4, nodes=2))
    rdma = NETWORKS["perlmutter"].time_s("all_reduce", 1e9, Team(per_node=4, nodes=2))
    assert sockets > 3 * rdma


@given(KINDS, SIZES, st.integers(2, 64))
def test_a_mixed_cluster_is_as_slow_as_its_slowest_group(kind: Kind, size: float, degree: int) -> None:
    mixed = Collectives(Cluster.read({"groups": [SECTIONS["h100"], SECTIONS["a100"]]}))
    members = placed("h100", degree)
    slowest = max(NETWORKS[name].time_s(kind, size, members) for name in ("h100", "a100"))
    assert mixed.time_s(kind, size, members) == slowest


def test_without_peer_access_messages_pass_host_memory() -> None:
    def rate(device: str, count: int, kind: str = "pcie") -> float:
        section = {"device": device, "devices_per_node": count, "intra_node": {"kind": kind}}
        network = Collectives(Cluster.read(section))
        return 2 * (count - 1) / count * 1e9 / network.time_s("all_reduce", 1e9, team(count, 1, count))

    assert rate("rtx-3090", 2) < 4.1e9 < 20e9 < rate("rtx-a6000", 2)
    assert rate("rtx-3090", 2, "nvlink-pair") > 20e9
    assert rate("rtx-3090", 4, "nvlink-pair") == pytest.approx(rate("rtx-3090", 4))
    notes = Cluster.read({"device": "rtx-3090", "devices_per_node": 2}).assumptions
    assert any("no peer access" in note for note in notes)


# Parameter servers


@given(NAMES, SIZES, COUNTS, st.integers(1, 16), st.integers(1, 32))
def test_more_workers_never_cost_a_server_less(
    name: str, size: float, workers: int, servers: int, nodes: int
) -> None:
    assume(nodes <= workers + servers)
    network = NETWORKS[name]
    few, many = (
        network.parameter_server_s(size, workers=count, servers=servers, nodes=nodes)
        for count in (workers, workers + 1)
    )
    assert few <= many * (1 + 1e-12)


def test_a_slow_link_of_the_server_decides() -> None:
    section = {
        **SECTIONS["cpu"],
        "devices_per_node": 1,
        "inter_node": {"kind": "ethernet", "bandwidth": "1 Gb/s"},
    }
    network, size, workers = Collectives(Cluster.read(section)), 1e8, 4
    time_s = network.parameter_server_s(size, workers=workers, servers=1, nodes=5)
    assert time_s == pytest.approx(2 * workers * size / 0.125e9, rel=0.1)


def test_servers_divide_the_work() -> None:
    one, four = (NETWORKS["cpu"].parameter_server_s(1e9, workers=8, servers=servers) for servers in (1, 4))
    assert four < one / 2
    assert one > 2 * 8 * 1e9 / SERVER.process_bytes_per_s


def test_every_constant_says_where_it_comes_from() -> None:
    assert all(transport.source for transport in TRANSPORTS.values())
    assert SERVER.source
