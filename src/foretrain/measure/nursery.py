"""Forks workers from a process that imports torch once, so that no cell waits for the import."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foretrain.measure.worker import die_with_parent
from foretrain.measure.worker import main as work


class Nursery:
    """Starts workers by asking the process; told by it when they end."""

    def __init__(self) -> None:
        self._log = tempfile.NamedTemporaryFile(prefix="foretrain-nursery-")  # noqa: SIM115
        with Path(self._log.name).open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "foretrain.measure.nursery"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
            )
        self._unread = b""
        self._codes: dict[int, int] = {}
        self._born: list[int] = []

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def start(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> Forked | None:
        """A worker with these arguments; None where the process has ended."""
        assert self._process.stdin is not None
        request = {"arguments": list(arguments), "log": str(log), "environment": dict(environment)}
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return None
        while not self._born and self.alive:
            self.listen(0.1)
        return Forked(self._born.pop(), self) if self._born else None

    def listen(self, timeout_s: float) -> None:
        """Take in what the process has to say by then."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        arrived = os.read(self._process.stdout.fileno(), 65536) if ready else b""
        *lines, self._unread = (self._unread + arrived).split(b"\n")
        for message in map(json.loads, lines):
            if "code" in message:
                self._codes[message["pid"]] = message["code"]
            else:
                self._born.append(message["pid"])

    def code(self, pid: int) -> int | None:
        """Tell how a worker ended; as if killed where the process is no more, as its workers end with it."""
        self.listen(0)
        return self._codes.get(pid, None if self.alive else -signal.SIGKILL)

    @property
    def last_words(self) -> str:
        lines = Path(self._log.name).read_text(errors="replace").split("\n")
        return next((line.strip()[:400] for line in reversed(lines) if line.strip()), "nothing was said")

    def close(self) -> None:
        """End the process; its workers end with it."""
        self._log.close()
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()


class Forked:
    """A worker of the nursery, as far as ``subprocess.Popen`` is needed."""

    stdin = None

    def __init__(self, pid: int, nursery: Nursery) -> None:
        self.pid, self._nursery = pid, nursery
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.code(self.pid)
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            self._nursery.listen(0.05)
        return code


# As a program: requests on standard input, births and deaths on standard output


def serve() -> None:
    """Fork a worker for each request on standard input, until that ends; tell of each birth and death."""
    die_with_parent()
    _import_what_workers_need()
    requests, unread = sys.stdin.fileno(), b""
    while True:
        ready, _, _ = select.select([requests], [], [], 0.02)
        if ready:
            arrived = os.read(requests, 65536)
            if not arrived:
                return
            *lines, unread = (unread + arrived).split(b"\n")
            for line in lines:
                _say({"pid": _fork(json.loads(line))})
        _tell_deaths()


def _import_what_workers_need() -> None:
    import torch.distributed  # noqa: F401

    import foretrain.measure.models  # noqa: F401
    from foretrain.capture.sources.zoo import import_zoo

    for slow in (lambda: import_zoo("torchvision"), lambda: __import__("torch._dynamo")):
        with contextlib.suppress(Exception):
            slow()


def _fork(request: Mapping[str, Any]) -> int:
    """A child in a process group of its own, with its output in the log."""
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.clear()
        os.environ.update(request["environment"])
        code = work(request["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _tell_deaths() -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            _say({"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _say(message: Mapping[str, int]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    serve()
