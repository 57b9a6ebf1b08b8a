"""Costs the kernels that bring tokens to their experts and back: DeepEP and HybridEP.

A token is sent once to every rank that it has experts on, and over the network once to every NVLink domain,
where a member hands it on. Three things work at the same time, and the slowest counts:

    processors = tokens / processors x (a token + copies x (a copy + width / rate) + domains x width / sends)
    nvlink     = tokens x copies for others x width / (share x rate of NVLink)
    network    = tokens x copies for other domains x width / (share x rate of a member's adapter)
    time       = start + (processors^4 + nvlink^4 + network^4)^(1/4)

DeepEP's constants (Zhao et al. 2025, github.com/deepseek-ai/DeepEP, normal mode) are fitted to times of
aiconfigurator on H100, H200 and B200, with 4 to 24 processors, and on two and four nodes of H100;
docs/collectives.md tells how well they hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Direction = Literal["dispatch", "combine"]
_SHARPNESS = 4.0
PROCESSORS = 20
"""Multiprocessors that DeepEP takes unless told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Holds the costs of one direction of an exchange."""

    start_s: float
    token_s: float
    """Of a processor, for a token."""
    copy_s: float
    """For each rank that it goes to, beside its bytes."""
    bytes_per_s: float
    """Of a processor that copies."""
    sending_bytes_per_s: float
    """Of a processor that hands tokens to the network, for each domain."""
    nvlink: float
    """Share of NVLink's rate that is reached."""
    network: float
    """Share of an adapter's."""


_AT_ONCE = {"token_s": 0.0, "copy_s": 0.0, "bytes_per_s": math.inf, "sending_bytes_per_s": math.inf}
KERNELS: dict[str, dict[Direction, Kernel]] = {
    "deepep": {
        "dispatch": Kernel(
            start_s=29e-6, token_s=0.39e-6, copy_s=54e-9, bytes_per_s=25e9, sending_bytes_per_s=13.7e9,
            nvlink=0.83, network=0.94,
        ),
        "combine": Kernel(
            start_s=41e-6, token_s=0.89e-6, copy_s=0.0, bytes_per_s=27e9, sending_bytes_per_s=6.0e9,
            nvlink=0.75, network=0.96,
        ),
    },
    "hybridep": {
        "dispatch": Kernel(start_s=29e-6, nvlink=0.83, network=0.94, **_AT_ONCE),
        "combine": Kernel(start_s=41e-6, nvlink=0.75, network=0.96, **_AT_ONCE),
    },
}  # fmt: skip
"""HybridEP copies by TMA and fills NVLink with few processors; no public times of it were at hand, so it has
DeepEP's shares of the links."""


def exchange_s(
    dispatcher: str,
    direction: Direction,
    *,
    tokens: float,
    copies: float,
    reached: float,
    width_bytes: float,
    near: int,
    domains: int,
    inside_bytes_per_s: float,
    outside_bytes_per_s: float,
) -> float:
    """Seconds of one exchange of a rank's own tokens among ``near x domains`` ranks, ``near`` of which NVLink
    joins: each token goes to ``copies`` ranks in ``reached`` domains. The rates are those of a member.

    >>> sizes = {"tokens": 4096, "copies": 5.25, "reached": 1, "width_bytes": 14336, "near": 8, "domains": 1}
    >>> rates = {"inside_bytes_per_s": 450e9, "outside_bytes_per_s": 50e9}
    >>> round(exchange_s("deepep", "dispatch", **sizes, **rates) * 1e6)
    908
    """
    kernel = KERNELS[dispatcher][direction]
    sends = reached * width_bytes / kernel.sending_bytes_per_s if domains > 1 else 0.0
    each = kernel.token_s + copies * (kernel.copy_s + width_bytes / kernel.bytes_per_s) + sends
    parts = [tokens / PROCESSORS * each]
    parts.append(tokens * copies * (near - 1) / near * width_bytes / (kernel.nvlink * inside_bytes_per_s))
    if domains > 1:
        far = tokens * reached * (domains - 1) / domains * width_bytes
        parts.append(far / (kernel.network * outside_bytes_per_s))
    slowest = max(parts)
    if not slowest:
        return kernel.start_s
    together: float = sum((part / slowest) ** _SHARPNESS for part in parts) ** (1 / _SHARPNESS)
    return kernel.start_s + slowest * together
