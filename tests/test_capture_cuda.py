"""Tracing on meta takes CUDA's decisions: autocast's casts, fused attention, dropout and recurrences; and
only while it traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretrain.capture import capture
from foretrain.capture.tracing import cuda
from foretrain.costs.recurrences import cells
from foretrain.errors import CaptureError
from foretrain.graph import Operator, OpGraph, Phase

ROWS = torch.zeros(4, 8)
IMAGE = torch.zeros(2, 3, 8, 8)
STEPS = torch.zeros(5, 2, 8)


class Call(nn.Module):
    """A function of one weight and the inputs."""

    def __init__(self, function: Callable[..., Tensor], *shape: int) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(shape)), function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self.weight, *inputs)


def trace(module: nn.Module, *inputs: Tensor, precision: str = "fp32", mode: str = "train") -> OpGraph:
    return capture(module, inputs, total, precision=precision, mode=mode)


def total(output: Any) -> Tensor:
    result: Tensor = (output[0] if isinstance(output, tuple) else output).float().sum()
    return result


def launched(graph: OpGraph, phase: Phase = "forward") -> list[str]:
    return [op.operator.name for op in graph.ops if op.phase == phase and op.operator.launches]


def only(graph: OpGraph, name: str) -> Operator:
    (operator,) = [op.operator for op in graph.ops if op.operator.name == name]
    return operator


# Autocast

# torch has an autocast kernel for these, and we have none under that name.
HANDLED_ELSEWHERE = {
    "_scaled_dot_product_flash_attention",  # its operands were cast by scaled_dot_product_attention
    "cudnn_convolution",  # reached through convolution, whose operands were cast
    "cudnn_convolution_transpose",
}
BANNED = {"binary_cross_entropy"}  # raises on CUDA inside of autocast
# We cast these, and torch casts what they call: _cudnn_rnn, whose kernel is in CUDA builds alone.
CUDNN_ONLY = {
    f"{kind}.{form}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("input", "data")
}


def test_the_cast_lists_are_those_of_torch() -> None:
    key = "AutocastCUDA"
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    torchs = {
        name.removeprefix("aten::")
        for name in names
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    }
    ours = [*cuda._TO_LOW, *cuda._TO_HALF, *cuda._TO_FLOAT, *cuda._DTYPE_FLOAT, *cuda._PROMOTE]
    assert len(ours) == len(set(ours))
    assert torchs - set(ours) == HANDLED_ELSEWHERE | BANNED
    assert set(ours) - torchs == CUDNN_ONLY
    assert all(cuda._overload(name) is not None for name in ours)


def test_products_run_in_the_low_dtype_and_norms_softmax_and_losses_in_fp32() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Softmax(-1))
    graph = capture(module, ROWS, lambda y: F.mse_loss(y, torch.zeros_like(y)), precision="amp-bf16")
    dtypes = {
        op.operator.name: {spec.dtype for spec in op.operator.inputs}
        for op in graph.ops
        if op.phase == "forward"
    }
    assert dtypes["addmm"] == {"bfloat16"}
    assert dtypes["native_layer_norm"] == dtypes["_softmax"] == dtypes["mse_loss"] == {"float32"}


def test_the_loss_of_low_logits_is_fp32() -> None:
    graph = capture(nn.Linear(8, 5), ROWS, precision="amp-bf16")
    assert {spec.dtype for spec in only(graph, "nll_loss_forward").outputs} == {"float32"}


def test_gradients_of_fp32_weights_are_fp32() -> None:
    graph = trace(nn.Linear(8, 5), ROWS, precision="amp-bf16")
    assert sum(b.size_bytes for b in graph.buffers if b.category == "gradients") == 4 * 45


class Attending(nn.Module):
    def __init__(self, need_weights: bool = False) -> None:
        super().__init__()
        self.attention, self.need_weights = nn.MultiheadAttention(16, 2, batch_first=True), need_weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.attention(x, x, x, need_weights=self.need_weights)[0]
        return output


def test_attention_of_torch_takes_a_shorter_way_where_it_serves() -> None:
    names = launched(trace(Attending(), torch.zeros(4, 8, 16), mode="infer"))
    assert names == ["addmm", "_scaled_dot_product_efficient_attention", "addmm"]
    shown = launched(trace(Attending(need_weights=True), torch.zeros(4, 8, 16), mode="infer"))
    assert shown.count("bmm") == 2
    for precision, mode in (("amp-bf16", "infer"), ("fp32", "train")):
        assert "clone" in launched(trace(Attending(), torch.zeros(4, 8, 16), precision=precision, mode=mode))


def test_an_encoder_that_serves_takes_a_padding_mask() -> None:
    class Encoding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.zeros(4, 8, dtype=torch.bool, device=x.device)
            output: torch.Tensor = self.encoder(x, src_key_padding_mask=hidden)
            return output

    assert "native_layer_norm" in launched(trace(Encoding(), torch.zeros(4, 8, 16), mode="infer"))


def test_an_rms_norm_is_one_kernel_as_are_its_gradients() -> None:
    graph = trace(nn.RMSNorm(8), torch.zeros(4, 16, 8))
    forward, backward = (only(graph, f"_fused_rms_norm{suffix}") for suffix in ("", "_backward"))
    assert [spec.shape for spec in forward.outputs] == [(4, 16, 8), (4, 16, 1)]
    assert [spec.shape for spec in backward.outputs][-1:] == [(8,)]
    assert not {"pow", "rsqrt", "mean"} & set(launched(graph))


@pytest.mark.parametrize(("in_rows", "fused"), [(True, True), (False, False)])
def test_fused_attention_takes_a_mask_in_rows_alone(in_rows: bool, fused: bool) -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(16, 16, 2), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bias = self.bias.permute(2, 0, 1)[None]
            bias = bias.contiguous() if in_rows else bias
            return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=bias)

    graph = trace(Biased(), torch.zeros(4, 2, 16, 8), mode="infer")
    assert ("_scaled_dot_product_efficient_attention" in launched(graph)) is fused


def test_a_weight_is_cast_once_per_step_however_often_its_layer_runs() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            return self.layer(self.layer(x))

    graph = trace(Twice(), ROWS, precision="amp-bf16")
    casts = [
        op.operator
        for op in graph.ops
        if op.operator.name == "_to_copy" and op.layer == "layer" and op.phase == "forward"
    ]
    assert [cast.inputs[0].shape for cast in casts] == [(4, 8), (8, 8), (8,)]
    assert launched(graph).count("addmm") == 2


def test_a_weight_is_cast_again_in_the_next_step() -> None:
    module = nn.Linear(8, 8).to("meta")
    counts = [launched(trace(module, ROWS, precision="amp-bf16")).count("_to_copy") for _ in range(2)]
    assert counts[0] == counts[1]
    assert not cuda._weight_casts


@pytest.mark.parametrize(
    ("layer", "name"), [(nn.Softmax(-1), "_softmax"), (nn.LogSoftmax(-1), "_log_softmax")]
)
def test_softmax_reads_fp16_and_writes_fp32_in_one_kernel(layer: nn.Module, name: str) -> None:
    graph = trace(nn.Sequential(nn.Linear(8, 8), layer), ROWS, precision="amp-fp16")
    softmax = only(graph, name)
    assert (softmax.inputs[0].dtype, softmax.outputs[0].dtype) == ("float16", "float32")
    assert launched(graph).count("_to_copy") == 3  # input, weight and bias of the linear layer
    assert only(graph, f"{name}_backward_data").outputs[0].dtype == "float16"


def test_softmax_of_bf16_is_converted_first() -> None:
    graph = trace(nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)), ROWS, precision="amp-bf16")
    assert launched(graph)[-3:] == ["_to_copy", "_softmax", "sum"]
    assert only(graph, "_softmax").inputs[0].dtype == "float32"


def test_a_dtype_that_the_model_asks_for_is_kept() -> None:
    graph = trace(
        Call(lambda w, x: (x @ w).softmax(-1, dtype=torch.bfloat16), 8, 8), ROWS, precision="amp-bf16"
    )
    assert only(graph, "_softmax").outputs[0].dtype == "bfloat16"


def test_mixed_operands_are_promoted() -> None:
    graph = trace(Call(lambda w, x: torch.addcmul(x, x @ w, x), 8, 8), ROWS, precision="amp-bf16")
    assert {spec.dtype for spec in only(graph, "addcmul").inputs} == {"float32"}


def test_integers_and_doubles_are_not_cast() -> None:
    graph = trace(
        Call(lambda w, x, y: (w * (y @ y)).sum() + F.linear(x, w).sum(), 8, 8),
        ROWS,
        torch.zeros(8, 8).double(),
        precision="amp-bf16",
    )
    assert sorted(
        op.operator.inputs[0].dtype for op in graph.ops if op.operator.name == "mm" and op.phase == "forward"
    ) == [
        "bfloat16",
        "float64",
    ]


def test_norms_inside_of_torch_functions_are_fp32() -> None:
    graph = trace(
        Call(lambda w, x: F.pairwise_distance(x @ w, (x @ w).sin()), 8, 8), ROWS, precision="amp-bf16"
    )
    assert only(graph, "norm").outputs[0].dtype == "float32"


def without_autocast(device: str) -> Callable[[Tensor, Tensor], Tensor]:
    def function(weight: Tensor, x: Tensor) -> Tensor:
        with torch.autocast(device or x.device.type, enabled=False):
            return x @ weight

    return function


@pytest.mark.parametrize("device", ["cuda", ""])
def test_a_region_that_switches_autocast_off_runs_in_fp32(device: str) -> None:
    graph = trace(Call(without_autocast(device), 8, 8), ROWS, precision="amp-bf16")
    products = [op.operator for op in graph.ops if op.operator.name == "mm"]
    assert {spec.dtype for product in products for spec in product.inputs} == {"float32"}


# Kernels


def test_dropout_is_one_kernel_in_training_and_nothing_in_inference() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))
    train, infer = (trace(module, ROWS, mode=mode) for mode in ("train", "infer"))
    assert launched(train) == ["addmm", "native_dropout", "sum"]
    assert "native_dropout_backward" in launched(train, "backward")
    assert launched(infer) == ["addmm"]


@pytest.mark.parametrize(
    ("precision", "name"),
    [
        ("fp32", "cudnn_batch_norm"),
        ("amp-fp16", "cudnn_batch_norm"),
        ("amp-bf16", "native_batch_norm"),
        ("bf16", "native_batch_norm"),
    ],
)
def test_batch_norm_is_cudnns_unless_it_is_in_bf16(precision: str, name: str) -> None:
    graph = trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), IMAGE, precision=precision)
    assert name in launched(graph)
    assert f"{name}_backward" in launched(graph, "backward")


def test_batch_norm_without_weights_is_torchs_own() -> None:
    graph = trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False)), IMAGE)
    assert "native_batch_norm" in launched(graph)


def test_batch_norm_of_rows_is_torchs_own() -> None:
    graph = trace(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), ROWS)
    assert "native_batch_norm" in launched(graph)
    assert "native_batch_norm_backward" in launched(graph, "backward")


def heads(count: int = 4, length: int = 16, width: int = 32) -> Tensor:
    return torch.zeros(2, count, length, width)


def attention(
    weight: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Tensor:
    return F.scaled_dot_product_attention(
        query * weight, key, value, mask, enable_gqa=query.shape[1] != key.shape[1]
    )


FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
BOOL, FLOAT = torch.ones(2, 1, 16, 16, dtype=torch.bool), torch.zeros(2, 1, 16, 16)


@pytest.mark.parametrize(
    ("precision", "mask", "name"),
    [
        ("bf16", None, FLASH),
        ("fp16", None, FLASH),
        ("amp-bf16", None, FLASH),
        ("fp32", None, EFFICIENT),
        ("fp32", BOOL, EFFICIENT),
        ("fp32", FLOAT, EFFICIENT),
        ("bf16", BOOL, EFFICIENT),
        ("bf16", FLOAT, EFFICIENT),
    ],
)
def test_attention_is_flash_for_half_precision_and_memory_efficient_otherwise(
    precision: str, mask: Tensor | None, name: str
) -> None:
    graph = trace(
        Call(attention, 1), heads(), heads(), heads(), *(() if mask is None else (mask,)), precision=precision
    )
    assert [op for op in launched(graph) if "attention" in op] == [name]
    assert [op for op in launched(graph, "backward") if "attention" in op] == [f"{name}_backward"]
    assert not {"bmm", "_softmax"} & set(launched(graph))


def test_grouped_query_attention_is_flash_in_bf16_and_plain_in_fp32() -> None:
    graphs = {
        precision: trace(Call(attention, 1), heads(4), heads(2), heads(2), precision=precision)
        for precision in ("bf16", "fp32")
    }
    assert FLASH in launched(graphs["bf16"])
    assert launched(graphs["fp32"]).count("bmm") == 2
    assert not any("flash" in op or "efficient" in op for op in launched(graphs["fp32"]))


@pytest.mark.parametrize(("length", "padded"), [(16, 16), (12, 16), (9, 16)])
def test_the_bias_of_attention_is_padded_to_a_multiple_of_eight(length: int, padded: int) -> None:
    rows = heads(length=length)
    graph = trace(Call(attention, 1), rows, rows, rows, torch.zeros(2, 1, length, length))
    bias = only(graph, EFFICIENT).tensor("attn_bias")
    assert bias is not None
    assert bias.shape == (2, 4, length, length)
    assert bias.strides == (length * padded, 0, padded, 1)
    assert ("constant_pad_nd" in launched(graph)) == (length != padded)


def test_flash_attention_pads_its_heads_to_a_multiple_of_eight() -> None:
    graph = trace(Call(attention, 1), *[heads(width=20)] * 3, precision="bf16")
    assert launched(graph).count("constant_pad_nd") == 3
    assert {spec.shape[-1] for spec in only(graph, FLASH).inputs[:3]} == {24}


@pytest.mark.parametrize(("layer", "mode"), [(nn.LSTM, 2), (nn.GRU, 3), (nn.RNN, 1)])
@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", "float32"), ("amp-bf16", "float16"), ("amp-fp16", "float16"), ("bf16", "bfloat16")],
)
def test_a_recurrence_is_one_cudnn_call(
    layer: Callable[..., nn.RNNBase], mode: int, precision: str, dtype: str
) -> None:
    graph = trace(layer(8, 16, num_layers=2, bidirectional=True), STEPS, precision=precision)
    forward, backward = only(graph, "_cudnn_rnn"), only(graph, "_cudnn_rnn_backward")
    assert (forward.outputs[0].shape, forward.outputs[0].dtype) == ((5, 2, 32), dtype)
    assert forward.args["mode"] == mode
    assert backward.flops == 2 * forward.flops > 0
    assert not {"mm", "addmm", "sigmoid", "tanh"} & set(launched(graph))


def test_a_recurrence_keeps_the_order_of_its_dimensions() -> None:
    graph = trace(nn.LSTM(8, 16, batch_first=True), torch.zeros(2, 5, 8))
    assert only(graph, "_cudnn_rnn").outputs[0].shape == (2, 5, 16)


def test_a_recurrence_reserves_memory_for_the_backward_pass_in_training_alone() -> None:
    train, infer = (
        only(trace(nn.LSTM(8, 16), STEPS, mode=mode), "_cudnn_rnn").outputs[3] for mode in ("train", "infer")
    )
    assert train.size_bytes > 4 * 5 * 2 * 16
    assert infer.size_bytes == 0


class Packed(nn.Module):
    def __init__(self, *lengths: int) -> None:
        super().__init__()
        self.lstm, self.lengths = nn.LSTM(8, 16), lengths

    def forward(self, x: Tensor) -> Tensor:
        packed: Tensor = self.lstm(nn.utils.rnn.pack_padded_sequence(x, torch.tensor(self.lengths)))[0].data
        return packed


def test_a_packed_sequence_is_one_cudnn_call() -> None:
    assert "_cudnn_rnn" in launched(trace(Packed(5, 3), STEPS))


class PackedByLengths(nn.LSTM):
    """Takes the lengths as an input, which cuDNN wants on the CPU."""

    def __init__(self, send: Callable[[Tensor], Any]) -> None:
        super().__init__(8, 16)
        self.send = send

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        packed = nn.utils.rnn.pack_padded_sequence(x, self.send(lengths), enforce_sorted=False)
        data: Tensor = super().forward(packed)[0].data
        return data


@pytest.mark.parametrize(
    "send",
    [lambda one: one, lambda one: one.to("cpu"), lambda one: one.to(torch.device("cpu"), torch.int64)],
)
def test_lengths_that_are_an_input_are_known_on_the_cpu(send: Callable[[Tensor], Any]) -> None:
    graph = capture(PackedByLengths(send), (STEPS, torch.tensor([5, 3])), lambda data: data.sum())
    assert only(graph, "_cudnn_rnn").outputs[0].shape == (5 + 3, 16)


@pytest.mark.parametrize("name", ["_cudnn_rnn", "_cudnn_rnn_backward"])
def test_a_packed_sequence_takes_as_many_steps_in_turn_as_its_longest(name: str) -> None:
    whole, packed = (cells(only(trace(module, STEPS), name)) for module in (nn.LSTM(8, 16), Packed(5, 5)))
    assert packed == whole
    assert cells(only(trace(Packed(4, 1), STEPS), name)) < packed


# Operators without a kernel on meta


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.distributions.Gamma(x, x).rsample(),
        lambda x: torch.distributions.Dirichlet(x).rsample(),
        lambda x: x * torch.binomial(torch.full_like(x, 5.0), x.detach()),
        lambda x: F.multi_margin_loss(x, torch.zeros(4, dtype=torch.long)),
        lambda x: F.multilabel_margin_loss(x, torch.zeros(4, 6, dtype=torch.long)),
        lambda x: F.fractional_max_pool3d(x.view(1, 4, 6, 1, 1).expand(1, 4, 6, 6, 6), 2, output_size=3),
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
        lambda x: torch.fake_quantize_per_tensor_affine(
            x, torch.tensor([0.1]), torch.tensor([0], dtype=torch.int32), -128, 127
        ),
        lambda x: torch.fake_quantize_per_channel_affine(
            x, torch.ones(6), torch.zeros(6, dtype=torch.int32), 1, -128, 127
        ),
        lambda x: torch._fake_quantize_learnable_per_tensor_affine(
            x, torch.ones(1), torch.zeros(1), -128, 127
        ),
        lambda x: torch.linalg.lstsq(x.T, x.T).solution,
        lambda x: (
            torch.linalg.lstsq(x.T.expand(3, 6, 4), x.T.expand(3, 6, 4), driver="gels").residuals.sum() + x
        ),
    ],
)
def test_outputs_have_the_shapes_that_torch_gives_them(call: Callable[[Tensor], Tensor]) -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.rand(4, 6))

        def forward(self, scale: Tensor) -> Tensor:
            result: Tensor = call(self.x * scale)
            sizes.append((tuple(result.shape), result.dtype))
            return result

    sizes: list[tuple[tuple[int, ...], torch.dtype]] = []
    Calls()(torch.ones(())).sum().backward()
    graph = capture(Calls(), torch.ones(()), torch.sum)
    assert sizes[0] == sizes[1]
    assert any(op.phase == "backward" for op in graph.ops)


# Off again


def plain_results() -> list[Any]:
    """What torch does without us, on the CPU and on meta."""
    torch.manual_seed(0)
    linear, row = nn.Linear(8, 8), torch.randn(2, 8)
    heads = row[None, None]
    return [
        linear(row).tolist(),
        nn.Linear(8, 8, device="meta")(row.to("meta")).dtype,
        F.layer_norm(row.bfloat16(), (8,)).dtype,
        F.dropout(row, 0.5).tolist(),
        F.scaled_dot_product_attention(heads, heads, heads).tolist(),
    ]


def test_the_cpu_computes_as_before_afterwards() -> None:
    before = plain_results()
    trace(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)), ROWS, precision="amp-bf16")
    assert plain_results() == before


def test_the_cpu_computes_as_before_inside() -> None:
    before = plain_results()
    with cuda.cuda_behaviour(torch.bfloat16):
        inside = plain_results()
    assert inside[0] == before[0]
    assert inside[3:] == before[3:]


def test_a_recurrence_on_the_cpu_computes_as_before_inside() -> None:
    with cuda.cuda_behaviour():
        assert nn.LSTM(8, 4)(STEPS)[0].shape == (5, 2, 4)


def test_the_behaviour_is_off_after_an_exception() -> None:
    def fail(weight: Tensor, x: Tensor) -> Tensor:
        raise ValueError((x @ weight).dtype)

    before = plain_results()
    with pytest.raises(CaptureError, match=r"torch\.bfloat16"):
        trace(Call(fail, 8, 8), ROWS, precision="amp-bf16")
    assert plain_results() == before
    assert cuda._low_dtype is None
    assert not cuda._weight_casts


def test_fp32_after_autocast_is_not_cast() -> None:
    trace(nn.Linear(8, 8), ROWS, precision="amp-bf16")
    assert "_to_copy" not in launched(trace(nn.Linear(8, 8), ROWS))
