"""Watches the clock and power of a GPU that multiplies without pause, and how much slower its products get.

    python benchmarks/power_gpu.py --out power.jsonl [--seconds 12]

Each case starts after a rest; a line per quarter of a second has the rate of the products, clock, power and
temperature. Needs a CUDA device and pynvml.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import pynvml
import torch

SIZE, REST_S, EVERY_S = 8192, 4.0, 0.25


def cases() -> dict[str, Callable[[], None]]:
    """Calls of one product (with other work) each."""
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    long = torch.empty(SIZE * SIZE * 4, device="cuda", dtype=torch.bfloat16)
    copy = torch.empty_like(long)
    one = torch.ones((), device="cuda")
    a8, b8 = (x.to(torch.float8_e4m3fn) for x in (a, b))
    zeros = torch.zeros_like(a)

    def bf16() -> None:
        torch.mm(a, b, out=out)

    def bf16_zeros() -> None:
        torch.mm(zeros, b, out=out)

    def fp8() -> None:
        torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    def with_copies() -> None:
        torch.mm(a, b, out=out)
        copy.copy_(long)

    return {"bf16": bf16, "bf16 zeros": bf16_zeros, "fp8": fp8, "bf16 with copies": with_copies}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=12.0)
    options = parser.parse_args()
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    with options.out.open("w") as file:
        for name, call in cases().items():
            torch.cuda.synchronize()
            time.sleep(REST_S)
            begun = time.monotonic()
            while time.monotonic() - begun < options.seconds:
                start, calls = time.monotonic(), 0
                while time.monotonic() - start < EVERY_S:
                    for _ in range(8):
                        call()
                    calls += 8
                    torch.cuda.synchronize()
                seconds = time.monotonic() - start
                figures = {
                    "case": name,
                    "device": torch.cuda.get_device_name(),
                    "at_s": time.monotonic() - begun,
                    "products_flops_per_s": 2 * SIZE**3 * calls / seconds,
                    "clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
                    "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                    "temperature_c": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
                }
                file.write(json.dumps(figures) + "\n")
                file.flush()


if __name__ == "__main__":
    main()
