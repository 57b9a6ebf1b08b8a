"""Two jobs to a GPU: what it costs each, where it is worth it, and that nothing is lost by it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import fails
from foretrain.errors import InputError
from foretrain.estimate import Estimate
from foretrain.forecast import Forecast
from foretrain.scheduling import policies
from foretrain.scheduling.failures import FailureModel, Outage
from foretrain.scheduling.jobs import TraceJob
from foretrain.scheduling.machines import Machine
from foretrain.scheduling.result import Result
from foretrain.scheduling.sharing import Interference, Manners, MannersOfKinds, MeasuredPairs, speed_beside
from foretrain.scheduling.sharing.fitting import PairSpeed, fit_manners
from foretrain.scheduling.sharing.link import Bursts, excess
from foretrain.scheduling.sharing.use import WAYS, ByUse, Use, way
from foretrain.scheduling.simulator import Settings, Simulation
from foretrain.scheduling.speeds import ThroughputTable

HUNGRY, LIGHT = Manners(), Manners(needs=0.4, bears=0.4, pressure=0.3)


class Fixed(Interference):
    """Every job beside another has the same speed."""

    def __init__(self, speed: float) -> None:
        self._speed = speed

    def speed(self, device: str, kind: str, others: Sequence[str]) -> float:
        return self._speed if others else 1.0


def job(name: str, arrival_s: float = 0.0, duration_s: float = 100.0, **more: object) -> TraceJob:
    return TraceJob(name=name, arrival_s=arrival_s, gpus=1, duration_s=duration_s, **more)  # type: ignore[arg-type]


def played(jobs: list[TraceJob], pairs: Interference | None, policy: str = "fifo", gpus: int = 1) -> Result:
    machines = [Machine(device="v100-sxm-16gb", gpus=gpus)]
    return Simulation(jobs, machines, policies.get(policy), settings=Settings(pairs=pairs)).run()


def test_a_pair_slows_down_while_it_lasts_and_the_one_that_stays_speeds_up_again() -> None:
    jobs = [job("a", duration_s=100.0), job("b", 50.0, duration_s=40.0)]
    alone = played(jobs, None)
    assert alone.finish_s.tolist() == [100.0, 140.0]
    shared = played(jobs, Fixed(0.8))
    # b takes 40 / 0.8 = 50 s beside a, which has done 50 + 40 by then and needs 10 s more
    assert shared.finish_s.tolist() == pytest.approx([110.0, 100.0])
    assert shared.start_s.tolist() == [0.0, 50.0]


def test_jobs_share_only_where_both_keep_enough_and_gain_together() -> None:
    jobs = [job("a"), job("b")]
    assert played(jobs, Fixed(0.4)).finish_s.tolist() == [100.0, 200.0]
    assert played(jobs, Fixed(0.5)).finish_s.tolist() == [100.0, 200.0]  # together no faster than one by one
    assert played(jobs, Fixed(0.6)).finish_s.tolist() == pytest.approx([100 / 0.6, 100 / 0.6])
    free_first = played(jobs, Fixed(0.9), gpus=2)
    assert free_first.finish_s.tolist() == [100.0, 100.0]


def test_the_best_mate_is_chosen_and_never_a_third() -> None:
    kinds = MannersOfKinds({"light": LIGHT, "hungry": HUNGRY})
    jobs = [
        job("h", kind="hungry"),
        job("l", kind="light"),
        job("x", kind="light"),
        job("y", kind="light", arrival_s=1.0),
    ]
    result = played(jobs, kinds, policy="lucid", gpus=2)
    first = next(s for s in result.segments if s.job == 2).allocation.parts
    light = next(s for s in result.segments if s.job == 1).allocation.parts
    assert first == light
    assert result.start_s[3] <= 1.0  # beside the hungry one
    for segment in result.segments:
        beside = [
            s
            for s in result.segments
            if s.allocation.parts == segment.allocation.parts
            and s.start_s < segment.end_s
            and segment.start_s < s.end_s
        ]
        assert len(beside) <= 2


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60)), min_size=1, max_size=12),
    st.sampled_from(["fifo", "sjf", "qssf", "edf", "lucid"]),
    st.floats(0.3, 1.0),
)
def test_no_work_is_lost_and_no_gpu_has_three_jobs(
    rows: list[tuple[int, int]], policy: str, speed: float
) -> None:
    jobs = [job(str(n), float(at), float(time)) for n, (at, time) in enumerate(rows)]
    result = played(jobs, Fixed(speed), policy, gpus=2)
    assert (result.finish_s > result.arrival_s).all()
    for segment in result.segments:
        took = segment.end_s - segment.start_s
        assert took >= rows[segment.job][1] - 1e-6
        assert took <= rows[segment.job][1] / min(speed, 1.0) + 1e-6
        middle = (segment.start_s + segment.end_s) / 2
        there = [
            s
            for s in result.segments
            if s.allocation.parts == segment.allocation.parts and s.start_s <= middle < s.end_s
        ]
        assert len(there) <= 2


@pytest.mark.parametrize("policy", ["srtf", "backfill", "sia", "gandiva", "kueue"])
def test_policies_that_count_whole_gpus_refuse_pairs_by_name(policy: str) -> None:
    with pytest.raises(InputError, match=f"pairs: policy {policy} cannot honour it"):
        played([job("a")], Fixed(0.9), policy)


def test_manners_of_jobs_are_found_again_from_their_pairs() -> None:
    true = {
        "big": Manners(needs=0.95, bears=0.9, pressure=1.2),
        "mid": Manners(needs=0.8, bears=1.1, pressure=0.8),
        "small": Manners(needs=0.5, bears=1.4, pressure=0.4),
        "odd": Manners(needs=0.7, bears=0.7, pressure=0.9),
    }
    pairs = [PairSpeed(a, b, speed_beside(true[a], [true[b]])) for a in true for b in true]
    found = fit_manners(pairs)
    for pair in pairs:
        assert speed_beside(found[pair.job], [found[pair.beside]]) == pytest.approx(pair.speed, rel=0.03)
    probe = [pair for pair in pairs if pair[:2] in {("odd", "big"), ("big", "odd")}]
    others = {name: one for name, one in found.items() if name != "odd"}
    again = fit_manners(probe, known=others)["odd"]
    assert speed_beside(again, [true["mid"]]) == pytest.approx(
        speed_beside(true["odd"], [true["mid"]]), rel=0.15
    )


def test_measured_pairs_come_before_manners(tmp_path: Path) -> None:
    table = {
        "v100": {
            "('a', 1)": {"null": 10.0, "('b', 1)": [7.0, 3.0]},
            "('b', 1)": {"null": 4.0, "('a', 1)": [3.0, 7.0]},
        }
    }
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps(table))
    pairs = MeasuredPairs.load(path)
    assert pairs.speed("v100-sxm-16gb", "a", ["b"]) == pytest.approx(0.7)
    assert pairs.speed("v100", "b", ["a"]) == pytest.approx(0.75)
    assert pairs.speed("v100", "a", ["a"]) == 0.5
    path.write_text('{"v100": {"(\'a\', 1)": {"null": 10.0}}}')
    with pytest.raises(InputError, match="no pairs"):
        MeasuredPairs.load(path)


def test_a_batch_size_that_was_not_measured_is_on_the_line_of_those_that_were() -> None:
    speeds = {16: 0.9, 64: 0.4}
    table = {("v100", f"net (batch size {size})", "other"): speed for size, speed in speeds.items()}
    table |= {("v100", "other", f"net (batch size {size})"): 1.3 - speed for size, speed in speeds.items()}
    table |= {("v100", f"net (batch size {a})", f"net (batch size {b})"): 0.5 for a in speeds for b in speeds}
    pairs = MeasuredPairs(table, MannersOfKinds({}, Manners()))
    assert pairs.speed("v100", "net (batch size 32)", ["other"]) == pytest.approx(0.6)
    assert pairs.speed("v100", "other", ["net (batch size 32)"]) == pytest.approx(0.6)
    assert pairs.speed("v100", "net (batch size 32)", ["net (batch size 32)"]) == pytest.approx(0.5)
    assert pairs.speed("v100", "net (batch size 16)", ["other"]) == 0.9, "what was measured comes first"
    assert pairs.speed("v100", "net (batch size 1)", ["other"]) == 1.0, "never faster than alone"
    far = pairs.speed("v100", "net (batch size 4096)", ["other"])
    assert far == pytest.approx(0.4 * (0.4 / 0.9) ** 0.5), "at most a doubling beyond"
    assert pairs.speed("v100", "unknown (batch size 8)", ["other"]) == 0.5, "else by manners"


def test_a_larger_batch_does_not_fit_where_a_smaller_one_did_not() -> None:
    table = {("k80", f"net (batch size {size})", "other"): speed for size, speed in ((8, 0.6), (32, 0.0))}
    pairs = MeasuredPairs(table)
    assert pairs.speed("k80", "net (batch size 64)", ["other"]) == 0.0
    assert pairs.speed("k80", "net (batch size 16)", ["other"]) == pytest.approx(0.6)


@given(
    st.floats(0.05, 1.0),
    st.floats(0.05, 1.0),
    st.floats(1e-6, 1e-3),
    st.floats(1e-6, 1e-3),
    st.sampled_from(sorted(WAYS)),
)
def test_sharing_never_speeds_up_and_more_pressure_never_helps(
    a: float, b: float, ka: float, kb: float, name: str
) -> None:
    job, other = Use(busy=a, kernel_s=ka), Use(busy=b, kernel_s=kb)
    speed = WAYS[name].speed(job, [other])
    assert 0 < speed <= 1
    assert WAYS[name].speed(job, [other, other]) <= speed
    assert WAYS[name].speed(job, [Use(busy=min(1.0, 2 * b), kernel_s=kb)]) <= speed + 1e-12
    assert WAYS[name].speed(job, []) == 1.0


def test_a_forecast_tells_how_a_job_uses_its_device() -> None:
    def exactly(value: float) -> Estimate:
        return Estimate(median=value, low=value, high=value)

    quantities = {
        "step_time_s": exactly(0.02),
        "device_utilization": exactly(0.5),
        "kernels": exactly(1000.0),
        "peak_memory_bytes": exactly(3e9),
    }
    use = Use.of(cast(Forecast, SimpleNamespace(quantities=quantities)))
    assert (use.busy, use.memory_bytes) == (0.5, 3e9)
    assert use.kernel_s == pytest.approx(1e-5)
    forecast = cast(Forecast, SimpleNamespace(quantities=quantities))
    faster = Use.of(forecast, steps_per_s=80.0)
    assert faster.busy == pytest.approx(0.8), "10 ms of the device in a step of 12.5 ms"
    assert faster.kernel_s == use.kernel_s
    assert Use.of(forecast, steps_per_s=1000.0).busy == 1.0
    with pytest.raises(InputError, match="mps, turns"):
        way("nonsense")
    by_use = ByUse({"light": Use(busy=0.3)}, way("turns"))
    assert by_use.speed("h200", "light", ["unknown"]) > by_use.speed("h200", "unknown", ["light"])


def test_a_table_of_throughputs_tells_the_pace_of_a_kind_alone() -> None:
    table = ThroughputTable({("v100", "net", 1): 5.0, ("v100", "net", 2): 9.0, ("v100", "none", 1): 0.0})
    assert table.alone("net", "v100-sxm-16gb") == 5.0
    assert table.alone("none", "v100") is None
    assert table.alone("other", "v100") is None


def test_pairs_that_do_not_fit_into_memory_are_not_made() -> None:
    kinds = ByUse(
        {"wide": Use(busy=0.3, memory_bytes=12e9), "narrow": Use(busy=0.3, memory_bytes=2e9)}, way("turns")
    )
    jobs = [job("w1", kind="wide"), job("w2", kind="wide"), job("n", kind="narrow")]
    found = played(jobs, kinds, "sjf")
    assert found.start_s.tolist()[1] > 0
    assert found.start_s.tolist()[2] == 0


def test_driples_figures_tell_how_a_template_uses_device_memory_and_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from foretrain.job import Job
    from foretrain.predictors import get
    from foretrain.predictors.driple import resources
    from foretrain.predictors.driple.whitebox import rank_link_bytes_per_s
    from foretrain.scheduling.sharing.uses import driple_uses, forecast_uses

    tables = {
        "model": {"source": "torchvision", "name": "resnet18"},
        "training": {"global_batch": 8, "image": 32, "classes": 10},
        "cluster": {"device": "h200"},
    }
    small, roofline = Job.read(tables), get("roofline")
    by_forecast = forecast_uses(roofline, {"small": small}, "h200")["small"]
    figures = {"device_utilization": 0.25, "memory_utilization_peak": 0.5}
    figures |= {"network_rx_idle_s": 0.03, "network_rx_active_s": 0.01}
    figures |= {"network_rx_peak": 0.75 * rank_link_bytes_per_s(small)}
    figures |= {"network_tx_idle_s": 0.0, "network_tx_active_s": 0.0, "network_tx_peak": 0.0}
    monkeypatch.setattr(resources, "resource_figures", lambda job: figures)
    use = driple_uses(roofline, {"small": small}, "h200")["small"]
    assert (use.busy, use.kernel_s) == (0.25, by_forecast.kernel_s)
    assert use.memory_bytes == 0.5 * small.cluster.device.memory_bytes
    assert use.received == Bursts(active=0.25, peak=0.75)
    assert use.sent == Bursts()


def test_driples_own_figures_are_uses() -> None:
    from foretrain.job import Job
    from foretrain.predictors import get
    from foretrain.scheduling.sharing.uses import driple_uses

    tables = {
        "model": {"source": "torchvision", "name": "resnet18"},
        "training": {"global_batch": 64, "image": 64, "classes": 10},
        "cluster": {"device": "h200"},
    }
    use = driple_uses(get("roofline"), {"small": Job.read(tables)}, "h200")["small"]
    assert 0 < use.busy <= 1
    assert 0 < use.memory_bytes < 141e9
    assert 0 < use.received.active <= 1
    assert 0 < use.received.peak <= 1


shares = st.floats(0.0, 1.0)
bursts = st.builds(Bursts, active=shares, peak=shares)


@given(one=bursts, other=bursts)
def test_bursts_cost_alike_and_only_where_the_link_is_too_slow(one: Bursts, other: Bursts) -> None:
    waits = excess(one, [other])
    assert waits == excess(other, [one])
    assert 0 <= waits <= min(one.active, other.active)
    assert (waits > 0) <= (one.peak + other.peak > 1)
    assert excess(one, []) == 0


def test_jobs_that_send_at_once_over_one_link_are_slower_beside_each_other() -> None:
    loads, sends = Bursts(active=0.5, peak=1.0), Bursts(active=0.5, peak=0.6)
    kinds = ByUse(
        {
            "loads": Use(busy=0.2, received=loads),
            "loads too": Use(busy=0.2, received=loads),
            "sends": Use(busy=0.2, sent=sends),
            "idle": Use(busy=0.2),
        },
        way("turns"),
    )
    alone = kinds.speed("h200", "loads", ["idle"])
    assert kinds.speed("h200", "loads", []) == 1
    assert kinds.speed("h200", "loads", ["loads too"]) == pytest.approx(alone / 1.25)
    assert kinds.speed("h200", "loads", ["sends"]) == alone, "the other way"


def test_driples_figures_need_templates() -> None:
    made = ["--generate", "jobs=3,gap=10s,median=1min"]
    line = fails("schedule", *made, "--cluster", "1x1xv100", "--pairs", "turns", "--uses", "driple")
    assert "--uses: driple needs --predictor and --templates" in line


@pytest.mark.parametrize(("every_s", "lost_s", "done"), [(1e5, 950.0, 0.0), (400.0, 150.0, 800.0)])
def test_a_mate_that_comes_or_goes_is_no_checkpoint(every_s: float, lost_s: float, done: float) -> None:
    """Both jobs keep 0.8 of their speed together: from 900 s to 906.25 s. The node is away at 950 s."""
    outage = FailureModel(outages=(Outage(time_s=950.0, node=0, repair_s=1.0),))
    jobs = [
        TraceJob(name=name, arrival_s=arrival_s, duration_s=duration_s, gpus=1)
        for name, arrival_s, duration_s in (("a", 0.0, 1000.0), ("b", 900.0, 5.0))
    ]
    around = Settings(checkpoint_every_s=every_s, pairs=Fixed(0.8), failures=outage)
    result = Simulation(jobs, [Machine(device="v100", gpus=1)], policies.get("fifo"), settings=around).run()
    assert result.finish_s[1] == pytest.approx(906.25)
    assert result.lost_gpu_s.tolist() == pytest.approx([lost_s, 0.0])
    assert result.finish_s[0] == pytest.approx(951.0 + 1000.0 - done)


def test_a_checkpoint_between_two_changes_of_speed_is_kept() -> None:
    """Alone until 100 s, at 0.8 until 600 s, alone again: at the checkpoint of 400 s 100 + 0.8 * 300 s of
    work are done, and at 650 s nothing more is kept."""
    outage = FailureModel(outages=(Outage(time_s=650.0, node=0, repair_s=1.0),))
    jobs = [
        TraceJob(name=name, arrival_s=arrival_s, duration_s=duration_s, gpus=1)
        for name, arrival_s, duration_s in (("a", 0.0, 1000.0), ("b", 100.0, 400.0))
    ]
    around = Settings(checkpoint_every_s=400.0, pairs=Fixed(0.8), failures=outage)
    result = Simulation(jobs, [Machine(device="v100", gpus=1)], policies.get("fifo"), settings=around).run()
    assert result.finish_s[1] == pytest.approx(600.0)
    assert result.lost_gpu_s[0] == pytest.approx(250.0)
    assert result.finish_s[0] == pytest.approx(651.0 + 1000.0 - 340.0)
