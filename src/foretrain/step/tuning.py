"""Holds factors on the parts of a step on many devices, which a calibration finds."""

from __future__ import annotations

from dataclasses import dataclass

from foretrain.costs.collectives import Team

_MESSAGE_HOST_S = 60e-6
_SLOWDOWN = 0.22
"""Hidden communication takes this share of its time from the matrix products beside it: NCCL's kernels hold
16 to 24 of some 130 processors, and products that are laid out for all of them run 1.25 to 1.34 times as long
beside as many blocks that copy (``data/studies/h200_contention.jsonl``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Factors on the parts of a step on many devices, neutral by default; a calibration finds them for a
    device and framework."""

    products: float = 1.0
    """On the time of matrix products and convolutions."""
    attention: float = 1.0
    traffic: float = 1.0
    """On the time of all other kernels."""
    host: float = 1.0
    """On the time of the host."""
    inside: float = 1.0
    """On the time of communication inside a node."""
    outside: float = 1.0
    """On that between nodes."""
    hop_s: float = 0.0
    """What each step of a ring of replicas on several nodes takes beside its transfer."""
    message_s: float = _MESSAGE_HOST_S
    """What each message of a pipeline costs beside its transfer."""
    stalls: float = 1.0
    """On the framework's own stalls in a pipeline."""
    step_s: float = 0.0
    """Time per step that belongs to no operator."""
    slowdown: float = _SLOWDOWN
    """What hidden communication takes from products, as a share of its time."""
    activations: float = 1.0
    """On the memory of activations and temporaries."""
    memory_bytes: float = 0.0
    """Memory of each rank that nothing else accounts for."""

    def team(self, members: Team) -> float:
        return self.outside if members.nodes > 1 else self.inside
