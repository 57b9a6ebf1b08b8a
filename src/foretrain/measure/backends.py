"""Runs the processes of a campaign's cell: on this machine one by one, by torchrun, or on a Ray cluster."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from foretrain.capture import needs_torch
from foretrain.errors import ForetrainError, InputError, unknown
from foretrain.fanout import TRIES
from foretrain.fanout.cluster import check_installed
from foretrain.files import write_atomically
from foretrain.measure.links import Fabric
from foretrain.measure.nursery import Forked, Nursery
from foretrain.measure.resources import AUTO
from foretrain.measure.tasks import WorkerTask

_WORKER = ("-m", "foretrain.measure.worker")
_POLL_S = 0.05
_GRACE_S = 3.0
"""How long the others may take to say why, after one process has failed."""
_SHUTDOWN_S = 10.0
_LOOPBACK = "127.0.0.1"


Process = subprocess.Popen[bytes] | Forked
Begin = Callable[[Path, dict[str, str]], Process]
"""Starts a process, given the file for what it prints and its environment."""


class CellFailed(ForetrainError):
    """A cell that gave no result; the campaign goes on."""


class CellLost(CellFailed):
    """A cell whose worker, node or driver is gone; it may succeed when it is tried again."""


class Backend(ABC):
    """Runs tasks, one at a time, in its ``with`` block; nothing that it starts outlives the block."""

    name: ClassVar[str]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @abstractmethod
    def run(self, task: WorkerTask, *, link_bytes_per_s: float | None = None) -> dict[str, Any]:
        """The result of the cell, or ``CellFailed`` with one line that says why."""


class Local(Backend):
    """Fresh processes on this machine, pinned to cores.

    With a link rate, each is in a network namespace of its own. CPU workers are forked from a process that
    has imported torch already.
    """

    name = "local"

    def __init__(self) -> None:
        self._nursery: Nursery | None = None

    def __exit__(self, *_: object) -> None:
        if self._nursery is not None:
            self._nursery.close()
        self._nursery = None

    def run(self, task: WorkerTask, *, link_bytes_per_s: float | None = None) -> dict[str, Any]:
        fabric = None if link_bytes_per_s is None else Fabric(task.processes, link_bytes_per_s)
        with fabric or contextlib.nullcontext(), _Folder(task) as folder:
            shared = [*folder.arguments, "--rendezvous", str(folder.path / "meet")]
            workers = [[*shared, "--rank", str(rank)] for rank in range(task.processes)]
            if fabric:
                for arguments, name in zip(workers, fabric.namespaces, strict=True):
                    arguments += ["--namespace", name]
            begin = self._fork if task.read_job().cluster.device.is_cpu else self._spawn
            return folder.finish([begin(arguments) for arguments in workers])

    def _spawn(self, arguments: list[str]) -> Begin:
        return _begin([sys.executable, *_WORKER, *arguments])

    def _fork(self, arguments: list[str]) -> Begin:
        def begin(log: Path, environment: dict[str, str]) -> Process:
            self._nursery = self._nursery or Nursery()
            forked = self._nursery.start(arguments, log, environment)
            if forked is None:
                ended, self._nursery = self._nursery, None
                why = ended.last_words
                ended.close()
                raise CellFailed(f"no worker could be started: {why}")
            return forked

        return begin


class Torchrun(Backend):
    """``torch.distributed.run`` on this machine.

    Its processes meet on the loopback, as not every machine knows its own name.
    """

    name = "torchrun"

    def run(self, task: WorkerTask, *, link_bytes_per_s: float | None = None) -> dict[str, Any]:
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={_LOOPBACK}:0", f"--local-addr={_LOOPBACK}"]
        launcher = [sys.executable, "-m", "torch.distributed.run", *meeting]
        launcher += [f"--nproc-per-node={task.processes}", "--max-restarts=0"]
        with _Folder(task) as folder:
            return folder.finish([_begin([*launcher, *_WORKER, *folder.arguments])])


class Ray(Backend):
    """``ray.train`` with TorchTrainer, on the cluster at ``address`` or on one of its own on this machine.
    One driver process serves all cells; after a failure it is started anew. A cell that is lost with a worker
    or a node is tried again, on what is left of the cluster.
    """

    name = "ray"

    def __init__(self, address: str | None = None, cpus: int | None = None) -> None:
        check_installed("on: 'ray'")
        self._address, self._cpus = address, cpus
        self._driver: _Driver | None = None

    def __exit__(self, *_: object) -> None:
        if self._driver is not None:
            self._driver.stop()

    def run(self, task: WorkerTask, *, link_bytes_per_s: float | None = None) -> dict[str, Any]:
        for _ in range(TRIES - 1):
            with contextlib.suppress(CellLost):
                return self._try(task)
        return self._try(task)

    def _try(self, task: WorkerTask) -> dict[str, Any]:
        if self._driver is None:
            self._driver = _Driver(self._address, self._cpus)
        try:
            return self._driver.run(task)
        except BaseException:
            driver, self._driver = self._driver, None
            driver.stop()
            raise


BACKENDS: dict[str, Callable[[str | None, int | None], Backend]] = {
    "local": lambda address, cpus: Local(),
    "torchrun": lambda address, cpus: Torchrun(),
    "ray": Ray,
}


def backend(name: str, *, address: str | None = None, cpus: int | None = None) -> Backend:
    """Make a backend by name; ``address`` and ``cpus`` are for Ray."""
    if name not in BACKENDS:
        raise unknown("on", name, BACKENDS)
    if address is not None and name != "ray":
        raise InputError(f"address: {address!r} is for --on ray, not for --on {name}")
    made = BACKENDS[name](address, cpus)
    needs_torch("measure campaign")
    return made


# Processes


class _Folder:
    """Holds the folder where a cell's processes find their task and leave their result, their errors and what
    they print."""

    def __init__(self, task: WorkerTask) -> None:
        self.task = task
        self._temporary = tempfile.TemporaryDirectory(prefix="foretrain-cell-", ignore_cleanup_errors=True)
        self.path = Path(self._temporary.name)
        self._processes: list[Process] = []
        self._out = self.path / "result.json"

    def __enter__(self) -> Self:
        write_atomically(self.path / "task.json", self.task.to_json())
        return self

    def __exit__(self, *_: object) -> None:
        kill(self._processes)
        self._temporary.cleanup()

    @property
    def arguments(self) -> list[str]:
        return ["--task", str(self.path / "task.json"), "--out", str(self._out)]

    def finish(self, processes: Sequence[Begin]) -> dict[str, Any]:
        """Begin the processes, wait for all of them, and return what they left."""
        for number, begin in enumerate(processes):
            self._processes.append(begin(self.path / f"log-{number}", _environment(self.task)))
        self._wait()
        try:
            result: dict[str, Any] = json.loads(self._out.read_text())
        except OSError as error:
            raise CellFailed("the workers ended without a result") from error
        return result

    def _wait(self) -> None:
        deadline = time.monotonic() + self.task.timeout_s
        while running := [process for process in self._processes if process.poll() is None]:
            if any(process.returncode for process in self._processes if process.returncode is not None):
                self._let_others_speak()
                break
            if time.monotonic() > deadline:
                raise CellFailed(
                    f"no result after {self.task.timeout_s:.0f} s; "
                    f"{len(running)} of {len(self._processes)} processes killed"
                )
            time.sleep(_POLL_S)
        if any(process.returncode for process in self._processes):
            raise CellFailed(self._reason())

    def _let_others_speak(self) -> None:
        until = time.monotonic() + _GRACE_S
        while time.monotonic() < until and any(process.poll() is None for process in self._processes):
            time.sleep(_POLL_S)

    def _reason(self) -> str:
        """A process that a signal ended, else the first error that was written, else the end of a log."""
        for rank, process in enumerate(self._processes):
            if process.returncode is not None and process.returncode < 0:
                return f"process {rank} was ended by {signal.Signals(-process.returncode).name}"
        errors = [json.loads(path.read_text()) for path in self.path.glob("error-*.json")]
        if errors:
            first = min(errors, key=lambda error: error["time"])
            return f"process {first['rank']}: {first['error']}"
        failed = next(number for number, process in enumerate(self._processes) if process.returncode)
        code, printed = self._processes[failed].returncode, last_line(self.path / f"log-{failed}")
        return f"process {failed}: exit code {code}: {printed}"


def _environment(task: WorkerTask) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(task.cores), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if task.interface != AUTO:
        environment |= {"GLOO_SOCKET_IFNAME": task.interface, "NCCL_SOCKET_IFNAME": task.interface}
    return environment


def start(command: Sequence[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A process in a session of its own: Ctrl-C reaches us alone, and all that it starts can be ended."""
    with log.open("wb") as file:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=file, stderr=file, env=environment, start_new_session=True
        )


def _begin(command: Sequence[str]) -> Begin:
    return lambda log, environment: start(command, log, environment)


def kill(processes: Sequence[Process]) -> None:
    """End processes that were begun here, with everything in their groups, and wait for them."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()


def last_line(log: Path) -> str:
    """The last line that names an error or an exit code (torchrun ends with a ruler), else the last one."""
    lines = [line.strip() for line in _lines(log) if line.strip()]
    naming = [line for line in lines if re.search(r"[A-Za-z]Error: \S|exitcode +:", line)]
    return (naming or lines or ["nothing was printed"])[-1][:400]


def _lines(log: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield from log.read_text(errors="replace").splitlines()


class _Driver:
    """The process that speaks to Ray: tasks go in by its input, a line each; results come back as files."""

    def __init__(self, address: str | None, cpus: int | None) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="foretrain-ray-", ignore_cleanup_errors=True)
        self._path = Path(self._temporary.name)
        command = [sys.executable, "-m", "foretrain.measure.ray_driver"]
        command += ["--cpus", str(cpus or os.cpu_count() or 1)]
        if address is not None:
            command += ["--address", address]
        self._process = start(command, self._path / "log", dict(os.environ))
        self._count = 0

    def run(self, task: WorkerTask) -> dict[str, Any]:
        self._count += 1
        out = self._path / f"result-{self._count}.json"
        deadline = time.monotonic() + task.timeout_s
        self._say({"task": task.to_json(), "out": str(out)})
        while not out.exists():
            if self._process.poll() is not None:
                self._explain()
            if time.monotonic() > deadline:
                raise CellFailed(f"no result from Ray after {task.timeout_s:.0f} s; its driver was killed")
            time.sleep(_POLL_S)
        answer = json.loads(out.read_text())
        if "error" in answer:
            raise CellLost(answer["error"]) if answer["lost"] else CellFailed(answer["error"])
        return dict(answer["result"])

    def _say(self, message: dict[str, str]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self._process.wait()

    def _explain(self) -> None:
        """A driver that found no cluster is an error of the input; one that ended later cost its cell."""
        text = last_line(self._path / "log")
        if self._process.returncode == 2:
            raise InputError(text)
        raise CellLost(f"the Ray driver ended with {self._process.returncode}: {text}")

    def stop(self) -> None:
        """Let the driver shut its cluster down; what does not end in time is ended."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_SHUTDOWN_S)
        kill([self._process])
        self._temporary.cleanup()
