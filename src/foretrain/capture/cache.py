"""Keeps graphs on disk: those that were traced, and families that give the other batch sizes of a model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foretrain.capture.keys import Versions, graph_key, installed_versions, model_file
from foretrain.capture.reads import Reads, library_reads
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


REFRESH = "FORETRAIN_REFRESH"
"""The environment variable that has every graph traced anew, once in a process."""


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
    training. Names of what a model reads are kept beside its graphs; their state is part of the keys.
    """
    names = cache_folder() / f"{graph_key(job, split, None)}.reads.json"
    known = _known_reads(names, job)
    place = _Place(job, split, known)
    refresh = refresh or (bool(os.environ.get(REFRESH)) and place.path not in _refreshed)
    if not refresh and (graph := _cached(job, place)) is not None:
        return graph
    with _tracing:
        if not refresh and (graph := _cached(job, place)) is not None:
            return graph
        return _traced(trace, job, split, place, known, refresh=refresh)


_tracing = threading.RLock()
"""torch traces one model at a time."""


def _traced(
    trace: Callable[[int], OpGraph],
    job: Job,
    split: Mapping[str, Any] | None,
    place: _Place,
    known: Reads,
    *,
    refresh: bool,
) -> OpGraph:
    names = cache_folder() / f"{graph_key(job, split, None)}.reads.json"
    graph, seen = _recorded(trace, job)
    reads = seen if refresh else known | seen
    if reads != known:
        place = _Place(job, split, reads)
    _refreshed.add(place.path)
    try:
        if reads != known:
            reads.save(names)
        graph.save(place.path)
        _just_traced[place.path, place.path.stat().st_mtime_ns] = graph
        _Family(place).learn(graph, trace, forget=refresh)
    except (InputError, OSError) as error:
        _unsaved_reads[names], _unsaved[place.path] = reads, graph
        for oldest in list(_unsaved)[:-_UNSAVED]:
            del _unsaved[oldest]
        why = error.__cause__ if isinstance(error, InputError) else error
        _tell_unwritable(cache_folder(), f"cannot be written ({getattr(why, 'strerror', None) or error})")
    return graph


def _known_reads(names: Path, job: Job) -> Reads:
    """Of a model of a file, what its traces so far have read; of a library, what its models go by."""
    if model_file(job) is None:
        return library_reads(job.workload.model.source)
    return _unsaved_reads.get(names) or Reads.load(names)


def _recorded(trace: Callable[[int], OpGraph], job: Job) -> tuple[OpGraph, Reads]:
    if (model := model_file(job)) is None:
        return trace(job.micro_batch), library_reads(job.workload.model.source)
    from foretrain.capture.recording import recording

    with recording(model) as seen:
        graph = trace(job.micro_batch)
    return graph, seen.reads()


@functools.cache
def _tell_unwritable(folder: Path, reason: str) -> None:
    """Once: a cache that cannot be written costs time, not the forecast."""
    import logging

    logging.getLogger("foretrain").warning("cache %s: %s; every command traces its models", folder, reason)


_refreshed: set[Path] = set()
"""What was traced in this process."""

_UNSAVED = 32
_unsaved: dict[Path, OpGraph] = {}
_unsaved_reads: dict[Path, Reads] = {}
"""What a cache that cannot be written would hold, while this process runs; of graphs the last ones."""


class _Place:
    """Where the graphs of a job are kept, as all that its model reads stands now."""

    def __init__(self, job: Job, split: Mapping[str, Any] | None, reads: Reads) -> None:
        file = model_file(job)
        self.job, self._split = job, split
        self._read = reads.state(Path() if file is None else file.parent)
        self.versions = installed_versions(job.workload.model)
        self.path = self.of_batch(job.micro_batch)

    def of_batch(self, batch: int) -> Path:
        return cache_folder() / f"{self.key(batch)}.json.zst"

    def key(self, batch: int | None) -> str:
        return graph_key(self.job, self._split, batch, self._read)


def _cached(job: Job, place: _Place) -> OpGraph | None:
    if place.path in _unsaved:
        return _of_precision(job, _unsaved[place.path])
    with _absent_or_damaged():
        return _of_precision(job, read_graph(place.path, place.path.stat().st_mtime_ns, place.versions))
    with _absent_or_damaged():
        return _of_precision(job, _Family(place).graph())
    return None


def _absent_or_damaged() -> contextlib.suppress:
    """What cannot be used from the cache is traced again."""
    return contextlib.suppress(OSError, InputError, NotLinear)


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

    def __init__(self, place: _Place) -> None:
        self._place, self._job, self._versions = place, place.job, place.versions
        key = place.key(None)
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
        path = self._place.of_batch(known["batch"])
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
