"""Measures time and memory of captures and forecasts, each in a process of its own.

python benchmarks/speed.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import reading

CAPTURE = """
import json, resource, sys, time
import torch
from foretrain.api import make_job
from foretrain.capture.sources.models import load_model
from foretrain.capture.sources.zoo import import_zoo
from foretrain.capture.tracing.tracer import trace_step
name, options = sys.argv[1], json.loads(sys.argv[2])
import_zoo("torchvision")
import transformers
job = make_job(name, **options)
# the libraries' own imports
load_model(make_job("resnet18" if "llama" not in name else "gpt2", batch=1).workload, 1)
start = time.perf_counter()
loaded = load_model(job.workload, job.micro_batch)
training = job.workload.training
how = {name: getattr(training, name) for name in ("precision", "optimizer", "master_weights")}
graph = trace_step(loaded.module, loaded.inputs, loaded.loss, samples=job.micro_batch, **how)
took = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([took, peak, len(graph.ops), len(graph.operators)]))
"""

FORECAST = """
import json, sys, time
from foretrain.api import make_job
from foretrain.predictors import get
job = make_job(sys.argv[1], **json.loads(sys.argv[2]))
predictor = get()
predictor.predict(job)
times = []
for _ in range(10):
    start = time.perf_counter()
    predictor.predict(job)
    times.append(time.perf_counter() - start)
print(json.dumps(sorted(times)[5]))
"""

MODELS = (
    ("resnet50", {"batch": 256, "precision": "amp-bf16"}, 1.0),
    ("llama-3-8b", {"batch": 1, "precision": "bf16"}, 3.0),
    ("llama-3-70b", {"batch": 1, "precision": "bf16"}, 10.0),
)


def python(code: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True
    ).stdout


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    print(
        f"{'model':14s} {'capture':>9s} {'at most':>8s} {'peak RSS':>10s} "
        f"{'ops':>7s} {'distinct':>8s} {'forecast':>9s}"
    )
    for name, options, limit in MODELS:
        took, rss, ops, distinct = json.loads(python(CAPTURE, name, json.dumps(options)))
        forecast = json.loads(python(FORECAST, name, json.dumps(options)))
        print(
            f"{name:14s} {took:7.2f} s {limit:6.1f} s {rss / 2**30:6.2f} "
            f"GiB {ops:7,d} {distinct:8,d} {forecast * 1e3:6.1f} ms"
        )
    command = [str(Path(sys.executable).parent / "foretrain"), "predict", "resnet50", "--device", "h100"]
    subprocess.run(command, check=True, capture_output=True)
    walls = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        walls.append(time.perf_counter() - start)
    print(
        "foretrain predict resnet50, cached graph, imports "
        f"included: {sorted(walls)[2]:.2f} s wall (at most 0.5 s)"
    )
    many(1000)


def many(count: int) -> None:
    """``predict --jobs`` on jobs that share one graph and differ in the device."""
    devices = ("h100", "a100", "v100", "t4", "rtx-4090")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "jobs.jsonl"
        lines = [
            {
                "model": {"source": "torchvision", "name": "resnet50"},
                "training": {"global_batch": 32},
                "cluster": {"device": devices[i % 5]},
            }
            for i in range(count)
        ]
        path.write_text("\n".join(map(json.dumps, lines)))
        command = [
            str(Path(sys.executable).parent / "foretrain"),
            "predict",
            "--jobs",
            str(path),
            "--out",
            str(Path(folder) / "out.jsonl"),
        ]
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        print(f"foretrain predict --jobs: {count / (time.perf_counter() - start):.0f} jobs/s")


if __name__ == "__main__":
    reading.run(main)
