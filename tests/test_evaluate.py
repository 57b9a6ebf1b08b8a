"""Evaluation: errors by hand, every run accounted for, and nothing held out is ever learned from."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from commands import fails, ok
from commands import run as command
from foretrain.architectures import family
from foretrain.cluster import Catalog
from foretrain.errors import CaptureError, InputError, UnsupportedJob
from foretrain.evaluate import (
    SPLITS,
    Evaluation,
    Fold,
    Scores,
    bound_of,
    evaluate,
    job_key,
    leaderboard,
    split_runs,
)
from foretrain.forecast import Estimate, Forecast
from foretrain.job import Job
from foretrain.predictors.base import Predictor
from foretrain.report.tables import evaluation_tables
from foretrain.run import Run
from foretrain.workload import Model

CATALOG = Catalog()


class Fake(Predictor):
    """The step time is a hundredth of the batch, plus or minus ten percent; wide networks and large batches
    are too much for it."""

    name: ClassVar[str] = "fake"
    quantities: ClassVar[frozenset[str]] = frozenset({"step_time_s", "kernels"})

    def __init__(self) -> None:
        self.asked: list[Job] = []
        self.learned: list[Run] = []

    def fit(self, runs: Iterable[Run]) -> Self:
        self.learned = list(runs)
        return self

    def predict(self, job: Job) -> Forecast:
        self.asked.append(job)
        batch = job.workload.training.global_batch
        if batch > 1000:
            raise UnsupportedJob("training.global_batch: more than 1000")
        if job.workload.model.name == "broken":
            raise CaptureError("model: it does not run")
        time_s = batch / 100
        return Forecast(
            job=job,
            predictor=self.name,
            quantities={"step_time_s": Estimate(time_s, 0.9 * time_s, 1.1 * time_s)},
        )


class Learner(Fake):
    """The step time is the mean of those it learned from."""

    name: ClassVar[str] = "learner"

    def predict(self, job: Job) -> Forecast:
        if not self.learned:
            raise UnsupportedJob("learner: fit it first")
        mean = sum(run.measured["step_time_s"] for run in self.learned) / len(self.learned)
        return Forecast(job=job, predictor=self.name, quantities={"step_time_s": Estimate(mean, 0, 2 * mean)})


class Stubborn(Fake):
    name: ClassVar[str] = "stubborn"

    def fit(self, runs: Iterable[Run]) -> Self:
        raise InputError("fit: ten thousand runs are needed")


def line(
    batch: int = 100,
    model: str = "resnet50",
    device: str = "t4",
    devices: int = 1,
    source: str = "timm",
    **measured: float,
) -> dict[str, Any]:
    return {
        "job": {
            "model": {"source": source, "name": model},
            "training": {"global_batch": batch},
            "cluster": {"device": device, "devices_per_node": devices},
        },
        "measured": measured,
    }


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    return path


# Errors


def five(tmp_path: Path) -> Path:
    """Forecasts are 1, 2, 3, 4 and 5 s: errors of +100 %, 0, -25 %, -20 % and +25 %."""
    measured = (0.5, 2.0, 4.0, 5.0, 4.0)
    return write(
        tmp_path / "runs.jsonl", *(line(100 * (i + 1), step_time_s=value) for i, value in enumerate(measured))
    )


HEADINGS = ["predictor", "quantity", "n", "MAPE", "median", "p90", "bias", "coverage", "unsupported"]


def test_five_runs_by_hand(tmp_path: Path) -> None:
    path = five(tmp_path)
    (result,) = evaluate([path], predictors=[Fake()]).results
    assert (result.predictor, result.quantity, result.runs_file, result.split) == (
        "fake",
        "step_time_s",
        str(path),
        None,
    )
    assert (result.n, result.unsupported) == (5, 0)
    assert result.mape == pytest.approx((1 + 0 + 0.25 + 0.2 + 0.25) / 5)
    assert result.median_ape == pytest.approx(0.25)
    assert result.p90_ape == pytest.approx(0.25 + 0.6 * 0.75)
    assert result.bias == pytest.approx(0)
    assert result.coverage == pytest.approx(1 / 5)
    rows = evaluate([path], predictors=[Fake()]).runs
    off = np.array([row.predicted - row.measured for row in rows])
    measured = np.array([row.measured for row in rows])
    assert result.mre == pytest.approx(np.abs(off).sum() / measured.sum())
    assert result.rmse == pytest.approx(np.sqrt((off**2).mean()))


def test_every_comparison_is_listed_with_its_line(tmp_path: Path) -> None:
    rows = evaluate([five(tmp_path)], predictors=[Fake()]).runs
    assert [row.line for row in rows] == [1, 2, 3, 4, 5]
    assert [row.error for row in rows] == pytest.approx([1, 0, -0.25, -0.2, 0.25])
    assert (rows[2].measured, rows[2].predicted, rows[2].low, rows[2].high) == pytest.approx((4, 3, 2.7, 3.3))


def test_the_json_has_exactly_the_documented_keys(tmp_path: Path) -> None:
    path = write(tmp_path / "runs.jsonl", line(step_time_s=1), line(2000, step_time_s=1))
    data = json.loads(json.dumps(evaluate([path], predictors=[Fake()]).to_dict(), allow_nan=False))
    assert list(data) == ["results", "by_bound", "runs", "unsupported", "failures", "reasons"]
    figures = ["n", "mape", "median_ape", "p90_ape", "bias", "coverage", "unsupported", "failed", "bound"]
    figures += ["mre", "rmse"]
    assert list(data["results"][0]) == ["predictor", "quantity", "runs_file", "split", *figures]
    assert list(data["runs"][0]) == [
        "runs_file",
        "line",
        "predictor",
        "quantity",
        "measured",
        "predicted",
        "low",
        "high",
        "error",
        "bound",
    ]
    assert list(data["unsupported"][0]) == ["runs_file", "line", "predictor", "reason"]


def test_steps_that_the_host_bounds_are_scored_apart(tmp_path: Path) -> None:
    """By the busy time of one GPU, else by the forecast; of several GPUs and of CPUs by neither."""
    path = write(
        tmp_path / "runs.jsonl",
        line(100, step_time_s=2.0, device_busy_s=0.5),
        line(200, step_time_s=4.0, device_busy_s=3.1),
        line(300, step_time_s=3.0, device_busy_s=2.9),
        line(400, step_time_s=8.0, devices=2, device_busy_s=1.0),
    )
    document = evaluate([path], predictors=[Fake()])
    assert [(one.bound, one.n, one.quantity) for one in document.by_bound] == [
        ("host", 2, "step_time_s"),
        ("device", 1, "step_time_s"),
    ]
    assert [one.mape for one in document.by_bound] == pytest.approx([0.5, 0.0])
    assert [row.bound for row in document.runs] == ["host", "host", "device", None]
    assert document.results[0].n == 4
    run = Run.read(line(step_time_s=1))
    words = (
        "the host: the device is busy 9% of the step",
        "the device's arithmetic (60%)",
        "gathering (70%)",
    )
    assert [bound_of(run, word) for word in words] == ["host", "device", None]


def test_runs_are_forecast_beside_the_host_they_were_measured_on(tmp_path: Path) -> None:
    path, fake = write(tmp_path / "runs.jsonl", line(step_time_s=1)), Fake()
    evaluate([path], predictors=[fake], host="epyc-rome")
    assert fake.asked[0].cluster.issuer == CATALOG.host("epyc-rome")
    with pytest.raises(InputError, match=r"runs\.jsonl:1: cluster\.host: 'toaster' is not a file of"):
        evaluate([path], predictors=[fake], host="toaster")


def test_each_predictor_quantity_and_file_has_its_result(tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", line(step_time_s=1, kernels=5, power_w=100))
    two = write(tmp_path / "two.jsonl", line(step_time_s=2))
    results = evaluate([two, one], predictors=[Learner(), Fake()]).results
    keys = [(result.predictor, result.runs_file, result.quantity) for result in results]
    expected = [
        (str(two), "step_time_s"),
        (str(one), "step_time_s"),
        (str(one), "kernels"),
        (str(one), "power_w"),
    ]
    assert keys == [(name, *rest) for name in ("learner", "fake") for rest in expected]


def test_a_leaderboard_has_the_smallest_error_first_and_those_without_one_last(tmp_path: Path) -> None:
    class Exact(Fake):
        name: ClassVar[str] = "exact"

        def predict(self, job: Job) -> Forecast:
            return Forecast(job=job, predictor=self.name, quantities={"step_time_s": Estimate(1.5, 1.5, 1.5)})

    path = write(tmp_path / "runs.jsonl", line(step_time_s=1.5))
    evaluation = evaluate([path], predictors=[Learner(), Fake(), Exact()])
    assert [result.predictor for result in leaderboard(evaluation, "step_time_s")] == [
        "exact",
        "fake",
        "learner",
    ]
    assert leaderboard(evaluation, "power_w") == []


# Nothing is dropped


def test_a_run_without_a_figure_is_listed_with_its_reason(tmp_path: Path) -> None:
    path = write(
        tmp_path / "runs.jsonl",
        line(step_time_s=1),
        line(2000, step_time_s=1),
        line(model="broken", step_time_s=1),
        line(kernels=7),
        line(power_w=300),
        line(kernels=0),
    )
    evaluation = evaluate([path], predictors=[Fake()])
    assert [(row.line, row.reason) for row in evaluation.unsupported] == [
        (2, "training.global_batch: more than 1000"),
        (4, "kernels: fake gives none for this job"),
        (5, "measured: power_w; fake gives none of it"),
        (6, "kernels: measured 0, so there is no relative error"),
    ]
    assert [(row.line, row.predictor, row.reason) for row in evaluation.failures] == [
        (3, "fake", "model: it does not run")
    ]
    by_quantity = {
        result.quantity: (result.n, result.unsupported, result.failed, result.mape)
        for result in evaluation.results
    }
    assert by_quantity == {
        "step_time_s": (1, 2, 1, 0.0), "kernels": (0, 2, 0, None), "power_w": (0, 1, 0, None),
    }  # fmt: skip


MEASURED = st.fixed_dictionaries(
    {},
    optional={
        "step_time_s": st.sampled_from([1.0, 2.5]),
        "kernels": st.sampled_from([0.0, 1.0, 2.5]),
        "power_w": st.sampled_from([0.0, 1.0, 2.5]),
    },
)


@given(
    st.lists(
        st.tuples(st.sampled_from([100, 200, 2000]), st.sampled_from(["resnet50", "broken"]), MEASURED),
        min_size=1,
        max_size=8,
    )
)
def test_every_run_is_compared_or_listed_and_counts_add_up(
    tmp_path_factory: pytest.TempPathFactory, runs: list[Any]
) -> None:
    path = tmp_path_factory.mktemp("runs") / "runs.jsonl"
    write(path, *(line(batch, model, **measured) for batch, model, measured in runs))
    evaluation = evaluate([path], predictors=[Fake()])
    seen = {
        row.line for part in (evaluation.runs, evaluation.unsupported, evaluation.failures) for row in part
    }
    assert seen == set(range(1, len(runs) + 1))
    for result in evaluation.results:
        assert result.n + result.unsupported == sum(result.quantity in measured for _, _, measured in runs)
        assert result.n == sum(row.quantity == result.quantity for row in evaluation.runs)
    json.dumps(evaluation.to_dict(), allow_nan=False)


def test_the_same_job_is_forecast_once(tmp_path: Path) -> None:
    path = write(tmp_path / "runs.jsonl", *(line(batch, step_time_s=1) for batch in (100, 200, 100, 100)))
    fake = Fake()
    assert evaluate([path], predictors=[fake]).results[0].n == 4
    assert [job.workload.training.global_batch for job in fake.asked] == [100, 200]


def test_progress_counts_every_forecast(tmp_path: Path) -> None:
    ticks: list[tuple[int, int]] = []
    evaluate(
        [five(tmp_path)],
        predictors=[Fake(), Learner()],
        progress=lambda done, total: ticks.append((done, total)),
    )
    assert ticks == [(i, 10) for i in range(1, 11)]


def test_a_line_that_cannot_be_read_is_listed_and_does_not_stop_the_others(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    odd = [
        "{",
        "[1]",
        json.dumps({**line(step_time_s=1), "more": 1}),
        json.dumps(line(device="none", step_time_s=1)),
    ]
    path.write_text("\n".join([odd[0], json.dumps(line(step_time_s=1)), *odd[1:]]))
    evaluation = evaluate([path], predictors=[Fake(), Learner()])
    assert [(row.line, row.predictor) for row in evaluation.failures] == [(n, None) for n in (1, 3, 4, 5)]
    reasons = ("not JSON", "run: a run is a table", "more: 'more' is not", "cluster.device: 'none' is not")
    assert all(row.reason.startswith(why) for row, why in zip(evaluation.failures, reasons, strict=True))
    assert [result.n for result in evaluation.results] == [1, 0]


def test_a_bug_in_fit_is_a_failure_of_every_run_of_the_fold(tmp_path: Path) -> None:
    class Broken(Fake):
        def fit(self, runs: Iterable[Run]) -> Self:
            raise ZeroDivisionError("division by zero")

    evaluation = evaluate([five(tmp_path)], predictors=[Broken()], split="random")
    assert {row.reason.partition(": ")[2] for row in evaluation.failures} == {
        "internal error: ZeroDivisionError: division by zero"
    }
    assert (len(evaluation.failures), evaluation.results[0].unsupported, evaluation.results[0].failed) == (
        5,
        5,
        5,
    )


def test_a_file_given_twice_counts_once(tmp_path: Path) -> None:
    path = five(tmp_path)
    assert evaluate([path, path], predictors=[Fake()]).results[0].n == 5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "runs.jsonl: empty"),
        ("\n\n", "runs.jsonl: empty"),
        ("{", "runs.jsonl:1: not JSON"),
        ('{"job": 1}', "runs.jsonl:1: run: "),
    ],
)
def test_a_file_without_good_runs_is_an_error(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "runs.jsonl").write_text(content)
    with pytest.raises(InputError) as caught:
        evaluate([tmp_path / "runs.jsonl"], predictors=[Fake()])
    assert message in str(caught.value)


def test_a_missing_file_and_no_file_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.jsonl: cannot be read"):
        evaluate([tmp_path / "none.jsonl"], predictors=[Fake()])
    with pytest.raises(InputError, match="no file given"):
        evaluate([])
    with pytest.raises(InputError, match=r"^predictor: 'nonsense' is not one of"):
        evaluate([five(tmp_path)], predictors=["nonsense"])


# Splits


def run(batch: int = 100, model: str = "resnet50", device: str = "t4", devices: int = 1) -> Run:
    return Run.read(line(batch, model, device, devices, step_time_s=1.0), catalog=CATALOG)


NAMES = st.sampled_from(
    [
        "resnet50",
        "wide_resnet50_2",
        "vgg16",
        "vit_b_32",
        "deit3_base_patch16_224",
        "mobilenetv3_large_100",
        "swin_t",
    ]
)
RUNS = st.lists(
    st.builds(
        run,
        st.sampled_from([64, 128, 256]),
        NAMES,
        st.sampled_from(["t4", "p100", "v100-sxm-32gb"]),
        st.sampled_from([1, 2, 4]),
    ),
    min_size=1,
    max_size=16,
)
LABELS: dict[str, Callable[[Run], object]] = {
    "random": lambda run: job_key(run.job),
    "leave-model-out": lambda run: family(run.job.workload.model),
    "leave-device-out": lambda run: run.job.cluster.device.name,
}


def folds_of(runs: Sequence[Run], split: str, **options: int) -> list[Fold]:
    """The folds, or none when the runs are too much alike to be split."""
    try:
        return split_runs(runs, split, **options)
    except InputError as error:
        expected = (f"split: {split} needs runs of at least two", f"split: {split} needs runs with three")
        assert str(error).startswith(expected)  # noqa: PT017
        return []


@given(RUNS, st.sampled_from(sorted(LABELS)), st.integers(0, 9), st.integers(2, 6))
def test_what_is_tested_was_never_learned_from(runs: list[Run], split: str, seed: int, folds: int) -> None:
    label = LABELS[split]
    for fold in folds_of(runs, split, seed=seed, folds=folds):
        assert fold.train
        assert {label(runs[i]) for i in fold.train}.isdisjoint({label(runs[i]) for i in fold.test})


@given(RUNS, st.sampled_from(sorted(LABELS)), st.integers(0, 9), st.integers(2, 6))
def test_every_run_is_tested_exactly_once(runs: list[Run], split: str, seed: int, folds: int) -> None:
    found = folds_of(runs, split, seed=seed, folds=folds)
    if found:
        assert sorted(i for fold in found for i in fold.test) == list(range(len(runs)))
        assert all(sorted([*(fold.train or ()), *fold.test]) == list(range(len(runs))) for fold in found)
        assert len(found) == len({LABELS[split](run) for run in runs}) or (
            split != "leave-device-out" and len(found) == folds
        )


@given(RUNS, st.sampled_from(SPLITS), st.integers(0, 9))
def test_the_same_seed_gives_the_same_folds(runs: list[Run], split: str, seed: int) -> None:
    assert folds_of(runs, split, seed=seed) == folds_of(runs, split, seed=seed)


@given(RUNS)
def test_extrapolation_only_looks_up(runs: list[Run]) -> None:
    for fold in folds_of(runs, "extrapolate"):
        worlds = {run.job.cluster.world_size for run in runs}
        scale = [
            run.job.cluster.world_size if len(worlds) > 1 else run.job.workload.training.global_batch
            for run in runs
        ]
        assert fold.train
        assert fold.test
        assert max(scale[i] for i in fold.train) < min(scale[i] for i in fold.test)


def test_extrapolation_goes_by_world_size_and_else_by_batch() -> None:
    (fold,) = split_runs([run(devices=devices, batch=96) for devices in (4, 1, 2, 1)], "extrapolate")
    assert fold == Fold(train=(1, 3), test=(0, 2))
    (fold,) = split_runs([run(batch) for batch in (64, 256, 128, 256, 256)], "extrapolate")
    assert fold == Fold(train=(0, 2), test=(1, 3, 4))


def test_interpolation_leaves_out_one_inner_value_at_a_time() -> None:
    runs = [run(96, devices=devices) for devices in (8, 1, 2, 4, 2)]
    assert split_runs(runs, "interpolate:workers") == [
        Fold(train=(0, 1, 3), test=(2, 4)),
        Fold(train=(0, 1, 2, 4), test=(3,)),
    ]
    assert split_runs(runs, "interpolate") == split_runs(runs, "interpolate:workers")


def test_extrapolation_along_a_dimension_leaves_out_its_largest_third() -> None:
    runs = [run(batch) for batch in (16, 512, 32, 64, 128, 256)]
    assert split_runs(runs, "extrapolate:batch") == [Fold(train=(0, 2, 3, 4), test=(1, 5))]


@pytest.mark.parametrize(("split", "message"), [
    ("extrapolate:colour", "split: 'extrapolate:colour' is not one of extrapolate:batch"), ("random:workers",
    "split: 'random:workers' "
                                                                                                              "is not one of"),
    ("interpolate:samples", "split: interpolate needs runs with three values of samples or more"),
])  # fmt: skip
def test_a_dimension_that_does_not_exist_or_does_not_vary_is_an_error(split: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        split_runs([run(batch) for batch in (16, 32, 64)], split)


def test_at_most_so_many_runs_of_a_model_are_learned_from(tmp_path: Path) -> None:
    learned: list[int] = []

    class Counts(Fake):
        def fit(self, runs: Iterable[Run]) -> Self:
            learned.append(len(list(runs)))
            return self

    path = write(tmp_path / "runs.jsonl", *(line(batch, step_time_s=1.0) for batch in (10, 20, 30, 40, 50)))
    evaluate([path], predictors=[Counts()], split="extrapolate:batch", train_runs=2)
    assert learned == [2]


def test_a_mixed_cluster_keeps_all_its_devices_out_of_the_training_set() -> None:
    mixed = line(step_time_s=1.0)
    mixed["job"]["cluster"] = {"groups": [{"device": "t4"}, {"device": "p100"}]}
    runs = [
        run(device="t4"),
        run(device="p100"),
        run(device="v100-sxm-32gb"),
        Run.read(mixed, catalog=CATALOG),
    ]
    assert split_runs(runs, "leave-device-out") == [
        Fold(train=(1, 2), test=(0,), devices=frozenset({"t4"})),
        Fold(train=(0, 2), test=(1,), devices=frozenset({"p100-pcie-16gb"})),
        Fold(train=(0, 1, 3), test=(2,), devices=frozenset({"v100-sxm-32gb"})),
        Fold(train=(2,), test=(3,), devices=frozenset({"t4", "p100-pcie-16gb"})),
    ]


def test_what_is_held_out_is_to_be_forgotten_too() -> None:
    runs = [run(device="t4"), run(device="p100")]
    assert all(not fold.families and not fold.devices for fold in split_runs(runs, "random", folds=2))
    other = line(step_time_s=1.0)
    other["job"]["model"] = {"source": "timm", "name": "vit_base_patch16_224"}
    folds = split_runs([*runs, Run.read(other, catalog=CATALOG)], "leave-model-out", folds=2)
    assert {fold.families for fold in folds} == {
        frozenset({family(runs[0].job.workload.model)}),
        frozenset({"vit"}),
    }
    assert not any(fold.devices for fold in folds)


def test_folds_are_as_even_as_their_groups_allow() -> None:
    folds = split_runs([run(batch) for batch in range(1, 11)], "random", folds=5)
    assert [len(fold.test) for fold in folds] == [2, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("split", "folds", "message"),
    [("randon", 5, "did you mean random"), ("random", 1, "folds: 1 is not 2 or more")],
)
def test_an_unknown_split_is_refused(split: str, folds: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        split_runs([run()], split, folds=folds)


def test_a_split_learns_anew_on_each_fold_and_leaves_the_predictor_alone(tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", line(device="t4", step_time_s=1), line(device="p100", step_time_s=3))
    two = write(tmp_path / "two.jsonl", line(device="t4", step_time_s=2))
    learner = Learner()
    evaluation = evaluate([one, two], predictors=[learner], split="leave-device-out")
    assert [(row.runs_file, row.line, row.predicted) for row in evaluation.runs] == [
        (str(one), 1, 3),
        (str(one), 2, 1.5),
        (str(two), 1, 3),
    ]
    assert [(result.split, result.n) for result in evaluation.results] == [
        ("leave-device-out", 2),
        ("leave-device-out", 1),
    ]
    assert learner.learned == []


def test_a_predictor_that_cannot_learn_from_a_fold_is_listed(tmp_path: Path) -> None:
    evaluation = evaluate([five(tmp_path)], predictors=[Stubborn()], split="random")
    assert {row.reason for row in evaluation.unsupported} == {
        "cannot learn from 4 runs: fit: ten thousand runs are needed"
    }
    assert [(result.n, result.unsupported) for result in evaluation.results] == [(0, 5)]


def test_the_same_seed_gives_the_same_evaluation(tmp_path: Path) -> None:
    def again() -> Evaluation:
        return evaluate([five(tmp_path)], predictors=[Learner()], split="random", seed=3, folds=2)

    assert again() == again()


# Families


@pytest.mark.parametrize(
    ("expected", "names"),
    [
        (
            "resnet",
            "resnet50 resnetrs50 wide_resnet50_2 seresnet50 resnext50_32x4d "
            "res2net50_26w_4s legacy_senet154 resnetv2_50 tresnet_m",
        ),
        (
            "efficientnet",
            "efficientnet_b0 tf_efficientnetv2_s.in1k efficientnet_v2_s "
            "mobilenetv3_large_100 mobilenet_v2 mnasnet1_0 lcnet_100",
        ),
        (
            "vit",
            "vit_b_32 vit_base_patch16_224 deit3_base_patch16_224 "
            "beitv2_base_patch16_224 eva02_base_patch14_224",
        ),
        ("inception", "inception_v3 googlenet inception_resnet_v2"),
        ("vgg", "vgg16 vgg19_bn"),
        ("regnet", "regnet_x_400mf regnetx_002 regnety_040"),
        ("swin", "swin_v2_t swinv2_base_window8_256 swin_t"),
        ("densenet", "densenet121 DenseNet201"),
    ],
)
def test_relatives_of_timm_and_torchvision_share_a_family(expected: str, names: str) -> None:
    for name in names.split():
        assert {family(Model(source=source, name=name)) for source in ("timm", "torchvision")} == {expected}


def test_strangers_have_families_of_their_own() -> None:
    names = "resnet50 vgg16 vit_b_32 visformer_small vitamin_small_224 swin_t convnext_tiny densenet121 efficientformer_l1 rdnet_tiny".split()
    assert len({family(Model(source="timm", name=name)) for name in names}) == len(names)


def test_other_sources_go_by_model_type_or_name() -> None:
    assert family(Model(source="transformers", config={"model_type": "llama", "hidden_size": 8})) == "llama"
    assert family(Model(source="transformers", name="org/model")) == "org/model"
    assert family(Model(source="python", name="models.py:lstm")) == "models.py:lstm"
    assert family(Model(source="onnx", name="net.onnx")) == "net.onnx"


@given(st.text(min_size=1, max_size=20))
def test_every_name_has_a_family(name: str) -> None:
    assert isinstance(family(Model(source="timm", name=name)), str)


def test_a_bug_in_one_forecast_does_not_cost_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Buggy(Fake):
        name: ClassVar[str] = "buggy"

        def predict(self, job: Job) -> Forecast:
            if job.workload.training.global_batch == 7:
                raise KeyError("oops")
            return super().predict(job)

    path = write(tmp_path / "runs.jsonl", line(7, step_time_s=1), line(step_time_s=1))
    evaluation = evaluate([path], predictors=[Buggy()])
    assert [(row.line, row.reason) for row in evaluation.failures] == [
        (1, "internal error: KeyError: 'oops'")
    ]
    assert evaluation.results[0].n == 1
    assert "oops" in caplog.text


# Elsewhere


OWN = """
import os, signal
from foretrain.errors import UnsupportedJob
from foretrain.forecast import Estimate, Forecast
from foretrain.predictors.base import Predictor

class Own(Predictor):
    name, quantities, learns = "own", frozenset({"step_time_s"}), True
    mean_ = 0.0

    def fit(self, runs):
        times = [run.measured["step_time_s"] for run in runs]
        self.mean_ = sum(times) / len(times)
        return self

    def without(self, families=frozenset(), devices=frozenset()):
        self.mean_ = 0.0
        return self

    def predict(self, job):
        batch = job.workload.training.global_batch
        if batch == 200:
            raise UnsupportedJob("training.global_batch: 200")
        if batch == 300:
            raise KeyError("oops")
        if batch == 400:
            os.kill(os.getpid(), signal.SIGKILL)
        middle = self.mean_ or batch / 100
        return Forecast(job=job, predictor=self.name, quantities={"step_time_s": Estimate(middle, middle, middle)})

    def _write(self, folder):
        return {"mean": self.mean_}

    @classmethod
    def _read(cls, folder, document):
        made = cls()
        made.mean_ = document["mean"]
        return made
"""


def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path / 'own.py'}:Own"


@pytest.mark.parametrize("split", [None, "leave-model-out"])
def test_several_processes_give_what_one_gives(tmp_path: Path, split: str | None) -> None:
    path = write(
        tmp_path / "runs.jsonl",
        *(
            line(batch, f"{name}.py:{name}", source="python", step_time_s=0.01 * batch + len(name))
            for batch in (100, 200, 300)
            for name in ("resnet", "vgg", "swin", "vision")
        ),
    )
    one, two = (
        evaluate([path], predictors=[own(tmp_path), "ernest"], split=split, processes=processes).to_dict()
        for processes in (1, 2)
    )
    assert one == two
    assert len(one["failures"]) == 4


def test_a_job_that_takes_its_worker_down_costs_no_other(tmp_path: Path) -> None:
    lines = (line(batch, "net.py:net", source="python", step_time_s=1) for batch in (100, 400, 500))
    path = write(tmp_path / "runs.jsonl", *lines)
    ticks: list[tuple[int, int]] = []
    evaluation = evaluate(
        [path], predictors=[own(tmp_path)], processes=2, progress=lambda *count: ticks.append(count)
    )
    assert [row.line for row in evaluation.runs] == [1, 3]
    (failure,) = evaluation.failures
    assert (failure.line, failure.reason[:27]) == (2, "its worker was lost 3 times")
    assert ticks[-1] == (3, 3)


def test_what_cannot_be_saved_is_not_sent_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^processes: learner has learned but cannot be saved"):
        evaluate([five(tmp_path)], predictors=[Learner()], split="random", processes=2)


def test_ones_own_devices_are_known_and_forgotten_after_the_command(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        '[devices.mine]\nfp32 = 1e13\nmemory_bytes = "16 GB"\nmemory_bytes_per_s = "1 TB/s"\n'
    )
    path = write(tmp_path / "runs.jsonl", line(device="mine", step_time_s=1.0))
    before = os.environ.get("FORETRAIN_CATALOG", "")
    assert "cluster.device: 'mine' is not" in fails("evaluate", str(path), "--predictor", own(tmp_path))
    shown = ok("evaluate", str(path), "--predictor", own(tmp_path), "--catalog", str(tmp_path / "mine.toml"))
    assert "step_time_s" in shown
    assert os.environ.get("FORETRAIN_CATALOG", "") == before


def test_the_command_tells_why_runs_are_unsupported(tmp_path: Path) -> None:
    rows = [line(batch, step_time_s=1.0, kernels=5) for batch in (8, 16, 32)]
    path = write(tmp_path / "runs.jsonl", *rows)
    result = command("evaluate", str(path), "--predictor", "ernest", "--predictor", "roofline")
    assert result.exit_code == 0, result.output
    assert f"unsupported: {path}:1: ernest: has learned from no runs yet; fit it first" in result.stderr
    assert result.stderr.count("(2 more like it)") >= 1
    assert "ernest learns from runs alone: --split random has it learn from the others" in result.stderr
    assert "roofline learns" not in result.stderr


def test_a_command_whose_forecasts_all_fail_says_why_once_and_exits_with_1(tmp_path: Path) -> None:
    path = write(tmp_path / "runs.jsonl", *(line(300, step_time_s=1) for _ in range(9)))
    result = command("evaluate", str(path), "--predictor", own(tmp_path))
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "(8 more like it)" in result.stderr


def test_the_command_tells_what_failed(tmp_path: Path) -> None:
    path = write(tmp_path / "runs.jsonl", *(line(batch, step_time_s=1) for batch in [100] + [300] * 6))
    path.write_text("{\n" + path.read_text())
    result = command(
        "evaluate", str(path), "--predictor", own(tmp_path), "--json", str(tmp_path / "out.json")
    )
    assert result.exit_code == 0
    assert f"failed: {path}:1: not JSON" in result.stderr
    assert result.stderr.count("failed: ") == 2
    assert f"failed: {path}:3: {own(tmp_path)}: " in result.stderr
    assert "(5 more like it)" in result.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["failures"]) == 7
    assert [(one["kind"], one["count"], one["line"]) for one in found["reasons"]] == [
        ("failed", 6, 3),
        ("failed", 1, 1),
    ]
    (tmp_path / "none.txt").write_text("no\njson\n")
    assert "none.txt:1: not JSON" in fails("evaluate", str(tmp_path / "none.txt"))


def test_a_wide_table_has_all_figures(tmp_path: Path) -> None:
    document = evaluate([five(tmp_path)], predictors=[Fake()]).to_dict()
    narrow, wide = (
        evaluation_tables(document["results"], wide=wide).renderables[0] for wide in (False, True)
    )
    assert isinstance(narrow, Table)
    assert isinstance(wide, Table)
    assert [column.header for column in wide.columns if column.header not in HEADINGS] == ["MRE", "RMSE"]
    assert [column.header for column in narrow.columns] == HEADINGS


def test_each_file_has_a_table_under_its_name_within_100_columns(tmp_path: Path) -> None:
    files = [five(tmp_path), tmp_path / "runs_of_a_long_name_that_would_not_fit_in_a_column.jsonl"]
    files[1].write_text(files[0].read_text())
    results = evaluate(files, predictors=[Fake()]).to_dict()["results"]
    console = Console(width=100, file=io.StringIO())
    console.print(evaluation_tables([{**one, "runs_file": Path(one["runs_file"]).name} for one in results]))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.strip() for line in lines if line.strip().endswith(".jsonl")] == [one.name for one in files]
    assert sum("fake" in line and "step_time_s" in line for line in lines) == 2


def test_scores_have_one_definition_by_hand() -> None:
    scores = Scores.of([1.0, 2.0, 4.0], [1.1, 1.0, 4.0], [1.0, 0.5, 4.5], [1.2, 1.5, 5.0])
    assert scores.mape == pytest.approx((0.1 + 0.5 + 0.0) / 3)
    assert scores.median_ape == pytest.approx(0.1)
    assert scores.bias == 0.0
    assert scores.mre == pytest.approx(1.1 / 7.0)
    assert scores.rmse == pytest.approx((1.01 / 3) ** 0.5)
    assert scores.coverage == pytest.approx(1 / 3)
    assert Scores.of([1.0], [1.0]).coverage is None
    assert Scores.of_errors([0.5, -0.1]).mape == pytest.approx(0.3)
