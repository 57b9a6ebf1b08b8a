"""Builds the module, inputs and loss of a job's [model] section, on the meta device or a real one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from foretrain.capture.sources.inputs import check_classes, check_inputs
from foretrain.capture.sources.loaded import LoadedModel, build_on, building, classifier_loss
from foretrain.capture.sources.transformers.loading import load_transformers
from foretrain.capture.sources.transformers.losses import OwnOrMean
from foretrain.capture.sources.user_files import load_python
from foretrain.capture.sources.zoo import load_timm, load_torchvision, quiet_zoo_import
from foretrain.errors import InputError
from foretrain.job import Workload


def load_model(workload: Workload, batch: int, device: str = "meta") -> LoadedModel:
    """Build the workload's model for one (micro-)batch of ``batch`` samples, on meta (to trace it) or on a
    device (to run it)."""
    if batch < 1:
        raise InputError(f"batch: {batch} is not 1 or more")
    return _SOURCES[workload.model.source](workload, batch, device)


# Language and other models of transformers


def _transformers(workload: Workload, batch: int, device: str) -> LoadedModel:
    quiet_zoo_import()
    with building(f"model {workload.model.label}"):
        module, inputs, tokens, notes = load_transformers(
            workload.model, workload.training, batch, lambda build: build_on(build, device), device
        )
    loss = OwnOrMean(type(module).__name__)
    return LoadedModel(module=module, inputs=inputs, loss=loss, tokens=tokens, notes=notes)


def _onnx(workload: Workload, batch: int, device: str) -> LoadedModel:
    from foretrain.capture.sources.onnx.module import load_onnx

    assert workload.model.name is not None
    path = Path(workload.model.name)
    path = path if path.is_absolute() else workload.base / path
    if not path.is_file():
        raise InputError(f"model.name: {str(path)!r} is not a file")
    with building(f"model {path}"):
        module, inputs = load_onnx(path, batch=batch) if device == "meta" else _onnx_on(path, batch, device)
    training = workload.training
    check_inputs(f"model {path.name}", inputs, batch, sequence=training.sequence, image=training.image_shape)
    check_classes(f"model {path.name}", module, training.classes)
    tokens = batch * training.sequence if training.sequence else 0
    return LoadedModel(module=module, inputs=inputs, loss=classifier_loss(), tokens=tokens)


def _onnx_on(path: Path, batch: int, device: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """The file's own weights, and random inputs in place of the examples."""
    from foretrain.capture.sources.onnx.module import build

    module, examples = build(path, batch=batch, keep_data=True)
    inputs = [torch.zeros(example.shape, dtype=example.dtype, device=device) for example in examples]
    return module.to(device), tuple(
        value.normal_() if value.is_floating_point() else value for value in inputs
    )


_SOURCES: dict[str, Callable[[Workload, int, str], LoadedModel]] = {
    "timm": load_timm,
    "torchvision": load_torchvision,
    "transformers": _transformers,
    "python": load_python,
    "onnx": _onnx,
}
