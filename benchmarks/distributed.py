"""Compares forecasts of many devices with public runs: zero-shot and calibrated, ranks of plans, and speed.

    python benchmarks/distributed.py --data DIR [--only NAME ...] [--limit 0] [--intervals FILE]

DIR holds runs/ with the public files (README.md there). ``calibrated`` has learned from 40 runs of the file,
drawn at random, and is scored on the others. The comparisons are what the intervals of forecasts of many
devices are made of: --intervals src/foretrain/predictors/deletepop/fitted/intervals.json writes them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

import reading
from foretrain.errors import ForetrainError
from foretrain.evaluate import Comparison, scores_of
from foretrain.job import Job
from foretrain.model_names import model_section
from foretrain.predictors.deletepop import DeletePopPredictor
from foretrain.run import Run, read_runs
from operator_models import write_intervals

FILES = {
    "llm_foundry_mpt_a100": ("step_time_s",),
    "nanotron_h100": ("step_time_s", "reserved_memory_bytes"),
    "nvidia_llm": ("step_time_s",),
    "nvidia_deeplearningexamples": ("step_time_s",),
    "megatron_ci_a100": ("step_time_s", "peak_memory_bytes"),
    "vtrain_a100_single_node": ("step_time_s",),
    "pollux_t4": ("step_time_s",),
    "cpu16_ddp": ("step_time_s",),
}
NOT_CALIBRATED = ("nvidia_llm", "nvidia_deeplearningexamples")
CALIBRATION_RUNS = 40
LEAST_PLANS = 8
MOST_OF_A_FILE = 200
"""Comparisons of a file that go into the intervals, so that no source decides alone."""
LLAMA_80B: dict[str, Any] = {
    "model": {
        "source": "transformers",
        "task": "causal-lm",
        "config": {
            "model_type": "llama",
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 88,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    },
    "training": {
        "global_batch": 1024,
        "sequence": 4096,
        "precision": "bf16",
        "master_weights": True,
        "optimizer": "adamw",
        "framework": "megatron",
    },
    "cluster": {"node": "dgx-h100", "nodes": 64},
    "plan": {
        "tensor": 8,
        "pipeline": 8,
        "data": 8,
        "micro_batch": 1,
        "shard": "zero1",
        "sequence_parallel": True,
    },
}


DEEPSEEK_V3: dict[str, Any] = {
    "model": model_section("DeepSeek-V3", None)[0],
    "training": {
        "global_batch": 8192,
        "sequence": 4096,
        "precision": "fp8",
        "optimizer": "adamw",
        "framework": "megatron",
    },
    "cluster": {"node": "dgx-h100", "nodes": 128},
    "plan": {"pipeline": 16, "expert": 64, "micro_batch": 1, "shard": "zero1"},
}
LLAMA_70B: dict[str, Any] = {
    "model": model_section("Llama-3.1-70B", None)[0],
    "training": {
        "global_batch": 1024,
        "sequence": 8192,
        "precision": "bf16",
        "optimizer": "adamw",
        "framework": "torchtitan",
    },
    "cluster": {"node": "dgx-h100", "nodes": 128},
    "plan": {"micro_batch": 1, "shard": "zero3"},
}
SPEED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[dict[str, Any], ...]]] = {
    "a Llama of 80B on 512 H100": (
        LLAMA_80B,
        {"tensor": 4, "data": 16},
        ({"shard": "none"}, {"pipeline": 4, "data": 16}, {"schedule": "interleaved"}),
    ),
    "DeepSeek-V3 on 1,024 H100": (
        DEEPSEEK_V3,
        {"expert": 32},
        (
            {"pipeline": 8},
            {"recompute": "full"},
            {"recompute": "selective", "recompute_modules": ["mla_up", "mlp"]},
            {"schedule": "interleaved", "virtual_stages": 2},
            {"schedule": "zbv"},
            {"schedule": "dualpipe"},
        ),
    ),
    "Llama 3.1 70B with FSDP2 on 1,024 H100": (
        LLAMA_70B,
        {"context": 2},
        ({"recompute": "full"}, {"recompute": "selective"}, {"replicate": 16}),
    ),
}
"""Jobs whose forecasts are timed: each with a plan that loads the libraries, and with plans that run the same
graph."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=reading.existing, required=True)
    parser.add_argument("--only", nargs="*", default=[*FILES, "speed"])
    parser.add_argument("--limit", type=int, default=0, help="runs of each file, drawn at random; 0 for all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--intervals", type=Path)
    options = parser.parse_args()
    cases: dict[str, list[Comparison]] = {"many devices": [], "many devices, calibrated": []}
    print(
        f"{'runs':30s} {'':10s} {'quantity':22s} {'n':>5s} {'MAPE':>6s} "
        f"{'median':>6s} {'p90':>6s} {'bias':>6s} {'80 %':>5s} {'unsupported':>11s}"
    )
    for name, quantities in FILES.items():
        if name in options.only:
            runs = [run for _, run in read_runs(options.data / "runs" / f"{name}.jsonl")]
            random.Random(options.seed).shuffle(runs)
            score_file(name, runs[: options.limit or None], quantities, cases)
    if options.intervals:
        write_intervals(options.intervals, {case: rows for case, rows in cases.items() if rows})
    if "speed" in options.only:
        print_speed()


def score_file(
    name: str, runs: Sequence[Run], quantities: Sequence[str], cases: dict[str, list[Comparison]]
) -> None:
    found = score(name, "zero-shot", DeletePopPredictor(), runs, quantities)
    cases["many devices"] += found[:MOST_OF_A_FILE]
    if name == "nanotron_h100":
        print_ranks(runs, found)
    if name not in NOT_CALIBRATED and len(runs) > CALIBRATION_RUNS:
        predictor = DeletePopPredictor().fit(runs[:CALIBRATION_RUNS])
        found = score(name, "calibrated", predictor, runs[CALIBRATION_RUNS:], quantities)
        cases["many devices, calibrated"] += found[:MOST_OF_A_FILE]


def score(
    name: str, how: str, predictor: DeletePopPredictor, runs: Sequence[Run], quantities: Sequence[str]
) -> list[Comparison]:
    rows: list[Comparison] = []
    unsupported = 0
    for line, run in enumerate(runs):
        try:
            forecast = predictor.predict(run.job)
        except ForetrainError:
            unsupported += 1
            continue
        for quantity in quantities:
            if quantity in run.measured:
                estimate, measured = forecast[quantity], run.measured[quantity]
                rows.append(
                    Comparison(
                        runs_file=name,
                        line=line,
                        predictor=predictor.name,
                        quantity=quantity,
                        measured=measured,
                        predicted=estimate.median,
                        low=estimate.low,
                        high=estimate.high,
                        error=estimate.median / measured - 1,
                    )
                )
    for quantity in quantities:
        show(name, how, quantity, [row for row in rows if row.quantity == quantity], unsupported)
    return rows


def show(name: str, how: str, quantity: str, rows: Sequence[Comparison], unsupported: int) -> None:
    if not rows:
        print(f"{name:30s} {how:10s} {quantity:22s} {0:5d} {unsupported:47d}")
        return
    scores = scores_of(rows)
    print(
        f"{name:30s} {how:10s} {quantity:22s} {len(rows):5d} "
        f"{scores.mape:6.1%} {scores.median_ape:6.1%} {scores.p90_ape:6.1%}"
        f" {scores.bias:6.1%} {scores.coverage:5.0%} {unsupported:11d}",
        flush=True,
    )


def print_ranks(runs: Sequence[Run], rows: Sequence[Comparison]) -> None:
    """How well plans of one model on one cluster are ordered, and what choosing the best forecast costs."""
    groups: dict[str, list[Comparison]] = {}
    for row in rows:
        if row.quantity == "step_time_s":
            job = runs[row.line].job
            groups.setdefault(
                f"{json.dumps(job.to_dict()['model'], sort_keys=True)} {job.cluster.world_size}", []
            ).append(row)
    large = [group for group in groups.values() if len(group) >= LEAST_PLANS]
    if not large:
        return
    orders = [
        spearmanr([row.measured for row in group], [row.predicted for row in group])[0] for group in large
    ]
    regrets = [
        min(group, key=lambda row: row.predicted).measured / min(row.measured for row in group) - 1
        for group in large
    ]
    print(
        f"{'':30s} Spearman of plans: mean {np.mean(orders):.3f}, "
        f"least {min(orders):.3f}; regret: median {np.median(regrets):.1%}, mean {np.mean(regrets):.1%}"
    )


def print_speed() -> None:
    """Cold: nothing of the job was traced before, but the libraries are loaded.

    Then the same job with other plans. Seconds are those of the processor.
    """
    predictor = DeletePopPredictor()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FORETRAIN_CACHE"] = folder
        for name, (job, first, plans) in SPEED.items():
            predictor.predict(job_with(job, **first))
            times = []
            for plan in ({}, *plans):
                planned = job_with(job, **plan)
                start = time.process_time()
                predictor.predict(planned)
                times.append(time.process_time() - start)
            others = ", ".join(f"{seconds * 1e3:.0f} ms" for seconds in times[1:])
            print(f"{name}: {times[0]:.2f} s cold, then {others} with another plan", flush=True)


def job_with(job: dict[str, Any], **plan: Any) -> Job:
    return Job.read({**job, "plan": {**job["plan"], **plan}})


if __name__ == "__main__":
    reading.run(main)
