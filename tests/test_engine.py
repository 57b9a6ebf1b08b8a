"""One engine for every plan: what holds on one device holds on many, and what is forecast is what is learned
from."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import golden
from foretrain import predictors
from foretrain.costs.host import PLAIN_HOST
from foretrain.costs.roofline import Roofline
from foretrain.errors import InputError
from foretrain.forecast import Forecast
from foretrain.graph.fusion import Fusion, fuse
from foretrain.job import Job
from foretrain.plan import Plan
from foretrain.predictors.deletepop import DeletePopPredictor
from foretrain.predictors.recomputation import with_recomputation
from foretrain.predictors.scaledl import ScaleDLPredictor
from foretrain.report import to_json, write_trace
from foretrain.report.breakdown import What, breakdown
from foretrain.run import Run
from foretrain.step.exchange import sent_bytes
from foretrain.step.graph import step_graph
from foretrain.step.layout import lay_out
from foretrain.step.partition import blocks
from foretrain.step.passes import not_kept
from foretrain.step.pipeline import StageWork, play_pipeline
from foretrain.step.play import OUTSIDE, Step
from foretrain.step.schedules import FORWARD_ONLY
from foretrain.step.spans import total
from foretrain.step.timeline import StepUse, Timeline
from foretrain.web.details import details
from made_up import made_up

LLAMA: dict[str, Any] = {
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
    drawn = details(forecast(plan), fine=True)
    assert drawn["timeline"]["start"]
    assert sum(drawn["parts"]["seconds"]) == pytest.approx(
        sum(forecast(plan).inside("parts").by("phase").values())
    )


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


EVERY_PLAN = (
    *PLANS,
    *("accumulation", "offload", "inference", "AdaptDL", "ZeRO 2", "tensor and sequence, Megatron"),
    *("pipeline, 1f1b, nanotron", "pipeline, interleaved, Megatron", "parameter servers", "context"),
)


@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_the_use_over_a_step_adds_up_to_what_is_forecast(plan: str) -> None:
    found, step = forecast(plan), forecast(plan).inside("use")
    use = StepUse.of(step)
    lengths = np.diff(use.ends_s, prepend=0.0)
    assert use.time_s == pytest.approx(step.time_s)
    assert use.busy @ lengths == pytest.approx(found["device_busy_s"].median)
    assert (use.busy >= 0).all()
    assert use.busy.max() <= 1 + 1e-9
    sent = found["network_tx_bytes_per_s"].median if "network_tx_bytes_per_s" in found.quantities else 0.0
    assert use.sent_bytes_per_s @ lengths == pytest.approx(sent * step.time_s)
    busy, rate = use.sampled(np.linspace(0.0, 3 * step.time_s, 17)[1:])
    assert busy.mean() == pytest.approx(found["device_utilization"].median)
    assert rate.mean() == pytest.approx(sent)


@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_the_device_is_busy_in_the_parts_of_the_step_that_are_its_own(plan: str) -> None:
    step = forecast(plan).inside("causes")
    causes = step.causes_s
    exposed = causes["exposed communication"]
    on_cpu, servers = step.layout.job.cluster.device.is_cpu, step.layout.job.plan.servers
    works = (0.05 if servers else 0.2) if on_cpu else 1.0
    assert step.device_busy_s == pytest.approx(causes["computation"] + works * exposed)
    if len(step.layout.stages) == 1:
        assert sum(step.by("phase").values()) == pytest.approx(step.device_busy_s)


def test_what_does_not_fit_into_slots_is_in_the_use_of_many_micro_batches() -> None:
    zero3 = {"shard": "zero3", "micro_batch": 1}
    step = DeletePopPredictor().step(job({"node": "dgx-h100"}, zero3, global_batch=80, sequence=2048))
    assert step.time.repeated > 3
    assert max(slot.end_s for slot in step.time.slots) < 0.5 * step.time_s
    use = StepUse.of(step)
    busy, _ = use.sampled(np.linspace(0.0, step.time_s, 6)[1:])
    assert busy.min() > 0.8 * busy.max()


def test_workers_take_turns_at_servers_that_the_network_leads_to() -> None:
    """Their link is busy in their own turn alone; of one machine all exchange over the same."""
    spans = {}
    for nodes in (1, 4):
        cluster = {"device": "cpu", "cores_per_device": 1, "devices_per_node": 4 // nodes, "nodes": nodes}
        given = job(
            cluster, {"servers": 1}, global_batch=4, sequence=64, precision="fp32", framework="pytorch"
        )
        step = DeletePopPredictor().step(given)
        use = StepUse.of(step)
        sending = use.sent_bytes_per_s > 0.1 * use.sent_bytes_per_s.max()
        spans[nodes] = float(np.diff(use.ends_s, prepend=0.0)[sending].sum())
        assert use.sent_bytes_per_s @ np.diff(use.ends_s, prepend=0.0) == pytest.approx(step.sent_bytes)
        assert step.causes_s["exposed communication"] == pytest.approx(spans[nodes] * nodes, rel=0.05)


# What a rank sends


def _elements(step: Step, *, expert: bool = False) -> int:
    return sum(w.elements for stage in step.layout.stages for w in stage.weights if w.expert == expert)


def test_frozen_parameters_have_no_gradients_to_send() -> None:
    step = forecast("DDP in a node").inside("bytes")
    (stage,) = step.layout.stages
    (blocks,) = stage.chunks
    frozen = tuple(
        dataclasses.replace(
            block, weights=tuple(dataclasses.replace(w, trainable=False) for w in block.weights)
        )
        for block in blocks[:-1]
    )
    partly_trained = dataclasses.replace(stage, chunks=((*frozen, blocks[-1]),))
    layout = dataclasses.replace(step.layout, stages=(partly_trained,))
    share = sum(w.elements for w in blocks[-1].weights) / _elements(step)
    assert sent_bytes(layout, partly_trained)["replicas"] == pytest.approx(share * step.sent["replicas"])


def test_gradients_of_experts_are_sent_to_those_that_hold_the_same_experts() -> None:
    step = forecast("experts, Megatron").inside("bytes")
    held, teams = _elements(step, expert=True), step.layout.teams
    assert teams.expert_data.size > 1
    assert step.sent["replicas"] > 2 * held * (teams.expert_data.size - 1) / teams.expert_data.size


def test_recomputed_collectives_are_sent_again() -> None:
    """Two sums forward, five backward in torch's plans, and of the forward pass the first one once more:
    torch's recomputation ends before the last product."""
    plans = ({"tensor": 4}, {"tensor": 4, "recompute": "full"})
    plain, again = (DeletePopPredictor().step(job({"node": "dgx-h100"}, plan)) for plan in plans)
    assert again.sent["team"] == pytest.approx(8 / 7 * plain.sent["team"], rel=0.03)


def test_every_chunk_of_an_interleaved_stage_sends_what_the_next_one_reads() -> None:
    plan = {"pipeline": 2, "micro_batch": 1, "data": 4}
    chunks = {"schedule": "interleaved", "virtual_stages": 3}
    once, often = (
        DeletePopPredictor().step(job({"node": "dgx-h100"}, {**plan, **more})) for more in ({}, chunks)
    )
    assert often.sent["stages"] == pytest.approx(5 * once.sent["stages"])


def test_parameter_servers_get_each_gradient_once_and_no_gpu_works_meanwhile() -> None:
    cluster = {"node": "g4dn.12xlarge", "nodes": 2}
    step = DeletePopPredictor().step(job(cluster, {"servers": 2}, precision="fp32", global_batch=64))
    assert step.sent["replicas"] == pytest.approx(4 * _elements(step))
    assert step.causes_s["exposed communication"] > 0.01 * step.time_s
    assert step.device_busy_s == pytest.approx(step.causes_s["computation"])


def test_the_hosts_part_of_an_optimizer_is_not_communication_of_a_pipeline() -> None:
    two = {"device": "h100", "devices_per_node": 2}
    step = DeletePopPredictor().step(job(two, {"pipeline": 2, "micro_batch": 1}))
    work = step.works[step.busiest]
    assert work.optimizer.alone_s > 1.5 * work.optimizer.device_s
    assert step.time.exposed_s < 2e-4  # messages between the stages


# Accumulation, recomputation and offload


def test_the_host_issues_a_step_no_sooner_than_the_device_answers_it() -> None:
    """A gradient scaler asks whether gradients are finite, after the backward pass."""
    plain, asked = (
        DeletePopPredictor().step(job(precision="amp-fp16", grad_scaler=scales)) for scales in (False, True)
    )
    passes = total([*asked.works[0].forward, *asked.works[0].backward[::-1]])
    assert asked.host_issue_s > passes.alone_s
    assert asked.host_issue_s > plain.host_issue_s
    assert asked.time_s > plain.time_s


def test_the_first_micro_batch_hands_its_gradients_over_and_the_others_add_to_them() -> None:
    layout = DeletePopPredictor().layout(job(plan={"micro_batch": 4}))
    adds = layout.graph.adds_to_gradients
    trained = sum(weight.trainable for weight in layout.graph.weights) or 6 * 9 + 3
    assert len(adds) == trained
    assert layout.calls.kernels[adds].sum() * 4 == pytest.approx(trained * 3, rel=0.02)
    nanotron, megatron = (
        DeletePopPredictor().layout(job(plan={"micro_batch": 4}, framework=framework))
        for framework in ("nanotron", "megatron")
    )
    assert nanotron.calls.kernels[nanotron.graph.adds_to_gradients].min() == 1.0
    assert len(megatron.graph.adds_to_gradients) == 0, "its products add them up"


def test_recomputation_runs_the_forward_pass_again_and_holds_less() -> None:
    plain, full = (DeletePopPredictor().predict(job(plan=plan)) for plan in ({}, {"recompute": "full"}))
    forward = plain.inside("calls").layout.graph.phase_index == 0
    kernels = plain.inside("calls").layout.calls.kernels[forward].sum()
    assert plain["kernels"].median < full["kernels"].median < plain["kernels"].median + kernels
    assert full["peak_memory_bytes"].median < plain["peak_memory_bytes"].median
    assert full["peak_memory_bytes"].median > plain.memory_by_category["weights"] * 3
    assert full["device_busy_s"].median > 1.1 * plain["device_busy_s"].median


def recomputed(plan: dict[str, Any]) -> tuple[int, list[str]]:
    """How many layers compute something again, and the operators of the first of them that do."""
    again = [op for op in step_graph(job(plan=plan)).ops if op.recomputed and op.operator.launches]
    layers = sorted({op.layer.split(".")[2] for op in again})
    names = [op.operator.name for op in again if op.layer.startswith(f"model.layers.{layers[0]}")]
    return len(layers), names


def test_one_device_runs_the_checkpoints_of_the_library_itself() -> None:
    plans: tuple[dict[str, Any], ...] = (
        {"recompute": "full"},
        {"recompute": "full", "recompute_every": 2},
        {"recompute": "operators"},
    )
    (all_layers, full), (half, same), (by_operators, fewer) = map(recomputed, plans)
    assert (all_layers, half, by_operators) == (6, 3, 6)
    assert same == full
    assert full.count("mm") == 6  # of seven products the last is not asked for
    assert fewer.count("mm") == 3  # q, v, gate and down are kept
    assert [name for name in full if "attention" in name]
    assert not [name for name in fewer if "attention" in name]


@pytest.mark.parametrize("cluster", [{"device": "h200"}, {"device": "h200", "devices_per_node": 4}])
def test_fewer_recomputed_layers_hold_more_and_take_less(cluster: dict[str, Any]) -> None:
    plans: list[dict[str, Any]] = [
        {}, {"recompute": "full", "recompute_every": 3}, {"recompute": "full", "recompute_every": 2},
        {"recompute": "full"},
    ]  # fmt: skip
    found = [DeletePopPredictor().predict(job(cluster, plan)) for plan in plans]
    kernels = [one["kernels"].median for one in found]
    assert kernels == sorted(set(kernels))
    assert kernels[2] - kernels[0] == pytest.approx((kernels[3] - kernels[0]) / 2, rel=0.02)
    peaks = [one["peak_memory_bytes"].median for one in found]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > peaks[2] > peaks[3]


def test_hooks_of_checkpoints_take_the_time_of_the_host() -> None:
    layout = DeletePopPredictor().layout(job(plan={"recompute": "full"}))
    hooks = sum(op.hooks for op in layout.graph.ops)
    assert hooks > 6 * 3 * 20  # six layers that save more than twenty tensors each
    without = dataclasses.replace(PLAIN_HOST, hook_s=0.0)
    with_hooks, bare = (lay_out(layout.job, Roofline(), host) for host in (PLAIN_HOST, without))
    more_s = float(with_hooks.calls.host_s.sum() - bare.calls.host_s.sum())
    assert more_s == pytest.approx(hooks * PLAIN_HOST.hook_s)
    fused = fuse(layout.graph, Fusion(norms=True, chains=True))
    assert len(fused.ops) < len(layout.graph.ops)
    assert sum(op.hooks for op in fused.ops) == hooks


def test_a_forecast_says_what_recomputation_saves_and_costs() -> None:
    predictor = DeletePopPredictor()
    plain, full = (predictor.predict(job(plan=plan)) for plan in ({}, {"recompute": "full"}))
    found = with_recomputation(full, predictor).recomputation
    assert found is not None
    assert found.saved_bytes == plain["peak_memory_bytes"].median - full["peak_memory_bytes"].median > 0
    assert found.added_s == full["step_time_s"].median - plain["step_time_s"].median
    assert [layer.name for layer in found.layers] == [f"model.layers.{i}" for i in range(6)]
    seconds = sum(layer.recomputed_s for layer in found.layers)
    assert seconds == pytest.approx(full.inside("phases").by("phase")["recomputed"])
    hidden = 16 * 256 * 256 * 2  # bytes of a layer's input, which is all that it keeps
    kept = [block.piece.kept_bytes for block in blocks(plain.inside("graph").layout.graph) if block.is_layer]
    assert found.layers[2].saved_bytes == pytest.approx(kept[2] - hidden, rel=0.01)
    text = str(with_recomputation(full, predictor))
    assert "recomputation" in text
    assert "each of 6" in text
    assert with_recomputation(plain, predictor).recomputation is None
    plans = ({"pipeline": 2, "micro_batch": 1}, {"pipeline": 2, "micro_batch": 1, "recompute": "full"})
    staged = [
        predictor.predict(job({"node": "dgx-h100"}, plan, framework="megatron", global_batch=64))
        for plan in plans
    ]
    held = [max(rank.allocated_bytes for rank in one.ranks) for one in staged]
    found = with_recomputation(staged[1], predictor).recomputation
    assert found is not None
    assert found.saved_bytes == pytest.approx(held[0] - held[1])
    parts = predictor.predict(job(plan={"recompute": "selective", "recompute_modules": ["norms"]}))
    assert with_recomputation(parts, predictor).recomputation is not None


def test_a_program_of_several_passes_holds_less_with_recomputation(tmp_path: Path) -> None:
    """Of each pass its own is computed again, layer by layer, also where layers lie deep in a model."""
    text = """
import torch
from torch import nn
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.layers = nn.ModuleList(block() for _ in range(6))
    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
    def forward(self, x):
        return self.inner(x)
def main():
    model = Net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        for _ in range(2):
            model(torch.randn(8192, 64, device="cuda")).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
if __name__ == "__main__":
    main()
"""
    (tmp_path / "train.py").write_text(text)
    predictor = predictors.get("roofline")
    peaks = {}
    for recompute in ("none", "full"):
        asked = {
            "model": {"source": "python", "name": f"{tmp_path}/train.py"},
            "training": {"global_batch": 16384},
        }
        plan = {"recompute": recompute}
        forecast = predictor.predict(Job.read({**asked, "cluster": {"device": "a100"}, "plan": plan}))
        peaks[recompute] = forecast["peak_memory_bytes"].median
    found = with_recomputation(forecast, predictor).recomputation
    assert found is not None
    assert [layer.name for layer in found.layers] == [f"inner.layers.{i}" for i in range(6)]
    assert peaks["full"] < 0.6 * peaks["none"]


def test_the_softmax_of_a_loss_is_no_attention() -> None:
    from torch import nn, zeros

    from foretrain.capture import capture

    graph = capture(nn.Sequential(nn.Linear(8, 8), nn.LogSoftmax(-1)), zeros(4, 8))
    again = [not_kept(Plan(recompute="selective"), "attention", graph, block) for block in blocks(graph)]
    assert len(again) > 1
    assert not any(map(len, again))


def test_checkpoints_of_a_model_s_own_code_are_told_layer_by_layer(tmp_path: Path) -> None:
    """As those of a plan, but for the peak, which is not known without them."""
    text = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
class Net(nn.Module):
    def __init__(self, own):
        super().__init__()
        self.own = own
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(5))
    def forward(self, x):
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.own else block(x))
        return x
def build(batch, own):
    return Net(own), torch.zeros(batch, 64)
"""
    (tmp_path / "net.py").write_text(text)

    def found(own: bool, **how: Any) -> Any:
        model = {"source": "python", "name": f"{tmp_path}/net.py:build", "args": {"own": own}}
        training = {"global_batch": 4096, "compile": how.pop("compile", False)}
        asked = Job.read({"model": model, "training": training, "cluster": {"device": "a100"}, "plan": how})
        predictor = predictors.get("roofline")
        forecast = with_recomputation(predictor.predict(asked), predictor)
        return forecast.recomputation, str(forecast)

    (own, said), (planned, _) = found(True), found(False, recompute="full")
    assert own.layers == planned.layers
    assert len(own.layers) == 5
    assert own.saved_bytes is None
    assert own.added_s == pytest.approx(sum(layer.recomputed_s for layer in own.layers))
    assert "by the model" in said
    assert "by the model" in found(True, recompute="full")[1]
    graphs, _ = found(False, recompute="full", compile="reduce-overhead")
    assert graphs.saved_bytes > 1e6, "of what is reserved, where the passes' tensors lie in pools"


def test_a_model_without_layers_to_checkpoint_is_estimated_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n\ndef net(batch):\n"
        "    parts = (torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))\n"
        "    return torch.nn.Sequential(*parts), (torch.randn(batch, 8),)\n"
    )
    own = {"model": {"source": "python", "name": "net.py:net"}, "training": {"global_batch": 4}}
    asked = Job.read({**own, "cluster": {"device": "h200"}, "plan": {"recompute": "full"}}, base=tmp_path)
    found = DeletePopPredictor().predict(asked)
    assert any(note.startswith("plan.recompute: no checkpoint") for note in found.assumptions)
    assert found.inside("phases").by("phase")["recomputed"] > 0


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


def test_a_framework_that_serves_has_no_training_loop() -> None:
    layout = DeletePopPredictor().layout(job(mode="infer", framework="adaptdl"))
    assert layout.step_overhead_s == DeletePopPredictor().layout(job(mode="infer")).step_overhead_s
    assert layout.profile.host > 1


# Inference on several devices


def served(plan: dict[str, Any], devices: int = 1, **training: Any) -> Forecast:
    cluster = {"device": "h200", "devices_per_node": devices}
    asked = {"mode": "infer", "optimizer": "sgd", "global_batch": 16, **training}
    return DeletePopPredictor().predict(job(cluster, plan, **asked))


def collectives(found: Forecast) -> list[str]:
    layout = found.inside("collectives").layout
    calls = np.concatenate([stage.calls for stage in layout.stages])
    names = [layout.graph.ops[i].operator.name for i in calls[layout.calls.communicates[calls]].tolist()]
    return sorted(names)


@pytest.mark.parametrize(
    "plan",
    [{"tensor": 2}, {"pipeline": 2, "micro_batch": 2}, {"data": 2}, {"shard": "zero3"}, {"context": 2}],
)
def test_a_served_model_has_no_backward_pass_and_no_update_on_any_plan(
    plan: dict[str, Any], tmp_path: Path
) -> None:
    found = served(plan, 2)
    step = found.inside("served")
    assert set(step.by("phase")) <= {"forward", OUTSIDE}
    assert not {"backward_time_s", "optimizer_time_s"} & set(found.quantities)
    assert step.phases_s["backward"] == step.phases_s["optimizer"] == 0.0
    assert sum(step.causes_s.values()) == pytest.approx(step.time_s)
    held = [rank.by_category for rank in step.memory]
    assert all(not one.get("gradients") and not one.get("optimizer_state") for one in held)
    assert write_trace(found, tmp_path / "trace.json") > 10
    assert details(found)["timeline"]["start"]


def test_replicas_that_serve_run_as_one_device_does() -> None:
    alone, four = served({}), served({"data": 4}, 4, global_batch=64)
    for quantity in ("step_time_s", "kernels", "peak_memory_bytes", "reserved_memory_bytes"):
        assert four[quantity].median == pytest.approx(alone[quantity].median)
    assert four["samples_per_s"].median == pytest.approx(4 * alone["samples_per_s"].median)
    assert four["network_tx_bytes_per_s"].median == 0.0


def test_tensor_parallel_inference_sums_twice_per_layer_and_gathers_the_logits() -> None:
    found, trained = (
        served({"tensor": 2}, 2),
        DeletePopPredictor().predict(job({"device": "h200", "devices_per_node": 2}, {"tensor": 2})),
    )
    assert collectives(found) == ["all_gather", *["all_reduce"] * (1 + 2 * 6)]  # and one of the embedding
    assert "all_gather" not in collectives(trained)
    alone = served({})
    weights = found.memory_by_category["weights"]
    assert weights == pytest.approx(alone.memory_by_category["weights"] / 2, rel=0.01)
    assert weights < found["peak_memory_bytes"].median < alone["peak_memory_bytes"].median


def test_micro_batches_flow_through_the_stages_without_waiting_for_one_another() -> None:
    def stage(time_s: float) -> StageWork:
        return StageWork(forward_s=(time_s,), backward_s=(), tail_s=0.0)

    for stages, micro_batches in ((2, 1), (2, 8), (4, 3), (4, 64)):
        played = play_pipeline([stage(1.0)] * stages, micro_batches, 0.0, FORWARD_ONLY)
        assert played.time_s == pytest.approx(micro_batches + stages - 1)
        assert played.busiest_s == pytest.approx(micro_batches)
    slowest = play_pipeline([stage(1.0), stage(3.0), stage(1.0)], 5, 0.5, FORWARD_ONLY)
    assert slowest.time_s == pytest.approx(1.0 + 0.5 + 5 * 3.0 + 0.5 + 1.0)


def test_a_stage_that_serves_holds_its_weights_and_one_micro_batch() -> None:
    small, large = (served({"pipeline": 2, "micro_batch": size}, 2) for size in (2, 8))
    for found in (small, large):
        ranks = found.inside("memory").memory
        weights = sum(rank.by_category["weights"] for rank in ranks)
        assert weights == pytest.approx(served({}).memory_by_category["weights"], rel=0.01)
        assert all(rank.by_category["activations"] == 0.0 for rank in ranks)
    temporaries = [found.memory_by_category["temporaries"] for found in (small, large)]
    assert temporaries[1] == pytest.approx(4 * temporaries[0], rel=0.05)
    sent = small.inside("sent").layout
    assert sent_bytes(sent, sent.stages[0])["stages"] == 8 * 2 * 256 * 256 * 2  # hidden states in bf16
    assert sent_bytes(sent, sent.stages[1])["stages"] == 0.0


def test_keys_and_values_are_kept_of_every_layer_and_micro_batch() -> None:
    cached = {**LLAMA, "config": {**LLAMA["config"], "use_cache": True}}
    document = {
        "model": cached,
        "training": {"mode": "infer", "global_batch": 16, "sequence": 256, "precision": "bf16"},
        "cluster": {"device": "h200", "devices_per_node": 2},
        "plan": {"pipeline": 2, "micro_batch": 4},
    }
    ranks = DeletePopPredictor().predict(Job.read(document)).inside("memory").memory
    assert [rank.by_category["activations"] for rank in ranks] == [3 * 2 * 16 * 256 * 256 * 2] * 2


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
        newer = {"device": "v100-sxm-16gb", "host": "xeon-emerald-rapids"}
        alone = predictor.predict(job(newer, global_batch=1, sequence=64))
        assert named["step_time_s"].median > 1.1 * alone["step_time_s"].median


def test_compiled_steps_have_fewer_calls_in_the_one_graph_that_all_use() -> None:
    assert len(step_graph(job(compile=True)).ops) < len(step_graph(job()).ops)


def test_compiled_inference_hands_no_gradients_over() -> None:
    trains, serves = (
        DeletePopPredictor().layout(job(compile=True, mode=mode)) for mode in ("train", "infer")
    )
    assert serves.graph.stack, "layers that are alike are there once"
    assert serves.step_overhead_s < 2e-3 < trains.step_overhead_s


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            {"compile": "reduce-overhead"},
            "lies in the pools of CUDA graphs: reserved, not in the memory at peak",
        ),
        ({"precision": "fp8"}, "without compile each cast is several kernels, and bf16 may be faster"),
    ],
)
def test_what_surprises_is_said(how: dict[str, Any], said: str) -> None:
    predict = predictors.get("roofline").predict
    assert any(said in line for line in predict(job(**how)).assumptions)
    assert not any(said in line for line in predict(job(**{**how, "compile": True})).assumptions)


def test_a_calibration_of_held_out_devices_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    many = job({"node": "dgx-h100", "devices_per_node": 2})
    time_s = DeletePopPredictor().predict(many)["step_time_s"].median
    fitted = DeletePopPredictor().fit([Run(job=many, measured={"step_time_s": 2 * time_s})])
    assert fitted.calibrations_
    shipped = fitted.costs
    monkeypatch.setattr("foretrain.costs.fitting.fit_costs", lambda _operators: shipped)
    monkeypatch.setattr("foretrain.costs.fitting.dispatch_costs", lambda _operators: {})
    monkeypatch.setattr(
        "foretrain.predictors.deletepop.datasets.load_measured", lambda path, device: made_up(count=20)
    )
    forgetful = fitted.without(devices=frozenset({"h100-sxm-80gb"}))
    assert forgetful.calibrations_ == {}
    assert forgetful.predict(many)["step_time_s"].median == pytest.approx(time_s)


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


def test_a_step_is_played_once_for_all_lengths_of_its_training(tmp_path: Path) -> None:
    from made_up import one_product

    one_product().save(tmp_path / "product.json.zst")
    tables = {
        "model": {"source": "graph", "name": str(tmp_path / "product.json.zst")},
        "training": {"global_batch": 4},
        "cluster": {"device": "a100-sxm-80gb"},
    }
    predictor = predictors.get("deletepop")
    jobs = [
        Job.read({**tables, "training": {"global_batch": 4, **length}})
        for length in ({}, {"steps": 10}, {"steps": 1000}, {"epochs": 2, "samples": 64})
    ]
    forecasts = [predictor.predict(one) for one in jobs]
    steps = [forecast.step for forecast in forecasts]
    assert all(step is not None and step.works is steps[0].works for step in steps if steps[0])
    assert [forecast.job for forecast in forecasts] == jobs
    assert [step.layout.job for step in steps if step is not None] == jobs
    assert "total_time_s" not in forecasts[0].quantities
    totals = [forecast["total_time_s"].median for forecast in forecasts[1:3]]
    assert totals[1] > totals[0]
    assert forecasts[3]["epoch_time_s"].median == pytest.approx(16 * forecasts[0]["step_time_s"].median)
    other = predictor.predict(Job.read({**tables, "cluster": {"device": "h100"}}))
    assert other.step is not None
    assert steps[0] is not None
    assert other.step.works is not steps[0].works
