"""A job (or a module in hand) becomes an OpGraph: found in the cache, or traced with torch, which is imported only then."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrain.errors import CaptureError, InputError, UnsupportedJob, first_line
from foretrain.graph import OpGraph, Weight
from foretrain.job import Job, Model, Plan, Training

if TYPE_CHECKING:
    import torch

_REVISION = 2
"""Raised when the tracer changes what it records, so that older cached graphs are made anew."""

_RANK_REVISION = 2
"""The same for what ``capture_rank`` adds to it."""

_LIBRARIES = {
    "timm": ("torch", "timm"),
    "torchvision": ("torch", "torchvision"),
    "transformers": ("torch", "transformers"),
}


def capture(
    module: torch.nn.Module,
    inputs: tuple[Any, ...] | Mapping[str, Any] | torch.Tensor,
    loss: Callable[[Any], torch.Tensor] | None = None,
    *,
    mode: str = "train",
    precision: str = "fp32",
    optimizer: str = "sgd",
    master_weights: bool = False,
    channels_last: bool = False,
    accumulate: bool = False,
    samples: int | None = None,
    tokens: int = 0,
) -> OpGraph:
    """Trace one step of a module. It is copied to the meta device: neither its weights nor its state are touched.

    Without ``loss``, an output with a ``.loss`` uses it and logits get cross-entropy. ``samples`` defaults to the length
    of the first input.
    """
    import torch

    from foretrain.capture.sources.models import classifier_loss
    from foretrain.capture.tracing.tracer import trace_step

    arguments = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    first = next(
        (
            t
            for t in (arguments.values() if isinstance(arguments, Mapping) else arguments)
            if isinstance(t, torch.Tensor)
        ),
        None,
    )
    batch = samples or (first.shape[0] if first is not None and first.dim() else 1)
    return trace_step(
        _on_meta(module), arguments, loss or classifier_loss(), samples=batch, tokens=tokens, mode=mode, precision=precision, optimizer=optimizer,
        master_weights=master_weights, channels_last=channels_last, accumulate=accumulate, info=_info(type(module).__name__, mode, precision, optimizer, ("torch",)),
    )  # fmt: skip


def _on_meta(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of the module whose tensors are on meta, made without copying the data."""
    import copy

    import torch

    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        twin = tensor.detach().to("meta")
        memo[id(tensor)] = (
            torch.nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else twin
        )
    for value in (value for child in module.modules() for value in vars(child).values()):
        if isinstance(value, torch.Tensor) and not value.is_leaf:  # an activation that the module kept
            memo[id(value)] = value.detach().to("meta")
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise CaptureError(
            f"module {type(module).__name__}: cannot be copied ({first_line(error)})"
        ) from error


def capture_job(job: Job, *, refresh: bool = False) -> OpGraph:
    """The graph of one rank's micro-batch with every layer whole, from memory, from disk, or traced now."""
    model, training = job.workload.model, job.workload.training
    accumulate = job.accumulation > 1 and training.mode == "train"
    if model.source == "graph":
        return _with_weights(_given_graph(job))
    whole = {"whole": _RANK_REVISION, "framework": training.framework}
    key = _key(model, training, job.workload.base, job.micro_batch, accumulate, whole)
    return _found_or(lambda: _trace(_alone(job), accumulate, by_layers=False), job, key, refresh)


def _alone(job: Job) -> Job:
    """The micro-batches of one rank as a job of their own, on one device."""
    group = dataclasses.replace(job.cluster.groups[0], devices_per_node=1, nodes=1)
    training = dataclasses.replace(job.workload.training, global_batch=job.micro_batch * job.accumulation)
    return Job(
        workload=dataclasses.replace(job.workload, training=training),
        cluster=dataclasses.replace(job.cluster, groups=(group,)),
        plan=Plan(micro_batch=job.micro_batch),
    )


def capture_rank(job: Job, *, refresh: bool = False) -> OpGraph:
    """The graph of one rank's micro-batch under the job's tensor, context and expert parallelism, by the model's distinct layers.

    Its collectives are operators named ``all_reduce``, ``all_gather``, ``reduce_scatter`` and ``all_to_all``, with the group
    ("tensor", "context" or "expert") as overload. ``weights`` holds what the rank has of every parameter of the whole model
    (pipeline stages and sharding over the data group are not applied). Where ``stack`` is set, forward and backward hold its
    traced layers only, and so does the optimizer's step.
    """
    model, training, plan = job.workload.model, job.workload.training, job.plan
    accumulate = job.accumulation > 1 and training.mode == "train"
    if model.source == "graph":
        if max(plan.tensor, plan.context, plan.expert) > 1:
            raise UnsupportedJob(
                "plan: a graph that is given as a file cannot be cut; plan.tensor, plan.context and plan.expert must be 1"
            )
        return _with_weights(_given_graph(job))
    split = {
        "ranks": _RANK_REVISION, "by_layers": True, "tensor": plan.tensor, "context": plan.context, "expert": plan.expert,
        "sequence_parallel": plan.sequence_parallel and plan.tensor > 1, "tensor_plan": plan.tensor_plan, "framework": training.framework,
    }  # fmt: skip
    key = _key(model, training, job.workload.base, job.micro_batch, accumulate, split)
    return _found_or(lambda: _trace(job, accumulate, by_layers=True), job, key, refresh)


@functools.lru_cache(maxsize=32)
def _with_weights(graph: OpGraph) -> OpGraph:
    """A graph that was captured for one device knows its parameters by their number only."""
    if graph.weights or not graph.parameters:
        return graph
    held = sum(buffer.size_bytes for buffer in graph.buffers if buffer.category == "weights")
    dtype = "bfloat16" if held < 3 * graph.parameters else "float32"
    return dataclasses.replace(graph, weights=(Weight("", graph.parameters, dtype),))


def _found_or(trace: Callable[[], OpGraph], job: Job, key: str, refresh: bool) -> OpGraph:
    """The graph of this key from memory or disk, else traced now and kept."""
    precision = job.workload.training.precision
    path = cache_folder() / f"{key}.json.zst"
    if not refresh:
        with contextlib.suppress(
            FileNotFoundError, NotADirectoryError, InputError
        ):  # absent, stale or damaged: trace again
            found = _cached(path, path.stat().st_mtime_ns, _versions(job.workload.model))
            if found.info.get("precision") == precision:
                return found
            return dataclasses.replace(
                found, info={**found.info, "precision": precision}
            )  # tf32 and fp32 share a graph
    graph = trace()
    graph.save(path)
    _just_traced[path, path.stat().st_mtime_ns] = graph
    return graph


_just_traced: weakref.WeakValueDictionary[tuple[Path, int], OpGraph] = weakref.WeakValueDictionary()
"""Graphs that are still in use, so that the file just written need not be read."""


def cache_folder() -> Path:
    """Where graphs are kept: $FORETRAIN_CACHE, or foretrain in the user's cache folder."""
    given = os.environ.get("FORETRAIN_CACHE")
    return (
        Path(given)
        if given
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretrain" / "graphs"
    )


@functools.lru_cache(maxsize=128)
def _cached(path: Path, _changed: int, versions: tuple[tuple[str, str], ...]) -> OpGraph:
    """A graph on disk, unless a library that is installed here now has another version than the one it was traced with."""
    graph = _just_traced.get((path, _changed)) or OpGraph.load(path)
    traced = graph.info.get("versions", {})
    if any(traced.get(library) != version for library, version in versions):
        raise FileNotFoundError(path)
    return graph


def _given_graph(job: Job) -> OpGraph:
    path = Path(str(job.workload.model.name))
    path = path if path.is_absolute() else job.workload.base / path
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise InputError(f"model.name: {str(path)!r} cannot be read ({error.strerror})") from error
    graph = _cached(path, changed, ())
    accumulates = job.accumulation > 1 and job.workload.training.mode == "train"
    if graph.accumulates != accumulates:
        held = "adds to gradients of earlier micro-batches" if graph.accumulates else "is a whole step"
        raise InputError(
            f"plan.micro_batch: the graph {path.name} {held}, the job has {job.accumulation} micro-batches per step"
        )
    if graph.samples != job.micro_batch:
        raise InputError(
            f"training.global_batch: the graph {path.name} holds {graph.samples} samples per micro-batch, the job asks for {job.micro_batch}"
        )
    for field in ("mode", "precision", "optimizer"):
        if field in graph.info and graph.info[field] != getattr(job.workload.training, field):
            raise InputError(
                f"training.{field}: the graph {path.name} was captured with {graph.info[field]!r}, the job asks for {getattr(job.workload.training, field)!r}"
            )
    return graph


def _needs_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise CaptureError(
            "model: this graph is not in the cache and torch is not installed; install foretrain[capture,zoo] or give a captured graph"
        )


def _trace(job: Job, accumulate: bool, *, by_layers: bool) -> OpGraph:
    _needs_torch()
    from foretrain.capture.parallel.ranks import trace_rank

    training = job.workload.training
    info = _info(
        job.workload.model.label,
        training.mode,
        training.precision,
        training.optimizer,
        _libraries(job.workload.model),
    )
    return trace_rank(job, accumulate=accumulate, info=info, by_layers=by_layers)


def _info(
    model: str, mode: str, precision: str, optimizer: str, libraries: tuple[str, ...]
) -> dict[str, Any]:
    return {
        "model": model,
        "mode": mode,
        "precision": precision,
        "optimizer": optimizer,
        "versions": {name: _version(name) for name in libraries},
    }


def _libraries(model: Model) -> tuple[str, ...]:
    return _LIBRARIES.get(model.source, ("torch",))


def _versions(model: Model) -> tuple[tuple[str, str], ...]:
    """The versions installed here of the libraries that decide what the model is."""
    return tuple((name, version) for name in _libraries(model) if (version := _version(name)) is not None)


@functools.cache
def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _key(
    model: Model,
    training: Training,
    base: Path,
    micro_batch: int,
    accumulate: bool,
    split: Mapping[str, Any] | None = None,
) -> str:
    """A hash of everything that shapes the graph, file contents included."""
    content = {
        "revision": _REVISION,
        "model": [model.source, model.name, model.args, model.task, model.config],
        "training": [
            training.mode, training.sequence, training.image_shape, training.classes, _traced_precision(training.precision),
            training.master_weights, training.optimizer if training.mode == "train" else None, training.channels_last,
        ],
        "micro_batch": micro_batch,
        "accumulate": accumulate,
        "file": _file_hash(model, base),
        **({} if split is None else {"split": dict(split)}),
    }  # fmt: skip
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _traced_precision(precision: str) -> str:
    """TF32 is a way of multiplying, not another graph."""
    return "fp32" if precision == "tf32" else precision


def _file_hash(model: Model, base: Path) -> str | None:
    """Of the ONNX file; of the Python file and those that it may import from its folder."""
    if model.source not in ("python", "onnx"):
        return None
    file = str(model.name).rpartition(":")[0] if model.source == "python" else str(model.name)
    path = Path(file) if Path(file).is_absolute() else base / file
    try:
        contents = _modules(path) if model.source == "python" else {path: path.read_bytes()}
    except OSError as error:
        raise InputError(f"model.name: {str(path)!r} cannot be read ({error.strerror})") from error
    parts = sorted(
        (os.path.relpath(one, path.parent), hashlib.sha256(content).hexdigest())
        for one, content in contents.items()
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _modules(path: Path) -> dict[Path, bytes]:
    """Contents of a Python file, of those beside it, and of the packages beside it that any of them names."""
    contents = {one: one.read_bytes() for one in {path, *_sources(path.parent.glob("*.py"))}}
    packages = {folder for folder in path.parent.iterdir() if folder.name.isidentifier() and folder.is_dir()}
    unread = list(contents.values())
    while unread:
        words = set(re.findall(rb"\w+", b"\n".join(unread)))
        named = {folder for folder in packages if folder.name.encode() in words}
        packages -= named
        found = {one: one.read_bytes() for folder in named for one in _sources(folder.rglob("*.py"))}
        contents |= found
        unread = list(found.values())
    return contents


def _sources(paths: Iterable[Path]) -> list[Path]:
    return [one for one in paths if one.is_file() and not one.name.startswith(".")]
