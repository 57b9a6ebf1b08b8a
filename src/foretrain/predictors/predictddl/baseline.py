"""What the workers of runs do in a step, by families of operators, in; a step time from few physical parameters that are fitted to the runs out.

``step = both(device, host) (1 + crowding log(workers)) (1 + by_servers servers) + communication``: the device's seconds are its arithmetic and traffic
at peak rates, each family times a factor (of arithmetic: 1 or more, as nothing beats the peak); the host's are calls; both run beside one another (the power of a norm says how well).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrain.job import Job
from foretrain.predictors.predictddl.features import COMPUTING, FAMILIES, MOVING, Work

Array = npt.NDArray[np.float64]

_DEVICE_TERMS = (
    *(f"{name}: arithmetic above the peak" for name in COMPUTING), *(f"{name}: traffic" for name in MOVING),
    "dense convolutions: traffic", "sparse convolutions: traffic", "product: traffic", "convolutions: calls",
)  # fmt: skip
_LINK_TERMS = (
    "all-reduce", "all-reduce, per worker", "all-reduce, delay", "all-reduce, delay per worker",
    "servers", "servers, per worker", "servers, delay", "servers, delay per worker",
)  # fmt: skip
BASELINE = (*_DEVICE_TERMS, *_LINK_TERMS, "calls", "crowding", "crowding by servers", "overlap")
"""The parameters, each as the logarithm of its ratio to a first guess."""
_GUESS = np.log(
    [
        *([2.0] * len(COMPUTING)),
        *([80.0] * (len(MOVING) + 3)),
        1e-4,
        1.0,
        0.3,
        1e-2,
        1e-2,
        1.0,
        0.3,
        1e-2,
        1e-2,
        3e-5,
        0.05,
        0.05,
        0.05,
    ]
)
"""Of one core of a CPU, whose memory rate is that of the whole machine; of arithmetic, the part above 1."""
_ON_A_GPU = np.log(
    [
        *([1.0] * len(COMPUTING)),
        *([1.5] * (len(MOVING) + 3)),
        1e-6,
        1.0,
        0.3,
        1e-3,
        1e-3,
        1.0,
        0.3,
        1e-3,
        1e-3,
        1e-5,
        0.01,
        0.05,
        2.0,
    ]
)
_LOOSE, _NOISE = 2.0, 0.12
"""How far a parameter may lie from its guess, and a run from the baseline, as standard deviations of logarithms."""
OWN = 0.4
"""How far a dataset type's parameters may lie from those of all types."""
_LINK_BYTES_PER_S = 1e9


@dataclass(frozen=True, eq=False, kw_only=True)
class Physics:
    """The terms of runs, a row each, that the baseline weighs."""

    device: Array
    """Seconds, as ``_DEVICE_TERMS`` names them; the last are calls."""
    calls: Array
    link: Array
    others: Array
    """Workers beside the first."""
    servers: Array
    gpu: npt.NDArray[np.bool_]

    def __getitem__(self, chosen: Any) -> Physics:
        return Physics(**{one.name: getattr(self, one.name)[chosen] for one in dataclasses.fields(self)})


def physics(works: Sequence[Work], jobs: Sequence[Job]) -> Physics:
    """Seconds at peak rates by family, calls, and what is sent."""
    workers = np.array([job.cluster.world_size for job in jobs], dtype=np.float64)
    served = np.array([bool(job.plan.servers) for job in jobs], dtype=np.float64)
    arithmetic, traffic = (
        np.array([getattr(work, name) for work in works]) for name in ("arithmetic_s", "traffic_s")
    )
    moved = dict(zip(FAMILIES, traffic.T, strict=True))
    dense, sparse = (
        moved["convolution"] + moved["pointwise convolution"],
        moved["grouped convolution"] + moved["depthwise convolution"],
    )
    columns = [
        *arithmetic.T[: len(COMPUTING)],
        *(moved[name] for name in MOVING),
        dense,
        sparse,
        moved["product"],
    ]
    sent_s = np.array([work.parameters for work in works]) * 4 / _LINK_BYTES_PER_S
    others, alone = workers - 1, 1 - served
    reduces = (others > 0) * alone
    sent = [sent_s * reduces, sent_s * others * alone / 8, reduces, others * alone]
    sent += [sent_s * served, sent_s * others * served, served, others * served]
    return Physics(
        device=np.column_stack([*columns, [work.convolutions for work in works]]),
        calls=np.array([work.calls for work in works]),
        link=np.column_stack(sent),
        others=others,
        servers=served,
        gpu=np.array([not job.cluster.device.is_cpu for job in jobs]),
    )


def baseline(logs: Array, terms: Physics) -> Array:
    """The logarithm of the step time: the device beside the host that issues calls, crowded by other workers; communication after it."""
    if terms.gpu.any() and not terms.gpu.all():
        found = np.empty(len(terms.gpu))
        for some in (terms.gpu, np.logical_not(terms.gpu)):
            found[some] = baseline(logs, terms[some])
        return found
    factors = np.exp((_ON_A_GPU if terms.gpu.any() else _GUESS) + logs)
    devices, links = len(_DEVICE_TERMS), len(_DEVICE_TERMS) + len(_LINK_TERMS)
    factors[: len(COMPUTING)] += 1
    call_s, crowding, by_servers, overlap = factors[links:]
    power = 1.0 + min(float(overlap), 10.0)
    device_s, host_s = terms.device @ factors[:devices] + 1e-12, terms.calls * call_s + 1e-12
    larger = np.maximum(device_s, host_s)
    both = larger * ((device_s / larger) ** power + (host_s / larger) ** power) ** (1 / power)
    crowded = both * (1 + crowding * np.log1p(terms.others)) * (1 + by_servers * terms.servers)
    return np.asarray(np.log(crowded + terms.link @ factors[devices:links]))


def fit_baseline(terms: Physics, targets: Array, near: Array | None = None) -> Array:
    """The parameters that fit best, ``near`` those of all types (or else the guesses) where runs do not tell."""
    from scipy.optimize import least_squares

    start, loose = (np.zeros(len(BASELINE)), _LOOSE) if near is None else (near, OWN)

    def misfit(logs: Array) -> Array:
        return np.concatenate(
            [(baseline(np.clip(logs, -9, 9), terms) - targets) / _NOISE, (logs - start) / loose]
        )

    found = least_squares(misfit, start, loss="soft_l1", f_scale=2.0, max_nfev=60)
    return np.clip(np.asarray(found.x, dtype=np.float64), -9, 9)
