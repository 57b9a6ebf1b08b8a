"""Kernels that permute, combine and gate rows of experts in one pass each, as frameworks have them; they need
triton."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def gather(source, index, out, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(index + row).to(tl.int64)
    for start in range(0, width, block):
        columns = start + tl.arange(0, block)
        values = tl.load(source + place * width + columns, mask=columns < width)
        tl.store(out + row * width + columns, values, mask=columns < width)


@triton.jit  # type: ignore[untyped-decorator]
def combine(source, index, weights, out, width, choices: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, width, block):
        columns = start + tl.arange(0, block)
        total = tl.zeros((block,), dtype=tl.float32)
        for choice in range(choices):
            place = tl.load(index + row * choices + choice).to(tl.int64)
            weight = tl.load(weights + row * choices + choice)
            values = tl.load(source + place * width + columns, mask=columns < width, other=0.0)
            total += values.to(tl.float32) * weight
        tl.store(out + row * width + columns, total.to(tl.bfloat16), mask=columns < width)


@triton.jit  # type: ignore[untyped-decorator]
def gate(both, weights, out, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row)
    for start in range(0, width, block):
        columns = start + tl.arange(0, block)
        a = tl.load(both + 2 * row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        b = tl.load(both + (2 * row + 1) * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        tl.store(
            out + row * width + columns,
            (a * tl.sigmoid(a) * b * weight).to(tl.bfloat16),
            mask=columns < width,
        )
