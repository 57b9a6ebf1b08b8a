"""Measures on a GPU what lists of operators cannot say of experts: uneven rows, and kernels that frameworks
write for permuting and weighting rows.

``python benchmarks/experts_gpu.py --out experts.jsonl --seconds 60``: a line per case, as it comes.
"""

from __future__ import annotations

import argparse
import functools
import json
import operator
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from expert_operators import MODELS

Case = tuple[dict[str, Any], Callable[[], Any]]
SKEWS = (1.0, 1.5, 2.0, 4.0)
"""Rows of the fullest expert over the mean."""


def seconds(call: Callable[[], Any], device: str) -> float:
    """The median of a few calls by the device's clock."""
    call()
    times = []
    for _ in range(5):
        if device == "cpu":
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
            continue
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200_000)
        before.record()
        call()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after) * 1e-3)
    return sorted(times)[2]


def offsets(groups: int, rows: int, skew: float, device: str) -> torch.Tensor:
    """Ends of the rows of each expert: shares fall geometrically from the fullest, in a random order."""
    low, high = 1e-6, 1.0
    shares = torch.ones(groups)
    for _ in range(60 if skew > 1 and groups > 1 else 0):
        ratio = (low * high) ** 0.5
        shares = ratio ** (torch.arange(groups) / (groups - 1))
        full = float(shares[0] / shares.sum() * groups)
        low, high = (low, ratio) if full < skew else (ratio, high)
    shares = shares[torch.randperm(groups, generator=torch.Generator().manual_seed(0))]
    ends = (shares.cumsum(0) / shares.sum() * rows / 16).round().int() * 16
    ends[-1] = rows
    return ends.to(device)


def _forward(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)


def _weights(x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(y.t(), x, offs=ends)


def uneven(device: str, scale: int) -> Iterator[Case]:
    draw = random.Random(0)
    for name in ("qwen3-30b", "deepseek-v3", "gpt-oss", "qwen3-235b", "mixtral-8x7b", "llama-4-scout"):
        hidden, inner, _, _ = (max(size // scale, 16) for size in MODELS[name])
        for groups, mean in ((4, 1024), (8, 8192), (16, 4096), (32, 1024), (64, 512), (128, 256), (16, 256)):
            rows = max(groups * mean // scale, 16 * groups)
            if rows * hidden * inner > 3e12:
                continue
            x = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16)
            weight = torch.randn(groups, 2 * inner, hidden, device=device, dtype=torch.bfloat16)
            y = torch.randn(rows, 2 * inner, device=device, dtype=torch.bfloat16)
            for skew in SKEWS if draw.random() < 0.8 else SKEWS[:1]:
                ends = offsets(groups, rows, skew, device)
                facts = {
                    "model": name,
                    "groups": groups,
                    "rows": rows,
                    "n": 2 * inner,
                    "k": hidden,
                    "skew": skew,
                }
                yield (
                    {"what": "grouped forward", **facts},
                    functools.partial(_forward, x, weight, ends),
                )
                yield (
                    {"what": "grouped weights", **facts},
                    functools.partial(_weights, x, y, ends),
                )


def permuting(device: str, scale: int) -> Iterator[Case]:
    """Rows to experts and back by kernels that only copy, and a gated activation with the routing weight."""
    from expert_kernels import combine, gate, gather

    for name, tokens in (
        ("qwen3-30b", 16384), ("deepseek-v3", 4096), ("gpt-oss", 16384), ("qwen3-235b", 8192),
        ("mixtral-8x7b", 16384),
    ):  # fmt: skip
        hidden, inner, experts, choices = MODELS[name]
        tokens //= scale
        rows = tokens * choices
        states = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
        order = torch.randint(0, experts, (rows,), device=device).argsort()
        back = torch.empty_like(order)
        back[order] = torch.arange(rows, device=device)
        source, many = order // choices, torch.empty(rows, hidden, device=device, dtype=torch.bfloat16)
        weights = torch.rand(rows, device=device)
        both = torch.randn(rows, 2 * inner, device=device, dtype=torch.bfloat16)
        part = torch.empty(rows, inner, device=device, dtype=torch.bfloat16)
        facts = {"model": name, "tokens": tokens, "choices": choices, "hidden": hidden, "inner": inner}
        yield (
            {"what": "permute, triton", **facts, "bytes": 2 * hidden * (tokens + rows)},
            functools.partial(gather[(rows,)], states, source, many, hidden, block=1024),
        )
        yield (
            {"what": "unpermute, triton", **facts, "bytes": 2 * hidden * (tokens + rows)},
            functools.partial(
                combine[(tokens,)], many, back, weights, states, hidden, choices=choices, block=1024
            ),
        )
        yield (
            {"what": "gate, triton", **facts, "bytes": 6 * inner * rows},
            functools.partial(gate[(rows,)], both, weights, part, inner, block=1024),
        )
        yield (
            {"what": "permute, index", **facts, "bytes": 2 * hidden * (tokens + rows)},
            functools.partial(operator.getitem, states, source),
        )
        yield (
            {"what": "copy", **facts, "bytes": 4 * hidden * rows},
            many.clone,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=int, default=1, help="Divides all sizes, to try it on a CPU.")
    arguments = parser.parse_args()
    start = time.perf_counter()
    name = torch.cuda.get_device_name(0) if arguments.device == "cuda" else "cpu"
    with arguments.out.open("a") as file:
        for cases in (permuting, uneven):
            try:
                for facts, call in cases(arguments.device, arguments.scale):
                    if time.perf_counter() - start > arguments.seconds:
                        return
                    try:
                        found: dict[str, Any] = {"device_s": seconds(call, arguments.device)}
                    except Exception as error:
                        found = {"error": f"{type(error).__name__}: {error}"[:200]}
                    file.write(
                        json.dumps({**facts, **found, "device": name, "torch": torch.__version__}) + "\n"
                    )
                    file.flush()
            except Exception as error:
                file.write(json.dumps({"what": cases.__name__, "error": f"{error}"[:200]}) + "\n")


if __name__ == "__main__":
    main()
