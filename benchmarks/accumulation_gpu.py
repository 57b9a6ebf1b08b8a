"""Measures what a weight gradient costs that the product itself adds to one in fp32, beside one written
in bf16 and added by a second kernel.

    python benchmarks/accumulation_gpu.py --out accumulation.jsonl [--seconds 40]

Needs a CUDA device and torch 2.8 or later (``addmm`` with ``out_dtype``).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

TOKENS = (2048, 4096, 8192, 16384)
WEIGHTS = (
    (1024, 4096),
    (2048, 16384),
    (4096, 4096),
    (6144, 4096),
    (4096, 14336),
    (8192, 8192),
    (13312, 16384),
)


def milliseconds(call: object, seconds: float) -> float:
    """The median of calls between device events, for about so long."""
    assert callable(call)
    for _ in range(3):
        call()
    times: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(times) < 5:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=40.0)
    options = parser.parse_args()
    each = options.seconds / (len(TOKENS) * len(WEIGHTS) * 3)
    with options.out.open("w") as file:
        for tokens in TOKENS:
            for rows, columns in WEIGHTS:
                gradient = torch.randn(tokens, rows, device="cuda", dtype=torch.bfloat16).t()
                inputs = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
                held = torch.zeros(rows, columns, device="cuda", dtype=torch.float32)
                product = gradient @ inputs
                found = {
                    "device": torch.cuda.get_device_name(),
                    "tokens": tokens,
                    "rows": rows,
                    "columns": columns,
                    "product_ms": milliseconds(lambda a=gradient, b=inputs: torch.mm(a, b), each),
                    "added_ms": milliseconds(lambda h=held, p=product: h.add_(p), each),
                    "product_adds_ms": milliseconds(
                        lambda h=held, a=gradient, b=inputs: torch.ops.aten.addmm.dtype_out(
                            h, a, b, torch.float32, out=h
                        ),
                        each,
                    ),
                }
                file.write(json.dumps(found) + "\n")
                file.flush()


if __name__ == "__main__":
    main()
