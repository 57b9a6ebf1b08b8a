"""Adapters: which layers get them, what runs and what is held beside frozen weights, in 4 bits or not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from foretrain.adapter import Adapter, parse_adapter
from foretrain.api import make_job
from foretrain.capture import capture, capture_job, capture_rank
from foretrain.capture.keys import graph_key
from foretrain.capture.parallel.adapted import adapted_layers
from foretrain.capture.sources.adapters import with_adapter
from foretrain.capture.sources.quantised import QuantisedLinear
from foretrain.cluster import Catalog
from foretrain.costs.features import family_of
from foretrain.costs.learned import LearnedCosts
from foretrain.errors import InputError, UnsupportedJob
from foretrain.graph import OpGraph
from foretrain.job import Job
from foretrain.measure.instances import collect
from foretrain.measure.replay import time_on_cpu
from foretrain.predictors.deletepop import DeletePopPredictor
from foretrain.predictors.likeness import describe
from foretrain.report.figures import describe_model
from foretrain.step.frameworks import as_framework_runs_it

CATALOG = Catalog.load()
DATA = Path(__file__).parent.parent / "data"
ROWS = torch.zeros(4, 128)


def layers(width: int = 128, count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


def graph_of(module: nn.Module, adapter: str, inputs: Any = ROWS, **how: Any) -> OpGraph:
    return capture(module, inputs, optimizer="adamw", adapter=parse_adapter(adapter, "adapter"), **how)


def launched(graph: OpGraph, *phases: str) -> list[Any]:
    wanted = phases or ("forward", "backward", "optimizer")
    return [op.operator for op in graph.ops if op.operator.launches and op.phase in wanted]


def held(graph: OpGraph, category: str) -> int:
    return sum(buffer.size_bytes for buffer in graph.buffers if buffer.category == category)


# The field of a job


def test_an_adapter_reads_as_a_table_a_text_and_what_peft_has() -> None:
    wanted = Adapter(kind="lora", rank=16, targets=("q_proj", "v_proj"), dropout=0.05)
    table = {"kind": "LoRA", "r": 16, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.05}
    config = SimpleNamespace(
        peft_type="LORA", r=16, target_modules={"v_proj", "q_proj"}, lora_dropout=0.05, bias="none",
        modules_to_save=None,
    )  # fmt: skip
    text = "lora:16,targets=q_proj+v_proj,dropout=0.05"
    assert [parse_adapter(one, "adapter") for one in (table | {"lora_alpha": 32}, config, text)] == [
        wanted
    ] * 3
    assert parse_adapter({"kind": "qlora", "bits": 4}, "adapter").quantises


def test_what_a_library_keeps_in_fp32_is_not_quantised() -> None:
    """T5 asks its last projection for the format of its weights, so transformers leaves it as it is."""
    module = nn.ModuleDict({"wi": nn.Linear(128, 128), "wo": nn.Linear(128, 128)})
    module._keep_in_fp32_modules = ["wo"]  # type: ignore[assignment]
    with_adapter(module, Adapter(kind="qlora", targets=("wi",)), "bf16")
    assert isinstance(module["wi"].base_layer, QuantisedLinear)
    assert type(module["wo"]) is nn.Linear


def test_frameworks_that_keep_fp32_beside_weights_take_adapters() -> None:
    """Adapters in fp32 need no copy; where all parameters are cast as they are fetched, adapters are too."""

    def run(**how: Any) -> Any:
        job = make_job("gpt2", sequence=64, batch=8, device="h100", **how)
        training = as_framework_runs_it(job).workload.training
        assert training.adapter is not None
        return training.adapter.precision, training.precision, training.master_weights

    in_fp32 = "lora:8,precision=fp32"
    assert run(framework="megatron", precision="bf16", adapter=in_fp32) == ("fp32", "bf16", False)
    for adapter in ("lora:8", "qlora:8,base=bf16"):
        how = {"shard": "zero3", "devices": 4, "precision": "amp-bf16", "adapter": adapter}
        assert run(framework="torchtitan", **how) == ("bf16", "bf16", True)


def test_frameworks_beside_peft_make_adapters_as_other_weights() -> None:
    def run(framework: str, precision: str) -> str | None:
        how: dict[str, Any] = {"framework": framework, "precision": precision, "adapter": "lora:8"}
        made = make_job("gpt2", sequence=64, batch=8, device="h100", **how)
        adapter = as_framework_runs_it(made).workload.training.adapter
        assert adapter is not None
        return adapter.precision

    assert run("pytorch", "bf16") == "fp32"
    assert run("megatron", "bf16") == run("megatron", "fp8") == "bf16"
    assert run("megatron", "amp-bf16") == "fp32"


def test_frozen_layers_in_fp8_have_adapters_in_bf16_and_keep_no_inputs() -> None:
    graph = graph_of(layers(), "lora:8,precision=bf16", torch.zeros(64, 128), precision="fp8", fp8="delayed")
    names = Counter((op.phase, op.operator.name) for op in graph.ops if op.operator.name.endswith("mm"))
    assert names[("forward", "_scaled_mm")] == 3
    assert names[("backward", "_scaled_mm")] == 2
    assert names[("forward", "mm")] == 6
    casts = [op for op in graph.ops if op.phase == "forward" and op.operator.name == "te.cast_transpose"]
    inputs = [op for op in casts if op.operator.inputs[0].shape == (64, 128)]
    ends = next(i for i, op in enumerate(graph.ops) if op.phase == "backward")
    assert len(inputs) == 3
    assert all(graph.buffers[i].dies < ends for op in inputs for i in op.writes)
    with pytest.raises(InputError, match="'qlora' keeps weights in 4 bits, not in fp8"):
        parse_adapter("qlora:8", "adapter").check("fp8", master_weights=False)


def test_an_adapter_is_said_in_reports_and_is_an_option() -> None:
    job = make_job("resnet18", adapter="lora:8,targets=fc", device="h100", precision="bf16")
    assert "lora 8 on fc" in describe(job)
    assert "lora 8 on fc" in describe_model(job)
    assert Job.read(job.to_dict()).workload.training.adapter == Adapter(kind="lora", targets=("fc",))


def test_an_adapter_is_part_of_what_graphs_are_cached_by() -> None:
    adapters = (None, "lora:8", "lora:16", "qlora:8", "lora:8,precision=bf16", "lora:8,targets=q_proj")
    keys = {graph_key(job(adapter=adapter), None, 2) for adapter in adapters}
    assert len(keys) == len(adapters)


# Which layers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.conv = nn.Embedding(10, 128), layers(), nn.Conv2d(1, 6, 3, padding=1)
        self.score = nn.Linear(128, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        image = self.conv(self.body(self.table(ids))[:, None, None]).mean((1, 2))
        result: torch.Tensor = self.score(image)
        return result


IDS = torch.zeros(4, dtype=torch.long)


@pytest.mark.parametrize(
    ("targets", "trained"),
    [
        ("all-linear", 3 * 2 * 8 * 128 + 8 * (128 + 10)),
        (["0"], 2 * 8 * 128),
        (r"body\.[12]", 2 * 2 * 8 * 128),
        (["conv"], 8 * 9 + 8 * 6),
        (["table", "2"], 8 * (10 + 128) + 2 * 8 * 128),
    ],
)
def test_targets_are_endings_of_names_or_a_pattern(targets: Any, trained: int) -> None:
    adapter = parse_adapter({"kind": "lora", "targets": targets}, "adapter")
    graph = capture(Net(), IDS, adapter=adapter)
    assert graph.info["model_parameters"][1] == trained


def test_targets_that_are_no_layers_are_refused() -> None:
    with pytest.raises(InputError, match=r"training\.adapter\.targets: 'q_proj' is no layer of Net"):
        with_adapter(Net(), Adapter(kind="lora", targets=("q_proj",)), "fp32")
    with pytest.raises(InputError, match="'body' is a Sequential, not a linear layer"):
        with_adapter(Net(), Adapter(kind="lora", targets=("body",)), "fp32")


def test_modules_to_save_are_trained_whole_and_kept_as_they_were() -> None:
    graph = graph_of(Net(), "lora:8,targets=0,modules_to_save=score", IDS)
    whole, trained = graph.info["model_parameters"]
    assert trained == 2 * 8 * 128 + 128 * 10 + 10
    assert whole == sum(p.numel() for p in Net().parameters()) + trained


# What runs


def test_the_short_form_is_the_graph_of_adapters_made_by_hand() -> None:
    """Kernel for kernel, as in ``data/lora_models.py``; the head of 60,000 words has none."""
    config = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
        "vocab_size": 60_000,
    }  # fmt: skip
    by_hand = {"model_type": "llama", "head": "causal-lm", "rank": 16, "sequence": 32, "config": config}
    models = (
        {"source": "python", "name": str(DATA / "lora_models.py:build"), "args": by_hand},
        {"source": "transformers", "task": "causal-lm", "config": {"model_type": "llama", **config}},
    )
    more: tuple[dict[str, Any], ...] = (
        {},
        {"sequence": 32, "adapter": {"kind": "lora", "rank": 16, "precision": "bf16"}},
    )
    graphs = [
        capture_job(
            Job.read(
                {
                    "model": model,
                    "training": {"global_batch": 2, "precision": "bf16", "optimizer": "adamw", **training},
                    "cluster": {"device": "h100"},
                }
            )
        )
        for model, training in zip(models, more, strict=True)
    ]
    first, second = ([(one.name, one.inputs, one.outputs) for one in launched(graph)] for graph in graphs)
    assert first == second
    assert graphs[0].info["model_parameters"] == graphs[1].info["model_parameters"]


def test_frozen_layers_have_gradients_of_their_inputs_alone_and_none_before_the_first_adapter() -> None:
    graph = graph_of(layers(), "lora:8,targets=1")
    products = [one for one in launched(graph, "backward") if one.name == "mm"]
    thin = [one for one in products if 8 in one.inputs[0].shape + one.inputs[1].shape]
    assert (len(products), len(thin)) == (4, 3)  # of the last layer's input; of B, of what A gave, and of A
    assert held(graph, "gradients") == 2 * 8 * 128 * 4
    assert held(graph, "optimizer_state") == 2 * held(graph, "gradients")


def test_adapters_stay_in_fp32_beside_weights_in_bf16() -> None:
    graph = graph_of(layers(), "lora:8", precision="bf16")
    dtypes = {
        one.inputs[0].dtype
        for one in launched(graph, "forward")
        if one.name == "mm" and 8 in one.outputs[0].shape
    }
    assert dtypes == {"float32"}
    assert held(graph, "weights") == 3 * (128 * 128 * 2 + 2 * 8 * 128 * 4)
    said = "adapters of rank 8 on 3 layers, in fp32; frozen weights in bf16"
    casts = "inputs are cast to fp32 and results back, as peft does (adapter.precision = bf16 spares it)"
    assert f"{said}: {casts}" in graph.info["assumptions"]


def test_adapters_in_bf16_are_not_cast() -> None:
    casts = {
        precision: [
            one.name
            for one in launched(graph_of(layers(), f"lora:8,precision={precision}", precision="bf16"))
        ].count("_to_copy")
        for precision in ("fp32", "bf16")
    }
    assert casts["bf16"] < casts["fp32"] - 6


def test_frozen_weights_in_bf16_under_autocast_are_not_cast() -> None:
    whole, low = (graph_of(layers(), text, precision="amp-bf16") for text in ("lora:8", "lora:8,base=bf16"))
    assert held(low, "weights") == held(whole, "weights") - 3 * 128 * 128 * 2
    of_weights = [
        sum(
            one.name == "_to_copy" and one.inputs[0].shape == (128, 128) for one in launched(graph, "forward")
        )
        for graph in (whole, low)
    ]
    assert of_weights == [3, 0]


def test_dropout_adds_its_kernels() -> None:
    names = [one.name for one in launched(graph_of(layers(), "lora:8,dropout=0.1"))]
    assert names.count("native_dropout") == 3


def test_the_gradient_of_a_frozen_norm_is_one_pass_over_its_rows() -> None:
    norms = [nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.Linear(128, 8)) for _ in range(2)]
    graphs = (capture(norms[0], ROWS), graph_of(norms[1], "lora:8"))
    whole, rows = (
        next(one for one in launched(graph) if one.name == "native_layer_norm_backward") for graph in graphs
    )
    assert (family_of(whole), family_of(rows)) == ("norm_backward", "norm")
    costs = LearnedCosts({}, kernel_kinds={"native_layer_norm_backward/4": 3.0})
    assert costs.kernels([whole, rows], CATALOG.device("h100"), "fp32").tolist() == [3.0, 1.0]


# In 4 bits


def test_4_bit_weights_are_brought_back_for_each_product() -> None:
    graph = graph_of(layers(256), "qlora:8", torch.zeros(4, 256), precision="bf16")
    operators = [op.operator for op in graph.ops]
    phases = [op.phase for op in graph.ops if op.operator.name == "dequantize_4bit"]
    assert (phases.count("forward"), phases.count("backward")) == (3, 2)
    (one, *_) = (operator for operator in operators if operator.name == "dequantize_4bit")
    assert (one.bytes_read, one.bytes_written) == (256 * 256 // 2 + 256 * 256 // 64 * 4, 256 * 256 * 2)
    for i, operator in enumerate(operators):
        if operator.name == "dequantize_4bit":
            (written,) = (graph.buffers[number] for number in graph.ops[i].writes)
            assert written.dies < i + 5
    assert graph.parameters == 3 * (256 * 256 + 2 * 8 * 256)
    assert held(graph, "activations") < 256 * 256


def test_4_bit_layers_hold_half_a_byte_a_weight_and_their_scales() -> None:
    graph = graph_of(layers(256), "qlora:8,precision=bf16", torch.zeros(4, 256), precision="bf16")
    weights, blocks = 256 * 256, 256 * 256 // 64
    each = weights // 2 + blocks + 4 * blocks // 256 + 4 * 256 + 4
    assert held(graph, "weights") == 3 * (each + 2 * 8 * 256 * 2)


def test_a_4_bit_layer_computes_with_its_weights() -> None:
    layer = QuantisedLinear(nn.Linear(128, 64), 64, 128, None)
    x = torch.randn(3, 128, requires_grad=True)
    weight = layer.dequantised(torch.float32)
    assert weight.abs().max() <= 128**-0.5
    assert all(len(block.unique()) <= 16 for block in weight.reshape(-1, 64))
    assert len(weight.unique()) > 16
    bias: Any = layer.bias
    torch.testing.assert_close(layer(x), nn.functional.linear(x, weight, bias))
    (gradient,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(gradient, weight.sum(0).expand(3, 128))


def test_bringing_weights_back_is_replayed() -> None:
    graph = graph_of(layers(), "qlora:8", precision="bf16")
    found = [one for one in collect([(graph, "bf16")]) if one.name.startswith("dequantize")]
    assert {one.name for one in found} == {"dequantize_4bit", "dequantize_blockwise"}
    assert all(time_on_cpu(one).warm_s > 0 for one in found)


# On several devices


def job(
    devices: int = 1,
    adapter: str | None = None,
    framework: str = "pytorch",
    config: dict[str, Any] | None = None,
    **plan: Any,
) -> Job:
    llama = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 128,
    }  # fmt: skip
    training = {"global_batch": 2 * devices, "sequence": 16, "precision": "bf16", "optimizer": "adamw"}
    return Job.read(
        {
            "model": {"source": "transformers", "task": "causal-lm", "config": llama | (config or {})},
            "training": {
                **training,
                "framework": framework,
                **({} if adapter is None else {"adapter": adapter}),
            },
            "cluster": {"device": "h100", "devices_per_node": devices},
            "plan": plan,
        }
    )


def test_a_rank_knows_what_of_its_weights_is_trained_and_in_what() -> None:
    graph = capture_rank(job(2, "lora:8"))
    kinds = {(weight.trainable, weight.dtype) for weight in graph.weights}
    assert kinds == {(True, "float32"), (False, "bfloat16")}
    assert sum(weight.elements for weight in graph.weights) == graph.parameters


@pytest.mark.parametrize("shard", ["none", "zero1", "zero3"])
def test_replicas_exchange_and_keep_what_is_trained(shard: str) -> None:
    """Gradients of adapters in fp32; ZeRO 3 fetches the weights of layers twice, frozen ones in bf16, and
    those of the root, which stay, once."""
    step = DeletePopPredictor().step(job(2, "lora:8", shard=shard))
    weights = step.layout.graph.weights
    trained = sum(weight.elements for weight in weights if weight.trainable)
    frozen = sum(weight.elements for weight in weights if not weight.trainable)
    root = sum(weight.elements for weight in weights if "layers." not in weight.name)
    everything = 4 * trained + 2 * frozen
    fetched = {
        "none": 4 * trained,
        "zero1": 4 * trained,
        "zero3": everything * (2 - root / (trained + frozen)),
    }[shard]
    assert step.sent["replicas"] == pytest.approx((4 * trained + fetched) / 2)
    (memory,) = step.memory
    states = 8 * trained / (1 if shard == "none" else 2)
    assert memory.by_category["optimizer_state"] == pytest.approx(states)
    assert memory.by_category["gradients"] <= 4 * trained


def exchanged(graph: OpGraph, layer: str = "model.layers.1.") -> Counter[tuple[str, str, int]]:
    """Collectives of a layer: phase, name, numbers per token that they leave whole."""
    tokens = 4 * 16
    return Counter(
        (op.phase, op.operator.name, max(op.operator.inputs[0].numel, op.operator.outputs[0].numel) // tokens)
        for op in graph.ops
        if op.operator.overload == "tensor" and op.layer.startswith(layer)
    )


WIDTH, RANK = 64, 4


@pytest.mark.parametrize("by_sequence", [False, True])
def test_adapters_are_cut_with_their_layers(by_sequence: bool) -> None:
    """As peft and torch's parallel styles do: beside column layers the second thin layer is cut, beside row
    layers the first; what goes over the network is as wide as the adapters."""
    adapter = f"lora:{RANK},precision=bf16"
    plan: dict[str, Any] = {"tensor": 2, "sequence_parallel": by_sequence}
    plain, adapted = capture_rank(job(2, None, **plan)), capture_rank(job(2, adapter, **plan))
    extra = exchanged(adapted) - exchanged(plain)
    summed = Counter({("backward", "all_reduce", RANK): 5})
    if by_sequence:
        summed |= {("forward", "reduce_scatter", RANK): 2, ("backward", "all_gather", RANK): 2}
    else:
        summed |= {("forward", "all_reduce", RANK): 2}
    assert extra == summed
    sizes = {weight.name: weight.elements for weight in adapted.weights}
    layer = "model.layers.1"
    assert sizes[f"{layer}.self_attn.q_proj.lora_A.weight"] == RANK * WIDTH
    assert sizes[f"{layer}.self_attn.q_proj.lora_B.weight"] == RANK * WIDTH // 2
    assert sizes[f"{layer}.self_attn.o_proj.lora_A.weight"] == RANK * WIDTH // 2
    assert sizes[f"{layer}.self_attn.o_proj.lora_B.weight"] == RANK * WIDTH


@pytest.mark.parametrize("by_sequence", [False, True])
def test_megatron_cuts_the_thin_side_of_adapters_and_gathers_it(by_sequence: bool) -> None:
    """``ParallelLinearAdapter``: without sequence parallelism its first layer sums up the gradient of the
    layer's input once more; beside row layers it gathers whole results."""
    adapter = f"lora:{RANK},precision=bf16"
    plan: dict[str, Any] = {"framework": "megatron", "tensor": 2, "sequence_parallel": by_sequence}
    plain, adapted = capture_rank(job(2, None, **plan)), capture_rank(job(2, adapter, **plan))
    extra = exchanged(adapted) - exchanged(plain)
    expected = {
        ("forward", "all_gather", RANK): 5, ("forward", "all_reduce", RANK): 2,
        ("backward", "all_reduce", RANK): 7, ("forward", "all_gather", WIDTH): 2,
    }  # fmt: skip
    assert extra == expected | ({} if by_sequence else {("backward", "all_reduce", WIDTH): 2})
    kept = ("backward", "all_gather", WIDTH)
    assert exchanged(adapted)[kept] == exchanged(plain)[kept] == 4 * by_sequence
    sizes = {weight.name: weight.elements for weight in adapted.weights}
    for name in ("q_proj.lora_A", "q_proj.lora_B", "o_proj.lora_A", "o_proj.lora_B"):
        assert sizes[f"model.layers.1.self_attn.{name}.weight"] == RANK * WIDTH // 2


def test_adapters_of_ones_own_are_known_by_their_shapes() -> None:
    """A linear layer that holds its two thin ones, and one that keeps frozen weights beside them."""

    class Own(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 16)
            self.requires_grad_(False)
            self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 16, bias=False)

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(8, 16).requires_grad_(False)
            self.thin = nn.ModuleDict({"default": nn.Linear(8, 2)})
            self.back = nn.ModuleDict({"default": nn.Linear(2, 16)})

    found = adapted_layers(nn.ModuleDict({"one": Own(), "two": Beside(), "plain": nn.Linear(8, 16)}))
    assert [(one.path, one.base, one.down, one.up) for one in found] == [
        ("one", "one", "one.a", "one.b"),
        ("two", "two.frozen", "two.thin.default", "two.back.default"),
    ]


def test_experts_stay_frozen_beside_adapters_over_an_expert_group() -> None:
    graph = capture_rank(job(2, "lora:8", config={"model_type": "mixtral", "num_local_experts": 4}, expert=2))
    experts = [weight for weight in graph.weights if weight.expert]
    assert experts
    assert not any(weight.trainable for weight in experts)
    assert any(op.operator.name == "all_to_all" for op in graph.ops)


def test_weights_in_4_bits_are_not_cut() -> None:
    with pytest.raises(UnsupportedJob, match=r"plan\.tensor: 2 cuts layers, and weights in 4 bits are not"):
        capture_rank(job(2, "qlora:8", tensor=2))
