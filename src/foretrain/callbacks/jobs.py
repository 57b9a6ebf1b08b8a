"""Completes the job of a training with what its process knows of itself: devices, optimizer, length."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretrain import options
from foretrain.allocator_settings import AllocatorSettings, set_in_environment
from foretrain.api import make_job
from foretrain.cluster import Catalog
from foretrain.errors import InputError
from foretrain.files import read_tables
from foretrain.job import Job
from foretrain.workload import Training

Tables = Mapping[str, Mapping[str, Any]]
"""Sections of a job: model, training, cluster, plan; each may be missing or hold a part only."""

JobLike = Job | str | os.PathLike[str] | Tables
"""A job, the path of a job file, the name of a model, or the tables of a job with what the framework knows
left out."""

_FORMS = ("sxm", "pcie", "nvl")
_NEAR = 0.15
"""How far, as a logarithm, the memory that the driver tells may lie from the catalogue's."""


# Jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialJob:
    """Holds what the user says of the job: all of it, or tables to be completed."""

    job: Job | None = None
    tables: Tables = field(default_factory=dict)
    base: Path = Path()
    """Where relative paths of models start."""

    @classmethod
    def read(cls, job: JobLike | None) -> PartialJob:
        if isinstance(job, Job):
            workload = dataclasses.replace(job.workload, base=job.workload.base.absolute())
            return cls(job=dataclasses.replace(job, workload=workload))
        tables, base = _tables(job)
        return cls(tables=tables, base=base.absolute())

    @property
    def names_model(self) -> bool:
        return self.job is not None or bool(self.tables.get("model"))


def whole_job(partial: PartialJob, observed: Tables) -> Job:
    """The job, completed with what was observed; ``model`` and ``cluster`` come whole from either."""
    if partial.job is not None:
        return _with_length(partial.job, observed.get("training", {}))
    tables = partial.tables
    training, known = dict(tables.get("training", {})), dict(observed.get("training", {}))
    if "steps" in training or "epochs" in training:
        known = {name: value for name, value in known.items() if name not in ("steps", "epochs")}
    merged = {
        **tables,
        **{name: tables.get(name) or observed.get(name) for name in ("model", "cluster")},
        "training": {**known, **training},
        "plan": {**observed.get("plan", {}), **tables.get("plan", {})},
    }
    if not merged["model"]:
        examples = 'job="resnet50", job="job.toml" or job={"model": {...}}'
        raise InputError(f"job: missing; say which model is trained, such as {examples}")
    if not merged["cluster"]:
        example = 'job={"cluster": {"device": "h100"}, ...}'
        raise InputError(f"job: no cluster in it and none found; give it, such as {example}")
    return Job.read(merged, base=partial.base)


def differences(job: Job, observed: Tables) -> list[str]:
    """Say where a job contradicts what the framework says of the training, a line each."""
    training, cluster = observed.get("training", {}), observed.get("cluster", {})
    notes = []
    batch, expected = training.get("global_batch"), job.workload.training.global_batch
    if batch and batch != expected:
        notes.append(f"training.global_batch: the job says {expected}, the training uses {batch}")
    devices = cluster.get("devices_per_node", 1) * cluster.get("nodes", 1) if cluster else None
    if devices and devices != job.cluster.world_size:
        notes.append(f"cluster: the job has {job.cluster.world_size} devices, the training uses {devices}")
    return notes


def _with_length(job: Job, known: Mapping[str, Any]) -> Job:
    """A job says everything but, perhaps, how long the training is."""
    training = job.workload.training
    if training.samples is not None or training.total_steps is not None:
        return job
    length = {name: known[name] for name in ("samples", "epochs", "steps") if known.get(name) is not None}
    return with_training(job, dataclasses.replace(training, **length))


def with_training(job: Job, training: Training) -> Job:
    return dataclasses.replace(job, workload=dataclasses.replace(job.workload, training=training))


def _tables(job: str | os.PathLike[str] | Tables | None) -> tuple[Tables, Path]:
    """The tables, and the folder that relative paths of models start from."""
    if job is None:
        return {}, Path()
    if isinstance(job, Mapping):
        for name, section in job.items():
            if not isinstance(section, Mapping):
                raise InputError(f"job.{name}: {section!r} is not a table of keys and values")
        return job, Path()
    path = Path(job)
    if path.suffix not in (".toml", ".json"):
        named = make_job(str(job), device="cpu", cores_per_device=1, batch=1).to_dict()
        kept = ("image", "sequence", "classes", "optimizer")
        inputs = {name: value for name, value in named["training"].items() if name in kept}
        return {"model": named["model"], "training": inputs}, Path()
    return read_tables(path), path.parent


# Devices


def cuda() -> Any:
    """``torch.cuda`` where this process uses it, else None; torch is not imported for it."""
    torch = sys.modules.get("torch")
    used = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.cuda if torch is not None and used else None


def cluster_here(devices: int = 1, nodes: int = 1, *, on_gpu: bool = False) -> dict[str, Any]:
    """The cluster section for so many devices like the one of this process, spread over so many nodes."""
    import torch

    counts = {"devices_per_node": max(1, devices // nodes), "nodes": nodes}
    if not on_gpu:
        return {"device": "cpu", "cores_per_device": torch.get_num_threads(), **counts}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {"device": device_name(properties.name, properties.total_memory), **counts}


def length(loader: Any, batch: int, *, epochs: float | None, steps: int | None) -> dict[str, Any]:
    """Say how long a training is: in epochs where these give the trainer's number of steps, else in steps."""
    try:
        samples: dict[str, Any] = {"samples": len(loader.dataset)}
    except (AttributeError, TypeError):
        samples = {}
    if (
        samples
        and epochs
        and epochs > 0
        and math.ceil(epochs * math.ceil(samples["samples"] / batch)) == steps
    ):
        return {**samples, "epochs": float(epochs)}
    return {**samples, **({"steps": steps} if steps else {})}


def device_name(driver_name: str, memory_bytes: float) -> str:
    """Find the catalogue's name of the GPU that the driver calls so and that has so much memory.

    >>> device_name("NVIDIA A100-SXM4-80GB", 85e9), device_name("NVIDIA GeForce RTX 3090", 25.4e9)
    ('a100-sxm-80gb', 'rtx-3090')
    """
    catalog = Catalog.load()
    driver_words = set(re.findall(r"[a-z0-9]+", driver_name.lower().replace("laptop", "mobile")))
    forms = {form for form in _FORMS if any(word.startswith(form) for word in driver_words)} or {"sxm"}
    ranks: dict[str, tuple[int, bool, float]] = {}
    for name in catalog.names("devices"):
        device = catalog.device(name)
        distance = abs(math.log(memory_bytes / device.memory_bytes))
        spellings = [_model_words(spelling) for spelling in (name, *device.aliases)]
        length = max((len(words) for words in spellings if words and words <= driver_words), default=0)
        if not device.is_cpu and length and distance <= _NEAR:
            ranks[name] = (length, any(form in name for form in forms), -distance)
    if not ranks:
        gpu = f"the GPU {driver_name!r} with {memory_bytes / 2**30:.0f} GiB"
        raise InputError(f'cluster.device: {gpu} is not in the catalogue; give job={{"cluster": ...}}')
    return max(ranks, key=lambda name: ranks[name])


def _model_words(name: str) -> set[str]:
    """The words of a catalogue name that tell the model, without form and size of memory."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return {word for word in words if word not in _FORMS and not re.fullmatch(r"\d+gb", word)}


def allocator_here() -> str | None:
    """Settings of torch's allocator in this process, where a job can name them."""
    text = set_in_environment()
    try:
        AllocatorSettings.read(text or "")
    except InputError:
        return None
    return text


# Optimizers


def optimizer_name(optimizer: Any) -> str:
    """The name that jobs use for an optimizer of torch or a wrapper around one, else that of its class."""
    try:
        return options.optimizer_name(optimizer)
    except InputError:
        return type(options.unwrapped_optimizer(optimizer)).__name__.lower()


# Data
