"""Rules of a cluster: reservations, preemption, turns of queues, and rules that make no sense are told."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from foretrain.cli.app import app
from foretrain.errors import InputError
from foretrain.scheduling import Policy, Simulation, policies
from foretrain.scheduling.capabilities import CANNOT
from foretrain.scheduling.clusters import read_machines
from foretrain.scheduling.jobs import TraceJob
from foretrain.scheduling.result import Result
from foretrain.scheduling.rules import Queue, Reservation, Rules, read_rules
from foretrain.scheduling.settings import Settings
from foretrain.scheduling.study import Scenario

COHORT = {"a": Queue(gpus=4, cohort="all"), "b": Queue(gpus=4, cohort="all")}
RULES = ("quotas", "cohorts", "shares", "reservations", "preempt")


def job(
    name: str, arrival_s: float = 0.0, gpus: int = 8, duration_s: float = 100.0, **more: object
) -> TraceJob:
    return TraceJob(name=name, arrival_s=arrival_s, gpus=gpus, duration_s=duration_s, **more)  # type: ignore[arg-type]


def kept(start_s: float, end_s: float, gpus: int = 8, **more: object) -> Reservation:
    return Reservation(start_s=start_s, end_s=end_s, gpus=gpus, **more)  # type: ignore[arg-type]


def played(
    jobs: list[TraceJob], rules: Rules, policy: str = "multifactor", cluster: str = "1x8xv100"
) -> Result:
    return Simulation(
        jobs, read_machines(cluster), policies.get(policy), settings=Settings(rules=rules)
    ).run()


def starts(result: Result) -> dict[str, float]:
    return {each.name: float(start) for each, start in zip(result.jobs, result.start_s, strict=True)}


def preempted(result: Result) -> list[str]:
    return [result.jobs[each.job].name for each in result.segments if each.reason == "preempted"]


# Reservations


def test_what_a_group_holds_of_its_reservation_is_not_kept_from_others_once_more() -> None:
    jobs = [job("vip", gpus=4, duration_s=1000.0, group="vip"), job("other", 10.0, gpus=4)]
    assert starts(played(jobs, Rules(reservations=[kept(0.0, 5000.0, 4, group="vip")])))["other"] == 10.0
    wide = [job("vip", gpus=6, duration_s=1000.0, group="vip"), job("other", 10.0, gpus=2)]
    assert starts(played(wide, Rules(reservations=[kept(0.0, 5000.0, 4, group="vip")])))["other"] == 10.0


def test_what_a_group_leaves_of_its_reservation_stays_free_for_it() -> None:
    jobs = [
        job("vip", gpus=2, duration_s=50.0, group="vip"),
        job("fits", 10.0, gpus=4, duration_s=1000.0),
        job("does-not", 10.0, gpus=2, duration_s=10.0),
        job("vip too", 60.0, gpus=4, group="vip"),
    ]
    found = starts(played(jobs, Rules(reservations=[kept(0.0, 500.0, 4, group="vip")])))
    assert found == {"vip": 0.0, "fits": 10.0, "vip too": 60.0, "does-not": 160.0 + 340.0}


def test_a_promise_of_a_group_is_booked_in_its_reservation() -> None:
    jobs = [
        job("runs", gpus=4),
        job("vip", 1.0, gpus=8, duration_s=50.0, group="vip"),
        job("other", 2.0, gpus=4, duration_s=90.0),
    ]
    found = starts(played(jobs, Rules(reservations=[kept(100.0, 150.0, 8, group="vip")])))
    assert found == {"runs": 0.0, "vip": 100.0, "other": 2.0}


def test_jobs_start_when_a_reservation_ends() -> None:
    assert starts(played([job("a")], Rules(reservations=[kept(0.0, 310.0)]))) == {"a": 310.0}
    jobs = [job("long", gpus=4, duration_s=150.0), job("short", gpus=4)]
    found = starts(played(jobs, Rules(reservations=[kept(100.0, 200.0)])))
    assert found == {"long": 200.0, "short": 0.0}


def test_a_long_reservation_is_waited_for() -> None:
    hours_s = 3600.0
    rules = Rules(reservations=[kept(0.0, 100 * hours_s)])
    assert starts(played([job("a")], rules)) == {"a": 100 * hours_s}
    many = Rules(reservations=[kept(n * hours_s, (n + 1) * hours_s) for n in range(1200)])
    assert starts(played([job("a", duration_s=4000.0)], many)) == {"a": 1200 * hours_s}


def test_a_reservation_names_devices_as_jobs_do() -> None:
    jobs = [job("a"), job("b", device="v100-sxm-16gb")]
    cluster = "1x8xv100-sxm-16gb,1x8xa100-sxm-80gb"
    found = starts(played(jobs, Rules(reservations=[kept(0.0, 1000.0, device="a100")]), cluster=cluster))
    assert sorted(found.values()) == [0.0, 100.0]


def test_a_reservation_takes_gpus_of_all_kinds_together() -> None:
    jobs = [job("a"), job("b")]
    whole = played(jobs, Rules(reservations=[kept(0.0, 1000.0, 16)]), cluster="1x8xv100,1x8xp100")
    assert starts(whole) == {"a": 1000.0, "b": 1000.0}
    two = Rules(reservations=[kept(0.0, 1000.0, 8, group="x"), kept(500.0, 2000.0, 8, group="y")])
    assert starts(played(jobs, two, cluster="1x8xv100,1x8xp100")) == {"a": 0.0, "b": 100.0}
    late = [job("a", 600.0), job("b", 600.0)]
    assert starts(played(late, two, cluster="1x8xv100,1x8xp100")) == {"a": 1000.0, "b": 1100.0}


def test_a_reservation_falls_on_nodes_of_everybody_unless_it_names_a_partition() -> None:
    cluster = "a:1x8xv100,1x8xv100"
    jobs = [job("anywhere"), job("in a", partition="a", group="g")]
    assert starts(played(jobs, Rules(reservations=[kept(0.0, 1000.0)]), cluster=cluster)) == {
        "anywhere": 1000.0,
        "in a": 0.0,
    }
    of_a = Rules(reservations=[kept(0.0, 1000.0, partition="a")])
    assert starts(played(jobs[:1], of_a, cluster=cluster)) == {"anywhere": 0.0}


@pytest.mark.parametrize(
    ("reservation", "message"),
    [
        (kept(0.0, 1.0, device="nosuch"), "reservation.device: 'nosuch' is not one of .* p100, v100"),
        (kept(0.0, 1.0, partition="a"), "reservation.partition: 'a' is not one of .* gpu"),
        (kept(0.0, 1.0, 100), "reservation.gpus: 100 is not at most the cluster's 16 GPUs"),
        (kept(0.0, 1.0, 9, device="v100"), "reservation.gpus: 9 is not at most the cluster's 8 GPUs of v100"),
    ],
)
def test_reservations_that_the_cluster_cannot_keep_are_refused(
    reservation: Reservation, message: str
) -> None:
    rules, cluster = Rules(reservations=[reservation]), "gpu:1x8xv100,1x8xp100"
    with pytest.raises(InputError, match=message):
        played([job("a")], rules, cluster=cluster)
    with pytest.raises(InputError, match=message):
        Scenario(
            policy="multifactor", machines=read_machines(cluster), settings=Settings(rules=rules)
        ).check()


# Preemption


def test_reservations_that_are_over_or_elsewhere_do_not_stop_preemption() -> None:
    jobs = [
        job("first", gpus=1, duration_s=10.0),
        job("low", 200.0, duration_s=1000.0),
        job("high", 300.0, duration_s=50.0, priority=1.0),
    ]
    over = Rules(preempt=True, reservations=[kept(10.0, 20.0, 1)])
    assert starts(played(jobs, over))["high"] == 300.0
    elsewhere = Rules(preempt=True, reservations=[kept(0.0, 9000.0, 8, device="p100")])
    only = [dataclasses.replace(each, device="v100") for each in jobs]
    assert starts(played(only, elsewhere, cluster="1x8xv100,1x8xp100"))["high"] == 300.0
    own = [dataclasses.replace(each, group="g") for each in jobs]
    assert starts(played(own, Rules(preempt=True, reservations=[kept(0.0, 9e3, group="g")])))["high"] == 300.0


def test_what_preemption_would_free_for_a_reservation_takes_nobody_off() -> None:
    jobs = [job("low", duration_s=400.0), job("high", 10.0, duration_s=200.0, priority=1.0)]
    rules = Rules(preempt=True, reservations=[kept(100.0, 450.0, 8, group="vip")])
    found = played([dataclasses.replace(jobs[0], group="vip"), jobs[1]], rules)
    assert (starts(found)["high"], preempted(found)) == (450.0, [])


def test_preemption_delays_none_of_those_who_come_first() -> None:
    jobs = [
        job("A", gpus=4, priority=1.0, user="u1"),
        job("B", gpus=4, user="u2"),
        job("X", 1.0, duration_s=50.0, priority=1.0, user="u3"),
        job("Y", 2.0, gpus=4, duration_s=1000.0, priority=1.0, user="u4"),
    ]
    found = played(jobs, Rules(preempt=True))
    assert starts(found) == {"A": 0.0, "B": 0.0, "X": 100.0, "Y": 150.0}
    assert preempted(found) == []
    brief = [*jobs[:3], dataclasses.replace(jobs[3], duration_s=90.0)]
    found = played(brief, Rules(preempt=True))
    assert (starts(found)["Y"], starts(found)["X"], preempted(found)) == (2.0, 100.0, ["B"])


@pytest.mark.parametrize("policy", ["multifactor", "kueue"])
def test_nobody_gives_way_who_need_not(policy: str) -> None:
    jobs = [
        job("big", gpus=7, duration_s=1000.0),
        job("small", 1.0, gpus=1, duration_s=1000.0),
        job("high", 10.0, gpus=4, duration_s=500.0, priority=1.0),
    ]
    found = played(jobs, Rules(preempt=True), policy)
    assert starts(found)["high"] == 10.0
    assert preempted(found) == ["big"]


def test_no_more_is_reclaimed_than_is_needed() -> None:
    jobs = [
        job("a0", gpus=4, duration_s=1000.0, group="a"),
        job("a1", gpus=3, duration_s=1000.0, group="a"),
        job("a2", 1.0, gpus=1, duration_s=1000.0, group="a"),
        job("b1", 100.0, gpus=3, group="b"),
    ]
    found = played(jobs, Rules(preempt=True, queues=COHORT), "kueue")
    assert starts(found)["b1"] == 100.0
    assert preempted(found) == ["a1"]


@pytest.mark.parametrize("policy", ["multifactor", "kueue"])
def test_who_gives_way_goes_elsewhere_at_once_where_there_is_room(policy: str) -> None:
    jobs = [
        job("high", 10.0, device="v100", priority=1.0),
        job("p100", duration_s=10.0, device="p100"),
        job("low", duration_s=300.0),
    ]
    found = played(jobs, Rules(preempt=True), policy, cluster="1x8xv100,1x8xp100")
    where = [(each.start_s, each.end_s) for each in found.segments if found.jobs[each.job].name == "low"]
    assert starts(found) == {"high": 10.0, "p100": 0.0, "low": 0.0}
    assert sorted(where) == [(0.0, 10.0), (10.0, 300.0)]


# Turns of queues


def test_a_job_within_its_quota_goes_before_one_that_borrows() -> None:
    jobs = [
        job("a1", gpus=4, duration_s=5000.0, group="a"),
        job("b1", gpus=4, group="b"),
        job("a2", 10.0, gpus=4, duration_s=1000.0, group="a"),
        job("b2", 20.0, gpus=4, group="b"),
    ]
    assert starts(played(jobs, Rules(queues=COHORT), "kueue")) == {
        "a1": 0.0,
        "b1": 0.0,
        "b2": 100.0,
        "a2": 200.0,
    }


worlds = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.integers(1, 8),
        st.integers(1, 60),
        st.sampled_from("ab"),
        st.integers(0, 2),
        st.sampled_from("xyz"),
    ),
    min_size=1,
    max_size=14,
)


def made(rows: list[tuple[int, int, int, str, int, str]]) -> list[TraceJob]:
    return [
        job(str(n), float(at), gpus, float(time), group=group, priority=float(level), user=user)
        for n, (at, gpus, time, group, level, user) in enumerate(rows)
    ]


@settings(max_examples=60, deadline=None)
@given(worlds, st.sampled_from(["multifactor", "kueue"]), st.sampled_from([None, 2]))
def test_nobody_is_started_and_taken_off_at_one_moment(
    rows: list[tuple[int, int, int, str, int, str]], policy: str, borrow: int | None
) -> None:
    lend = {"a": Queue(gpus=5, cohort="all"), "b": Queue(gpus=3, cohort="all", borrow=borrow)}
    jobs = [each for each in made(rows) if each.group == "a" or each.gpus <= 3 + (5 if borrow is None else 2)]
    if not jobs:
        return
    rules = Rules(preempt=True, queues=lend if policy == "kueue" else {})
    found = played(jobs, rules, policy)
    assert all(each.end_s > each.start_s for each in found.segments)
    assert found.preemptions.sum() == len(preempted(found))


@settings(max_examples=60, deadline=None)
@given(worlds, st.integers(0, 60), st.integers(1, 80), st.integers(1, 8), st.booleans())
def test_others_leave_free_what_is_kept_for_a_group(
    rows: list[tuple[int, int, int, str, int, str]], start: int, length: int, gpus: int, preempt: bool
) -> None:
    end = start + length
    jobs = made(rows)
    found = played(
        jobs, Rules(preempt=preempt, reservations=[kept(float(start), float(end), gpus, group="a")])
    )
    for moment in {float(start), *(each.start_s for each in found.segments)}:
        there = [each for each in found.segments if each.start_s <= moment < each.end_s]
        others = sum(each.allocation.gpus for each in there if jobs[each.job].group == "b")
        assert not start <= moment < end or others <= 8 - gpus


# What makes no sense is told


class Heedless(Policy):
    name = "mine.py:Heedless"

    def decide(self, cluster: Simulation) -> None:
        for each in list(cluster.waiting.values()):
            if cluster.fits(each):
                cluster.start(each)


class Heedful(Heedless):
    name = "mine.py:Heedful"
    honours = ("quotas",)


def test_rules_are_refused_of_a_policy_of_ones_own_that_does_not_say_it_honours_them() -> None:
    jobs, machines = [job("a", gpus=1)], read_machines("1x8xv100")
    quotas = Settings(rules=Rules(queues={"a": Queue(gpus=1)}))
    with pytest.raises(InputError, match=r"quotas: policy mine\.py:Heedless cannot honour it; .*honours = "):
        Simulation(jobs, machines, Heedless(), settings=quotas)
    assert Simulation(jobs, machines, Heedful(), settings=quotas).run().finish_s.tolist() == [100.0]
    for rules in (
        Rules(preempt=True),
        Rules(queues={"a": Queue(shares=2.0)}),
        Rules(queues={"a": Queue(cohort="c")}),
        Rules(reservations=[kept(0.0, 1.0)]),
    ):
        with pytest.raises(InputError, match="cannot honour it"):
            Simulation(jobs, machines, Heedful(), settings=Settings(rules=rules))


def test_a_policy_in_a_file_is_asked_which_rules_it_honours(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from foretrain.scheduling.policies.kueue import Kueue\n"
        "from foretrain.scheduling import Policy\n"
        "class Mine(Kueue): pass\n"
        "class Heedless(Policy):\n    def decide(self, cluster): pass\n"
    )
    quotas = Settings(rules=Rules(queues=COHORT))
    machines = read_machines("1x8xv100")
    Scenario(policy=f"{path}:Mine", machines=machines, settings=quotas).check()
    with pytest.raises(InputError, match=r"quotas: policy .*Heedless cannot honour it"):
        Scenario(policy=f"{path}:Heedless", machines=machines, settings=quotas).check()


@pytest.mark.parametrize("policy", policies.names())
def test_what_a_policy_says_it_honours_is_what_is_not_refused(policy: str) -> None:
    assert [name for name in RULES if policy not in CANNOT[name]] == list(policies.get(policy).honours)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[queue.res]\ngpus = -1", "rules.toml: queue.res.gpus: -1 is not a whole number of at least 0"),
        ("[queue.res]\ncohort = 3", "rules.toml: queue.res.cohort: 3 is not a text"),
        ("[queue.res]\nshares = 0", "rules.toml: queue.res.shares: 0 is not a number greater than zero"),
        ("[queue.res]\nborrow = 2", "rules.toml: queue.res.borrow: 2 needs a cohort"),
        (
            '[[reservation]]\nstart = "5h"\nend = "1h"\ngpus = 2',
            "rules.toml: reservation.end: '1h' is not a time after its start, '5h'",
        ),
        (
            "[[reservation]]\nstart = 0\nend = 1\ngpus = 2\n[[reservation]]\nstart = -1\nend = 1\ngpus = 2",
            r"rules.toml: reservation\[1\].start: -1 is not a time of at least 0",
        ),
        ("[[reservation]]\nstart = 0\nend = 1\ngpus = 0", "rules.toml: reservation.gpus: 0 is not a whole"),
        ("[queue.a]\ngpus = true", "gpus: True is not a whole number of at least 0"),
        ('[queue.a]\nshares = "2"', "shares: '2' is not a number greater than zero"),
        ("[queue.a]\nshares = true", "shares: True is not a number"),
        ("[queue.a]\ncohort = 3", "cohort: 3 is not a text"),
        ("[queue.a]\nborrow = 1", "borrow: 1 needs a cohort"),
        ('[[reservation]]\nstart = 0\nend = 10\ngpus = "2"', "gpus: '2' is not a whole number"),
        ("[[reservation]]\nstart = 0\nend = 10\ngpus = 2.5", "gpus: 2.5 is not a whole number"),
        ("[[reservation]]\nstart = 0\nend = 10\ngpus = true", "gpus: True is not a whole number"),
        ("[[reservation]]\nstart = 0\nend = 10\ngpus = 1\ngroup = 3", "group: 3 is not a text"),
        ("[[reservation]]\nstart = 0\nend = 10\ngpus = 1\ndevice = 5", "device: 5 is not a text"),
        ("[[reservation]]\nstart = 0\nend = 10\ngpus = 1\npartition = 5", "partition: 5 is not a text"),
        (
            "[[reservation]]\nstart = 0\nend = inf\ngpus = 1",
            "reservation.end: inf is not a time after its start, 0",
        ),
    ],
)
def test_rules_of_a_wrong_kind_are_told(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_rules(path)


def test_groups_that_no_job_has_are_told_in_a_line(tmp_path: Path) -> None:
    rules, trace = tmp_path / "rules.toml", tmp_path / "jobs.csv"
    trace.write_text("name,arrival_s,gpus,duration_s,group\na,0,1,10,research\n")
    rules.write_text("[queue.reserach]\ngpus = 1\n[queue.research]\ngpus = 1\n")
    run = CliRunner().invoke(
        app,
        ["schedule", str(trace), "--cluster", "1x8xv100", "--policy", "multifactor", "--rules", str(rules)],
    )
    assert run.exit_code == 0
    assert "no job is of group 'reserach', which the rules name" in run.output
    assert "'research'" not in run.output


def test_a_job_that_was_taken_off_needs_its_gpus_for_what_is_left_of_its_limit() -> None:
    """It ran for 900 s of its 1,000 before it gave way to ``high``: there is time for the rest of it before
    ``wide``, which waits for ``half``."""
    jobs = [
        job("long", gpus=4, duration_s=1000.0, limit_s=1000.0),
        job("half", gpus=4, duration_s=1200.0, limit_s=1200.0, priority=1.0),
        job("high", 900.0, gpus=4, limit_s=100.0, priority=1.0),
        job("wide", 901.0, gpus=8, limit_s=100.0, priority=1.0),
    ]
    result = played(jobs, Rules(preempt=True))
    assert preempted(result) == ["long"]
    assert [each.end_s for each in result.segments if result.jobs[each.job].name == "long"] == [900.0, 1100.0]
    assert starts(result)["wide"] == 1200.0
