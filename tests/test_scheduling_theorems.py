"""What is proved of scheduling policies holds in the simulator."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.scheduling import Machine, Result, Settings, Simulation, TraceJob, metrics, policies
from foretrain.scheduling.estimates import LogNormal
from foretrain.scheduling.policies.backfill import EasyBackfill

ONE = [Machine(device="v100", gpus=1)]
FOUR = [Machine(device="v100", gpus=4)] * 2


def job(number: int, arrival: float, duration: float, gpus: int = 1, **more: object) -> TraceJob:
    return TraceJob(name=f"j{number}", arrival_s=arrival, duration_s=duration, gpus=gpus, **more)  # type: ignore[arg-type]


def run(jobs: list[TraceJob], policy: str, machines: list[Machine] = FOUR, **more: object) -> Result:
    return Simulation(jobs, machines, policies.get(policy), **more).run()  # type: ignore[arg-type]


gangs = st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 40), st.sampled_from([1, 1, 2, 3, 4, 8])),
    min_size=1,
    max_size=14,
)


def made(rows: list[tuple[int, int, int]]) -> list[TraceJob]:
    return [job(number, arrival, duration, gpus) for number, (arrival, duration, gpus) in enumerate(rows)]


def best_mean_completion(jobs: list[TraceJob]) -> float:
    """The least mean completion time on one machine with preemption: every order in seconds is tried."""
    best = np.inf
    for order in itertools.permutations(range(len(jobs))):
        left = [int(each.duration_s or 0) for each in jobs]
        now, total = 0, 0.0
        while any(left):
            ready = [number for number in order if left[number] and jobs[number].arrival_s <= now]
            now += 1
            if ready:
                left[ready[0]] -= 1
                if not left[ready[0]]:
                    total += now - jobs[ready[0]].arrival_s
        best = min(best, total / len(jobs))
    return float(best)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 6)), min_size=1, max_size=5))
def test_srtf_minimises_the_mean_completion_time_on_one_machine(rows: list[tuple[int, int]]) -> None:
    jobs = [job(number, arrival, duration) for number, (arrival, duration) in enumerate(rows)]
    found = float(run(jobs, "srtf", ONE).completion_s.mean())
    assert found <= best_mean_completion(jobs) + 1e-9
    assert all(
        found <= run(jobs, other, ONE).completion_s.mean() + 1e-9
        for other in ("fifo", "sjf", "tiresias", "backfill")
    )


@settings(max_examples=60)
@given(gangs)
def test_backfill_never_delays_the_first_job_in_line(rows: list[tuple[int, int, int]]) -> None:
    policy = EasyBackfill()
    result = Simulation(made(rows), FOUR, policy).run()
    for number, promised_s in policy.reservations.items():
        assert result.start_s[number] <= promised_s + 1e-6


@settings(max_examples=40)
@given(gangs)
def test_conservative_backfill_starts_no_job_later_than_first_in_first_out(
    rows: list[tuple[int, int, int]],
) -> None:
    jobs = made(rows)
    assert (run(jobs, "conservative").start_s <= run(jobs, "fifo").start_s + 1e-6).all()


@settings(max_examples=40)
@given(gangs, st.sampled_from(["sjf", "srtf", "oracle", "tiresias"]))
def test_no_gpu_idles_while_a_waiting_job_would_fit(rows: list[tuple[int, int, int]], policy: str) -> None:
    result = run(made(rows), policy)
    moments = sorted(
        {segment.start_s for segment in result.segments} | {segment.end_s for segment in result.segments}
    )
    for moment in moments:
        held = sum(each.allocation.gpus for each in result.segments if each.start_s <= moment < each.end_s)
        running = {each.job for each in result.segments if each.start_s <= moment < each.end_s}
        present = [
            number
            for number in range(len(rows))
            if result.arrival_s[number] <= moment < result.finish_s[number]
        ]
        assert all(held + rows[number][2] > 8 for number in present if number not in running)


@settings(max_examples=30)
@given(
    gangs, st.sampled_from([*policies.names()]), st.sampled_from(["packed", "spread", "random", "topology"])
)
def test_gpus_are_never_handed_out_twice_and_all_work_is_done(
    rows: list[tuple[int, int, int]], policy: str, place: str
) -> None:
    from foretrain.scheduling.placement import placement

    jobs = made(rows)
    result = run(jobs, policy, placement=placement(place))
    held = [
        (each.start_s, each.end_s, where) for each in result.segments for where in each.allocation.places()
    ]
    for where in {where for _, _, where in held}:
        mine = sorted((start, end) for start, end, other in held if other == where)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(mine))
    worked = [
        sum(each.end_s - each.start_s for each in result.segments if each.job == number)
        for number in range(len(jobs))
    ]
    assert worked == pytest.approx([each.duration_s for each in jobs])


def busy() -> list[TraceJob]:
    return [
        job(number, 7.0 * number, 11.0 + 53.0 * (number * 7 % 13), 1 + number * 5 % 4)
        for number in range(120)
    ]


@pytest.mark.parametrize("policy", policies.names())
def test_the_same_seed_gives_the_same_result_bit_for_bit(policy: str) -> None:
    from foretrain.scheduling.failures import FailureModel

    around = Settings(
        restart_s=3.0,
        checkpoint_s=1.0,
        failures=FailureModel(job_mtbf_gpu_s=2000.0, node_mtbf_s=5000.0, repair_s=50.0),
    )
    first, second = (run(busy(), policy, settings=around, estimates=LogNormal(0.3, seed=1)) for _ in range(2))
    assert first.finish_s.tobytes() == second.finish_s.tobytes()
    assert list(first.segments) == list(second.segments)
    assert metrics(first) == metrics(second)
    assert first.failures.sum() > 0


def test_worse_estimates_cost_completion_time() -> None:
    exact, rough = (
        run(busy(), "srtf", estimates=LogNormal(error, seed=1)).completion_s.mean() for error in (0.0, 2.0)
    )
    assert exact < rough
    assert run(busy(), "oracle", estimates=LogNormal(2.0)).completion_s.mean() == exact
