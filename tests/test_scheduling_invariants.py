"""Whatever the policy and the options: no GPU twice, no job lost, all work done, no job where it does not fit."""

import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretrain.errors import InputError
from foretrain.forecast import Estimate, Forecast
from foretrain.job import Job
from foretrain.scheduling import Machine, Result, Settings, Simulation, Trace, TraceJob, policies
from foretrain.scheduling.admission import runnable
from foretrain.scheduling.checkpointing import CheckpointedSpeeds
from foretrain.scheduling.correlation import Shares
from foretrain.scheduling.estimates import (
    Estimates,
    Exact,
    History,
    Inverse,
    LogNormal,
    Requested,
    ResidualEstimates,
)
from foretrain.scheduling.failures import FailureModel, Outage
from foretrain.scheduling.fitting import FittingSpeeds
from foretrain.scheduling.placement import PLACEMENTS, placement
from foretrain.scheduling.rounds.policies import ROUND_POLICIES, round_policy
from foretrain.scheduling.rounds.simulation import Rounds
from foretrain.scheduling.rules import Queue, Reservation, Rules
from foretrain.scheduling.sharing.interference import Manners, MannersOfKinds
from foretrain.scheduling.sharing.mig import SlicedSpeeds, cut
from foretrain.scheduling.sharing.use import ByUse, Use, way
from foretrain.scheduling.speeds import PredictedSpeeds, Speeds, TraceSpeeds
from foretrain.scheduling.spot import Spot
from foretrain.scheduling.study import Scenario

GIB = 2.0**30
EXAMPLES = int(os.environ.get("FORETRAIN_EXAMPLES", "8"))
"""Of every policy; a long run sets more, such as 500."""
EVERY_WORLD = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
MACHINES = [
    *[Machine(device="v100-sxm-16gb", gpus=4)] * 2,
    Machine(device="a100-sxm-80gb", gpus=4, rack=1),
    Machine(device="a100-sxm-80gb", gpus=2, rack=1),
]
SPEEDS = FittingSpeeds(TraceSpeeds(devices={"a100-sxm-80gb": 2.0}))


class WithGaps(TraceSpeeds):
    """Jobs run on the GPUs that they ask for, and on powers of two, as in a table."""

    def rate(self, job: TraceJob, device: str, shape: tuple[int, ...]) -> float:
        gpus = sum(shape)
        runs = gpus == job.gpus or gpus.bit_count() == 1
        return super().rate(job, device, shape) if runs else 0.0


SHARE = ("fifo", "sjf", "qssf", "edf", "lucid")
MIGRATE = ("fifo", "sjf", "srtf", "oracle", "backfill", "tiresias", "conservative", "themis")

rows = st.lists(
    st.tuples(
        st.integers(0, 200),
        st.integers(1, 300),
        st.sampled_from([1, 1, 2, 3, 4, 6]),
        st.sampled_from([None, 8.0, 40.0]),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


def made(table: list[tuple[int, int, int, float | None, bool]]) -> list[TraceJob]:
    return [
        TraceJob(
            name=f"j{number}",
            arrival_s=arrival,
            duration_s=duration,
            gpus=gpus,
            memory_bytes=None if memory is None else memory * GIB,
            share=0.5 if gpus == 1 and odd else 1.0,
            least_gpus=1 if gpus > 1 and odd else None,
            most_gpus=gpus + 1 if gpus > 1 and odd else None,
            user=f"u{number % 3}",
            group=f"g{number % 2}",
            kind=f"k{number % 2}",
            limit_s=2.0 * duration if number % 3 == 0 else None,
        )
        for number, (arrival, duration, gpus, memory, odd) in enumerate(table)
    ]


def holds(
    result: Result,
    jobs: list[TraceJob],
    *,
    fails: bool,
    rate_known: bool,
    mixed: bool = False,
    speeds: Speeds = SPEEDS,
) -> None:
    assert (result.finish_s >= result.arrival_s).all(), "no job is lost"
    held: dict[tuple[int, int], list[tuple[float, float, int]]] = {}
    for each in result.segments:
        for place in each.allocation.places():
            held.setdefault(place, []).append((each.start_s, each.end_s, each.allocation.share))
        job = jobs[each.job]
        devices = {MACHINES[node].device for node, _ in each.allocation.parts}
        assert mixed or len(devices) == 1
        for device in devices:
            assert (job.memory_bytes or 0) <= (80 if device.startswith("a100") else 16) * 1.1 * GIB, "it fits"
    for stretches in held.values():
        moments = sorted({start for start, _, _ in stretches})
        for moment in moments:
            used = sum(share for start, end, share in stretches if start <= moment < end)
            assert used <= 1000, "no GPU is handed out twice"
    if fails or not rate_known:
        return
    done = [0.0] * len(jobs)
    for each in result.segments:
        devices = {MACHINES[node].device for node, _ in each.allocation.parts}
        rate = min(speeds.rate(jobs[each.job], device, each.allocation.shape) for device in devices)
        done[each.job] += (each.end_s - each.start_s) * rate
    assert done == pytest.approx([job.duration_s for job in jobs]), "all work is done, none twice"


RATIOS = [0.5, 0.9, 1.0, 1.3, 2.0]
BELIEVED: dict[str, Callable[[], Estimates]] = {
    "exact": Exact,
    "log-normal": lambda: LogNormal(0.5, 1, Shares(user=0.3, model=0.4)),
    "residuals": lambda: ResidualEstimates(RATIOS, 1),
    "requested": Requested,
    "history": History,
}
"""What policies may go by."""


@pytest.mark.parametrize("policy", policies.names())
@EVERY_WORLD
@given(
    table=rows,
    place=st.sampled_from(sorted(PLACEMENTS)),
    fails=st.booleans(),
    costly=st.booleans(),
    shares=st.booleans(),
    moves=st.booleans(),
    mixes=st.booleans(),
    believed=st.sampled_from(sorted(BELIEVED)),
    forecast=st.booleans(),
    slowdown=st.sampled_from([0.0, 0.4]),
    gaps=st.booleans(),
)
def test_invariants_of_every_policy_and_option(
    policy: str,
    table: list[tuple[int, int, int, float | None, bool]],
    place: str,
    fails: bool,
    costly: bool,
    shares: bool,
    moves: bool,
    mixes: bool,
    believed: str,
    forecast: bool,
    slowdown: float,
    gaps: bool,
) -> None:
    jobs = made(table)
    inner = (WithGaps if gaps else TraceSpeeds)({"a100-sxm-80gb": 2.0}, slowdown)
    speeds = FittingSpeeds(inner)
    failures = (
        FailureModel(
            job_mtbf_gpu_s=4000.0, job_mtbf_of={"a100-sxm-80gb": 2000.0}, node_mtbf_s=3000.0, repair_s=50.0
        )
        if fails
        else FailureModel()
    )
    around = Settings(
        restart_s=3.0 if costly else 0.0,
        checkpoint_s=2.0 if costly else 0.0,
        checkpoint_every_s=20.0,
        sharing=shares and policy in SHARE,
        migrate=moves and policy in MIGRATE,
        mixed_gangs=mixes and policy in SHARE,
        failures=failures,
    )
    machines = [dataclasses.replace(MACHINES[0], mtbf_s=800.0), *MACHINES[1:]] if fails else MACHINES
    result = Simulation(
        jobs,
        machines,
        policies.get(policy),
        placement=placement(place),
        speeds=speeds,
        estimates=BELIEVED[believed](),
        truth=Inverse(ResidualEstimates(RATIOS, 2)) if forecast else None,
        settings=around,
    ).run()
    off = Inverse(ResidualEstimates(RATIOS, 2))
    true = [
        dataclasses.replace(job, duration_s=(job.duration_s or 0) * off.factor(job, number))
        if forecast
        else job
        for number, job in enumerate(jobs)
    ]
    holds(result, true, fails=fails or costly, rate_known=True, mixed=mixes, speeds=speeds)


WORLD = [
    *MACHINES,
    *cut(Machine(device="a100-sxm-80gb", gpus=2, rack=2), ["3g.40gb", "4g.40gb"]),
    Machine(device="v100-sxm-16gb", gpus=4, rack=2, partition="debug"),
]
RULES = {
    "multifactor": Rules(
        queues={"g0": Queue(gpus=8), "g1": Queue(gpus=12, shares=2.0)},
        reservations=(Reservation(start_s=50, end_s=150, gpus=4, group="g1"),),
        preempt=True,
    ),
    "kueue": Rules(
        queues={"g0": Queue(gpus=6, cohort="all", borrow=4), "g1": Queue(gpus=8, cohort="all")},
        preempt=True,
    ),
}
"""Of the policies that honour rules; 6 GPUs, the widest jobs, are within every quota."""
MOST_HELD = {"multifactor": {"g0": 8, "g1": 12}, "kueue": {"g0": 10, "g1": 14}}
"""GPUs that a group may hold."""

worlds = st.fixed_dictionaries(
    {
        "spot": st.booleans(),
        "outage_s": st.none() | st.integers(0, 300),
        "write_s": st.sampled_from([0.0, 5.0]),
        "kill": st.booleans(),
        "ruled": st.booleans(),
        "paired": st.booleans(),
        "error": st.sampled_from([0.0, 0.5]),
        "limits": st.lists(st.sampled_from([None, 0.5, 2.0]), min_size=12, max_size=12),
    }
)


@pytest.mark.parametrize("policy", policies.names())
@EVERY_WORLD
@given(table=rows, world=worlds)
def test_invariants_of_every_policy_in_an_operators_world(
    policy: str, table: list[tuple[int, int, int, float | None, bool]], world: dict[str, Any]
) -> None:
    jobs = [
        dataclasses.replace(
            job,
            share=1.0,
            limit_s=None if part is None else part * (job.duration_s or 0),
            partition="debug" if number % 4 == 1 else "",
            priority=float(number % 3),
        )
        for number, (job, part) in enumerate(zip(made(table), world["limits"], strict=False))
    ]
    spot = Spot(nodes=2, mean_s=300.0, away_s=40.0) if world["spot"] else None
    machines = WORLD if spot is None else spot.machines(WORLD)
    outages = [] if world["outage_s"] is None else [Outage(time_s=world["outage_s"], node=1, repair_s=60.0)]
    rules = RULES.get(policy, Rules()) if world["ruled"] else Rules()
    paired = world["paired"] and policy in SHARE
    speeds = CheckpointedSpeeds(SlicedSpeeds(SPEEDS, USES), 20.0, world["write_s"])
    around = Settings(
        checkpoint_every_s=20.0,
        pairs=ByUse(USES, way("mps")) if paired else None,
        rules=dataclasses.replace(rules, kill=world["kill"]),
        failures=FailureModel(outages=outages, spot=spot),
    )
    estimates = LogNormal(world["error"], 1)
    simulation = Simulation(
        jobs, machines, policies.get(policy), speeds=speeds, estimates=estimates, settings=around
    )
    result = simulation.run()
    assert (result.finish_s >= result.arrival_s).all(), "no job is lost"
    fit(result, jobs, paired=paired)
    ends(result, jobs, speeds, kill=world["kill"], exact=not paired and not outages and spot is None)
    if world["ruled"] and policy in MOST_HELD:
        within(result, jobs, MOST_HELD[policy])


USES = {"k0": Use(busy=0.3, memory_bytes=6 * GIB), "k1": Use(busy=0.6, kernel_s=1e-5, memory_bytes=9 * GIB)}


def fit(result: Result, jobs: list[TraceJob], *, paired: bool) -> None:
    """No GPU is held twice, nor more of its memory than it has, nor one of another partition."""
    held: dict[tuple[int, int], list[tuple[float, float, int, float]]] = {}
    for each in result.segments:
        job = jobs[each.job]
        memory = job.memory_bytes or (USES[job.kind].memory_bytes if paired else 0.0)
        for place in each.allocation.places():
            assert WORLD[place[0]].partition in ("", job.partition)
            stretch = (each.start_s, each.end_s, each.allocation.share, memory)
            held.setdefault(place, []).append(stretch)
    for (node, _), stretches in held.items():
        device = WORLD[node].device
        most = 40e9 if "@" in device else (80 if device.startswith("a100") else 16) * 1.1 * GIB
        for moment in {start for start, *_ in stretches}:
            there = [each for each in stretches if each[0] <= moment < each[1]]
            assert sum(share for *_, share, _ in there) <= 1000, "no GPU is handed out twice"
            assert sum(memory for *_, memory in there) <= most, "it fits"


def ends(result: Result, jobs: list[TraceJob], speeds: Speeds, *, kill: bool, exact: bool) -> None:
    """A job ends when its work is done, or when it has run for as long as it may since it failed last."""
    ran_s, done, why = [0.0] * len(jobs), [0.0] * len(jobs), [""] * len(jobs)
    for each in result.segments:
        device = WORLD[each.allocation.parts[0][0]].device
        rate = speeds.rate(jobs[each.job], device, each.allocation.shape)
        ran_s[each.job] += each.end_s - each.start_s
        done[each.job] += (each.end_s - each.start_s) * rate
        why[each.job] = each.reason
        limit_s = jobs[each.job].limit_s
        if kill and limit_s is not None:
            assert ran_s[each.job] <= limit_s * (1 + 1e-9) + 1e-6
        if each.reason in ("failed", "node failed"):
            ran_s[each.job] = 0.0
    for number, job in enumerate(jobs):
        assert why[number] in ("finished", "killed")
        if why[number] == "killed":
            assert kill
            assert ran_s[number] == pytest.approx(job.limit_s)
        elif exact:
            assert done[number] == pytest.approx(job.duration_s), "all work is done, none twice"


def within(result: Result, jobs: list[TraceJob], most: dict[str, int]) -> None:
    """No group holds more GPUs than the rules give it."""
    for moment in {each.start_s for each in result.segments}:
        held: Counter[str] = Counter()
        for each in result.segments:
            if each.start_s <= moment < each.end_s:
                held[jobs[each.job].group] += each.allocation.gpus
        assert all(held[group] <= gpus for group, gpus in most.items())


@pytest.mark.parametrize("policy", ROUND_POLICIES)
@settings(
    max_examples=EXAMPLES // 2, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(
    table=rows,
    round_s=st.sampled_from([7.0, 60.0, 360.0]),
    reset_s=st.sampled_from([0.0, 100.0, 1920.0]),
    long=st.sampled_from([1, 20]),
    bears=st.sampled_from([0.3, 0.6, 1.0]),
    weights=st.lists(st.sampled_from([1.0, 1.0, 5.0]), min_size=12, max_size=12),
    deadlines=st.lists(st.sampled_from([None, 50.0, 5000.0]), min_size=12, max_size=12),
    seed=st.integers(0, 3),
)
def test_invariants_in_rounds(
    policy: str,
    table: list[tuple[int, int, int, float | None, bool]],
    round_s: float,
    reset_s: float,
    long: int,
    bears: float,
    weights: list[float],
    deadlines: list[float | None],
    seed: int,
) -> None:
    few = [job for job in made(table) if job.gpus <= 4] or made([(0, 10, 1, None, False)])
    jobs = [
        dataclasses.replace(
            job, duration_s=(job.duration_s or 0) * long, weight=weights[number], deadline_s=deadlines[number]
        )
        for number, job in enumerate(few)
    ]
    pairs = MannersOfKinds({"k0": Manners(needs=0.5, bears=bears)}, Manners(needs=0.6, bears=bears))
    result = Rounds(
        jobs,
        MACHINES,
        round_policy(policy, seed),
        SPEEDS,
        round_s=round_s,
        reset_s=reset_s,
        seed=seed,
        pairs=pairs,
    ).run()
    holds(result, jobs, fails=False, rate_known=not ROUND_POLICIES[policy].packs)
    if ROUND_POLICIES[policy].packs:
        together(result, jobs)


def together(result: Result, jobs: list[TraceJob]) -> None:
    """At most two jobs are on a GPU, and both go into its memory; all that is done is as fast as alone."""
    held: dict[tuple[float, int, int], list[int]] = {}
    done = [0.0] * len(jobs)
    for each in result.segments:
        device = MACHINES[each.allocation.parts[0][0]].device
        done[each.job] += (each.end_s - each.start_s) * SPEEDS.rate(
            jobs[each.job], device, each.allocation.shape
        )
        for node, gpu in each.allocation.places():
            held.setdefault((each.start_s, node, gpu), []).append(each.job)
    for (_, node, _), there in held.items():
        most = (80 if MACHINES[node].device.startswith("a100") else 16) * 1.1 * GIB
        assert len(there) <= 2
        assert sum(jobs[job].memory_bytes or 0 for job in there) <= most
    assert all(reached >= (job.duration_s or 0) * (1 - 1e-9) for reached, job in zip(done, jobs, strict=True))


def test_a_job_is_kept_off_devices_it_does_not_go_into_by_the_forecast() -> None:
    template = Job.read(
        {
            "model": {"source": "torchvision", "name": "resnet18"},
            "training": {"global_batch": 32, "image": 224},
            "cluster": {"device": "v100-sxm-16gb"},
        }
    )
    machines = [Machine(device="v100-sxm-16gb", gpus=1), Machine(device="a100-sxm-80gb", gpus=1)]
    jobs = [TraceJob(name="a", arrival_s=0, steps=10, gpus=1, kind="net")]
    speeds = PredictedSpeeds(NeedsMuch(), {"net": template})  # type: ignore[arg-type]
    result = Simulation(jobs, machines, policies.get("fifo"), speeds=speeds).run()
    assert result.segments[0].allocation.parts[0][0] == 1
    assert speeds.rate(jobs[0], "v100-sxm-16gb", (1,)) == 0
    assert "net runs out of memory on v100-sxm-16gb with a chance of 100%" in speeds.why_not(
        jobs[0], ["v100-sxm-16gb"]
    )
    with pytest.raises(InputError, match="runs on none of the cluster's devices"):
        Simulation(jobs, machines[:1], policies.get("fifo"), speeds=speeds)


class NeedsMuch:
    """A stand-in for a predictor: a step takes 1 s and 40 GiB."""

    name = "made-up"

    def predict(self, job: Job) -> Forecast:
        memory = Estimate(median=40 * GIB, low=39 * GIB, high=41 * GIB)
        step = Estimate(median=1.0, low=1.0, high=1.0)
        return Forecast(
            job=job, predictor=self.name, quantities={"step_time_s": step, "peak_memory_bytes": memory}
        )


def test_a_job_moves_to_faster_devices_that_nobody_wants() -> None:
    machines = [Machine(device="v100-sxm-16gb", gpus=1), Machine(device="a100-sxm-80gb", gpus=1)]
    jobs = [
        TraceJob(name=name, arrival_s=0, duration_s=duration, gpus=1)
        for name, duration in (("a", 100.0), ("b", 200.0))
    ]
    ends = {}
    for migrate, policy in itertools.product((False, True), MIGRATE):
        result = Simulation(
            jobs,
            machines,
            policies.get(policy),
            speeds=SPEEDS,
            settings=Settings(restart_s=5.0, migrate=migrate),
        ).run()
        ends[migrate, policy] = result.finish_s.max()
        reasons = [each.reason for each in result.segments]
        assert ("migrated" in reasons) is migrate, policy
    assert all(ends[True, policy] < ends[False, policy] for policy in MIGRATE)
    assert ends[True, "fifo"] == 50 + 5 + 150 / 2


@pytest.mark.parametrize("policy", SHARE)
def test_a_gang_over_mixed_devices_goes_at_the_pace_of_the_slowest(policy: str) -> None:
    machines = [Machine(device="v100-sxm-16gb", gpus=4), Machine(device="a100-sxm-80gb", gpus=4)]
    mixed = Settings(mixed_gangs=True)

    def run(jobs: list[TraceJob], settings: Settings) -> Result:
        return Simulation(jobs, machines, policies.get(policy), speeds=SPEEDS, settings=settings).run()

    wide = TraceJob(name="wide", arrival_s=0, duration_s=100.0, gpus=6)
    with pytest.raises(InputError, match="needs 6 GPUs of one kind and the cluster has 4"):
        run([wide], Settings())
    result = run([wide], mixed)
    assert result.finish_s.tolist() == [100.0], "as on V100s"
    assert sorted(mask.bit_count() for _, mask in result.segments[0].allocation.parts) == [2, 4]
    with pytest.raises(InputError, match="needs 6 GPUs"):
        run([dataclasses.replace(wide, memory_bytes=40 * GIB)], mixed)
    narrow = TraceJob(name="narrow", arrival_s=0, duration_s=100.0, gpus=4)
    assert run([narrow], mixed).finish_s.tolist() == [50.0], "one kind where it has enough"


@pytest.mark.parametrize("policy", ["srtf", "backfill", "kueue", "max_min_fairness"])
def test_mixed_gangs_are_refused_by_policies_that_count_each_kind_by_itself(policy: str) -> None:
    with pytest.raises(InputError, match=f"mixed_gangs: policy {policy} cannot honour it"):
        Scenario(policy=policy, machines=MACHINES, settings=Settings(mixed_gangs=True)).check()


def test_jobs_that_only_a_mixed_gang_can_run_are_let_in() -> None:
    wide = TraceJob(name="wide", arrival_s=0, duration_s=100.0, gpus=10)
    trace = Trace(name="t", format="made", jobs=[wide, dataclasses.replace(wide, name="n", gpus=1)])
    alone, mixed = (
        Scenario(policy="fifo", machines=MACHINES, settings=Settings(mixed_gangs=mixes))
        for mixes in (False, True)
    )
    assert [job.name for job in runnable(trace, alone).jobs] == ["n"]
    assert len(mixed.run(runnable(trace, mixed)).jobs) == 2
