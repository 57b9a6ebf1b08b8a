"""Forecasts of many devices for the tests of reports: a pipeline laid out, with memory per stage, and no
model captured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import steps
from foretrain.forecast import Estimate, Forecast, RankMemory, whole_training
from foretrain.job import Job
from foretrain.step.pipeline import StageWork, play_pipeline
from foretrain.step.play import Step
from foretrain.step.playback import StepTime, Work, play_rank
from foretrain.step.spans import Span

GIB = 2**30


def job(stages: int = 4, *, framework: str = "megatron", batch: int = 64, tensor: int = 2) -> Job:
    return Job.read({
        "model": {"source": "transformers", "task": "causal-lm", "config": {"model_type": "llama"}},
        "training": {"global_batch": batch, "sequence": 2048, "precision": "bf16", "optimizer": "adamw",
        "framework": framework, "steps": 100},
        "cluster": {"node": "dgx-h100", "nodes": 2},
        "plan": {"pipeline": stages, "tensor": tensor, "micro_batch": 1},
    })  # fmt: skip


def memory(stages: int) -> tuple[RankMemory, ...]:
    """Each stage holds less than the one before it."""
    return tuple(
        RankMemory(
            stage=i,
            by_category={
                "weights": 4 * GIB,
                "optimizer_state": 2 * GIB,
                "activations": (stages - i) * GIB,
                "buffers": 0,
            },
        )
        for i in range(stages)
    )


def pipeline(stages: int, micro_batches: int, schedule: str = "1f1b") -> StepTime:
    works = [
        StageWork(forward_s=(0.010 + 0.001 * i,), backward_s=(0.020,), tail_s=0.005) for i in range(stages)
    ]
    played = play_pipeline(works, micro_batches, 0.0005, schedule)
    time_s, busiest, slots = played.time_s, played.busiest_s, played.slots
    parts = {
        "computing_s": busiest * 0.8,
        "exposed_s": busiest * 0.2,
        "bubble_s": time_s - busiest,
        "host_s": 0.0,
    }
    return StepTime(time_s=time_s * 1.02, straggler_s=time_s * 0.02, slots=slots, **parts)


def rank(micro_batches: int = 2, blocks: int = 3) -> StepTime:
    """One stage: blocks whose parameters are fetched and whose gradients are handed out beside the
    computation."""
    work = Work(
        forward=(Span(0.001, 0.004, 0.005),) * blocks, backward=(Span(0.002, 0.008, 0.009),) * blocks,
        optimizer=Span(0.001, 0.003, 0.003),
        gathers_s=(0.002,) * blocks, reduces_s=(0.003,) * blocks,
    )  # fmt: skip
    return play_rank(work, micro_batches)


def step_of(of: Job, time: StepTime, ranks: tuple[RankMemory, ...]) -> Step:
    """A step of this time, whose stages run the same few calls."""
    made = steps.step(["forward", "backward", "optimizer"], [1e-4] * 3, [time.computing_s / 3] * 3)
    layout = dataclasses.replace(made.layout, job=of, stages=made.layout.stages * of.plan.pipeline)
    return dataclasses.replace(made, layout=layout, time=time, memory=ranks, device_busy_s=time.computing_s)


def forecast(
    of: Job | None = None, time: StepTime | None = None, ranks: Sequence[RankMemory] | None = None
) -> Forecast:
    """The step of a job, with the memory of the last stage as the quantities, which is what megatron logs."""
    of = of or job()
    time = time or pipeline(of.plan.pipeline, of.accumulation)
    ranks = tuple(ranks or memory(of.plan.pipeline))
    logged = ranks[-1].allocated_bytes
    quantities = whole_training(of, around(time.time_s))
    quantities |= {
        "peak_memory_bytes": around(logged),
        "reserved_memory_bytes": around(logged * 1.1),
        "device_busy_s": around(time.computing_s),
    }
    quantities |= {f"network_{way}_bytes_per_s": around(3e9) for way in ("tx", "rx")}
    return Forecast(
        job=of,
        predictor="made up",
        quantities=quantities,
        bound="computation",
        step=step_of(of, time, ranks),
        ranks=ranks,
    )


def around(median: float) -> Estimate:
    return Estimate(median, 0.8 * median, 1.2 * median)
