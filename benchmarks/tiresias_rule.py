"""Plays a trace by the rule of Tiresias' own simulator, literally and slowly, for comparison.

Time is counted in whole seconds. At every event (an arrival, an end, or the next moment at which a job may
change its queue) jobs that ran move on in their queues; then the cluster is dealt out from scratch, queue by
queue in the order of each queue, whoever fits; then those that wait go behind those that run. The moment at
which a job changes its queue is foreseen as the authors do it, with seconds where GPU seconds are meant, so
jobs may change a little late; whatever happens before that makes them change in time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from foretrain.scheduling import TraceJob

LIMITS_GPU_S = (3250, 7200)


def completion_times(
    jobs: Sequence[TraceJob], gpus: int, limits: Sequence[int] = LIMITS_GPU_S
) -> list[float]:
    """From arrival to end of every job."""
    coming = sorted(range(len(jobs)), key=lambda number: (int(jobs[number].arrival_s), number), reverse=True)
    arrival = [int(job.arrival_s) for job in jobs]
    left = [max(1, int(job.duration_s or 0)) for job in jobs]
    done_s = [0] * len(jobs)
    level = [0] * len(jobs)
    queues: list[list[int]] = [[] for _ in range(len(limits) + 1)]
    running: set[int] = set()
    ends: dict[int, int] = {}
    now, finish, jump = 0, [0.0] * len(jobs), math.inf
    while coming or any(queues):
        next_end = min((ends[number] for number in running), default=math.inf)
        next_arrival = arrival[coming[-1]] if coming else math.inf
        then = int(min(next_end, next_arrival, jump))
        for number in running:
            left[number] -= then - now
            done_s[number] += then - now
        now = then
        for number in [number for number in running if left[number] <= 0]:
            running.remove(number)
            queues[level[number]].remove(number)
            finish[number] = now
        while coming and arrival[coming[-1]] <= now:
            queues[0].append(coming.pop())
        for number in sorted(running):
            at = level[number]
            if at < len(limits) and done_s[number] * jobs[number].gpus >= limits[at]:
                queues[at].remove(number)
                level[number] = at + 1
                queues[at + 1].append(number)
        free = gpus
        for queue in queues:
            for number in queue:
                if jobs[number].gpus <= free:
                    free -= jobs[number].gpus
                    running.add(number)
                else:
                    running.discard(number)
        for queue in queues:
            queue.sort(key=lambda number: number not in running)
        ends = {number: now + left[number] for number in running}
        ahead = [
            now + math.ceil((limits[level[number]] - done_s[number]) / jobs[number].gpus)
            for number in running
            if level[number] < len(limits)
        ]
        jump = max(min(ahead, default=math.inf), now + 1)
    return [end - start for end, start in zip(finish, arrival, strict=True)]
