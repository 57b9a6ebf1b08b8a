"""Describes operators that move bytes, alone or row by row, and recurrences."""

from __future__ import annotations

import math

from foretrain.costs import recurrences
from foretrain.costs.base import Call
from foretrain.costs.features.scene import Scene, alignment, log
from foretrain.costs.features.sizes import dense
from foretrain.graph import TensorSpec
from foretrain.graph.opset import traits


def traffic(scene: Scene) -> list[float]:
    """Operators that move bytes: how many, in what layout, and over which part of the shape they work."""
    call = scene.call
    if not call.inputs:
        return [log(call.bytes), *[0.0] * (len(TRAFFIC) - 1)]
    big = max(call.inputs[:8], key=lambda spec: spec.numel)
    numel = max(1, big.numel)
    written = max(call.bytes - sum(spec.size_bytes for spec in call.inputs), 1)
    dims = call.args.get("dim", call.args.get("normalized_shape"))
    fastest = _fastest(big)
    inner, reduced = _reduction(big, dims, fastest)
    window = call.args.get("kernel_size") or [1]
    return [
        log(numel / (scene.sms * 2048)),
        log(written / scene.item / numel),
        float(min(len(call.inputs), 6)),
        log(len(call.inputs)),
        float(sum(not dense(spec) for spec in call.inputs[:3])),
        float(_relayouts(call, big)),
        float(any(spec.strides is not None and 0 in spec.strides for spec in call.inputs[:3])),
        float(len({spec.dtype for spec in call.inputs[:4]}) > 1 or _casts(call)),
        log(call.bytes / numel),
        float(len(big.shape)),
        log(big.shape[fastest] if big.shape else 1),
        log(math.prod(big.shape[2:]) if len(big.shape) > 2 else 1),
        log(big.shape[1] if len(big.shape) > 1 else 1),
        log(big.shape[0] if big.shape else 1),
        inner,
        log(reduced),
        log(numel / reduced / scene.sms),
        log(_run(big)),
        log(math.prod(window)),
        alignment(big.shape[fastest] if big.shape else 1),
        float(big.channels_last),
    ]


TRAFFIC = tuple(
    "width written inputs log_inputs strided relayout expanded mixed bytes_per_element rank fastest inside "
    "second first inner reduced kept_per_sm run window align_fastest channels_last".split()
)


def recurrence(scene: Scene) -> list[float]:
    """Recurrences of cuDNN: their sizes, and whether one kernel runs all steps."""
    call, args, x = scene.call, scene.call.args, scene.call.inputs[0]
    packed = args.get("batch_sizes") or ()
    samples = packed[0] if packed else x.shape[0 if args.get("batch_first") else 1]
    sizes = (recurrences.times(call), recurrences.layers(call), samples, args["hidden_size"], x.shape[-1])
    return [
        *map(log, sizes),
        float(args.get("mode", 0)),
        float(bool(args.get("bidirectional"))),
        float(bool(packed)),
        float(recurrences.is_persistent(call)),
        float(traits(call.name).backward),
    ]


RECURRENCES = tuple("times layers samples hidden width mode both packed persistent backward".split())


def lookups(scene: Scene) -> list[float]:
    """Describe lookups: beside their traffic, how many rows are looked up and how wide one is: a block of
    threads for each."""
    indices = max((spec.numel for spec in scene.call.inputs if spec.dtype in ("int64", "int32")), default=1)
    table = scene.call.inputs[0].shape if scene.call.inputs else ()
    return [
        *traffic(scene),
        log(indices / scene.sms),
        log(table[-1] if table else 1),
        log(table[0] if table else 1),
    ]


LOOKUPS = (*TRAFFIC, *"indices row_width rows".split())


def norms(scene: Scene) -> list[float]:
    """Rows that are brought to mean 0 each: of a channel, a group of them, or the last dimensions."""
    args, of = scene.call.args, traits(scene.call.name)
    x = max(scene.call.inputs, key=lambda spec: spec.numel, default=TensorSpec((1,), "float32"))
    if of.kind == "row norm":
        rows = x.numel // max(1, math.prod(args.get("normalized_shape") or x.shape[-1:]))
    elif "group" in args:
        rows = int(args["N"]) * int(args["group"])
    else:
        rows = x.shape[1] if len(x.shape) > 1 else x.numel
    return [
        *traffic(scene),
        log(x.numel / max(1, rows)),
        log(rows / scene.sms),
        float(args.get("training", args.get("train", True)) is False),
        float(sum(args.get("output_mask") or ())),
    ]


NORMS = (*TRAFFIC, *"row rows_per_sm inference gradients".split())


def _relayouts(call: Call, big: TensorSpec) -> bool:
    """Whether operands of full size differ in layout, or the result is to have another one."""
    wanted = call.args.get("memory_format")
    if isinstance(wanted, str) and ("channels_last" in wanted or "contiguous" in wanted):
        return big.channels_last != ("channels_last" in wanted) and len(big.shape) in (4, 5)
    return len({spec.strides for spec in call.inputs[:4] if spec.shape == big.shape}) > 1


def _casts(call: Call) -> bool:
    wanted = call.args.get("dtype")
    return isinstance(wanted, str) and wanted.removeprefix("torch.") != call.inputs[0].dtype


def _fastest(spec: TensorSpec) -> int:
    """The dimension along which neighbours lie side by side in memory."""
    rank = len(spec.shape)
    if spec.strides is None:
        return rank - 1
    return next((d for d in reversed(range(rank)) if spec.strides[d] == 1 and spec.shape[d] > 1), rank - 1)


def _reduction(spec: TensorSpec, dims: object, fastest: int) -> tuple[float, int]:
    """Whether the fastest dimension is among those that are worked over, and how many elements they hold."""
    rank = len(spec.shape)
    if not rank:
        return 0.0, 1
    if not isinstance(dims, list):
        dims = [dims] if isinstance(dims, int) and not isinstance(dims, bool) else []
    chosen = {d % rank for d in dims if isinstance(d, int) and -rank <= d < rank}
    return float(fastest in chosen), max(1, math.prod(spec.shape[d] for d in chosen))


def _run(spec: TensorSpec) -> int:
    """Elements in a row in memory along the fastest dimensions; the whole tensor where it has no gaps."""
    if spec.strides is None or not spec.shape or dense(spec):
        return max(1, spec.numel)
    run = 1
    for stride, size in sorted(zip(spec.strides, spec.shape, strict=True)):
        if size > 1:
            if stride != run:
                break
            run *= size
    return max(1, run)
