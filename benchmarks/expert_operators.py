"""Lists operators of mixtures of experts to measure: grouped products in bf16 and fp8, routers, permutation.

``python benchmarks/expert_operators.py --out list.jsonl``, then ``foretrain measure ops list.jsonl``. Sizes
are those of published models and of random ones; rows are balanced over the experts of a rank.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reading
from foretrain.costs.measured import MeasuredOperator
from foretrain.graph import TensorSpec
from foretrain.measure.instances import Instance, save_instances

MODELS = {
    "deepseek-v3": (7168, 2048, 256, 8), "kimi-k2": (7168, 2048, 384, 8),
    "qwen3-30b": (2048, 768, 128, 8), "qwen3-235b": (4096, 1536, 128, 8),
    "gpt-oss": (2880, 2880, 128, 4), "gpt-oss-20b": (2880, 2880, 32, 4),
    "mixtral-8x7b": (4096, 14336, 8, 2), "mixtral-8x22b": (6144, 16384, 8, 2),
    "llama-4-scout": (5120, 8192, 16, 1), "llama-4-maverick": (5120, 8192, 128, 1),
    "olmoe": (2048, 1024, 64, 8), "deepseek-v2-lite": (2048, 1408, 64, 6),
    "glm-4.5-air": (4096, 1408, 128, 8),
}  # fmt: skip
"""Hidden size, inner size of an expert, experts, experts of a token."""
GROUPS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_FLOPS, MOST_BYTES = 8e12, 12e9
"""Of one operator that is measured: 10 ms and a few copies of its tensors."""
Spec = tuple[tuple[int, ...], str, tuple[int, ...] | None]


def instance(
    name: str, inputs: list[Spec], outputs: list[Spec], args: dict[str, Any], overload: str = "default",
    phase: str = "forward",
) -> Instance:  # fmt: skip
    specs = tuple(TensorSpec(*one) for one in inputs)
    made = MeasuredOperator.of(name, specs, tuple(TensorSpec(*one) for one in outputs), args, "", 0.0)
    return Instance(
        name=name, overload=overload, inputs=specs, args=args, phase=phase, flops=made.flops, bytes=made.bytes
    )


def grouped(groups: int, rows: int, wide: int, narrow: int) -> Iterator[Instance]:
    """A layer of experts from ``wide`` to ``narrow``: its output, and the gradients of rows and weights."""
    total, offsets = groups * rows, ((groups,), "int32", None)
    args = {"self": "%0", "mat2": "%1", "offs": "%2"}
    x, y = ((total, wide), "bfloat16", None), ((total, narrow), "bfloat16", None)
    weight = ((groups, wide, narrow), "bfloat16", (wide * narrow, 1, wide))
    back = ((groups, narrow, wide), "bfloat16", None)
    turned = ((narrow, total), "bfloat16", (1, narrow))
    yield instance("_grouped_mm", [x, weight, offsets], [y], args)
    yield instance("_grouped_mm", [y, back, offsets], [x], args, phase="backward")
    yield instance("_grouped_mm", [turned, x, offsets], [back], args, phase="backward")


def scaled(groups: int, rows: int, wide: int, narrow: int) -> Iterator[Instance]:
    """The same in fp8, scaled by rows: the output, and the gradient of weights."""
    total, offsets, fp8 = groups * rows, ((groups,), "int32", None), "float8_e4m3fn"
    args = {
        "self": "%0", "mat2": "%1", "scale_a": "%2", "scale_b": "%3", "offs": "%4",
        "out_dtype": "torch.bfloat16", "use_fast_accum": True,
    }  # fmt: skip
    x, weight = ((total, wide), fp8, None), ((groups, wide, narrow), fp8, (wide * narrow, 1, wide))
    scales: list[Spec] = [((total,), "float32", None), ((groups, narrow), "float32", None)]
    yield instance(
        "_scaled_grouped_mm", [x, weight, *scales, offsets], [((total, narrow), "bfloat16", None)], args
    )
    turned, columns = ((narrow, total), fp8, None), ((total, wide), fp8, (1, total))
    scales = [((groups * narrow,), "float32", None), ((groups * wide,), "float32", None)]
    out = ((groups, narrow, wide), "bfloat16", None)
    yield instance("_scaled_grouped_mm", [turned, columns, *scales, offsets], [out], args, phase="backward")


def dense(rows: int, wide: int, narrow: int) -> Iterator[Instance]:
    """The same work with one expert for all rows."""
    x, weight = ((rows, wide), "bfloat16", None), ((wide, narrow), "bfloat16", (1, wide))
    y = ((rows, narrow), "bfloat16", None)
    yield instance("mm", [x, weight], [y], {"self": "%0", "mat2": "%1"})


def routing(tokens: int, hidden: int, inner: int, experts: int, choices: int) -> Iterator[Instance]:
    """The router, the sorting of tokens to experts and back, and the activation between the products."""
    rows = tokens * choices
    scores, chosen = ((tokens, experts), "float32", None), ((tokens, choices), "int64", None)
    flat, states = ((rows,), "int64", None), ((tokens, hidden), "bfloat16", None)
    many, half = ((rows, hidden), "bfloat16", None), ((rows, inner), "bfloat16", (2 * inner, 1))
    part, column = ((rows, inner), "bfloat16", None), ((rows, 1), "bfloat16", None)
    put = {"self": "%0", "indices": ["%1"], "values": "%2", "accumulate": True}
    mul = {"self": "%0", "other": "%1"}
    yield instance("topk", [scores], [chosen, chosen], {"self": "%0", "k": choices})
    if experts >= 64 and experts % 8 == 0:  # the two best of each group, as DeepSeek-V3 chooses groups
        spec = ((tokens, 8, experts // 8), "float32", None)
        yield instance("topk", [spec], [((tokens, 8, 2), "float32", None)] * 2, {"self": "%0", "k": 2})
    yield instance("sort", [flat], [flat, flat], {"self": "%0"})
    yield instance(
        "histc", [((rows,), "int32", None)], [((experts,), "int32", None)],
        {"self": "%0", "bins": experts, "min": 0, "max": experts - 1},
    )  # fmt: skip
    yield instance("bincount", [flat], [((experts,), "int64", None)], {"self": "%0", "minlength": experts})
    scatter = {"self": "%0", "dim": -1, "index": "%1", "src": "%2"}
    weights = ((tokens, choices), "float32", None)
    yield instance("scatter", [scores, chosen, weights], [scores], scatter, overload="src", phase="backward")
    yield instance("gather", [scores, chosen], [weights], {"self": "%0", "dim": -1, "index": "%1"})
    for source in (states, many):
        yield instance("index", [source, flat], [many], {"self": "%0", "indices": ["%1"]}, overload="Tensor")
        yield instance("index_put", [source, flat, many], [source], put, phase="backward")
    select = {"self": "%0", "dim": 0, "index": "%1"}
    yield instance("index_select", [states, flat], [many], select)
    add = {"self": "%0", "dim": 0, "index": "%1", "source": "%2"}
    yield instance("index_add", [states, flat, many], [states], add)
    wide = ((rows, hidden), "int64", (1, 0))
    yield instance("scatter_add", [states, wide, many], [states], {**scatter, "dim": 0})
    yield instance("silu", [half], [part], {"self": "%0"})
    yield instance("mul", [part, half], [part], mul, overload="Tensor")
    yield instance(
        "silu_backward", [part, half], [part], {"grad_output": "%0", "self": "%1"}, phase="backward"
    )
    yield instance(
        "cat", [part, part], [((rows, 2 * inner), "bfloat16", None)], {"tensors": ["%0", "%1"], "dim": 1}
    )
    yield instance("mul", [many, column], [many], mul, overload="Tensor")
    grid, sums = ((tokens, choices, hidden), "bfloat16", None), {"self": "%0", "dim": [1]}
    yield instance("sum", [grid], [states], sums, overload="dim_IntList")


def drawn(count: int, seed: int) -> Iterator[Instance]:
    draw, models = random.Random(seed), list(MODELS.values())
    for number in range(count):
        hidden, inner, _, _ = models[number % len(models)]
        if number % 4 == 3:
            hidden, inner = 128 * draw.randint(8, 56), 64 * draw.randint(6, 128)
        groups, power = draw.choice(GROUPS), draw.uniform(4, 14)
        rows = max(16, round(2**power / 16) * 16) if draw.random() < 0.5 else 2 ** round(power)
        gate_up, down = (hidden, 2 * inner), (inner, hidden)
        wide, narrow = gate_up if draw.random() < 0.5 else down
        yield from grouped(groups, rows, wide, narrow)
        if number % 3 == 0:
            yield from scaled(groups, rows, wide, narrow)
        if number % 8 == 0:
            yield from dense(groups * rows, wide, narrow)
        if number % 10 == 0:
            model = models[(number // 10) % len(models)]
            yield from routing(draw.choice((4096, 8192, 16384, 32768, 65536)), *model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=600, help="Layers of experts to draw.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    made = {one.key: one for one in drawn(arguments.count, arguments.seed)}
    save_instances(
        arguments.out,
        [one for one in made.values() if one.flops <= MOST_FLOPS and one.bytes <= MOST_BYTES],
    )


if __name__ == "__main__":
    reading.run(main)
