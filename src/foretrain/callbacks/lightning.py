"""Records every training of a Lightning ``Trainer``, from which the job follows.

trainer = Trainer(callbacks=[ForetrainCallback("runs.jsonl")])
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretrain.callbacks.jobs import JobLike, cluster_here, length, optimizer_name
from foretrain.callbacks.recorder import Recorder
from foretrain.errors import InputError, first_line, missing

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

    ``job`` names the model and the size of its input; without it the module's own ``training_step`` is traced
    on the first samples, and its graph is kept beside the runs. Batch, precision, optimizer, length and
    cluster come from the trainer where the job leaves them out. Further options are those of ``Recorder``.
    """

    def __init__(self, runs: str | os.PathLike[str], job: JobLike | None = None, **options: Any) -> None:
        package = _package()
        self._runs = str(runs)
        self.recorder = Recorder(runs, job=job, framework=f"lightning {package.__version__}", **options)
        self.recorder.end_with(self)
        self._in_step = False
        self._total: float = math.inf

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        self._total, self._in_step = trainer.estimated_stepping_batches, False
        total = int(self._total) if 0 < self._total < math.inf else None
        observed = _observed(trainer, total)
        if not self.recorder.names_model:
            observed["model"] = _traced(trainer, pl_module, observed["training"], _graphs_beside(self._runs))
        self.recorder.begin(observed, total_steps=total, done=_steps(trainer), main=True)

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
        training |= length(loader, training["global_batch"], epochs=trainer.max_epochs, steps=total)
    elif total:
        training["steps"] = total
    plan = {
        **({"micro_batch": per_device} if per_device and accumulated > 1 else {}),
        **({"shard": "zero3"} if type(trainer.strategy).__name__ == "FSDPStrategy" else {}),
    }
    cluster = cluster_here(trainer.world_size, trainer.num_nodes, on_gpu=on_gpu)
    return {"training": training, "cluster": cluster, "plan": plan}


# The model


def _graphs_beside(runs: str) -> Path:
    """The folder that keeps graphs for a file of runs; for a database, that of all graphs."""
    from foretrain.capture import cache_folder
    from foretrain.measure.store import is_database

    return cache_folder() if is_database(runs) else Path(runs).absolute().with_suffix(".graphs")


def _traced(trainer: Any, module: Any, training: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The [model] section for the step that a module makes of the first samples; the training sees nothing
    of it."""
    from foretrain.capture import capture
    from foretrain.capture.tracing.guesses import draws_kept

    name, example = type(module).__name__, 'ForetrainCallback(..., job={"model": ...})'
    step, loader, samples = _one_step(module), trainer.train_dataloader, training.get("global_batch")
    try:
        samples = samples // (trainer.world_size * trainer.accumulate_grad_batches)
        with draws_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batch = loader.collate_fn([loader.dataset[i % len(loader.dataset)] for i in range(samples)])
            graph = capture(
                step, (batch,), _loss, precision=training["precision"], optimizer=training["optimizer"],
                accumulate=trainer.accumulate_grad_batches > 1, samples=samples,
            )  # fmt: skip
    except Exception as error:
        raise InputError(
            f"job: the training step of {name} cannot be traced ({first_line(error)}); "
            f"name the model: {example}"
        ) from error
    path = folder / f"{name}-{graph.digest()[:12]}.json.zst"
    graph.save(path)
    return {"source": "graph", "name": str(path)}


def _one_step(module: Any) -> Any:
    """A module whose forward pass is the training step of a LightningModule."""
    import torch

    class TrainingStep(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, batch: Any) -> Any:
            own = self.module
            return own.training_step(*(batch, 0)[: len(inspect.signature(own.training_step).parameters)])

    return TrainingStep()


def _loss(output: Any) -> Any:
    return output["loss"] if isinstance(output, Mapping) else output


def _precision(name: str, on_gpu: bool) -> str:
    import torch

    if name == "32-true" and on_gpu and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return _PRECISION.get(name, name)
