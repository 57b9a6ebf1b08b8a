"""Tests clusters: what is left out is filled in and said, impossible ones are refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.catalog.hosts import PARTS, REFERENCE, Host, HostProfile
from foretrain.cluster import Catalog, Cluster
from foretrain.errors import InputError, UnsupportedJob

CATALOG = Catalog()


def read(**section: Any) -> Cluster:
    return Cluster.read(section, CATALOG)


LINKS_IN_NODE = st.sampled_from(["nvswitch", "NVLink mesh", "pcie", "infinity-fabric"])
NETWORKS = st.sampled_from(["infiniband", "roce", "efa", "ethernet"])
RATES = st.floats(1e8, 1e12) | st.sampled_from(["400 Gb/s", "900 GB/s", "25 GB/s", "100 kb/s"])


FABRIC: dict[str, st.SearchStrategy[Any]] = {
    "rails": st.booleans(), "leaf_nodes": st.integers(1, 64), "oversubscription": st.floats(1, 8),
}  # fmt: skip


def links(kinds: st.SearchStrategy[str], **fabric: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    table = {"kind": kinds, "latency": st.floats(0, 1e-3) | st.just("5 us"), "nics": st.integers(1, 16)}
    return RATES | st.fixed_dictionaries({"bandwidth": RATES}, optional={**table, **fabric})


LINKS = {"intra_node": links(LINKS_IN_NODE), "inter_node": links(NETWORKS, **FABRIC)}
GPUS = st.sampled_from([name for name in CATALOG.names("devices") if name != "cpu"] + ["h100", "RTX 3090"])
BARE = st.fixed_dictionaries(
    {"device": GPUS}, optional={"nodes": st.integers(1, 512), "devices_per_node": st.integers(1, 8), **LINKS}
)
NODES = st.fixed_dictionaries(
    {"node": st.sampled_from(CATALOG.names("nodes"))}, optional={"nodes": st.integers(1, 512), **LINKS}
)
CPUS = st.fixed_dictionaries(
    {"device": st.just("cpu"), "cores_per_device": st.integers(1, 64)}, optional={"nodes": st.integers(1, 64)}
)
GROUPS = BARE | NODES | CPUS
PRICES = st.fixed_dictionaries(
    {},
    optional={
        "price": st.floats(0, 100) | st.just("$4.10/h"),
        "storage_bandwidth": st.floats(1e6, 1e12) | st.sampled_from(["2 GB/s", "1 kB/s"]),
        "node_mtbf": st.floats(1, 1e9) | st.just("50d"),
        "restart_time": st.floats(0, 1e5) | st.just("5 min"),
    },
)
MIXED = st.fixed_dictionaries({"groups": st.lists(GROUPS, min_size=1, max_size=3)})
SECTIONS = st.builds(lambda section, price: {**section, **price}, GROUPS | MIXED, PRICES)


@given(SECTIONS)
def test_clusters_survive_a_json_round_trip(section: dict[str, Any]) -> None:
    cluster = Cluster.read(section, CATALOG)
    again = Cluster.read(json.loads(json.dumps(cluster.to_dict())), CATALOG)
    assert again == cluster
    assert again.to_dict() == cluster.to_dict()


@given(SECTIONS)
def test_world_size_is_the_sum_over_groups(section: dict[str, Any]) -> None:
    cluster = Cluster.read(section, CATALOG)
    assert cluster.world_size == sum(group.nodes * group.devices_per_node for group in cluster.groups)
    for group in cluster.groups:
        assert group.devices_per_node <= group.domain <= group.world_size


@given(st.integers(1, 128), st.integers(1, 8))
def test_cpu_peak_is_proportional_to_cores(cores: int, workers: int) -> None:
    cluster = read(device="cpu", cores_per_device=cores, devices_per_node=workers)
    one = CATALOG.device("cpu")
    assert one.vector_bits and one.clock_hz and one.fma_units  # noqa: PT018
    expected = cores * one.clock_hz * one.vector_bits / 32 * one.fma_units * 2
    assert cluster.device.peak_flops("fp32") == pytest.approx(expected)
    assert cluster.device.peak_flops("bf16") == pytest.approx(expected)
    assert cluster.device.peak_flops("fp64") == pytest.approx(expected / 2)


def test_a_node_fills_in_everything() -> None:
    cluster = read(node="dgx-h100", nodes=16)
    assert cluster.world_size == 128
    assert cluster.device.name == "h100-sxm-80gb"
    assert (cluster.intra_node.kind, cluster.intra_node.bandwidth_bytes_per_s) == ("nvswitch", 450e9)
    assert (cluster.inter_node.kind, cluster.inter_node.bandwidth_bytes_per_s) == ("infiniband", 400e9)
    assert cluster.assumptions == ()
    assert cluster.to_dict() == {
        "device": "h100-sxm-80gb",
        "devices_per_node": 8,
        "nodes": 16,
        "node": "dgx-h100",
    }


def test_a_node_may_come_with_several_devices() -> None:
    assert read(node="dgx-a100", device="a100-sxm-40gb").device.name == "a100-sxm-40gb"
    assert read(node="dgx-a100").device.name == "a100-sxm-80gb"


def test_nvlink_may_span_nodes() -> None:
    assert read(node="gb200-nvl72", nodes=18).groups[0].domain == 72
    assert read(node="gb200-nvl72", nodes=2).groups[0].domain == 8
    assert read(node="gb200-nvl72", nodes=36).groups[0].domain == 72
    assert read(node="dgx-b200", nodes=2).groups[0].domain == 8


@pytest.mark.parametrize(
    ("section", "domain"),
    [
        ({"node": "gb200-nvl72", "nodes": 16}, 64),
        ({"node": "gb200-nvl72", "nodes": 32}, 64),  # blocks of 16 trays, not 18 and 14
        ({"node": "gb200-nvl72", "nodes": 54}, 72),
        ({"node": "gb200-nvl72", "nodes": 19}, 72),  # no equal blocks of more than half a rack
        ({"node": "gb200-nvl72", "nodes": 32, "domain": 32}, 32),
        ({"node": "gb200-nvl72", "nodes": 8, "domain": 4}, 4),
        ({"node": "gb200-nvl72", "nodes": 4, "domain": 72}, 16),
        ({"device": "gb200", "devices_per_node": 4, "nodes": 16}, 64),
        ({"device": "gh200-96gb", "nodes": 32, "intra_node": {"kind": "nvswitch"}, "domain": 32}, 32),
    ],
)
def test_a_domain_is_as_large_as_the_job_says_or_racks_are(section: dict[str, Any], domain: int) -> None:
    cluster = read(**section)
    assert cluster.groups[0].domain == domain
    assert cluster.to_dict().get("domain") == section.get("domain")
    (said,) = [note for note in cluster.assumptions if "cluster.domain" in note] or [""]
    blocks = section["nodes"] == 32 and "domain" not in section
    by_device = "node" not in section and "domain" not in section
    assert said == (
        "cluster.domain is not given: NVLink is taken to join each 64 devices" if blocks
        else "cluster.domain is not given: NVLink is taken to join all 64 devices" if by_device
        else ""
    )  # fmt: skip


def test_groups_share_what_stands_beside_them() -> None:
    racks = {"node": "gb200-nvl72", "nodes": 8}
    mixed = read(groups=[racks, {**racks, "node": "gb300-nvl72", "domain": 32}], domain=16)
    assert [group.domain for group in mixed.groups] == [16, 32]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"domain": 6}, r"cluster\.domain: 6 is not a multiple of the 4 devices of a node, up to 72"),
        ({"domain": 144}, r"cluster\.domain: 144 is not a multiple"),
        ({"domain": 2}, r"cluster\.domain: 2 is not a multiple"),
        ({"domain": "x"}, r"cluster\.domain: 'x' is not a whole number"),
        ({"domain": 8, "intra_node": {"kind": "pcie"}}, r"cluster\.domain: 8 .* of kind 'nvswitch'"),
        ({"inter_node": {"oversubscription": 0.5}}, r"cluster\.inter_node\.oversubscription: 0\.5 is not 1"),
        ({"inter_node": {"leaf_nodes": 0}}, r"cluster\.inter_node\.leaf_nodes: 0 is not a number above 0"),
        ({"inter_node": {"kind": "roce", "sharp": True}}, r"cluster\.inter_node\.sharp: .*not 'roce'"),
        ({"intra_node": {"rails": True}}, r"cluster\.intra_node\.rails: only a network between nodes has it"),
    ],
)
def test_what_no_fabric_is_like_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(node="gb200-nvl72", nodes=8, **section)


def test_without_a_node_links_come_from_the_device_and_are_said() -> None:
    cluster = read(device="v100", devices_per_node=4, nodes=2)
    assert (cluster.intra_node.kind, cluster.intra_node.bandwidth_bytes_per_s) == ("nvlink-mesh", 150e9)
    assert (cluster.inter_node.kind, cluster.inter_node.bandwidth_bytes_per_s) == ("ethernet", 12.5e9)
    assert cluster.assumptions == (
        "cluster.intra_node is not given: nvlink-mesh at 150 GB/s per device and direction is assumed",
        "cluster.inter_node is not given: 100 Gb/s ethernet per node is assumed",
    )
    assert read(device="v100").assumptions == ()


def test_boards_of_amd_have_an_adapter_for_each_device_as_their_nodes_do() -> None:
    assumed = read(device="mi300x", devices_per_node=8, nodes=8)
    known = read(node="mi300x-8", nodes=8)
    assert assumed.inter_node == known.inter_node
    assert "cluster.inter_node is not given: 3.2 Tb/s roce per node is assumed" in assumed.assumptions
    assert read(device="mi100", devices_per_node=8, nodes=8).inter_node.kind == "ethernet"


def test_optional_bridges_are_not_assumed() -> None:
    assert read(device="rtx-3090", devices_per_node=2).intra_node.kind == "pcie"
    bridged = read(device="rtx-3090", devices_per_node=2, intra_node={"kind": "nvlink-pair"})
    assert bridged.intra_node.bandwidth_bytes_per_s == 56.25e9
    assert bridged.assumptions == ()


def test_a_job_overrides_single_fields_of_a_link() -> None:
    cluster = read(node="dgx-h100", inter_node={"latency": "20 us"}, intra_node={"kind": "pcie"})
    assert cluster.inter_node.latency_s == pytest.approx(20e-6)
    assert (cluster.inter_node.kind, cluster.inter_node.nics) == ("infiniband", 8)
    assert cluster.intra_node.bandwidth_bytes_per_s == pytest.approx(63e9, rel=0.01)
    assert read(device="t4", inter_node="25 Gb/s").inter_node.bandwidth_bytes_per_s == 25e9 / 8


def test_a_rate_above_the_devices_own_is_pointed_out() -> None:
    cluster = read(device="h100", devices_per_node=8, intra_node="900 GB/s")
    assert "900 GB/s is read as per direction" in cluster.assumptions[0]


def test_mixed_clusters_have_groups_and_no_single_device() -> None:
    groups = [{"device": "a100", "nodes": 2}, {"node": "dgx-1-v100", "devices_per_node": 4}]
    cluster = read(groups=groups, devices_per_node=8, inter_node={"kind": "roce", "bandwidth": "200 Gb/s"})
    assert cluster.world_size == 2 * 8 + 4
    assert cluster.nodes == 3
    assert cluster.inter_node.kind == "roce"
    with pytest.raises(UnsupportedJob, match=r"cluster\.groups: the groups differ in device"):
        _ = cluster.device


def test_one_group_is_the_same_as_no_groups() -> None:
    assert read(groups=[{"device": "t4", "nodes": 2}]).to_dict() == read(device="t4", nodes=2).to_dict()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, r"cluster\.device: missing"),
        ({"device": "h10"}, r"cluster\.device: 'h10' is not .*did you mean h100"),
        ({"device": ""}, r"cluster\.device: '' is not"),
        ({"device": 5}, r"cluster\.device: 5 is not a text"),
        ({"devise": "t4"}, r"cluster\.devise: .*did you mean device"),
        ({"node": "dgx-a200"}, r"cluster\.node: 'dgx-a200' is not .*dgx-a100"),
        (
            {"node": "dgx-a100", "device": "t4"},
            r"cluster\.device: 't4' is not what node 'dgx-a100' has: a100-sxm-80gb or",
        ),
        (
            {"node": "dgx-a100", "devices_per_node": 9},
            r"devices_per_node: 9 is not at most 8, what node 'dgx-a100' has",
        ),
        (
            {"node": "dgx-a100", "devices_per_node": 0},
            r"devices_per_node: 0 is not a whole number of at least 1",
        ),
        (
            {"device": "t4", "devices_per_node": -1},
            r"devices_per_node: -1 is not a whole number of at least 1",
        ),
        ({"device": "t4", "nodes": 0}, r"cluster\.nodes: 0 is not a whole number of at least 1"),
        ({"device": "t4", "nodes": 1.5}, r"cluster\.nodes: 1\.5 is not a whole number"),
        ({"device": "t4", "nodes": True}, r"cluster\.nodes: True is not a whole number"),
        ({"device": "cpu"}, r"cluster\.cores_per_device: missing"),
        (
            {"device": "cpu", "cores_per_device": 0},
            r"cores_per_device: 0 is not a whole number of at least 1",
        ),
        (
            {"device": "t4", "cores_per_device": 2},
            r"cores_per_device: 2 is not allowed, because 't4' is not a CPU",
        ),
        (
            {"device": "h100", "devices_per_node": 12},
            r"cluster\.devices_per_node: 12 is not at most 8, what NVSwitch joins in a node; give nodes",
        ),
        ({"device": "t4", "price": "cheap"}, r"cluster\.price: 'cheap' is not a price"),
        ({"device": "t4", "price": -1}, r"cluster\.price: -1\.0 is not a number of at least 0"),
        (
            {"device": "t4", "inter_node": {"bandwidth": 400}},
            r"inter_node\.bandwidth: 400 is not a rate with its unit, such as \"400 Gb/s\", or bytes per second",
        ),
        ({"device": "t4", "node_mtbf": 0}, r"cluster\.node_mtbf: 0\.0 is not a number above 0"),
        ({"device": "t4", "storage_bandwidth": "2 GB"}, r"cluster\.storage_bandwidth: '2 GB' is not a rate"),
        ({"device": "t4", "restart_time": "soon"}, r"cluster\.restart_time: 'soon' is not a time"),
        ({"device": "t4", "inter_node": "fast"}, r"cluster\.inter_node: 'fast' is not a rate"),
        (
            {"device": "t4", "inter_node": {"kind": "efe"}},
            r"cluster\.inter_node\.kind: 'efe' .*did you mean efa",
        ),
        (
            {"device": "t4", "inter_node": {"kind": "pcie"}},
            r"inter_node\.kind: 'pcie' is not a network between nodes",
        ),
        (
            {"device": "t4", "intra_node": {"kind": "efa"}},
            r"intra_node\.kind: 'efa' is not a link inside a node",
        ),
        (
            {"device": "t4", "intra_node": {"kind": "nvswitch"}},
            r"intra_node\.bandwidth: missing; t4 has no nvswitch",
        ),
        (
            {"device": "t4", "inter_node": {"bandwidth": 0}},
            r"inter_node\.bandwidth: 0\.0 is not a number above 0",
        ),
        ({"device": "t4", "inter_node": {"bandwidth": float("nan")}}, r"inter_node\.bandwidth: nan is not"),
        (
            {"device": "t4", "inter_node": {"speed": 1}},
            r"cluster\.inter_node\.speed: 'speed' is not a known key",
        ),
        ({"device": "t4", "groups": [{"device": "t4"}]}, r"cluster\.device: not allowed beside groups"),
        ({"groups": [{"device": "t4"}, {"device": "t5"}]}, r"cluster\.groups\[1\]\.device: 't5' is not"),
        (
            {"groups": [{"device": "t4", "price": 1}]},
            r"cluster\.groups\[0\]\.price: 'price' is not a known key",
        ),
    ],
)
def test_impossible_clusters_are_one_clear_line(section: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        Cluster.read(section, CATALOG)
    assert "\n" not in str(caught.value)


def test_machines_are_at_most_the_nodes_and_come_back() -> None:
    section = {"device": "cpu", "cores_per_device": 1, "nodes": 4, "host": "AMD EPYC, 2 cores", "machines": 1}
    assert Cluster.read(Cluster.read(section).to_dict()) == Cluster.read(section)
    with pytest.raises(InputError, match=r"^cluster.machines: 5 is not from 1 to the nodes, 4"):
        Cluster.read({**section, "machines": 5})


def test_a_run_on_cpu_cores_has_the_machine_of_its_provenance() -> None:
    plain = Cluster.read({"device": "cpu", "cores_per_device": 1, "nodes": 4})
    on = plain.measured_on({"host": "AMD EPYC, 2 cores", "machines": 1})
    assert (on.host, on.machines) == ("AMD EPYC, 2 cores", 1)
    assert on.measured_on({"host": "another"}) == on


def test_a_run_on_a_gpu_has_the_host_that_its_provenance_names() -> None:
    plain = Cluster.read({"device": "h100"})
    words = {
        "16-core Xeon (Emerald Rapids class), virtual machine": "xeon-emerald-rapids",
        "AMD EPYC 7763 64-Core Processor": "epyc-milan",
        "a workstation": None,
        "grace": None,
        "rome-12": None,
    }
    for host, name in words.items():
        on = plain.measured_on({"host": host}, CATALOG)
        assert on.host == name
        assert on.issuer == (plain.issuer if name is None else CATALOG.host(name))
        assert Cluster.read(on.to_dict()) == on
    told = Cluster.read({"device": "h100", "host": "epyc-rome"})
    assert told.measured_on({"host": "AMD EPYC 7763 64-Core Processor"}, CATALOG) == told


def test_devices_that_come_in_nodes_have_the_host_that_is_usual_beside_them() -> None:
    rented, bought = (Cluster.read({"device": name}) for name in ("h200", "rtx-3090"))
    cores = Cluster.read({"device": "cpu", "cores_per_device": 1})
    assert rented.issuer == CATALOG.host("usual-2023")
    assert bought.issuer is cores.issuer is None


# The host


def slower(profile: HostProfile, factor: float, place: str = "cuda") -> HostProfile:
    """The profile of a machine that takes so many times as long, measured in one place alone."""
    seconds = {name: factor * value for name, value in profile.seconds[place].items()}
    return dataclasses.replace(profile, seconds={place: seconds}, speeds={})


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("Intel(R) Xeon(R) Platinum 8480+", "xeon-sapphire-rapids"),
        ("INTEL(R) XEON(R) PLATINUM 8581C CPU @ 2.10GHz", "xeon-emerald-rapids"),
        ("Intel(R) Xeon(R) CPU E5-2698 v4 @ 2.20GHz", "xeon-broadwell"),
        ("Intel(R) Xeon(R) Platinum 8275CL CPU @ 3.00GHz", "xeon-8275cl"),
        ("AMD EPYC 7763 64-Core Processor", "epyc-milan"),
        ("2x AMD EPYC 7742", "epyc-rome"),
        ("AMD Ryzen 9 7950X 16-Core Processor", "ryzen-7000"),
        ("13th Gen Intel(R) Core(TM) i9-13900K", "core-13"),
        ("Neoverse-V2", "grace"),
        ("Genoa", "epyc-genoa"),
    ],
)
def test_hosts_go_by_what_their_cpus_call_themselves(spelled: str, name: str) -> None:
    assert read(device="h100", host=spelled).issuer == CATALOG.host(name)


def test_a_cluster_has_the_slowest_host_of_its_nodes() -> None:
    mixed = read(groups=[{"node": "dgx-h100"}, {"node": "dgx-1-v100"}])
    assert (mixed.issuer, mixed.host) == (CATALOG.host("xeon-broadwell"), None)
    assert read(device="b200").issuer is None
    given = read(node="dgx-1-v100", host="xeon-emerald-rapids")
    assert given.issuer == CATALOG.host("emerald-rapids")
    assert Cluster.read(given.to_dict(), CATALOG) == given


def test_every_cpu_of_a_node_is_a_host_of_the_catalogue() -> None:
    cpus = {CATALOG.node(name).cpu for name in CATALOG.names("nodes")} - {None}
    assert [cpu for cpu in cpus if CATALOG.host_of(cpu) is None] == []
    hosts = [CATALOG.host_of(None, year) for year in (2016, 2019, 2021, 2023)]
    assert [host.speed for host in hosts if host is not None] == [0.62, 0.68, 0.72, 0.85]
    assert CATALOG.host_of(None, 2025) is None


def test_a_profile_is_read_beside_the_reference(tmp_path: Path) -> None:
    reference = HostProfile.load(REFERENCE)
    for place in reference.seconds:
        slower(reference, 2.0, place).save(tmp_path / "host.json")
        on = Cluster.read({"device": "h100", "host": "host.json"}, CATALOG, base=tmp_path)
        assert on.issuer is not None
        assert on.issuer.measured == reference.date[:10]
        for part in PARTS:
            assert on.issuer.speed_of(part) == pytest.approx(reference.speeds[part] / 2, rel=0.01)
    (tmp_path / "host.json").unlink()
    assert Cluster.read(on.to_dict(), CATALOG) == on
    assert on.host == f"{reference.cpu}, {reference.cores} cores"


def test_cores_that_are_faster_than_others_are_told() -> None:
    reference = HostProfile.load(REFERENCE)
    even, uneven = ({"0": 1.0, "1": 1.1, "5": 1.3}, {"0": 2.0, "4": 1.0, "5": 1.1})
    assert dataclasses.replace(reference, core_s=even).fast_cores == []
    assert dataclasses.replace(reference, core_s=uneven).fast_cores == ["4", "5"]
    assert dataclasses.replace(reference, core_s={}).fast_cores == []


def test_a_user_adds_hosts_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        '[hosts.mine]\ncpu = "My CPU"\nspeed = 0.5\nseries = ["toaster 9*"]\n'
    )
    catalog = Catalog((tmp_path / "mine.toml",))
    assert Cluster.read({"device": "t4", "host": "AMD Toaster 9000"}, catalog).issuer == Host(
        name="mine", cpu="My CPU", speed=0.5, series=("toaster 9*",)
    )


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("xeon-emerald", r"^cluster\.host: 'xeon-emerald' is not a file of foretrain measure host, nor one of "
        r"foretrain catalog hosts, .* \(did you mean xeon-emerald-rapids"),
        ("none.json", r"^cluster\.host: 'none.json': no such file; foretrain measure host -o FILE writes one"),
        (3, r"^cluster\.host: 3 is not a name, a file of foretrain measure host, or a table of speeds"),
        ({"speed": 0}, r"^hosts\.measured\.speed: 0.0 is not a number above 0"),
        ({"quick": 1}, r"^cluster\.host\.quick: 'quick' is not a known key"),
    ],
)  # fmt: skip
def test_hosts_that_nobody_knows_are_one_clear_line(host: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(device="h100", host=host)


@pytest.mark.parametrize("text", ["no JSON", "{}", '{"kind": "host profile", "cpu": "a"}'])
def test_a_file_that_is_no_profile_is_one_clear_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "host.json").write_text(text)
    with pytest.raises(InputError, match=r"host\.json: (not a host profile|cores: missing)"):
        Cluster.read({"device": "h100", "host": str(tmp_path / "host.json")}, CATALOG)
