"""Measures how much slower kernels run beside a collective: a kernel of few blocks that copies stands in for
NCCL's.

    python benchmarks/contention_gpu.py --out contention.jsonl [--seconds 40]

NCCL runs a collective as one kernel of a block per channel, each of which holds a processor for as long as it
lasts. Every line is one operator beside so many blocks that copy (or only wait): its time alone and beside
them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCKS = (8, 16, 24, 32)
"""Channels of a collective: 8 to 16 between nodes, 16 to 32 inside one."""
THREADS, SHARED_BYTES = 512, 40 << 10
"""Of a block: it shares its processor with no block of a matrix product, as NCCL's."""
LASTING_MS = 30
SOURCE = r"""
extern "C" __global__ void occupy(float4* from, float4* to, int count, int milliseconds, int copies) {
    extern __shared__ float4 held[];
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    held[threadIdx.x] = make_float4(0.f, 0.f, 0.f, 0.f);
    long place = (long)blockIdx.x * blockDim.x + threadIdx.x;
    do {
        if (copies) {
            #pragma unroll 8
            for (int i = 0; i < 8; i++) {
                to[place] = from[place];
                place += (long)gridDim.x * blockDim.x;
                if (place >= count) place = (long)blockIdx.x * blockDim.x + threadIdx.x;
            }
        }
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < (unsigned long long)milliseconds * 1000000ull);
    if (held[threadIdx.x].x != 0.f) to[0] = held[threadIdx.x];
}
"""


def operators(torch: Any) -> dict[str, Callable[[], Any]]:
    """What training steps of language models consist of: products of their sizes, attention, copies."""
    low, device = torch.bfloat16, "cuda"

    def product(rows: int, inner: int, columns: int) -> Callable[[], Any]:
        a = torch.randn(rows, inner, dtype=low, device=device)
        b = torch.randn(columns, inner, dtype=low, device=device)
        return lambda: a @ b.t()

    found = {
        f"product {m} x {k} x {n}": product(m, k, n)
        for m, k, n in (
            (8192, 4096, 4096),
            (8192, 4096, 14336),
            (8192, 14336, 4096),
            (4096, 8192, 14336),
            (8192, 8192, 8192),
            (4096, 2048, 8192),
            (16384, 4096, 1024),
            (8192, 4096, 128256),
        )
    }
    q, k, v = (torch.randn(1, 32, 8192, 128, dtype=low, device=device, requires_grad=True) for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    found["attention 8192"] = lambda: attend(q, k, v, is_causal=True)
    out = attend(q, k, v, is_causal=True)
    found["attention 8192 backward"] = lambda: torch.autograd.grad(out, (q, k, v), out, retain_graph=True)
    x, y = (torch.randn(8192, 14336, dtype=low, device=device) for _ in range(2))
    found["mul 8192 x 14336"] = lambda: x * y
    found["silu 8192 x 14336"] = lambda: torch.nn.functional.silu(x)
    h, weight = torch.randn(8192, 4096, dtype=low, device=device), torch.ones(4096, dtype=low, device=device)
    found["rms_norm 8192 x 4096"] = lambda: torch.nn.functional.rms_norm(h, (4096,), weight)
    return found


def timed(torch: Any, run: Callable[[], Any], calls: int, beside: Callable[[], None] | None) -> float:
    """Seconds of one call of many, beside what occupies the device meanwhile."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if beside is not None:
        beside()
        time.sleep(1e-3)
    start.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / calls


def main() -> None:
    """Measure every operator beside every number of blocks, while there is time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=40.0)
    options = parser.parse_args()
    import torch

    end = time.monotonic() + options.seconds
    kernel = torch.cuda._compile_kernel(SOURCE, "occupy")
    size = 64 << 20
    held = [torch.empty(size // 4, dtype=torch.float32, device="cuda") for _ in range(2)]
    stream = torch.cuda.Stream(priority=-1)

    def occupy(blocks: int, copies: bool) -> Callable[[], None]:
        args = [*held, size // 16, LASTING_MS, int(copies)]
        return lambda: kernel((blocks, 1, 1), (THREADS, 1, 1), args, SHARED_BYTES, stream)

    occupy(1, False)()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as lines:
        for name, run in operators(torch).items():
            if time.monotonic() > end:
                break
            for _ in range(3):
                run()
            calls = max(2, min(200, int(0.6e-2 / timed(torch, run, 3, None))))
            row: dict[str, Any] = {"operator": name, "calls": calls, "device": torch.cuda.get_device_name()}
            row["alone_s"] = statistics.median(timed(torch, run, calls, None) for _ in range(5))
            row["beside"] = [
                {
                    "blocks": blocks,
                    "copies": copies,
                    "time_s": statistics.median(
                        timed(torch, run, calls, occupy(blocks, copies)) for _ in range(3)
                    ),
                }
                for copies in (True, False)
                for blocks in BLOCKS
            ]
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            shares = [f"{one['time_s'] / row['alone_s']:.3f}" for one in row["beside"]]
            print(f"{name}: {row['alone_s'] * 1e6:.0f} us alone, beside {' '.join(shares)}", flush=True)


if __name__ == "__main__":
    main()
