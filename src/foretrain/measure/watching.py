"""Samples a GPU through NVML from a process of its own, so that the training beside it keeps its pace."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from foretrain.errors import ForetrainError
from foretrain.measure.nvml import Counters, Gpu, gpu_count

PERIOD_S = 0.01
_PCIE_PERIOD_S = 0.005
"""Between readings of PCIe traffic, each of which takes NVML 20 ms for either direction."""
Sample = Mapping[str, Any]
"""``kind`` and ``time_s`` (since the epoch), and what was read."""


class Watcher:
    """The samples of a GPU in the ``with`` block, by kind and time; none where there is no NVML.

    ``use``: NVML's utilisation, memory busy, bytes held and power, every 10 ms; its averages are longer.
    ``pcie``: bytes per second received from and sent to the host, as often as NVML tells them. ``counters``:
    hardware counters since the sample before, where there are any.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._samples: list[Sample] = []
        self._half = ""

    def __enter__(self) -> Self:
        if not gpu_count():
            return self
        self._folder = tempfile.TemporaryDirectory(prefix="foretrain-watch-")
        self._file = Path(self._folder.name) / "samples.jsonl"
        self._file.touch()
        self._lines = self._file.open()
        command = [sys.executable, "-m", "foretrain.measure.watching"]
        self._process = subprocess.Popen([*command, str(self._file)], stdin=subprocess.PIPE)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()  # the other end stops when nobody is there any more
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
            self._process.kill()
            self._process.wait()
            self._lines.close()
            self._folder.cleanup()

    def between(self, start_s: float, end_s: float, kind: str) -> list[Sample]:
        """Samples of a kind that were taken in this time, seconds since the epoch."""
        self._read()
        return [one for one in self._samples if one["kind"] == kind and start_s <= one["time_s"] <= end_s]

    def _read(self) -> None:
        if self._process is None:
            return
        while line := self._lines.readline():
            self._half += line
            if self._half.endswith("\n"):  # else the rest comes later
                self._samples.append(json.loads(self._half))
                self._half = ""

    def forget(self, before_s: float) -> None:
        """Drop samples that were taken earlier."""
        self._read()
        self._samples = [one for one in self._samples if one["time_s"] >= before_s]


# The process


Read = Callable[[], dict[str, Any] | None]


def _readers(gpu: Gpu) -> dict[str, tuple[float, Read]]:
    """List the readers of a GPU by kind, each with the seconds between two readings."""

    def use() -> dict[str, Any]:
        return {
            "utilization": gpu.utilization(),
            "memory_busy": gpu.memory_busy(),
            "held_bytes": gpu.memory()[0],
            "power_w": gpu.power_w(),
        }

    def pcie() -> dict[str, Any] | None:
        received, sent = gpu.pcie_bytes_per_s(sent=False), gpu.pcie_bytes_per_s(sent=True)
        return None if received is None else {"received": received, "sent": sent}

    readers: dict[str, tuple[float, Read]] = {"use": (PERIOD_S, use), "pcie": (_PCIE_PERIOD_S, pcie)}
    with contextlib.suppress(ForetrainError):
        readers["counters"] = (2 * PERIOD_S, Counters(gpu).read)
    return readers


def main(file: str) -> None:
    """Write samples of the first GPU until the standard input ends."""
    gpu, writing, stop = Gpu(0), threading.Lock(), threading.Event()
    with Path(file).open("a") as lines:

        def sample(kind: str, every_s: float, read: Read) -> None:
            due = time.time()
            while not stop.wait(max(0.0, due - time.time())):
                begun = time.time()
                due = max(due + every_s, begun)
                reading = read()
                if reading is None:
                    stop.wait(0.5)
                    continue
                now = time.time()
                line = {"kind": kind, "time_s": round(now, 5), "took_s": round(now - begun, 5), **reading}
                with writing:
                    lines.write(json.dumps(line) + "\n")
                    lines.flush()

        threads = [
            threading.Thread(target=sample, args=(kind, *how), daemon=True)
            for kind, how in _readers(gpu).items()
        ]
        for thread in threads:
            thread.start()
        sys.stdin.buffer.read()
        stop.set()
        for thread in threads:
            thread.join(timeout=1)


if __name__ == "__main__":
    main(sys.argv[1])
