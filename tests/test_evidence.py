"""What measured runs say of a forecast, and what predictors say side by side."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from commands import run
from foretrain import predictors
from foretrain.errors import InputError
from foretrain.forecast import Estimate, Forecast
from foretrain.job import Job
from foretrain.predictors.base import EVIDENCE, Predictor
from foretrain.predictors.evidence import Evidence, Outcome, with_evidence
from foretrain.predictors.likeness import FIELDS, SIZES, Key, describe
from foretrain.predictors.records import Record, Records, shipped
from foretrain.predictors.side_by_side import PredictorAnswer, SideBySide
from foretrain.run import Run

LIKE = {
    "weights": {**dict.fromkeys(FIELDS, 0.1), **dict.fromkeys(SIZES, 0.05)},
    "far_from": 0.35,
    "holds_beyond": 0.5,
}


def job(model: str = "resnet50", batch: int = 64, device: str = "h200", **training: Any) -> Job:
    return Job.read({
        "model": {"source": "timm", "name": model},
        "training": {"global_batch": batch, **training},
        "cluster": {"device": device},
    })  # fmt: skip


def record(
    of: Job, error: float, inside: float = 1.0, source: str = "ours", by: str = "deletepop", **more: Any
) -> Record:
    key = Key.of(of)
    outcomes = {by: Outcome(error=error, inside=inside)}
    return Record(source=source, about=describe(of), low=key, high=key, outcomes=outcomes, **more)


def table(*records: Record, **facts: Any) -> Records:
    return Records.of(records, LIKE, **facts)


def known(records: Records, asked: Job) -> Evidence:
    found = records.nearest(Key.of(asked), "deletepop")
    assert found is not None
    return found


def test_the_nearest_run_comes_first_with_measured_and_predicted() -> None:
    records = table(
        record(job(batch=512), 0.4),
        record(job(batch=32), -0.1, measured={"step_time_s": 0.02}),
        record(job("vgg16", precision="bf16"), 0.9),
    )
    found = known(records, job())
    first = found.nearest[0]
    assert first.about == "resnet50 batch 32 fp32 on h200-sxm-141gb"
    assert first.distance == pytest.approx(0.05 * np.log(2))
    assert first.differs == ("micro batch 64, measured 32",)
    assert first.predicted == pytest.approx(0.018)
    assert (found.is_far, found.runs) == (False, 3)
    assert found.line == (
        "nearest measured: resnet50 batch 32 fp32 on h200-sxm-141gb: 10% off (3 runs like it, median error 40%)"
    )


def test_a_job_far_from_all_is_flagged_with_what_differs() -> None:
    records = table(record(job(), 0.05))
    found = known(records, job("llama", device="t4", precision="fp16", mode="infer"))
    assert found.is_far
    assert found.runs == 0
    assert "but far from this job" in found.line
    flag = found.flag
    assert flag is not None
    assert "device t4, measured h200-sxm-141gb" in flag
    forecast = Forecast(job=job(), predictor="deletepop", quantities={"step_time_s": Estimate(1, 1, 1)})
    for evidence, notes in ((found, (flag,)), (known(records, job()), ()), (None, ())):
        predictor = cast(Predictor, SimpleNamespace(knows=lambda _, told=evidence: told))
        assert with_evidence(forecast, predictor).assumptions == notes


def test_many_devices_are_far_from_one_by_their_link_and_bandwidth() -> None:
    def cpus(nodes: int, link: str) -> Job:
        return Job.read({
            "model": {"source": "torchvision", "name": "vgg11"}, "training": {"global_batch": 16 * nodes},
            "cluster": {"device": "cpu", "cores_per_device": 1, "nodes": nodes, "inter_node": link},
        })  # fmt: skip

    records = shipped()
    near, middle, far = (
        records.nearest(Key.of(cpus(*asked)), "deletepop")
        for asked in ((4, "1 Gbit/s"), (128, "1 Gbit/s"), (128, "10 Mbit/s"))
    )
    assert near is not None
    assert middle is not None
    assert far is not None
    assert near.nearest[0].distance < middle.nearest[0].distance < far.nearest[0].distance
    assert (near.is_far, far.is_far) == (False, True)
    assert far.flag is not None
    assert "bandwidth 1.25 M" in far.flag


def test_a_kind_of_runs_spans_its_sizes_and_weighs_as_many() -> None:
    low, high = Key.of(job(batch=16)), Key.of(job(batch=256))
    kind = Record(
        source="public", about="resnet fp32", low=low, high=high, runs=9,
        outcomes={"deletepop": Outcome(error=0.2, inside=0.7)},
    )  # fmt: skip
    found = known(table(kind, record(job(batch=64), 0.9, 0.0)), job(batch=64))
    assert [one.distance for one in found.nearest] == [0.0, 0.0]
    assert found.median_error == pytest.approx(0.2)
    assert found.coverage == pytest.approx(0.63)
    assert found.nearest[0].measured is None


def test_records_come_back_from_a_file(tmp_path: Path) -> None:
    records = table(record(job(), 0.05, measured={"step_time_s": 0.1}), left_out={"deletepop": ["ours"]})
    records.save(tmp_path / EVIDENCE)
    again = known(Records.read(tmp_path / EVIDENCE), job())
    assert again == known(records, job())
    assert again.nearest[0].left_out


def test_the_shipped_table_knows_each_predictor_that_ships_something() -> None:
    document = shipped().document
    assert {"deletepop", "roofline", "scaledl", "predictddl", "driple"} <= document["outcomes"].keys()
    assert set(document["weights"]) == {*FIELDS, *SIZES}
    assert 0 < document["far_from"] < 2
    for name, sources in document["left_out"].items():
        assert name in predictors.names()
        assert sources
    count = len(document["about"])
    assert all(len(rows) == count for rows in document["outcomes"].values())
    measured = document["measured"]["step_time_s"]
    assert all((runs == 1 or value is None) for runs, value in zip(document["runs"], measured, strict=True))


@pytest.mark.parametrize(
    ("asked", "measured", "like"),
    [("mi300x", "h200", False), ("cpu", "h200", False), ("h200", "cpu", False), ("mi300x", "mi250", True)],
)
def test_devices_of_another_kind_are_never_like_one_another(asked: str, measured: str, like: bool) -> None:
    def on(device: str) -> Job:
        cores = {"cores_per_device": 1} if device == "cpu" else {}
        sections = job().to_dict()
        return Job.read({**sections, "cluster": {"device": device, **cores}, "plan": {}})

    found = known(table(record(on(measured), 0.05)), on(asked))
    assert found.is_far is not like
    assert found.nearest[0].differs[0].startswith("device ")


@pytest.mark.parametrize(
    ("predictor", "device", "others"), [("deletepop", "mi300x", "h200"), ("driple", "h200", "cpu")]
)
def test_runs_that_come_with_foretrain_are_like_those_of_their_own_kind(
    predictor: str, device: str, others: str
) -> None:
    found = shipped().nearest(Key.of(job(batch=32, device=device, image=224)), predictor)
    assert found is not None
    assert found.is_far or not [one.about for one in found.nearest if f" {others}" in one.about]


def test_what_was_learned_here_is_not_scored_by_what_was_shipped() -> None:
    made = predictors.get("ernest")
    forecast = Forecast(job=job(), predictor="ernest", quantities={"step_time_s": Estimate(1, 1, 1)})
    assert made.knows(forecast) is None
    other = predictors.get("deletepop")
    assert other.knows(forecast) is not None
    with pytest.raises(InputError):
        other.fit(())
    assert other.knows(forecast) is None


def test_evidence_does_not_outlive_the_fit_that_it_is_of(tmp_path: Path) -> None:
    runs = [Run(job=job(batch=batch), measured={"step_time_s": 0.01 * batch}) for batch in (4, 8, 16, 32)]
    forecast = Forecast(job=job(), predictor="ernest", quantities={"step_time_s": Estimate(1, 1, 1)})
    made = predictors.get("ernest").fit(runs)
    made.records_ = Records.of([record(job(), 0.5, by="ernest")], LIKE)
    assert made.knows(forecast) is not None
    made.save(tmp_path / "saved")
    again = predictors.get(str(tmp_path / "saved"))
    assert again.knows(forecast) is not None
    again.fit(runs)
    assert again.knows(forecast) is None
    again.save(tmp_path / "saved")
    assert not (tmp_path / "saved" / EVIDENCE).exists()
    assert predictors.get(str(tmp_path / "saved")).knows(forecast) is None


# Side by side


def entry(name: str, median: float, evidence: Evidence | None) -> PredictorAnswer:
    time = Estimate(median, 0.9 * median, 1.1 * median)
    forecast = Forecast(job=job(), predictor=name, quantities={"step_time_s": time}, evidence=evidence)
    return PredictorAnswer(predictor=name, forecast=forecast)


def test_predictors_that_know_a_job_and_disagree_are_told() -> None:
    near = known(table(*[record(job(), 0.1)] * 6), job())
    better = known(table(*[record(job(), 0.02)] * 6), job())
    far = known(table(record(job("llama", device="t4", mode="infer", precision="fp16"), 0.1)), job())
    one, two, stranger = (
        entry("deletepop", 1.0, near),
        entry("scaledl", 2.0, better),
        entry("roofline", 5.0, far),
    )
    agreeing = SideBySide(job=job(), entries=(one, entry("scaledl", 1.05, near)))
    assert agreeing.disagreements == []
    lines = SideBySide(job=job(), entries=(one, two, stranger)).disagreements
    assert lines[0] == (
        "deletepop (1 s [900 ms to 1.1 s]) and scaledl (2 s [1.8 s to 2.2 s]) both know such jobs and disagree "
        "beyond their intervals"
    )
    assert lines[1].endswith("roofline has no measured run like this job")
    assert len(lines) == 2
    why = SideBySide(job=job(), entries=(one, two, stranger)).why_default
    assert "scaledl was closer: 2% on 6 runs" in why
    unknown = SideBySide(job=job(), entries=(dataclasses.replace(stranger, predictor="deletepop"), two))
    assert "but scaledl knows such jobs" in unknown.why_default


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORETRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tiny.py").write_text(
        "import torch\n\ndef make(batch):\n    return torch.nn.Linear(48, 8), (torch.zeros(batch, 48),)\n"
    )
    (tmp_path / "job.json").write_text(json.dumps({
        "model": {"source": "python", "name": "tiny.py:make"},
        "training": {"global_batch": 4, "steps": 10},
        "cluster": {"device": "h200"},
    }))  # fmt: skip
    return tmp_path / "job.json"


def test_predict_shows_evidence_in_a_line_and_in_full(tiny: Path) -> None:
    short = run("predict", str(tiny)).stdout
    assert "nearest measured: " in short
    full = run("predict", str(tiny), "--evidence").stdout
    assert "nearest measured runs" in full
    document = json.loads(run("predict", str(tiny), "--json").stdout)
    assert document["evidence"]["nearest"][0]["run"]
    assert {"far", "median_error", "coverage", "runs"} <= document["evidence"].keys()


def test_compare_asks_every_predictor(tiny: Path) -> None:
    text = run("predict", str(tiny), "--compare").stdout
    assert all(f"{name}" in text for name in predictors.names())
    assert "ernest: refuses: " in text
    shown = run("predict", str(tiny)).stdout
    (reserved,) = (line.split()[1:3] for line in shown.splitlines() if line.startswith("reserved "))
    head, row = (
        next(line for line in text.splitlines() if word in line) for word in ("predictor  ", "deletepop  ")
    )
    assert row[head.index("reserved") :].split()[:2] == reserved
    assert "deletepop is the default: " in text
    document = json.loads(run("predict", str(tiny), "--predictor", "all", "--json").stdout)
    assert {one["predictor"] for one in document["predictors"]} == set(predictors.names())
    assert {"default", "why_default", "disagreements"} <= document.keys()
    by_name = {one["predictor"]: one for one in document["predictors"]}
    assert by_name["deletepop"]["forecast"]["evidence"]["nearest"]
    assert "refusal" in by_name["ernest"]


@pytest.mark.parametrize("more", [["--trace", "t.json"], ["--predictor", "roofline"], ["--evidence"]])
def test_compare_goes_alone(tiny: Path, more: list[str]) -> None:
    answer = run("predict", str(tiny), "--compare", *more)
    assert answer.exit_code == 2
    assert "--compare asks every predictor" in " ".join(answer.output.split())


def test_a_saved_predictor_keeps_the_runs_that_it_learned_from(tiny: Path, tmp_path: Path) -> None:
    lines = []
    for batch in (4, 8, 16, 32):
        sections = json.loads(tiny.read_text())
        sections["training"]["global_batch"] = batch
        lines.append(json.dumps({"job": sections, "measured": {"step_time_s": 0.001 * batch}}))
    (tmp_path / "runs.jsonl").write_text("\n".join(lines))
    assert run("fit", "ernest", str(tmp_path / "runs.jsonl"), "--out", str(tmp_path / "saved")).exit_code == 0
    document = json.loads(run("predict", str(tiny), "--predictor", str(tmp_path / "saved"), "--json").stdout)
    assert document["evidence"]["learned_from"]
    assert document["evidence"]["nearest"][0]["measured"] == pytest.approx(0.004)
    (tmp_path / "saved" / EVIDENCE).unlink()
    text = run("predict", str(tiny), "--predictor", str(tmp_path / "saved"), "--evidence").stdout
    assert "no evidence kept" in text


def test_a_run_is_told_in_a_few_words() -> None:
    assert describe(job(precision="amp-bf16", compile=True, image=224)) == (
        "resnet50 batch 64 image 224 amp-bf16 compiled on h200-sxm-141gb"
    )
