"""Servers as tests and benchmarks start them: the command itself, on a free port, and raw requests to it."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands import begin_python
from made_up import one_product

PATIENCE_S = 120.0
LINEAR = {"source": "python", "name": "nets.py:linear"}
NETS = """
import time
import torch

def linear(batch):
    return torch.nn.Linear(16, 4), torch.randn(batch, 16)

def endless(batch):
    while True:
        time.sleep(0.01)

def greedy(batch):
    held = []
    while True:
        held.append(b"x" * 2**26)

def failing(batch):
    raise RuntimeError("no such luck")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True, kw_only=True)
class Server:
    """A server under way."""

    process: subprocess.Popen[str]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """One request on a connection of its own; what is not bytes goes as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        given = {} if content is None else {"content-type": "application/json"}
        try:
            connection.request(method, path, content, {**given, **(headers or {})})
            answer = connection.getresponse()
            return Answer(
                status=answer.status,
                headers={name.lower(): value for name, value in answer.getheaders()},
                body=answer.read(),
            )
        finally:
            connection.close()

    def predict(self, **request: Any) -> Answer:
        return self.ask("POST", "/v1/predict", request)

    def add(self, *runs: Mapping[str, Any], **headers: str) -> Answer:
        lines = "".join(json.dumps(run) + "\n" for run in runs).encode()
        return self.ask(
            "POST", "/v1/runs", lines, headers={"content-type": "application/x-ndjson", **headers}
        )

    def ended_job(self, id: str) -> Any:
        """A job once it is over."""
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            found = self.ask("GET", f"/v1/jobs/{id}").json
            if found["state"] not in ("waiting", "running"):
                return found
            time.sleep(0.1)
        raise AssertionError(f"job {id} is still {found['state']}")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)


def start(db: str, *words: str, environment: Mapping[str, str] | None = None) -> Server:
    """The command, once it listens."""
    words = ("-m", "foretrain.cli", "serve", "--port", "0", "--db", db, *words)
    process = begin_python(*words, env={**os.environ, **(environment or {})})
    assert process.stderr is not None
    line = process.stderr.readline()
    found = re.search(r"serving on http://127\.0\.0\.1:(\d+)", line)
    assert found is not None, line + process.stderr.read()
    return Server(process=process, port=int(found[1]))


@contextlib.contextmanager
def serving(db: str, *words: str, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    server = start(db, *words, environment=environment)
    try:
        yield server
    finally:
        if server.process.returncode is None:
            server.process.terminate()
            try:
                server.process.communicate(timeout=PATIENCE_S)
            except subprocess.TimeoutExpired:
                server.process.kill()
                server.process.communicate()


def run_of(number: int, **provenance: Any) -> dict[str, Any]:
    """A measured run like no other."""
    job = {
        "model": {"source": "torchvision", "name": "resnet18"},
        "training": {"global_batch": 32, "image": 64},
        "cluster": {"device": "a100-sxm-80gb", "devices_per_node": 1, "nodes": 1},
    }
    measured = {"step_time_s": 0.01 + number * 1e-6}
    return {"job": job, "measured": measured, "provenance": {"source": "test", "line": number, **provenance}}


def write_until_it_dies(server: Server, numbers: itertools.count[int], acknowledged: list[int]) -> None:
    """Upload run after run, and note those that the server says it has."""
    try:
        while True:
            number = next(numbers)
            if server.add(run_of(number)).status == 201:
                acknowledged.append(number)
    except (OSError, http.client.HTTPException):
        return


def nets_in(folder: Path) -> Path:
    """A folder with models in a file."""
    folder.mkdir(exist_ok=True)
    (folder / "nets.py").write_text(NETS)
    return folder


def models_in(folder: Path) -> Path:
    """The same with a graph beside them."""
    one_product().save(nets_in(folder) / "product.json.zst")
    return folder
