"""Simulates a trace in rounds, in which jobs lease devices of one kind, as Gavel does.

Time passes in rounds. At the start of each, jobs get leases on devices of one kind, in the order of their
priorities: the share of time that the policy allots to a job on a kind of device, over the share that it
received since the allotment. A round ends when its last job has done the whole steps that fit into its
length, or has ended. Follows the scheduler of Narayanan et al., OSDI 2020.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from foretrain.errors import InputError, invalid
from foretrain.scheduling.jobs import TraceJob
from foretrain.scheduling.machines import FULL, Allocation, Machine, memory_of
from foretrain.scheduling.result import Column, Result, Segments
from foretrain.scheduling.sharing.interference import Interference
from foretrain.scheduling.speeds import Speeds

ROUND_S = 360.0
LEAST_ROUND_S = 1.0
"""With shorter ones a simulation hardly ends."""
RESET_S = 1920.0
"""Least time between two allotments."""
_FASTEST_FIRST = ("v100", "p100", "k80")
_SHUFFLE_SEED = 5
"""Added to the seed, for the order in which policies that ignore the kind of device fill them."""


@dataclass(slots=True, eq=False)
class Leased:
    """A job in the cluster."""

    number: int
    spec: TraceJob
    work: float
    rates: Mapping[str, float]
    left: float
    received_s: dict[str, float] = field(default_factory=dict)
    """Time on each kind of device since the last allotment, and half a round."""
    owed_s: dict[str, float] = field(default_factory=dict)
    """What it should have received and did not, by each kind of device."""
    first_start_s: float | None = None

    @property
    def gpus(self) -> int:
        return self.spec.gpus

    @property
    def key(self) -> tuple[int, ...]:
        return (self.number,)

    @property
    def jobs(self) -> tuple[Leased, ...]:
        return (self,)

    def rates_on(self, device: str) -> tuple[float, ...]:
        return (self.rates[device],)


@dataclass(slots=True, eq=False)
class Pair:
    """Two jobs that may share devices."""

    jobs: tuple[Leased, Leased]
    rates: Mapping[str, tuple[float, float]]
    """Of each beside the other; 0 for both where they had better not share."""
    received_s: dict[str, float]
    owed_s: dict[str, float]

    @property
    def gpus(self) -> int:
        return self.jobs[0].gpus

    @property
    def key(self) -> tuple[int, ...]:
        return tuple(job.number for job in self.jobs)

    def rates_on(self, device: str) -> tuple[float, ...]:
        return self.rates[device]


Unit = Leased | Pair
"""What has leases: a job, or two that share."""


class RoundPolicy(ABC):
    """Divides the time of every kind of device among jobs."""

    name: ClassVar[str]
    knows_devices: ClassVar[bool] = False
    """Whether it tells kinds of devices apart; one that does not fills them in random order."""
    whole: ClassVar[bool] = False
    """Whether jobs only ever run where the policy puts them."""
    packs: ClassVar[bool] = False
    """Whether it lets two jobs share devices."""
    tries: ClassVar[bool] = False
    """Whether it finds out by itself which pairs gain by it; else it is given none that do not."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    @abstractmethod
    def allot(
        self, jobs: Sequence[Leased], devices: Mapping[str, int], now_s: float
    ) -> npt.NDArray[np.float64]:
        """Shares of time, one row per job and one column per kind of device."""

    def allot_with_pairs(
        self, jobs: Sequence[Leased], pairs: Sequence[Pair], devices: Mapping[str, int], now_s: float
    ) -> npt.NDArray[np.float64]:
        """The same with rows for pairs below; there are none for a policy that does not pack."""
        return self.allot(jobs, devices, now_s)


class Pairing:
    """Finds jobs of one GPU that may share it: their memory fits, and both together do more than one, unless
    pairs that do not are to be tried too."""

    def __init__(
        self, interference: Interference, machines: Sequence[Machine], *, tries: bool = False
    ) -> None:
        self._interference, self._memory, self._tries = interference, memory_of(machines), tries

    def pair(self, one: Leased, other: Leased, devices: Iterable[str], received_s: float) -> Pair | None:
        """None where two jobs may share no kind of device."""
        if one.gpus != 1 or other.gpus != 1:
            return None
        rates = {device: self._rates(one, other, device) for device in devices}
        if not any(min(both) > 0 for both in rates.values()):
            return None
        return Pair((one, other), rates, dict.fromkeys(rates, received_s), dict.fromkeys(rates, 0.0))

    def _rates(self, one: Leased, other: Leased, device: str) -> tuple[float, float]:
        memory = self._memory.get(device)
        if memory is not None and self._memory_of(one) + self._memory_of(other) > memory:
            return 0.0, 0.0
        first = self._interference.speed(device, one.spec.kind, [other.spec.kind])
        second = self._interference.speed(device, other.spec.kind, [one.spec.kind])
        rates = (one.rates[device] * first, other.rates[device] * second)
        gain = first + second > 1 or self._tries
        return rates if gain and min(rates) > 0 else (0.0, 0.0)

    def _memory_of(self, job: Leased) -> float:
        return job.spec.memory_bytes or self._interference.memory_bytes(job.spec.kind)


class Rounds:
    """The simulation of one trace."""

    def __init__(
        self,
        jobs: Sequence[TraceJob],
        machines: Sequence[Machine],
        policy: RoundPolicy,
        speeds: Speeds,
        *,
        round_s: float = ROUND_S,
        reset_s: float = RESET_S,
        seed: int = 0,
        pairs: Interference | None = None,
    ) -> None:
        if not round_s > 0:
            raise invalid("rounds", round_s, "a time above zero")
        self._machines = tuple(machines)
        self._devices: dict[str, int] = {}
        for machine in sorted(machines, key=lambda machine: machine.device):
            self._devices[machine.device] = self._devices.get(machine.device, 0) + machine.gpus
        self._places = _places(machines)
        self._policy, self._speeds = policy, speeds
        self._round_s, self._reset_s = round_s, reset_s
        self._order = random.Random(seed + _SHUFFLE_SEED)
        self._jobs = [self._lease(number, job) for number, job in enumerate(jobs)]
        self._active: list[Leased] = []
        self._pairs: list[Pair] = []
        self._pairing = (
            Pairing(pairs, machines, tries=policy.tries) if pairs is not None and policy.packs else None
        )
        self._allotted: dict[tuple[int, ...], Mapping[str, float]] = {}
        self._spent_s = dict.fromkeys(self._devices, 0.0)
        self._stale = False
        self._last_s = 0.0
        self._finish_s = np.full(len(jobs), np.nan)
        self._segments = Segments()

    def _lease(self, number: int, job: TraceJob) -> Leased:
        rates = {
            device: self._speeds.rate(job, device, (job.gpus,))
            if count >= job.gpus and job.device in (None, device)
            else 0.0
            for device, count in self._devices.items()
        }
        if max(rates.values()) <= 0:
            needs = f"needs {job.gpus} GPUs of one kind, and runs on none of the cluster's"
            raise InputError(f"trace: job {job.name!r} ({job.kind}) {needs}")
        work = self._speeds.work(job)
        return Leased(number, job, work, rates, work)

    def run(self) -> Result:
        """Until every job is done."""
        coming = sorted(self._jobs, key=lambda job: (job.spec.arrival_s, job.number), reverse=True)
        now_s = coming[-1].spec.arrival_s if coming else 0.0
        while coming or self._active:
            while coming and coming[-1].spec.arrival_s <= now_s:
                self._admit(coming.pop())
            if self._stale and (now_s - self._last_s >= self._reset_s or self._last_s == 0):
                self._allot(now_s)
            leases = self._leases()
            if leases:
                now_s = self._run_round(leases, now_s)
            elif coming:
                now_s = coming[-1].spec.arrival_s
            elif self._stale:  # at that very moment: its difference to the last one may round to less
                now_s = self._last_s + self._reset_s
                self._allot(now_s)
            else:
                raise InputError(
                    f"policy {self._policy.name}: leaves {len(self._active):,} jobs waiting for ever"
                )
        return self._result()

    def _admit(self, job: Leased) -> None:
        job.received_s = dict.fromkeys(self._devices, self._round_s / 2)
        job.owed_s = dict.fromkeys(self._devices, 0.0)
        if self._pairing is not None:
            both = (
                self._pairing.pair(other, job, self._devices, self._round_s / 2) for other in self._active
            )
            self._pairs += [pair for pair in both if pair is not None]
        self._active.append(job)
        self._stale = True

    def _allot(self, now_s: float) -> None:
        """A new division of time; what jobs are owed by the old one is kept to break ties."""
        passed = now_s - self._last_s
        units = self._units()
        for device in self._devices:
            for unit in units:
                due = self._allotted.get(unit.key, {}).get(device, 0.0) * passed
                unit.owed_s[device] += due - (unit.received_s[device] - self._round_s / 2)
                unit.received_s[device] = self._round_s / 2
            self._spent_s[device] = len(units) * self._round_s / 2
        if self._active:
            shares = self._policy.allot_with_pairs(self._active, self._pairs, self._devices, now_s)
            rows = (dict(zip(self._devices, row, strict=True)) for row in shares.tolist())
            self._allotted = {unit.key: row for unit, row in zip(units, rows, strict=True)}
        self._stale, self._last_s = False, now_s

    def _units(self) -> list[Unit]:
        return [*self._active, *self._pairs]

    def _leases(self) -> list[tuple[Unit, str]]:
        """Who runs where in the next round: kind by kind, by priority, whoever fits."""
        kinds = sorted(
            self._devices,
            key=lambda device: (_FASTEST_FIRST.index(device) if device in _FASTEST_FIRST else -1, device),
        )
        if not self._policy.knows_devices:
            self._order.shuffle(kinds)
        left, leases = dict(self._devices), []
        leased: set[int] = set()
        for device in kinds:
            for priority, unit in self._by_priority(device):
                free = unit.gpus <= left[device] and leased.isdisjoint(unit.key)
                only_allotted = self._policy.whole or len(unit.jobs) > 1
                if free and min(unit.rates_on(device)) > 0 and (priority > 0 or not only_allotted):
                    left[device] -= unit.gpus
                    leased.update(unit.key)
                    leases.append((unit, device))
        return leases

    def _by_priority(self, device: str) -> list[tuple[float, Unit]]:
        ranked = []
        for unit in self._units():
            share = self._allotted.get(unit.key, {}).get(device, 0.0)
            priority = 0.0
            if min(unit.rates_on(device)) > 0:
                received = unit.received_s[device] / self._spent_s[device] if self._spent_s[device] else 0.0
                priority = share / received if received else share * 1e9
            ranked.append((priority, unit.owed_s[device], share, unit))
        ranked.sort(key=lambda entry: entry[:3], reverse=True)
        return [(priority, unit) for priority, _, _, unit in ranked]

    def _run_round(self, leases: Sequence[tuple[Unit, str]], now_s: float) -> float:
        """When the round is over."""
        end_s = now_s
        free = {device: list(places) for device, places in self._places.items()}
        for unit, device in leases:
            share = FULL // len(unit.jobs)
            allocation = _allocation(free[device], unit.gpus, share)
            rates = zip(unit.jobs, unit.rates_on(device), strict=True)
            took_s = max(self._work(job, rate, allocation, now_s) for job, rate in rates)
            end_s = max(end_s, now_s + took_s)
            unit.received_s[device] += took_s
            self._spent_s[device] += took_s
        return end_s

    def _work(self, job: Leased, rate: float, allocation: Allocation, now_s: float) -> float:
        """Let a job do the whole steps that fit into a round; how long they take."""
        fitting = rate * self._round_s
        if job.spec.steps is not None:  # jobs that are measured in seconds have no whole steps
            fitting = float(int(fitting))
        steps = min(fitting or 1.0, job.left)
        took_s = (now_s + steps / rate) - now_s
        job.left -= steps
        if job.first_start_s is None:
            job.first_start_s = now_s
        done = job.left <= 0
        self._segments.add(job.number, now_s, now_s + took_s, "finished" if done else "lease", allocation)
        if done:
            self._finish_s[job.number] = now_s + took_s
            self._active.remove(job)
            self._pairs = [pair for pair in self._pairs if job not in pair.jobs]
            self._allotted = {key: row for key, row in self._allotted.items() if job.number not in key}
            self._stale = True
        return took_s

    def _result(self) -> Result:
        zeros: Column = np.zeros(len(self._jobs))
        return Result(
            policy=self._policy.name,
            jobs=[job.spec for job in self._jobs],
            arrival_s=np.array([job.spec.arrival_s for job in self._jobs]),
            start_s=np.array([job.first_start_s for job in self._jobs], dtype=float),
            finish_s=self._finish_s,
            service_s=np.array([job.work / max(job.rates.values()) for job in self._jobs]),
            gpus=np.array([float(job.gpus) for job in self._jobs]),
            preemptions=zeros,
            failures=zeros,
            lost_gpu_s=zeros,
            overhead_gpu_s=zeros,
            segments=self._segments,
            machines=self._machines,
        )


def _places(machines: Sequence[Machine]) -> dict[str, list[tuple[int, int]]]:
    """Every (node, GPU) by kind of device."""
    places: dict[str, list[tuple[int, int]]] = {}
    for node, machine in enumerate(machines):
        places.setdefault(machine.device, []).extend((node, gpu) for gpu in range(machine.gpus))
    return places


def _allocation(free: list[tuple[int, int]], gpus: int, share: int) -> Allocation:
    """The next free GPUs of a kind."""
    parts: dict[int, int] = {}
    for node, gpu in free[:gpus]:
        parts[node] = parts.get(node, 0) | 1 << gpu
    del free[:gpus]
    return Allocation(0, tuple(parts.items()), gpus, share)
