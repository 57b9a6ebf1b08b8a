"""Divides the time of devices by the policies of Gavel (Narayanan et al., OSDI 2020) that fill up what others
leave (water filling) and that let two jobs share devices (packed).

No figures of Gavel's own simulator for these are at hand; they follow the paper (sections 3.1 and 4).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from foretrain.scheduling.result import Column
from foretrain.scheduling.rounds.figures import TimesAlone, counts_of, fair_worth, gpus_of, own_part, rates_of
from foretrain.scheduling.rounds.linear import Division
from foretrain.scheduling.rounds.simulation import Leased, Pair, RoundPolicy

_SEARCH = 1e-3
"""How close to the least worst ratio of finish times the search goes."""


class WaterFilling(RoundPolicy):
    """The least share of time, weighted by GPUs, is as large as possible; then the least of the jobs that can
    still have more, and so on. All devices count alike."""

    name = "max_min_fairness_water_filling"

    def allot(self, jobs: Sequence[Leased], devices: Mapping[str, int], now_s: float) -> Column:
        rates, gpus, counts = rates_of(jobs, devices), gpus_of(jobs), counts_of(devices)
        if not self.knows_devices:
            rates = np.ones_like(rates)
        division = Division([(job,) for job in range(len(jobs))], list(rates[:, None, :]), gpus, counts)
        return division.filled(fair_worth(jobs, rates, counts) * gpus)


class WaterFillingPerf(WaterFilling):
    """The same with the throughput, relative to that of an even split, in place of the share of time."""

    name = "max_min_fairness_water_filling_perf"
    knows_devices = True


class Packing(RoundPolicy):
    """Jobs run alone or in pairs, which have shares of time of their own."""

    knows_devices = True
    packs = True

    def allot(self, jobs: Sequence[Leased], devices: Mapping[str, int], now_s: float) -> Column:
        return self.allot_with_pairs(jobs, (), devices, now_s)

    def allot_with_pairs(
        self, jobs: Sequence[Leased], pairs: Sequence[Pair], devices: Mapping[str, int], now_s: float
    ) -> Column:
        places = {job.number: place for place, job in enumerate(jobs)}
        units = [(place,) for place in range(len(jobs))]
        both = [tuple(places[job.number] for job in pair.jobs) for pair in pairs]
        rates = rates_of(jobs, devices)
        together = [
            np.array([[pair.rates[device][which] for device in devices] for which in (0, 1)])
            for pair in pairs
        ]
        division = Division(
            [*units, *both], [*rates[:, None, :], *together], gpus_of(jobs), counts_of(devices)
        )
        return self.divide(division, jobs, devices, now_s)

    @abstractmethod
    def divide(
        self, division: Division, jobs: Sequence[Leased], devices: Mapping[str, int], now_s: float
    ) -> Column:
        """Shares of jobs, and then of pairs."""


class MaxMinFairnessPacked(Packing):
    """The least throughput, relative to that of an even split, is as large as possible."""

    name = "max_min_fairness_packed"

    def divide(
        self, division: Division, jobs: Sequence[Leased], devices: Mapping[str, int], now_s: float
    ) -> Column:
        worth = fair_worth(jobs, rates_of(jobs, devices), counts_of(devices)) * gpus_of(jobs)
        return division.fairest(worth)


class WaterFillingPacked(Packing):
    """The same, and then the least of the jobs that can still have more, and so on."""

    name = "max_min_fairness_water_filling_packed"

    def divide(
        self, division: Division, jobs: Sequence[Leased], devices: Mapping[str, int], now_s: float
    ) -> Column:
        worth = fair_worth(jobs, rates_of(jobs, devices), counts_of(devices)) * gpus_of(jobs)
        return division.filled(worth)


class MinTotalDurationPacked(Packing):
    """All jobs together end as soon as possible."""

    name = "min_total_duration_packed"

    def divide(
        self, division: Division, jobs: Sequence[Leased], devices: Mapping[str, int], now_s: float
    ) -> Column:
        left = np.array([job.left for job in jobs])
        longest_s = float((left / rates_of(jobs, devices).max(axis=1)).max())
        return division.fairest(longest_s / left)


class FinishTimeFairnessPacked(Packing):
    """The worst ratio of a job's time to that on its own part of the cluster is least possible (Themis)."""

    name = "finish_time_fairness_packed"

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._alone = TimesAlone()

    def divide(
        self, division: Division, jobs: Sequence[Leased], devices: Mapping[str, int], now_s: float
    ) -> Column:
        left = np.array([job.left for job in jobs])
        since_s = np.array([now_s - job.spec.arrival_s for job in jobs])
        alone = (rates_of(jobs, devices) * own_part(gpus_of(jobs), counts_of(devices))).sum(axis=1)
        alone_s = self._alone.of(jobs, left, alone)
        least, most = float((since_s / alone_s).max()), float(((since_s + left / alone) / alone_s).max())
        best: Column | None = None
        while best is None or most - least > _SEARCH * most:
            ratio = most * (1 + _SEARCH) if best is None else (least + most) / 2
            spare_s = ratio * alone_s - since_s
            tried = division.reaching(left / spare_s) if (spare_s > 0).all() else None
            if tried is not None:
                best, most = tried, ratio
            elif best is None:
                most *= 2
            else:
                least = ratio
        return best


class FifoPacked(RoundPolicy):
    """By arrival; each job is given to its fastest kind of device with room and keeps it.

    The first that finds none goes beside the job with which both together do most, of those that have a
    device to themselves; where nobody bears it, it waits, and all behind it.
    """

    name = "fifo_packed"
    knows_devices = True
    packs = True
    whole = True

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._kept: dict[tuple[int, ...], str] = {}
        """Kinds of devices, by the number of the job, or of two."""

    def allot(self, jobs: Sequence[Leased], devices: Mapping[str, int], now_s: float) -> Column:
        return self.allot_with_pairs(jobs, (), devices, now_s)

    def allot_with_pairs(
        self, jobs: Sequence[Leased], pairs: Sequence[Pair], devices: Mapping[str, int], now_s: float
    ) -> Column:
        present = {job.number: job for job in jobs}
        staying = {
            tuple(number for number in key if number in present): device for key, device in self._kept.items()
        }
        self._kept = {key: device for key, device in staying.items() if key}
        left = dict(devices)
        for key, device in self._kept.items():
            left[device] -= present[key[0]].gpus
        placed = {number for key in self._kept for number in key}
        for job in sorted(jobs, key=lambda job: job.number):
            if job.number in placed:
                continue
            fitting = [device for device in left if left[device] >= job.gpus and job.rates[device] > 0]
            if fitting:
                device = max(fitting, key=lambda device: job.rates[device])
                left[device] -= job.gpus
                self._kept[job.key] = device
            elif (pair := self._best(job, pairs)) is not None:
                mate = next(other for other in pair.jobs if other is not job)
                self._kept[pair.key] = self._kept.pop(mate.key)
            else:
                break
        units: list[Leased | Pair] = [*jobs, *pairs]
        return np.array([[float(self._kept.get(unit.key) == device) for device in devices] for unit in units])

    def _best(self, job: Leased, pairs: Sequence[Pair]) -> Pair | None:
        """Of a job that waits with one that has a device to itself: the pair that does most together."""
        best, most = None, 0.0
        for pair in pairs:
            mates = [other for other in pair.jobs if other is not job]
            device = self._kept.get(mates[0].key) if len(mates) == 1 else None
            if device is not None and min(pair.rates[device]) > 0:
                rates = zip(pair.jobs, pair.rates[device], strict=True)
                together = sum(rate / each.rates[device] for each, rate in rates)
                if together > most:
                    best, most = pair, together
        return best


PACKED_POLICIES = (
    *(WaterFilling, WaterFillingPerf, MaxMinFairnessPacked, WaterFillingPacked),
    *(MinTotalDurationPacked, FinishTimeFairnessPacked, FifoPacked),
)
