"""Holds what libraries reach on each kind of link: shares of its rate, and the time that they add."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from foretrain.cluster import Device

Library = Literal["nccl", "gloo"]
Way = Literal["ring", "exchange", "pair", "switch"]
"""How members use their links: a ring or tree, messages to all others, one pair, or a switch that reduces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """Says what a library reaches on a kind of link, as shares of its data-sheet rate, and the time it
    adds."""

    ring: float
    """Share of the rate that a ring or a tree sustains on long messages."""
    pair: float
    """Share that a message from one member to another sustains."""
    chunk_s: float
    """Time that each chunk of a pipelined message costs on its own."""
    start_s: float
    """Time of a call beside its hops: the kernel, and the proxy thread of a network."""
    hop_s: float = 0.0
    """Time that the library's own threads add to each hop."""
    own: float = 0.0
    """Time of a member's own part of a message, which it copies, over that of a part that comes by the
    link."""
    exchange: float | None = None
    """Share that messages of all members to all others sustain; None for that of a ring."""
    switch: float | None = None
    """Share that reduction inside the switch sustains, where the device has it."""
    most_bytes_per_s: float = math.inf
    """What the host can move for one adapter or device, sent and received together: the limit of sockets, and
    of messages that pass host memory."""
    source: str

    def share(self, way: Way) -> float:
        return {"ring": None, "pair": self.pair, "exchange": self.exchange, "switch": self.switch}[
            way
        ] or self.ring


TRANSPORTS: Mapping[str, Transport] = MappingProxyType(
    {
        "nvlink3": Transport(
            ring=0.81,
            pair=0.88,
            own=0.13,
            chunk_s=11.6e-6,
            start_s=8.5e-6,
            source="vidur (DGX A100, A100 pairs), estimate-train-time (Perlmutter, inside a node), "
            "Galvatron: all-reduce, send; aiconfigurator (A100): all-reduce, all-gather, reduce-scatter, "
            "all-to-all up to 512 MiB",
        ),
        "nvlink4": Transport(
            ring=0.875,
            pair=0.74,
            own=0.35,
            chunk_s=2.9e-6,
            start_s=5.1e-6,
            switch=0.60,
            source="vidur (DGX H100, H100 NVL pairs): all-reduce, send up to 64 MiB; aiconfigurator (H100, "
            "H200): all-reduce, all-gather, reduce-scatter, all-to-all up to 512 MiB",
        ),
        "nvlink5": Transport(
            ring=0.84,
            exchange=0.70,
            pair=0.74,
            own=0.38,
            chunk_s=4.3e-6,
            start_s=8.6e-6,
            switch=0.50,
            source="aiconfigurator (B200, GB200): all-reduce, all-gather, reduce-scatter, all-to-all up to "
            "512 MiB; pair as nvlink4",
        ),
        "pcie": Transport(
            ring=0.80,
            pair=0.80,
            chunk_s=1.1e-6,
            start_s=7.4e-6,
            source="vidur (all-reduce of 4 A100 PCIe and of 4 H100 NVL); pair as ring",
        ),
        "staged": Transport(
            ring=0.80,
            pair=0.127,
            chunk_s=1.1e-6,
            start_s=7.4e-6,
            most_bytes_per_s=8.0e9,
            source="vidur (send between A40 of a node that no bridge joins: 4 GB/s of 31.5); a ring as much "
            "each way; the rest as pcie",
        ),
        "rdma": Transport(
            ring=0.94,
            pair=0.72,
            chunk_s=0.0,
            start_s=12e-6,
            source="estimate-train-time (Vista), vidur (send between DGX H100): 400 Gb/s InfiniBand each",
        ),
        "efa": Transport(
            ring=0.45,
            pair=0.45,
            chunk_s=0.0,
            start_s=12e-6,
            hop_s=100e-6,
            source="nanotron's public runs on p5.48xlarge: what gradients and tensor parallelism between "
            "nodes add to a step",
        ),
        "sockets": Transport(
            ring=0.9,
            pair=0.9,
            chunk_s=0.0,
            start_s=0.0,
            most_bytes_per_s=2.5e9,
            source="estimate-train-time (Perlmutter between nodes), vidur (send between nodes of A100 pairs "
            "and of A40); ring, pair assumed",
        ),
        "gloo": Transport(
            ring=0.95,
            pair=0.95,
            chunk_s=0.0,
            start_s=0.0,
            hop_s=0.58e-3,
            most_bytes_per_s=1.9e9,
            source="data/cpu16_ddp, cpu16_campaign, links_campaign: what synchronising adds to a DDP step; "
            "ring, pair assumed",
        ),
    }
)
_NCCL_ON = {
    **dict.fromkeys(("nvswitch", "nvlink-mesh", "nvlink-pair", "infinity-fabric"), "nvlink3"),
    "pcie": "pcie",
    **dict.fromkeys(("infiniband", "roce", "slingshot"), "rdma"),
    "efa": "efa",
    **dict.fromkeys(("ethernet", "loopback"), "sockets"),
}


def transport_name(library: Library, link_kind: str, device: Device) -> str:
    """The transport that a library uses on a link; a kind of the user's own counts as a network with RDMA."""
    name = "gloo" if library == "gloo" else _NCCL_ON.get(link_kind, "rdma")
    if name == "pcie" and not device.peer_access:
        return "staged"
    if name != "nvlink3" or not since_hopper(device):
        return name
    return "nvlink5" if float(device.capability or 0) >= _BLACKWELL else "nvlink4"


_HOPPER, _BLACKWELL = 9, 10
"""Compute capabilities."""


def since_hopper(device: Device) -> bool:
    return device.vendor == "nvidia" and float(device.capability or 0) >= _HOPPER


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterServer:
    """Says what each process of a parameter server reaches on a CPU core."""

    process_bytes_per_s: float
    """Sent or received by one process."""
    update_s_per_byte: float
    """Adding up and the optimizer, on a server, of each byte that it holds."""
    pack_s_per_byte: float
    """Packing gradients and unpacking weights on a worker."""
    source: str


SERVER = ParameterServer(
    process_bytes_per_s=4.0e9,
    update_s_per_byte=0.64e-9,
    pack_s_per_byte=0.5e-9,
    source="data/cpu16_campaign, cells with one server; the split of update and pack follows the resource "
    "series of one cell",
)
