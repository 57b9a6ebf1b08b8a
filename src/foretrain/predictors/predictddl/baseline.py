"""Fits few physical parameters to measured steps, and gives step times from what workers do.

``step = both(device, host) cores machine (1 + crowding log(busy cores)) (1 + by_servers servers) +
exchange``: the device's seconds are its arithmetic and traffic at peak rates, each kind times a factor (of
arithmetic: 1 or more, as nothing beats the peak); the host's are calls; both run beside one another (the
power of a norm says how well). The exchange of gradients is what ``costs.collectives`` makes of the bytes and
the messages on the slowest link, times factors.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foretrain.costs.collectives import Collectives, team
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
    f"{exchange}: {term}"
    for exchange in ("all-reduce", "servers")
    for term in (
        "bytes in a node",
        "bytes above the network's rate",
        "bytes per neighbour",
        "delay",
        "messages",
    )
)
_ALL_REDUCED = 1
"""The place of what all-reduces send over a network, of which a part is hidden beside the backward pass."""
BASELINE = (
    *_DEVICE_TERMS,
    *_LINK_TERMS,
    *("calls", "crowding", "crowding by servers", "several cores", "lost by cores", "shared cores"),
    *("hides no exchange", "overlap"),
)
"""The parameters, each as the logarithm of its ratio to a first guess. After them come those of machines: the
logarithm of how slow each is."""


_ABOVE = [BASELINE.index(name) for name in BASELINE if " above " in name]
"""Those that add to 1: nothing beats a device's peak or a link's rate."""


class BaselineParameters(NamedTuple):
    """The parameters themselves, in the order of ``BASELINE``."""

    device: Array
    """Factors of ``_DEVICE_TERMS``."""
    link: Array
    """Factors of ``_LINK_TERMS``."""
    call_s: float
    crowding: float
    server_crowding: float
    several_cores: float
    lost_by_cores: float
    shared_cores: float
    hides_nothing: float
    overlap: float

    @classmethod
    def of(cls, logs: Array) -> BaselineParameters:
        values = np.exp(logs)
        values[_ABOVE] += 1
        device, link, rest = np.split(values, [len(_DEVICE_TERMS), len(_DEVICE_TERMS) + len(_LINK_TERMS)])
        return cls(device, link, *rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Guess:
    """The parameters before any run is seen; runs move most by a factor of e^2 either way."""

    arithmetic: float
    """Seconds over those at the peak, the part above 1."""
    traffic: float
    """Seconds over those at the rate of the device's memory."""
    convolution_s: float
    """Of each call of a convolution on the device."""
    exchange: float = 1.0
    """Seconds over those that the white box gives."""
    network: float = 0.1
    """Seconds over those at the network's rate, the part above 1."""
    exchange_per_neighbour: float = 0.3
    """Seconds over those at ``_MEMORY_BYTES_PER_S``, for ``_NEIGHBOURS`` more workers on a machine."""
    delay_s: float
    """Of an exchange."""
    call_s: float
    """Of the host, for each call."""
    crowding: float
    """Slowdown of a worker for each e-fold of the busy cores of its machine."""
    server_crowding: float = 0.05
    several_cores: float = 0.8
    """Time of a worker of several cores over what their number gives: threads of autograd and of the network
    have cores of their own."""
    lost_by_cores: float = 0.2
    """The power of the cores by which a worker's time on them is above its share."""
    shared_cores: float = 1.0
    """The power of the processes for each core by which they are slower."""
    hides_nothing: float = 0.7
    """The share of a worker's computing beside which no gradients are summed up over a network."""
    overlap: float
    """The power of the norm above 1: 0 where device and host wait for one another."""

    @property
    def logs(self) -> Array:
        device = [self.arithmetic] * len(COMPUTING) + [self.traffic] * len(_TRAFFIC) + [self.convolution_s]
        link = [self.exchange, self.network, self.exchange_per_neighbour, self.delay_s, self.exchange]
        rest = [self.call_s, self.crowding, self.server_crowding]
        rest += [self.several_cores, self.lost_by_cores, self.shared_cores, self.hides_nothing, self.overlap]
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
_KNOWN_DEVIATIONS = {
    "all-reduce: bytes above the network's rate": 0.7,
    "servers: bytes above the network's rate": 0.7,
    "several cores": 0.7,
    "lost by cores": 0.7,
    "shared cores": 0.3,
    "hides no exchange": 0.3,
}
"""The same of parameters that are known better."""
MACHINE_DEVIATION = 0.35
"""How far machines lie from one another, as far as is known before runs of several are seen."""
_TYPE_DEVIATION = 0.4
"""How far a dataset type's parameters may lie from those of all types, as a share of the deviation of the
guesses where these are known better."""
_FARTHEST = 9.0
"""A logarithm that no parameter moves beyond."""
_OUTLIER, _EVALUATIONS = 2.0, 60
"""Standard deviations from which on a run pulls less, and steps of the fit."""
_MOST_OVERLAP = 10.0
_GRADIENT_BYTES = 4
"""Of a parameter: gradients are exchanged in fp32."""
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20
"""Bytes of the gradients that torch's DistributedDataParallel sends at once."""
_MEMORY_BYTES_PER_S = 1e9
_NEIGHBOURS = 8
"""Further workers on a machine for which the guess of what an exchange takes for each holds."""
_LEAST_S = 1e-12


# Machines


_PROCESSORS = ("xeon", "epyc", "ryzen", "opteron", "threadripper", "graviton", "altra", "grace", "apple")
"""Names by which a machine is known, whatever else is said of it."""


def host_cores(host: str | None) -> int | None:
    """The cores of a machine, where the words for it tell them.

    >>> host_cores("AMD EPYC, 2 cores"), host_cores("16-core Xeon"), host_cores("laptop")
    (2, 16, None)
    """
    found = re.search(r"(\d+)[ -]cores?\b", host or "")
    return int(found.group(1)) if found else None


def machine_of(job: Job) -> str:
    """The kind of machine whose cores do the work: processor and cores, as far as the words for it tell;
    '' where they are missing, and of other devices.

    In virtual machines that is all that is recorded.
    """
    host = (job.cluster.host or "") if job.cluster.device.is_cpu else ""
    name = next((one for one in _PROCESSORS if one in host.lower()), None)
    return host if name is None else f"{name}, {host_cores(host) or '?'} cores"


def busy_cores(job: Job) -> float:
    """Cores that the workers of a job want on each machine; of devices that are no CPU, workers."""
    cluster = job.cluster
    cores = cluster.device.cores if cluster.device.is_cpu else 1
    return cluster.world_size * cores / (cluster.machines or cluster.nodes)


def sharing(job: Job) -> float:
    """Processes for each core of the machine, at least 1; servers wait while workers compute."""
    cores = host_cores(job.cluster.host)
    return 1.0 if cores is None or not job.cluster.device.is_cpu else max(1.0, busy_cores(job) / cores)


# Terms


@dataclass(frozen=True, eq=False, kw_only=True)
class Physics:
    """The terms of runs, a row each, that the baseline weighs."""

    device: Array
    """Seconds, as ``_DEVICE_TERMS`` names them; the last are calls."""
    calls: Array
    link: Array
    busy: Array
    """Cores that work at once on a machine."""
    cores: Array
    """Of each worker."""
    shared: Array
    """Processes for each core."""
    servers: Array
    machine: npt.NDArray[np.int64]
    """The place of the machine among those that are known; -1 for any other."""
    gpu: npt.NDArray[np.bool_]

    def __getitem__(self, chosen: Any) -> Physics:
        return Physics(
            **{field.name: getattr(self, field.name)[chosen] for field in dataclasses.fields(self)}
        )


def physics(works: Sequence[OperatorWork], jobs: Sequence[Job], machines: Sequence[str] = ()) -> Physics:
    """Seconds at peak rates by kind of operator, calls, and what the exchange takes; ``machines`` are those
    that have a parameter."""
    served = np.array([bool(job.plan.servers) for job in jobs], dtype=np.float64)
    cores = np.array([job.cluster.device.cores if job.cluster.device.is_cpu else 1 for job in jobs])
    arithmetic = np.array([work.arithmetic_s for work in works]).T[: len(COMPUTING)]
    shares = np.array([work.traffic_s for work in works]).T / cores
    moved = dict(zip(FAMILIES, shares, strict=True))
    moved["dense convolutions"] = moved["convolution"] + moved["pointwise convolution"]
    moved["sparse convolutions"] = moved["grouped convolution"] + moved["depthwise convolution"]
    traffic = [moved[name] for name in _TRAFFIC]
    exchanged = np.array([_exchange(work, job) for work, job in zip(works, jobs, strict=True)])
    alone = (1 - served)[:, None]
    places = {name: place for place, name in enumerate(machines)}
    return Physics(
        device=np.column_stack([*arithmetic, *traffic, [work.convolutions for work in works]]),
        calls=np.array([work.calls for work in works]),
        link=np.hstack([exchanged * alone, exchanged * (1 - alone)]),
        busy=np.array([busy_cores(job) for job in jobs]),
        cores=cores.astype(np.float64),
        shared=np.array([sharing(job) for job in jobs]),
        servers=served,
        machine=np.array([places.get(machine_of(job), -1) for job in jobs], dtype=np.int64),
        gpu=np.array([not job.cluster.device.is_cpu for job in jobs]),
    )


def _exchange(work: OperatorWork, job: Job) -> tuple[float, ...]:
    """The terms of the exchange of gradients that a job makes, by the white box; zeros where there is
    none."""
    cluster, plan = job.cluster, job.plan
    if cluster.world_size == 1 and not plan.servers:
        return (0.0,) * (len(_LINK_TERMS) // 2)
    sent_bytes = work.parameters * _GRADIENT_BYTES
    network, sizes = Collectives(cluster), np.array([sent_bytes, 0.0])
    if plan.servers:
        workers = 1 if plan.asynchronous else cluster.world_size
        own = 0 if cluster.servers is None else cluster.servers.nodes
        times = network.parameter_server_s(
            sizes, workers=workers, servers=plan.servers, nodes=cluster.nodes, server_nodes=own
        )
        messages_s = float(times[1])
    else:
        everyone = team(cluster.world_size, 1, cluster.devices_per_node)
        times = network.time_s("all_reduce", sizes, everyone)
        messages_s = float(times[1]) * (1 + math.ceil(max(sent_bytes - _FIRST_BUCKET, 0.0) / _BUCKET))
    moving_s = float(times[0] - times[1])
    inside, outside = (0.0, moving_s) if job.over_network else (moving_s, 0.0)
    neighbours = cluster.world_size / (cluster.machines or cluster.nodes) - 1
    return inside, outside, sent_bytes / _MEMORY_BYTES_PER_S * neighbours / _NEIGHBOURS, 1.0, messages_s


# The law


def baseline(logs: Array, terms: Physics) -> Array:
    """The logarithm of the step time.

    The device beside the host that issues calls, crowded by other workers; the exchange after it.
    """
    if terms.gpu.any() and not terms.gpu.all():
        log_times = np.empty(len(terms.gpu))
        for rows in (terms.gpu, np.logical_not(terms.gpu)):
            log_times[rows] = baseline(logs, terms[rows])
        return log_times
    guess = (_GPU if terms.gpu.any() else _CPU).logs
    fitted = BaselineParameters.of(guess + logs[: len(BASELINE)])
    slowness = np.append(logs[len(BASELINE) :], 0.0)  # of any other machine: 0
    power = 1.0 + min(fitted.overlap, _MOST_OVERLAP)
    device_s = (terms.device @ fitted.device + _LEAST_S) * terms.cores**fitted.lost_by_cores
    host_s = terms.calls * fitted.call_s + _LEAST_S
    larger = np.maximum(device_s, host_s)
    both = larger * ((device_s / larger) ** power + (host_s / larger) ** power) ** (1 / power)
    worker = both * np.where(terms.cores > 1, fitted.several_cores, 1.0) * np.exp(slowness[terms.machine])
    crowded = worker * (1 + fitted.crowding * np.log(np.maximum(terms.busy, 1.0)))
    crowded *= (1 + fitted.server_crowding * terms.servers) * terms.shared**fitted.shared_cores
    exchange = terms.link @ fitted.link
    hidden = np.minimum(
        terms.link[:, _ALL_REDUCED] * fitted.link[_ALL_REDUCED],
        crowded * (1 - min(fitted.hides_nothing, 1.0)),
    )
    return np.asarray(np.log(crowded + exchange - hidden))


def least(terms: Physics) -> Array:
    """The logarithm of what no step takes less than: arithmetic at the peak, bytes at the network's rate."""
    computing = terms.device[:, : len(COMPUTING)].sum(axis=1)
    sent = terms.link[:, [_ALL_REDUCED, _ALL_REDUCED + len(_LINK_TERMS) // 2]].sum(axis=1)
    return np.asarray(np.log(np.maximum(computing, sent) + _LEAST_S))


def fit_baseline(terms: Physics, targets: Array, near: Array | None = None, *, machines: int = 0) -> Array:
    """The parameters that fit best, with those of so many ``machines``; where runs do not tell, ``near``
    those of all types or the guesses."""
    from scipy.optimize import least_squares

    guessed = [_KNOWN_DEVIATIONS.get(name, _GUESS_DEVIATION) for name in BASELINE]
    deviation = np.array([*guessed, *[MACHINE_DEVIATION] * machines])
    start = np.zeros(len(deviation)) if near is None else near
    if near is not None:
        deviation = np.minimum(_TYPE_DEVIATION, _TYPE_DEVIATION * deviation)
    measured = len(BASELINE) + np.unique(terms.machine[terms.machine >= 0])

    def parameters(logs: Array) -> Array:
        """What all machines share is in the other parameters: theirs are beside the mean."""
        values = np.clip(logs, -_FARTHEST, _FARTHEST)
        if near is None and len(measured):
            values[measured] -= values[measured].mean()
        return values

    def residuals(logs: Array) -> Array:
        misses = baseline(parameters(logs), terms) - targets
        return np.concatenate([misses / _NOISE, (logs - start) / deviation])

    fit = least_squares(residuals, start, loss="soft_l1", f_scale=_OUTLIER, max_nfev=_EVALUATIONS)
    return parameters(np.asarray(fit.x, dtype=np.float64))
