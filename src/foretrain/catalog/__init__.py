"""Reads devices, nodes, hosts, links and prices, built in and the user's own, as checked entries by name."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from foretrain import schema
from foretrain.catalog.hosts import Host, named_host, usual_host
from foretrain.catalog.sections import Sections
from foretrain.catalog.spellings import GIGABYTES, SAME_MEMORY, plain, telling_words
from foretrain.errors import InputError, invalid, unknown
from foretrain.files import parse_toml
from foretrain.schema import quantity
from foretrain.units import format_dollars, parse_bytes, parse_price, parse_rate, parse_seconds

if TYPE_CHECKING:
    from foretrain.cluster import Cluster, Group

VARIABLE = "FORETRAIN_CATALOG"
"""Of the environment: the user's own files, joined as in PATH."""

_PCIE_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_SLOWER_DTYPE = {"fp4": "fp8", "fp8": "bf16", "int8": "fp16", "bf16": "fp32", "fp16": "bf16", "tf32": "fp32"}


def check_numbers(where: str, *, zero: bool = False, **values: float | None) -> None:
    """Every number that is given is finite and above zero (or at least zero)."""
    for name, value in values.items():
        if value is not None and not (0 <= value < math.inf and (zero or value > 0)):
            raise invalid(f"{where}.{name}", value, "a number of at least 0" if zero else "a number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """What a file says of a link; whatever it leaves out comes from the node, the device or the kind of
    link."""

    kind: str | None = None
    bandwidth: float | None = quantity(parse_rate, default=None)
    latency: float | None = quantity(parse_seconds, default=None)
    nics: int | None = None
    rails: bool | None = None
    leaf_nodes: int | None = None
    oversubscription: float | None = None
    sharp: bool | None = None


def read_link(value: Any, where: str) -> LinkSpec:
    """A table, or a plain rate such as "400 Gb/s"."""
    if isinstance(value, Mapping | LinkSpec):
        spec: LinkSpec = schema.convert(value, LinkSpec, where)
    else:
        spec = LinkSpec(bandwidth=parse_rate(value, where))
    check_numbers(where, bandwidth=spec.bandwidth, nics=spec.nics, leaf_nodes=spec.leaf_nodes)
    check_numbers(where, oversubscription=spec.oversubscription)
    check_numbers(where, zero=True, latency=spec.latency)
    return spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or some cores of a CPU. Fields are those of ``catalog/devices.toml``, in SI units."""

    name: str
    vendor: str = "unknown"
    architecture: str = "unknown"
    capability: str | None = None
    year: int | None = None
    fp64: float | None = None
    fp32: float | None = None
    fp32_matrix: float | None = None
    tf32: float | None = None
    bf16: float | None = None
    fp16: float | None = None
    fp8: float | None = None
    fp4: float | None = None
    int8: float | None = None
    memory_bytes: float = quantity(parse_bytes)
    memory_bytes_per_s: float = quantity(parse_rate)
    l2_bytes: float | None = quantity(parse_bytes, default=None)
    l3_bytes: float | None = quantity(parse_bytes, default=None)
    shared_bytes_per_sm: float | None = quantity(parse_bytes, default=None)
    sms: int | None = None
    cores_per_sm: int | None = None
    clock_hz: float | None = None
    sustained: float = 1.0
    sustained_memory: float = 0.88
    under_load: float = 1.0
    vector_bits: int | None = None
    fma_units: int | None = None
    cores: int = 1
    link: str = "pcie"
    link_bytes_per_s: float | None = quantity(parse_rate, default=None)
    link_optional: bool = False
    pcie_generation: int = 4
    pcie_lanes: int = 16
    peer_access: bool = True
    tdp_w: float | None = None
    aliases: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        where = f"devices.{self.name}"
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        check_numbers(where, **{name: value for name, value in values.items() if type(value) in (int, float)})
        if self.pcie_generation not in _PCIE_LANE_BYTES_PER_S:
            raise unknown(f"{where}.pcie_generation", self.pcie_generation, map(str, _PCIE_LANE_BYTES_PER_S))
        if self.is_cpu and not (self.clock_hz and self.fma_units):
            raise InputError(f"{where}: a CPU (vector_bits is given) also needs clock_hz and fma_units")
        if not self.is_cpu and self.fp32 is None:
            raise InputError(f"{where}.fp32: missing; it is required")

    @property
    def is_cpu(self) -> bool:
        return self.vector_bits is not None

    @property
    def pcie_bytes_per_s(self) -> float:
        """Of the whole slot, per direction."""
        return _PCIE_LANE_BYTES_PER_S[self.pcie_generation] * self.pcie_lanes

    def peak_flops(self, dtype: str) -> float:
        """Peak dense FLOP/s of matrix products in ``dtype``.

        What the device has no fast unit for runs as the next wider type that torch would use: fp4 as fp8, fp8
        as bf16, int8 as fp16, fp16 as bf16; tf32 and bf16 as fp32. fp32 is the better of vector and
        full-precision matrix units. A missing fp64 figure is 1/32 of fp32 (on a CPU: 1/2).

        >>> Catalog.load().device("h100").peak_flops("bf16")
        989400000000000.0
        """
        if dtype == "fp32":
            return max(self._vector_flops, self.fp32_matrix or 0.0)
        if dtype == "fp64":
            return self.fp64 or self._vector_flops / (2 if self.is_cpu else 32)
        if dtype not in _SLOWER_DTYPE:
            raise unknown("dtype", dtype, [*_SLOWER_DTYPE, "fp32", "fp64"])
        rate: float | None = getattr(self, dtype)
        return rate or self.peak_flops(_SLOWER_DTYPE[dtype])

    def costed_as(self, dtype: str) -> str:
        """The format whose rate ``peak_flops`` gives for another: itself where the device has units for it.

        >>> Catalog.load().device("v100").costed_as("bf16")
        'fp32'
        """
        while dtype in _SLOWER_DTYPE and getattr(self, dtype) is None:
            dtype = _SLOWER_DTYPE[dtype]
        return dtype

    @property
    def _vector_flops(self) -> float:
        if self.vector_bits and self.clock_hz and self.fma_units:
            return self.cores * self.clock_hz * self.vector_bits / 32 * self.fma_units * 2
        return self.fp32 or 0.0

    def link_rate(self, kind: str) -> float | None:
        """Bytes per second and direction over the device's own links of this kind, or None when it has
        none."""
        if kind == "pcie":
            return self.pcie_bytes_per_s
        if self.link_bytes_per_s and (kind == self.link or (kind[:2] == self.link[:2] == "nv")):
            return self.link_bytes_per_s / 2
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine or a cloud instance type. Fields are those of ``catalog/nodes.toml``, in SI units."""

    name: str
    device: str
    variants: tuple[str, ...] = ()
    devices: int
    domain: int | None = None
    intra_node: LinkSpec = dataclasses.field(default=LinkSpec(), metadata={"parse": read_link})
    inter_node: LinkSpec = dataclasses.field(default=LinkSpec(), metadata={"parse": read_link})
    cpu: str | None = None
    cores: int | None = None
    memory_bytes: float | None = quantity(parse_bytes, default=None)
    aliases: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        check_numbers(
            f"nodes.{self.name}", devices=self.devices, cores=self.cores, memory_bytes=self.memory_bytes
        )
        if self.domain is not None and (self.domain < self.devices or self.domain % self.devices):
            raise invalid(
                f"nodes.{self.name}.domain", self.domain, f"a multiple of its {self.devices} devices"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkKind:
    """What is typical of a kind of link. Fields are those of ``catalog/links.toml``."""

    name: str
    scope: Literal["node", "network"]
    latency: float = quantity(parse_seconds)
    bandwidth: float | None = quantity(parse_rate, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """A list price of a node, of a device or of one CPU core, with the day and the place where it held."""

    name: str
    per_hour: float = quantity(parse_price)
    date: str = "unknown"
    region: str = "unknown"
    currency: Literal["USD"] = "USD"
    source: str = ""

    def __post_init__(self) -> None:
        check_numbers(f"prices.{self.name}", zero=True, per_hour=self.per_hour)


_KINDS: dict[str, type] = {
    "devices": Device,
    "nodes": Node,
    "hosts": Host,
    "links": LinkKind,
    "prices": Price,
}


@dataclass(frozen=True, slots=True)
class Catalog:
    """The built-in entries and, over them, those of the user's files.

    A file is read once per process, when needed.
    """

    files: tuple[Path, ...] = ()

    @classmethod
    def load(cls, extra: Path | None = None) -> Catalog:
        """The built-in entries, the files that FORETRAIN_CATALOG names, ``extra``: later ones override single
        fields."""
        named = os.environ.get(VARIABLE, "").split(os.pathsep)
        catalog = cls(tuple(dict.fromkeys(Path(path) for path in (*named, extra) if path)))
        for path in catalog.files:
            catalog._check(path)
        return catalog

    def device(self, name: str, field: str = "cluster.device") -> Device:
        device: Device = self._entry("devices", name, field)
        return device

    def node(self, name: str, field: str = "cluster.node") -> Node:
        node: Node = self._entry("nodes", name, field)
        return node

    def nodes_with(self, device: Device) -> list[Node]:
        """The nodes that come with a device."""
        nodes = map(self.node, self.names("nodes"))
        return [node for node in nodes if device.name in (node.device, *node.variants)]

    def comes_in_nodes(self, device: Device) -> bool:
        """Whether a device is sold in nodes of the catalogue."""
        return device.name in _sold_in_nodes(self.files)

    def racks_with(self, device: Device) -> list[Node]:
        """The same where NVLink joins all of them to domains; none where the device comes in others too."""
        nodes = self.nodes_with(device)
        return nodes if all(node.domain is not None for node in nodes) else []

    def host(self, name: str, field: str = "cluster.host") -> Host:
        """By its name here, or by that of its CPU, as /proc/cpuinfo spells it."""
        host: Host = self._entry("hosts", name, field)
        return host

    def host_of(self, cpu: str | None, device_year: int | None = None) -> Host | None:
        """The host of a node: by its CPU, else what is usual beside the device; None where nothing is
        known."""
        if cpu is not None:
            known = _index("hosts", self.files).get(plain(cpu))
            return named_host(cpu, _hosts(self.files)) if known is None else self.host(known)
        return None if device_year is None else usual_host(device_year, _hosts(self.files))

    def host_in(self, words: str) -> Host | None:
        """The host that words for a machine name by its model or its generation; None where they name none. A
        single word is the machine's own name."""
        return _host_in(words, self.files) if " " in words.strip() else None

    def link_kind(self, name: str, field: str = "cluster.inter_node.kind") -> LinkKind:
        kind: LinkKind = self._entry("links", name, field)
        return kind

    def price(self, name: str) -> Price | None:
        """The list price of a node or a device by its catalogue name, or None when there is none."""
        price: Price | None = (
            self._entry("prices", name, "price") if name in _entries("prices", self.files) else None
        )
        return price

    def price_per_hour(self, cluster: Cluster) -> float | None:
        """Dollars per hour of the whole cluster, or None when a price is missing.

        A node of the catalogue is paid whole, however many of its devices are used.
        """
        if cluster.price_per_device_hour is not None:
            return cluster.price_per_device_hour * cluster.world_size
        prices = [self._group_price(group) for group in cluster.groups]
        known = [price for price in prices if price is not None]
        return sum(known) if len(known) == len(prices) else None

    def price_source(self, cluster: Cluster) -> str:
        """What one node or device of each kind costs, by whom and when: ``$2.99/GPU: Lambda on-demand price
        list, us, 2025-06``; empty where nothing is known."""
        if cluster.price_per_device_hour is not None:
            return f"{format_dollars(cluster.price_per_device_hour)}/device: as the job gives it"
        told = []
        for group in cluster.groups:
            node = self.price(group.node.name) if group.node else None
            price, what = node or self.price(group.device.name), "core" if group.device.is_cpu else "GPU"
            if price is None:
                return ""
            what = "node" if node else what
            facts = [fact for fact in (price.source, price.region, price.date) if fact not in ("", "unknown")]
            told.append(f"{format_dollars(price.per_hour)}/{what}: {', '.join(facts) or 'no source given'}")
        return "; ".join(dict.fromkeys(told))

    def names(self, kind: Literal["devices", "nodes", "hosts", "links", "prices"]) -> tuple[str, ...]:
        return tuple(_entries(kind, self.files))

    def _group_price(self, group: Group) -> float | None:
        per_node = self.price(group.node.name) if group.node else None
        if per_node is not None:
            return per_node.per_hour * group.nodes
        per_device = self.price(group.device.name)
        return per_device.per_hour * group.device.cores * group.world_size if per_device else None

    def _entry(self, kind: str, name: object, field: str) -> Any:
        found = _index(kind, self.files).get(plain(str(name)))
        if found is None and kind == "devices":
            found = self._device_as_sold(str(name))
        if found is None and kind == "hosts" and (host := self.host_of(str(name))) is not None:
            found = host.name
        if found is None:
            entries, other = _entries(kind, self.files), {"devices": "node", "nodes": "device"}.get(kind)
            if other and plain(str(name)) in _index(f"{other}s", self.files):
                raise InputError(f"{field}: {name!r} is a {other} of the catalogue; give it as {other}")
            if kind == "prices":
                entries = {**_entries("devices", self.files), **_entries("nodes", self.files)}
            aliases = (alias for entry in entries.values() for alias in _aliases(entry))
            shown = "devices or nodes" if kind == "prices" else kind
            what = "one of" if kind == "links" else f"one of foretrain catalog {shown}, which has"
            if kind == "hosts":
                what = f"a file of foretrain measure host, nor {what}"
            raise unknown(field, name, [*entries, *aliases], what)
        return _build(kind, found, self.files)

    def _device_as_sold(self, name: str) -> str | None:
        """The device that a driver, a cloud or a shop calls so; one with another memory is none."""
        words = telling_words(name)
        index = _words_index(self.files)
        if (found := index.get(words)) is not None:
            return found
        sizes = [word for word in words if GIGABYTES.fullmatch(word)]
        found = index.get(words - {*sizes}) if len(sizes) == 1 else None
        if found is None:
            return None
        memory: float = _build("devices", found, self.files).memory_bytes
        stated = float(sizes[0].removesuffix("gb"))
        fits = any(abs(memory / unit / stated - 1) < SAME_MEMORY for unit in (1e9, 2**30))
        return found if fits else None

    def _check(self, path: Path) -> None:
        """Mistakes in a user's file show when it is loaded, not when an entry happens to be used."""
        try:
            for kind, table in _own(path).items():
                for name in table:
                    self._entry(kind, name, f"{kind}.{name}")
                    if kind == "nodes":
                        self.device(self.node(name).device, f"nodes.{name}.device")
        except InputError as error:
            raise InputError(f"{path}: {error}") from error


@functools.cache
def _words_index(files: tuple[Path, ...]) -> dict[frozenset[str], str]:
    """The words of every name and alias of a device, to its name; those of several devices are left out."""
    meant: dict[frozenset[str], set[str]] = {}
    for spelling, name in _index("devices", files).items():
        meant.setdefault(telling_words(spelling), set()).add(name)
    return {words: next(iter(names)) for words, names in meant.items() if len(names) == 1}


def _aliases(entry: dict[str, Any]) -> list[str]:
    aliases = entry.get("aliases")
    return [alias for alias in aliases if isinstance(alias, str)] if isinstance(aliases, list) else []


@functools.cache
def _builtin(kind: str) -> Mapping[str, dict[str, Any]]:
    text = Path(__file__).with_name(f"{kind}.toml").read_text(encoding="utf-8")
    if kind in ("devices", "nodes"):
        return Sections(text)
    entries: dict[str, dict[str, Any]] = tomllib.loads(text)[kind]
    return entries


@functools.cache
def _own(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    try:
        tables = parse_toml(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text in UTF-8"
        raise InputError(f"the catalogue cannot be read ({why})") from error
    except ValueError as error:
        raise InputError(f"not TOML ({error})") from error
    for kind, table in tables.items():
        if kind not in _KINDS:
            raise unknown(kind, kind, _KINDS, "a known table; allowed are")
        for name, entry in table.items() if isinstance(table, dict) else [("", table)]:
            if not isinstance(entry, dict):
                raise invalid(f"{kind}.{name}".rstrip("."), entry, "a table of keys and values")
    return tables


@functools.cache
def _entries(kind: str, files: tuple[Path, ...]) -> Mapping[str, dict[str, Any]]:
    """Name to entry, the user's fields over the built-in ones; a user may name an entry by its alias."""
    if not files:
        return _builtin(kind)
    *earlier, last = files
    entries = dict(_entries(kind, tuple(earlier)))
    index = _index(kind, files if kind == "prices" else tuple(earlier))
    for name, entry in _own(last).get(kind, {}).items():
        known = index.get(plain(name), name)
        entries[known] = {**entries.get(known, {}), **entry}
    return entries


@functools.cache
def _index(kind: str, files: tuple[Path, ...]) -> dict[str, str]:
    """Every spelling that is understood, to the catalogue's name; prices go by the names of devices and
    nodes."""
    if kind == "prices":
        return _index("devices", files) | _index("nodes", files)
    entries = _entries(kind, files)
    if isinstance(entries, Sections):
        aliases = {plain(alias): name for alias, name in entries.aliases().items()}
    else:
        aliases = {plain(alias): name for name, entry in entries.items() for alias in _aliases(entry)}
    return aliases | {plain(name): name for name in entries}


@functools.cache
def _build(kind: str, name: str, files: tuple[Path, ...]) -> Any:
    return schema.read(_KINDS[kind], {**_entries(kind, files)[name], "name": name}, f"{kind}.{name}")


@functools.cache
def _hosts(files: tuple[Path, ...]) -> tuple[Host, ...]:
    return tuple(_build("hosts", name, files) for name in _entries("hosts", files))


@functools.cache
def _host_in(words: str, files: tuple[Path, ...]) -> Host | None:
    around = f"-{re.sub(r'[^a-z0-9]+', '-', words.lower())}-"
    told = [
        host
        for host in _hosts(files)
        for alias in map(plain, host.aliases)
        if "-" in alias and f"-{alias}-" in around
    ]
    return named_host(words, _hosts(files)) or (told[0] if told else None)


@functools.cache
def _sold_in_nodes(files: tuple[Path, ...]) -> frozenset[str]:
    nodes = [_build("nodes", name, files) for name in _entries("nodes", files)]
    return frozenset(name for node in nodes for name in (node.device, *node.variants))
