"""Tiresias deals its queues by the rule of its authors' simulator."""

from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.scheduling import Machine, Simulation, TraceJob
from foretrain.scheduling.policies.tiresias import Tiresias

LIMITS = (8.0, 24.0)


def dealt_from_scratch(jobs: list[TraceJob], gpus: int) -> list[float]:
    """When jobs end if the cluster is dealt out anew at every moment: queue by queue, whoever fits.

    Within a queue those that run stand before those that wait, but for one that has just come into it.
    """
    left = [float(job.duration_s or 0) for job in jobs]
    attained, level, end = [0.0] * len(jobs), [0] * len(jobs), [0.0] * len(jobs)
    queues: list[list[int]] = [[], [], []]
    coming = sorted(range(len(jobs)), key=lambda number: (jobs[number].arrival_s, number))
    running: list[int] = []
    now = 0.0
    while coming or any(queues):
        moments = [jobs[coming[0]].arrival_s] if coming else []
        for number in running:
            moments.append(now + left[number])
            if level[number] < 2:
                moments.append(now + (LIMITS[level[number]] - attained[number]) / jobs[number].gpus)
        then = min(moments)
        for number in running:
            left[number] -= then - now
            attained[number] += (then - now) * jobs[number].gpus
        now = then
        for number in [number for number in running if left[number] < 1e-9]:
            running.remove(number)
            queues[level[number]].remove(number)
            end[number] = now
        while coming and jobs[coming[0]].arrival_s <= now:
            queues[0].append(coming.pop(0))
        for number in running:
            if level[number] < 2 and attained[number] >= LIMITS[level[number]] - 1e-9:
                queues[level[number]].remove(number)
                level[number] += 1
                queues[level[number]].append(number)
        free, running = gpus, []
        for queue in queues:
            for number in queue:
                if jobs[number].gpus <= free:
                    free -= jobs[number].gpus
                    running.append(number)
            queue.sort(key=lambda number: number not in running)
    return end


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 30), st.sampled_from([1, 1, 2, 4, 8])),
        min_size=1,
        max_size=16,
        unique_by=lambda row: row[0],
    )
)
def test_jobs_end_as_if_the_cluster_were_dealt_out_from_scratch(rows: list[tuple[int, int, int]]) -> None:
    jobs = [
        TraceJob(name=str(number), arrival_s=arrival, duration_s=duration + number / 64, gpus=gpus)
        for number, (arrival, duration, gpus) in enumerate(rows)
    ]
    result = Simulation(jobs, [Machine(device="v100", gpus=4)] * 2, Tiresias(LIMITS)).run()
    wanted = dealt_from_scratch(jobs, 8)
    assert max(abs(result.finish_s - wanted)) < 1e-6


def test_a_job_does_not_give_way_to_one_of_its_own_queue() -> None:
    jobs = [
        TraceJob(name=name, arrival_s=arrival, duration_s=duration, gpus=gpus)
        for name, arrival, duration, gpus in (
            ("wide", 0.0, 4.0, 8),
            ("late", 1.0, 6.0, 1),
            ("wide2", 2.0, 1.0, 8),
        )
    ]
    result = Simulation(jobs, [Machine(device="v100", gpus=8)], Tiresias((1000.0,))).run()
    assert result.preemptions.sum() == 0
    assert result.start_s.tolist() == [0.0, 4.0, 10.0]
