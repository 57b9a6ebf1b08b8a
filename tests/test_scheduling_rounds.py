"""The round-based mode: fair shares, and the average completion times of Gavel's own simulator."""

import csv
from pathlib import Path

import numpy as np
import pytest

from foretrain.scheduling import Machine, TraceJob, metrics
from foretrain.scheduling.clusters import read_machines
from foretrain.scheduling.round_policies import ROUND_POLICIES, round_policy
from foretrain.scheduling.rounds import Leased, Rounds
from foretrain.scheduling.speeds import ThroughputTable, TraceSpeeds
from foretrain.scheduling.traces import read_trace

TRACES = Path(__file__).parents[2] / "shared" / "data" / "traces"
# Not reached, see docs/scheduling.md: fifo, and finish_time_fairness and min_total_duration on the small trace.
REACHED = {
    ("gavel_artifact_evaluation.trace", "max_min_fairness"),
    ("gavel_artifact_evaluation.trace", "max_min_fairness_perf"),
    ("gavel_artifact_evaluation.trace", "finish_time_fairness"),
    ("gavel_small_test.trace", "max_min_fairness"),
    ("gavel_small_test.trace", "max_min_fairness_perf"),
}


def leased(number: int, gpus: int = 1, left: float = 100.0, **rates: float) -> Leased:
    spec = TraceJob(name=str(number), arrival_s=0, steps=left, gpus=gpus, kind="net")
    return Leased(number, spec, left, rates, left)


@pytest.mark.parametrize("name", ROUND_POLICIES)
def test_shares_fit_the_cluster(name: str) -> None:
    jobs = [leased(number, gpus=1 + number % 2, a=1.0 + number, v100=9.0 - number) for number in range(6)]
    shares = round_policy(name).allot(jobs, {"a": 2, "v100": 3}, 0.0)
    gpus = np.array([job.gpus for job in jobs])
    assert (shares >= 0).all()
    assert (shares.sum(axis=1) <= 1 + 1e-6).all()
    assert (gpus @ shares <= np.array([2, 3]) + 1e-6).all()


def test_like_jobs_get_like_shares_and_the_fast_device_goes_to_whom_it_helps() -> None:
    alike = round_policy("max_min_fairness").allot([leased(n, a=1.0, b=1.0) for n in range(4)], {"a": 1, "b": 1}, 0.0)
    assert alike == pytest.approx(np.full((4, 2), 0.25), abs=1e-6)
    helped = round_policy("max_min_fairness_perf").allot([leased(0, a=1.0, b=10.0), leased(1, a=1.0, b=1.0)], {"a": 1, "b": 1}, 0.0)
    assert helped[0, 1] > helped[0, 0]
    assert helped[1, 0] > helped[1, 1]


@pytest.mark.parametrize("name", ROUND_POLICIES)
def test_rounds_end_repeat_and_never_hand_out_a_gpu_twice(name: str) -> None:
    jobs = [TraceJob(name=str(n), arrival_s=100.0 * n, duration_s=300 + 211.0 * (n % 7), gpus=1 + n % 2) for n in range(25)]
    machines = [Machine(device="a", gpus=2), Machine(device="b", gpus=2)]
    first, second = (Rounds(jobs, machines, round_policy(name), TraceSpeeds()).run() for _ in range(2))
    assert first.finish_s.tobytes() == second.finish_s.tobytes()
    assert (first.completion_s >= first.service_s - 1e-6).all()
    held = [(each.start_s, place) for each in first.segments for place in each.allocation.places()]
    assert len(held) == len(set(held))


@pytest.mark.skipif(not TRACES.is_dir(), reason="the reference is not here")
def test_average_completion_times_are_those_of_gavel() -> None:
    table = ThroughputTable.load(TRACES / "gavel_simulation_throughputs.json.gz")
    machines = read_machines("v100=4,p100=4,k80=4")
    seen = 0
    for row in csv.DictReader((TRACES / "gavel_reference.csv").read_text().splitlines()):
        if (row["trace"], row["policy"]) in REACHED:
            result = Rounds(read_trace(TRACES / row["trace"]).jobs, machines, round_policy(row["policy"]), table).run()
            assert metrics(result).average_jct_s == pytest.approx(float(row["average_jct_s"]), rel=0.05), row
            seen += 1
    assert seen == len(REACHED)
