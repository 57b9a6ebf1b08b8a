"""Packs pairs of jobs at random and keeps those that gain by it: Gandiva (Xiao et al., OSDI 2018) in rounds,
as Gavel (Narayanan et al., OSDI 2020) compares itself with it.

No figures of Gavel's own simulator for it are at hand; it follows the papers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np

from foretrain.scheduling.result import Column
from foretrain.scheduling.rounds.figures import counts_of, own_part
from foretrain.scheduling.rounds.simulation import Leased, Pair, RoundPolicy


class GandivaInRounds(RoundPolicy):
    """While jobs ask for more GPUs than there are, some are put together in pairs, drawn at random.

    A pair is kept as long as both are there; one that did less together than one job alone, on the kinds of
    devices it shared, is taken apart at the next division and not tried again. Those that run, pairs and
    jobs alone, have equal parts of the time of every kind of device. Where all have room, nobody shares.
    """

    name = "gavel_gandiva"
    packs = True
    tries = True

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._draw = random.Random(seed)
        self._kept: set[tuple[int, ...]] = set()
        self._given_up: set[tuple[int, ...]] = set()

    def allot(self, jobs: Sequence[Leased], devices: Mapping[str, int], now_s: float) -> Column:
        return self.allot_with_pairs(jobs, (), devices, now_s)

    def allot_with_pairs(
        self, jobs: Sequence[Leased], pairs: Sequence[Pair], devices: Mapping[str, int], now_s: float
    ) -> Column:
        possible = {pair.key: pair for pair in pairs}
        self._given_up |= {
            key for key in self._kept if key in possible and _together(possible[key], devices) <= 1
        }
        room = sum(devices.values())
        wanted = sum(job.gpus for job in jobs)
        self._kept = {key for key in self._kept - self._given_up if key in possible and wanted > room}
        wanted -= len(self._kept)
        paired = {number for key in self._kept for number in key}
        untried = [key for key in possible if key not in self._given_up]
        self._draw.shuffle(untried)
        for key in untried:
            if wanted > room and paired.isdisjoint(key):
                self._kept.add(key)
                paired.update(key)
                wanted -= 1
        units: list[Leased | Pair] = [*jobs, *pairs]
        runs = [
            unit.key in self._kept or (len(unit.key) == 1 and unit.key[0] not in paired) for unit in units
        ]
        gpus = np.array([float(unit.gpus) for unit, chosen in zip(units, runs, strict=True) if chosen])
        shares: Column = np.zeros((len(units), len(devices)))
        shares[runs] = own_part(gpus, counts_of(devices))
        can = np.array([[min(unit.rates_on(device)) > 0 for device in devices] for unit in units])
        return np.where(can, shares, 0.0)


def _together(pair: Pair, devices: Mapping[str, int]) -> float:
    """What a pair does over what its jobs do alone, over the kinds of devices that both can share."""
    done = room = 0.0
    for device, count in devices.items():
        if min(pair.rates[device]) > 0:
            rates = zip(pair.jobs, pair.rates[device], strict=True)
            done += count * sum(rate / job.rates[device] for job, rate in rates)
            room += count
    return done / room if room else 0.0


RANDOM_PACKING_POLICIES = (GandivaInRounds,)
