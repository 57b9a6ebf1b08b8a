"""Tracing a step: which operators run, where, on which buffers, how long those live, and what it does to the
user's module (nothing)."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from foretrain.capture import capture
from foretrain.capture.sources.loaded import classifier_loss
from foretrain.capture.tracing.tracer import trace_step
from foretrain.errors import CaptureError, InputError
from foretrain.graph import Buffer, Category, OpGraph, Phase
from foretrain.graph.storage import from_json, to_json
from foretrain.step.replay import replay

IMAGE = torch.zeros(2, 3, 8, 8)
ROWS = torch.zeros(4, 8)


def convnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8 * 6 * 6, 5)
    )


class TwoConvs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.relu(self.second(torch.relu(self.first(x)))).flatten(1))
        return result


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.embedding(ids)).flatten(0, 1)
        return result


class Attention(nn.Module):
    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.causal = nn.Linear(16, 48), nn.Linear(16, 16), causal

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        result: Tensor = self.out(
            F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
            .transpose(1, 2)
            .flatten(2)
        )
        return result


class Checkpointed(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.body, x, use_reentrant=False)


def total(output: Tensor) -> Tensor:
    return output.float().sum()


def launched(graph: OpGraph, phase: Phase) -> list[str]:
    return [op.operator.name for op in graph.ops if op.phase == phase and op.operator.launches]


def named(graph: OpGraph, name: str) -> list[int]:
    return [i for i, op in enumerate(graph.ops) if op.operator.name == name]


def held(graph: OpGraph, category: Category) -> list[Buffer]:
    return [buffer for buffer in graph.buffers if buffer.category == category]


def held_bytes(graph: OpGraph, category: Category) -> int:
    return sum(buffer.size_bytes for buffer in held(graph, category))


def first_op(graph: OpGraph, phase: Phase) -> int:
    return next(i for i, op in enumerate(graph.ops) if op.phase == phase)


# Which operators run


def test_a_small_network_launches_exactly_these_operators() -> None:
    graph = capture(convnet(), IMAGE)
    assert launched(graph, "forward") == [
        "convolution", "add_", "cudnn_batch_norm", "relu_", "addmm", "_log_softmax", "nll_loss_forward",
    ]  # fmt: skip
    assert launched(graph, "backward") == [
        "ones_like", "nll_loss_backward", "_log_softmax_backward_data", "mm", "mm", "sum",
        "threshold_backward",
        "cudnn_batch_norm_backward", "convolution_backward",
    ]  # fmt: skip
    assert launched(graph, "optimizer") == ["_foreach_mul_", "_foreach_add_", "_foreach_add_"]


def test_views_and_empty_launch_nothing_and_move_nothing() -> None:
    graph = capture(convnet(), IMAGE)
    quiet = [op.operator for op in graph.ops if not op.operator.launches]
    assert {operator.name for operator in quiet} == {"view", "t", "detach", "empty"}
    assert all((operator.flops, operator.bytes) == (0, 0) for operator in quiet)
    assert all(not op.writes for op in graph.ops if op.operator.name in ("view", "t", "detach"))


def test_a_reshape_that_has_to_copy_does_launch() -> None:
    graph = capture(nn.Linear(8, 8), ROWS, lambda y: y.t().reshape(-1).sum())
    assert "clone" in launched(graph, "forward")


def test_an_in_place_relu_writes_the_buffer_it_reads() -> None:
    graph = capture(convnet(), IMAGE)
    (relu,), (norm,) = named(graph, "relu_"), named(graph, "cudnn_batch_norm")
    assert graph.ops[relu].reads == graph.ops[relu].writes
    assert set(graph.ops[relu].writes) < set(graph.ops[norm].writes)


def test_what_an_operator_reads_was_written_by_its_producers() -> None:
    graph = capture(TwoConvs(), IMAGE)
    first, second = named(graph, "convolution")
    assert graph.producers(first) == ()
    (between,) = graph.producers(second)
    assert graph.ops[between].operator.name == "relu"
    assert graph.producers(between) == (first,)


def test_two_captures_of_one_model_are_identical() -> None:
    module = convnet()
    assert to_json(capture(module, IMAGE)) == to_json(capture(module, IMAGE))
    assert to_json(capture(convnet(), IMAGE)) == to_json(capture(convnet().to("meta"), IMAGE.to("meta")))


# Parameters and layers


def test_a_shared_parameter_is_counted_and_held_once() -> None:
    graph = capture(Tied(), torch.zeros(2, 3, dtype=torch.long))
    assert graph.parameters == 50 * 8
    assert [buffer.size_bytes for buffer in held(graph, "weights")] == [4 * 50 * 8]
    assert [buffer.size_bytes for buffer in held(graph, "gradients")] == [4 * 50 * 8]
    assert [buffer.size_bytes for buffer in held(graph, "optimizer_state")] == [4 * 50 * 8]


def test_a_frozen_parameter_counts_but_has_no_gradient_and_no_state() -> None:
    module = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 5))
    graph = capture(module, ROWS, optimizer="adam")
    assert graph.parameters == 72 + 45
    assert (held_bytes(graph, "gradients"), held_bytes(graph, "optimizer_state")) == (4 * 45, 8 * 45)


def test_operators_carry_the_path_of_their_layer_in_both_directions() -> None:
    graph = capture(TwoConvs(), IMAGE)
    layers = {
        name: [graph.ops[i].layer for i in named(graph, name)]
        for name in (
            "convolution",
            "convolution_backward",
            "relu",
            "threshold_backward",
            "addmm",
            "mm",
            "nll_loss_backward",
        )
    }
    assert layers == {
        "convolution": ["first", "second"],
        "convolution_backward": ["second", "first"],
        "relu": ["", ""],
        "threshold_backward": ["", ""],
        "addmm": ["head"],
        "mm": ["head", "head"],
        "nll_loss_backward": [""],
    }


def test_nested_layers_have_dotted_paths_and_the_optimizer_has_none() -> None:
    graph = capture(nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3)), nn.Flatten(), nn.Linear(144, 5)), IMAGE)
    assert [
        graph.ops[i].layer for name in ("convolution", "convolution_backward") for i in named(graph, name)
    ] == ["0.0", "0.0"]
    assert {op.layer for op in graph.ops if op.phase == "optimizer"} == {""}


class Forgiving(nn.Module):
    """Tries a child that fails, and goes on without it."""

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError

    def __init__(self) -> None:
        super().__init__()
        self.failing, self.linear = self.Failing(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        try:
            result: Tensor = self.failing(x)
        except ValueError:
            result = self.linear(x) * 2
        return result


def test_a_layer_whose_error_the_model_catches_is_left() -> None:
    graph = capture(Forgiving(), ROWS)
    assert {graph.ops[i].layer for i in named(graph, "mul")} == {""}


# Lifetimes


@pytest.mark.parametrize("precision", ["fp32", "amp-bf16", "bf16"])
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_lifetimes_are_consistent(mode: str, precision: str) -> None:
    graph = capture(convnet(), IMAGE, mode=mode, precision=precision, optimizer="adamw")
    end = len(graph.ops)
    assert all(-1 <= buffer.born <= buffer.dies <= end for buffer in graph.buffers)
    for i, op in enumerate(graph.ops):
        assert all(
            graph.buffers[number].born < i <= graph.buffers[number].dies
            for number in op.reads
            if number not in op.writes
        )
        assert all(graph.buffers[number].born <= i for number in op.writes)


def test_saved_activations_die_in_the_backward_pass() -> None:
    graph = capture(convnet(), IMAGE)
    backward, optimizer = first_op(graph, "backward"), first_op(graph, "optimizer")
    (loss,) = [graph.ops[i].writes[0] for i in named(graph, "nll_loss_forward")]
    kept = [
        buffer
        for number, buffer in enumerate(graph.buffers)
        if buffer.category == "activations" and number != loss
    ]
    assert (
        sum(buffer.size_bytes for buffer in kept) >= 2 * 4 * 2 * 8 * 6 * 6
    )  # the inputs of batch norm and of the linear layer
    assert all(0 <= buffer.born < backward <= buffer.dies < optimizer for buffer in kept)


def test_an_activation_dies_at_its_last_reader() -> None:
    graph = capture(TwoConvs(), IMAGE)
    first, second = named(graph, "convolution")
    between = next(number for number in graph.ops[second].reads if graph.buffers[number].born > first)
    readers = [i for i, op in enumerate(graph.ops) if between in op.reads]
    assert graph.buffers[between].dies == readers[-1]
    # relu keeps its result, not its operand
    assert graph.buffers[graph.ops[first].writes[0]].dies < second


def test_gradients_live_from_the_backward_pass_to_the_end_of_the_optimizer() -> None:
    graph = capture(convnet(), IMAGE)
    gradients = held(graph, "gradients")
    assert sum(buffer.size_bytes for buffer in gradients) == 4 * graph.parameters
    backward, optimizer = first_op(graph, "backward"), first_op(graph, "optimizer")
    assert all(backward <= buffer.born < optimizer for buffer in gradients)
    assert all(buffer.dies >= len(graph.ops) - 1 for buffer in gradients)


def test_temporaries_die_and_what_was_there_before_stays() -> None:
    graph = capture(convnet(), IMAGE, optimizer="adam")
    assert held(graph, "temporaries")
    assert all(buffer.born >= 0 and buffer.dies < len(graph.ops) for buffer in held(graph, "temporaries"))
    for category in ("weights", "optimizer_state", "inputs"):
        assert all((buffer.born, buffer.dies) == (-1, len(graph.ops)) for buffer in held(graph, category))


# Accumulation and inference


def test_accumulation_adds_to_gradients_that_exist_before_the_step() -> None:
    options: dict[str, Any] = {"samples": 2}
    once = trace_step(convnet().to("meta"), (IMAGE,), classifier_loss(), **options)
    graph = trace_step(convnet().to("meta"), (IMAGE,), classifier_loss(), accumulate=True, **options)
    assert (once.accumulates, graph.accumulates) == (False, True)
    assert all(buffer.born == -1 for buffer in held(graph, "gradients"))
    assert held_bytes(graph, "gradients") == held_bytes(once, "gradients") == 4 * graph.parameters
    assert launched(graph, "backward").count("add_") == len(list(convnet().parameters()))
    assert launched(once, "backward").count("add_") == 0
    added = {
        number
        for i in named(graph, "add_")
        if graph.ops[i].phase == "backward"
        for number in graph.ops[i].writes
    }
    assert {graph.buffers[number].category for number in added} == {"gradients"}


def test_inference_runs_forward_alone_and_frees_activations_early() -> None:
    train, infer = (capture(TwoConvs(), IMAGE, mode=mode) for mode in ("train", "infer"))
    assert {op.phase for op in infer.ops} == {"forward"}
    assert {buffer.category for buffer in infer.buffers} == {"weights", "inputs", "temporaries"}
    first, second = named(infer, "convolution")
    assert infer.buffers[infer.ops[first].writes[0]].dies < second
    assert (
        replay(infer.buffers, [0] * len(infer.ops)).allocated_bytes
        < replay(train.buffers, [0] * len(train.ops)).allocated_bytes
    )


def test_inference_needs_no_loss_and_no_trainable_parameter() -> None:
    assert launched(capture(nn.ReLU(), ROWS, mode="infer"), "forward") == ["relu"]
    with pytest.raises(CaptureError, match=r"no trainable parameter; use training\.mode = 'infer'"):
        capture(nn.ReLU(), ROWS)


def test_batch_norm_and_dropout_know_that_they_infer() -> None:
    graph = capture(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)), IMAGE, mode="infer"
    )
    assert launched(graph, "forward") == ["convolution", "cudnn_batch_norm"]
    assert graph.ops[named(graph, "cudnn_batch_norm")[0]].operator.args.get("training") is False


# Dtypes and layouts


def test_channels_last_reaches_the_outputs_of_convolutions() -> None:
    graph = capture(TwoConvs(), IMAGE, channels_last=True)
    assert all(
        graph.ops[i].operator.outputs[0].channels_last
        for i in (*named(graph, "convolution"), *named(graph, "relu"))
    )


def test_channels_last_is_refused_where_torch_does_not_lay_weights_out_so() -> None:
    with pytest.raises(
        InputError, match=r"^training.channels_last: true, but weight has 5 dimensions, which "
    ):
        capture(nn.Conv3d(3, 4, 1), torch.zeros(2, 3, 4, 4, 4), channels_last=True)


def test_channels_last_is_the_layout_of_input_and_weights() -> None:
    plain, last = (capture(TwoConvs(), IMAGE, channels_last=flag) for flag in (False, True))
    for graph, expected in ((plain, False), (last, True)):
        operator = graph.ops[named(graph, "convolution")[0]].operator
        assert [operator.inputs[0].channels_last, operator.inputs[1].channels_last] == [expected, expected]


@pytest.mark.parametrize(
    ("precision", "dtype", "size"),
    [("fp32", "float32", 4), ("tf32", "float32", 4), ("bf16", "bfloat16", 2), ("fp16", "float16", 2), ("fp8",
    "bfloat16", 2), ("amp-bf16", "bfloat16", 4)],
)  # fmt: skip
def test_precision_decides_the_dtype_of_weights_and_products(precision: str, dtype: str, size: int) -> None:
    graph = capture(nn.Linear(8, 5), ROWS, precision=precision)
    assert {spec.dtype for i in named(graph, "addmm") for spec in graph.ops[i].operator.inputs} == {dtype}
    assert held_bytes(graph, "weights") == size * graph.parameters
    assert held_bytes(graph, "gradients") == size * graph.parameters


def test_master_weights_are_fp32_optimizer_state_and_are_cast_back() -> None:
    plain = capture(nn.Linear(8, 5), ROWS, precision="bf16", optimizer="adam")
    master = capture(nn.Linear(8, 5), ROWS, precision="bf16", optimizer="adam", master_weights=True)
    parameters = 45
    assert held_bytes(plain, "optimizer_state") == 2 * 2 * parameters
    assert held_bytes(master, "optimizer_state") == (4 + 4 + 4) * parameters
    assert held_bytes(master, "weights") == held_bytes(plain, "weights") == 2 * parameters
    ((*_, last),) = [launched(master, "optimizer")]
    assert last == "_foreach_copy_"
    back = master.ops[named(master, "_foreach_copy_")[0]].operator
    assert {spec.dtype for spec in back.tensors("self")} == {"bfloat16"}
    assert {spec.dtype for spec in back.tensors("src")} == {"float32"}


# The module in hand


def test_capture_leaves_the_users_module_alone() -> None:
    module = convnet().eval()
    weight = module.get_parameter("0.weight")
    weight.grad = torch.ones_like(weight)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    tensors = [id(tensor) for tensor in (*module.parameters(), *module.buffers())]
    capture(module, IMAGE, precision="bf16", channels_last=True, optimizer="adamw")
    assert all(
        torch.equal(value, before[name]) and value.device.type == "cpu"
        for name, value in module.state_dict().items()
    )
    assert [id(tensor) for tensor in (*module.parameters(), *module.buffers())] == tensors
    assert not any(child.training for child in module.modules())
    assert module.get_parameter("0.weight") is weight
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert all(parameter.grad is None for parameter in list(module.parameters())[1:])


def test_capture_leaves_a_module_on_meta_alone() -> None:
    module = convnet().to("meta").eval()
    capture(module, IMAGE, precision="bf16")
    assert not module.training
    assert all(
        parameter.dtype == torch.float32 and parameter.grad is None for parameter in module.parameters()
    )


class OnlyBuffers(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Any:
        return x * self.scale


def test_capture_leaves_a_module_of_buffers_alone() -> None:
    module = OnlyBuffers()
    capture(module, ROWS, mode="infer")
    assert torch.equal(module.get_buffer("scale"), torch.ones(8))


class Keeper(nn.Module):
    """Keeps its last activation, as models that are inspected do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.last = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.linear(x)
        return self.last


def test_a_module_that_keeps_an_activation_is_captured() -> None:
    module = Keeper()
    module(ROWS)
    assert "addmm" in launched(capture(module, ROWS), "forward")


def test_inputs_may_be_a_tensor_a_tuple_or_a_mapping() -> None:
    graphs = [capture(nn.Linear(8, 5), given) for given in (ROWS, (ROWS,), {"input": ROWS})]
    assert len({str(to_json(graph)) for graph in graphs}) == 1
    assert graphs[0].samples == 4
    assert capture(nn.Linear(8, 5), ROWS, samples=2, tokens=64).samples == 2


# Errors


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("no such head")


def test_an_error_in_the_model_names_its_module_and_line() -> None:
    with pytest.raises(
        CaptureError,
        match=r"^module 1\.0: KeyError: .*no such head.* \(at .*test_capture_tracer\.py:\d+ in forward\)$",
    ):
        capture(nn.Sequential(nn.Linear(8, 8), nn.Sequential(Broken())), ROWS)


def test_a_wrong_shape_is_one_line_that_names_the_module() -> None:
    with pytest.raises(CaptureError, match=r"^module 1: RuntimeError: [^\n]* \(at [^\n]*\)$"):
        capture(nn.Sequential(nn.Linear(8, 8), nn.Linear(9, 8)), ROWS)


@pytest.mark.parametrize(
    ("loss", "message"),
    [(None, r"an output of shape \[4\] has no default loss"), (lambda _: None, "^loss: missing")],
)
def test_an_output_without_a_loss_says_what_to_do(loss: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(nn.Sequential(nn.Linear(8, 1), nn.Flatten(0)), ROWS, loss)


def test_no_hook_is_left_behind() -> None:
    with pytest.raises(CaptureError):
        capture(Broken(), ROWS, mode="infer")
    capture(nn.Linear(8, 5), ROWS)
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks


# Recomputation


class Checkpoints(nn.Module):
    """A product of 4 columns, made 8 wide; then a checkpoint around products of 16 and 8 columns that are
    called in a function of the model, not in a module."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first, self.wide, self.narrow = (
            nn.Linear(inputs, outputs, bias=False) for inputs, outputs in ((8, 4), (8, 16), (16, 8))
        )

    def body(self, x: Tensor) -> Any:
        return F.linear(torch.tanh(F.linear(x, self.wide.weight)), self.narrow.weight)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x).repeat(1, 2)
        if self.way == "none":
            return self.body(x)
        if self.way == "sequential":
            steps = nn.Sequential(self.wide, nn.Tanh(), self.narrow, nn.Tanh())
            return checkpoint_sequential(steps, 2, x, use_reentrant=False)
        kept = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        more: dict[str, Any] = {"context_fn": kept} if self.way == "products kept" else {}
        return checkpoint(self.body, x, use_reentrant=self.way == "reentrant", **more)


X, TANH, WIDE, NARROW = 32 * 8 * 4, 32 * 16 * 4, 32 * 16 * 4, 32 * 8 * 4
"""Bytes of what is in the checkpoint, of 32 rows in fp32."""


@pytest.mark.parametrize(
    ("way", "again", "kept"),
    [
        ("none", [], X + TANH),
        ("plain", ["mm", "tanh"], X),  # the last product is not asked for
        ("reentrant", ["mm", "tanh", "mm"], X),
        ("products kept", ["tanh"], X + WIDE + NARROW),
        ("sequential", ["mm", "tanh"], X + TANH + NARROW),  # the last segment is no checkpoint
    ],
)
def test_a_checkpoint_keeps_its_input_and_computes_the_rest_again(
    way: str, again: list[str], kept: int
) -> None:
    graph = capture(Checkpoints(way), torch.zeros(32, 8), total)
    recomputed = [op for op in graph.ops if op.recomputed]
    assert [op.operator.name for op in recomputed if op.operator.launches] == again
    assert {op.phase for op in recomputed} <= {"backward"}
    end = int((graph.phase_index == 0).sum())
    held_then = [
        b.size_bytes for b in graph.buffers if b.category == "activations" and b.born < end <= b.dies
    ]
    assert sum(held_then) - 4 == kept  # and the loss
    again_read = from_json(json.loads(json.dumps(to_json(graph))))
    assert [(op.recomputed, op.hooks) for op in again_read.ops] == [
        (op.recomputed, op.hooks) for op in graph.ops
    ]


@pytest.mark.parametrize(
    ("way", "hooks"),
    [("none", 0), ("plain", 11 + 20 + 3 * 5), ("reentrant", 11 + 20)],  # five tensors: packed twice, unpacked
)
def test_checkpoints_keep_the_host_busy(way: str, hooks: int) -> None:
    graph = capture(Checkpoints(way), torch.zeros(32, 8), total)
    assert sum(op.hooks for op in graph.ops) == hooks


@pytest.mark.parametrize("way", ["plain", "reentrant"])
def test_what_a_checkpoint_computes_again_is_let_go_with_its_layer(way: str) -> None:
    graph = capture(Checkpoints(way), torch.zeros(32, 8), total)
    gradient = next(i for i, op in enumerate(graph.ops) if op.operator.name == "tanh_backward")
    (tanh,) = (op for op in graph.ops if op.recomputed and op.operator.name == "tanh")
    assert graph.buffers[tanh.writes[0]].category == "activations"
    assert graph.buffers[tanh.writes[0]].dies == gradient


def test_what_runs_again_outside_of_modules_is_cast_and_fused_as_on_cuda() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 16), nn.Parameter(torch.ones(4, 64))

        def attend(self, x: Tensor) -> Any:
            x = x.unflatten(-1, (2, 8)).transpose(1, 2)
            return F.linear(F.scaled_dot_product_attention(x, x, x).relu().flatten(2), self.last).exp()

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.attend, self.first(x), use_reentrant=False)

    graph = capture(Attends(), torch.zeros(2, 8, 16), total, precision="amp-bf16")
    again = [op.operator.name for op in graph.ops if op.recomputed and op.operator.launches]
    assert "_scaled_dot_product_flash_attention" in again
    product = next(op.operator for op in graph.ops if op.recomputed and op.operator.name == "mm")
    assert {spec.dtype for spec in product.inputs} == {"bfloat16"}


def test_code_that_recomputes_by_itself_is_told_apart() -> None:
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor, body: nn.Module) -> Any:
            context.save_for_backward(x)
            context.body = body
            with torch.no_grad():
                return body(x)

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Any:
            x = context.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                result = context.body(x)
            torch.autograd.backward(result, gradient)
            return x.grad, None

    class Reversible(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.body = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())

        def forward(self, x: Tensor) -> Any:
            return Again.apply(self.first(x), self.body)  # type: ignore[no-untyped-call]

    graph = capture(Reversible(), ROWS, total)
    again = [(op.operator.name, op.layer) for op in graph.ops if op.recomputed and op.operator.launches]
    assert again == [("addmm", "body.0"), ("tanh", "body.1")]


def test_checkpointed_layers_run_again_in_the_backward_pass() -> None:
    body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    graph = capture(Checkpointed(body), ROWS, total)
    assert launched(graph, "forward")[:4] == ["addmm", "relu", "addmm", "relu"]
    again = [(op.operator.name, op.layer) for op in graph.ops if op.recomputed and op.operator.launches]
    assert again == [(name, f"body.{i}") for i, name in enumerate(("addmm", "relu", "addmm", "relu"))]


@pytest.mark.parametrize(
    ("body", "inputs", "precision"),
    [
        (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), ROWS, "amp-bf16"),
        (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8)), ROWS, "fp32"),
        (Attention(), torch.zeros(2, 8, 16), "bf16"),
    ],
    ids=["autocast", "dropout", "attention"],
)
def test_checkpointed_layers_are_recomputed_with_the_same_kernels(
    body: nn.Module, inputs: Tensor, precision: str
) -> None:
    graph = capture(Checkpointed(body), inputs, total, precision=precision)
    again = [op.operator.name for op in graph.ops if op.phase == "backward"]
    assert "addmm" in again


# FLOPs


@pytest.mark.parametrize(
    ("module", "inputs", "precision"),
    [
        (TwoConvs(), IMAGE, "fp32"),
        (TwoConvs(), IMAGE, "amp-bf16"),
        (
            nn.Sequential(nn.ConvTranspose2d(3, 4, 3, stride=2), nn.Flatten(), nn.Linear(4 * 17 * 17, 5)),
            IMAGE,
            "fp32",
        ),
        (Attention(), torch.zeros(2, 8, 16), "fp32"),
        (Attention(causal=True), torch.zeros(2, 8, 16), "bf16"),
    ],
    ids=["convnet", "convnet-amp", "transposed", "attention-efficient", "attention-flash"],
)
def test_flops_are_those_of_torchs_counter(module: nn.Module, inputs: Tensor, precision: str) -> None:
    with FlopCounterMode(display=False) as counter:
        graph = trace_step(module.to("meta"), (inputs,), total, samples=2, precision=precision)
    theirs = {
        str(packet).removeprefix("aten."): count
        for packet, count in counter.get_flop_counts()["Global"].items()
    }
    ours = {name: sum(graph.ops[i].operator.flops for i in named(graph, name)) for name in theirs}
    assert ours == theirs
    assert graph.total("flops") == counter.get_total_flops() > 0


def test_modules_that_other_threads_run_are_not_part_of_the_trace() -> None:
    import threading

    inside, may_end = threading.Event(), threading.Event()

    class Slow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            may_end.wait(10)
            return x

    class First(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.other = threading.Thread(target=Slow(), args=(torch.ones(1),))
            self.other.start()
            inside.wait(10)
            return x + 1

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = First(), torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            x = self.first(x) * 2
            may_end.set()
            self.first.other.join()
            return self.last(x).sum()

    graph = trace_step(Whole().to("meta"), (torch.empty(2, 4, device="meta"),), lambda out: out, samples=2)
    layers = {op.operator.name: op.layer for op in graph.ops if op.phase == "forward"}
    assert (layers["add"], layers["mul"], layers["addmm"]) == ("first", "", "last")
