"""Fits few physical parameters to measured steps, and gives step times from what workers do.

On CPUs ``step = both(device, host) cores machine (1 + crowding log(busy cores)) (1 + by_servers servers) +
exchange``: the device's seconds are its arithmetic and traffic at peak rates, each kind times a factor (of
arithmetic: 1 or more, as nothing beats the peak); the host's are calls; both run beside one another (the
power of a norm says how well). On GPUs the parts of a step are played (``gpu.py``). The exchange of gradients
is what ``costs.collectives`` makes of the bytes and the messages on the slowest link, times factors.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foretrain.cluster import Cluster
from foretrain.job import Job
from foretrain.predictors.machines import MACHINE_DEVIATION, machine_of
from foretrain.predictors.predictddl import gpu
from foretrain.predictors.predictddl.exchange import LINK_TERMS, exchange
from foretrain.predictors.predictddl.families import COMPUTING, FAMILIES, MOVING
from foretrain.predictors.predictddl.features import OperatorWork

Array = npt.NDArray[np.float64]

_CONVOLUTION_TRAFFIC = ("dense convolutions", "sparse convolutions", "product")
_TRAFFIC = (*MOVING, *_CONVOLUTION_TRAFFIC)
_CPU_TERMS = (
    *(f"{name}: arithmetic above the peak" for name in COMPUTING),
    *(f"{name}: traffic" for name in _TRAFFIC),
    "convolutions: calls",
)
_GUESS_DEVIATION, _NOISE = 2.0, 0.12
"""How far a parameter may lie from its guess, and a run from the baseline, as standard deviations of
logarithms."""
_TYPE_DEVIATION = 0.4
"""How far a dataset type's parameters may lie from those of all types, as a share of the deviation of the
guesses where these are known better."""
_FARTHEST = 9.0
"""A logarithm that no parameter moves beyond."""
_OUTLIER, _EVALUATIONS, _SETTLED = 2.0, 60, 1e-4
"""Standard deviations from which on a run pulls less, steps of the fit at most, and the share of the misfit
by which a step must improve it."""
_MOST_OVERLAP = 10.0
_LEAST_S, _STEP = 1e-12, 1e-6


@dataclass(frozen=True, eq=False)
class ParameterSet:
    """Names of parameters in their order, guesses of each, and how well guesses are known.

    A parameter is the logarithm of its ratio to its guess. After them come those of machines: the logarithm
    of how slow each is.
    """

    guesses: Mapping[str, float]
    deviations: Mapping[str, float] = field(default_factory=dict)
    """Of those that are known better, or worse, than ``_GUESS_DEVIATION``."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.guesses)

    def values(self, logs: Array) -> dict[str, float]:
        """The parameters themselves: what is above a peak or a rate adds to 1, as nothing beats it."""
        fitted = np.exp(np.log(list(self.guesses.values())) + logs[: len(self.guesses)])
        return {
            name: float(value) + (" above " in name)
            for name, value in zip(self.guesses, fitted.tolist(), strict=True)
        }


_EXCHANGE_DEVIATIONS = {
    "all-reduce: bytes above the network's rate": 0.7,
    "servers: bytes above the network's rate": 0.7,
    "hides no exchange": 0.3,
}


def _links(in_a_node: float, delay_s: float) -> dict[str, float]:
    """Guesses of seconds over those that the white box gives (over a network: the part above 1), for
    ``_NEIGHBOURS`` more workers on a machine, and of an exchange."""
    guessed = (in_a_node, 0.1, 0.3, delay_s, 1.0)
    return dict(zip(LINK_TERMS, (*guessed, *guessed), strict=True))


CPU = ParameterSet(
    {
        **dict.fromkeys(_CPU_TERMS[: len(COMPUTING)], 2.0),
        **dict.fromkeys(_CPU_TERMS[len(COMPUTING) : -1], 80.0),  # of one core; the rate is of all of them
        _CPU_TERMS[-1]: 1e-4,
        **_links(1.0, 1e-2),
        "calls": 3e-5,  # seconds of the host
        "crowding": 0.05,  # slowdown for each e-fold of the busy cores of a machine
        "crowding by servers": 0.05,
        "several cores": 0.8,  # threads of autograd and of the network have cores of their own
        "lost by cores": 0.2,  # the power of the cores by which a worker's time is above its share
        "shared cores": 1.0,  # the power of the processes for each core by which they are slower
        "hides no exchange": 0.7,  # the share of computing beside which no gradients are summed up
        "overlap": 0.05,  # the power of the norm above 1: 0 where device and host wait for one another
    },
    {
        **_EXCHANGE_DEVIATIONS,
        "several cores": 0.7,
        "lost by cores": 0.7,
        "shared cores": 0.3,
    },
)
_HOST_TERMS = tuple(f"host: {name}" for name in gpu.HOST_TERMS)
_WEIGHTS = tuple(f"{kind}: {trait}" for kind in gpu.GPU_KINDS for trait in gpu.TRAITS)
_ANY_DEVIATION, _TRAIT_DEVIATION = 1.0, 0.3
"""How far weights of traits may lie from 0; the first is what is always there."""
GPU = ParameterSet(
    {
        **dict.fromkeys(_WEIGHTS, 1.0),
        **dict(zip(_HOST_TERMS, gpu.GUESSED_HOST.tolist(), strict=True)),
        **_links(1.0, 1e-3),
        "crowding": 0.01,
        "crowding by servers": 0.05,
        "hides no exchange": 0.5,
        "starts idle": 1.0,  # weight of a step from an idle device beside one of many without a pause
    },
    {
        **_EXCHANGE_DEVIATIONS,
        **dict.fromkeys(_HOST_TERMS, 1.0),
        **{name: _ANY_DEVIATION if name.endswith(": any") else _TRAIT_DEVIATION for name in _WEIGHTS},
    },
)
"""Weights of traits are logarithms as they are: the guess of their exponent is 1."""


# Terms


@dataclass(frozen=True, eq=False, kw_only=True)
class Physics:
    """The terms of runs, a row each, that the baseline weighs; all of them on CPUs, or on GPUs."""

    device: npt.NDArray[Any]
    """On CPUs seconds, as ``_CPU_TERMS`` names them (the last are calls); on GPUs what each does."""
    calls: Array
    link: Array
    busy: Array
    """Cores that work at once on a machine."""
    cores: Array
    """Of each worker."""
    shared: Array
    """Processes for each core."""
    servers: Array
    computing: Array
    """Seconds of arithmetic at the peak."""
    machine: npt.NDArray[np.int64]
    """The place of the machine among those that are known; -1 for any other."""

    @property
    def law(self) -> ParameterSet:
        return GPU if self.device.dtype == object else CPU

    @functools.cached_property
    def side_by_side(self) -> gpu.StackedWork:
        """Stack the work of GPUs."""
        return gpu.StackedWork(self.device.tolist())

    def __getitem__(self, chosen: Any) -> Physics:
        return Physics(
            **{field.name: getattr(self, field.name)[chosen] for field in dataclasses.fields(self)}
        )


def physics(works: Sequence[OperatorWork], jobs: Sequence[Job], machines: Sequence[str] = ()) -> Physics:
    """Seconds at peak rates by kind of operator, calls, and what the exchange takes; ``machines`` are those
    that have a parameter."""
    served = np.array([bool(job.plan.servers) for job in jobs], dtype=np.float64)
    cores = np.array([job.cluster.device.cores if job.cluster.device.is_cpu else 1 for job in jobs])
    arithmetic = np.array([work.arithmetic_s for work in works])[:, : len(COMPUTING)]
    on_gpus = [work.on_gpu for work in works if work.on_gpu is not None]
    exchanged = np.array([exchange(work.parameters, job) for work, job in zip(works, jobs, strict=True)])
    alone = (1 - served)[:, None]
    places = {name: place for place, name in enumerate(machines)}
    return Physics(
        device=_objects(on_gpus) if on_gpus else _on_cores(works, arithmetic, cores),
        calls=np.array([work.calls for work in works]),
        link=np.hstack([exchanged * alone, exchanged * (1 - alone)]),
        busy=np.array([_busy(job.cluster) for job in jobs], dtype=np.float64),
        cores=cores.astype(np.float64),
        shared=np.array([job.cluster.workers_per_core(job.cluster.device) for job in jobs]),
        servers=served,
        computing=arithmetic.sum(axis=1),
        machine=np.array([places.get(machine_of(job), -1) for job in jobs], dtype=np.int64),
    )


def _busy(cluster: Cluster) -> int:
    """Cores that workers want on each machine, or GPUs."""
    device = cluster.device
    return cluster.busy_cores(device) if device.is_cpu else cluster.devices_per_node


def _objects(works: Sequence[gpu.DeviceWork]) -> npt.NDArray[Any]:
    column = np.empty(len(works), dtype=object)
    column[:] = works
    return column


def _on_cores(works: Sequence[OperatorWork], arithmetic: Array, cores: npt.NDArray[Any]) -> Array:
    shares = np.array([work.traffic_s for work in works]).T / cores
    moved = dict(zip(FAMILIES, shares, strict=True))
    moved["dense convolutions"] = moved["convolution"] + moved["pointwise convolution"]
    moved["sparse convolutions"] = moved["grouped convolution"] + moved["depthwise convolution"]
    traffic = [moved[name] for name in _TRAFFIC]
    return np.column_stack([*arithmetic.T, *traffic, [work.convolutions for work in works]])


# The laws

_SENT = LINK_TERMS.index("all-reduce: bytes above the network's rate")
_SENT_INSIDE = LINK_TERMS.index("all-reduce: bytes in a node")
_TO_SERVERS = LINK_TERMS.index("servers: bytes above the network's rate")


def baseline(logs: Array, terms: Physics) -> Array:
    """The logarithm of the step time.

    The device beside the host that issues calls, crowded by other workers; the exchange after it, but for the
    part of an all-reduce that is hidden beside the backward pass (of CPUs: where it goes over a network).
    """
    fitted = terms.law.values(logs)
    worker = _core_time(fitted, terms) if terms.law is CPU else _gpu_time(logs, terms).worker.seconds
    return _with_others(fitted, _slowness(logs, terms), worker, terms)[0]


def _crowding(fitted: Mapping[str, float], terms: Physics) -> Array:
    by_workers = 1 + fitted["crowding"] * np.log(np.maximum(terms.busy, 1.0))
    return by_workers * (1 + fitted["crowding by servers"] * terms.servers)


def _slowness(logs: Array, terms: Physics) -> Array:
    """Give the slowness of the machine of each run: 1 for any other than those that are known."""
    return np.asarray(np.exp(np.append(logs[len(terms.law.guesses) :], 0.0)[terms.machine]))


def _with_others(
    fitted: Mapping[str, float], slowness: Array, worker: Array, terms: Physics
) -> tuple[Array, Array]:
    """The logarithm of the step time of workers that compute for so long, and its slope by the logarithm of
    that."""
    weights = np.array([fitted[name] for name in LINK_TERMS])
    crowded = worker * slowness * _crowding(fitted, terms)
    hideable = terms.link[:, _SENT] * weights[_SENT]
    if terms.law is GPU:
        hideable = hideable + terms.link[:, _SENT_INSIDE] * weights[_SENT_INSIDE]
    share = 1 - min(fitted["hides no exchange"], 1.0)
    hidden = np.minimum(hideable, crowded * share)
    total = crowded + terms.link @ weights - hidden
    own = crowded * np.where(hideable > crowded * share, 1 - share, 1.0)
    return np.log(total), own / total


def _core_time(fitted: Mapping[str, float], terms: Physics) -> Array:
    power = 1.0 + min(fitted["overlap"], _MOST_OVERLAP)
    device_s = terms.device @ [fitted[name] for name in _CPU_TERMS] + _LEAST_S
    device_s = device_s * terms.cores ** fitted["lost by cores"]
    host_s = terms.calls * fitted["calls"] + _LEAST_S
    larger = np.maximum(device_s, host_s)
    both = larger * ((device_s / larger) ** power + (host_s / larger) ** power) ** (1 / power)
    both = both * np.where(terms.cores > 1, fitted["several cores"], 1.0)
    return np.asarray(both * terms.shared ** fitted["shared cores"])


class _GpuTime(NamedTuple):
    worker: gpu.PlayedTimes
    busy: gpu.PlayedTimes
    idle: Array
    """How the worker's seconds change with the logarithm of "starts idle"."""


def _gpu_time(logs: Array, terms: Physics, *, slopes: bool = False) -> _GpuTime:
    """Slopes are by the parameters of the device and the host."""
    fitted, shape = GPU.values(logs), (len(gpu.GPU_KINDS), len(gpu.TRAITS))
    calls = terms.side_by_side
    device_s, by_device = calls.device(logs[: len(_WEIGHTS)].reshape(shape), slopes=slopes)
    host = calls.host * [fitted[name] for name in _HOST_TERMS]
    alone, many, busy = gpu.play(device_s, host, by_device)
    share = fitted["starts idle"] / (1 + fitted["starts idle"])
    seconds = share * alone.seconds + (1 - share) * many.seconds + _LEAST_S
    by_both = share * alone.slopes + (1 - share) * many.slopes
    idle = share * (1 - share) * (alone.seconds - many.seconds)
    return _GpuTime(
        gpu.PlayedTimes(seconds, by_both), gpu.PlayedTimes(busy.seconds + _LEAST_S, busy.slopes), idle
    )


def least(terms: Physics) -> Array:
    """The logarithm of what no step takes less than: arithmetic at the peak, bytes at the network's rate."""
    sent = terms.link[:, [_SENT, _TO_SERVERS]].sum(axis=1)
    return np.asarray(np.log(np.maximum(terms.computing, sent) + _LEAST_S))


def fit_baseline(
    terms: Physics, targets: Array, near: Array | None = None, *, machines: int = 0, busy: Array | None = None
) -> Array:
    """The parameters that fit best, with those of so many ``machines``; where runs do not tell, ``near``
    those of all types or the guesses.

    ``busy`` is the logarithm of the time that GPUs were busy, where it was measured (else not a number): it
    tells what of a step is the device's.
    """
    from scipy.optimize import least_squares

    law = terms.law
    guessed = [law.deviations.get(name, _GUESS_DEVIATION) for name in law.names]
    deviation = np.array([*guessed, *[MACHINE_DEVIATION] * machines])
    start = np.zeros(len(deviation)) if near is None else near
    if near is not None:
        deviation = np.minimum(_TYPE_DEVIATION, _TYPE_DEVIATION * deviation)
    measured = len(law.names) + np.unique(terms.machine[terms.machine >= 0])
    has_busy = np.zeros(len(targets), dtype=np.bool_) if busy is None or law is CPU else np.isfinite(busy)

    def parameters(logs: Array) -> Array:
        """Take what all machines share out of their parameters: theirs are beside the mean."""
        values = np.clip(logs, -_FARTHEST, _FARTHEST)
        if near is None and len(measured):
            values[measured] -= values[measured].mean()
        return values

    def residuals(logs: Array) -> Array:
        values, misses = parameters(logs), [(logs - start) / deviation]
        if busy is not None and has_busy.any():
            misses.insert(0, (np.log(_gpu_time(values, terms).busy.seconds) - busy)[has_busy] / _NOISE)
        return np.concatenate([(baseline(values, terms) - targets) / _NOISE, *misses])

    fit = least_squares(
        residuals, start, loss="soft_l1", f_scale=_OUTLIER, max_nfev=_EVALUATIONS, ftol=_SETTLED,
        jac="2-point" if law is CPU else lambda logs: _gpu_slopes(logs, terms, deviation, has_busy),
    )  # fmt: skip
    return parameters(np.asarray(fit.x, dtype=np.float64))


def _gpu_slopes(logs: Array, terms: Physics, deviation: Array, has_busy: npt.NDArray[np.bool_]) -> Array:
    """Give the slopes of the residuals of a fit to GPUs: of what is played in closed form, of the rest by
    small steps."""
    law, played = terms.law, len(_WEIGHTS) + len(_HOST_TERMS)
    fitted = law.values(logs)
    time = _gpu_time(logs, terms, slopes=True)
    log_times, own = _with_others(fitted, _slowness(logs, terms), time.worker.seconds, terms)
    by_time = (own / time.worker.seconds)[:, None]
    slopes = np.zeros((len(log_times), len(logs)))
    slopes[:, :played] = time.worker.slopes * by_time
    slopes[:, law.names.index("starts idle")] = time.idle * by_time[:, 0]
    for place in range(played, len(logs)):
        if place < len(law.names) and law.names[place] == "starts idle":
            continue
        moved = logs.copy()
        moved[place] += _STEP
        other, _ = _with_others(law.values(moved), _slowness(moved, terms), time.worker.seconds, terms)
        slopes[:, place] = (other - log_times) / _STEP
    of_busy = np.zeros((int(has_busy.sum()), len(logs)))
    of_busy[:, :played] = (time.busy.slopes / time.busy.seconds[:, None])[has_busy]
    return np.concatenate([slopes / _NOISE, of_busy / _NOISE, np.diag(1 / deviation)])
