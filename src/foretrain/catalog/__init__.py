"""Reads devices, nodes, hosts, links and prices, built in and the user's own, as checked entries by name."""

from __future__ import annotations

import functools
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from foretrain import schema
from foretrain.catalog.entries import Device, LinkKind, LinkSpec, Node, Price, check_numbers, read_link
from foretrain.catalog.hosts import Host, named_host, usual_host
from foretrain.catalog.sections import Sections
from foretrain.catalog.spellings import GIGABYTES, SAME_MEMORY, plain, telling_words
from foretrain.errors import InputError, invalid, unknown
from foretrain.files import parse_toml
from foretrain.units import format_dollars

if TYPE_CHECKING:
    from foretrain.cluster import Cluster, Group

__all__ = ["VARIABLE", "Catalog", "Device", "LinkSpec", "Node", "check_numbers", "read_link"]

VARIABLE = "FORETRAIN_CATALOG"
"""Of the environment: the user's own files, joined as in PATH."""

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
        """List the nodes that a device is sold in, where NVLink joins all of them to domains; none where it
        comes in others too."""
        nodes = self.nodes_with(device)
        return nodes if all(node.domain is not None for node in nodes) else []

    def host(self, name: str, field: str = "cluster.host") -> Host:
        """Find a host by its name here, or by that of its CPU, as /proc/cpuinfo spells it."""
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
        """Say what one node or device of each kind costs, by whom and when: ``$2.99/GPU: Lambda on-demand
        price list, us, 2025-06``; empty where nothing is known."""
        if cluster.price_per_device_hour is not None:
            return f"{format_dollars(cluster.price_per_device_hour)}/device: as the job gives it"
        sources = []
        for group in cluster.groups:
            node = self.price(group.node.name) if group.node else None
            price, unit = node or self.price(group.device.name), "core" if group.device.is_cpu else "GPU"
            if price is None:
                return ""
            unit = "node" if node else unit
            facts = [fact for fact in (price.source, price.region, price.date) if fact not in ("", "unknown")]
            sources.append(
                f"{format_dollars(price.per_hour)}/{unit}: {', '.join(facts) or 'no source given'}"
            )
        return "; ".join(dict.fromkeys(sources))

    def names(self, kind: Literal["devices", "nodes", "hosts", "links", "prices"]) -> tuple[str, ...]:
        return tuple(_entries(kind, self.files))

    def _group_price(self, group: Group) -> float | None:
        per_node = self.price(group.node.name) if group.node else None
        if per_node is not None:
            return per_node.per_hour * group.nodes
        per_device = self.price(group.device.name)
        return per_device.per_hour * group.device.cores * group.world_size if per_device else None

    def _entry(self, kind: str, name: object, field: str) -> Any:
        entry_name = _index(kind, self.files).get(plain(str(name)))
        if entry_name is None and kind == "devices":
            entry_name = self._device_as_sold(str(name))
        if entry_name is None and kind == "hosts" and (host := self.host_of(str(name))) is not None:
            entry_name = host.name
        if entry_name is None:
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
        return _build(kind, entry_name, self.files)

    def _device_as_sold(self, name: str) -> str | None:
        """The device that a driver, a cloud or a shop calls so; one with another memory is none."""
        words = telling_words(name)
        index = _words_index(self.files)
        if (device_name := index.get(words)) is not None:
            return device_name
        sizes = [word for word in words if GIGABYTES.fullmatch(word)]
        device_name = index.get(words - {*sizes}) if len(sizes) == 1 else None
        if device_name is None:
            return None
        memory: float = _build("devices", device_name, self.files).memory_bytes
        stated = float(sizes[0].removesuffix("gb"))
        fits = any(abs(memory / unit / stated - 1) < SAME_MEMORY for unit in (1e9, 2**30))
        return device_name if fits else None

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
    """Map every spelling that is understood to the catalogue's name; prices go by the names of devices and
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
    described = [
        host
        for host in _hosts(files)
        for alias in map(plain, host.aliases)
        if "-" in alias and f"-{alias}-" in around
    ]
    return named_host(words, _hosts(files)) or (described[0] if described else None)


@functools.cache
def _sold_in_nodes(files: tuple[Path, ...]) -> frozenset[str]:
    nodes = [_build("nodes", name, files) for name in _entries("nodes", files)]
    return frozenset(name for node in nodes for name in (node.device, *node.variants))
