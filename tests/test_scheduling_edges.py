"""What is at the edges of a simulation: odd files, failures without end, ties, options that do not fit."""

import gzip
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from scipy import optimize

from foretrain.errors import InputError
from foretrain.scheduling import Machine, Policy, PolicyError, Settings, Simulation, Trace, TraceJob, policies
from foretrain.scheduling.admission import check_failures, runnable
from foretrain.scheduling.capabilities import CANNOT
from foretrain.scheduling.clusters import read_machines
from foretrain.scheduling.estimates import LogNormal
from foretrain.scheduling.failures import FailureModel, Outage, read_outages
from foretrain.scheduling.policies.conservative import ConservativeBackfill
from foretrain.scheduling.rounds.policies import ROUND_POLICIES
from foretrain.scheduling.rules import Queue, Reservation, Rules
from foretrain.scheduling.sharing import Manners, MannersOfKinds
from foretrain.scheduling.sharing.mig import SlicedSpeeds, cut
from foretrain.scheduling.speeds import ThroughputTable, TraceSpeeds
from foretrain.scheduling.spot import Spot
from foretrain.scheduling.study import Scenario, SpeedSource
from foretrain.scheduling.traces import read_trace

ONE = [Machine(device="v100", gpus=1)]
FOUR = [Machine(device="v100", gpus=4)]


def job(name: str, arrival: float, duration: float, gpus: int = 1, **more: object) -> TraceJob:
    return TraceJob(name=name, arrival_s=arrival, duration_s=duration, gpus=gpus, **more)  # type: ignore[arg-type]


class Never(Policy):
    name = "never"
    interval_s = 60.0

    def decide(self, cluster: Simulation) -> None:
        """Starts nothing."""


@pytest.mark.parametrize("model", [FailureModel(), FailureModel(node_mtbf_s=100.0, repair_s=10.0)])
def test_a_policy_that_starves_jobs_is_stopped_even_while_nodes_fail(model: FailureModel) -> None:
    with pytest.raises(PolicyError, match="never: leaves 1 jobs waiting for ever"):
        Simulation([job("a", 0, 5)], ONE, Never(), settings=Settings(failures=model)).run()


def test_a_job_that_never_gets_to_its_checkpoint_ends_the_simulation_by_name() -> None:
    hopeless = Settings(checkpoint_every_s=1e6, failures=FailureModel(job_mtbf_gpu_s=1.0))
    with pytest.raises(InputError, match="job 'a' fails 10,000 times in a row"):
        Simulation([job("a", 0, 1000)], ONE, policies.get("fifo"), settings=hopeless).run()
    restarts = Settings(restart_s=1e5, failures=FailureModel(job_mtbf_gpu_s=3600.0))
    trace = Trace(name="t", format="own", jobs=[job("a", 0, 1000)])
    with pytest.raises(InputError, match=r"job_mtbf: 1 h is too short"):
        check_failures(trace, Scenario(policy="fifo", machines=ONE, settings=restarts))


@pytest.mark.parametrize("policy", ["gandiva", "pollux"])
def test_turns_shorter_than_a_restart_end_the_simulation_by_name(policy: str) -> None:
    jobs = [job("a", 0, 10_000, 3), job("b", 10, 10_000, 3)]
    with pytest.raises(
        PolicyError, match=f"{policy}: takes job 'a' off 10,000 times in a row before it is at"
    ):
        Simulation(jobs, FOUR, policies.get(policy), settings=Settings(restart_s=1e4)).run()
    patient = Simulation(jobs, FOUR, policies.get("srtf"), settings=Settings(restart_s=1e4)).run()
    assert patient.finish_s.tolist() == [10_000, 20_000]


def test_nodes_that_are_never_up_together_end_the_simulation() -> None:
    model = FailureModel(node_mtbf_s=1.0, repair_s=1e5)
    with pytest.raises(PolicyError, match="leaves 1 jobs waiting for ever"):
        Simulation([job("a", 5, 10, 8)], [FOUR[0]] * 8, Never(), settings=Settings(failures=model)).run()


@pytest.mark.parametrize(
    "values", [(math.nan, 0, 1.0), (1.0, 0, math.nan), (1.0, -1, 1.0), (0.0, 0, math.inf)]
)
def test_an_outage_has_finite_times(values: tuple[float, int, float], tmp_path: Path) -> None:
    time_s, node, repair_s = values
    with pytest.raises(InputError, match="outage"):
        Outage(time_s=time_s, node=node, repair_s=repair_s)
    path = tmp_path / "outages.csv"
    path.write_text(f"time_s,node,repair_s\n{time_s},{node},{repair_s}\n")
    with pytest.raises(InputError, match=r"outages\.csv:2"):
        read_outages(path)


def test_outages_do_not_multiply_random_failures() -> None:
    outages = tuple(Outage(time_s=10.0 * n, node=0, repair_s=1.0) for n in range(1, 60))
    several = Settings(failures=FailureModel(node_mtbf_s=5000.0, repair_s=1.0, outages=outages), seed=3)
    one = Settings(failures=FailureModel(node_mtbf_s=5000.0, repair_s=1.0), seed=3)
    failures = [
        Simulation([job("a", 0, 40_000)], ONE, policies.get("fifo"), settings=around).run().failures[0]
        for around in (several, one)
    ]
    assert failures[0] - len(outages) == pytest.approx(failures[1], abs=3)


def test_where_a_job_may_run_depends_on_the_fewest_gpus_it_takes() -> None:
    machines = read_machines("k80=2,v100=4")
    elastic = job("elastic", 0, 10, 4, least_gpus=1, most_gpus=4)
    rigid = job("rigid", 0, 10, 4)
    usable = [
        [pool.device for pool in Simulation(order, machines, policies.get("fifo")).jobs[place].pools]
        for order, place in (([elastic, rigid], 1), ([rigid, elastic], 0))
    ]
    assert usable == [["v100"], ["v100"]]


def test_easy_counts_all_gpus_that_become_free_when_the_first_in_line_starts() -> None:
    jobs = [
        *(job("a", 0, 10, 2), job("b", 0, 10, 2)),
        *(job("head", 1, 10, 3), job("long", 2, 100, 1)),
    ]
    result = Simulation(jobs, [Machine(device="v100", gpus=5)], policies.get("backfill")).run()
    assert result.start_s.tolist() == [0, 0, 10, 2], "two GPUs are left when the head has its three"


def test_no_job_is_taken_off_and_started_again_at_the_same_moment() -> None:
    jobs = [job("small", 0, 100, 1), job("wide", 0, 90, 3), job("short", 10, 5, 3)]
    for policy in ("srtf", "tiresias"):
        result = Simulation(
            jobs, FOUR, policies.get(policy), settings=Settings(checkpoint_s=1.0, restart_s=1.0)
        ).run()
        for before in result.segments:
            again = [each for each in result.segments if each.job == before.job and each is not before]
            assert all(
                each.start_s != before.end_s
                or before.reason == "finished"
                or each.allocation != before.allocation
                for each in again
            )
        assert result.preemptions[0] == 0, "what it held was not needed"


class TakesOffAndBack(Policy):
    name = "undecided"

    def decide(self, cluster: Simulation) -> None:
        for running in list(cluster.running.values()):
            cluster.preempt(running)
        for waiting in sorted(cluster.waiting.values(), key=lambda job: job.number):
            if cluster.fits(waiting):
                cluster.start(waiting)


def test_a_preemption_undone_at_the_same_moment_costs_nothing() -> None:
    jobs = [job("a", 0, 20), job("b", 5, 5), job("c", 7, 5)]
    costly = Settings(checkpoint_s=3.0, restart_s=3.0, failures=FailureModel(job_mtbf_gpu_s=1e9))
    result = Simulation(jobs, FOUR, TakesOffAndBack(), settings=costly).run()
    assert result.finish_s.tolist() == [20, 10, 12]
    assert result.preemptions.sum() == result.overhead_gpu_s.sum() == 0
    assert len(result.segments) == 3


@pytest.mark.parametrize("error", [0.0, 0.5])
def test_reservations_that_are_kept_are_those_made_anew(error: float) -> None:
    class Anew(ConservativeBackfill):
        def decide(self, cluster: Simulation) -> None:
            self._quiet = 0
            super().decide(cluster)

    jobs = [job(str(n), 3.0 * n, 5.0 + 37.0 * (n * 7 % 13), 1 + n * 5 % 8) for n in range(80)]
    starts = [
        Simulation(jobs, [Machine(device="v100", gpus=4)] * 2, policy, estimates=LogNormal(error, 1))
        .run()
        .start_s
        for policy in (ConservativeBackfill(), Anew())
    ]
    assert starts[0] == pytest.approx(starts[1], abs=1e-5)


def test_names_stand_once_and_a_byte_order_mark_is_no_part_of_them(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv.gz"
    text = "﻿name,arrival_s,duration_s,gpus\na,0,5,1\nb,1,5,1\na,2,5,1\n"
    path.write_bytes(gzip.compress(text.encode()))
    trace = read_trace(path)
    assert [each.name for each in trace.jobs] == ["a", "b"]
    assert sum(trace.malformed.counts.values()) == 1
    plain = tmp_path / "jobs.csv"
    plain.write_text(text)
    assert read_trace(plain).jobs == trace.jobs


def test_a_job_that_the_cluster_can_never_run_is_refused_and_counted() -> None:
    jobs = [job("a", 0, 5, 2), job("wide", 0, 5, 9), job("odd", 0, 5, device="h100")]
    trace = runnable(Trace(name="t", format="own", jobs=jobs), Scenario(policy="fifo", machines=FOUR))
    assert [each.name for each in trace.jobs] == ["a"]
    assert trace.refused.counts == {
        "needs more than the 4 GPUs of one kind that the cluster has": 1,
        "asks for h100, which the cluster has not": 1,
    }
    with pytest.raises(InputError, match="can run none of its jobs"):
        runnable(Trace(name="t", format="own", jobs=jobs[1:]), Scenario(policy="fifo", machines=FOUR))


PAIRS = MannersOfKinds({"": Manners(needs=0.5, bears=0.5)})
SET = {
    "sharing": {"settings": Settings(sharing=True)},
    "placement": {"placement": "spread"},
    "slowdown_per_node": {"speeds": SpeedSource(slowdown_per_node=0.1)},
    "checkpoint": {"settings": Settings(checkpoint_s=1.0)},
    "restart": {"settings": Settings(restart_s=1.0)},
    "job_mtbf": {"settings": Settings(failures=FailureModel(job_mtbf_gpu_s=1e9))},
    "node_mtbf": {"settings": Settings(failures=FailureModel(node_mtbf_s=1e9))},
    "outages": {"settings": Settings(failures=FailureModel(outages=(Outage(time_s=1, node=0, repair_s=1),)))},
    "errors": {"error": 0.1},
    "residuals": {"residuals": Path("x.json"), "residuals_of": "y"},
    "rounds": {"rounds_s": 60.0},
    "estimates": {"beliefs": "history"},
    "migrate": {"settings": Settings(migrate=True)},
    "mixed_gangs": {"settings": Settings(mixed_gangs=True)},
    "truth": {"residuals": Path("x.json"), "truth_of": "y"},
    "pairs": {"settings": Settings(pairs=PAIRS)},
    "quotas": {"settings": Settings(rules=Rules(queues={"": Queue(gpus=2)}))},
    "cohorts": {"settings": Settings(rules=Rules(queues={"": Queue(cohort="all")}))},
    "shares": {"settings": Settings(rules=Rules(queues={"": Queue(shares=2.0)}))},
    "reservations": {
        "settings": Settings(rules=Rules(reservations=(Reservation(start_s=0.0, end_s=9.0, gpus=2),)))
    },
    "preempt": {"settings": Settings(rules=Rules(preempt=True))},
    "limits": {"settings": Settings(rules=Rules(kill=True))},
    "partitions": {"machines": [*FOUR, Machine(device="v100", gpus=1, partition="other")]},
    "spot": {"spot": Spot(nodes=1, mean_s=60.0, away_s=5.0)},
    "checkpoint_write": {"speeds": SpeedSource(checkpoint_write_s=60.0)},
}


@pytest.mark.parametrize("option", CANNOT)
@pytest.mark.parametrize("policy", [*policies.names(), *ROUND_POLICIES])
def test_an_option_is_accepted_or_refused_by_name(policy: str, option: str) -> None:
    scenario = Scenario(policy=policy, **{"machines": FOUR, **SET[option]})  # type: ignore[arg-type,dict-item]
    if policy in ROUND_POLICIES and ROUND_POLICIES[policy].packs:  # which needs them
        scenario = replace(scenario, settings=replace(scenario.settings, pairs=PAIRS))
    if policy in CANNOT[option]:
        with pytest.raises(InputError, match=f"^{option}: policy {policy} cannot honour it; "):
            scenario.check()
    else:
        scenario.check()  # and it changes what happens: test_scheduling_options.py


@pytest.mark.parametrize("policy", [*policies.names(), "max_min_fairness"])
def test_an_elastic_job_too_wide_is_refused_where_the_policy_does_not_resize(policy: str) -> None:
    scenario = Scenario(policy=policy, machines=FOUR)
    jobs = [job("wide", 0.0, 30.0, gpus=8, least_gpus=2), job("narrow", 1.0, 30.0)]
    kept = runnable(Trace(name="t", format="own", jobs=jobs), scenario)
    resizes = policy in ("pollux", "optimus", "afs", "sia")
    assert [each.name for each in kept.jobs] == (["wide", "narrow"] if resizes else ["narrow"])
    assert len(scenario.run(kept).jobs) == len(kept.jobs)


@pytest.mark.parametrize("policy", ["pollux", "optimus", "afs", "sia"])
def test_an_elastic_job_gets_only_as_many_gpus_as_it_runs_on(policy: str) -> None:
    """Tables tell the speed on one, two, four and eight, and a slice of a GPU takes no gang."""
    table = ThroughputTable({("v100", "net", gpus): float(gpus) for gpus in (1, 2, 4, 8)})
    jobs = [
        TraceJob(name="grows", arrival_s=0, gpus=1, steps=5000, kind="net", most_gpus=7),
        TraceJob(name="shrinks", arrival_s=0, gpus=8, steps=9000, kind="net", least_gpus=3),
        TraceJob(name="comes", arrival_s=400, gpus=2, steps=500, kind="net"),
    ]
    result = Simulation(jobs, [Machine(device="v100", gpus=6)], policies.get(policy), speeds=table).run()
    assert {each.allocation.gpus for each in result.segments} <= {1, 2, 4}
    assert {each.job for each in result.segments if each.reason == "finished"} == {0, 1, 2}
    sliced = SlicedSpeeds(TraceSpeeds(), {})
    slices = cut(Machine(device="h100-sxm-80gb", gpus=4), ["3g.40gb", "4g.40gb"])
    small = [job(str(number), 0, 1000 + number, most_gpus=7) for number in range(3)]
    result = Simulation(small, slices, policies.get(policy), speeds=sliced).run()
    assert [each.allocation.gpus for each in result.segments if each.reason == "finished"] == [1, 1, 1]


def test_an_elastic_job_that_runs_on_no_number_there_is_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"v100": {f"('net', {gpus})": {"null": 1.0} for gpus in (1, 2, 4, 8)}}))
    jobs = [
        TraceJob(name="never", arrival_s=0, gpus=4, steps=10, kind="net", least_gpus=3),
        TraceJob(name="fits", arrival_s=0, gpus=4, steps=10, kind="net", least_gpus=2),
    ]
    three = [Machine(device="v100", gpus=3)]
    scenario = Scenario(policy="sia", machines=three, speeds=SpeedSource(throughputs=path))
    kept = runnable(Trace(name="t", format="own", jobs=jobs), scenario)
    assert [each.name for each in kept.jobs] == ["fits"]
    assert scenario.run(kept).finish_s.tolist() == [10.0]


def test_a_job_whose_length_nobody_tells_is_refused_and_the_others_run(tmp_path: Path) -> None:
    jobs = [TraceJob(name="steps", arrival_s=0, gpus=1, steps=10, kind="net"), job("timed", 0, 5, kind="net")]
    trace = Trace(name="t", format="own", jobs=jobs)
    kept = runnable(trace, Scenario(policy="fifo", machines=FOUR))
    assert [each.name for each in kept.jobs] == ["timed"]
    assert kept.refused.counts == {"has steps and no duration; give a table of throughputs": 1}
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"v100": {"('net', 1)": {"null": 1.0}}}))
    kept = runnable(trace, Scenario(policy="fifo", machines=FOUR, speeds=SpeedSource(throughputs=path)))
    assert [each.name for each in kept.jobs] == ["steps"]
    assert kept.refused.counts == {"has no number of steps, which a table of throughputs needs": 1}


def test_a_gang_does_not_span_its_partition_and_the_nodes_of_all() -> None:
    machines = read_machines("2x4xv100,debug:2x4xv100")
    jobs = [job("wide", 0, 5, 12, partition="debug"), job("narrow", 0, 5, 8, partition="debug")]
    scenario = Scenario(policy="fifo", machines=machines)
    kept = runnable(Trace(name="t", format="own", jobs=jobs), scenario)
    assert [each.name for each in kept.jobs] == ["narrow"]
    assert kept.refused.counts == {"needs more than the 8 GPUs of one kind that the cluster has": 1}
    assert scenario.run(kept).finish_s.tolist() == [5.0]


def test_what_the_solver_of_sia_prints_by_itself_is_not_shown(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = optimize.milp

    def loud(*arguments: object, **options: object) -> object:
        os.write(1, b"tmpSolver.run();")
        return quiet(*arguments, **options)

    monkeypatch.setattr(optimize, "milp", loud)
    Simulation([job("a", 0, 5)], FOUR, policies.get("sia")).run()
    os.write(1, b"{}")
    assert capfd.readouterr().out == "{}"


def test_first_in_first_out_is_in_rounds_only_where_that_is_said() -> None:
    assert not Scenario(policy="fifo", machines=FOUR).in_rounds
    assert Scenario(policy="fifo", machines=FOUR, rounds_s=360.0).in_rounds
    assert Scenario(policy="gavel_fifo", machines=FOUR).in_rounds


def test_time_in_a_round_is_counted_as_the_difference_of_moments() -> None:
    from foretrain.scheduling.rounds.policies import round_policy
    from foretrain.scheduling.rounds.simulation import Rounds

    table = ThroughputTable({("v100", "net", 1): 0.7})
    jobs = [TraceJob(name="a", arrival_s=1e9 + 0.1, steps=1000.0, gpus=1, kind="net")]
    rounds = Rounds(jobs, ONE, round_policy("gavel_fifo"), table)
    result = rounds.run()
    received = sum(each.end_s - each.start_s for each in result.segments)
    assert rounds._jobs[0].received_s["v100"] - 180.0 == pytest.approx(received, abs=1e-9)


def test_rounds_skip_the_time_in_which_nothing_runs_or_waits() -> None:
    class Counting(Policy):
        name = "counting"
        interval_s = 60.0
        rounds: ClassVar[list[float]] = []

        def round(self, cluster: Simulation) -> None:
            self.rounds.append(cluster.now)

        def decide(self, cluster: Simulation) -> None:
            for waiting in list(cluster.waiting.values()):
                cluster.start(waiting)

    jobs = [job("a", 0, 70), job("b", 1e12 + 30, 70), job("c", 1e12 + 300, 10)]
    result = Simulation(jobs, ONE, Counting()).run()
    assert result.finish_s.tolist() == [70, 1e12 + 100, 1e12 + 310]
    assert Counting.rounds == [0, 60, 120, 1e12 + 80, 1e12 + 140], "multiples of 60 s, as without the gap"
