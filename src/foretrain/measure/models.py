"""Builds a job's model on a device, with real weights, random inputs and a loss, ready to be trained."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from foretrain.capture.sources.loaded import AUTOCAST_DTYPES, WEIGHT_DTYPES, Loss, in_channels_last
from foretrain.capture.sources.models import load_model
from foretrain.capture.tracing.optimizers import optimizer_of, weights_of_words
from foretrain.errors import InputError
from foretrain.workload import TORCHAO, CompileMode, Training, Workload


class RealModel(NamedTuple):
    """Holds what a training step needs: the module, what it is called with, and its loss."""

    module: torch.nn.Module
    inputs: tuple[Any, ...] | Mapping[str, Any]
    loss: Loss

    def compute(self, through: torch.nn.Module | None = None) -> torch.Tensor:
        """Forward and loss; ``through`` is the module as wrapped for data parallelism."""
        return self.loss(self.output(through))

    def output(self, through: torch.nn.Module | None = None) -> Any:
        """Forward alone."""
        module = self.module if through is None else through
        return module(**self.inputs) if isinstance(self.inputs, Mapping) else module(*self.inputs)


def real_model(workload: Workload, batch: int, device: str | torch.device) -> RealModel:
    """The workload's model on ``device`` for ``batch`` samples; weights, layout and mode as the job says."""
    training = workload.training
    if workload.model.source == "graph":
        what = f"{workload.model.label} is a captured graph, which cannot be run"
        raise InputError(f"model.source: {what}; name the model itself")
    if training.precision == "fp8" and training.fp8_recipe not in TORCHAO:
        others = ", ".join(TORCHAO)
        whose = f"training.fp8: {training.fp8_recipe!r} is Transformer Engine's and cannot be measured"
        raise InputError(f"{whose}; {others} can")
    loaded = load_model(workload, batch, str(device))
    assert loaded.loss is not None
    module = loaded.module.train(training.mode == "train")
    if (dtype := WEIGHT_DTYPES.get(training.precision)) is not None:
        module = _compact(module.to(dtype), device)
    if training.channels_last:
        module = in_channels_last(module)
    return RealModel(module, _prepared(loaded.inputs, training, device), loaded.loss)


def _compact(module: torch.nn.Module, device: str | torch.device) -> torch.nn.Module:
    """The module with its weights one after the other in memory, as if loaded so: what they were converted
    from is returned to the device."""
    if torch.device(device).type != "cuda":
        return module
    module = module.cpu()
    torch.cuda.empty_cache()
    return module.to(device)


def compiled(module: torch.nn.Module, mode: bool | CompileMode) -> torch.nn.Module:
    """The module as ``torch.compile`` wraps it in a mode; as it is where nothing is compiled.

    Recompilations are those of a fresh process: what earlier modules have left is forgotten.
    """
    if not mode:
        return module
    torch._dynamo.reset()
    _importable(module)
    wrapped: torch.nn.Module = torch.compile(module, mode=None if mode is True else mode)  # type: ignore[assignment]
    return wrapped


def _importable(module: torch.nn.Module) -> None:
    """The compiler imports the files that classes come from; a user's was forgotten once it was run."""
    for kind in {type(child) for child in module.modules()}:
        if kind.__module__ not in sys.modules and hasattr(kind.forward, "__globals__"):
            file = types.ModuleType(kind.__module__)
            file.__dict__.update(kind.forward.__globals__)
            sys.modules[kind.__module__] = file


def autocast(precision: str, device: str | torch.device) -> contextlib.AbstractContextManager[Any]:
    """Run forward and loss under autocast for amp-bf16 and amp-fp16, else under nothing."""
    if (dtype := AUTOCAST_DTYPES.get(precision)) is None:
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, dtype=dtype)


def real_optimizer(
    name: str, parameters: list[torch.nn.Parameter], module: torch.nn.Module | None = None
) -> torch.optim.Optimizer:
    """The job's optimizer over real parameters of a module, in torch's default form for their device.

    Step it under ``torch.no_grad``.
    """
    words = weights_of_words(module) if module is not None else frozenset()
    optimizer = optimizer_of(name, parameters, of_words=[one for one in parameters if id(one) in words])
    for group in optimizer.param_groups:
        if group.get("foreach"):
            group["foreach"] = None
    return optimizer


def _prepared(inputs: Any, training: Training, device: str | torch.device) -> Any:
    if isinstance(inputs, Mapping):
        return {name: _prepared(value, training, device) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(_prepared(value, training, device) for value in inputs)
    if not isinstance(inputs, torch.Tensor):
        return inputs
    value = inputs.to(device)
    if value.is_floating_point() and (dtype := WEIGHT_DTYPES.get(training.precision)) is not None:
        value = value.to(dtype)
    if training.channels_last and value.dim() == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value
