"""Builds the module, inputs and loss of a job's [model] section, on the meta device or a real one."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from foretrain.adapter import Adapter
from foretrain.capture.sources.adapters import with_adapter
from foretrain.capture.sources.diffusion import load_diffusion
from foretrain.capture.sources.float8 import into_fp8
from foretrain.capture.sources.inputs import check_classes, check_inputs
from foretrain.capture.sources.linear_attention import with_delta_rule_kernels
from foretrain.capture.sources.loaded import LoadedModel, building, classifier_loss
from foretrain.capture.sources.state_space import with_state_space_kernels
from foretrain.capture.sources.transformers.loading import load_transformers
from foretrain.capture.sources.transformers.losses import OwnOrMean
from foretrain.capture.sources.transformers.prediction import predict_further
from foretrain.capture.sources.user_files import load_python
from foretrain.capture.sources.zoo import load_timm, load_torchvision, quiet_zoo_import
from foretrain.capture.tracing.constants import Constants
from foretrain.errors import InputError
from foretrain.progress import tell
from foretrain.workload import Fp8, Workload

_LIBRARIES = ("timm", "torchvision", "transformers")


def load_model(workload: Workload, batch: int, device: str = "meta") -> LoadedModel:
    """Build the workload's model for one (micro-)batch of ``batch`` samples, on meta (to trace it) or on a
    device (to run it)."""
    if batch < 1:
        raise InputError(f"batch: {batch} is not 1 or more")
    library, label = workload.model.source, workload.model.label
    first = library in _LIBRARIES and library not in sys.modules
    tell(f"importing {library}, building {label}" if first else f"building {label}")
    loaded, training = _SOURCES[workload.model.source](workload, batch, device), workload.training
    notes = with_own_layers(loaded.module, training.precision, training.fp8_recipe, training.adapter)
    return dataclasses.replace(loaded, notes=[*loaded.notes, *notes]) if notes else loaded


def with_own_layers(module: torch.nn.Module, precision: str, fp8: Fp8, adapter: Adapter | None) -> list[str]:
    """Put layers in fp8 and adapters in place of the module's own; returns what is assumed of them."""
    if precision == "fp8":
        into_fp8(module, fp8)
    return [] if adapter is None else with_adapter(module, adapter, precision)


# Language and other models of transformers


def _transformers(workload: Workload, batch: int, device: str) -> LoadedModel:
    quiet_zoo_import()
    constants = Constants(of_library=True)
    with building(f"model {workload.model.label}"):
        module, inputs, tokens, notes = load_transformers(
            workload.model, workload.training, batch, device, constants
        )
        if further := workload.training.mtp_layers:
            predict_further(module, further)
        if device == "meta":
            notes = (*notes, *with_state_space_kernels(module), *with_delta_rule_kernels(module))
    return LoadedModel(
        module=module,
        inputs=inputs,
        loss=OwnOrMean(type(module).__name__),
        tokens=tokens,
        notes=notes,
        constants=constants,
    )


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
    return LoadedModel(module=module, inputs=inputs, loss=classifier_loss(inputs), tokens=tokens)


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
    "diffusion": load_diffusion,
    "python": load_python,
    "onnx": _onnx,
}
