"""Records every training of a Lightning ``Trainer``; the job names the model, the trainer knows the rest.

trainer = Trainer(callbacks=[ForetrainCallback("runs.jsonl", job="vit_tiny_patch16_224")])
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from typing import Any

from foretrain.callbacks.jobs import JobLike, cluster_here, optimizer_name
from foretrain.callbacks.recorder import Recorder
from foretrain.errors import missing

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_PRECISION = {
    "32-true": "fp32",
    "16-mixed": "amp-fp16",
    "bf16-mixed": "amp-bf16",
    "16-true": "fp16",
    "bf16-true": "bf16",
    "transformer-engine": "fp8",
}


def __getattr__(name: str) -> Any:
    """Make ``ForetrainCallback`` on first use, on the ``Callback`` of the Lightning that the program uses."""
    if name != "ForetrainCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = _package().Callback
    callback = type(name, (Hooks, base), {"__module__": __name__, "__doc__": Hooks.__doc__})
    globals()[name] = callback
    return callback


def _package() -> Any:
    for package in (*(package for package in _PACKAGES if package in sys.modules), *_PACKAGES):
        try:
            return importlib.import_module(package)
        except ModuleNotFoundError:
            continue
    raise missing("lightning", "ForetrainCallback")


class Hooks:
    """Records every ``fit`` of a Lightning ``Trainer`` into ``runs``.

    ``job`` names the model and the size of its input; batch, precision, optimizer, length and cluster come
    from the trainer where the job leaves them out. Further options are those of ``Recorder``.
    """

    def __init__(self, runs: str | os.PathLike[str], job: JobLike, **options: Any) -> None:
        package = _package()
        self.recorder = Recorder(runs, job=job, framework=f"lightning {package.__version__}", **options)
        self.recorder.end_with(self)
        self._in_step = False
        self._total: float = math.inf

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        self._total, self._in_step = trainer.estimated_stepping_batches, False
        total = int(self._total) if 0 < self._total < math.inf else None
        self.recorder.begin(_observed(trainer, total), total_steps=total, done=_steps(trainer), main=True)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.recorder.epoch_begin()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self._in_step:
            self._in_step, self._before = True, _steps(trainer)
            self.recorder.step_begin()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._in_step and _steps(trainer) > self._before:
            self._in_step = False
            self.recorder.step_end()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.recorder.epoch_end()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        done = _steps(trainer)
        whole = done >= self._total or self._total == math.inf
        self.recorder.end(None if whole else f"stopped at step {done} of {self._total:.0f}")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.recorder.end(exception)


def _steps(trainer: Any) -> int:
    """Optimizer steps so far; Lightning counts those of several optimizers one by one."""
    return int(trainer.global_step) // max(1, len(trainer.optimizers))


def _observed(trainer: Any, total: int | None) -> dict[str, dict[str, Any]]:
    """Training, cluster and plan as the trainer has them."""
    loader, accumulated = trainer.train_dataloader, trainer.accumulate_grad_batches
    sampler = getattr(loader, "batch_sampler", None)
    per_device = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    on_gpu = trainer.strategy.root_device.type == "cuda"
    training: dict[str, Any] = {"precision": _precision(str(trainer.precision), on_gpu)}
    if trainer.optimizers:
        training["optimizer"] = optimizer_name(trainer.optimizers[0])
    if per_device:
        training["global_batch"] = per_device * trainer.world_size * accumulated
        training |= _length(trainer, loader, training["global_batch"], total)
    elif total:
        training["steps"] = total
    plan = {
        **({"micro_batch": per_device} if per_device and accumulated > 1 else {}),
        **({"shard": "zero3"} if type(trainer.strategy).__name__ == "FSDPStrategy" else {}),
    }
    cluster = cluster_here(trainer.world_size, trainer.num_nodes, on_gpu=on_gpu)
    return {"training": training, "cluster": cluster, "plan": plan}


def _precision(name: str, on_gpu: bool) -> str:
    import torch

    if name == "32-true" and on_gpu and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return _PRECISION.get(name, name)


def _length(trainer: Any, loader: Any, batch: int, total: int | None) -> dict[str, Any]:
    """How long the training is: in epochs where that gives the trainer's number of steps, else in steps."""
    try:
        samples: dict[str, Any] = {"samples": len(loader.dataset)}
    except (AttributeError, TypeError):
        samples = {}
    epochs = trainer.max_epochs
    if samples and epochs and epochs > 0 and epochs * math.ceil(samples["samples"] / batch) == total:
        return {**samples, "epochs": float(epochs)}
    return {**samples, **({"steps": total} if total else {})}
