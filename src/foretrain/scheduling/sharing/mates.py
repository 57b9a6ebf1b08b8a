"""Keeps who shares a GPU with whom, and finds a place where two jobs bear each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from foretrain.scheduling.machines import Allocation, Pool
from foretrain.scheduling.sharing.interference import Interference

if TYPE_CHECKING:
    from foretrain.scheduling.active import Active

Place = tuple[int, int]
"""A node and a GPU of it."""

LEAST_SPEED = 0.5
"""Of a job alone: two jobs share a GPU where each keeps at least so much, and both together more than one."""


class Mates:
    """Jobs on one GPU each, at most two to a GPU."""

    def __init__(
        self,
        interference: Interference,
        memory_bytes: Mapping[str, float],
        least_speed: float = LEAST_SPEED,
    ) -> None:
        self._interference, self._memory, self._least = interference, dict(memory_bytes), least_speed
        self._on: dict[Place, list[Active]] = {}
        self._worth: dict[tuple[str, str, str], float] = {}

    def speed(self, job: Active, device: str) -> float:
        """Of a job that runs, over that alone."""
        assert job.allocation is not None
        others = [other.spec.kind for other in self._on.get(_place(job.allocation), ()) if other is not job]
        return self._interference.speed(device, job.spec.kind, others) if others else 1.0

    def place_for(self, job: Active, pool: Pool) -> Place | None:
        """The GPU whose only job goes best with another one; None where no pair is worth it."""
        nodes = frozenset(pool.nodes)
        best: Place | None = None
        best_worth = 0.0
        for place, jobs in self._on.items():
            if len(jobs) == 1 and place[0] in nodes:
                worth = self._pair(job, jobs[0], pool.device)
                if worth > best_worth:
                    best, best_worth = place, worth
        return best

    def _pair(self, one: Active, other: Active, device: str) -> float:
        """The speed of two jobs together, over that of one alone; 0 where they should not share."""
        memory = self._memory.get(device)
        if memory is not None and self._memory_of(one) + self._memory_of(other) > memory:
            return 0.0
        key = (device, one.spec.kind, other.spec.kind)  # what they cost each other, whatever their memory
        if key not in self._worth:
            speeds = (
                self._interference.speed(device, one.spec.kind, [other.spec.kind]),
                self._interference.speed(device, other.spec.kind, [one.spec.kind]),
            )
            self._worth[key] = sum(speeds) if min(speeds) >= self._least and sum(speeds) > 1 else 0.0
        return self._worth[key]

    def _memory_of(self, job: Active) -> float:
        return job.spec.memory_bytes or self._interference.memory_bytes(job.spec.kind)

    def joins(self, job: Active) -> list[Active]:
        """A job began to hold a part of a GPU; those that were there before."""
        assert job.allocation is not None
        there = self._on.setdefault(_place(job.allocation), [])
        others = list(there)
        there.append(job)
        return others

    def leaves(self, job: Active) -> list[Active]:
        """A job is about to give its part of a GPU back; those that stay."""
        assert job.allocation is not None
        place = _place(job.allocation)
        there = self._on.get(place, [])
        if job in there:
            there.remove(job)
        if not there:
            self._on.pop(place, None)
        return list(there)


def _place(allocation: Allocation) -> Place:
    ((node, mask),) = allocation.parts
    return node, mask.bit_length() - 1
