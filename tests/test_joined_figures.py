"""Figures of resources beside a joined forecast: learned where runs have them and left-out ones bear it out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from foretrain import predictors
from foretrain.errors import InputError
from foretrain.job import Job
from foretrain.predictors.base import Table
from foretrain.predictors.checks import check_predictor
from foretrain.predictors.deletepop import DeletePopPredictor
from foretrain.predictors.driple.features import TARGETS, TWELVE
from foretrain.predictors.driple.predictor import DriplePredictor
from foretrain.predictors.joined import figures
from foretrain.predictors.joined.figures import learn_figures, with_figures
from foretrain.predictors.joined.predictor import JoinedPredictor, Joining
from foretrain.run import Run

MODELS = """
import torch

def net(batch, depth=2):
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(depth)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 10)), (torch.zeros(batch, 64),)

a = b = c = d = e = net
"""
JOINING = Joining(predictors=("ernest", "driple"), folds=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("joined_figures")
    (made / "models.py").write_text(MODELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETRAIN_CACHE", str(made / "cache"))
        yield made


def job(base: Path, kind: str = "a", depth: int = 1, workers: int = 2) -> Job:
    return Job.read(
        {
            "model": {"source": "python", "name": f"models.py:{kind}", "args": {"depth": depth}},
            "training": {"global_batch": 8 * workers},
            "cluster": {"device": "cpu", "devices_per_node": workers, "cores_per_device": 1},
        },
        base=base,
    )


def run(one: Job, busy: float) -> Run:
    """A run that was busy so much, with all figures of a window of two seconds."""
    known = {name: 0.5 if name.endswith("_s") else 1e7 if "network" in name else busy for name in TWELVE}
    measured = {"step_time_s": 0.01 * one.cluster.world_size, "device_utilization": busy}
    window = {"figures": known, "series": {"ends_s": [1.0, 2.0]}, "network_shared_by": 1}
    return Run(job=one, measured=measured, provenance={"resources": window})


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[Run]:
    """Deeper networks are busier."""
    return [run(job(folder, kind, depth), 0.2 + 0.2 * depth) for kind in "abcde" for depth in (1, 3)]


@pytest.fixture(scope="module")
def learned(runs: list[Run]) -> JoinedPredictor:
    return JoinedPredictor(joining=JOINING).fit(runs)


def test_it_keeps_what_the_interface_promises(runs: list[Run], folder: Path) -> None:
    check_predictor(JoinedPredictor(joining=JOINING), job(folder), runs)


def test_a_forecast_has_the_figures_beside_the_time(learned: JoinedPredictor, folder: Path) -> None:
    forecast = learned.predict(job(folder))
    assert forecast["step_time_s"].median == pytest.approx(0.02, rel=0.3)
    assert set(TWELVE) <= set(forecast.quantities)
    assert set(TARGETS) <= learned.quantities
    busy = [learned.predict(job(folder, depth=depth))["device_utilization"].median for depth in (1, 3)]
    assert busy[0] < busy[1]


def test_the_report_says_what_the_figures_are_worth(learned: JoinedPredictor) -> None:
    *_, how, table = learned.report()
    assert how == "cpu: left out in turn, 10 runs were forecast with these mean errors"
    assert isinstance(table, Table)
    assert table.rows[-1][0] == "mean"


def test_a_folder_keeps_the_figures(learned: JoinedPredictor, folder: Path, tmp_path: Path) -> None:
    learned.save(tmp_path)
    again = predictors.get(tmp_path)
    assert again.predict(job(folder)).quantities == learned.predict(job(folder)).quantities


def test_what_speaks_for_the_time_keeps_its_own_figures(learned: JoinedPredictor, folder: Path) -> None:
    assert learned.figures_ is not None
    plain = DeletePopPredictor().predict(job(folder))
    both = with_figures(plain, learned.figures_)
    assert both.quantities.items() >= plain.quantities.items()
    assert "device_utilization_peak" in set(both.quantities) - set(plain.quantities)


def test_few_runs_with_figures_tell_nothing(runs: list[Run]) -> None:
    bare = [dataclasses.replace(one, provenance={}) for one in runs]
    assert learn_figures([*runs[:7], *bare], frozenset(), frozenset()) == (None, ())


def test_figures_that_left_out_runs_do_not_bear_out_are_not_given(
    runs: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "_gains", lambda checks: False)
    monkeypatch.setattr(DriplePredictor, "fit", lambda self, given: self)
    found, (line,) = learn_figures(runs, frozenset(), frozenset())
    assert found is None
    assert line == (
        "not joined: driple: tailored to 10 runs it is no better on left-out ones than as it comes"
    )


def test_why_figures_could_not_be_learned_is_told(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: DriplePredictor, given: Iterable[Run]) -> DriplePredictor:
        raise InputError("runs: none will do")

    monkeypatch.setattr(DriplePredictor, "fit", refuse)
    assert learn_figures(runs, frozenset(), frozenset()) == (
        None,
        ("not joined: driple: runs: none will do",),
    )


def test_what_is_to_be_forgotten_is_not_tailored(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[frozenset[str]] = []

    def forget(self: DriplePredictor, families: frozenset[str], devices: frozenset[str]) -> DriplePredictor:
        asked.append(families)
        return self

    monkeypatch.setattr(DriplePredictor, "without", forget)
    monkeypatch.setattr(DriplePredictor, "fit", lambda self, given: self)
    found, _ = learn_figures(runs, frozenset({"resnet"}), frozenset())
    assert found is not None
    assert found.learned_ is None
    assert asked == [frozenset({"resnet"})]


def test_it_is_only_there_where_it_is_asked_for(runs: list[Run], folder: Path) -> None:
    alone = JoinedPredictor(joining=Joining(predictors=("ernest",), folds=2)).fit(runs)
    assert not set(TWELVE) & set(alone.predict(job(folder)).quantities)
