"""Keeps graphs on disk: those that were traced, and families that give the other batch sizes of a model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foretrain.capture.keys import Versions, graph_key, installed_versions
from foretrain.errors import ForetrainError, InputError
from foretrain.files import read_text, write_atomically
from foretrain.graph import OpGraph
from foretrain.graph.batches import LEAST_BATCH, BatchFamily, NotLinear
from foretrain.job import Job


def cache_folder() -> Path:
    """Where graphs are kept: $FORETRAIN_CACHE, or foretrain in the user's cache folder."""
    given = os.environ.get("FORETRAIN_CACHE")
    return (
        Path(given)
        if given
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretrain" / "graphs"
    )


def found_or_traced(
    trace: Callable[[int], OpGraph],
    job: Job,
    split: Mapping[str, Any] | None = None,
    *,
    refresh: bool = False,
) -> OpGraph:
    """The graph of a job's micro-batch: from memory or disk, derived from two other batch sizes, or traced
    now.

    ``trace`` traces the job's model at a batch size; ``split`` is what shapes the graph beside model and
    training.
    """
    path = _graph_path(job, split, job.micro_batch)
    family = _Family(job, split)
    versions = installed_versions(job.workload.model)
    if not refresh:
        with _absent_or_damaged():
            return _of_precision(job, read_graph(path, path.stat().st_mtime_ns, versions))
        with _absent_or_damaged():
            return _of_precision(job, family.graph())
    graph = trace(job.micro_batch)
    graph.save(path)
    _just_traced[path, path.stat().st_mtime_ns] = graph
    family.learn(graph, trace, forget=refresh)
    return graph


def _graph_path(job: Job, split: Mapping[str, Any] | None, batch: int) -> Path:
    return cache_folder() / f"{graph_key(job, split, batch)}.json.zst"


def _absent_or_damaged() -> contextlib.suppress:
    """What cannot be used from the cache is traced again."""
    return contextlib.suppress(FileNotFoundError, NotADirectoryError, InputError, NotLinear)


def _of_precision(job: Job, graph: OpGraph) -> OpGraph:
    """tf32 and fp32 share a graph."""
    precision = job.workload.training.precision
    if graph.info.get("precision") == precision:
        return graph
    return dataclasses.replace(graph, info={**graph.info, "precision": precision})


_just_traced: weakref.WeakValueDictionary[tuple[Path, int], OpGraph] = weakref.WeakValueDictionary()
"""Graphs that are still in use, so that the file just written need not be read."""


@functools.lru_cache(maxsize=128)
def read_graph(path: Path, _changed: int, versions: Versions = ()) -> OpGraph:
    """A graph on disk, unless it was traced with other versions of the libraries than are installed here."""
    graph = _just_traced.get((path, _changed)) or OpGraph.load(path)
    _check_versions(path, graph.info, versions)
    return graph


def _check_versions(path: Path, info: Mapping[str, Any], versions: Versions) -> None:
    traced = info.get("versions", {})
    if any(traced.get(library) != version for library, version in versions):
        raise FileNotFoundError(path)


# Other batch sizes

_ODD_BATCHES = (3, 5, 7)


class _Family:
    """The graphs of a job's model at all batch sizes.

    A note names the batch size that was traced first, until a second one is traced and the two make a family.
    Where they do not, the note says so, and each batch size is traced.
    """

    def __init__(self, job: Job, split: Mapping[str, Any] | None) -> None:
        self._job, self._split = job, split
        self._versions = installed_versions(job.workload.model)
        key = graph_key(job, split, None)
        self._path = cache_folder() / f"{key}.batches.zst"
        self._note = cache_folder() / f"{key}.first.json"

    def graph(self) -> OpGraph:
        """The graph of the job's micro-batch as the family has it."""
        return _derived(self._path, self._path.stat().st_mtime_ns, self._versions, self._job.micro_batch)

    def learn(self, graph: OpGraph, trace: Callable[[int], OpGraph], *, forget: bool) -> None:
        """Take in a graph that was traced now; with ``forget``, in the place of all that is known."""
        if graph.samples < LEAST_BATCH:
            return
        if forget:
            self._path.unlink(missing_ok=True)
        known = {} if forget else self._known()
        if "refused" in known:
            return
        versions = graph.info["versions"]
        try:
            family = BatchFamily.of(self._first(known, graph.samples), graph)
            self._check(family, trace, known["batch"], graph.samples)
            family.save(self._path)
        except FileNotFoundError:
            self._write({"batch": graph.samples, "versions": versions})
        except NotLinear as reason:
            self._write({"refused": str(reason), "versions": versions})

    def _check(self, family: BatchFamily, trace: Callable[[int], OpGraph], *traced: int) -> None:
        """A user's own code may do anything with a batch (fill it up to a multiple, say): a third, odd one
        tells."""
        if self._job.workload.model.source not in ("python", "onnx"):
            return
        batch = next(odd for odd in _ODD_BATCHES if odd not in traced)
        try:
            is_linear = trace(batch).digest() == _of_precision(self._job, family.at(batch)).digest()
        except ForetrainError as error:
            raise NotLinear(f"batch {batch}: {error}") from error
        if not is_linear:
            raise NotLinear(f"batch {batch}: its graph does not lie between those of {traced}")

    def _first(self, known: Mapping[str, Any], batch: int) -> OpGraph:
        """The graph that was traced first, with another batch size."""
        if known.get("batch", batch) == batch:
            raise FileNotFoundError(self._note)
        path = _graph_path(self._job, self._split, known["batch"])
        try:
            return read_graph(path, path.stat().st_mtime_ns, self._versions)
        except (NotADirectoryError, InputError) as error:
            raise FileNotFoundError(path) from error

    def _known(self) -> Mapping[str, Any]:
        """What the note says; nothing where it is of other versions, or there is none."""
        with _absent_or_damaged(), contextlib.suppress(ValueError):
            note: dict[str, Any] = json.loads(read_text(self._note))
            _check_versions(self._note, note, self._versions)
            return note
        return {}

    def _write(self, note: Mapping[str, Any]) -> None:
        write_atomically(self._note, json.dumps(note))


@functools.lru_cache(maxsize=128)
def _derived(path: Path, changed: int, versions: Versions, batch: int) -> OpGraph:
    return _family(path, changed, versions).at(batch)


@functools.lru_cache(maxsize=16)
def _family(path: Path, _changed: int, versions: Versions) -> BatchFamily:
    family = BatchFamily.load(path)
    _check_versions(path, family.lines["info"], versions)
    return family
