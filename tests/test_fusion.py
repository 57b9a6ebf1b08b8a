"""Fusion: runs of element-wise operators become one kernel, and nothing else about the step changes."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from foretrain import predictors
from foretrain.capture import capture_job, capture_rank
from foretrain.costs.features import family_of
from foretrain.costs.kernels import kernel_count
from foretrain.graph import PHASES, Buffer, Op, Operator, OpGraph, Stack, TensorSpec
from foretrain.graph.fusion import COMPILED, Fusion, fuse
from foretrain.graph.opset import is_attention
from foretrain.graph.runs import FUSED
from foretrain.job import Job
from foretrain.step.graph import step_graph
from foretrain.step.replay import replay

FUSIONS = {
    "norms": Fusion(norms=True),
    "chains": Fusion(chains=True),
    "losses": Fusion(losses=True),
    "all": Fusion(norms=True, chains=True, losses=True),
    "across": COMPILED,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4,
        "vocab_size": 1024, "max_position_embeddings": 128,
    },
    "gpt2": {"n_embd": 256, "n_head": 8, "n_positions": 128, "vocab_size": 1024},
}  # fmt: skip
SPEC = TensorSpec((64, 64), "float32")
SIZE = SPEC.size_bytes


def a_job(
    model: str,
    *,
    precision: str = "bf16",
    micro_batch: int = 2,
    mode: str = "train",
    layers: int = 2,
    **plan: Any,
) -> Job:
    depth = {"llama": "num_hidden_layers", "gpt2": "n_layer"}[model]
    return Job.read({
        "model": {"source": "transformers", "task": "causal-lm", "config": {"model_type": model,
        depth: layers, **CONFIGS[model]}},
        "training": {"global_batch": 2, "precision": precision, "optimizer": "sgd-plain", "sequence": 128,
        "mode": mode},
        "cluster": {"device": "h100", "nodes": plan.get("tensor", 1), "devices_per_node": 1},
        "plan": {"micro_batch": micro_batch, **plan},
    })  # fmt: skip


GRAPHS = {
    "llama": lambda: capture_job(a_job("llama")),
    "llama amp": lambda: capture_job(a_job("llama", precision="amp-bf16")),
    "llama fp32": lambda: capture_job(a_job("llama", precision="fp32")),
    "llama accumulated": lambda: capture_job(a_job("llama", micro_batch=1)),
    "llama infer": lambda: capture_job(a_job("llama", mode="infer")),
    "llama rank": lambda: capture_rank(a_job("llama", layers=6, tensor=2)),
    "gpt2": lambda: capture_job(a_job("gpt2")),
    "gpt2 rank": lambda: capture_rank(a_job("gpt2", layers=6, tensor=2)),
}


@functools.cache
def graph_of(name: str) -> OpGraph:
    return GRAPHS[name]()


def runs(graph: OpGraph, phase: str, layer: str) -> list[Operator]:
    return [
        op.operator
        for op in graph.ops
        if op.operator.name == FUSED and op.phase == phase and op.layer == layer
    ]


def launches(graph: OpGraph, phase: str, layer: str) -> Counter[str]:
    return Counter(
        op.operator.name
        for op in graph.ops
        if op.operator.launches and op.phase == phase and op.layer.startswith(layer)
    )


def activation_bytes(graph: OpGraph) -> int:
    return sum(buffer.size_bytes for buffer in graph.buffers if buffer.category == "activations")


def check_lifetimes(graph: OpGraph) -> None:
    """Every buffer is there when it is read and written."""
    for index, op in enumerate(graph.ops):
        for number in op.reads:
            assert graph.buffers[number].born < index <= graph.buffers[number].dies
        for number in op.writes:
            assert graph.buffers[number].born <= index <= graph.buffers[number].dies
        assert all(producer < index for producer in graph.producers(index))
    assert all(-1 <= b.born < len(graph.ops) and b.born <= b.dies <= len(graph.ops) for b in graph.buffers)


# Traced models


@pytest.mark.parametrize("fusion", FUSIONS.values(), ids=FUSIONS)
@pytest.mark.parametrize("name", GRAPHS)
def test_a_fused_step_is_the_same_step_with_less_traffic(name: str, fusion: Fusion) -> None:
    graph = graph_of(name)
    fused = fuse(graph, fusion)
    check_lifetimes(fused)
    assert fused.total("flops") == graph.total("flops")
    assert fused.total("bytes") <= graph.total("bytes")
    assert fused.total("launches") <= graph.total("launches")
    assert activation_bytes(fused) <= activation_bytes(graph)
    assert (
        replay(fused.buffers, [0] * len(fused.ops)).allocated_bytes
        <= replay(graph.buffers, [0] * len(graph.ops)).allocated_bytes
    )
    for category in ("weights", "gradients", "inputs", "optimizer_state"):
        assert [b.size_bytes for b in fused.buffers if b.category == category] == [
            b.size_bytes for b in graph.buffers if b.category == category
        ]
    assert [op.operator for op in fused.ops if op.phase == "optimizer"] == [
        op.operator for op in graph.ops if op.phase == "optimizer"
    ]
    assert [op.operator for op in fused.ops if op.operator.flops] == [
        op.operator for op in graph.ops if op.operator.flops
    ]


@pytest.mark.parametrize("name", GRAPHS)
def test_more_fusion_launches_less(name: str) -> None:
    graph = graph_of(name)
    every, compiled = (fuse(graph, FUSIONS[kind]).total("launches") for kind in ("all", "across"))
    assert every < graph.total("launches")
    assert compiled < graph.total("launches")
    assert all(
        every <= fuse(graph, FUSIONS[kind]).total("launches") for kind in ("norms", "chains", "losses")
    )


def test_an_rms_norm_is_one_kernel_forward_and_two_backward() -> None:
    graph = fuse(graph_of("llama"), Fusion(norms=True))
    layer = "model.layers.1.input_layernorm"
    assert launches(graph, "forward", layer) == {FUSED: 1}
    assert launches(graph, "backward", layer) == {FUSED: 1, "add": 1}, (
        "autograd's sum of the residual's gradient is no part of it"
    )
    (forward,), (backward,) = runs(graph, "forward", layer), runs(graph, "backward", layer)
    assert (forward.overload, kernel_count(forward), kernel_count(backward)) == ("norm", 1, 2)
    tokens = 2 * 128
    x, weight, statistics = tokens * 256 * 2, 256 * 2, tokens * 4
    assert (forward.bytes_read, forward.bytes_written) == (x + weight, x + statistics)
    assert (backward.bytes_read, backward.bytes_written) == (2 * x + weight + statistics, x + weight)


def test_swiglu_is_one_kernel_past_the_product_between_its_halves() -> None:
    graph = fuse(graph_of("llama"), Fusion(chains=True))
    (forward,), (backward,) = (
        runs(graph, "forward", "model.layers.0.mlp"),
        runs(graph, "backward", "model.layers.0.mlp"),
    )
    assert forward.args["ops"] == ["silu", "mul"]
    assert backward.args["ops"] == ["mul", "mul", "silu_backward"]
    one = 2 * 128 * 1024 * 2
    assert (forward.bytes_read, forward.bytes_written) == (2 * one, one)
    assert (backward.bytes_read, backward.bytes_written) == (3 * one, 2 * one)
    saved = activation_bytes(graph_of("llama")) - activation_bytes(graph)
    assert saved == 2 * one, "of each layer the output of the activation is not kept"


def test_rotary_embedding_is_one_kernel() -> None:
    graph = fuse(graph_of("llama"), Fusion(chains=True))
    for phase in ("forward", "backward"):
        assert len(runs(graph, phase, "model.layers.0.self_attn")) == 1


def test_a_loss_keeps_the_logits_only() -> None:
    graph = fuse(graph_of("llama"), Fusion(losses=True))
    logits = 2 * 128 * 1024 * 2
    (forward,), (backward,) = runs(graph, "forward", ""), runs(graph, "backward", "")
    assert forward.overload == backward.overload == "loss"
    assert forward.bytes_written < logits < forward.bytes_read < 1.1 * logits
    assert activation_bytes(graph_of("llama")) - activation_bytes(graph) == logits, (
        "fp32 log-probabilities out, bf16 logits in"
    )


def test_written_out_gelu_keeps_its_input_only() -> None:
    graph, fused = graph_of("gpt2"), fuse(graph_of("gpt2"), Fusion(chains=True))
    one = 2 * 128 * 1024 * 2
    assert activation_bytes(graph) - activation_bytes(fused) == 2 * 3 * one
    (forward,) = runs(fused, "forward", "transformer.h.0.mlp.act")
    assert (forward.bytes_read, forward.bytes_written) == (one, one)


def test_dropout_joins_the_residual_add_and_its_mask_is_kept() -> None:
    fused = fuse(graph_of("gpt2"), Fusion(chains=True))
    masks = [
        run
        for run in runs(fused, "forward", "transformer.h.0")
        if run.args["ops"] == ["native_dropout", "add"]
    ]
    assert len(masks) == 2
    assert all("bool" in {spec.dtype for spec in run.outputs} for run in masks)


@pytest.mark.parametrize("name", ["llama rank", "gpt2 rank"])
def test_runs_stay_within_a_layer_of_the_stack(name: str) -> None:
    graph = graph_of(name)
    assert graph.stack is not None
    before, after = (Counter(_per_layer(one, graph.stack)) for one in (graph, fuse(graph, COMPILED)))
    assert before.keys() == after.keys()
    assert all(after[layer] <= before[layer] for layer in before)
    collectives = [op.operator.name for op in graph.ops if op.operator.name.startswith(("all_", "reduce_"))]
    assert collectives == [
        op.operator.name
        for op in fuse(graph, COMPILED).ops
        if op.operator.name.startswith(("all_", "reduce_"))
    ]


def _per_layer(graph: OpGraph, stack: Stack) -> list[tuple[str, int | None]]:
    return [(op.phase, stack.layer_of(op.layer)) for op in graph.ops if op.operator.launches]


def test_equal_layers_share_operators_and_the_result_is_remembered() -> None:
    graph = graph_of("llama")
    fused = fuse(graph, COMPILED)
    assert fuse(graph, COMPILED) is fused
    assert fuse(graph, Fusion()) is graph
    assert len({id(op.operator) for op in fused.ops if op.operator.overload == "row"}) < len(
        runs_of_all(fused, "row")
    )
    assert all(family_of(operator) == "pointwise" for operator in runs_of_all(fused, "norm"))


def runs_of_all(graph: OpGraph, tag: str) -> list[Operator]:
    return [op.operator for op in graph.ops if op.operator.name == FUSED and op.operator.overload == tag]


# Made-up graphs


def an_operator(name: str, inputs: int, outputs: int = 1) -> Operator:
    launch = name not in ("view", "empty_like")
    flops = 1000 if name in ("mm", "convolution") else 0
    return Operator(
        name,
        "",
        (SPEC,) * inputs,
        (SPEC,) * outputs,
        {},
        flops,
        SIZE * inputs * launch,
        SIZE * outputs * launch,
        launch,
    )


def a_stream(calls: list[tuple[str, str, str, tuple[int, ...]]], inputs: int = 1) -> OpGraph:
    """Calls of (phase, module, name, what they read); buffer ``inputs + i`` is the result of the i-th call
    that is no view.

    A buffer dies with its last reader; what the forward pass makes for the backward pass is an activation.
    """
    ops: list[Op] = []
    made: list[int] = [-1] * inputs
    for phase, layer, name, reads in calls:
        writes = () if name == "view" else (len(made),)
        ops.append(Op(an_operator(name, len(reads), len(writes)), phase, layer, reads, writes))  # type: ignore[arg-type]
        made += [len(ops) - 1] * len(writes)
    buffers = []
    for number, born in enumerate(made):
        dies = max(
            (i for i, op in enumerate(ops) if number in op.reads), default=len(ops) if born < 0 else born
        )
        kept = born >= 0 and ops[born].phase == "forward" and ops[dies].phase == "backward"
        buffers.append(
            Buffer(
                SIZE,
                "weights" if born < 0 else "activations" if kept else "temporaries",
                born,
                len(ops) if born < 0 else dies,
            )
        )
    return OpGraph(ops=tuple(ops), buffers=tuple(buffers), samples=1)


def test_a_chain_reads_and_writes_what_others_see() -> None:
    graph = a_stream([
        ("forward", "m", "mm", (0, 0)),  # 1
        ("forward", "m", "mul", (1, 0)),  # 2
        ("forward", "m", "view", (2,)),
        ("forward", "m", "tanh", (2,)),  # 3
        ("forward", "m", "mm", (3, 0)),  # 4
    ])  # fmt: skip
    fused = fuse(graph, Fusion(chains=True))
    assert [op.operator.name for op in fused.ops] == ["mm", FUSED, "mm"]
    assert fused.ops[1].operator.args["ops"] == ["mul", "tanh"]
    assert fused.ops[1].operator.bytes == 3 * SIZE
    assert [(b.born, b.dies) for b in fused.buffers] == [(-1, 3), (0, 1), (1, 2), (2, 2)]


def test_an_allocation_takes_its_shape_from_what_is_never_in_memory() -> None:
    graph = a_stream([
        ("forward", "m", "mul", (0,)),  # 1
        ("forward", "m", "empty_like", (1,)),  # 2
        ("forward", "m", "tanh", (1, 2)),  # 3
        ("forward", "m", "mm", (3, 0)),  # 4
    ])  # fmt: skip
    fused = fuse(graph, COMPILED)
    check_lifetimes(fused)
    assert [(op.operator.name, len(op.reads)) for op in fused.ops] == [
        ("empty_like", 0),
        (FUSED, 2),
        ("mm", 2),
    ]


def test_what_a_product_needs_in_between_is_not_moved() -> None:
    graph = a_stream(
        [("forward", "m", "tanh", (0,)), ("forward", "m", "mm", (1, 0)), ("forward", "m", "mul", (1, 2))]
    )
    assert [op.operator.name for op in fuse(graph, Fusion(chains=True)).ops] == ["tanh", "mm", "mul"]


def test_collectives_break_runs() -> None:
    graph = a_stream(
        [
            ("forward", "m", "tanh", (0,)),
            ("forward", "m", "all_reduce", (0,)),
            ("forward", "m", "mul", (1, 2)),
        ]
    )
    assert [op.operator.name for op in fuse(graph, COMPILED).ops] == [FUSED, "all_reduce", FUSED]


def test_modules_beside_each_other_fuse_across_only() -> None:
    graph = a_stream(
        [("forward", "a", "tanh", (0,)), ("forward", "b", "mul", (0, 1)), ("forward", "b", "mm", (2, 0))]
    )
    assert fuse(graph, Fusion(chains=True)).total("launches") == 3
    assert fuse(graph, COMPILED).total("launches") == 2


NAMES = st.sampled_from(
    ["mul", "tanh", "mean", "add", "mm", "view", "empty_like", "all_reduce", "native_dropout", "convolution"]
)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["", "a", "a.0", "a.0.b", "a.1"]),
        NAMES,
        st.lists(st.integers(0, 6), min_size=1, max_size=2),
    ),
    max_size=40,
)


@given(CALLS, st.integers(0, 40), st.sampled_from(list(FUSIONS.values())))
@example(
    [("", "mul", [0]), ("", "mean", [0]), ("", "empty_like", [0]), ("", "mul", [0, 2])], 0, FUSIONS["chains"]
)  # what is written to is allocated in the shape of what comes between
def test_any_stream_stays_in_order(
    calls: list[tuple[str, str, list[int]]], half: int, fusion: Fusion
) -> None:
    stream: list[tuple[str, str, str, tuple[int, ...]]] = []
    made = 2
    for i, (layer, name, back) in enumerate(calls):
        stream.append(
            (
                "forward" if i < half else "backward",
                layer,
                name,
                tuple(dict.fromkeys(max(0, made - 1 - b) for b in back)),
            )
        )
        made += name != "view"
    graph = a_stream(stream, inputs=2)
    fused = fuse(graph, fusion)
    check_lifetimes(fused)
    assert fused.total("bytes") <= graph.total("bytes")
    assert [op.operator for op in fused.ops if op.operator.flops] == [
        op.operator for op in graph.ops if op.operator.flops
    ]
    parts = Counter(
        name
        for op in fused.ops
        if op.operator.launches
        for name in op.operator.args.get("ops", [op.operator.name])
    )
    assert parts == Counter(op.operator.name for op in graph.ops if op.operator.launches)


def test_a_compiled_model_of_transformers_has_its_masks_written_out() -> None:
    def attention(**training: Any) -> list[Operator]:
        job = a_job("llama", layers=1).to_dict()
        graph = step_graph(Job.read({**job, "training": {**job["training"], **training}}))
        return [op.operator for op in graph.ops if is_attention(op.operator.name)]

    plain, compiled = attention(), attention(compile=True)
    assert len(plain) == len(compiled) == 2
    assert all(operator.args["is_causal"] and "attn_bias" not in operator.args for operator in plain)
    assert not any(operator.args.get("is_causal") for operator in compiled)
    assert all(operator.tensor("attn_bias") is not None for operator in compiled)


def test_what_cuda_graphs_allocate_is_reserved_in_their_pools() -> None:
    def memory(mode: object) -> tuple[float, float, float]:
        tables = a_job("llama", layers=1).to_dict()
        job = Job.read({**tables, "training": {**tables["training"], "compile": mode}})
        found = predictors.get("roofline").predict(job).quantities
        return tuple(
            found[name].median for name in ("peak_memory_bytes", "reserved_memory_bytes", "step_time_s")
        )  # type: ignore[return-value]

    plain, graphs = memory(True), memory("reduce-overhead")
    weights = 4 * sum(weight.elements for weight in step_graph(a_job("llama", layers=1)).weights)
    assert graphs[0] == pytest.approx(weights, rel=0.02), "weights and gradients in bf16"
    assert plain[0] > 1.2 * graphs[0]
    assert graphs[1] == plain[1]
    assert graphs[2] < plain[2]


def test_cuda_graphs_of_layers_or_passes_take_the_host_off_their_calls() -> None:
    def found(graphs: str) -> tuple[float, float]:
        tables = a_job("llama", layers=4).to_dict()
        training = {**tables["training"], "framework": "megatron", "graphs": graphs}
        job = Job.read({**tables, "training": training})
        forecast = predictors.get("roofline").predict(job)
        assert forecast.step is not None
        calls, graph = forecast.step.layout.calls, forecast.step.layout.graph
        of_passes = graph.phase_index != PHASES.index("optimizer")
        assert calls.host_s[~of_passes].sum() > 0
        return float(calls.host_s[of_passes].sum()), forecast["peak_memory_bytes"].median

    (plain_s, plain_bytes), (layers_s, layers_bytes), (step_s, _) = map(found, ("none", "layers", "step"))
    assert step_s == 0
    assert 0 < layers_s < 0.8 * plain_s
    assert layers_bytes == plain_bytes, "as when they are captured"


def test_ranks_keep_their_gradients_out_of_the_pools_of_cuda_graphs() -> None:
    described = a_job("llama", layers=4).to_dict()
    training = {**described["training"], "compile": "reduce-overhead"}
    cluster = {**described["cluster"], "devices_per_node": 2}
    job = Job.read({**described, "training": training, "cluster": cluster, "plan": {"pipeline": 2}})
    found = predictors.get("roofline").predict(job)
    held = found.memory_by_category
    assert held["activations"] == 0
    assert held["gradients"] == pytest.approx(held["weights"], rel=0.01)
