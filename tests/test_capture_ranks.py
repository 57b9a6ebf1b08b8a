"""The graph of one rank: its share of weights and products, the collectives that the literature names, and a
few layers for all."""

from __future__ import annotations

import functools
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from foretrain.capture import capture_job, capture_rank
from foretrain.capture.parallel.experts import split_experts
from foretrain.capture.parallel.ranks import trace_rank
from foretrain.capture.parallel.stacks import find_stack
from foretrain.capture.parallel.tensor import TensorParallel
from foretrain.capture.parallel.whole_sizes import WholeSizes, cut
from foretrain.errors import InputError, UnsupportedJob
from foretrain.graph import OpGraph, Stack, Weight
from foretrain.graph.attention import with_flash_attention
from foretrain.job import Job
from foretrain.predictors.deletepop import DeletePopPredictor
from foretrain.step.partition import blocks

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
GROUPED = {**TEXT, "num_key_value_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "gpt2": {"n_embd": 64, "n_layer": 6, "n_head": 8, "n_positions": 64, "vocab_size": 256},
    "bert": TEXT,
    "gpt_neox": TEXT,
    "mpt": {"d_model": 64, "n_layers": 6, "n_heads": 8, "max_seq_len": 128, "vocab_size": 256},
    "mixtral": {**GROUPED, "num_local_experts": 8, "num_experts_per_tok": 2},
    "gemma2": {**GROUPED, "head_dim": 8, "sliding_window": 16},
    "deepseek_v3": {
        **TEXT, "num_key_value_heads": 8, "moe_intermediate_size": 32, "n_routed_experts": 16,
        "num_experts_per_tok": 4, "n_group": 4,
        "topk_group": 2, "first_k_dense_replace": 2, "q_lora_rank": 24, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    "qwen3_moe": {
        **GROUPED, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    },
    "gpt_oss": {
        **GROUPED, "head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16,
    },
    "llama4_text": {
        **GROUPED, "head_dim": 8, "intermediate_size_mlp": 128, "num_local_experts": 8,
        "num_experts_per_tok": 1, "no_rope_layers": [1] * 6,
    },
    "t5": {"d_model": 64, "d_kv": 8, "d_ff": 128, "num_layers": 6, "num_heads": 8, "vocab_size": 256},
    "vit": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 8,
    "patch_size": 8},
}  # fmt: skip
STATEFUL: dict[str, dict[str, Any]] = {
    "mamba": {"hidden_size": 64, "num_hidden_layers": 6, "vocab_size": 256, "state_size": 16},
    "nemotron_h": {
        "hidden_size": 64, "vocab_size": 256, "hybrid_override_pattern": "M-M*M-", "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 128, "ssm_state_size": 16,
        "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 32,
    },
    "qwen3_next": {
        **GROUPED, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
}  # fmt: skip
TASKS = {"bert": "masked-lm", "t5": "seq2seq-lm", "vit": "image-classification"}
BATCH, SEQUENCE, HIDDEN = 2, 64, 64


def a_job(
    model: str,
    *,
    config: dict[str, Any] | None = None,
    framework: str = "pytorch",
    precision: str = "bf16",
    training: dict[str, Any] | None = None,
    **plan: Any,
) -> Job:
    devices = plan.get("tensor", 1) * plan.get("context", 1) * plan.get("data", plan.get("expert", 1))
    data = devices // (plan.get("tensor", 1) * plan.get("context", 1))
    size = {"image": 32} if model == "vit" else {"sequence": SEQUENCE}
    return Job.read({
        "model": {"source": "transformers", "task": TASKS.get(model, "causal-lm"),
        "config": {"model_type": model, **(MODELS | STATEFUL)[model], **(config or {})}},
        "training": {"global_batch": BATCH * data, "precision": precision, "optimizer": "sgd-plain",
        "framework": framework, **size, **(training or {})},
        "cluster": {"device": "h100", "nodes": devices, "devices_per_node": 1},
        "plan": {**({"dispatcher": "alltoall"} if plan.get("expert", 1) > 1 else {}), **plan},
    })  # fmt: skip


def rank(
    model: str, *, by_layers: bool = True, accumulate: bool = False, framework: str = "pytorch", **plan: Any
) -> OpGraph:
    degrees = tuple(sorted((name, value) for name, value in plan.items() if value is True or value > 1))
    return _rank(model, by_layers, accumulate, framework, degrees)


@functools.cache
def _rank(
    model: str, by_layers: bool, accumulate: bool, framework: str, plan: tuple[tuple[str, Any], ...]
) -> OpGraph:
    return trace_rank(
        a_job(model, framework=framework, **dict(plan)), accumulate=accumulate, info={}, by_layers=by_layers
    )


def collectives(graph: OpGraph, layer: str = "") -> Counter[tuple[str, str, str, int]]:
    """(phase, name, group, elements of the larger side) of the collectives in a layer."""
    return Counter(
        (
            op.phase,
            op.operator.name,
            op.operator.overload,
            max(op.operator.inputs[0].numel, op.operator.outputs[0].numel),
        )
        for op in graph.ops
        if op.operator.name in COLLECTIVES and op.layer.startswith(layer)
    )


def expanded(graph: OpGraph) -> dict[str, float]:
    """Sums over the whole model, each traced layer as often as it stands for one."""

    def copies(op: Any) -> int:
        layer = graph.stack.layer_of(op.layer) if graph.stack is not None else None
        return 1 if layer is None or graph.stack is None else graph.stack.copies(layer)

    sums: Counter[str] = Counter()
    for op in graph.ops:
        if op.phase != "optimizer":
            for name, value in (
                ("ops", 1),
                ("launches", op.operator.launches),
                ("flops", op.operator.flops),
                ("bytes", op.operator.bytes),
            ):
                sums[f"{op.phase} {name}"] += value * copies(op)
    for buffer in graph.buffers:
        if buffer.category == "activations":
            sums["activation bytes"] += buffer.size_bytes * copies(graph.ops[buffer.born])
    return dict(sums)


def matrix_flops(graph: OpGraph, layer: str) -> int:
    names = (
        "mm",
        "addmm",
        "bmm",
        "_grouped_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
    )
    return sum(
        op.operator.flops for op in graph.ops if op.operator.name in names and op.layer.startswith(layer)
    )


# A few layers for all


@pytest.mark.parametrize(("model", "accumulate"), [*((model, False) for model in MODELS), ("llama", True)])
def test_distinct_layers_stand_for_the_whole_model(model: str, accumulate: bool) -> None:
    few = rank(model, accumulate=accumulate)
    whole = rank(model, accumulate=accumulate, by_layers=False)
    assert few.stack is not None
    assert whole.stack is not None
    assert (whole.stack.path, whole.stack.traced) == (few.stack.path, few.stack.layers)
    assert len(few.ops) < len(whole.ops)
    assert expanded(few) == expanded(whole)
    assert few.weights == whole.weights


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("llama", {"tensor": 2}),
        ("bert", {"tensor": 2, "sequence_parallel": True, "framework": "megatron"}),
        ("mixtral", {"expert": 4}),
    ],
)
def test_so_they_do_on_a_rank(model: str, plan: dict[str, Any]) -> None:
    assert expanded(rank(model, **plan)) == expanded(rank(model, by_layers=False, **plan))


@pytest.mark.parametrize(
    ("model", "traced", "stands_for"),
    [
        ("llama", 3, (0, 1, 1, 1, 1, 2)),
        ("gemma2", 4, (0, 1, 2, 1, 2, 3)),
        ("deepseek_v3", 4, (0, 1, 2, 2, 2, 3)),
    ],
)
def test_the_first_and_the_last_layer_stand_for_themselves(
    model: str, traced: int, stands_for: tuple[int, ...]
) -> None:
    assert rank(model).stack == Stack("model.layers", 6, traced, stands_for)


def test_a_model_without_alike_blocks_is_traced_whole() -> None:
    assert find_stack(nn.Sequential(*(nn.Linear(4 + i, 5 + i) for i in range(6)))) is None
    assert find_stack(nn.ModuleDict({"few": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))})) is None


REVERSED = """
import torch

class Reversed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(6))

    def forward(self, x):
        for block in reversed(self.blocks):
            x = block(x)
        return x

def make(batch):
    return Reversed(), torch.zeros(batch, 4)
"""


def test_blocks_that_do_not_run_in_order_are_all_traced(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(REVERSED)
    tables = {
        "model": {"source": "python", "name": "net.py:make"},
        "training": {"global_batch": 2},
        "cluster": {"device": "t4"},
    }
    graph = trace_rank(Job.read(tables, base=tmp_path), accumulate=False, info={})
    assert graph.stack is None
    assert sum(op.operator.name == "addmm" for op in graph.ops) == 6


ASKING = """
import torch

class Asking(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        while y.norm() > 1:
            y = super().forward(y) / 4
        return y

def asking(batch):
    return Asking(4, 4), torch.zeros(batch, 4)

def scripted(batch):
    return torch.jit.script(torch.nn.Linear(4, 4)), torch.zeros(batch, 4)
"""


@pytest.mark.parametrize("function", ["asking", "scripted"])
def test_several_devices_trace_what_one_does(tmp_path: Path, function: str) -> None:
    """A way that depends on data, a module that torch has compiled, and activations on the host without
    layers to have there."""
    (tmp_path / "net.py").write_text(ASKING)
    tables = {
        "model": {"source": "python", "name": f"net.py:{function}"},
        "training": {"global_batch": 4, "framework": "megatron"},
        "cluster": {"device": "t4", "devices_per_node": 2},
        "plan": {"offload_activations": True},
    }
    forecast = DeletePopPredictor().predict(Job.read(tables, base=tmp_path))
    assert forecast["peak_memory_bytes"].median > 0


def test_weights_and_stack_survive_the_file_and_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETRAIN_CACHE", str(tmp_path))
    job = a_job("llama", tensor=2)
    graph = capture_rank(job)
    again = OpGraph.load(next(tmp_path.glob("*.zst")))
    assert (again.weights, again.stack, again.digest()) == (graph.weights, graph.stack, graph.digest())
    assert capture_rank(job).stack == graph.stack
    whole = capture_job(job).stack
    assert whole is not None
    assert whole.traced == whole.layers
    capture_rank(a_job("llama", tensor=4))
    assert len(list(tmp_path.glob("*.zst"))) == 3


# Tensor parallelism


@pytest.mark.parametrize("model", ["llama", "gpt2", "bert", "gpt_neox", "mpt", "mixtral", "deepseek_v3"])
def test_a_rank_holds_its_share_of_the_layers_and_of_the_vocabulary(model: str) -> None:
    whole, part = ({w.name: w.elements for w in rank(model, tensor=degree).weights} for degree in (1, 4))
    assert whole.keys() == part.keys()
    cut = {name for name in whole if part[name] != whole[name]}
    assert all(part[name] * 4 == whole[name] for name in cut)
    assert sum(whole[name] for name in cut) > 0.9 * sum(whole.values())
    assert rank(model, tensor=4).parameters == sum(part.values())


def test_key_heads_are_copied_where_there_are_fewer_than_ranks() -> None:
    by_name = {w.name: w.elements for w in rank("llama", tensor=8).weights}
    assert by_name["model.layers.0.self_attn.q_proj.weight"] == 64 * 8
    assert by_name["model.layers.0.self_attn.k_proj.weight"] == 64 * 8


@pytest.mark.parametrize("model", ["llama", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("by_sequence", [False, True])
def test_products_are_divided_by_the_degree(model: str, by_sequence: bool) -> None:
    whole, part = rank(model), rank(model, tensor=4, sequence_parallel=by_sequence)
    assert whole.stack is not None
    layer = f"{whole.stack.path}.1."
    assert matrix_flops(whole, layer) == 4 * matrix_flops(part, layer) > 0


@pytest.mark.parametrize("model", ["llama", "gpt2", "bert", "gpt_neox", "mpt"])
def test_a_layer_all_reduces_twice_each_way(model: str) -> None:
    """Shoeybi et al. 2019, section 3."""
    graph = rank(model, tensor=2, framework="megatron")
    assert graph.stack is not None
    size = BATCH * SEQUENCE * HIDDEN
    assert collectives(graph, f"{graph.stack.path}.1.") == {
        (phase, "all_reduce", "tensor", size): 2 for phase in ("forward", "backward")
    }


def test_each_column_layer_sums_up_the_gradient_of_its_input_in_torchs_own_styles() -> None:
    """``ColwiseParallel`` of queries, keys, values, gate and up: counted by torch's ``CommDebugMode``."""
    size = BATCH * SEQUENCE * HIDDEN
    assert collectives(rank("llama", tensor=2), "model.layers.1.") == {
        ("forward", "all_reduce", "tensor", size): 2,
        ("backward", "all_reduce", "tensor", size): 5,
    }


@pytest.mark.parametrize("model", ["llama", "gpt2", "bert", "gpt_neox", "mpt"])
def test_with_sequence_parallelism_it_gathers_and_scatters_twice_each_way(model: str) -> None:
    """Korthikanti et al. 2022, section 4.2.2."""
    graph = rank(model, tensor=2, sequence_parallel=True)
    assert graph.stack is not None
    size = BATCH * SEQUENCE * HIDDEN
    expected = {
        (phase, name, "tensor", size): 2
        for phase in ("forward", "backward")
        for name in ("all_gather", "reduce_scatter")
    }
    assert collectives(graph, f"{graph.stack.path}.1.") == expected


def test_sequence_parallelism_is_for_text_alone() -> None:
    """A tower of images has 17 positions here, 577 in use: all of them are on every rank."""
    vision = {**{name: TEXT[name] for name in list(TEXT)[:4]}, "model_type": "clip_vision_model",
              "image_size": 32, "patch_size": 8}  # fmt: skip
    text = {"model_type": "llama", **GROUPED}
    config = {"model_type": "llava", "text_config": text, "vision_config": vision, "image_token_index": 200,
              "image_seq_length": 16}  # fmt: skip
    job = Job.read({
        "model": {"source": "transformers", "task": "image-text-to-text", "config": config},
        "training": {"global_batch": 2, "sequence": 64, "precision": "bf16", "framework": "megatron"},
        "cluster": {"device": "h100", "nodes": 2, "devices_per_node": 1},
        "plan": {"tensor": 2, "sequence_parallel": True},
    })  # fmt: skip
    graph = trace_rank(job, accumulate=False, info={})
    names = {
        tower: {name for _, name, _, _ in collectives(graph, f"model.{tower}.")}
        for tower in ("vision_tower", "language_model.layers")
    }
    assert names == {
        "vision_tower": {"all_reduce"},
        "language_model.layers": {"all_gather", "reduce_scatter"},
    }


def test_tied_embeddings_are_all_cut() -> None:
    """Encoder and decoder of T5 look up the words of one table, each by a module of its own."""
    graph = rank("t5", tensor=2, framework="megatron")
    lookup = ("forward", "all_reduce", "tensor", BATCH * SEQUENCE * HIDDEN)
    for part in ("encoder", "decoder"):
        assert collectives(graph, f"{part}.embed_tokens") == {lookup: 1}


def test_the_width_of_a_head_is_fixed_before_heads_are_divided() -> None:
    config = {"model_type": "phimoe", **GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
    job = Job.read({
        "model": {"source": "transformers", "task": "causal-lm", "config": config},
        "training": {"global_batch": 2, "sequence": 32, "precision": "bf16"},
        "cluster": {"device": "h100", "nodes": 2, "devices_per_node": 1},
        "plan": {"tensor": 2},
    })  # fmt: skip
    graph = trace_rank(job, accumulate=False, info={})
    assert collectives(graph)


# State-space layers and linear attention


def named(graph: OpGraph, layer: str, phase: str) -> Counter[str]:
    """Kernels of ``mamba_ssm``, ``causal_conv1d`` and ``fla`` in a layer."""
    calls = [op for op in graph.ops if op.phase == phase and op.layer.startswith(layer)]
    return Counter(op.operator.name for op in calls if op.operator.name.startswith(("mamba.", "fla.")))


def test_state_space_layers_run_the_kernels_that_users_install() -> None:
    """Not the library's own code, which holds scores of every chunk; the fused scan keeps what the first
    projection gave and its result, and convolves again."""
    graph = rank("nemotron_h")
    layer = "model.layers.2.mixer"
    forward, backward = (named(graph, layer, phase) for phase in ("forward", "backward"))
    assert sum(forward.values()) == 7
    assert forward["mamba.causal_conv1d"] == backward["mamba.causal_conv1d"] == 1
    assert backward["mamba.chunk_scan"] == backward["mamba.causal_conv1d_backward"] == 1
    assert not any(op.operator.name in ("cumsum", "exp", "bmm", "convolution") for op in graph.ops
                   if op.layer.startswith(layer) and op.operator.outputs[0].numel > 64)  # fmt: skip
    ends = next(i for i, op in enumerate(graph.ops) if op.phase == "backward")
    written = {w for op in graph.ops[:ends] if op.layer.startswith(layer) for w in op.writes}
    kept = sum(graph.buffers[w].size_bytes for w in written if graph.buffers[w].dies >= ends)
    tokens, inner, joined = BATCH * SEQUENCE, 128, 128 + 2 * 2 * 16
    assert kept == tokens * (2 * (inner + joined + 8) + 2 * inner + 2 * inner + 4) + 2 * 4 * 8
    assert any("mamba_ssm" in note for note in graph.info["assumptions"])


def test_a_chunked_scan_counts_its_products() -> None:
    """Scores of groups, half of those of heads, and states in and out (Dao and Gu 2024, section 6)."""
    graph = rank("nemotron_h")
    calls = [op for op in graph.ops if op.phase == "forward" and op.layer.startswith("model.layers.2.mixer")]
    counted = {op.operator.name: op.operator.flops for op in calls if op.operator.name.startswith("mamba.")}
    tokens, heads, width, state, groups, chunk = BATCH * SEQUENCE, 8, 16, 16, 2, 32
    assert counted["mamba.bmm_chunk"] == 2 * tokens * groups * chunk * state
    assert counted["mamba.chunk_state"] == 2 * tokens * heads * width * state
    assert counted["mamba.chunk_scan"] == tokens * heads * width * (chunk + 2 * state)


@pytest.mark.parametrize("by_sequence", [False, True])
def test_heads_and_groups_of_a_state_space_layer_are_divided(by_sequence: bool) -> None:
    """Megatron's ``MambaMixer``: one column and one row layer around heads, groups and channels."""
    whole = rank("nemotron_h", framework="megatron")
    part = rank("nemotron_h", framework="megatron", tensor=2, sequence_parallel=by_sequence)
    layer = "model.layers.2."
    for call in ("mamba.chunk_scan", "mamba.bmm_chunk", "mamba.chunk_state"):
        counts = [
            sum(op.operator.flops for op in graph.ops if op.operator.name == call) for graph in (whole, part)
        ]
        assert counts[0] == 2 * counts[1] > 0
    sizes = {weight.name: weight.elements for weight in part.weights}
    assert sizes[f"{layer}mixer.in_proj.weight"] == 64 * (64 + (64 + 2 * 16) + 4)
    assert sizes[f"{layer}mixer.conv1d.weight"] == 4 * (64 + 2 * 16)
    assert sizes[f"{layer}mixer.A_log"] == 4
    assert sizes[f"{layer}mixer.norm.weight"] == sizes[f"{layer}mixer.out_proj.weight"] // 64 == 64
    size = BATCH * SEQUENCE * HIDDEN
    expected = (
        {("forward", "all_gather"): 1, ("forward", "reduce_scatter"): 1, ("backward", "all_gather"): 2,
         ("backward", "reduce_scatter"): 1}
        if by_sequence
        else {("forward", "all_reduce"): 1, ("backward", "all_reduce"): 1}
    )  # fmt: skip
    assert collectives(part, layer) == {(*what, "tensor", size): n for what, n in expected.items()}


def test_groups_of_a_state_space_layer_are_copied_where_there_are_fewer_than_ranks() -> None:
    sizes = {weight.name: weight.elements for weight in rank("nemotron_h", tensor=4).weights}
    assert sizes["model.layers.2.mixer.conv1d.weight"] == 4 * (32 + 2 * 16)
    with pytest.raises(InputError, match="2 neither divides the 3 groups of a state-space layer"):
        trace_rank(a_job("nemotron_h", config={"n_groups": 3, "mamba_num_heads": 6}, tensor=2),
                   accumulate=False, info={})  # fmt: skip


def test_what_goes_into_the_states_of_mamba_is_summed_up_inside_the_layer() -> None:
    part = rank("mamba", tensor=2, sequence_parallel=True)
    inside = collectives(part, "backbone.layers.2.mixer.x_proj")
    rows = BATCH * SEQUENCE * (4 + 2 * 16)
    assert inside == {
        ("forward", "all_reduce", "tensor", rows): 1,
        ("backward", "all_reduce", "tensor", rows): 1,
    }
    assert named(part, "backbone.layers.2.mixer", "forward")["mamba.selective_scan"] == 1


def test_state_space_layers_trade_parts_of_sequences_for_heads() -> None:
    """Megatron's ``MambaContextParallel``: all-to-all of what the first projection gave and of the result."""
    part, tokens = rank("nemotron_h", context=2), BATCH * SEQUENCE // 2
    width = 128 + (128 + 2 * 2 * 16) + 8
    assert collectives(part, "model.layers.2.") == {
        (phase, "all_to_all", "context", tokens * one): 1
        for phase in ("forward", "backward")
        for one in (width, 128)
    }
    with pytest.raises(UnsupportedJob, match="carries a state along them that has no heads"):
        rank("mamba", context=2)


def test_heads_of_linear_attention_are_divided_and_run_by_kernels() -> None:
    whole, part = rank("qwen3_next"), rank("qwen3_next", tensor=2)
    layer = "model.layers.2.linear_attn"
    assert sum(named(part, layer, "forward").values()) == 8
    assert named(part, layer, "backward")["fla.chunk_states_backward"] == 1
    flops = [
        sum(op.operator.flops for op in graph.ops if op.operator.name.startswith("fla."))
        for graph in (whole, part)
    ]
    assert flops[0] == 2 * flops[1] > 0
    sizes = {weight.name: weight.elements for weight in part.weights}
    assert sizes[f"{layer}.in_proj_qkvz.weight"] == 64 * (2 * 32 + 2 * 64) // 2


def test_megatron_keeps_parts_and_gathers_them_again() -> None:
    plain, parts = (
        rank("llama", tensor=2, sequence_parallel=True, framework=name) for name in ("pytorch", "megatron")
    )
    again = ("backward", "all_gather", "tensor", BATCH * SEQUENCE * HIDDEN)
    assert collectives(parts, "model.layers.1.") - collectives(plain, "model.layers.1.") == {again: 2}
    assert expanded(parts)["activation bytes"] < expanded(plain)["activation bytes"]


@pytest.mark.parametrize(("by_sequence", "expected"), [(False, 10 + 24 / 8), (True, 34 / 8)])
def test_activations_of_a_layer_are_those_of_the_formula(by_sequence: bool, expected: float) -> None:
    """Korthikanti et al. 2022, equations 2 and 4, without the scores that fused attention does not keep."""
    config = {"n_embd": 1024, "activation_function": "gelu"}
    job = a_job("gpt2", config=config, framework="megatron", tensor=8, sequence_parallel=by_sequence)
    graph = trace_rank(job, accumulate=False, info={})
    kept = [
        b.size_bytes
        for b in graph.buffers
        if b.category == "activations" and graph.ops[b.born].layer.startswith("transformer.h.1")
    ]
    assert sum(kept) / (BATCH * SEQUENCE * 1024) == pytest.approx(expected, rel=0.01)


def test_logits_are_never_gathered() -> None:
    graph = rank("gpt2", tensor=2)
    outside = collectives(graph) - collectives(graph, "transformer.h.")
    hidden, tokens = BATCH * SEQUENCE * HIDDEN, BATCH * SEQUENCE
    assert outside == {
        ("forward", "all_reduce", "tensor", hidden): 1,  # embedding
        ("forward", "all_reduce", "tensor", tokens): 3,  # loss
        ("backward", "all_reduce", "tensor", hidden): 1,  # logits' input
    }


def test_a_vocabulary_is_padded() -> None:
    graph = trace_rank(a_job("gpt2", config={"vocab_size": 257}, tensor=2), accumulate=False, info={})
    assert Weight("transformer.wte.weight", 129 * 64, "bfloat16") in graph.weights


def test_collectives_launch_and_say_their_bytes() -> None:
    for op in rank("llama", tensor=2, sequence_parallel=True).ops:
        if op.operator.name in COLLECTIVES:
            assert op.operator.launches
            assert op.operator.flops == 0
            assert op.operator.bytes_read == op.operator.inputs[0].size_bytes
            assert op.operator.bytes_written == op.operator.outputs[0].size_bytes


class Net(nn.Module):
    """Blocks whose layers have names that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(4)
        )


def test_a_plan_of_ones_own() -> None:
    net = Net()
    TensorParallel(net, 4, by_sequence=False, given={"blocks.*.0": "column", "blocks.*.2": "row"})
    assert [tuple(p.shape) for p in net.blocks[3].parameters()] == [(8, 8), (8,), (8, 8), (8,)]


OWN = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x):
        return x + self.mlp(self.norm(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(16, 32)

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x).flatten(0, 1)

def make(batch):
    return Net()
"""


@pytest.mark.parametrize(
    ("by_sequence", "names"), [(False, {"all_reduce"}), (True, {"all_gather", "reduce_scatter"})]
)
def test_a_module_of_ones_own_in_a_job(tmp_path: Path, by_sequence: bool, names: set[str]) -> None:
    (tmp_path / "net.py").write_text(OWN)
    roles = {"blocks.*.mlp.0": "column", "blocks.*.mlp.2": "row", "tokens": "vocab", "head": "vocab"}
    tables = {
        "model": {"source": "python", "name": "net.py:make"},
        "training": {"global_batch": 2, "sequence": 8},
        "cluster": {"device": "t4", "nodes": 2},
        "plan": {"tensor": 2, "sequence_parallel": by_sequence, "tensor_plan": roles},
    }
    graph = trace_rank(Job.read(tables, base=tmp_path), accumulate=False, info={})
    assert graph.stack == Stack("blocks", 5, 3, (0, 1, 1, 1, 2))
    inside = collectives(graph, "blocks.1")
    assert {(name, elements) for _, name, _, elements in inside} == {(name, 2 * 8 * 16) for name in names}
    assert set(inside.values()) == {1}
    assert ("forward", "all_reduce", "tensor", 2 * 8) in collectives(graph)


HANDWRITTEN = """
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend, cross_entropy

class Split(nn.Module):  # as in nanoGPT
    def __init__(self, width, heads, keys):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head, self.n_embd = heads, width

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = attend(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))

class Chunk(nn.Module):  # names and a constant of its own
    def __init__(self, width, heads, keys):
        super().__init__()
        self.mix, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.cfg = {"heads": heads}

    def forward(self, x):
        b, n, d = x.shape
        parts = [p.view(b, n, self.cfg["heads"], -1).transpose(1, 2) for p in self.mix(x).chunk(3, dim=-1)]
        return self.back(attend(*parts).transpose(1, 2).reshape(b, n, -1))

class Fused(nn.Module):
    def __init__(self, width, heads, keys):
        super().__init__()
        self.H, self.D = heads, width // heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).reshape(B, T, 3, self.H, self.D).permute(2, 0, 3, 1, 4)
        return self.proj(attend(q, k, v).transpose(1, 2).reshape(B, T, C))

class Grouped(nn.Module):  # fewer heads of keys and values
    def __init__(self, width, heads, keys):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim, self.n_rep = heads, keys, width // heads, heads // keys
        self.wq, self.wo = nn.Linear(width, width), nn.Linear(width, width)
        self.wk, self.wv = (nn.Linear(width, keys * self.head_dim) for _ in range(2))

    def forward(self, x):
        B, T, C = x.shape
        q = self.wq(x).unflatten(-1, (self.n_heads, self.head_dim))
        k = self.wk(x).view(B, T, self.n_kv_heads, self.head_dim)
        v = self.wv(x).view(B, T, self.n_kv_heads, self.head_dim)
        k, v = (t.repeat_interleave(self.n_rep, dim=2) for t in (k, v))
        y = attend(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.wo(y.transpose(1, 2).reshape(B, T, C))

class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.attention, self.norm = kind(64, 8, 2), nn.LayerNorm(64)
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)

class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(32, 64), nn.ModuleList(Block(kind) for _ in range(4))
        self.head = nn.Linear(64, 32)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x).flatten(0, 1)

def make(batch, kind):
    return Net(globals()[kind])
"""


@pytest.mark.parametrize("kind", ["Split", "Chunk", "Fused", "Grouped"])
@pytest.mark.parametrize("tensor", [2, 4])
def test_attention_that_is_written_for_all_heads_runs_on_a_part_of_them(
    tmp_path: Path, kind: str, tensor: int
) -> None:
    (tmp_path / "net.py").write_text(HANDWRITTEN)
    tables = {
        "model": {"source": "python", "name": "net.py:make", "args": {"kind": kind}},
        "training": {"global_batch": 2, "sequence": 16, "precision": "bf16"},
        "cluster": {"device": "t4", "nodes": tensor},
        "plan": {"tensor": tensor},
    }
    graph = trace_rank(Job.read(tables, base=tmp_path), accumulate=False, info={})
    attention = [
        op.operator
        for op in graph.ops
        if "attention" in op.operator.name and op.phase == "forward" and op.layer.startswith("blocks.1.")
    ]
    assert [[spec.shape for spec in one.inputs[:3]] for one in attention] == [[(2, 8 // tensor, 16, 8)] * 3]
    alone = trace_rank(
        Job.read({**tables, "plan": {}, "cluster": {"device": "t4"}}, base=tmp_path),
        accumulate=False,
        info={},
    )
    whole, part = matrix_flops(alone, "blocks.1."), matrix_flops(graph, "blocks.1.")
    copied = 2 * 3 * 2 * 32 * 64 * 16 // 4 if (kind, tensor) == ("Grouped", 4) else 0
    assert part == whole / tensor + copied
    assert any("logits are whole" in note for note in graph.info["assumptions"])


def test_sizes_that_einops_makes_of_a_part_are_those_of_whole_heads() -> None:
    q = cut(2)(torch.empty(2, 16, 32))
    namespace: dict[str, Any] = {"__name__": "einops.backend"}
    exec("def reshape(x, sizes):\n    return x.reshape(sizes)", namespace)
    with pytest.MonkeyPatch.context() as patch, WholeSizes({8}):
        patch.setitem(sys.modules, "einops", types.ModuleType("einops"))
        assert namespace["reshape"](q, (2, 16, 8, 4)).shape == (2, 16, 4, 8)


# Context and expert parallelism


def test_context_parallelism_gathers_keys_and_values() -> None:
    graph = rank("llama", context=4)
    size = BATCH * SEQUENCE * 4 * 8
    assert collectives(graph, "model.layers.1.") == {
        ("forward", "all_gather", "context", size): 2,
        ("backward", "all_gather", "context", size): 2,
        ("backward", "reduce_scatter", "context", size): 2,
    }
    assert graph.tokens == BATCH * SEQUENCE // 4
    whole, part = matrix_flops(rank("llama"), "model.layers.1."), matrix_flops(graph, "model.layers.1.")
    assert whole == 4 * part
    attention = next(
        op.operator for op in graph.ops if op.operator.name == "_scaled_dot_product_flash_attention"
    )
    assert attention.args["is_causal"]


@pytest.mark.parametrize(("model", "experts", "top_k"), [("mixtral", 8, 2), ("deepseek_v3", 16, 4)])
def test_tokens_travel_to_their_experts_and_back(model: str, experts: int, top_k: int) -> None:
    graph = rank(model, expert=4)
    size = BATCH * SEQUENCE * top_k * HIDDEN
    assert collectives(graph, "model.layers.2." if model == "deepseek_v3" else "model.layers.1.") == {
        **{(phase, "all_to_all", "expert", size): 2 for phase in ("forward", "backward")},
        ("forward", "all_to_all", "expert", experts): 1,
    }
    whole = {w.name: w for w in rank(model).weights}
    split = [w for w in graph.weights if w.expert]
    assert split
    assert all(w.elements * 4 == whole[w.name].elements and ".experts." in w.name for w in split)
    assert not any(w.expert for w in whole.values())
    grouped = [op.operator.flops for op in graph.ops if op.operator.name == "_grouped_mm"]
    assert grouped == [op.operator.flops for op in rank(model).ops if op.operator.name == "_grouped_mm"]


def test_experts_with_tensor_and_sequence_parallelism_get_different_tokens() -> None:
    graph = rank("mixtral", tensor=2, expert=4, sequence_parallel=True)
    assert (
        collectives(graph, "model.layers.1.mlp.experts")[
            "forward", "all_to_all", "expert", BATCH * SEQUENCE * HIDDEN
        ]
        == 2
    )


def of_experts(graph: OpGraph, phase: str) -> list[tuple[str, tuple[int, ...]]]:
    """What the experts of the second layer launch, and the shape of its first result."""
    return [
        (op.operator.name.removeprefix("moe."), op.operator.outputs[0].shape)
        for op in graph.ops
        if op.layer == "model.layers.1.mlp.experts" and op.phase == phase and op.operator.launches
    ]


def test_megatron_moves_rows_by_kernels_of_its_own() -> None:
    """One copy to sort tokens by expert, one to sort what came, the weights of the choice inside of the
    activation; and the same backward."""
    graph = rank("mixtral", expert=4, framework="megatron")
    rows, wide, tokens = (
        (BATCH * SEQUENCE * 2, HIDDEN),
        (BATCH * SEQUENCE * 2, 256),
        (BATCH * SEQUENCE, HIDDEN),
    )
    assert of_experts(graph, "forward") == [
        ("row_map", rows[:1]), ("all_gather", (32,)), ("_to_copy", (2,)), ("permute", rows),
        ("all_to_all", rows), ("all_to_all", rows[:1]), ("sort_chunks", rows), ("_grouped_mm", wide),
        ("gate", (rows[0], 128)), ("_grouped_mm", rows), ("sort_chunks", rows), ("all_to_all", rows),
        ("unpermute", tokens),
    ]  # fmt: skip
    assert of_experts(graph, "backward") == [
        ("unpermute_backward", rows), ("all_to_all", rows), ("sort_chunks", rows),
        ("_grouped_mm", (2, HIDDEN, 128)), ("_grouped_mm", (rows[0], 128)), ("gate_backward", wide),
        ("_grouped_mm", (2, 256, HIDDEN)), ("_grouped_mm", rows), ("sort_chunks", rows),
        ("all_to_all", rows[:1]), ("all_to_all", rows), ("permute_backward", tokens),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("dispatcher", "moved"),
    [
        ("allgather", ["all_gather", "all_gather", "all_gather", "permute", "unpermute", "reduce_scatter"]),
        ("deepep", ["all_to_all", "all_to_all", "permute", "unpermute", "all_to_all"]),
        ("hybridep", ["all_to_all", "all_to_all", "all_to_all"]),
    ],
)
def test_dispatchers_differ_in_what_they_copy(dispatcher: str, moved: list[str]) -> None:
    graph = trace_rank(
        a_job("mixtral", expert=4, framework="megatron", dispatcher=dispatcher), accumulate=False, info={}
    )
    copies = ("permute", "unpermute", "sort_chunks", "all_to_all", "all_gather", "reduce_scatter")
    assert [name for name, _ in of_experts(graph, "forward") if name in copies] == moved


def test_experts_are_cut_over_ranks_that_gather_their_rows() -> None:
    """Megatron cuts experts as far as other layers where there are devices for it: rows of the team are
    gathered behind the exchange, and its sums are handed out."""
    plan: dict[str, Any] = {"tensor": 2, "expert": 2, "sequence_parallel": True, "data": 2}
    graph, whole = (
        trace_rank(
            a_job("mixtral", framework="megatron", **plan, expert_tensor=width), accumulate=False, info={}
        )
        for width in (2, 1)
    )
    sent = BATCH * SEQUENCE * 2 // 2
    assert ("all_gather", (2 * sent, HIDDEN)) in of_experts(graph, "forward")
    assert ("reduce_scatter", (sent, HIDDEN)) in of_experts(graph, "forward")
    assert ("all_gather", (2 * sent, HIDDEN)) not in of_experts(whole, "forward")
    parts = {w.name: w.elements for w in graph.weights if w.expert}
    assert parts == {w.name: w.elements // 2 for w in whole.weights if w.expert}
    work = [sum(op.operator.flops for op in one.ops) for one in (graph, whole)]
    assert work[0] == work[1]


def test_the_fullest_rank_computes_and_keeps_what_it_gets() -> None:
    loads: list[dict[str, Any]] = [{}, {"expert_imbalance": 1.5}, {"expert_capacity": 1.25}]
    even, skewed, padded = (
        trace_rank(a_job("mixtral", expert=4, framework="megatron", **load), accumulate=False, info={})
        for load in loads
    )
    rows = BATCH * SEQUENCE * 2
    assert ("_grouped_mm", (3 * rows // 2, HIDDEN)) in of_experts(skewed, "forward")
    assert ("permute", (rows, HIDDEN)) in of_experts(skewed, "forward")
    assert ("unpermute", (BATCH * SEQUENCE, HIDDEN)) in of_experts(skewed, "forward")
    assert ("permute", (5 * rows // 4, HIDDEN)) in of_experts(padded, "forward")
    assert ("_grouped_mm", (5 * rows // 4, HIDDEN)) in of_experts(padded, "forward")
    reads = [any(op.operator.name == "moe.read_counts" for op in one.ops) for one in (even, skewed, padded)]
    assert reads == [True, True, False]


def test_frameworks_route_in_the_precision_of_the_model() -> None:
    """DeepSeek's code in transformers casts tokens to fp32 in front of the router's product."""
    of = [
        {spec.dtype for spec in op.operator.inputs}
        for framework in ("pytorch", "megatron")
        for op in rank("deepseek_v3", framework=framework).ops
        if op.layer == "model.layers.2.mlp.gate" and op.phase == "forward" and op.operator.name == "mm"
    ]
    assert of == [{"float32"}, {"bfloat16"}]


def test_further_tokens_are_predicted_behind_the_last_layer() -> None:
    """A layer like the last one, a projection of twice the width, the model's own embedding and logits: all on
    the last stage."""
    plain, further = (
        trace_rank(
            a_job(
                "deepseek_v3", framework="megatron", training={"mtp_layers": count},
                tensor=2, expert=2, sequence_parallel=True,
            ), accumulate=False, info={},
        )
        for count in (0, 2)
    )  # fmt: skip
    own = [weight for weight in further.weights if weight.name.startswith("mtp.0.")]
    last = [weight for weight in plain.weights if weight.name.startswith("model.layers.5.")]
    assert sum(w.elements for w in own) == sum(w.elements for w in last) + 2 * HIDDEN * HIDDEN + 3 * HIDDEN
    assert {w.name for w in own if w.expert} == {
        w.name.replace("model.layers.5", "mtp.0.layer") for w in last if w.expert
    }
    assert {w.name for w in own} <= {w.name for w in blocks(further)[-1].weights}
    logits = [
        [op for op in one.ops if op.layer == "lm_head" and op.phase == "forward"] for one in (plain, further)
    ]
    assert len(logits[1]) == 3 * len(logits[0])


def test_latent_attention_has_kernels_of_its_own_in_megatron() -> None:
    """Positions are turned in place, keys and values made in one pass; nothing is absorbed."""
    graph = rank("deepseek_v3", framework="megatron", tensor=2, sequence_parallel=True)
    moved = [
        (op.phase, op.operator.name, [spec.shape for spec in op.operator.outputs])
        for op in graph.ops
        if op.operator.name.startswith("mla.") and op.layer == "model.layers.1.self_attn"
    ]
    of = (BATCH, SEQUENCE, 4)
    assert moved == [
        ("forward", "mla.rotate", []),
        ("forward", "mla.keys", [(*of, 16), (*of, 8)]),
        ("backward", "mla.keys_backward", [(*of, 16), (BATCH, SEQUENCE, 8)]),
        ("backward", "mla.rotate", []),
    ]
    plain = rank("deepseek_v3", tensor=2, sequence_parallel=True)
    assert matrix_flops(graph, "model.layers.1.self_attn") == matrix_flops(plain, "model.layers.1.self_attn")


def test_attention_that_is_written_out_sees_the_keys_of_all_ranks() -> None:
    """That of GPT-OSS, which has sinks."""
    graph = rank("gpt_oss", context=2)
    size = BATCH * SEQUENCE * 4 * 8
    assert collectives(graph, "model.layers.1.") == {
        ("forward", "all_gather", "context", size): 2,
        ("backward", "reduce_scatter", "context", size): 2,
    }


def test_frameworks_know_of_windows_of_keys() -> None:
    graph = with_flash_attention(rank("gpt_oss", framework="megatron"), causal=True)
    seen = {
        op.layer: op.operator.args.get("window")
        for op in graph.ops
        if op.operator.name.startswith("_scaled_dot_product_flash_attention")
    }
    assert {layer.removeprefix("model.layers."): window for layer, window in seen.items()} == {
        "0.self_attn": 16, "1.self_attn": None, "2.self_attn": 16, "3.self_attn": None,
    }  # fmt: skip


class OwnExperts(nn.Module):
    """Experts as a user writes them, with names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 8
        self.first = nn.Parameter(torch.empty(8, HIDDEN, 32))
        self.second = nn.Parameter(torch.empty(8, 32, HIDDEN))

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = x.repeat_interleave(index.shape[1], 0).unsqueeze(1)
        chosen = index.reshape(-1)
        y = (rows @ self.first[chosen]).relu() @ self.second[chosen] * weights.reshape(-1, 1, 1)
        return y.view(x.shape[0], -1, HIDDEN).sum(1)


def test_experts_of_other_names_run_by_their_own_code() -> None:
    net = nn.Module()
    net.experts = OwnExperts().to("meta")
    split = split_experts(net, a_job("mixtral", expert=4, framework="megatron"))
    assert split is not None
    assert {id(p) for p in net.experts.parameters()} == split
    x, index = torch.empty(6, HIDDEN, device="meta"), torch.empty(6, 2, device="meta", dtype=torch.int64)
    assert net.experts(x, index, torch.empty(6, 2, device="meta")).shape == x.shape
    with pytest.raises(UnsupportedJob, match=r"experts \(OwnExperts\) has others"):
        split_experts(net, a_job("mixtral", expert=2, expert_imbalance=1.5, framework="megatron"))


def test_llama_4_routes_tokens_to_their_experts() -> None:
    """transformers runs all experts on all tokens; frameworks do not."""
    whole, routed, part = (
        rank("llama4_text"),
        rank("llama4_text", framework="megatron"),
        rank("llama4_text", expert=4),
    )
    assert whole.total("flops") > 2 * routed.total("flops")
    assert part.total("flops") == routed.total("flops")
    assert {name for _, name, _, _ in collectives(part)} == {"all_to_all"}


EXPERT_PLANS: tuple[dict[str, Any], ...] = (
    {"tensor": 2, "context": 2, "expert": 2, "pipeline": 2, "sequence_parallel": True},
    {"tensor": 2, "context": 2, "expert": 2, "expert_tensor": 1, "data": 2, "sequence_parallel": True},
    {"expert": 4, "pipeline": 2, "schedule": "interleaved", "virtual_stages": 3, "micro_batch": 1},
)


@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe", "gpt_oss", "llama4_text", "deepseek_v3"])
def test_experts_are_forecast_on_every_plan(model: str) -> None:
    """DeepSeek-V3 stands for Kimi K2, too."""
    predictor = DeletePopPredictor()
    tables = a_job(model, framework="megatron").to_dict()
    tables["training"] |= {"global_batch": 16}
    tables["cluster"] = {"node": "dgx-h100", "nodes": 1}
    held = []
    for plan in EXPERT_PLANS:
        given = Job.read({**tables, "plan": {"shard": "zero1", **plan}})
        forecast = predictor.predict(given)
        assert 0 < forecast["step_time_s"].low < forecast["step_time_s"].high
        held.append(sum(w.elements for w in capture_rank(given).weights if w.expert))
    assert held[0] == pytest.approx(held[1] / 2, rel=0.01)  # halves of each expert; biases of sums are whole
    assert held[2] == held[1] // 2


def test_the_interval_is_open_to_uneven_routing() -> None:
    predictor = DeletePopPredictor()
    plans: list[dict[str, Any]] = [{}, {"expert_imbalance": 1.0}]
    unsaid, said = (
        predictor.predict(a_job("mixtral", framework="megatron", expert=4, **plan))["step_time_s"]
        for plan in plans
    )
    assert unsaid.median == said.median
    assert unsaid.high > said.high
    assert unsaid.low == said.low


# What cannot be cut


@pytest.mark.parametrize(
    ("model", "config", "plan", "message"),
    [
        ("llama", {}, {"tensor": 3}, "plan.tensor: 3 does not divide the 8 attention heads"),
        (
            "llama",
            {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96},
            {"tensor": 6},
            "the 4 key and value heads",
        ),
        (
            "gpt2",
            {"n_inner": 130},
            {"tensor": 4},
            "plan.tensor: 4 does not divide the 130 outputs of transformer.h.0.mlp.c_fc",
        ),
        ("llama", {}, {"context": 3}, "plan.context: 3 does not divide the 64 tokens of training.sequence"),
        ("vit", {}, {"context": 2}, "plan.context: 2 splits sequences"),
        (
            "vit",
            {},
            {"tensor": 2, "sequence_parallel": True},
            "plan.sequence_parallel: plan.tensor = 2 does not divide the 17 positions",
        ),
        ("llama", {}, {"expert": 2}, "plan.expert: 2, but LlamaForCausalLM has no mixture of experts"),
        ("llama", {}, {"tensor": 2, "dispatcher": "deepep"}, "plan.dispatcher: 'deepep', but LlamaForCausal"),
        (
            "mixtral",
            {},
            {"expert": 3},
            "plan.expert: 3 does not divide the 8 experts of model.layers.0.mlp.experts",
        ),
        ("mixtral", {}, {"expert": 2, "tensor": 2}, "plan.sequence_parallel: false"),
    ],
)
def test_numbers_that_do_not_divide(
    model: str, config: dict[str, Any], plan: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        trace_rank(a_job(model, config=config, **plan), accumulate=False, info={})


def test_unknown_layers_are_named() -> None:
    net = Net()
    net.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(4))
    with pytest.raises(UnsupportedJob, match=r"how to cut blocks\.\*\.\* of Net; say it in plan.tensor_plan"):
        TensorParallel(net, 2, by_sequence=False)


def test_attention_of_torch_is_not_cut() -> None:
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 4)
    message = r"^plan\.tensor: layers\.\*\.self_attn is torch's nn\.MultiheadAttention, which is not cut; "
    with pytest.raises(UnsupportedJob, match=message):
        TensorParallel(net, 2, by_sequence=False)
    TensorParallel(net, 2, by_sequence=False, given={"*.self_attn.out_proj": "replicate"})


def test_layers_of_unknown_names_are_cut_by_their_shapes() -> None:
    net = Net()
    TensorParallel(net, 4, by_sequence=False)
    assert [tuple(p.shape) for p in net.blocks[3].parameters()] == [(8, 8), (8,), (8, 8), (8,)]


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"plan.tensor_plan.blocks.\*: 'diagonal' is not one of column, row, vocab, replicate",
    ):
        TensorParallel(Net(), 2, by_sequence=False, given={"blocks.*": "diagonal"})


def test_an_attention_of_its_own_cannot_be_split_by_context() -> None:
    with pytest.raises(UnsupportedJob, match="that of mpt does not"):
        trace_rank(a_job("mpt", context=2), accumulate=False, info={})


def test_a_given_graph_cannot_be_cut(tmp_path: Path) -> None:
    tables = {
        "model": {"source": "graph", "name": "g.json.zst"},
        "training": {"global_batch": 2},
        "cluster": {"device": "t4", "nodes": 2},
    }
    with pytest.raises(UnsupportedJob, match="a graph that is given as a file cannot be cut"):
        capture_rank(Job.read({**tables, "plan": {"tensor": 2}}, base=tmp_path))
