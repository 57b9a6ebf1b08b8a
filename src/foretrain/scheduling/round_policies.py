"""Divides the time of devices among jobs by the policies of Gavel (Narayanan et al., OSDI 2020)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np

from foretrain.errors import unknown
from foretrain.scheduling.gavel_policies import GAVEL_POLICIES
from foretrain.scheduling.programmes import fairest, least_worst_ratio, soonest
from foretrain.scheduling.result import Column
from foretrain.scheduling.rounds import Leased, RoundPolicy

_REFERENCE = "v100"
"""The device whose speed stands for all where a policy does not tell them apart."""
_LEAST_RATE = 1e-9
"""Steps per second of a job where it does not run, so that no time is infinite."""


class RoundFifo(RoundPolicy):
    """By arrival; each job is given to one kind of device and keeps it, as Gavel's simulator does it.

    The kind is the last in the alphabet among those that count as available. When a job fills it exactly, one
    of the kinds with room for the job stops to count, drawn at random; so more jobs may be given to a kind
    than it holds at once, and those wait for its next rounds.
    """

    name = "gavel_fifo"
    whole = True

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._draw = random.Random(seed)
        self._kept: dict[int, str] = {}

    def allot(self, jobs: Sequence[Leased], devices: Mapping[str, int], now_s: float) -> Column:
        present = {job.number: job for job in jobs}
        waiting = [present[number] for number in sorted(present.keys() - self._kept.keys())]
        left = dict(devices)
        self._replace(present, waiting, left)
        available = sorted(device for device in left if left[device] > 0)
        for job in waiting:
            with_room = [device for device in available if left[device] >= job.gpus]
            if not with_room:
                break
            drawn = with_room[self._draw.randrange(len(with_room))]
            usable = [device for device in available if job.rates[device] > 0]
            if not usable:
                break
            device = usable[-1]
            self._kept[job.number] = device
            left[device] -= job.gpus
            if left[device] == 0:
                available.remove(drawn)
        return np.array([[float(self._kept.get(job.number) == device) for device in devices] for job in jobs])

    def _replace(self, present: Mapping[int, Leased], waiting: list[Leased], left: dict[str, int]) -> None:
        """Each job that ended makes room for the first in line."""
        for number, device in sorted(self._kept.items()):
            if number in present:
                left[device] -= present[number].gpus
                continue
            if waiting and waiting[0].gpus <= left[device] and waiting[0].rates[device] > 0:
                job = waiting.pop(0)
                self._kept[job.number] = device
                left[device] -= job.gpus
            del self._kept[number]


class MaxMinFairness(RoundPolicy):
    """The least share of time, weighted by GPUs, is as large as possible; all devices count alike."""

    name = "max_min_fairness"

    def allot(self, jobs: Sequence[Leased], devices: Mapping[str, int], now_s: float) -> Column:
        rates, gpus, counts = _rates(jobs, devices), _gpus(jobs), _counts(devices)
        if not self.knows_devices:
            rates = np.ones_like(rates)
        weights = np.array([job.spec.weight for job in jobs])
        part = counts / len(jobs)
        even = (rates * (part / part.sum())).sum(axis=1)
        return fairest(rates * ((1 / weights) * (1 / even))[:, None] * gpus[:, None], gpus, counts)


class MaxMinFairnessPerf(MaxMinFairness):
    """The least throughput, relative to that of an even split, is as large as possible."""

    name = "max_min_fairness_perf"
    knows_devices = True


class FinishTimeFairness(RoundPolicy):
    """The worst ratio of a job's time to that on its own part of the cluster is least possible (Themis)."""

    name = "finish_time_fairness"

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._alone_s: dict[int, float] = {}
        """Time that what a job has done would have taken on its own part."""
        self._before: dict[int, tuple[float, float]] = {}

    def allot(self, jobs: Sequence[Leased], devices: Mapping[str, int], now_s: float) -> Column:
        rates, gpus, counts = _rates(jobs, devices), _gpus(jobs), _counts(devices)
        if not self.knows_devices:
            column = list(devices).index(_REFERENCE) if _REFERENCE in devices else int(counts.argmax())
            rates = _as_on(rates, column)
        left = np.array([job.left for job in jobs])
        since_s = np.array([now_s - job.spec.arrival_s for job in jobs])
        alone_s = self._time_alone(jobs, left, (rates * _own_part(gpus, counts)).sum(axis=1))
        return least_worst_ratio(rates, left, since_s, alone_s, gpus, counts)

    def _time_alone(self, jobs: Sequence[Leased], left: Column, alone: Column) -> Column:
        before = self._before
        self._before = {}
        for job, now_left, rate in zip(jobs, left.tolist(), alone.tolist(), strict=True):
            before_left, before_rate = before.get(job.number, (now_left, 1.0))
            passed_s = (before_left - now_left) / before_rate
            self._alone_s[job.number] = self._alone_s.get(job.number, 0.0) + passed_s
            self._before[job.number] = (now_left, rate)
        return np.array([self._alone_s[job.number] for job in jobs]) + left / alone


class FinishTimeFairnessPerf(FinishTimeFairness):
    """The same, with the speeds on every kind of device."""

    name = "finish_time_fairness_perf"
    knows_devices = True


class MinTotalDuration(RoundPolicy):
    """All jobs together end as soon as possible; all devices count alike."""

    name = "min_total_duration"

    def allot(self, jobs: Sequence[Leased], devices: Mapping[str, int], now_s: float) -> Column:
        rates, gpus, counts = _rates(jobs, devices), _gpus(jobs), _counts(devices)
        if not self.knows_devices and _REFERENCE in devices:
            rates = _as_on(rates, list(devices).index(_REFERENCE))
        return soonest(rates, np.array([job.left for job in jobs]), gpus, counts)


class MinTotalDurationPerf(MinTotalDuration):
    """The same, with the speeds on every kind of device."""

    name = "min_total_duration_perf"
    knows_devices = True


def _rates(jobs: Sequence[Leased], devices: Mapping[str, int]) -> Column:
    return np.array([[job.rates[device] for device in devices] for job in jobs])


def _as_on(rates: Column, column: int) -> Column:
    """Every device as fast as one of them."""
    return np.repeat(np.maximum(rates[:, [column]], _LEAST_RATE), rates.shape[1], axis=1)


def _gpus(jobs: Sequence[Leased]) -> Column:
    return np.array([float(job.gpus) for job in jobs])


def _counts(devices: Mapping[str, int]) -> Column:
    return np.array([float(count) for count in devices.values()])


def _own_part(gpus: Column, counts: Column) -> Column:
    """Shares of time of each job on an equal part of the cluster, at most the whole time."""
    shares: Column = counts[None, :] / len(gpus) / gpus[:, None]
    bounded: Column = shares / np.maximum(shares.sum(axis=1), 1.0)[:, None]
    return bounded


ROUND_POLICIES: dict[str, type[RoundPolicy]] = {
    policy.name: policy
    for policy in (
        *(RoundFifo, MaxMinFairness, MaxMinFairnessPerf, FinishTimeFairness, FinishTimeFairnessPerf),
        *(MinTotalDuration, MinTotalDurationPerf, *GAVEL_POLICIES),
    )
}


def round_policy(name: str, seed: int = 0) -> RoundPolicy:
    """A policy of the round-based mode by its name."""
    name = "gavel_fifo" if name == "fifo" else name
    if name not in ROUND_POLICIES:
        raise unknown("policy", name, ROUND_POLICIES, "a policy of the round-based mode:")
    return ROUND_POLICIES[name](seed)
