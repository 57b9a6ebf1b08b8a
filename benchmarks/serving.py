"""Loads, mistreats and kills a server: forecasts per second, overload, malformed bodies, kills under writes.

python benchmarks/serving.py load|overload|malformed|kills|limits [--postgresql URL]
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import functools
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from foretrain.measure.store import Store
from malformed import malformed
from servers import Server, models_in, nets_in, serving, start, write_until_it_dies

_PROCESSES = "2"
_ASKED_RATE = 300.0
_WARM_S = 10.0
_CONNECTIONS = 8
"""That ask at once, each as soon as it is answered, where no rate is given."""
_JOBS: list[dict[str, Any]] = [
    {"model": model, "options": {"image": 64, "batch": batch, "device": device, "precision": precision}}
    for model in ("resnet18", "resnet50")
    for batch in range(16, 144, 16)
    for device in ("a100", "h100", "h200")
    for precision in ("fp32", "amp-bf16")
]
"""Different questions about graphs that are there."""


@dataclass(slots=True, kw_only=True)
class Load:
    """What a load came to."""

    seconds: float = 0.0
    statuses: collections.Counter[int] = field(default_factory=collections.Counter)
    times_s: list[float] = field(default_factory=list)
    """Of answers with a forecast."""
    server_s: float = 0.0
    """Of the processor: the server, its workers included."""
    asking_s: float = 0.0
    """The same of the load generator."""

    def __str__(self) -> str:
        times = sorted(self.times_s) or [0.0]
        p50, p99 = (1e3 * times[int(share * (len(times) - 1))] for share in (0.5, 0.99))
        rate = len(self.times_s) / self.seconds
        each = [1e3 * used / (sum(self.statuses.values()) or 1) for used in (self.server_s, self.asking_s)]
        return (
            f"{rate:.0f} forecasts/s, p50 {p50:.1f} ms, p99 {p99:.1f} ms, answers {dict(self.statuses)}; "
            f"of a core, each takes {each[0]:.1f} ms here and {each[1]:.1f} ms to ask: two idle ones hold "
            f"{2000 / sum(each):.0f}/s; load average {os.getloadavg()[0]:.1f}"
        )


def _used_s(pid: int) -> float:
    """Of the processor, by a process and those that it started."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(_used_s(int(child)) for child in children)


async def _post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> int:
    """One request on a connection that stays."""
    lines = ("POST /v1/predict HTTP/1.1", "host: 127.0.0.1", "content-type: application/json")
    head = "\r\n".join([*lines, f"content-length: {len(body)}", "", ""])
    writer.write(head.encode() + body)
    answer = await reader.readuntil(b"\r\n\r\n")
    length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    await reader.readexactly(length)
    return int(answer[9:12])


async def _load(server: Server, bodies: Sequence[bytes], seconds: float, rate: float | None) -> Load:
    """Requests for so long: as fast as connections get answers, or at a rate whatever the answers are."""
    load, numbers = Load(), itertools.count()
    before = _used_s(server.process.pid), time.process_time()
    start_s = time.perf_counter()

    async def ask() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=2**24)
        while True:
            number = next(numbers)
            due_s = time.perf_counter() if rate is None else start_s + number / rate
            if due_s - start_s > seconds:
                break
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            status = await _post(reader, writer, bodies[number % len(bodies)])
            load.statuses[status] += 1
            if status == 200:
                load.times_s.append(time.perf_counter() - due_s)
        writer.close()

    await asyncio.gather(*(ask() for _ in range(_CONNECTIONS if rate is None else 128)))
    load.seconds = time.perf_counter() - start_s
    load.server_s, load.asking_s = _used_s(server.process.pid) - before[0], time.process_time() - before[1]
    return load


def _new_clusters(seed: int) -> list[bytes]:
    """The same of jobs on several devices: each question has a number of them, or a length, of its own."""
    jobs = [
        {**job, "options": {**options, "devices": count, "batch": options["batch"] * count, "steps": steps}}
        for job in _JOBS
        for options in (job["options"],)
        for count in (1, 2, 4, *range(8, 72, 8))
        for steps in range(1, 60)
    ]
    random.Random(seed).shuffle(jobs)
    return [json.dumps(job).encode() for job in jobs]


def _new_questions(seed: int) -> list[bytes]:
    """So many that none comes twice in a minute: lengths of a training change no graph."""
    jobs = [{**job, "options": {**job["options"], "steps": n}} for n in range(1, 600) for job in _JOBS]
    random.Random(seed).shuffle(jobs)
    return [json.dumps(job).encode() for job in jobs]


def _warm(server: Server) -> None:
    """See that all graphs are there."""
    for job in _JOBS:
        answer = server.ask("POST", "/v1/predict", job)
        assert answer.status == 200, answer.body


def load(seconds: float) -> None:
    """Forecasts per second: questions that are all new, and 200 questions again and again."""
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(str(Path(folder) / "runs.db"), "--processes", _PROCESSES) as server,
    ):
        _warm(server)
        kinds = {
            "new lengths": _new_questions(1),
            "new numbers of devices": _new_clusters(1),
            "200 questions": _new_questions(2)[:200],
        }
        for name, bodies in kinds.items():
            asyncio.run(_load(server, bodies, _WARM_S, None))
            print(f"{name}: {asyncio.run(_load(server, bodies[::-1], seconds, None))}", flush=True)
            middle = bodies[len(bodies) // 2 :] + bodies[: len(bodies) // 2]
            paced = asyncio.run(_load(server, middle, seconds, _ASKED_RATE))
            print(f"{name} at {_ASKED_RATE:.0f}/s: {paced}", flush=True)


def overload(seconds: float) -> None:
    """Twice as many new questions as the server answers."""
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(str(Path(folder) / "runs.db"), "--processes", _PROCESSES) as server,
    ):
        _warm(server)
        held = asyncio.run(_load(server, _new_questions(3), 15.0, None))
        print(f"held: {held}", flush=True)
        rate = 2 * len(held.times_s) / held.seconds
        twice = asyncio.run(_load(server, _new_questions(4), seconds, rate))
        print(f"at {rate:.0f}/s for {seconds:.0f} s: {twice}")
        assert set(twice.statuses) <= {200, 429, 503}
        assert server.ask("GET", "/health").status == 200


def malformed_bodies(count: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = models_in(Path(name) / "models")
        words = ("--processes", _PROCESSES, "--allow", str(folder))
        with serving(str(Path(name) / "runs.db"), *words) as server:
            draw, statuses = random.Random(23), collections.Counter[int]()
            paths = ["/v1/predict"] * 6 + ["/v1/learn", "/v1/schedule", "/v1/runs"]
            for _ in range(count):
                path, body = draw.choice(paths), malformed(draw)
                answer = server.ask("POST", path, body)
                statuses[answer.status] += 1
                if answer.status >= 500:
                    print(path, body, answer.body, flush=True)
            print(f"{count:,} malformed bodies: {dict(sorted(statuses.items()))}")


def kills(rounds: int, postgresql: str | None) -> None:
    """Kill -9 under writes, and count what was acknowledged and is gone."""
    with tempfile.TemporaryDirectory() as folder:
        for url in filter(None, (f"sqlite:///{folder}/runs.db", postgresql)):
            acknowledged: list[int] = []
            numbers = itertools.count()
            for _ in range(rounds):
                _write_and_kill(url, numbers, acknowledged)
            with Store.open(url) as store:
                kept = {entry.document["provenance"]["line"] for entry in store.entries()}
            lost = set(acknowledged) - kept
            print(f"{url.partition(':')[0]}: {rounds} kills, {len(acknowledged):,} runs acknowledged, "
                  f"{len(lost)} of them lost, {len(kept) - len(acknowledged)} more kept")  # fmt: skip


def _write_and_kill(url: str, numbers: itertools.count[int], acknowledged: list[int]) -> None:
    server = start(url, "--processes", "1")

    writers = [
        threading.Thread(target=write_until_it_dies, args=(server, numbers, acknowledged)) for _ in range(4)
    ]
    for writer in writers:
        writer.start()
    time.sleep(random.uniform(0.5, 2.0))
    server.kill()
    for writer in writers:
        writer.join()


def limits() -> None:
    """Models that loop and eat memory in capture, and how long others wait meanwhile."""
    with tempfile.TemporaryDirectory() as name:
        folder = nets_in(Path(name) / "models")
        words = ("--processes", _PROCESSES, "--capture-seconds", "15", "--memory", "2GiB")
        with serving(str(Path(name) / "runs.db"), *words, "--allow", str(folder)) as server:
            for net in ("endless", "greedy"):
                thread, answers = _aside(functools.partial(server.predict, model=f"nets.py:{net}"))
                waits_s = []
                while thread.is_alive():
                    begun_s = time.perf_counter()
                    assert server.ask("GET", "/health").status == 200
                    waits_s.append(time.perf_counter() - begun_s)
                    time.sleep(0.05)
                middle, longest = 1e3 * statistics.median(waits_s), 1e3 * max(waits_s)
                print(f"{net}: {answers[0].status} {answers[0].json['error']}")
                print(f"/health meanwhile: median {middle:.1f} ms, longest {longest:.0f} ms", flush=True)


def _aside(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    return thread, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("load", "overload", "malformed", "kills", "limits"))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--postgresql", help="The URL of a database for kills.")
    asked = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    if asked.what == "load":
        load(asked.seconds)
    elif asked.what == "overload":
        overload(asked.seconds)
    elif asked.what == "malformed":
        malformed_bodies(asked.count)
    elif asked.what == "kills":
        kills(asked.rounds, asked.postgresql)
    else:
        limits()


if __name__ == "__main__":
    main()
