"""The round-based mode: fair shares, and the average completion times of Gavel's own simulator."""

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from foretrain.errors import InputError
from foretrain.scheduling import Machine, Settings, TraceJob, metrics
from foretrain.scheduling.clusters import read_machines
from foretrain.scheduling.rounds import programmes
from foretrain.scheduling.rounds.policies import ROUND_POLICIES, round_policy
from foretrain.scheduling.rounds.simulation import Leased, Rounds
from foretrain.scheduling.rounds.throughput import GAVEL_POLICIES, per_dollar
from foretrain.scheduling.sharing.interference import Alone, Interference, Manners, MannersOfKinds
from foretrain.scheduling.speeds import ThroughputTable, TraceSpeeds
from foretrain.scheduling.study import Scenario
from foretrain.scheduling.traces import read_trace

TRACES = Path(__file__).parents[2] / "shared" / "data" / "traces"


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
    assert (gpus @ shares <= np.array([2, 3]) + 1e-5).all()


def test_like_jobs_get_like_shares_and_the_fast_device_goes_to_whom_it_helps() -> None:
    alike = round_policy("max_min_fairness").allot(
        [leased(n, a=1.0, b=1.0) for n in range(4)], {"a": 1, "b": 1}, 0.0
    )
    assert alike == pytest.approx(np.full((4, 2), 0.25), abs=1e-6)
    helped = round_policy("max_min_fairness_perf").allot(
        [leased(0, a=1.0, b=10.0), leased(1, a=1.0, b=1.0)], {"a": 1, "b": 1}, 0.0
    )
    assert helped[0, 1] > helped[0, 0]
    assert helped[1, 0] > helped[1, 1]


@pytest.mark.parametrize("name", ROUND_POLICIES)
def test_rounds_end_repeat_and_never_hand_out_a_gpu_twice(name: str) -> None:
    jobs = [
        TraceJob(name=str(n), arrival_s=100.0 * n, duration_s=300 + 211.0 * (n % 7), gpus=1 + n % 2)
        for n in range(25)
    ]
    machines = [Machine(device="a", gpus=2), Machine(device="b", gpus=2)]
    first, second = (Rounds(jobs, machines, round_policy(name), TraceSpeeds()).run() for _ in range(2))
    assert first.finish_s.tobytes() == second.finish_s.tobytes()
    assert (first.completion_s >= first.service_s - 1e-6).all()
    held = [(each.start_s, place) for each in first.segments for place in each.allocation.places()]
    assert len(held) == len(set(held))


def divided(seed: int) -> list[np.ndarray]:
    """The time of devices by each of the programmes, for made-up jobs of which some are alike."""
    draw = np.random.RandomState(seed)
    jobs, kinds = int(draw.randint(2, 14)), int(draw.randint(1, 4))
    rates = draw.rand(jobs, kinds) * 10 + 0.1
    if seed % 2:
        rates = rates[draw.randint(0, 2, jobs)]
    gpus, counts = draw.choice([1.0, 1.0, 2.0], jobs), draw.choice([2.0, 4.0, 8.0], kinds)
    left = 1000.0 * draw.randint(1, 9, jobs).astype(np.float64)
    since_s = 100.0 * draw.randint(0, 5, jobs).astype(np.float64)
    alone_s = left / rates.sum(axis=1) * jobs
    return [
        programmes.fairest(rates, gpus, counts),
        programmes.least_worst_ratio(rates, left, since_s, alone_s, gpus, counts),
        programmes.soonest(rates, left, gpus, counts),
    ]


@pytest.mark.skipif(not programmes.has_ecos(), reason="ECOS is not installed")
@pytest.mark.parametrize("seed", range(8))
def test_both_solvers_end_at_the_same_digits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    by_ecos = divided(seed)
    monkeypatch.setattr(programmes, "has_ecos", lambda: False)
    assert [each.tobytes() for each in divided(seed)] == [each.tobytes() for each in by_ecos]


def test_first_in_first_out_gives_the_last_kind_more_jobs_than_it_holds_at_once() -> None:
    jobs = [leased(number, k80=1.0, p100=2.0, v100=3.0) for number in range(6)]
    policy = round_policy("fifo")
    shares = policy.allot(jobs, {"k80": 2, "p100": 2, "v100": 2}, 0.0)
    assert (shares.sum(axis=1) == 1).all()
    assert (shares[:2] == [0, 0, 1]).all()
    again = policy.allot(jobs[1:], {"k80": 2, "p100": 2, "v100": 2}, 360.0)
    assert (again == shares[1:]).all(), "who has a kind keeps it"


def test_a_cluster_that_stood_idle_divides_its_time_anew_only_after_a_while() -> None:
    jobs = [
        TraceJob(name=str(n), arrival_s=arrival, steps=100.0, gpus=1, kind="net")
        for n, arrival in enumerate((0.0, 500.0, 5000.0))
    ]
    table = ThroughputTable({("v100", "net", 1): 1.0})
    result = Rounds(jobs, [Machine(device="v100", gpus=1)], round_policy("fifo"), table).run()
    assert result.start_s.tolist() == [0.0, 5000.0, 6920.0], (
        "divisions at 0, at 100 s with no job there, at 5,000 s and 1,920 s later"
    )


def test_a_division_that_is_waited_for_comes_even_where_its_interval_rounds_to_less() -> None:
    begin_s = 3877.2121422213045
    assert begin_s + 1920.0 - begin_s < 1920.0
    jobs = [
        TraceJob(name="first", arrival_s=0.0, steps=10.0, gpus=1, kind="net"),
        *[TraceJob(name=n, arrival_s=begin_s, steps=10.0, gpus=1, kind="net") for n in "ab"],
    ]
    table = ThroughputTable({("v100", "net", 1): 1.0})
    result = Rounds(jobs, [Machine(device="v100", gpus=1)], round_policy("fifo"), table).run()
    assert result.finish_s.tolist() == pytest.approx([10.0, begin_s + 10.0, begin_s + 1930.0])


@pytest.mark.parametrize("name", ["finish_time_fairness", "min_total_duration"])
def test_a_job_that_does_not_run_on_the_usual_device_is_as_fast_as_where_it_runs(name: str) -> None:
    speeds = [{"a": 1.0, "v100": 1.0}] * 4 + [{"a": 1.0, "v100": 0.0}]
    jobs = [
        leased(number, gpus=gpus, left=left, **rates)
        for number, (gpus, left, rates) in enumerate(
            zip((4, 4, 1, 4, 3), (101.0, 1060.0, 1580.0, 3380.0, 1780.0), speeds, strict=True)
        )
    ]
    shares = round_policy(name).allot(jobs, {"a": 6, "v100": 8}, 200.0)
    usual = round_policy(name).allot(
        [leased(job.number, gpus=job.gpus, left=job.left, a=1.0, v100=1.0) for job in jobs],
        {"a": 6, "v100": 8},
        200.0,
    )
    assert shares == pytest.approx(usual)


@pytest.mark.skipif(not TRACES.is_dir(), reason="the reference is not here")
@pytest.mark.parametrize("ecos", [True, False])
def test_average_completion_times_are_those_of_gavel(ecos: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if ecos and not programmes.has_ecos():
        pytest.skip("ECOS is not installed")
    monkeypatch.setattr(programmes, "has_ecos", lambda: ecos)
    table = ThroughputTable.load(TRACES / "gavel_simulation_throughputs.json.gz")
    machines = read_machines("v100=4,p100=4,k80=4")
    for row in csv.DictReader((TRACES / "gavel_reference.csv").read_text().splitlines()):
        jobs = read_trace(TRACES / row["trace"]).jobs
        result = Rounds(jobs, machines, round_policy(row["policy"]), table).run()
        assert metrics(result).average_jct_s == pytest.approx(float(row["average_jct_s"]), abs=6e-4), row


@pytest.mark.parametrize("name", [policy.name for policy in GAVEL_POLICIES])
def test_further_policies_of_gavel_keep_within_devices_and_end(name: str) -> None:
    table = ThroughputTable(
        {(device, kind, 1): rate for device, kind, rate in (
            ("v100", "a", 4.0), ("k80", "a", 1.0), ("v100", "b", 1.5), ("k80", "b", 1.0), ("v100", "c", 2.0),
        )}
    )  # fmt: skip
    jobs = [
        TraceJob(name=str(n), arrival_s=100.0 * n, steps=3000.0, gpus=1, kind="abc"[n % 3]) for n in range(7)
    ]
    machines = [Machine(device="v100", gpus=1), Machine(device="k80", gpus=2)]
    result = Rounds(jobs, machines, round_policy(name), table).run()
    assert np.isfinite(result.finish_s).all()
    for segment in result.segments:
        assert (
            jobs[segment.job].kind != "c" or result.machines[segment.allocation.parts[0][0]].device == "v100"
        )


def test_the_greatest_throughput_goes_to_who_makes_most_of_it() -> None:
    table = ThroughputTable(
        {("v100", "a", 1): 4.0, ("k80", "a", 1): 1.0, ("v100", "b", 1): 1.0, ("k80", "b", 1): 1.0}
    )
    jobs = [TraceJob(name=kind, arrival_s=0.0, steps=4000.0, gpus=1, kind=kind) for kind in "ab"]
    machines = [Machine(device="v100", gpus=1), Machine(device="k80", gpus=1)]
    result = Rounds(jobs, machines, round_policy("max_sum_throughput_perf"), table).run()
    first = {
        segment.job: result.machines[segment.allocation.parts[0][0]].device
        for segment in list(result.segments)[:2]
    }
    assert first == {0: "v100", 1: "k80"}


def test_water_filling_gives_on_what_the_worst_off_cannot_use() -> None:
    jobs = [
        leased(0, a=1.0, b=0.0),
        leased(1, a=1.0, b=0.0),
        leased(2, a=1.0, b=1.0),
        leased(3, a=0.0, b=1.0),
    ]
    shares = round_policy("max_min_fairness_water_filling_perf").allot(jobs, {"a": 1, "b": 2}, 0.0)
    rates = np.array([[job.rates["a"], job.rates["b"]] for job in jobs])
    assert (rates * shares).sum(axis=1) == pytest.approx([0.5, 0.5, 1.0, 1.0], abs=1e-6)


COST = "max_sum_throughput_normalized_by_cost"


@pytest.mark.parametrize("policy", [f"{COST}_perf_SLOs", f"{COST}_packed_SLOs"])
def test_deadlines_are_kept_where_devices_suffice(policy: str) -> None:
    urgent = leased(1, left=100.0, v100=1.0)
    urgent.spec = dataclasses.replace(urgent.spec, deadline_s=200.0)
    other = leased(0, left=1000.0, v100=4.0)
    shares = round_policy(policy).allot([other, urgent], {"v100": 1}, 0.0)
    assert shares[1, 0] == pytest.approx(0.5), "100 steps in 200 s need half of the time"
    assert shares.sum() == pytest.approx(1.0)
    shares = round_policy(policy).allot([other, urgent], {"v100": 1}, 150.0)
    assert shares.sum() == pytest.approx(1.0), "too late: who makes most of a device has it"
    both = [dataclasses.replace(each, spec=urgent.spec) for each in (urgent, other)]
    both[1].left = 900.0
    assert round_policy(policy).allot(both, {"v100": 1}, 0.0).sum() == pytest.approx(1.0), "not both"


def test_without_deadlines_throughput_for_its_price_is_the_same() -> None:
    jobs = [leased(number, v100=4.0 + number, k80=1.0) for number in range(4)]
    devices = {"k80": 2, "v100": 1}
    rates = np.array([[job.rates[device] for device in devices] for job in jobs])
    worth = rates / rates.max(axis=1)[:, None] * per_dollar(list(devices))
    with_deadlines, without = (
        float((round_policy(f"{COST}_perf{end}").allot(jobs, devices, 0.0) * worth).sum())
        for end in ("_SLOs", "")
    )
    assert with_deadlines == pytest.approx(without)


def test_the_first_that_finds_no_device_goes_beside_whom_it_bears_best() -> None:
    kinds = {"hungry": Manners(), "light": Manners(needs=0.5, bears=0.5, pressure=0.2)}
    table = ThroughputTable({("v100", kind, 1): 1.0 for kind in kinds})
    machines = [Machine(device="v100", gpus=2)]
    jobs = [
        TraceJob(name=str(number), arrival_s=0.0, steps=300.0, gpus=1, kind=kind)
        for number, kind in enumerate(("hungry", *["light"] * 4))
    ]
    pairs = MannersOfKinds(kinds)
    result = Rounds(jobs, machines, round_policy("fifo_packed"), table, pairs=pairs).run()
    first = [segment for segment in result.segments if segment.start_s == 0]
    places = {segment.job: segment.allocation.parts for segment in first}
    assert sorted(places) == [0, 1, 2, 3], "the fifth finds nobody who has a device to himself"
    assert places[1] == places[2]
    assert places[0] == places[3]


PACKED = [name for name, policy in ROUND_POLICIES.items() if policy.packs]


@pytest.mark.parametrize("name", PACKED)
def test_two_jobs_that_bear_each_other_share_a_device(name: str) -> None:
    table = ThroughputTable({("v100-sxm-16gb", kind, 1): 1.0 for kind in ("light", "easy")})
    machines = [Machine(device="v100-sxm-16gb", gpus=1)]

    def ends(pairs: Interference, memory: float = 4e9) -> list[float]:
        jobs = [
            TraceJob(name=kind, arrival_s=0.0, steps=720.0, gpus=1, kind=kind, memory_bytes=memory)
            for kind in ("light", "easy")
        ]
        return sorted(Rounds(jobs, machines, round_policy(name), table, pairs=pairs).run().finish_s.tolist())

    assert ends(Alone()) == [720.0, 720.0], "both as fast as alone"
    assert ends(Alone(), memory=12e9)[1] == 1440.0, "two do not go into the memory"
    assert ends(MannersOfKinds({}))[1] == 1440.0, "half of its speed for each gains nothing"


@pytest.mark.parametrize("name", PACKED)
def test_packed_policies_need_pairs_and_others_refuse_them(name: str) -> None:
    machines, pairs = [Machine(device="v100", gpus=1)], Settings(pairs=Alone())
    with pytest.raises(InputError, match=f"pairs: policy {name} needs them"):
        Scenario(policy=name, machines=machines).check()
    Scenario(policy=name, machines=machines, settings=pairs).check()
    with pytest.raises(InputError, match="pairs: policy max_min_fairness_perf cannot honour it"):
        Scenario(policy="max_min_fairness_perf", machines=machines, settings=pairs).check()
