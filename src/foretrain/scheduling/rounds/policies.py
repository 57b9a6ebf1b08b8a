"""Divides the time of devices among jobs by the policies of Gavel (Narayanan et al., OSDI 2020)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np

from foretrain.errors import unknown
from foretrain.scheduling.result import Column
from foretrain.scheduling.rounds.deadlines import DEADLINE_POLICIES
from foretrain.scheduling.rounds.figures import TimesAlone, counts_of, fair_worth, gpus_of, own_part, rates_of
from foretrain.scheduling.rounds.packed import PACKED_POLICIES
from foretrain.scheduling.rounds.programmes import fairest, least_worst_ratio, soonest
from foretrain.scheduling.rounds.random_packing import RANDOM_PACKING_POLICIES
from foretrain.scheduling.rounds.simulation import Leased, RoundPolicy
from foretrain.scheduling.rounds.strategy_proof import STRATEGY_PROOF_POLICIES
from foretrain.scheduling.rounds.throughput import GAVEL_POLICIES

_REFERENCE = "v100"
"""The device whose speed stands for all where a policy does not tell them apart."""


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
        rates, gpus, counts = rates_of(jobs, devices), gpus_of(jobs), counts_of(devices)
        if not self.knows_devices:
            rates = np.ones_like(rates)
        worth = fair_worth(jobs, rates, counts)
        return fairest(rates * worth[:, None] * gpus[:, None], gpus, counts)


class MaxMinFairnessPerf(MaxMinFairness):
    """The least throughput, relative to that of an even split, is as large as possible."""

    name = "max_min_fairness_perf"
    knows_devices = True


class FinishTimeFairness(RoundPolicy):
    """The worst ratio of a job's time to that on its own part of the cluster is least possible (Themis)."""

    name = "finish_time_fairness"

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._alone = TimesAlone()

    def allot(self, jobs: Sequence[Leased], devices: Mapping[str, int], now_s: float) -> Column:
        rates, gpus, counts = rates_of(jobs, devices), gpus_of(jobs), counts_of(devices)
        if not self.knows_devices:
            column = list(devices).index(_REFERENCE) if _REFERENCE in devices else int(counts.argmax())
            rates = _as_on(rates, column)
        left = np.array([job.left for job in jobs])
        since_s = np.array([now_s - job.spec.arrival_s for job in jobs])
        alone_s = self._alone.of(jobs, left, (rates * own_part(gpus, counts)).sum(axis=1))
        return least_worst_ratio(rates, left, since_s, alone_s, gpus, counts)


class FinishTimeFairnessPerf(FinishTimeFairness):
    """The same, with the speeds on every kind of device."""

    name = "finish_time_fairness_perf"
    knows_devices = True


class MinTotalDuration(RoundPolicy):
    """All jobs together end as soon as possible; all devices count alike."""

    name = "min_total_duration"

    def allot(self, jobs: Sequence[Leased], devices: Mapping[str, int], now_s: float) -> Column:
        rates, gpus, counts = rates_of(jobs, devices), gpus_of(jobs), counts_of(devices)
        if not self.knows_devices and _REFERENCE in devices:
            rates = _as_on(rates, list(devices).index(_REFERENCE))
        return soonest(rates, np.array([job.left for job in jobs]), gpus, counts)


class MinTotalDurationPerf(MinTotalDuration):
    """The same, with the speeds on every kind of device."""

    name = "min_total_duration_perf"
    knows_devices = True


def _as_on(rates: Column, column: int) -> Column:
    """Every device as fast as one of them; for a job that does not run there, as its fastest."""
    one = rates[:, [column]]
    return np.repeat(np.where(one > 0, one, rates.max(axis=1, keepdims=True)), rates.shape[1], axis=1)


ROUND_POLICIES: dict[str, type[RoundPolicy]] = {
    policy.name: policy
    for policy in (
        *(RoundFifo, MaxMinFairness, MaxMinFairnessPerf, FinishTimeFairness, FinishTimeFairnessPerf),
        *(MinTotalDuration, MinTotalDurationPerf, *GAVEL_POLICIES, *PACKED_POLICIES, *DEADLINE_POLICIES),
        *(*STRATEGY_PROOF_POLICIES, *RANDOM_PACKING_POLICIES),
    )
}


def round_policy(name: str, seed: int = 0) -> RoundPolicy:
    """A policy of the round-based mode by its name."""
    name = "gavel_fifo" if name == "fifo" else name
    if name not in ROUND_POLICIES:
        raise unknown("policy", name, ROUND_POLICIES, "a policy of the round-based mode:")
    return ROUND_POLICIES[name](seed)
