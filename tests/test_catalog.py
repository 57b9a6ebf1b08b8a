"""The catalogue: every entry is physically sound, names resolve, and a user's file overrides single
fields."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from commands import ok
from foretrain import catalog as catalog_module
from foretrain.catalog import Catalog, Device
from foretrain.catalog.sections import Sections
from foretrain.catalog_entries import entries
from foretrain.cluster import Cluster
from foretrain.errors import InputError
from foretrain.report import tables

CATALOG = Catalog()
DEVICES = [CATALOG.device(name) for name in CATALOG.names("devices")]
GPUS = [device for device in DEVICES if not device.is_cpu]
NODES = [CATALOG.node(name) for name in CATALOG.names("nodes")]

NAMES_IN_USE = [
    "a100-pcie-40gb",
    "a100-pcie-80gb",
    "a100-sxm-40gb",
    "a100-sxm-80gb",
    "b200",
    "gb200",
    "gb300",
    "h100-sxm-80gb",
    "mi100",
    "mi210",
    "mi250",
    "p100-pcie-16gb",
    "p4",
    "rtx-3090",
    "t4",
    "v100-pcie-32gb",
    "v100-sxm-16gb",
    "v100-sxm-32gb",
    "a10",
    "a40",
    "a800-sxm-80gb",
    "gh200-96gb",
    "gtx-1080-ti",
    "h100-nvl-80gb",
    "h200-sxm-141gb",
    "k80",
    "rtx-2070-mobile",
    "rtx-2080-mobile",
    "rtx-2080-super-mobile",
    "rtx-2080-ti",
    "rtx-3070",
    "rtx-3080",
    "rtx-3080-mobile",
    "rtx-5000",
    "rtx-6000",
    "rtx-8000",
    "rtx-a4000",
    "rtx-a4500",
    "rtx-a5000",
    "rtx-a5500",
    "rtx-a6000",
    "titan-rtx",
    "cpu",
]
NODES_IN_USE = [
    "dgx-1-v100",
    "dgx-2",
    "dgx-a100",
    "dgx-b200",
    "dgx-h100",
    "g4dn.12xlarge",
    "gb200-nvl72",
    "gb300-nvl72",
    "hgx-a100-800g",
    "p5.48xlarge",
]


def own(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "catalog.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", NAMES_IN_USE)
def test_device_names_in_use_are_catalogue_names(name: str) -> None:
    assert CATALOG.device(name).name == name


@pytest.mark.parametrize("name", NODES_IN_USE)
def test_node_names_in_use_are_catalogue_names(name: str) -> None:
    assert CATALOG.node(name).name == name


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("h100", "h100-sxm-80gb"),
        ("H200", "h200-sxm-141gb"),
        ("a100", "a100-sxm-80gb"),
        ("v100", "v100-sxm-16gb"),
        ("v100-16gb", "v100-sxm-16gb"),
        ("p100", "p100-pcie-16gb"),
        ("4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("RTX 3090", "rtx-3090"),
    ],
)
def test_people_may_use_short_names(said: str, meant: str) -> None:
    assert CATALOG.device(said).name == meant


def test_cloud_names_resolve_whatever_their_case() -> None:
    assert CATALOG.node("standard_nd96isr_h100_v5").name == "ND96isr_H100_v5"


@pytest.mark.parametrize("kind", ["devices", "nodes"])
def test_no_name_or_alias_means_two_things(kind: str) -> None:
    entries = DEVICES if kind == "devices" else NODES
    spellings = [name for entry in entries for name in (entry.name, *entry.aliases)]
    assert len(spellings) == len(set(spellings))


def test_devices_and_nodes_share_no_name() -> None:
    assert not set(CATALOG.names("devices")) & set(CATALOG.names("nodes"))


def test_unknown_names_come_with_a_suggestion() -> None:
    with pytest.raises(InputError, match=r"cluster\.device: 'h100-smx-80gb' .*did you mean h100-sxm-80gb"):
        CATALOG.device("h100-smx-80gb")
    with pytest.raises(InputError, match=r"cluster\.node: 'dgx-h1000' .*dgx-h100"):
        CATALOG.node("dgx-h1000")


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_every_device_is_complete_and_in_bounds(device: Device) -> None:
    assert device.source
    assert device.year is not None
    assert 2012 <= device.year <= 2026
    assert 50e9 < device.memory_bytes_per_s < 10e12
    assert 4 * 2**30 < device.memory_bytes < 300 * 2**30
    assert device.clock_hz is not None
    assert 0.5e9 < device.clock_hz < 4e9
    assert device.l2_bytes is not None
    assert 2**20 <= device.l2_bytes <= 256 * 2**20
    assert device.tdp_w is not None
    assert 40 <= device.tdp_w <= 1500
    assert CATALOG.link_kind(device.link).scope == "node"


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
def test_fp32_follows_from_lanes_and_clock(device: Device) -> None:
    assert device.sms and device.cores_per_sm and device.clock_hz and device.fp32  # noqa: PT018
    assert device.fp32 == pytest.approx(2 * device.sms * device.cores_per_sm * device.clock_hz, rel=0.15)


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
def test_narrower_types_are_never_slower(device: Device) -> None:
    rates = [device.peak_flops(dtype) for dtype in ("fp32", "tf32", "bf16", "fp8", "fp4")]
    assert rates == sorted(rates)
    assert device.peak_flops("fp16") >= device.peak_flops("bf16")
    if device.tf32 and device.bf16:
        assert device.bf16 == pytest.approx(2 * device.tf32, rel=0.03)
    if device.bf16 and device.fp8:
        assert device.fp8 == pytest.approx(2 * device.bf16, rel=0.03)


def test_nvidia_types_follow_the_capability() -> None:
    for device in GPUS:
        if device.vendor == "nvidia":
            assert device.capability is not None
            capability = float(device.capability)
            assert (device.fp16 is not None) == (capability >= 7.0), device.name
            assert (device.bf16 is not None) == (device.tf32 is not None) == (capability >= 8.0), device.name
            assert (device.fp8 is not None) == (capability >= 8.9), device.name
            assert (device.fp4 is not None) == (capability >= 10.0), device.name


def test_figures_that_everybody_knows() -> None:
    h100 = CATALOG.device("h100")
    assert (h100.bf16, h100.fp8, h100.memory_bytes_per_s, h100.sms) == (989.4e12, 1978.9e12, 3.35e12, 132)
    a100 = CATALOG.device("a100")
    assert (a100.bf16, a100.tf32, a100.fp32, a100.l2_bytes) == (312e12, 156e12, 19.5e12, 40 * 2**20)
    assert CATALOG.device("4090").bf16 == pytest.approx(
        82.6e12 * 2
    )  # FP32 accumulation: half of the advertised 330
    assert h100.link_rate("nvswitch") == 450e9
    assert CATALOG.device("t4").pcie_bytes_per_s == pytest.approx(15.76e9)


def test_peak_flops_falls_back_to_what_would_run() -> None:
    t4, mi100, p4 = (CATALOG.device(name) for name in ("t4", "mi100", "p4"))
    assert t4.peak_flops("bf16") == t4.fp32
    assert t4.peak_flops("fp8") == t4.fp32
    assert p4.peak_flops("fp16") == p4.fp32
    assert mi100.peak_flops("fp32") == mi100.fp32_matrix
    with pytest.raises(InputError, match=r"dtype: 'bf61' .*did you mean bf16"):
        t4.peak_flops("bf61")


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.name)
def test_every_node_makes_a_sound_cluster(node: object) -> None:
    name = node.name  # type: ignore[attr-defined]
    cluster = Cluster.read({"node": name, "nodes": 2}, CATALOG)
    assert cluster.assumptions == ()
    assert cluster.node is not None
    assert cluster.node.source
    assert 1 <= cluster.devices_per_node <= 16
    assert 1e9 <= cluster.inter_node.bandwidth_bytes_per_s <= 1e12
    assert 10e9 <= cluster.intra_node.bandwidth_bytes_per_s <= 1e12
    assert (
        cluster.inter_node.bandwidth_bytes_per_s / cluster.devices_per_node
        < cluster.intra_node.bandwidth_bytes_per_s
    )
    for variant in cluster.node.variants:
        assert CATALOG.device(variant).name == variant


@pytest.mark.parametrize("name", CATALOG.names("prices"))
def test_every_price_is_dated_and_plausible(name: str) -> None:
    price = CATALOG.price(name)
    assert price is not None
    assert price.source
    assert price.region != "unknown"
    assert price.date[:4].isdigit()
    if name in CATALOG.names("nodes"):
        assert 0.1 < price.per_hour / CATALOG.node(name).devices < 15
    else:
        assert 0.05 < price.per_hour < 15
        assert CATALOG.device(name).name == name


def test_prices_of_clusters() -> None:
    def per_hour(**section: object) -> float | None:
        return CATALOG.price_per_hour(Cluster.read(section, CATALOG))

    assert per_hour(node="p4d.24xlarge", nodes=3) == pytest.approx(3 * 21.96)
    assert per_hour(node="p4d.24xlarge", devices_per_node=2) == pytest.approx(21.96)  # whole nodes are paid
    assert per_hour(device="h100", devices_per_node=8, nodes=2) == pytest.approx(16 * 2.99)
    assert per_hour(device="h100", devices_per_node=8, price="$4.10/h") == pytest.approx(32.8)
    assert per_hour(device="cpu", cores_per_device=4, devices_per_node=2) == pytest.approx(8 * 0.0893)
    assert per_hour(device="titan-rtx") is None
    assert per_hour(groups=[{"device": "h100"}, {"device": "titan-rtx"}]) is None


def test_a_users_file_overrides_single_fields(tmp_path: Path) -> None:
    path = own(
        tmp_path,
        """
        [devices.h100]  # an alias names the same entry
        tdp_w = 500
        [prices.h100]
        per_hour = "$1.50/h"
        [links.ethernet]
        bandwidth = "25 Gb/s"
        """,
    )
    catalog = Catalog.load(path)
    assert catalog.device("h100-sxm-80gb").tdp_w == 500
    assert catalog.device("h100-sxm-80gb").bf16 == CATALOG.device("h100").bf16
    cluster = Cluster.read({"device": "h100", "nodes": 2, "inter_node": {"kind": "ethernet"}}, catalog)
    assert catalog.price_per_hour(cluster) == 3.0
    assert cluster.inter_node.bandwidth_bytes_per_s == pytest.approx(25e9 / 8)
    assert Catalog.load().device("h100").tdp_w == 700


def test_a_new_device_needs_its_data_sheet_only(tmp_path: Path) -> None:
    path = own(
        tmp_path,
        """
        [devices.x1]
        aliases = ["x"]
        fp32 = 50e12
        bf16 = 400e12
        memory_bytes = "96 GiB"
        memory_bytes_per_s = "3 TB/s"
        [nodes.x1-box]
        device = "x1"
        devices = 4
        inter_node = "200 Gb/s"
        """,
    )
    cluster = Cluster.read({"node": "x1-box"}, Catalog.load(path))
    assert cluster.device.peak_flops("fp16") == 400e12
    assert cluster.intra_node.kind == "pcie"
    assert cluster.inter_node.bandwidth_bytes_per_s == 25e9
    assert Catalog.load(path).device("X") == cluster.device


def test_the_environment_names_a_catalogue_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETRAIN_CATALOG", str(own(tmp_path, "[devices.t4]\ntdp_w = 60\nyear = 2019\n")))
    extra = tmp_path / "extra.toml"
    extra.write_text("[devices.t4]\ntdp_w = 50\n", encoding="utf-8")
    assert Catalog.load().device("t4").tdp_w == 60
    assert (Catalog.load(extra).device("t4").tdp_w, Catalog.load(extra).device("t4").year) == (50, 2019)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[devices.t4]\nfp23 = 1e12", r"devices\.t4\.fp23: .*did you mean fp32"),
        ("[devices.t4]\nmemory_bytes = 'lots'", r"devices\.t4\.memory_bytes: 'lots' is not a size"),
        ("[devices.t4]\nfp32 = -1.0", r"devices\.t4\.fp32: -1\.0 is not a number above 0"),
        ("[devices.t4]\npcie_generation = 9", r"devices\.t4\.pcie_generation: 9 is not"),
        ("[devices.t4]\naliases = 5", r"devices\.t4\.aliases: 5 is not a list"),
        ("[devices.new]\nfp32 = 1e12", r"devices\.new\.memory_bytes: missing"),
        ("[devices.new]\nmemory_bytes = 1e9\nmemory_bytes_per_s = 1e11", r"devices\.new\.fp32: missing"),
        ("[devices]\nt4 = 3", r"devices\.t4: 3 is not a table"),
        ("devices = 3", r"devices: 3 is not a table"),
        ("[nodes.box]\ndevice = 't5'\ndevices = 2", r"nodes\.box\.device: 't5' is not"),
        ("[nodes.box]\ndevice = 't4'\ndevices = 2\ndomain = 5", r"nodes\.box\.domain: 5 is not a multiple"),
        (
            "[nodes.box]\ndevice = 't4'\ndevices = 2\ninter_node = 'fast'",
            r"nodes\.box\.inter_node: 'fast' is not a rate",
        ),
        ("[prices.t5]\nper_hour = 3", r"prices\.t5: 't5' is not"),
        ("[device.t4]\ntdp_w = 3", r"device: 'device' is not a known table"),
        ("[devices", r"catalog\.toml: not TOML \(Expected"),
    ],
)
def test_mistakes_in_a_users_file_are_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Catalog.load(own(tmp_path, text))


def test_a_missing_file_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.toml: the catalogue cannot be read"):
        Catalog.load(tmp_path / "none.toml")


def test_the_catalogue_needs_no_torch() -> None:
    code = "import sys; from foretrain.cluster import Cluster; Cluster.read({'node': 'dgx-h100'});"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("kind", ["devices", "nodes"])
def test_entries_read_one_by_one_are_those_of_the_whole_file(kind: str) -> None:
    path = Path(catalog_module.__file__).with_name(f"{kind}.toml")
    whole = tomllib.loads(path.read_text())[kind]
    read = catalog_module._builtin(kind)
    assert list(read) == list(whole)
    assert {name: read[name] for name in read} == whole
    assert isinstance(read, Sections)
    aliases = {alias: name for name, entry in whole.items() for alias in entry.get("aliases", ())}
    assert read.aliases() == aliases


@pytest.mark.parametrize(
    ("sold_as", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA H100 NVL", "h100-nvl-94gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm-32gb"),
        ("Tesla P100-PCIE-16GB", "p100-pcie-16gb"),
        ("Tesla T4", "t4"),
        ("nvidia-tesla-t4", "t4"),
        ("NVIDIA-H100-80GB-HBM3", "h100-sxm-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", "rtx-3080-mobile"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("NVIDIA GH200 480GB", "gh200-96gb"),
        ("NVIDIA H200", "h200-sxm-141gb"),
        ("AMD Instinct MI300X", "mi300x"),
        ("A100 80GB", "a100-sxm-80gb"),
        ("A100-40G", "a100-sxm-40gb"),
        ("L40S 48GB", "l40s"),
        ("RTX 4090 24GB", "rtx-4090"),
        ("RTXA6000", "rtx-a6000"),
        ("3090Ti", "rtx-3090-ti"),
    ],
)
def test_devices_go_by_what_drivers_and_clouds_call_them(sold_as: str, name: str) -> None:
    assert CATALOG.device(sold_as).name == name
    assert Cluster.read({"device": sold_as}, CATALOG).to_dict()["device"] == name


@pytest.mark.parametrize("name", ["A100 60GB", "RTX 3080 12GB", "NVIDIA", "80GB", "NVIDIA H1000"])
def test_another_memory_or_no_device_at_all_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"^cluster\.device: "):
        CATALOG.device(name)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_no_two_devices_share_their_telling_words(device: Device) -> None:
    for spelling in (device.name, *device.aliases):
        assert CATALOG.device(f"NVIDIA {spelling.upper()} GPU").name == device.name


def test_a_node_given_as_a_device_and_the_other_way_round_are_told_apart() -> None:
    assert CATALOG.node("P5.48xlarge").name == "p5.48xlarge"
    assert CATALOG.node("Standard_ND96isr_H100_v5").name == "ND96isr_H100_v5"
    with pytest.raises(InputError, match=r"'p5.48xlarge' is a node of the catalogue; give it as node"):
        CATALOG.device("p5.48xlarge")
    with pytest.raises(InputError, match=r"'h100' is a device of the catalogue; give it as device"):
        CATALOG.node("h100")


def test_suggestions_do_not_mind_the_case() -> None:
    with pytest.raises(InputError, match=r"did you mean .*a100-80gb"):
        CATALOG.device("A100 60GB")


def test_hosts_are_listed_with_their_source() -> None:
    hosts = json.loads(ok("catalog", "hosts", "--json"))
    assert hosts["epyc-milan"]["speed"] == 0.8
    assert all(entry["source"] and entry["cpu"] for entry in hosts.values())
    assert "Sapphire Rapids" in ok("catalog", "hosts")


@pytest.mark.parametrize("kind", ["devices", "nodes", "models"])
def test_a_listing_is_whole_in_a_line_of_80_characters(kind: str) -> None:
    known = Catalog.load()
    screen = io.StringIO()
    Console(file=screen, width=80).print(tables.listing(kind, entries(kind, None, known), known))
    shown = screen.getvalue()
    assert "…" not in shown
    assert kind != "devices" or "66.9     989     989     700" in shown  # an H100
    assert kind != "models" or len(shown.splitlines()) < 4 * len(entries(kind, None, known))
