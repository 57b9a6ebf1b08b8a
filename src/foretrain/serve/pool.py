"""Keeps worker processes, gives each one task at a time, and ends those that go beyond a limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretrain.errors import ForetrainError
from foretrain.serve.worker import HEAD

_WATCH_S = 0.05
"""How often time and memory of workers are looked at."""
_SHARE_KEPT = 0.5
"""Of its memory that a worker may hold between tasks; one with more is replaced."""
_HIDDEN = ("FORETRAIN_TOKEN", "FORETRAIN_STORE", "FORETRAIN_SERVER", "PGPASSWORD")
"""Of the environment, what no worker needs to know."""
Hears = Callable[[Mapping[str, Any]], None]


class Busy(ForetrainError):
    """More is asked than the server can do; later it may be able to."""


class TaskRefused(ForetrainError):
    """A task that a worker, or its limits, did not let end well."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class NeedsTorchWorker(Exception):
    """A task that only a worker with torch can do."""


@dataclass(slots=True, kw_only=True)
class Worker:
    """One process."""

    process: Process
    deadline_s: float | None = None
    """By the monotonic clock, of the task that it has; None while it has none."""
    ended: str | None = None
    """Why it was ended, where it was."""

    @property
    def resident_bytes(self) -> int:
        """Count the memory of the process and those that it started."""
        return sum(_resident_bytes(one) for one in _family(self.process.pid))

    def end(self, why: str) -> None:
        """Kill it, and what it started."""
        self.ended = self.ended or why
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class WorkerPool:
    """Workers of one kind, started as they are needed; tasks beyond ``waiting`` are refused."""

    def __init__(
        self, count: int, *, torch: bool, waiting: int, seconds: float, memory_bytes: float, field: str,
        wait_s: float | None = None,
    ) -> None:  # fmt: skip
        self.count, self.waiting, self.seconds, self.memory_bytes = count, waiting, seconds, memory_bytes
        self._torch, self._field, self._wait_s = torch, field, wait_s
        self._idle: list[Worker] = []
        self._workers: list[Worker] = []
        self._turn = asyncio.Semaphore(count)
        self.asked = 0
        """Tasks that run or wait."""
        self._folder = tempfile.TemporaryDirectory(prefix="foretrain-worker-")
        self._watching: asyncio.Task[None] | None = None

    async def run(self, task: Mapping[str, Any], hears: Hears = lambda _: None) -> bytes:
        """The result of a task, as JSON; cancelling it ends its worker."""
        if self.asked >= self.count + self.waiting:
            raise Busy(f"{self.asked} requests run or wait already; try again later")
        self.asked += 1
        try:
            await self._wait()
            try:
                return await self._run(task, hears)
            finally:
                self._turn.release()
        finally:
            self.asked -= 1

    async def _wait(self) -> None:
        """Wait for a worker, and not for ever."""
        try:
            async with asyncio.timeout(self._wait_s):
                await self._turn.acquire()
        except TimeoutError as error:
            raise Busy(f"no worker was free within {self._wait_s:g} s; try again later") from error

    async def _run(self, task: Mapping[str, Any], hears: Hears) -> bytes:
        worker = self._idle.pop() if self._idle else await self._started()
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        worker.deadline_s = time.monotonic() + self.seconds
        hears({})
        try:
            letter, content = await _exchange(worker, json.dumps(task).encode(), hears)
        except (asyncio.IncompleteReadError, OSError) as error:
            await self._bury(worker)
            raise TaskRefused(worker.ended or f"{self._field}: its process died", 422) from error
        except BaseException:
            worker.end("cancelled")
            await asyncio.shield(self._bury(worker))
            raise
        worker.deadline_s = None
        if worker.resident_bytes > _SHARE_KEPT * self.memory_bytes:
            worker.end("replaced")
            await self._bury(worker)
        else:
            self._idle.append(worker)
        if letter == b"T":
            raise NeedsTorchWorker
        if letter == b"E":
            said = json.loads(content)
            raise TaskRefused(said["error"], said["status"])
        return content

    async def _started(self) -> Worker:
        """A new worker; one whose task is cancelled before it is there is ended all the same."""
        starting = asyncio.ensure_future(self._start())
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await self._bury(await starting)
            raise

    async def _start(self) -> Worker:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "foretrain.serve.worker", str(os.getpid()),
            "torch" if self._torch else "quick",
            stdin=PIPE, stdout=PIPE, cwd=self._folder.name, env=_environment(), start_new_session=True,
            limit=2**26,
        )  # fmt: skip
        worker = Worker(process=process)
        self._workers.append(worker)
        return worker

    async def warm(self) -> None:
        """Start all workers, so that no first request waits for one."""
        self._idle += [await self._start() for _ in range(self.count - len(self._workers))]

    async def _watch(self) -> None:
        """End workers that take too long or too much, while any works."""
        while busy := [worker for worker in self._workers if worker.deadline_s is not None]:
            for worker in busy:
                assert worker.deadline_s is not None
                if time.monotonic() > worker.deadline_s:
                    worker.end(f"{self._field}: took longer than {self.seconds:g} s, and was ended")
                elif worker.resident_bytes > self.memory_bytes:
                    most = f"{self.memory_bytes / 2**30:.3g} GiB"
                    worker.end(f"{self._field}: needed more than {most} of memory, and was ended")
            await asyncio.sleep(_WATCH_S)

    async def _bury(self, worker: Worker) -> None:
        """End it, and close its pipes."""
        worker.end("its process died")
        if worker in self._workers:
            self._workers.remove(worker)
        assert worker.process.stdin is not None
        worker.process.stdin.close()
        await worker.process.communicate()

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        for worker in list(self._workers):
            await self._bury(worker)
        self._folder.cleanup()


async def _exchange(worker: Worker, task: bytes, hears: Hears) -> tuple[bytes, bytes]:
    """Send a task and read what comes of it."""
    source, to = worker.process.stdout, worker.process.stdin
    assert source is not None
    assert to is not None
    to.write(HEAD.pack(b"Q", len(task)) + task)
    await to.drain()
    while True:
        letter, length = HEAD.unpack(await source.readexactly(HEAD.size))
        content = await source.readexactly(length)
        if letter != b"P":
            return letter, content
        hears(json.loads(content))


def _environment() -> dict[str, str]:
    """No GPU, no model hub, one thread for numerics, and this package where it is here."""
    home = str(Path(__file__).parents[2])
    paths = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
    kept = {name: value for name, value in os.environ.items() if name not in _HIDDEN}
    own = {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**kept, **own, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def _family(pid: int) -> Iterator[int]:
    """A process and those that its main thread started, and theirs."""
    yield pid
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from _family(int(child))


def _resident_bytes(pid: int) -> int:
    """0 where the system does not tell, and of a process that has ended."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
