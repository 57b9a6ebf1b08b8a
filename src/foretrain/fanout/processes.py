"""Runs chunks in processes of this machine."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, cast

from foretrain.fanout.chunks import Chunk, ChunkOutcome, Workers, pack, unpack, work

_END_S = 5.0


@dataclass(slots=True, kw_only=True)
class _Worker:
    process: BaseProcess
    connection: Connection
    chunk: Chunk | None = None


class Processes(Workers):
    """Fresh processes that serve until their pipe closes; one that dies is replaced, and costs its chunk."""

    def __init__(self, function: Callable[..., Any], shared: Any, count: int) -> None:
        self._packed = pack((function, shared))
        self._count = count
        self._workers: list[_Worker] = []
        self._context = multiprocessing.get_context("spawn")

    @property
    def slots(self) -> int:
        return self._count

    def begin(self, chunk: Chunk) -> None:
        worker = next((worker for worker in self._workers if worker.chunk is None), None) or self._start()
        worker.chunk = chunk
        with contextlib.suppress(OSError):  # a worker that is dead already is found when its answer is read
            worker.connection.send_bytes(pack(chunk.items))

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        with _interrupt_held(), _threads_shared(self._count):
            process.start()
        theirs.close()
        worker = _Worker(process=process, connection=ours)
        self._workers.append(worker)
        with contextlib.suppress(OSError):
            ours.send_bytes(self._packed)
        return worker

    def ended(self, timeout_s: float | None) -> Sequence[tuple[Chunk, ChunkOutcome]]:
        ready = wait([worker.connection for worker in self._workers if worker.chunk is not None], timeout_s)
        finished = []
        for worker in [worker for worker in self._workers if worker.connection in ready]:
            chunk, worker.chunk = cast(Chunk, worker.chunk), None
            try:
                finished.append((chunk, cast(ChunkOutcome, unpack(worker.connection.recv_bytes()))))
            except (EOFError, OSError):
                self._workers.remove(worker)
                finished.append((chunk, ChunkOutcome(lost=_end(worker))))
        return finished

    def drop(self) -> None:
        busy = [worker for worker in self._workers if worker.chunk is not None]
        self._workers = [worker for worker in self._workers if worker.chunk is None]
        for worker in busy:
            worker.process.terminate()
        for worker in busy:
            _end(worker)

    def close(self) -> None:
        self.drop()
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            _end(worker)
        self._workers = []


def _end(worker: _Worker) -> str:
    """Wait for a process that is on its way out, and say how it ended."""
    worker.connection.close()
    worker.process.join(_END_S)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()
    code = worker.process.exitcode or 0
    if code >= 0:
        return f"its process ended with exit code {code}"
    hint = "; out of memory?" if -code == signal.SIGKILL else ""
    return f"its process was ended by {signal.Signals(-code).name}{hint}"


def _serve(connection: Connection) -> None:
    """Serve chunks in a process; Ctrl-C is for the one that started it, which then ends it by SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    with contextlib.suppress(EOFError, OSError):
        call = connection.recv_bytes()
        load = functools.cache(lambda: unpack(call))
        while True:
            connection.send_bytes(work(load, connection.recv_bytes()))


@contextlib.contextmanager
def _interrupt_held() -> Iterator[None]:
    """A process that is started meanwhile never sees Ctrl-C, and SIGTERM not before it serves; here both are
    only put off."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _threads_shared(processes: int) -> Iterator[None]:
    """A process that is started meanwhile takes its share of the cores for numerics, not all of them."""
    name = "OMP_NUM_THREADS"
    if name in os.environ:
        yield
        return
    os.environ[name] = str(max(1, (os.cpu_count() or 1) // processes))
    try:
        yield
    finally:
        del os.environ[name]
