"""Fits few physical parameters to measured steps, and gives step times from what workers do.

``step = both(device, host) (1 + crowding log(workers)) (1 + by_servers servers) + communication``: the
device's seconds are its arithmetic and traffic at peak rates, each kind times a factor (of arithmetic: 1 or
more, as nothing beats the peak); the host's are calls; both run beside one another (the power of a norm says
how well).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foretrain.job import Job
from foretrain.predictors.predictddl.features import COMPUTING, FAMILIES, MOVING, OperatorWork

Array = npt.NDArray[np.float64]

_CONVOLUTION_TRAFFIC = ("dense convolutions", "sparse convolutions", "product")
_TRAFFIC = (*MOVING, *_CONVOLUTION_TRAFFIC)
_DEVICE_TERMS = (
    *(f"{name}: arithmetic above the peak" for name in COMPUTING),
    *(f"{name}: traffic" for name in _TRAFFIC),
    "convolutions: calls",
)
_LINK_TERMS = tuple(
    f"{exchange}{term}"
    for exchange in ("all-reduce", "servers")
    for term in ("", ", per worker", ", delay", ", delay per worker")
)
BASELINE = (*_DEVICE_TERMS, *_LINK_TERMS, "calls", "crowding", "crowding by servers", "overlap")
"""The parameters, each as the logarithm of its ratio to a first guess."""


class BaselineParameters(NamedTuple):
    """The parameters themselves, in the order of ``BASELINE``."""

    device: Array
    """Factors of ``_DEVICE_TERMS``."""
    link: Array
    """Factors of ``_LINK_TERMS``."""
    call_s: float
    crowding: float
    server_crowding: float
    overlap: float

    @classmethod
    def of(cls, logs: Array) -> BaselineParameters:
        values = np.exp(logs)
        values[: len(COMPUTING)] += 1
        device, link, rest = np.split(values, [len(_DEVICE_TERMS), len(_DEVICE_TERMS) + len(_LINK_TERMS)])
        return cls(device, link, *rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Guess:
    """The parameters before any run is seen; runs move them by a factor of e^2 either way."""

    arithmetic: float
    """Seconds over those at the peak, the part above 1."""
    traffic: float
    """Seconds over those at the rate of the device's memory."""
    convolution_s: float
    """Of each call of a convolution on the device."""
    exchange: float = 1.0
    """Seconds over those at ``_LINK_BYTES_PER_S``."""
    exchange_per_worker: float = 0.3
    delay_s: float
    """Of an exchange, and for each further worker."""
    call_s: float
    """Of the host, for each call."""
    crowding: float
    """Slowdown of a worker for each e-fold of their number."""
    server_crowding: float = 0.05
    overlap: float
    """The power of the norm above 1: 0 where device and host wait for one another."""

    @property
    def logs(self) -> Array:
        device = [self.arithmetic] * len(COMPUTING) + [self.traffic] * len(_TRAFFIC) + [self.convolution_s]
        link = [self.exchange, self.exchange_per_worker, self.delay_s, self.delay_s]
        rest = [self.call_s, self.crowding, self.server_crowding, self.overlap]
        return np.log([*device, *link, *link, *rest])


_CPU = _Guess(
    arithmetic=2.0, traffic=80.0, convolution_s=1e-4, delay_s=1e-2, call_s=3e-5, crowding=0.05, overlap=0.05
)
"""Of one core, whose memory rate in the catalogue is that of the whole machine."""
_GPU = _Guess(
    arithmetic=1.0, traffic=1.5, convolution_s=1e-6, delay_s=1e-3, call_s=1e-5, crowding=0.01, overlap=2.0
)
_GUESS_DEVIATION, _NOISE = 2.0, 0.12
"""How far a parameter may lie from its guess, and a run from the baseline, as standard deviations of
logarithms."""
_TYPE_DEVIATION = 0.4
"""How far a dataset type's parameters may lie from those of all types."""
_FARTHEST = 9.0
"""A logarithm that no parameter moves beyond."""
_OUTLIER, _EVALUATIONS = 2.0, 60
"""Standard deviations from which on a run pulls less, and steps of the fit."""
_MOST_OVERLAP = 10.0
_GRADIENT_BYTES = 4
"""Of a parameter: gradients are exchanged in fp32."""
_LINK_BYTES_PER_S = 1e9
_REDUCING_WORKERS = 8
"""Workers beside the first for which the guess of what an all-reduce takes for each holds."""
_LEAST_S = 1e-12


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
        return Physics(
            **{field.name: getattr(self, field.name)[chosen] for field in dataclasses.fields(self)}
        )


def physics(works: Sequence[OperatorWork], jobs: Sequence[Job]) -> Physics:
    """Seconds at peak rates by kind of operator, calls, and what is sent."""
    others = np.array([job.cluster.world_size - 1 for job in jobs], dtype=np.float64)
    served = np.array([bool(job.plan.servers) for job in jobs], dtype=np.float64)
    alone = 1 - served
    reduces = (others > 0) * alone
    arithmetic = np.array([work.arithmetic_s for work in works]).T[: len(COMPUTING)]
    moved = dict(zip(FAMILIES, np.array([work.traffic_s for work in works]).T, strict=True))
    moved["dense convolutions"] = moved["convolution"] + moved["pointwise convolution"]
    moved["sparse convolutions"] = moved["grouped convolution"] + moved["depthwise convolution"]
    traffic = [moved[name] for name in _TRAFFIC]
    sent_s = np.array([work.parameters for work in works]) * _GRADIENT_BYTES / _LINK_BYTES_PER_S
    reduced = [sent_s * reduces, sent_s * others * alone / _REDUCING_WORKERS, reduces, others * alone]
    fetched = [sent_s * served, sent_s * others * served, served, others * served]
    return Physics(
        device=np.column_stack([*arithmetic, *traffic, [work.convolutions for work in works]]),
        calls=np.array([work.calls for work in works]),
        link=np.column_stack([*reduced, *fetched]),
        others=others,
        servers=served,
        gpu=np.array([not job.cluster.device.is_cpu for job in jobs]),
    )


def baseline(logs: Array, terms: Physics) -> Array:
    """The logarithm of the step time.

    The device beside the host that issues calls, crowded by other workers; communication after it.
    """
    if terms.gpu.any() and not terms.gpu.all():
        log_times = np.empty(len(terms.gpu))
        for rows in (terms.gpu, np.logical_not(terms.gpu)):
            log_times[rows] = baseline(logs, terms[rows])
        return log_times
    fitted = BaselineParameters.of((_GPU if terms.gpu.any() else _CPU).logs + logs)
    power = 1.0 + min(fitted.overlap, _MOST_OVERLAP)
    device_s, host_s = terms.device @ fitted.device + _LEAST_S, terms.calls * fitted.call_s + _LEAST_S
    larger = np.maximum(device_s, host_s)
    both = larger * ((device_s / larger) ** power + (host_s / larger) ** power) ** (1 / power)
    crowded = both * (1 + fitted.crowding * np.log1p(terms.others))
    return np.asarray(
        np.log(crowded * (1 + fitted.server_crowding * terms.servers) + terms.link @ fitted.link)
    )


def fit_baseline(terms: Physics, targets: Array, near: Array | None = None) -> Array:
    """The parameters that fit best; where runs do not tell, ``near`` those of all types or the guesses."""
    from scipy.optimize import least_squares

    start = np.zeros(len(BASELINE)) if near is None else near
    deviation = _GUESS_DEVIATION if near is None else _TYPE_DEVIATION

    def residuals(logs: Array) -> Array:
        misses = baseline(np.clip(logs, -_FARTHEST, _FARTHEST), terms) - targets
        return np.concatenate([misses / _NOISE, (logs - start) / deviation])

    fit = least_squares(residuals, start, loss="soft_l1", f_scale=_OUTLIER, max_nfev=_EVALUATIONS)
    return np.clip(np.asarray(fit.x, dtype=np.float64), -_FARTHEST, _FARTHEST)
