"""Measures what the host takes to issue products whose shapes it has not had before, beside repeated ones.

``python benchmarks/unseen_shapes_gpu.py --out unseen.jsonl``: libraries choose a kernel for each shape, and
experts without a capacity have other rows in every step.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CALLS = 200


def products(device: str) -> dict[str, tuple[Callable[..., Any], torch.dtype]]:
    """Ways of multiplying (rows x inner) by (inner x columns), and the operands' dtype."""
    one = torch.ones((), device=device)

    def scaled(a: torch.Tensor, b: torch.Tensor) -> Any:
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    def by_row(a: torch.Tensor, b: torch.Tensor) -> Any:
        scales = torch.ones(a.shape[0], 1, device=device), torch.ones(1, b.shape[0], device=device)
        return torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)

    def biased(a: torch.Tensor, b: torch.Tensor) -> Any:
        return torch.addmm(b[:, 0], a, b.t())

    return {
        "mm": (lambda a, b: torch.mm(a, b.t()), torch.bfloat16),
        "addmm": (biased, torch.bfloat16),
        "scaled by tensor": (scaled, torch.float8_e4m3fn),
        "scaled by row": (by_row, torch.float8_e4m3fn),
    }


def host_s(
    call: Callable[..., Any], shapes: list[int], source: torch.Tensor, weight: torch.Tensor
) -> list[float]:
    """Of each call, with an empty queue before it."""
    times = []
    for rows in shapes:
        a = source[:rows]
        if source.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call(a, weight)
        times.append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    draw = random.Random(0)
    with arguments.out.open("a") as file:
        for name, (call, dtype) in products(arguments.device).items():
            for inner, columns in ((2048, 1536), (768, 2048), (7168, 4096), (2048, 7168)):
                most = 8192
                source = torch.randn(most, inner, device=arguments.device).to(dtype)
                weight = torch.randn(columns, inner, device=arguments.device).to(dtype)
                new = draw.sample(range(256, most, 16), min(CALLS, 400))
                try:
                    host_s(call, [most] * 5, source, weight)
                    found = {
                        "repeated": host_s(call, [most] * CALLS, source, weight),
                        "unseen": host_s(call, new, source, weight),
                        "seen": host_s(call, new, source, weight),
                    }
                except Exception as error:
                    file.write(json.dumps({"product": name, "error": f"{error}"[:200]}) + "\n")
                    continue
                facts = {"product": name, "inner": inner, "columns": columns}
                for kind, times in found.items():
                    ranked = sorted(times)
                    facts[f"{kind}_s"] = ranked[len(ranked) // 2]
                    facts[f"{kind}_p90_s"] = ranked[len(ranked) * 9 // 10]
                file.write(json.dumps({**facts, "torch": torch.__version__}) + "\n")
                file.flush()


if __name__ == "__main__":
    main()
