"""Knows how a user's program trains (its batch, precision, optimizer, data) before a job is made of it."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretrain.capture.cache import cache_folder
from foretrain.capture.keys import library_versions
from foretrain.capture.programs.targets import batch_parameter, kind_of, located, read_source
from foretrain.capture.reads import Reads, digest
from foretrain.errors import InputError
from foretrain.files import read_text, write_atomically
from foretrain.graph import OpGraph
from foretrain.workload import Model, Training, Workload

_REVISION = 1
"""Raised when what is kept of a program changes."""

_KEPT = 4
_traced: dict[tuple[str, int | None], OpGraph] = {}
"""The steps that were traced to know how their programs train, in this process."""


def is_program(workload: Workload) -> bool:
    """Whether the model is a training program of its own, not a module that the job trains."""
    if workload.model.source != "python":
        return False
    return kind_of(*located(str(workload.model.name), workload.base)) != "builder"


def own_training(model: Model, base: Path, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a job's training that its program decides; none for what gives a module.

    ``asked`` are those that the user gives. What was found is kept beside the graphs.
    """
    workload = Workload(model=model, training=Training(**{"global_batch": 32, **asked}), base=base)
    path, target = located(str(model.name), base)
    if kind_of(path, target) == "builder":
        return _of_builder(workload, path, target)
    key = _key(workload)
    names = cache_folder() / f"{key}.reads.json"
    with contextlib.suppress(InputError, ValueError):
        kept: dict[str, Any] = json.loads(read_text(_note(key, Reads.load(names), path)))
        return kept
    from foretrain.capture.recording import recording

    with recording(path) as seen:
        graph = trace(workload, None)
    with contextlib.suppress(InputError, OSError):
        reads = seen.reads()
        reads.save(names)
        write_atomically(_note(key, reads, path), json.dumps(graph.info["training"]))
    return dict(graph.info["training"])


def trace(workload: Workload, samples: int | None) -> OpGraph:
    """The step of a program with this many samples, or as many as it takes; traced once in a process.

    An autocast region that the job asks for and the program does not open is put around it.
    """
    model = workload.model
    path, target = located(str(model.name), workload.base)
    training = workload.training
    key = f"{_key(workload)} {digest(path)}"
    for before in (_traced.get((key, samples)), _traced.get((key, None))):
        if before is not None and samples in (None, before.samples) and _is_cast(before, training):
            return before
    from foretrain.capture.programs.launch import trace_program

    info = {"model": model.label, "mode": "train", "versions": library_versions(model)}
    graph = trace_program(path, target, model.args, training, samples=samples, info=info)
    if not _is_cast(graph, training):
        graph = trace_program(path, target, model.args, training, samples=samples, info=info, cast=True)
    _traced[key, samples] = graph
    for oldest in list(_traced)[:-_KEPT]:
        del _traced[oldest]
    return graph


def check(graph: OpGraph, training: Training, name: str) -> None:
    """Refuse what a job says of its training where the program does otherwise."""
    for field in ("precision", "optimizer", "compile"):
        held, asked = graph.info["training"].get(field), getattr(training, field)
        if held is not None and held != asked and {held, asked} != {"fp32", "tf32"}:
            raise InputError(
                f"training.{field}: {asked!r}, but {name} trains with {held!r}; it decides that itself"
            )


def _is_cast(graph: OpGraph, training: Training) -> bool:
    held = graph.info["training"]["precision"]
    return not training.precision.startswith("amp-") or held not in ("fp32", "tf32")


def _of_builder(workload: Workload, path: Path, target: str) -> dict[str, Any]:
    """The batch of a function that does not take one but gives inputs."""
    node = read_source(path).functions.get(target)
    if node is None or batch_parameter(node) is not None or node.args.kwarg or node.args.vararg:
        return {}
    if any(name.startswith("_") for name in (one.arg for one in (*node.args.posonlyargs, *node.args.args))):
        return {}
    from foretrain.capture.sources.user_files import given_rows

    rows = given_rows(workload)
    return {} if rows is None else {"global_batch": rows}


def _key(workload: Workload) -> str:
    model, training = workload.model, workload.training
    content = [
        "program", _REVISION, model.name, model.args, library_versions(model), training.image_shape,
        training.sequence, training.classes,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _note(key: str, reads: Reads, path: Path) -> Path:
    state = json.dumps([key, digest(path), reads.state(path.parent)], sort_keys=True, default=str)
    return cache_folder() / f"{hashlib.sha256(state.encode()).hexdigest()[:32]}.program.json"
