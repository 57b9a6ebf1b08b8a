"""One engine for every plan: what holds on one device holds on many, and what is forecast is what is learned
from."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

import golden
from foretrain import predictors
from foretrain.errors import InputError
from foretrain.forecast import Forecast
from foretrain.job import Job, Run
from foretrain.predictors.deletepop import DeletePopPredictor
from foretrain.predictors.scaledl import ScaleDLPredictor
from foretrain.report import html, to_json, write_trace
from foretrain.report.breakdown import What, breakdown
from foretrain.step.graph import step_graph
from foretrain.step.timeline import Timeline

LLAMA = {
    "source": "transformers",
    "task": "causal-lm",
    "config": {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 1024,
    },
}


def job(cluster: dict[str, Any] | None = None, plan: dict[str, Any] | None = None, **training: Any) -> Job:
    given = {"global_batch": 16, "sequence": 256, "precision": "bf16", "optimizer": "adamw", **training}
    cluster = cluster or {"device": "h200"}
    return Job.read({"model": LLAMA, "training": given, "cluster": cluster, "plan": plan or {}})


@functools.cache
def forecast(plan: str) -> Forecast:
    return predictors.get().predict(golden.jobs()[plan])


PLANS = (
    "recompute full",
    "DDP in a node",
    "ZeRO 3",
    "tensor",
    "pipeline, gpipe",
    "experts",
    "four CPU workers",
)


@pytest.mark.parametrize("what", ["phase", "operator", "layer"])
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_is_broken_down(plan: str, what: What) -> None:
    rows = breakdown(forecast(plan), what)
    assert sum(row.share for row in rows) == pytest.approx(1.0)
    assert json.loads(to_json(forecast(plan), what))["breakdown_s"][what]


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_has_a_trace_and_a_page(plan: str, tmp_path: Path) -> None:
    assert write_trace(forecast(plan), tmp_path / "trace.json") > 10
    page = html.page(forecast(plan))
    assert "Timeline of a step" in page
    assert "Where the device time of a step goes" in page


def test_layers_that_were_not_traced_appear_under_their_own_names() -> None:
    layers = forecast("tensor").inside("layers").by("layer")
    numbers = {path.split(".")[2] for path in layers if path.startswith("model.layers.")}
    assert numbers == {str(i) for i in range(8)}


def test_the_view_by_operator_ends_with_the_last_slot_where_parameters_are_fetched() -> None:
    view = Timeline.of(forecast("ZeRO 3").inside("view"))
    computed = [slot.end_s for slot in view.slots if slot.lane == "compute"]
    assert view.stream.end.max() == pytest.approx(max(computed), rel=0.05)


def test_what_a_step_goes_to_adds_up_on_every_plan() -> None:
    for plan in PLANS:
        step = forecast(plan).inside("causes")
        assert sum(step.causes_s.values()) == pytest.approx(step.time_s)
        assert step.device_busy_s <= step.time_s


# Recomputation and offload


def test_recomputation_runs_the_forward_pass_again_and_holds_less() -> None:
    plain, full = (DeletePopPredictor().predict(job(plan=plan)) for plan in ({}, {"recompute": "full"}))
    forward = plain.inside("calls").layout.graph.phase_index == 0
    kernels = plain.inside("calls").layout.calls.kernels[forward].sum()
    assert plain["kernels"].median < full["kernels"].median < plain["kernels"].median + kernels
    assert full["peak_memory_bytes"].median < plain["peak_memory_bytes"].median
    assert full["peak_memory_bytes"].median > plain.memory_by_category["weights"] * 3
    assert full["device_busy_s"].median > 1.1 * plain["device_busy_s"].median


def test_an_offloaded_optimizer_leaves_its_state_on_the_host() -> None:
    plain, offloaded = (DeletePopPredictor().predict(job(plan=plan)) for plan in ({}, {"offload": True}))
    assert plain.memory_by_category["optimizer_state"] > 0
    assert offloaded.memory_by_category["optimizer_state"] == 0
    assert offloaded["device_busy_s"].median < plain["device_busy_s"].median


@pytest.mark.parametrize("plan", [{"recompute": "full"}, {"offload": True}])
def test_inference_has_nothing_to_compute_again_or_to_update(plan: dict[str, Any]) -> None:
    plain, planned = (DeletePopPredictor().predict(job(plan=one, mode="infer")) for one in ({}, plan))
    assert planned["step_time_s"].median == pytest.approx(plain["step_time_s"].median)
    assert planned["peak_memory_bytes"].median == pytest.approx(plain["peak_memory_bytes"].median)


def test_a_corrected_step_is_never_busier_than_long() -> None:
    step = DeletePopPredictor().step(job(global_batch=64)).scaled(0.5)
    assert step.device_busy_s <= step.time_s


# What is forecast is what is learned from


@pytest.mark.parametrize("training", [{"compile": True}, {}])
def test_a_calibration_sees_the_graph_that_is_forecast(training: dict[str, Any]) -> None:
    jobs = [job(global_batch=batch, sequence=1024, **training) for batch in (256, 320, 384, 448)]
    plain = [DeletePopPredictor().predict(one)["step_time_s"].median for one in jobs]
    runs = [
        Run(job=one, measured={"step_time_s": 1.3 * time_s}) for one, time_s in zip(jobs, plain, strict=True)
    ]
    fitted = DeletePopPredictor().fit(runs)
    for one, time_s in zip(jobs, plain, strict=True):
        assert fitted.predict(one)["step_time_s"].median == pytest.approx(1.3 * time_s, rel=0.03)


def test_runs_of_one_device_and_of_many_are_not_corrected_twice() -> None:
    alone = [job({"device": "h100"}, global_batch=batch, sequence=1024) for batch in (64, 96, 128)]
    many = [
        job({"node": "dgx-h100", "devices_per_node": 4}, global_batch=4 * batch) for batch in (64, 96, 128)
    ]
    times = [DeletePopPredictor().predict(one)["step_time_s"].median for one in (*alone, *many)]
    measured = [1.5 * time_s for time_s in times]
    runs = [
        Run(job=one, measured={"step_time_s": time_s})
        for one, time_s in zip((*alone, *many), measured, strict=True)
    ]
    fitted = DeletePopPredictor().fit(runs)
    forecasts = [fitted.predict(one)["step_time_s"].median for one in (*alone, *many)]
    assert forecasts == pytest.approx(measured, rel=0.08)


def test_the_host_of_a_named_node_counts_once_in_a_calibrated_forecast() -> None:
    """Small steps are bound by the host; runs that are as forecast leave it alone."""
    jobs = [
        job({"node": "dgx-1-v100", "devices_per_node": 1}, global_batch=batch, sequence=64)
        for batch in (1, 2, 4)
    ]
    runs = [
        Run(job=one, measured={"step_time_s": DeletePopPredictor().predict(one)["step_time_s"].median})
        for one in jobs
    ]
    fitted = DeletePopPredictor().fit(runs)
    for run in runs:
        assert fitted.predict(run.job)["step_time_s"].median == pytest.approx(
            run.measured["step_time_s"], rel=0.05
        )


def test_every_white_box_predictor_sees_the_host_of_a_named_node() -> None:
    slow = {"node": "dgx-1-v100", "devices_per_node": 1}
    for predictor in (predictors.get("roofline"), DeletePopPredictor(), ScaleDLPredictor()):
        named = predictor.predict(job(slow, global_batch=1, sequence=64))
        alone = predictor.predict(job({"device": "v100-sxm-16gb"}, global_batch=1, sequence=64))
        assert named["step_time_s"].median > 1.1 * alone["step_time_s"].median


def test_compiled_steps_have_fewer_calls_in_the_one_graph_that_all_use() -> None:
    assert len(step_graph(job(compile=True)).ops) < len(step_graph(job()).ops)


def test_a_calibration_of_held_out_devices_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    many = job({"node": "dgx-h100", "devices_per_node": 2})
    time_s = DeletePopPredictor().predict(many)["step_time_s"].median
    fitted = DeletePopPredictor().fit([Run(job=many, measured={"step_time_s": 2 * time_s})])
    assert fitted.calibrations_
    shipped = fitted.costs
    monkeypatch.setattr("foretrain.costs.fitting.fit_costs", lambda _operators, *_: shipped)
    forgetful = fitted.without(devices=frozenset({"h100-sxm-80gb"}))
    assert forgetful.calibrations_ == {}
    assert forgetful.predict(many)["step_time_s"].median == pytest.approx(time_s, rel=0.02)


@pytest.mark.parametrize(
    ("device", "precision", "said"),
    [
        (
            "v100-sxm-32gb",
            "amp-bf16",
            "v100-sxm-32gb has no bf16 rate in the catalogue: products are costed at its fp32",
        ),
        ("p100-sxm-16gb", "fp16", "p100-sxm-16gb has no fp16 rate"),
        ("t4", "tf32", "t4 has no tf32 rate"),
        ("v100-sxm-32gb", "amp-fp16", None),
        ("h200", "fp8", None),
        ("v100-sxm-32gb", "fp32", None),
    ],
)
def test_a_number_format_that_a_device_lacks_is_said(device: str, precision: str, said: str | None) -> None:
    notes = predictors.get().predict(job({"device": device}, precision=precision)).assumptions
    assert any(said is not None and said in note for note in notes) == (said is not None)
    assert any("rate in the catalogue" in note for note in notes) == (said is not None)


@pytest.mark.parametrize("device", ["a100-sxm-80gb", "mi250", "v100-sxm-32gb"])
def test_fp8_is_refused_where_there_are_no_units_for_it(device: str) -> None:
    with pytest.raises(InputError, match=f"training.precision: 'fp8' cannot run on {device}"):
        job({"device": device}, precision="fp8")
