"""Collects the figures of jobs by which round-based policies divide the time of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from foretrain.scheduling.result import Column
from foretrain.scheduling.rounds.simulation import Leased


def rates_of(jobs: Sequence[Leased], devices: Mapping[str, int]) -> Column:
    """Work per second, one row per job and one column per kind of device."""
    return np.array([[job.rates[device] for device in devices] for job in jobs])


def gpus_of(jobs: Sequence[Leased]) -> Column:
    return np.array([float(job.gpus) for job in jobs])


def counts_of(devices: Mapping[str, int]) -> Column:
    return np.array([float(count) for count in devices.values()])


def own_part(gpus: Column, counts: Column) -> Column:
    """Shares of time of each job on an equal part of the cluster, at most the whole time."""
    shares: Column = counts[None, :] / len(gpus) / gpus[:, None]
    bounded: Column = shares / np.maximum(shares.sum(axis=1), 1.0)[:, None]
    return bounded


def fair_worth(jobs: Sequence[Leased], rates: Column, counts: Column) -> Column:
    """What throughput of each job counts for: one over its weight and its throughput on an even split."""
    weights = np.array([job.spec.weight for job in jobs])
    part = counts / len(jobs)
    even = (rates * (part / part.sum())).sum(axis=1)
    worth: Column = (1 / weights) * (1 / even)
    return worth


class TimesAlone:
    """How long jobs would have taken on their own part of the cluster, from division to division."""

    def __init__(self) -> None:
        self._alone_s: dict[int, float] = {}
        """Time that what a job has done would have taken on its own part."""
        self._before: dict[int, tuple[float, float]] = {}

    def of(self, jobs: Sequence[Leased], left: Column, alone: Column) -> Column:
        """With the work that is left, and the throughput of each job on its own part from now on."""
        before = self._before
        self._before = {}
        for job, now_left, rate in zip(jobs, left.tolist(), alone.tolist(), strict=True):
            before_left, before_rate = before.get(job.number, (now_left, 1.0))
            passed_s = (before_left - now_left) / before_rate
            self._alone_s[job.number] = self._alone_s.get(job.number, 0.0) + passed_s
            self._before[job.number] = (now_left, rate)
        return np.array([self._alone_s[job.number] for job in jobs]) + left / alone
