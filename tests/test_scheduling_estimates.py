"""What is believed of jobs is apart from what happens: predictors, users, history, and what that is worth."""

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foretrain.cli import app
from foretrain.errors import InputError
from foretrain.scheduling import Machine, Simulation, Trace, TraceJob, policies
from foretrain.scheduling.correlation import Shares, share_within, user_share
from foretrain.scheduling.estimates import (
    Estimates,
    History,
    Inverse,
    LogNormal,
    Requested,
    ResidualEstimates,
)
from foretrain.scheduling.study import Scenario
from foretrain.scheduling.workload import TraceGenerator, redrawn

FOUR = [Machine(device="v100", gpus=4)]


def job(name: str, arrival: float, duration: float, **more: object) -> TraceJob:
    return TraceJob(name=name, arrival_s=arrival, duration_s=duration, gpus=1, **more)  # type: ignore[arg-type]


def evaluation(path: Path) -> Path:
    rows = [
        {
            "predictor": name,
            "quantity": "step_time_s",
            "measured": 1.0,
            "predicted": ratio,
            "runs_file": where,
        }
        for name, spread in (("good", 1.05), ("poor", 3.0))
        for where, ratios in (("a", (1 / spread, 1.0)), ("b", (1.0, spread)))
        for ratio in ratios
    ]
    path.write_text(json.dumps({"runs": rows}))
    return path


def test_policies_see_what_users_asked_for() -> None:
    jobs = [
        job("short, said long", 0, 10, limit_s=500.0),
        job("long, said short", 0, 100, limit_s=50.0),
        job("c", 0, 5),
    ]
    simulation = Simulation(
        jobs, [Machine(device="v100", gpus=1)], policies.get("sjf"), estimates=Requested()
    )
    assert [each.estimated_work for each in simulation.jobs] == [500.0, 50.0, 500.0], "none asked: the median"
    assert simulation.run().start_s.tolist() == [100.0, 0.0, 110.0]
    with pytest.raises(InputError, match="requested needs jobs with a limit_s"):
        Simulation(jobs[2:], FOUR, policies.get("sjf"), estimates=Requested())


def test_history_knows_only_what_was_over() -> None:
    jobs = [
        job("first", 0, 10, user="ann", kind="net"),
        job("second", 5, 30, user="ann", kind="net"),
        job("third", 100, 70, user="ann", kind="net"),
        job("bob's", 110, 1, user="bob", kind="net"),
    ]
    found = [
        each.estimated_work for each in Simulation(jobs, FOUR, policies.get("sjf"), estimates=History()).jobs
    ]
    assert found[:2] == [3600.0, 3600.0], "nothing is known yet"
    assert found[2:] == [20.0, 20.0], "the last two of the user; of the model"


def test_errors_are_alike_within_users_and_models_as_far_as_said() -> None:
    jobs = [job(str(n), n, 10, user=f"u{n % 20}", kind=f"k{n % 7}") for n in range(2000)]
    for shares in (Shares(), Shares(user=0.6), Shares(model=0.5), Shares(user=0.3, model=0.3)):
        by_user, by_model = [], []
        for seed in range(6):
            drawn = LogNormal(0.5, seed, shares)
            logs = [math.log(drawn.factor(each, number)) for number, each in enumerate(jobs)]
            by_user.append(share_within([(each.user, value) for each, value in zip(jobs, logs, strict=True)]))
            by_model.append(
                share_within([(each.kind, value) for each, value in zip(jobs, logs, strict=True)])
            )
        assert sum(by_user) / 6 == pytest.approx(shares.user, abs=0.2)
        assert sum(by_model) / 6 == pytest.approx(shares.model, abs=0.25)
    asked = [job(str(n), n, 10, user=f"u{n % 3}", limit_s=10.0 * (1 + n % 3)) for n in range(30)]
    assert user_share(asked) > 0.9


def test_residuals_tell_how_alike_errors_are_and_give_an_interval(tmp_path: Path) -> None:
    found = ResidualEstimates.load(evaluation(tmp_path / "evaluation.json"))
    assert found["poor"]._shares.model > 0.1
    belief = found["poor"].belief(job("a", 0, 10), 0)
    assert belief.low <= belief.median <= belief.high
    assert belief.median in (1 / 3.0, 1.0, 3.0)


def test_what_happens_is_drawn_apart_from_the_forecast(tmp_path: Path) -> None:
    path = evaluation(tmp_path / "evaluation.json")
    jobs = [job(str(n), 0, 100.0, kind=str(n)) for n in range(40)]
    same = Scenario(policy="fifo", machines=FOUR, residuals=path, residuals_of="poor", truth_of="poor")
    simulation = Simulation(jobs, FOUR, policies.get("fifo"), truth=same._truth(), estimates=same.estimates())
    assert {round(each.work) for each in simulation.jobs} == {33, 100, 300}
    assert {round(each.estimated_work) for each in simulation.jobs} == {100}, "the forecast itself"
    result = same.run(Trace(name="t", format="own", jobs=jobs))
    assert sum(each.end_s - each.start_s for each in result.segments) == pytest.approx(
        sum(each.work for each in simulation.jobs)
    )
    assert Inverse(LogNormal(0.5)).factor(jobs[0], 0) * LogNormal(0.5).factor(jobs[0], 0) == pytest.approx(1)


def test_a_redrawn_workload_is_like_the_trace_and_the_first_is_the_trace() -> None:
    trace = TraceGenerator(jobs=400, seed=3).trace()
    assert redrawn(trace, 0) is trace
    one, other = redrawn(trace, 1), redrawn(trace, 2)
    assert one.jobs == redrawn(trace, 1).jobs != other.jobs
    assert len({each.name for each in one.jobs}) == len(one.jobs)
    assert len(one.jobs) == pytest.approx(400, abs=20)
    arrivals = [each.arrival_s for each in one.jobs]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(trace.jobs[-1].arrival_s, rel=0.5)


def test_predictors_are_compared_with_confidence_over_workloads(tmp_path: Path) -> None:
    path, trace = evaluation(tmp_path / "evaluation.json"), tmp_path / "jobs.csv"
    lines = [f"j{n},{30 * n},{100 + 900 * (n * 7 % 11 == 0)},{1 + n % 3},{2000 + n},400" for n in range(120)]
    trace.write_text("\n".join(["name,arrival_s,duration_s,gpus,limit_s,deadline_s", *lines]))
    words = [
        *("schedule", str(trace), "--cluster", "1x4xv100", "--policy", "srtf", "--residuals", str(path)),
        *("--compare-predictors", "--seeds", "4", "--processes", "1"),
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "over 4 workloads" in done.output
    assert "deadlines missed" in done.output
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["worth"]
    cost = {each["estimates"].split()[0]: each["figures"]["average_jct_s"] for each in found}
    means = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["means"]
    told = {each["estimates"].split()[0]: each["cost_of_errors"] for each in means}
    assert {name: each["mean"] for name, each in cost.items()} == pytest.approx(
        {name: told[name] for name in cost}
    )
    assert set(cost) == {"good", "poor", "requested", "history"}
    assert cost["good"]["mean"] < cost["poor"]["mean"]
    assert all(each["half_width"] > 0 for each in (cost["poor"], cost["requested"]))
    assert {"average_jct_s", "average_wait_s", "missed_deadlines", "gpu_hours", "dollars"} >= set(
        found[0]["figures"]
    )
    refused = CliRunner().invoke(
        app, ["schedule", str(trace), "--cluster", "1x4xv100", "--compare-predictors"]
    )
    assert (refused.exit_code, "needs --residuals" in refused.output) == (2, True)


@pytest.mark.parametrize("policy", ["backfill", "conservative", "multifactor"])
def test_jobs_that_outlive_their_estimates_do_not_count_as_about_to_end_for_ever(policy: str) -> None:
    """Or else narrow jobs go ahead of a wide one again and again, on GPUs that two late jobs would free."""
    jobs = [
        TraceJob(name=name, arrival_s=arrival, duration_s=duration, gpus=gpus)
        for name, arrival, duration, gpus in (
            ("late", 0, 1000, 6), ("later", 0, 2000, 6), ("wide", 1, 50, 10), ("narrow", 100, 5000, 4),
        )
    ]  # fmt: skip
    estimates = Believed({"late": 10, "later": 90, "wide": 50, "narrow": 5000})
    machines = [Machine(device="v100", gpus=16)]
    result = Simulation(jobs, machines, policies.get(policy), estimates=estimates).run()
    assert result.start_s.tolist()[2] == 1000, "when the first of the late jobs ends"


class Believed(Estimates):
    """As said."""

    def __init__(self, times_s: dict[str, float]) -> None:
        self._times_s = times_s

    def factor(self, job: TraceJob, number: int) -> float:
        assert job.duration_s is not None
        return self._times_s[job.name] / job.duration_s
