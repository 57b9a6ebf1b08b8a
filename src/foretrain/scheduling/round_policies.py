"""Policies of the round-based mode, after Gavel (Narayanan et al., OSDI 2020): jobs and devices in, shares of time out."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from foretrain.errors import unknown
from foretrain.scheduling.centre import Column, centre_of_optimum
from foretrain.scheduling.rounds import Leased, RoundPolicy

_REFERENCE = "v100"
"""The device whose speed stands for all where a policy does not tell them apart."""


class RoundFifo(RoundPolicy):
    """By arrival; each job gets devices of one kind, drawn at random among those with room, and keeps them."""

    name = "fifo"
    whole = True

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._draw = random.Random(seed)
        self._kept: dict[int, str] = {}

    def allot(self, jobs: Sequence[Leased], devices: Mapping[str, int], now_s: float) -> Column:
        by_number = {job.number: job for job in jobs}
        left = dict(devices)
        self._kept = {number: device for number, device in self._kept.items() if number in by_number}
        for number, device in self._kept.items():
            left[device] -= by_number[number].gpus
        for number in sorted(by_number.keys() - self._kept.keys()):
            job = by_number[number]
            fitting = [device for device in sorted(left) if left[device] >= job.gpus and job.rates[device] > 0]
            if not fitting:
                break
            device = fitting[self._draw.randrange(len(fitting))]
            self._kept[number] = device
            left[device] -= job.gpus
        return np.array([[float(self._kept.get(job.number) == device) for device in devices] for job in jobs])


class MaxMinFairness(RoundPolicy):
    """The least share of time, weighted by the GPUs held, is as large as possible; all devices count alike."""

    name = "max_min_fairness"

    def allot(self, jobs: Sequence[Leased], devices: Mapping[str, int], now_s: float) -> Column:
        rates, gpus, counts = _rates(jobs, devices), _gpus(jobs), _counts(devices)
        if not self.knows_devices:
            rates = np.ones_like(rates)
        weights = np.array([job.spec.weight for job in jobs])
        even = rates @ (counts / counts.sum())
        worth = rates * (gpus / (weights * even))[:, None]
        return _fairest(worth, gpus, counts)[0]


class MaxMinFairnessPerf(MaxMinFairness):
    """The least throughput, relative to that of an even split, is as large as possible."""

    name = "max_min_fairness_perf"
    knows_devices = True


class FinishTimeFairness(RoundPolicy):
    """The worst ratio of the time a job takes to the time it would take on its own part of the cluster is as small as possible (Themis)."""

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
            rates = np.repeat(np.maximum(rates[:, [column]], 1e-9), len(devices), axis=1)
        left = np.array([job.left for job in jobs])
        since_s = np.array([now_s - job.spec.arrival_s for job in jobs])
        alone_s = self._time_alone(jobs, left, (rates * _own_part(gpus, counts)).sum(axis=1))

        def needed(ratio: float) -> Column:
            worth: Column = rates * ((ratio * alone_s - since_s) / left)[:, None]
            return worth

        least = float((since_s / alone_s).max())
        most = _bisect(lambda ratio: _fairest(needed(ratio), gpus, counts)[1] >= 1, least, least + 1.0)
        return _fairest(needed(most), gpus, counts)[0]

    def _time_alone(self, jobs: Sequence[Leased], left: Column, alone: Column) -> Column:
        for job, now_left in zip(jobs, left, strict=True):
            before_left, before_rate = self._before.get(job.number, (now_left, 1.0))
            self._alone_s[job.number] = self._alone_s.get(job.number, 0.0) + (before_left - now_left) / before_rate
        self._before = {job.number: (float(now_left), float(rate)) for job, now_left, rate in zip(jobs, left, alone, strict=True)}
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
            rates = np.repeat(np.maximum(rates[:, [list(devices).index(_REFERENCE)]], 1e-9), len(devices), axis=1)
        left = np.array([job.left for job in jobs])
        return _fairest(rates / left[:, None] * left.mean(), gpus, counts)[0]


class MinTotalDurationPerf(MinTotalDuration):
    """The same, with the speeds on every kind of device."""

    name = "min_total_duration_perf"
    knows_devices = True


def _rates(jobs: Sequence[Leased], devices: Mapping[str, int]) -> Column:
    return np.array([[job.rates[device] for device in devices] for job in jobs])


def _gpus(jobs: Sequence[Leased]) -> Column:
    return np.array([float(job.gpus) for job in jobs])


def _counts(devices: Mapping[str, int]) -> Column:
    return np.array([float(count) for count in devices.values()])


def _own_part(gpus: Column, counts: Column) -> Column:
    """Shares of time of each job on an equal part of the cluster, at most the whole time."""
    shares: Column = counts[None, :] / len(gpus) / gpus[:, None]
    bounded: Column = shares / np.maximum(shares.sum(axis=1), 1.0)[:, None]
    return bounded


def _fairest(worth: Column, gpus: Column, counts: Column) -> tuple[Column, float]:
    """Shares x of time for which the least ``sum(worth * x)`` of a job is largest, and that value.

    No job gets more than the whole time, no kind of device gives more than it has.
    """
    jobs, kinds = worth.shape
    scale = float(np.median(worth[worth > 0])) if (worth > 0).any() else 1.0
    size = jobs * kinds
    rows = np.arange(jobs).repeat(kinds)
    least = np.zeros((jobs, size + 1))
    least[rows, np.arange(size)] = -worth.ravel() / scale
    least[:, -1] = 1.0
    positive = np.hstack([-np.eye(size), np.zeros((size, 1))])
    capacity = np.zeros((kinds, size + 1))
    whole = np.zeros((jobs, size + 1))
    whole[rows, np.arange(size)] = 1.0
    for kind in range(kinds):
        capacity[kind, kind:size:kinds] = gpus
    limits = np.vstack([least, positive, capacity, whole])
    bounds = np.concatenate([np.zeros(jobs + size), counts, np.ones(jobs)])
    start = np.tile(np.minimum(0.5 * counts / gpus.sum(), 0.5 / kinds), (jobs, 1))
    begin = np.append(start.ravel(), 0.5 * float((worth / scale * start).sum(axis=1).min()) - 1e-3)
    cost = np.zeros(size + 1)
    cost[-1] = -1.0
    solution = centre_of_optimum(cost, limits, bounds, begin)
    return solution[:-1].reshape(jobs, kinds).clip(0.0, 1.0), float(solution[-1]) * scale


def _bisect(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The least value above ``low`` that holds, to nine digits."""
    while not holds(high):
        high = low + 2 * (high - low)
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


ROUND_POLICIES: dict[str, type[RoundPolicy]] = {
    each.name: each
    for each in (
        RoundFifo,
        MaxMinFairness,
        MaxMinFairnessPerf,
        FinishTimeFairness,
        FinishTimeFairnessPerf,
        MinTotalDuration,
        MinTotalDurationPerf,
    )
}


def round_policy(name: str, seed: int = 0) -> RoundPolicy:
    """A policy of the round-based mode by its name."""
    if name not in ROUND_POLICIES:
        raise unknown("policy", name, ROUND_POLICIES, "a policy of the round-based mode:")
    return ROUND_POLICIES[name](seed)
