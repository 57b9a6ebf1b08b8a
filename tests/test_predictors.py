"""Predictors: every one of them passes the conformance checks, and the checks catch one that does not."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from foretrain import predictors
from foretrain.costs import fitting
from foretrain.errors import InputError, UnsupportedJob
from foretrain.forecast import Estimate, Forecast
from foretrain.job import Job
from foretrain.predictors.base import Predictor
from foretrain.predictors.checks import check_forgets, check_predictor, made_up_runs, on_two_devices
from foretrain.predictors.deletepop import datasets
from foretrain.predictors.predictddl import predictor as predictddl
from foretrain.predictors.predictddl.regressors import choose
from foretrain.predictors.ray_models import predictor as ray_models
from foretrain.predictors.ray_models.search import Budget
from foretrain.predictors.ray_models.techniques import Recipe
from foretrain.run import Run
from made_up import made_up

TINY = """
import torch

def make(batch):
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    return net, (torch.zeros(batch, 3, 4, 4),)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the model is, and its graphs, which are traced once."""
    made = tmp_path_factory.mktemp("tiny")
    (made / "tiny.py").write_text(TINY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETRAIN_CACHE", str(made / "cache"))
        yield made


@pytest.fixture
def job(folder: Path) -> Job:
    return tiny_job(folder)


def tiny_job(base: Path, device: str = "h100-sxm-80gb", **training: Any) -> Job:
    model = {"source": "python", "name": "tiny.py:make"}
    return Job.read(
        {"model": model, "training": {"global_batch": 4, **training}, "cluster": {"device": device}},
        base=base,
    )


@pytest.mark.parametrize("name", predictors.names())
def test_every_predictor_passes_the_conformance_checks(name: str, job: Job) -> None:
    check_predictor(predictors.get(name), job)


@pytest.fixture
def quick_learning(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learning takes a moment: operator models from a few made-up operators, networks in two epochs, and the
    rest by a few of its regressors."""
    monkeypatch.setattr(datasets, "load_measured", lambda path, device=None: made_up(count=20))
    for growth in (fitting._FOR_ALL, fitting._FOR_ONE):
        monkeypatch.setitem(growth, "trees", 2)
    few = Recipe(mean="nnls"), Recipe(mean="forecast", technique="ridge")
    monkeypatch.setattr(ray_models, "Budget", functools.partial(Budget, starters=few))
    monkeypatch.setattr(
        predictddl, "choose", lambda problem, candidates, **folds: choose(problem, candidates[:3], **folds)
    )
    if name == "driple":
        from foretrain.predictors.driple.network import SCHEDULES

        monkeypatch.setitem(SCHEDULES, "improved", dataclasses.replace(SCHEDULES["improved"], epochs=2))


@pytest.mark.usefixtures("quick_learning")
@pytest.mark.parametrize("name", predictors.names())
def test_every_predictor_forecasts_or_refuses_each_kind_of_job(name: str, folder: Path) -> None:
    for training in (
        {"mode": "infer"},
        {"precision": "amp-bf16", "optimizer": "adamw"},
        {"samples": 100, "epochs": 2},
    ):
        predictor = predictors.get(name)
        check_predictor(predictor, tiny_job(folder, **training))


@pytest.mark.usefixtures("quick_learning")
@pytest.mark.parametrize("name", predictors.names())
def test_every_predictor_forgets_what_it_is_told_to(name: str, job: Job) -> None:
    check_forgets(predictors.get(name), job)


@pytest.mark.usefixtures("quick_learning")
@pytest.mark.parametrize("name", predictors.names())
def test_every_predictor_forgets_what_it_learned_on_two_devices(name: str, job: Job) -> None:
    check_forgets(predictors.get(name), on_two_devices(job))


@pytest.mark.parametrize("name", predictors.names())
def test_every_predictor_says_its_own_name(name: str) -> None:
    assert predictors.get(name).name == name


def test_an_unknown_predictor_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        InputError, match=r"^predictor: 'rooflin' is not one of .*roofline.*\(did you mean roofline"
    ):
        predictors.get("rooflin")


def test_the_default_predictor_exists() -> None:
    assert predictors.get().name == predictors.DEFAULT


def test_the_roofline_takes_longer_on_a_slower_device(folder: Path) -> None:
    fast, slow = (
        predictors.get("roofline").predict(tiny_job(folder, device)) for device in ("h100-sxm-80gb", "p4")
    )
    assert slow["device_busy_s"].median >= fast["device_busy_s"].median


def test_the_roofline_forecasts_two_devices(job: Job) -> None:
    assert predictors.get("roofline").predict(on_two_devices(job))["step_time_s"].median > 0


def test_inference_has_no_backward_and_no_optimizer(folder: Path) -> None:
    forecast = predictors.get("roofline").predict(tiny_job(folder, mode="infer"))
    assert {"forward_time_s", "step_time_s"} <= forecast.quantities.keys()
    assert forecast.quantities.keys().isdisjoint({"backward_time_s", "optimizer_time_s"})


# The checks themselves


class Good(Predictor):
    """Always one second."""

    name: ClassVar[str] = "good"
    quantities: ClassVar[frozenset[str]] = frozenset({"step_time_s"})

    def fit(self, runs: Iterable[Run]) -> Self:
        return self

    def predict(self, job: Job) -> Forecast:
        return Forecast(job=job, predictor=self.name, quantities={"step_time_s": self.estimate()})

    def estimate(self) -> Estimate:
        return Estimate(1, 1, 1)


class Unknown(Good):
    quantities = frozenset({"speed"})


class Silent(Good):
    quantities = frozenset()


class Unclaimed(Good):
    quantities = frozenset({"kernels"})


class Negative(Good):
    quantities = frozenset({"kernels"})

    def predict(self, job: Job) -> Forecast:
        return Forecast(job=job, predictor=self.name, quantities={"kernels": Estimate(1, -1, 1)})


class Infinite(Good):
    def estimate(self) -> Estimate:
        return Estimate(1, 1, float("inf"))


class Moody(Good):
    calls = 0

    def estimate(self) -> Estimate:
        self.calls += 1
        return Estimate(self.calls, 0, self.calls)


class Copying(Good):
    def fit(self, runs: Iterable[Run]) -> Self:
        return type(self)()


class Crashing(Good):
    def predict(self, job: Job) -> Forecast:
        if job.cluster.world_size > 1:
            raise KeyError("data")
        return super().predict(job)


class Curt(Good):
    def predict(self, job: Job) -> Forecast:
        if job.cluster.world_size > 1:
            raise UnsupportedJob
        return super().predict(job)


class Unserialisable(Good):
    def predict(self, job: Job) -> Forecast:
        odd: Any = object()
        return Forecast(
            job=job, predictor=self.name, quantities={"step_time_s": self.estimate()}, assumptions=(odd,)
        )


class Impostor(Good):
    def predict(self, job: Job) -> Forecast:
        return Forecast(job=job, predictor="other", quantities={"step_time_s": self.estimate()})


class Learner(Good):
    fitted_: int | None = None

    def fit(self, runs: Iterable[Run]) -> Self:
        self.fitted_ = len(list(runs))
        return self

    def predict(self, job: Job) -> Forecast:
        if self.fitted_ is None:
            raise UnsupportedJob("learner: fit it first")
        return super().predict(job)


@pytest.mark.parametrize(
    ("predictor", "sentence"),
    [
        (Unknown(), "good claims speed, which no run can measure"),
        (Silent(), "good claims no quantity"),
        (Unclaimed(), "good forecasts step_time_s without claiming to"),
        (Negative(), "good: kernels is not 0 <= low <= median <= high"),
        (Infinite(), "good: step_time_s has a bound that is not finite"),
        (Moody(), "good: the same job asked twice differs in step_time_s"),
        (Copying(), "good: fit returned Copying, not the predictor itself"),
        (Crashing(), "good: a job that it cannot do raised KeyError"),
        (Curt(), "good refuses a job without saying why"),
        (Unserialisable(), "good: the forecast is not plain JSON"),
        (Impostor(), "good: the forecast says it is by 'other'"),
    ],
)
def test_the_checks_say_what_is_wrong(predictor: Predictor, sentence: str, job: Job) -> None:
    with pytest.raises(AssertionError) as caught:
        check_predictor(predictor, job)
    assert str(caught.value).startswith(sentence)


def test_a_predictor_may_refuse_until_it_has_learned_and_is_left_unfitted(job: Job) -> None:
    learner = Learner()
    check_predictor(learner, job)
    assert learner.fitted_ is None


def test_made_up_runs_measure_all_that_is_claimed_and_survive_json(job: Job) -> None:
    for run in made_up_runs(Good(), job):
        assert run.measured.keys() == Good.quantities
        assert Run.read(json.loads(json.dumps(run.to_dict())), base=job.workload.base) == run


def test_two_devices_share_twice_the_batch(job: Job) -> None:
    two = on_two_devices(job)
    assert (two.cluster.world_size, two.workload.training.global_batch, two.micro_batch) == (2, 8, 4)


class Hoarder(Good):
    """Learns, and forgets nothing."""

    mean_ = 1.0

    def fit(self, runs: Iterable[Run]) -> Self:
        self.mean_ = max(self.mean_, *(run.measured["step_time_s"] for run in runs))
        return self

    def estimate(self) -> Estimate:
        return Estimate(self.mean_, self.mean_, self.mean_)


def test_what_is_not_forgotten_is_told(job: Job) -> None:
    with pytest.raises(
        AssertionError, match=r"^good: without its families, what was learned before still tells"
    ):
        check_forgets(Hoarder(), job)
