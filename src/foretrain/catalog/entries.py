"""Describes what a catalogue lists: devices, nodes, links and prices, each checking its own figures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from foretrain import schema
from foretrain.errors import InputError, invalid, unknown
from foretrain.schema import quantity
from foretrain.units import parse_bytes, parse_price, parse_rate, parse_seconds

_USUAL_PROCESSORS = 100
"""Of a device whose multiprocessors nobody has counted (assumed)."""
_PCIE_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_SLOWER_DTYPE = {"fp4": "fp8", "fp8": "bf16", "int8": "fp16", "bf16": "fp32", "fp16": "bf16", "tf32": "fp32"}


def check_numbers(where: str, *, zero: bool = False, **values: float | None) -> None:
    """Check that every number that is given is finite and above zero (or at least zero)."""
    for name, value in values.items():
        if value is not None and not (0 <= value < math.inf and (zero or value > 0)):
            raise invalid(f"{where}.{name}", value, "a number of at least 0" if zero else "a number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """Holds what a file says of a link; whatever it leaves out comes from the node, the device or the kind of
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
        """Give the rate of the whole slot, per direction."""
        return _PCIE_LANE_BYTES_PER_S[self.pcie_generation] * self.pcie_lanes

    @property
    def processors(self) -> int:
        """Count its multiprocessors, as far as they are known."""
        return self.sms or _USUAL_PROCESSORS

    def peak_flops(self, dtype: str) -> float:
        """Peak dense FLOP/s of matrix products in ``dtype``.

        What the device has no fast unit for runs as the next wider type that torch would use: fp4 as fp8, fp8
        as bf16, int8 as fp16, fp16 as bf16; tf32 and bf16 as fp32. fp32 is the better of vector and
        full-precision matrix units. A missing fp64 figure is 1/32 of fp32 (on a CPU: 1/2).

        >>> from foretrain.catalog import Catalog
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

        >>> from foretrain.catalog import Catalog
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
    """Says what is typical of a kind of link. Fields are those of ``catalog/links.toml``."""

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
