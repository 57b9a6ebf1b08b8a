"""Trains the model of a job with plain PyTorch: DDP, ZeRO 1, FSDP2 or HSDP, and tensor parallelism.

torchrun --standalone --nproc-per-node 8 train.py --job job.toml

What job.toml says of model, training and plan is what runs; torch and the model's library are all it needs.
Your data goes into ``your_batches``, your weights into ``your_weights``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from foretrain.launchers.writing.programs.models import DTYPES, Job, build
from foretrain.launchers.writing.programs.spreading import spread
from foretrain.launchers.writing.programs.step_times import StepTimes, recorder_of

# Your own


def your_batches(example: Any, rank: int, ranks: int) -> Iterator[Any]:
    """YOUR DATA: batches for data-parallel rank ``rank`` of ``ranks``, each with the shapes of ``example`` (a
    dict or a tuple of tensors on the device). Without a change it is the same random batch for ever."""
    while True:
        yield example


def your_weights(model: nn.Module) -> None:
    """YOUR WEIGHTS: load a checkpoint into the model, whose parameters may be shards (DTensor). Without a
    change they are random."""
    initialise = getattr(model, "_init_weights", None)  # of transformers
    for module in model.modules():
        if initialise is not None:
            initialise(module)
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            else:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)


# Training

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"momentum": 0.9}), "sgd-plain": ("SGD", {}), "adam": ("Adam", {}), "adamw": ("AdamW", {}),
    "adam-fused": ("Adam", {"fused": True}), "adamw-fused": ("AdamW", {"fused": True}),
    "adagrad": ("Adagrad", {}), "rmsprop": ("RMSprop", {}), "nadam": ("NAdam", {}), "radam": ("RAdam", {}),
    "adamax": ("Adamax", {}), "adadelta": ("Adadelta", {}), "asgd": ("ASGD", {}), "rprop": ("Rprop", {}),
    "adafactor": ("Adafactor", {}),
}  # fmt: skip


def optimizer_of(model: nn.Module, job: Job, learning_rate: float) -> torch.optim.Optimizer:
    name, options = OPTIMIZERS[job.training.get("optimizer", "sgd")]
    kind, parameters = getattr(torch.optim, name), [one for one in model.parameters() if one.requires_grad]
    if job.plan.get("shard") == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(parameters, optimizer_class=kind, lr=learning_rate, **options)
    made: torch.optim.Optimizer = kind(parameters, lr=learning_rate, **options)
    return made


def train(
    job: Job,
    *,
    device: torch.device | None = None,
    steps: int | None = None,
    recorder: Any = None,
    print_every: int = 10,
    learning_rate: float = 1e-4,
    max_norm: float | None = None,
    keep_whole_gradients: bool = False,
) -> None:
    """Train; the process group exists, or torchrun's variables tell it.

    FSDP2 hands out gradients in each micro-batch, so that they stay in shards; ``keep_whole_gradients`` does
    it in the last alone, with less traffic and the memory of whole ones.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device is None:
        device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo")
    if job.precision == "tf32":
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    steps = steps or job.steps
    ranks = dist.get_world_size() // job.plan.get("tensor", 1)
    batch = job.training["global_batch"] // ranks
    micro = job.plan.get("micro_batch", batch)
    task = build(job, micro, device)
    model, rank, ranks = spread(task, job, device, your_weights)
    model.train()
    optimizer = optimizer_of(model, job, learning_rate)
    scales = job.precision == "amp-fp16" and job.training.get("grad_scaler") is not False
    scaler = torch.amp.GradScaler(device.type, enabled=scales)
    amp = job.precision.removeprefix("amp-") if job.precision.startswith("amp-") and not job.sharded else None
    autocast = functools.partial(
        torch.autocast, device.type, dtype=DTYPES[amp or "bf16"], enabled=amp is not None
    )
    batches = your_batches(prepared(task.example, job), rank, ranks)
    times = StepTimes(on_gpu=on_gpu, steps=steps, every=print_every)
    accumulation = batch // micro
    for step in range(1, steps + 1):
        if recorder is not None:
            recorder.step_begin()
        began = times.mark()
        for number in range(accumulation):
            last = number == accumulation - 1
            if keep_whole_gradients and job.sharded:
                model.set_requires_gradient_sync(last)  # type: ignore[operator]
            alone = isinstance(model, DistributedDataParallel) and not last
            with model.no_sync() if alone else contextlib.nullcontext():  # type: ignore[operator]
                with autocast(), attention_kernel(job):
                    loss = task.compute(model, next(batches))
                scaler.scale(loss / accumulation).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if recorder is not None:
            recorder.step_end()
        if dist.get_rank() == 0:
            times.end(began, loss.detach())
        if (every := checkpoint_steps(job)) and step % every == 0:
            save(model, optimizer, job, step)
    if dist.get_rank() == 0:
        times.print_memory()


def prepared(example: Any, job: Job) -> Any:
    """Inputs in the precision and layout of the model."""
    dtype = None if job.keeps_fp32 else DTYPES[job.precision]
    layout = torch.channels_last if job.training.get("channels_last") else torch.preserve_format

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.to(dtype=dtype, memory_format=layout if value.dim() == 4 else torch.preserve_format)

    if isinstance(example, dict):
        return {name: one(value) for name, value in example.items()}
    return tuple(one(value) for value in example)


def attention_kernel(job: Job) -> Any:
    """cuDNN's attention where the job asks for it; else torch chooses."""
    if job.training.get("attention") != "cudnn":
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)


def checkpoint_steps(job: Job) -> int | None:
    """Count the steps between two checkpoints; None where there are none, or the job says a time."""
    every = job.training.get("checkpoint_every")
    if every == "epoch":
        every = math.ceil(job.training["samples"] / job.training["global_batch"])
    return None if every is None or isinstance(every, str) else int(every)


def save(model: nn.Module, optimizer: torch.optim.Optimizer, job: Job, step: int) -> None:
    from torch.distributed.checkpoint import save as save_shards  # type: ignore[attr-defined]
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    state: dict[str, Any] = {"model": get_model_state_dict(model), "step": step}
    if job.plan.get("shard") != "zero1":
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    save_shards(state, checkpoint_id=job.folder / "checkpoints" / f"step-{step}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the model of a job file.")
    parser.add_argument("--job", type=Path, default=Path(__file__).parent / "job.toml")
    parser.add_argument("--steps", type=int, help="instead of those that the job says")
    parser.add_argument("--runs", type=Path, help="record the steps here, where foretrain is installed")
    parser.add_argument("--print-every", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--max-norm", type=float, help="clip gradients; the forecast has no clipping")
    parser.add_argument("--keep-whole-gradients", action="store_true", help="FSDP2: reduce once in a step")
    given = parser.parse_args()
    recorder = recorder_of(given.runs, given.job)
    with contextlib.nullcontext() if recorder is None else recorder:
        train(
            Job.load(given.job),
            steps=given.steps,
            recorder=recorder,
            print_every=given.print_every,
            learning_rate=given.learning_rate,
            max_norm=given.max_norm,
            keep_whole_gradients=given.keep_whole_gradients,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
