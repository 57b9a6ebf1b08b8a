"""Runs chunks in tasks on a Ray cluster."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from foretrain.errors import InputError, first_line
from foretrain.fanout.chunks import Chunk, ChunkOutcome, Workers, pack, unpack, work
from foretrain.fanout.cluster import connected, losses

_RESOURCES_S = 2.0
_LEFT_S = 1.0
"""How long tasks that nobody asks for any more may take to end by themselves: Ray (2.60) ends the process
that cancels one just as it ends ("Tried to complete task that was not pending")."""


class RayTasks(Workers):
    """Tasks on a Ray cluster, each with a CPU; twice as many as CPUs, so that none waits for the next."""

    def __init__(self, function: Callable[..., Any], shared: Any, address: str) -> None:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(connected(address))
        try:
            import ray

            self._call = ray.put(_packed(function, shared))
            self._task = ray.remote(num_cpus=1, max_retries=0)(_work_on_node)
        except BaseException:
            self._stack.close()
            raise
        self._running: dict[Any, Chunk] = {}
        self._slots, self._counted = 1, -math.inf

    @property
    def slots(self) -> int:
        import ray

        if time.monotonic() - self._counted > _RESOURCES_S:  # nodes come and go
            self._slots, self._counted = (
                2 * max(1, int(ray.cluster_resources().get("CPU", 0))),
                time.monotonic(),
            )
        return self._slots

    def begin(self, chunk: Chunk) -> None:
        self._running[self._task.remote([self._call], pack(chunk.items), str(Path.cwd()))] = chunk

    def ended(self, timeout_s: float | None) -> Sequence[tuple[Chunk, ChunkOutcome]]:
        import ray

        references = list(self._running)
        ready, _ = ray.wait(references, timeout=timeout_s)
        if ready:
            ready, _ = ray.wait(references, num_returns=len(references), timeout=0)
        return [(self._running.pop(reference), _fetched(reference)) for reference in ready]

    def drop(self) -> None:
        import ray

        running, self._running = list(self._running), {}
        if not running:
            return
        with contextlib.suppress(Exception):
            _, running = ray.wait(running, num_returns=len(running), timeout=_LEFT_S)
        for reference in running:
            with contextlib.suppress(Exception):
                ray.cancel(reference, force=True)

    def close(self) -> None:
        with self._stack:
            self.drop()


def _packed(function: Callable[..., Any], shared: Any) -> bytes:
    """Pack a function by reference to modules that nodes have; what a file of the user's defines goes along
    as it is."""
    from ray import cloudpickle

    module = inspect.getmodule(function)
    if module is None or not _is_users(module):
        return cast(bytes, cloudpickle.dumps((function, shared)))
    cloudpickle.register_pickle_by_value(module)
    try:
        return cast(bytes, cloudpickle.dumps((function, shared)))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _is_users(module: ModuleType) -> bool:
    file, name = getattr(module, "__file__", None), module.__name__
    if file is None or name == "__main__" or name.partition(".")[0] == __name__.partition(".")[0]:
        return False
    installed = [sysconfig.get_path(where) for where in ("stdlib", "platstdlib", "purelib", "platlib")]
    return not any(Path(file).is_relative_to(folder) for folder in installed)


def _fetched(reference: Any) -> ChunkOutcome:
    """Fetch what a task left; Ray's own failures are of a lost worker, of the function, or of the cluster."""
    import ray
    from ray import exceptions

    try:
        return cast(ChunkOutcome, unpack(ray.get(reference)))
    except losses() as error:
        return ChunkOutcome(lost=f"{type(error).__name__}: {first_line(error)}")
    except exceptions.RayTaskError as error:
        why = error.cause if isinstance(error.cause, Exception) else error
        return ChunkOutcome(
            error=InputError(f"ray: a node cannot run foretrain: {type(why).__name__}: {first_line(why)}")
        )
    except exceptions.RayError as error:
        return ChunkOutcome(error=InputError(f"ray: {type(error).__name__}: {first_line(error)}"))


_loaded: dict[str, tuple[Callable[..., Any], Any]] = {}
"""The function and what is shared, which a worker of Ray keeps from one task to the next."""


def _work_on_node(call: Sequence[Any], packed: bytes, folder: str) -> bytes:
    """The task; relative paths mean what they mean where it was asked for, if that folder is there."""

    def load() -> tuple[Callable[..., Any], Any]:
        import ray

        key = call[0].hex()
        if key not in _loaded:
            _loaded.clear()
            with contextlib.suppress(OSError):
                os.chdir(folder)
            _loaded[key] = unpack(ray.get(call[0]))
        return _loaded[key]

    return work(load, packed)
