"""Divides the time of devices by further policies of Gavel (Narayanan et al., OSDI 2020): isolated parts, the
greatest throughput, the same for its price, AlloX, and first in, first out on the fastest device.

No figures of Gavel's own simulator for these are at hand; they follow the paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from foretrain.cluster import Cluster
from foretrain.errors import ForetrainError, InputError
from foretrain.scheduling.result import Column
from foretrain.scheduling.rounds.figures import counts_of, gpus_of, rates_of
from foretrain.scheduling.rounds.simulation import Leased, RoundPolicy

_FAR = 1e18
"""Cost of a place that a job cannot have."""


class Isolated(RoundPolicy):
    """Every job has its own equal part of every kind of device, as if nobody shared."""

    name = "isolated"

    def allot(self, jobs: Sequence[Leased], devices: Mapping[str, int], now_s: float) -> Column:
        gpus, counts = gpus_of(jobs), counts_of(devices)
        shares: Column = counts[None, :] / len(jobs) / gpus[:, None]
        shares = np.where(rates_of(jobs, devices) > 0, shares, 0.0)
        bounded: Column = shares / np.maximum(shares.sum(axis=1), 1.0)[:, None]
        return bounded


class MaxSumThroughput(RoundPolicy):
    """The sum of all throughputs is as large as possible, each over that on the job's fastest device."""

    name = "max_sum_throughput_perf"
    knows_devices = True

    def allot(self, jobs: Sequence[Leased], devices: Mapping[str, int], now_s: float) -> Column:
        rates = rates_of(jobs, devices)
        worth = rates / np.maximum(rates.max(axis=1), 1e-12)[:, None] * self.value(list(devices))[None, :]
        return _greatest(worth, gpus_of(jobs), counts_of(devices))

    def value(self, devices: Sequence[str]) -> Column:
        """What throughput on a device counts for."""
        return np.ones(len(devices))


class MaxSumThroughputForCost(MaxSumThroughput):
    """The same per dollar, by the prices of the catalogue; devices without one count as the dearest."""

    name = "max_sum_throughput_normalized_by_cost_perf"

    def value(self, devices: Sequence[str]) -> Column:
        return per_dollar(devices)


def per_dollar(devices: Sequence[str]) -> Column:
    """Hours of devices for a dollar, by the prices of the catalogue; one without a price counts as the
    dearest."""
    prices = [_price(device) for device in devices]
    known = [price for price in prices if price]
    dearest = max(known, default=1.0)
    return np.array([1.0 / (price or dearest) for price in prices])


class _Keeping(RoundPolicy):
    """Jobs keep the kind of device that they were given once; those that wait are given what is left."""

    whole = True
    knows_devices = True

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._kept: dict[int, str] = {}

    def allot(self, jobs: Sequence[Leased], devices: Mapping[str, int], now_s: float) -> Column:
        present = {job.number: job for job in jobs}
        self._kept = {number: device for number, device in self._kept.items() if number in present}
        left = dict(devices)
        for number, device in self._kept.items():
            left[device] -= present[number].gpus
        waiting = [job for job in jobs if job.number not in self._kept]
        for job, device in self._given(waiting, left, now_s):
            self._kept[job.number] = device
            left[device] -= job.gpus
        return np.array([[float(self._kept.get(job.number) == device) for device in devices] for job in jobs])

    def _given(
        self, waiting: Sequence[Leased], left: Mapping[str, int], now_s: float
    ) -> Iterator[tuple[Leased, str]]:
        """Who is given what, one after the other; ``left`` is what the earlier ones leave."""
        raise NotImplementedError


class FifoPerf(_Keeping):
    """By arrival; each job is given to its fastest kind of device with room and keeps it."""

    name = "fifo_perf"

    def _given(
        self, waiting: Sequence[Leased], left: Mapping[str, int], now_s: float
    ) -> Iterator[tuple[Leased, str]]:
        for job in sorted(waiting, key=lambda job: job.number):
            fitting = [device for device in left if left[device] >= job.gpus and job.rates[device] > 0]
            if not fitting:
                return
            yield job, max(fitting, key=lambda device: job.rates[device])


class AlloX(_Keeping):
    """Jobs are matched to devices and turns on them so that the sum of completion times is least
    (Le et al., EuroSys 2020). Larger jobs than of one GPU, which the paper does not have, count as so many
    times as long and start where enough devices are free."""

    name = "allox_perf"

    def _given(
        self, waiting: Sequence[Leased], left: Mapping[str, int], now_s: float
    ) -> Iterator[tuple[Leased, str]]:
        for job, device in self._first_turns(waiting, left):
            if left[device] >= job.gpus:
                yield job, device

    def _first_turns(self, waiting: Sequence[Leased], left: Mapping[str, int]) -> list[tuple[Leased, str]]:
        """The jobs that are matched to the last turn before the end of a free device: the one that runs now.

        A job that is k-th from the end on a device delays itself and k - 1 others, so it costs k times its
        time there.
        """
        try:
            from scipy.optimize import linear_sum_assignment
        except ImportError as error:
            needs = "scipy is not installed; install foretrain[learn]"
            raise ForetrainError(f"policy {self.name}: {needs}") from error
        places = [device for device, count in left.items() for _ in range(max(count, 0))]
        if not waiting or not places:
            return []
        rates = np.array([[job.rates[device] for device in places] for job in waiting])
        work = np.array([job.left * job.gpus for job in waiting])
        times = np.where(rates > 0, work[:, None] / np.maximum(rates, 1e-12), _FAR)
        turns = -(-len(waiting) // len(places))
        cost = np.concatenate([times * (turn + 1) for turn in range(turns)], axis=1)
        rows, columns = linear_sum_assignment(np.minimum(cost, _FAR))
        last: dict[int, tuple[int, Leased]] = {}
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            turn, place = divmod(column, len(places))
            if times[row, place] < _FAR and (place not in last or turn > last[place][0]):
                last[place] = (turn, waiting[row])
        return [(job, places[place]) for place, (_, job) in last.items()]


def _greatest(worth: Column, gpus: Column, counts: Column) -> Column:
    """Shares x for which the sum of ``worth * x`` is greatest."""
    try:
        from scipy.optimize import linprog
        from scipy.sparse import lil_array
    except ImportError as error:
        raise ForetrainError("policy: scipy is not installed; install foretrain[learn]") from error
    jobs, kinds = worth.shape
    limits = lil_array((jobs + kinds, jobs * kinds))
    for job in range(jobs):
        limits[job, job * kinds : (job + 1) * kinds] = 1.0
        for kind in range(kinds):
            limits[jobs + kind, job * kinds + kind] = gpus[job]
    room = np.concatenate([np.ones(jobs), counts])
    solution = linprog(-worth.reshape(-1), A_ub=limits.tocsr(), b_ub=room, bounds=(0, 1), method="highs")
    shares: Column = np.clip(solution.x.reshape(jobs, kinds), 0.0, 1.0)
    return np.where(worth > 0, shares, 0.0)


def _price(device: str) -> float | None:
    try:
        return Cluster.read({"device": device, "devices_per_node": 1}).price_per_hour
    except InputError:
        return None


GAVEL_POLICIES = (Isolated, MaxSumThroughput, MaxSumThroughputForCost, FifoPerf, AlloX)
