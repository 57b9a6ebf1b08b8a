"""Hashes what shapes a graph (model, training, files) and names the versions of the libraries that trace
it."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretrain.capture.programs.targets import split_name
from foretrain.errors import InputError
from foretrain.job import Job
from foretrain.library_changes import LIBRARIES, LibraryChange, changes_undone
from foretrain.workload import Model

_REVISIONS = {"timm": 6, "torchvision": 7, "transformers": 10, "diffusion": 5, "python": 11, "onnx": 7}
"""Raised when what is traced of a source's models changes, so that older cached graphs are made anew."""

_FP8_REVISION = 3
"""Raised when what is traced of layers in fp8 changes."""

_ADAPTER_REVISION = 2
"""Raised when what is traced of adapters changes."""

_STATE_SPACE_REVISION = 1
"""Raised when what is traced of state-space layers changes."""

_MUON_REVISION = 2
"""Raised when what is traced of Muon changes."""

_LIBRARIES = {
    "timm": ("torch", "timm"),
    "torchvision": ("torch", "torchvision"),
    "transformers": ("torch", "transformers"),
}


Versions = tuple[tuple[str, str], ...]


def library_versions(model: Model | None = None) -> dict[str, str | None]:
    """The versions of the libraries that decide what a model is; of torch alone where a module is in hand."""
    names = _LIBRARIES.get(model.source, ("torch",)) if model is not None else ("torch",)
    return {name: _version(name) for name in names}


def installed_versions(model: Model) -> Versions:
    """Those of them that are installed here."""
    return tuple((name, version) for name, version in library_versions(model).items() if version is not None)


@functools.cache
def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


_STATE_SPACES = frozenset(
    """
    bamba falcon_h1 falcon_mamba granitemoehybrid jamba mamba mamba2 nemotron_h olmo_hybrid qwen3_5
    qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next zamba zamba2
    """.split()
)
"""Types of models with state-space layers or linear attention."""


def graph_key(
    job: Job, split: Mapping[str, Any] | None, batch: int | None, read: Mapping[str, Any] | None = None
) -> str:
    """A hash of all that shapes the graph; without ``batch``, of its graphs at all sizes.

    ``read`` is the state of what the model reads beside its file.
    """
    model, training = job.workload.model, job.workload.training
    content = {
        "revision": _REVISIONS[model.source],
        "model": [model.source, model.name, model.args, model.task, model.config],
        "training": [
            training.mode, training.sequence, training.image_shape, training.classes,
            _traced_precision(training.precision), training.master_weights,
            training.optimizer if training.mode == "train" else None, training.channels_last,
        ],
        **({"grad_scaler": True} if training.scales_loss else {}),
        "micro_batch": batch,
        "accumulate": accumulates(job),
        "file": _file_hash(job),
        **({"as_before": [change.name for change in undone]} if (undone := earlier_behaviour(job)) else {}),
        **({} if split is None else {"split": dict(split)}),
        **({"read": read} if read else {}),
        **({"fp8": [_FP8_REVISION, training.fp8_recipe]} if training.precision == "fp8" else {}),
        **({"muon": _MUON_REVISION} if training.optimizer == "muon" else {}),
        **({"mtp_layers": training.mtp_layers} if training.mtp_layers else {}),
        **({"predicted_tokens": training.predicted_tokens} if training.predicted_tokens else {}),
        **({"adapter": [_ADAPTER_REVISION, training.adapter]} if training.adapter else {}),
        **({"state_space": _STATE_SPACE_REVISION} if model.model_type in _STATE_SPACES else {}),
    }  # fmt: skip
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]


def earlier_behaviour(job: Job) -> tuple[LibraryChange, ...]:
    """What libraries that are installed here do otherwise than the versions that the job names."""
    model = job.workload.model
    if not model.libraries:
        return ()
    installed = {name: version for name in LIBRARIES if (version := _version(name)) is not None}
    undone = changes_undone(model.libraries, installed, model.source, model.model_type)
    if model.source != "python" or not undone:
        return undone
    text = _file_bytes(job)
    return tuple(change for change in undone if change.library.encode() in (text or b""))


def accumulates(job: Job) -> bool:
    """Whether the graph is one of several micro-batches whose gradients add up."""
    return job.accumulation > 1 and job.workload.training.mode == "train"


def _traced_precision(precision: str) -> str:
    """TF32 is a way of multiplying, not another graph."""
    return "fp32" if precision == "tf32" else precision


def model_file(job: Job) -> Path | None:
    """The file that a model of the user is in."""
    model = job.workload.model
    if model.source not in ("python", "onnx"):
        return None
    file = split_name(str(model.name))[0] if model.source == "python" else str(model.name)
    return Path(file) if Path(file).is_absolute() else job.workload.base / file


def _file_hash(job: Job) -> str | None:
    text = _file_bytes(job)
    return None if text is None else hashlib.sha256(text).hexdigest()


def _file_bytes(job: Job) -> bytes | None:
    if (path := model_file(job)) is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"model.name: {str(path)!r} cannot be read ({error.strerror})") from error
