"""Counts which models can be captured: the one-device jobs of a folder, all of timm and
torchvision, types of transformers.

    python benchmarks/capture_coverage.py runs --data DIR
    python benchmarks/capture_coverage.py timm
    python benchmarks/capture_coverage.py torchvision
    python benchmarks/capture_coverage.py transformers

Prints the share that captures and each failure with its reason; exits 1 when the share is below what the
README states.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reading
from foretrain.capture.sources.models import load_model
from foretrain.capture.tracing.tracer import trace_step
from foretrain.job import Model, Training, Workload, read_lines
from foretrain.schema import read

TASKS = (
    "causal-lm",
    "masked-lm",
    "seq2seq-lm",
    "sequence-classification",
    "image-classification",
    "semantic-segmentation",
    "audio-classification",
    "ctc",
    "speech-seq2seq",
    "base",
)


def from_runs(data: Path) -> Iterator[tuple[str, dict[str, Any], Path]]:
    """One job per distinct model, image size, mode and precision among the single-device jobs."""
    seen = set()
    for path in sorted(data.rglob("*.jsonl")):
        for number, run in read_lines(path):
            job = run["job"]
            cluster = job["cluster"]
            model = {**job["model"], "args": {**job["model"].get("args", {}), "num_classes": 0}}
            key = json.dumps(
                [
                    model,
                    *(job["training"].get(field) for field in ("image", "sequence", "mode", "precision")),
                ],
                sort_keys=True,
            )
            if cluster.get("devices_per_node", 1) * cluster.get("nodes", 1) == 1 and key not in seen:
                seen.add(key)
                yield (
                    f"{path.name}:{number} "
                    f"{job['model'].get('name') or job['model']['config']['model_type']}",
                    job,
                    path.parent,
                )


def from_timm() -> Iterator[tuple[str, dict[str, Any], Path]]:
    from foretrain.capture.sources.zoo import import_zoo

    for name in import_zoo("timm").list_models():
        yield (
            name,
            {
                "model": {"source": "timm", "name": name},
                "training": {"global_batch": 2, "precision": "amp-bf16"},
            },
            Path(),
        )


def from_torchvision() -> Iterator[tuple[str, dict[str, Any], Path]]:
    """Every model, to train it and to run it."""
    from foretrain.capture.sources.zoo import import_zoo

    for name in import_zoo("torchvision").models.list_models():
        for mode in ("train", "infer"):
            yield (
                f"{name} {mode}",
                {
                    "model": {"source": "torchvision", "name": name},
                    "training": {"global_batch": 2, "precision": "amp-bf16", "mode": mode},
                },
                Path(),
            )


def from_transformers() -> Iterator[tuple[str, dict[str, Any], Path]]:
    from foretrain.capture.sources.zoo import import_zoo

    import_zoo("torchvision")
    from transformers.models.auto import configuration_auto

    for model_type in configuration_auto.CONFIG_MAPPING_NAMES:
        yield (
            model_type,
            {
                "model": {"source": "transformers", "config": {"model_type": model_type}},
                "training": {"global_batch": 2},
            },
            Path(),
        )


def attempt(item: tuple[str, dict[str, Any], Path]) -> tuple[str, str | None]:
    """None when the job captures, else the reason; a transformers type needs one task that captures."""
    label, job, base = item
    if job["model"]["source"] != "transformers" or "task" in job["model"]:
        return label, trace(job["model"], job["training"], base)
    reasons = []
    for task in TASKS:
        sequence = 16000 if task in ("ctc", "audio-classification", "speech-seq2seq") else 128
        training = (
            job["training"]
            if task in ("image-classification", "semantic-segmentation")
            else {**job["training"], "sequence": sequence}
        )
        reason = trace({**job["model"], "task": task}, training, base)
        if reason is None:
            return label, None
        reasons.append(f"{task}: {reason}")
    return label, min(
        (reason for reason in reasons if "Unrecognized configuration class" not in reason),
        key=len,
        default=reasons[0],
    )


def trace(model: dict[str, Any], training: dict[str, Any], base: Path) -> str | None:
    try:
        workload = Workload(
            model=read(Model, model, "model"), training=read(Training, training, "training"), base=base
        )
        batch = min(workload.training.global_batch, 4)
        loaded = load_model(workload, batch)
        trace_step(
            loaded.module,
            loaded.inputs,
            loaded.loss,
            samples=batch,
            mode=workload.training.mode,
            precision=workload.training.precision,
            optimizer=workload.training.optimizer,
            channels_last=workload.training.channels_last,
        )
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("runs", "timm", "torchvision", "transformers"))
    parser.add_argument("--data", type=reading.existing, help="folder with runs (*.jsonl)")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if options.what == "runs" and options.data is None:
        parser.error("--data: missing; runs are read from a folder")
    items = list(
        {
            "runs": lambda: from_runs(options.data),
            "timm": from_timm,
            "torchvision": from_torchvision,
            "transformers": from_transformers,
        }[options.what]()
    )
    failures = []
    with multiprocessing.get_context("spawn").Pool(options.workers, maxtasksperchild=100) as pool:
        for done, (label, reason) in enumerate(pool.imap_unordered(attempt, items, chunksize=4), start=1):
            if reason is not None:
                failures.append((label, reason))
                print(f"  {label}: {reason}", flush=True)
            if done % 50 == 0:
                print(f"{done} of {len(items)}, {len(failures)} failed", file=sys.stderr, flush=True)
    captured = len(items) - len(failures)
    print(f"{captured} of {len(items)} captured ({captured / len(items):.1%})")
    needed = 60 if options.what == "transformers" else len(items)
    sys.exit(0 if captured >= needed else 1)


if __name__ == "__main__":
    reading.run(main)
