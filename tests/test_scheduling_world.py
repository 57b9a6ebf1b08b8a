"""The operator's world: limits, partitions, quotas, cohorts, shares, classes, reservations, spot nodes, energy."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.errors import InputError
from foretrain.scheduling import policies
from foretrain.scheduling.admission import runnable
from foretrain.scheduling.answers.buying import bought
from foretrain.scheduling.capabilities import CANNOT
from foretrain.scheduling.checkpointing import CheckpointedSpeeds
from foretrain.scheduling.clusters import read_machines
from foretrain.scheduling.correlation import Shares
from foretrain.scheduling.energy import energy
from foretrain.scheduling.failures import FailureModel, Outage
from foretrain.scheduling.jobs import Trace, TraceJob
from foretrain.scheduling.machines import Machine
from foretrain.scheduling.metrics import metrics, metrics_by_group
from foretrain.scheduling.page import page
from foretrain.scheduling.page_parts import against, colourings, queue_over_time, settings_of, trouble
from foretrain.scheduling.policies.fair_tree import FairTree
from foretrain.scheduling.result import Result
from foretrain.scheduling.rules import Queue, Reservation, Rules, read_rules
from foretrain.scheduling.sharing.mig import SlicedSpeeds
from foretrain.scheduling.sharing.use import Use
from foretrain.scheduling.simulator import Settings, Simulation
from foretrain.scheduling.speeds import ThroughputTable, TraceSpeeds
from foretrain.scheduling.spot import Spot
from foretrain.scheduling.study import Scenario, SpeedSource


def job(
    name: str, arrival_s: float = 0.0, gpus: int = 1, duration_s: float = 100.0, **more: object
) -> TraceJob:
    return TraceJob(name=name, arrival_s=arrival_s, gpus=gpus, duration_s=duration_s, **more)  # type: ignore[arg-type]


def played(
    jobs: list[TraceJob], policy: str, gpus: int = 4, rules: Rules | None = None, **more: object
) -> Result:
    machines = [Machine(device="v100", gpus=gpus)]
    chosen = Settings(rules=rules or Rules(), **more)  # type: ignore[arg-type]
    return Simulation(jobs, machines, policies.get(policy), settings=chosen).run()


def starts(result: Result) -> dict[str, float]:
    return {each.name: float(start) for each, start in zip(result.jobs, result.start_s, strict=True)}


@pytest.mark.parametrize("policy", ["fifo", "sjf", "backfill", "multifactor", "kueue", "sia"])
def test_a_job_ends_at_its_limit_where_limits_kill(policy: str) -> None:
    jobs = [job("long", duration_s=500.0, limit_s=120.0), job("short", duration_s=50.0, limit_s=120.0)]
    kept = played(jobs, policy)
    killed = played(jobs, policy, rules=Rules(kill=True))
    assert kept.finish_s.tolist() == [500.0, 50.0]
    assert killed.finish_s.tolist() == [120.0, 50.0]
    assert (metrics(kept).killed, metrics(killed).killed) == (0, 1)
    assert [segment.reason for segment in killed.segments] == ["finished", "killed"]


def test_jobs_run_in_the_partition_that_they_ask_for() -> None:
    machines = [
        Machine(device="v100", gpus=4, partition="gpu"),
        Machine(device="v100", gpus=2, partition="debug"),
    ]
    jobs = [job("a", partition="debug", gpus=2), job("b", partition="debug"), job("c", partition="gpu")]
    result = Simulation(jobs, machines, policies.get("fifo")).run()
    assert starts(result) == {"a": 0.0, "b": 100.0, "c": 100.0}
    assert {segment.allocation.parts[0][0] for segment in result.segments if segment.job < 2} == {1}
    scenario = Scenario(policy="fifo", machines=machines)
    trace = Trace(name="t", format="own", jobs=[*jobs, job("d", partition="none")])
    assert runnable(trace, scenario).refused.counts == {"asks for none, and the cluster has debug, gpu": 1}


def test_a_quota_holds_a_group_back_and_nobody_else() -> None:
    rules = Rules(queues={"lab": Queue(gpus=1)})
    jobs = [job("a", group="lab"), job("b", group="lab"), job("c", group="other", gpus=2)]
    for policy in ("multifactor", "kueue"):
        assert starts(played(jobs, policy, rules=rules)) == {"a": 0.0, "b": 100.0, "c": 0.0}
    scenario = Scenario(
        policy="kueue", machines=[Machine(device="v100", gpus=4)], settings=Settings(rules=rules)
    )
    trace = Trace(name="t", format="own", jobs=[*jobs, job("big", group="lab", gpus=2)])
    assert runnable(trace, scenario).refused.counts == {"needs more than the 1 GPUs of lab": 1}


def test_a_job_is_refused_that_one_of_the_policies_can_never_run() -> None:
    rules = Rules(queues={name: Queue(gpus=1, cohort="all") for name in ("lab", "other")})
    machines = [Machine(device="v100", gpus=2)]
    kueue, alone = (
        Scenario(policy=policy, machines=machines, settings=Settings(rules=rules))
        for policy in ("kueue", "multifactor")
    )
    trace = Trace(name="t", format="own", jobs=[job("a", group="lab"), job("b", gpus=2, group="lab")])
    assert [each.name for each in runnable(trace, kueue).jobs] == ["a", "b"]
    assert [each.name for each in runnable(trace, kueue, alone).jobs] == ["a"]
    with pytest.raises(InputError, match="when: the cluster can never run job 'b': needs more than the 1 GP"):
        runnable(trace, kueue, alone, needed="b")


def test_a_cohort_lends_what_it_does_not_use_and_takes_it_back() -> None:
    queues = {"a": Queue(gpus=2, cohort="all"), "b": Queue(gpus=2, cohort="all", borrow=1)}
    jobs = [job(f"b{n}", group="b", duration_s=300.0) for n in range(4)] + [
        job("a0", 50.0, group="a", gpus=2)
    ]
    lent = starts(played(jobs, "kueue", rules=Rules(queues=queues)))
    assert sorted(lent.values()) == [0.0, 0.0, 0.0, 300.0, 300.0]  # three of b: its own two, and one borrowed
    assert lent["a0"] == 300.0
    reclaimed = played(jobs, "kueue", rules=Rules(queues=queues, preempt=True))
    assert starts(reclaimed)["a0"] == 50.0
    assert reclaimed.preemptions.sum() == 1


def test_jobs_of_a_higher_class_take_the_gpus_of_lower_ones_where_rules_say_so() -> None:
    jobs = [job("low", gpus=4, duration_s=300.0), job("high", 10.0, gpus=4, priority=5.0)]
    for policy in ("multifactor", "kueue"):
        assert starts(played(jobs, policy))["high"] == 300.0
        taken = played(jobs, policy, rules=Rules(preempt=True))
        assert starts(taken)["high"] == 10.0
        assert taken.finish_s.tolist() == [400.0, 110.0]


def test_who_has_used_less_goes_first() -> None:
    jobs = [job("first", user="ann", group="g", gpus=4), job("ann", 10.0, user="ann", group="g", gpus=4)]
    jobs.append(job("bob", 20.0, user="bob", group="g", gpus=4))
    assert starts(played(jobs, "multifactor")) == {"first": 0.0, "bob": 100.0, "ann": 200.0}
    tree = FairTree(3600.0, lambda group: {"rich": 3.0, "poor": 1.0}[group])
    for user in (("rich", "x"), ("rich", "y"), ("poor", "z")):
        tree.meet(user)
    tree.advance(100.0, [(("rich", "x"), 2.0), (("poor", "z"), 1.0)])
    factors = tree.factors()
    assert factors["rich", "y"] > factors["rich", "x"] > factors["poor", "z"]


def test_multifactor_backfills_by_limits_and_keeps_reserved_gpus_free() -> None:
    jobs = [
        job("runs", gpus=3, duration_s=100.0, limit_s=100.0),
        job("waits", 1.0, gpus=4, duration_s=50.0, limit_s=60.0),
        job("fits", 2.0, gpus=1, duration_s=90.0, limit_s=95.0),
        job("would-delay", 3.0, gpus=1, duration_s=10.0, limit_s=500.0),
    ]
    found = starts(played(jobs, "multifactor"))
    assert (found["fits"], found["waits"]) == (2.0, 100.0)
    assert found["would-delay"] >= 150.0
    held = Reservation(start_s=200.0, end_s=1000.0, gpus=4, group="vip")
    jobs = [job("late", 150.0, duration_s=100.0), job("vip", 250.0, group="vip")]
    found = starts(played(jobs, "multifactor", rules=Rules(reservations=(held,))))
    assert found["vip"] == 250.0
    assert found["late"] >= 1000.0


def test_every_option_that_a_policy_cannot_honour_is_refused_by_name() -> None:
    rules = {
        "quotas": Rules(queues={"g": Queue(gpus=1)}),
        "cohorts": Rules(queues={"g": Queue(cohort="c")}),
        "shares": Rules(queues={"g": Queue(shares=2.0)}),
        "reservations": Rules(reservations=(Reservation(start_s=0.0, end_s=1.0, gpus=1),)),
        "preempt": Rules(preempt=True),
    }
    for option, chosen in rules.items():
        for policy in policies.names():
            refused = policy in CANNOT[option]
            assert refused is not (policy in {"multifactor", "kueue"} and _honours(policy, option))
            if refused:
                with pytest.raises(InputError, match=f"{option}: policy {policy} cannot honour it"):
                    played([job("a")], policy, rules=chosen)


def _honours(policy: str, option: str) -> bool:
    only = {"cohorts": "kueue", "shares": "multifactor", "reservations": "multifactor"}
    return only.get(option, policy) == policy


def test_rules_are_read_and_mistakes_are_told(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(
        'preempt = true\nkill = true\n[queue.lab]\ngpus = 8\ncohort = "all"\nborrow = 4\nshares = 2\n'
        '[[reservation]]\nstart = "1h"\nend = 7200\ngpus = 4\ngroup = "lab"\n'
    )
    rules = read_rules(path)
    assert rules.queue("lab") == Queue(gpus=8, cohort="all", borrow=4, shares=2)
    assert rules.queue("none").gpus is None
    assert rules.reservations == (Reservation(start_s=3600.0, end_s=7200.0, gpus=4, group="lab"),)
    for text, message in (
        ("prempt = true", "preempt"),
        ("kill = 1", "true or false"),
        ("[queue.lab]\ngpu = 8", "gpus"),
        ("[queue.lab]\ngpus = -1", "at least 0"),
        ("[[reservation]]\nstart = 0\nend = 10", "has no gpus"),
        (
            "[[reservation]]\nstart = 20\nend = 10\ngpus = 1",
            "reservation.end: 10 is not a time after its start, 20",
        ),
        ("queue = 3", "not tables"),
        ("= 3", "not TOML"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            read_rules(path)


def test_deadlines_are_counted_and_the_earliest_goes_first() -> None:
    jobs = [
        job("runs", gpus=4),
        job("later", 1.0, gpus=4, deadline_s=1000.0),
        job("soon", 2.0, gpus=4, deadline_s=250.0),
    ]
    jobs.append(job("none", 0.5, gpus=4))
    result = played(jobs, "edf")
    assert starts(result) == {"runs": 0.0, "soon": 100.0, "later": 200.0, "none": 300.0}
    assert metrics(result).missed_deadlines == 0
    assert metrics(played(jobs, "fifo")).missed_deadlines == 1
    assert metrics(played([job("a")], "fifo")).missed_deadlines is None


def outages_of(spot: Spot, nodes: tuple[int, ...], until_s: float, seed: int) -> list[Outage]:
    def in_time(outage: Outage) -> bool:
        return outage.time_s < until_s

    return [each for node in nodes for each in itertools.takewhile(in_time, spot.outages(node, seed))]


def test_spot_nodes_cost_less_and_go_away() -> None:
    machines = [Machine(device="v100", gpus=8, price_per_hour=10.0)] * 4
    spot = Spot(nodes=2, mean_s=3600.0, price=0.4)
    assert [machine.price_per_hour for machine in spot.machines(machines)] == [10.0, 10.0, 4.0, 4.0]
    outages = outages_of(spot, nodes=(2, 3), until_s=10 * 86400.0, seed=1)
    assert {outage.node for outage in outages} == {2, 3}
    assert outages == outages_of(spot, nodes=(2, 3), until_s=10 * 86400.0, seed=1)
    assert 60 < len(outages) < 400
    with pytest.raises(InputError, match="at most the cluster's 1"):
        spot.machines(machines[:1])


def test_spot_nodes_go_away_for_as_long_as_jobs_of_steps_run() -> None:
    """The job of 10,000 steps takes 1,000 s, though the trace alone tells no length."""
    spot = Spot(nodes=1, mean_s=50.0, away_s=5.0)
    scenario = Scenario(policy="fifo", machines=[Machine(device="v100", gpus=1)], spot=spot)
    table = ThroughputTable({("v100", "net", 1): 10.0})
    steps = TraceJob(name="a", arrival_s=0.0, gpus=1, steps=10_000, kind="net")
    around = Settings(failures=scenario._failures(), checkpoint_every_s=1.0)
    result = Simulation([steps], scenario.machines, policies.get("fifo"), speeds=table, settings=around).run()
    taken = outages_of(spot, nodes=(0,), until_s=float(result.finish_s[0]), seed=0)
    assert [segment.end_s for segment in result.segments][:-1] == [outage.time_s for outage in taken]
    assert len(taken) > 10


def test_nodes_that_are_bought_are_no_spot_nodes_and_move_none() -> None:
    spot = Spot(nodes=1, mean_s=100.0, away_s=5.0, price=0.5)
    machines = [Machine(device="v100", gpus=8, price_per_hour=10.0)]
    before = Scenario(policy="fifo", machines=machines, spot=spot)
    after = replace(before, machines=[*before.machines, *bought("8xv100", before.machines)])
    assert [machine.spot for machine in after.machines] == [True, False]
    assert after.machines[0].price_per_hour == 5.0
    assert after.machines[1].price_per_hour != 5.0
    trace = Trace(name="t", format="own", jobs=[job("a", gpus=8, duration_s=1000.0)])
    (taken,) = itertools.islice(spot.outages(0, seed=0), 1)
    stretches = {
        (segment.start_s, segment.end_s, segment.reason, segment.allocation.parts[0][0])
        for segment in after.run(trace).segments
    }
    assert stretches == {
        (0.0, taken.time_s, "node failed", 0),
        (taken.time_s, taken.time_s + 1000.0, "finished", 1),
    }


def test_spot_nodes_are_paid_for_while_they_are_there() -> None:
    """Two nodes of 3.6 and 1.8 dollars an hour over 1,000 s cost 1.5 dollars, but for 0.0005 dollars a second
    that the second one is away."""
    spot = Spot(nodes=1, mean_s=100.0, away_s=50.0, price=0.5)
    machines = [Machine(device="v100", gpus=1, price_per_hour=3.6)] * 2
    scenario = Scenario(policy="fifo", machines=machines, spot=spot)
    trace = Trace(name="t", format="own", jobs=[job("a", duration_s=1000.0)])
    taken = outages_of(spot, nodes=(1,), until_s=1000.0, seed=0)
    away_s = sum(min(outage.time_s + outage.repair_s, 1000.0) - outage.time_s for outage in taken)
    result = scenario.run(trace)
    assert result.finish_s.tolist() == [1000.0]
    assert away_s > 0
    assert metrics(result).cost == pytest.approx(1.5 - 0.0005 * away_s)


def test_energy_counts_busy_idle_and_host() -> None:
    result = Simulation(
        [job("a", gpus=2, duration_s=3600.0)], [Machine(device="v100-sxm-16gb", gpus=4)], policies.get("fifo")
    ).run()
    drawn = energy(result)
    assert drawn is not None
    assert drawn.busy_j == pytest.approx(2 * 3600 * 300 * 0.52)
    assert drawn.total_j == pytest.approx(drawn.busy_j + drawn.idle_j + drawn.host_j)
    unknown = Simulation([job("a")], [Machine(device="unheard-of", gpus=1)], policies.get("fifo")).run()
    assert energy(unknown) is None


worlds = st.lists(
    st.tuples(
        st.integers(0, 50), st.integers(1, 4), st.integers(1, 60), st.sampled_from("ab"), st.integers(0, 2), st.integers(5, 90)
    ),
    min_size=1,
    max_size=14,
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(worlds, st.sampled_from(["multifactor", "kueue"]), st.booleans(), st.booleans())
def test_quotas_are_kept_and_no_job_is_lost_whatever_the_rules(
    rows: list[tuple[int, int, int, str, int, int]], policy: str, preempt: bool, kill: bool
) -> None:
    queues = {
        "a": Queue(gpus=4, cohort="c" if policy == "kueue" else ""),
        "b": Queue(gpus=5, cohort="c" if policy == "kueue" else ""),
    }
    jobs = [
        job(
            str(n),
            float(at),
            gpus,
            float(time),
            group=group,
            priority=float(level),
            limit_s=float(limit),
            user=group,
        )
        for n, (at, gpus, time, group, level, limit) in enumerate(rows)
    ]
    result = played(jobs, policy, gpus=8, rules=Rules(queues=queues, preempt=preempt, kill=kill))
    assert (result.finish_s >= result.arrival_s).all()
    ends = {segment.job: segment.reason for segment in result.segments}
    for number, each in enumerate(jobs):
        assert each.duration_s is not None
        ran = sum(s.end_s - s.start_s for s in result.segments if s.job == number)
        assert ends[number] in {"finished", "killed"}
        if ends[number] == "finished":
            assert ran == pytest.approx(each.duration_s)
        assert not kill or all(
            s.end_s - s.start_s <= (each.limit_s or 0) + 1e-6 for s in result.segments if s.job == number
        )
    for moment in {segment.start_s for segment in result.segments}:
        at_work = [s for s in result.segments if s.start_s <= moment < s.end_s]
        assert sum(s.allocation.gpus for s in at_work) <= 8
        for group, most in {"a": 4, "b": 5}.items():
            held = sum(s.allocation.gpus for s in at_work if jobs[s.job].group == group)
            assert held <= (9 if policy == "kueue" else most)


def test_a_page_tells_the_queue_failures_settings_and_policies_against_each_other() -> None:
    jobs = [job(str(n), float(n), 4, 100.0, user="ann" if n % 2 else "bob") for n in range(4)]
    fifo = played(jobs, "fifo")
    times, waiting = queue_over_time(fifo, 401)
    assert waiting[0] == 0
    assert waiting[np.searchsorted(times, 50.0)] == 3
    assert waiting[-1] == 0
    assert set(colourings(fifo)) == {"user"}
    ratio, words = against(fifo, played(jobs, "sjf"))
    assert ratio.tolist() == [1.0] * 4
    assert "0% of jobs end sooner" in words
    killed = played([job("a", duration_s=50.0, limit_s=20.0)], "fifo", rules=Rules(kill=True))
    assert trouble(killed)["killed"].tolist() == [20.0]
    shown = settings_of(
        Scenario(
            policy="fifo",
            machines=[Machine(device="v100", gpus=4, partition="gpu")] * 2,
            settings=Settings(restart_s=30.0, rules=Rules(kill=True)),
        )
    )
    assert shown["cluster"] == "gpu: 2 x 4 x v100"
    assert (shown["restart"], shown["limits"]) == ("30 s", "end jobs")
    text = page([fifo, played(jobs, "sjf")], "two")
    assert all(f"<h2>{name}</h2>" in text for name in ("Jobs that wait", "Job by job", "GPUs under fifo"))


def test_slices_are_as_fast_as_the_processors_they_have() -> None:
    machines = read_machines("1x2xh100-sxm-80gb@3g.40gb+4g.40gb,1x8xv100")
    assert [(machine.device, machine.gpus) for machine in machines[:2]] == [
        ("h100-sxm-80gb@3g.40gb", 2),
        ("h100-sxm-80gb@4g.40gb", 2),
    ]
    uses = {"light": Use(busy=0.3), "hungry": Use(), "wide": Use(memory_bytes=60e9)}
    speeds = SlicedSpeeds(TraceSpeeds(), uses)
    on = "h100-sxm-80gb@3g.40gb"
    assert speeds.rate(job("a", kind="light"), on, (1,)) == 1.0
    assert speeds.rate(job("a", kind="hungry"), on, (1,)) == pytest.approx(3 / 7)
    assert speeds.rate(job("a", kind="wide"), on, (1,)) == 0.0
    assert speeds.rate(job("a", gpus=2, kind="light"), on, (2,)) == 0.0
    assert speeds.rate(job("a", gpus=2, kind="light"), "v100", (2,)) == 1.0


def test_checkpoints_that_jobs_write_as_they_go_cost_time() -> None:
    speeds = CheckpointedSpeeds(TraceSpeeds(), every_s=900.0, write_s=100.0, by_kind={"small": 0.0})
    assert speeds.rate(job("a"), "v100", (1,)) == pytest.approx(0.9)
    assert speeds.rate(job("a", kind="small"), "v100", (1,)) == 1.0
    source = SpeedSource(checkpoint_write_s=100.0, checkpoint_every_s=900.0)
    scenario = Scenario(policy="fifo", machines=[Machine(device="v100", gpus=1)], speeds=source)
    result = scenario.run(Trace(name="t", format="own", jobs=[job("a", duration_s=90.0)]))
    assert result.finish_s.tolist() == pytest.approx([100.0])


@pytest.mark.parametrize("policy", policies.names())
def test_what_a_job_ran_counts_towards_its_limit_whoever_took_turns_with_it(policy: str) -> None:
    jobs = [job(name, duration_s=7200.0, limit_s=600.0) for name in "ab"]
    result = played(jobs, policy, gpus=1, rules=Rules(kill=True))
    assert metrics(result).killed == 2
    for number in (0, 1):
        ran_s = sum(each.end_s - each.start_s for each in result.segments if each.job == number)
        assert ran_s == pytest.approx(600.0)


def test_a_job_that_failed_has_its_whole_limit_again() -> None:
    outage = FailureModel(outages=(Outage(time_s=60.0, node=0, repair_s=10.0),))
    result = played(
        [job("a", duration_s=90.0, limit_s=100.0)], "fifo", rules=Rules(kill=True), failures=outage
    )
    assert result.finish_s.tolist() == [160.0]
    assert [each.reason for each in result.segments] == ["node failed", "finished"]


def test_a_job_that_is_killed_before_its_deadline_is_late() -> None:
    jobs = [
        job("a", duration_s=7200.0, limit_s=600.0, deadline_s=3600.0, group="g"),
        job("b", duration_s=7200.0, limit_s=600.0),
        job("c", duration_s=500.0, limit_s=600.0, deadline_s=3600.0),
    ]
    result = played(jobs, "fifo", rules=Rules(kill=True))
    assert (metrics(result).killed, metrics(result).missed_deadlines) == (2, 1)
    assert metrics_by_group(result)["g"].missed_deadlines == 1


@pytest.mark.parametrize("text", ["3x8xv100", "24xv100"])
def test_nodes_that_are_bought_stand_in_racks_of_their_own(text: str) -> None:
    machines = read_machines("3x8xv100", rack=2)
    assert [machine.rack for machine in machines] == [0, 0, 1]
    more = bought(text, machines, rack=2)
    assert [(machine.gpus, machine.rack) for machine in more] == [(8, 2), (8, 2), (8, 3)]


def test_the_settings_of_a_page_are_all_that_were_given() -> None:
    rules = Rules(queues={"lab": Queue(gpus=4)}, reservations=(Reservation(start_s=0.0, end_s=60.0, gpus=1),))
    scenario = Scenario(
        policy="fifo",
        machines=read_machines("5x4xv100", rack=2),
        placement="topology",
        speeds=SpeedSource(
            slowdown_per_node=0.5, memory_risk=0.1, checkpoint_write_s=20.0, predictor="p",
            templates=Path("jobs"), uses={"net": Use(busy=0.5, kernel_s=1e-5, memory_bytes=1.0)},
        ),
        settings=Settings(
            migrate=True, mixed_gangs=True, least_speed=0.5, checkpoint_every_s=420.0, rules=rules,
            failures=FailureModel(node_mtbf_s=86400.0, repair_s=1200.0),
        ),
        shares=Shares(user=0.2, model=0.5),
        truth_of="p",
        spot=Spot(nodes=1, mean_s=3600.0, away_s=600.0, price=0.25),
    )  # fmt: skip
    shown = settings_of(scenario)
    assert (
        shown
        | {
            "nodes to a rack": "2",
            "slowdown per node": "0.5",
            "templates": "jobs",
            "risk of running out of memory": "0.1",
            "kinds with a known use of a device": "1",
            "moves to faster devices": "yes",
            "gangs on several kinds of devices": "yes",
            "repair of a node": "20 min",
            "time between checkpoints": "7 min",
            "writing a checkpoint": "20 s",
            "errors alike": "users 0.2, models 0.5 of the variance",
            "truth": "forecasts, off as p was",
            "spot nodes": "1, away after 1 h for 10 min, at 0.25 of the price",
            "queues": "lab",
        }
        == shown
    )
    assert set(settings_of(Scenario(policy="fifo", machines=read_machines("1x1xv100")))) == {
        "cluster", "placement", "speeds",
    }  # fmt: skip
