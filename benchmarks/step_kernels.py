"""Records which operator launches which kernels in a real step, and compares their number with a forecast's.

python benchmarks/step_kernels.py record jobs.jsonl --out kernels.jsonl --budget 30     # needs a GPU
python benchmarks/step_kernels.py compare kernels.jsonl                                 # needs none
"""

from __future__ import annotations

import argparse
import collections
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reading
from foretrain.job import Job
from foretrain.run import read_runs

_SHOWN = 25


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("record", "compare"))
    parser.add_argument("file", type=reading.existing)
    parser.add_argument("--out", type=Path, default=Path("kernels.jsonl"))
    parser.add_argument("--budget", type=float, default=60.0, help="seconds")
    options = parser.parse_args()
    if options.verb == "record":
        record(options.file, options.out, options.budget)
    else:
        compare(options.file)


def record(jobs: Path, out: Path, budget_s: float) -> None:
    """A line per job: its launches, and how many of each."""
    begun = time.monotonic()
    with out.open("a") as file:
        for job in _jobs(jobs):
            if time.monotonic() - begun > budget_s:
                break
            try:
                line: dict[str, Any] = {"job": job.to_dict(), "launches": _launches(job)}
            except Exception as error:  # the others are still worth having
                line = {"job": job.to_dict(), "error": f"{type(error).__name__}: {error}"[:300]}
            file.write(json.dumps(line) + "\n")
            file.flush()


def _jobs(path: Path) -> Iterator[Job]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        data = json.loads(line)
        if "measured" in data:
            yield next(run.job for at, run in read_runs(path) if at == number)
        else:
            yield Job.read(data).seen_from(path.parent)


def _launches(job: Job, device: str = "cuda") -> list[list[Any]]:
    """Calls from the outermost to the one that launches, shapes of the outermost operator, the kernels of a
    call, how many such calls there were, and the seconds of their kernels."""
    import torch

    from foretrain.measure.steps import Stepper

    stepper = Stepper(job, device)
    for _ in range(2):
        stepper()
    torch.cuda.synchronize() if device == "cuda" else None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        stepper()
        torch.cuda.synchronize() if device == "cuda" else None
    calls: collections.Counter[str] = collections.Counter()
    seconds: collections.Counter[str] = collections.Counter()
    for event in profile.events():
        if not event.kernels:
            continue
        chain = [event]
        while (parent := chain[-1].cpu_parent) is not None:
            chain.append(parent)
        operators = [one for one in chain if one.name.startswith("aten::")] or chain[:1]
        key = json.dumps(
            [
                [one.name for one in reversed(chain)],
                operators[-1].input_shapes,
                [kernel.name[:60] for kernel in event.kernels],
            ]
        )
        calls[key] += 1
        seconds[key] += sum(kernel.duration for kernel in event.kernels) * 1e-6
    del stepper
    if device == "cuda":
        torch.cuda.empty_cache()
    return [[*json.loads(key), count, seconds[key]] for key, count in calls.items()]


def compare(path: Path) -> None:
    """By operator, the kernels of a real step and those of the forecast."""
    from foretrain import predictors
    from foretrain.step.layout import lay_out

    predictor: Any = predictors.get("deletepop")
    for line in path.read_text().splitlines():
        data = json.loads(line)
        job = Job.read(data["job"])
        print(f"\n{job.workload.model.label} {data.get('error', '')}")
        if "error" in data:
            continue
        real: collections.Counter[str] = collections.Counter()
        for chain, _, kernels, count, _ in data["launches"]:
            real[_outermost(chain)] += len(kernels) * count
        layout = lay_out(job, predictor.costs, predictor.host)
        forecast: collections.Counter[str] = collections.Counter()
        for op, kernels in zip(layout.graph.ops, layout.calls.kernels.tolist(), strict=True):
            times = 1 if op.phase == "optimizer" else job.accumulation
            forecast[op.operator.name] += kernels * times
        print(f"kernels: {sum(real.values())} real, {sum(forecast.values()):.0f} forecast")
        names = sorted(real.keys() | forecast.keys(), key=lambda name: -abs(real[name] - forecast[name]))
        for name in names[:_SHOWN]:
            if abs(real[name] - forecast[name]) >= 1:
                print(f"  {name:50} {real[name]:6} {forecast[name]:8.1f}")


_INSIDE = (
    "conv1d conv2d conv3d conv_transpose2d linear matmul einsum scaled_dot_product_attention layer_norm "
    "group_norm rms_norm batch_norm _batch_norm_impl_index dropout to reshape contiguous flatten softmax "
    "log_softmax cross_entropy_loss nll_loss_nd ctc_loss embedding_bag lstm gru adaptive_avg_pool2d "
    "max_pool2d"
).split()
"""Of torch's operators that only call others."""


def _outermost(chain: list[str]) -> str:
    """The operator that a captured graph has: the first below those that only call others."""
    names = [name.removeprefix("aten::") for name in chain if name.startswith("aten::")]
    inner = [name for name in names if name not in _INSIDE]
    return (inner or names or chain)[0]


if __name__ == "__main__":
    main()
