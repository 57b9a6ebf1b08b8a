"""Measures how fast two trainings run beside each other on one GPU, with and without NVIDIA's MPS.

    python benchmarks/sharing_gpu.py --out sharing.jsonl [--seconds 400] [--window 2.0]

One process per job stays alive and is told over its pipe when to step, so nothing is built twice. First every
job runs alone, then every pair; a pair's rates are those of the time in which both ran. Pairs go round: every
five of them hold each of the ten jobs once, so any first part is balanced. Half of the time goes to processes
that take turns (the driver's way), half to MPS where it can be started. A line each: ``alone``, ``pair``,
``profile`` (kernels of one step, from a profiler, last of all), ``note``. ``--device cpu`` tries it out.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
READY_S, MPS_READY_S = 150.0, 90.0
"""How long processes may take until they are built and warm."""
RAMP_S = 0.35
"""From the start of both until rates count."""
AHEAD = 2
"""Steps that the host may be ahead of the device, as in a training that reads its loss now and then."""


def _job(
    source: dict[str, Any], batch: int, precision: str, optimizer: str, **training: Any
) -> dict[str, Any]:
    how = {"mode": "train", "global_batch": batch, "precision": precision, "optimizer": optimizer, **training}
    cluster = {"device": "h200-sxm-141gb", "devices_per_node": 1, "nodes": 1}
    return {"model": source, "training": {**how, "framework": "pytorch"}, "cluster": cluster, "plan": {}}


def _timm(name: str) -> dict[str, Any]:
    return {"source": "timm", "name": name, "args": {"num_classes": 1000}}


def _own(name: str) -> dict[str, Any]:
    return {"source": "python", "name": f"sharing_models.py:{name}"}


def _words(kind: str, task: str) -> dict[str, Any]:
    return {"source": "transformers", "task": task, "config": {"model_type": kind}}


_IMAGES = {"image": 224, "classes": 1000}
JOBS: dict[str, dict[str, Any]] = {
    "resnet50-16": {"job": _job(_timm("resnet50"), 16, "amp-bf16", "sgd", **_IMAGES)},
    "resnet50-192": {"job": _job(_timm("resnet50"), 192, "amp-bf16", "sgd", channels_last=True, **_IMAGES)},
    "vit-64": {"job": _job(_timm("vit_base_patch16_224"), 64, "amp-bf16", "adamw", **_IMAGES)},
    "bert-32": {"job": _job(_words("bert", "masked-lm"), 32, "bf16", "adamw", sequence=128)},
    "gpt2-8": {"job": _job(_words("gpt2", "causal-lm"), 8, "bf16", "adamw", sequence=1024)},
    "cnn-128": {"job": _job(_own("cnn"), 128, "fp32", "sgd")},
    "lstm-64": {"job": _job(_own("lstm"), 64, "fp32", "sgd")},
    "unet-32": {"job": _job(_own("unet"), 32, "amp-bf16", "adamw")},
    "recommender-8192": {"job": _job(_own("recommender"), 8192, "fp32", "sgd")},
    "resnet18-64-fed": {"job": _job(_timm("resnet18"), 64, "amp-bf16", "sgd", **_IMAGES), "wait_s": 0.012},
}
"""Jobs of different nature; ``wait_s`` is time without the device before each step, as when data are late."""
TINY = {f"tiny-{n}": {"job": _job(_own("tiny"), 2**n, "fp32", "sgd")} for n in range(4, 14)}


# One process per job


class Worker:
    """Runs inside a process of its own: builds a job, and steps when it is told to."""

    def __init__(self, name: str, device: str) -> None:
        import torch

        from foretrain.job import Job
        from foretrain.measure.steps import Stepper

        self.torch, self.device, self.cuda = torch, device, device == "cuda"
        torch.set_num_threads(1)
        entry = {**JOBS, **TINY}[name]
        self.wait_s = entry.get("wait_s", 0.0)
        job = Job.read(entry["job"], base=ROOT / "data")
        self.stepper = Stepper(job, device)
        begun = time.monotonic()
        for count in range(200):
            self.step()
            self.sync()
            if count >= 5 and time.monotonic() - begun > 1.0:
                break

    def sync(self) -> None:
        if self.cuda:
            self.torch.cuda.synchronize()

    def step(self) -> None:
        if self.wait_s:
            time.sleep(self.wait_s)
        self.stepper()

    def run(self, until: float) -> dict[str, Any]:
        """The moments at which steps were over, until a moment of the clock that all processes share."""
        ended: list[float] = []
        issued: collections.deque[Any] = collections.deque()
        while time.monotonic() < until:
            self.step()
            if self.cuda:
                event = self.torch.cuda.Event()
                event.record()
                issued.append(event)
                if len(issued) > AHEAD:
                    issued.popleft().synchronize()
                    ended.append(time.monotonic())
            else:
                ended.append(time.monotonic())
        self.sync()
        return {"ended": ended}

    def figures(self) -> dict[str, Any]:
        """Memory, and the host's time to issue a step."""
        found: dict[str, Any] = {}
        times = []
        for _ in range(4):
            self.sync()
            begun = time.monotonic()
            self.stepper()
            times.append(time.monotonic() - begun)
        self.sync()
        found["host_issue_s"] = statistics.median(times)
        if self.cuda:
            found["peak_memory_bytes"] = self.torch.cuda.max_memory_allocated()
            found["reserved_memory_bytes"] = self.torch.cuda.max_memory_reserved()
            free, total = self.torch.cuda.mem_get_info()
            found["device_memory_bytes"], found["device_memory_free_bytes"] = total, free
            found["device"], found["torch"] = self.torch.cuda.get_device_name(), self.torch.__version__
        return found

    def profile(self) -> dict[str, Any]:
        """Kernels of three steps: their time, and how much of the device their grids can fill."""
        if not self.cuda:
            return {}
        torch, steps = self.torch, 3
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(steps):
                self.stepper()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        spans = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        busy_us = reached = 0.0
        for event in sorted(spans, key=lambda event: float(event["ts"])):
            end = event["ts"] + event["dur"]
            busy_us += max(0.0, end - max(event["ts"], reached))
            reached = max(reached, end)
        kernels = [event for event in spans if event["cat"] == "kernel"]
        total_us = sum(event["dur"] for event in kernels) or 1.0
        processors = torch.cuda.get_device_properties(0).multi_processor_count

        def weighted(value: Any) -> float:
            return float(sum(event["dur"] * value(event.get("args", {})) for event in kernels) / total_us)

        def blocks(args: dict[str, Any]) -> float:
            x, y, z = args.get("grid", (0, 1, 1))
            return float(x * y * z)

        return {
            "kernels": len(spans) / steps,
            "device_busy_s": busy_us * 1e-6 / steps,
            "mean_occupancy": weighted(lambda args: args.get("est. achieved occupancy %", 0) / 100),
            "filled_processors": weighted(lambda args: min(1.0, blocks(args) / processors)),
            "under_one_wave": weighted(lambda args: float(blocks(args) <= processors)),
            "median_kernel_s": statistics.median(event["dur"] for event in kernels) * 1e-6,
            "longest_kernel_s": max(event["dur"] for event in kernels) * 1e-6,
        }


def serve(name: str, device: str) -> None:
    """Answers commands that come as JSON lines; what libraries print goes elsewhere."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.path.insert(0, str(ROOT / "src"))
    worker: Worker | None = None
    try:
        worker = Worker(name, device)
        answers.write(json.dumps({"ready": True}) + "\n")
    except Exception as error:
        answers.write(json.dumps({"failed": f"{type(error).__name__}: {error}"[:500]}) + "\n")
        return
    for line in sys.stdin:
        told = json.loads(line)
        try:
            answer = worker.run(told["until"]) if told["do"] == "run" else getattr(worker, told["do"])()
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(answer) + "\n")


class Remote:
    """A worker's process, from outside."""

    def __init__(self, name: str, device: str, environment: dict[str, str]) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", name, "--device", device]
        self.name = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **environment}
        )

    def tell(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, within_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], max(within_s, 0.1))
        line = self.process.stdout.readline() if ready else b""
        return dict(json.loads(line)) if line else {"failed": f"no answer within {within_s:.0f} s"}

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


# What the device says of itself


GPM = {1: "graphics_busy", 2: "processors_busy", 3: "occupancy", 5: "tensor_busy", 10: "memory_traffic"}
"""Numbers of NVML's metrics on Hopper and later, all of them in percent of the time or of the peak."""


class Watch:
    """Counters of the GPU over a window, where NVML has them."""

    def __init__(self) -> None:
        self.nvml: Any = None
        self.gpm = False
        try:
            import pynvml

            pynvml.nvmlInit()
            self.nvml, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        except Exception:
            return
        with contextlib.suppress(Exception):
            self.gpm = bool(pynvml.nvmlGpmQueryDeviceSupport(self.handle).isSupportedDevice)

    def machine(self) -> dict[str, Any]:
        """What is known of the device and its driver."""
        if self.nvml is None:
            return {"nvml": False}
        return {
            "nvml": True,
            "counters": self.gpm,
            "driver": str(self.nvml.nvmlSystemGetDriverVersion()),
            "device": str(self.nvml.nvmlDeviceGetName(self.handle)),
        }

    @contextlib.contextmanager
    def over(self, start: float, end: float) -> Iterator[dict[str, Any]]:
        """Fills the dictionary when the block is left, of the time between two moments."""
        found: dict[str, Any] = {}
        if self.nvml is None:
            yield found
            return
        thread = threading.Thread(target=self._watch, args=(start, end, found), daemon=True)
        thread.start()
        yield found
        thread.join(end - time.monotonic() + 2.0)

    def _watch(self, start: float, end: float, found: dict[str, Any]) -> None:
        nvml, samples, rows = self.nvml, [], []
        time.sleep(max(0.0, start - time.monotonic()))
        samples.append(self._sample())
        while time.monotonic() < end - 0.05:
            time.sleep(0.1)
            with contextlib.suppress(Exception):
                use = nvml.nvmlDeviceGetUtilizationRates(self.handle)
                power = nvml.nvmlDeviceGetPowerUsage(self.handle) / 1000
                rows.append((use.gpu, use.memory, power, nvml.nvmlDeviceGetClockInfo(self.handle, 1)))
        samples.append(self._sample())
        late = rows[len(rows) // 2 :]
        if late:
            use, memory, power, clock = (statistics.mean(column) for column in zip(*late, strict=True))
            found |= {"nvml_utilization": use / 100, "nvml_memory_busy": memory / 100}
            found |= {"power_w": power, "clock_mhz": clock}
        with contextlib.suppress(Exception):
            found |= self._metrics(*samples)

    def _sample(self) -> Any:
        if not self.gpm:
            return None
        try:
            sample = self.nvml.nvmlGpmSampleAlloc()
            self.nvml.nvmlGpmSampleGet(self.handle, sample)
        except Exception:
            self.gpm = False
            return None
        return sample

    def _metrics(self, before: Any, after: Any) -> dict[str, float]:
        if before is None or after is None:
            return {}
        nvml = self.nvml
        wanted = nvml.c_nvmlGpmMetricsGet_t()
        wanted.version = nvml.NVML_GPM_METRICS_GET_VERSION
        wanted.sample1, wanted.sample2, wanted.numMetrics = before, after, len(GPM)
        for place, number in enumerate(GPM):
            wanted.metrics[place].metricId = number
        nvml.nvmlGpmMetricsGet(wanted)
        for sample in (before, after):
            nvml.nvmlGpmSampleFree(sample)
        return {name: wanted.metrics[place].value / 100 for place, name in enumerate(GPM.values())}


# The measurement


def rounds(names: list[str]) -> list[tuple[str, str]]:
    """Every pair once; each round of half as many pairs as jobs holds every job once."""
    ring, pairs = list(names), []
    for _ in range(len(ring) - 1):
        pairs += [(ring[place], ring[-1 - place]) for place in range(len(ring) // 2)]
        ring.insert(1, ring.pop())
    return pairs


def rate(ended: list[float], start: float, end: float) -> dict[str, Any]:
    """Steps per second of those that were over between two moments."""
    inside = [moment for moment in ended if start <= moment <= end]
    if len(inside) < 2:
        return {"steps": len(inside), "steps_per_s": None}
    gaps = [b - a for a, b in itertools.pairwise(inside)]
    return {
        "steps": len(inside),
        "steps_per_s": len(gaps) / (inside[-1] - inside[0]),
        "median_step_s": statistics.median(gaps),
        "p90_step_s": sorted(gaps)[int(0.9 * (len(gaps) - 1))],
    }


class Study:
    """Processes, the clock and the file."""

    def __init__(self, out: Path, end: float, window_s: float, device: str, names: list[str]) -> None:
        self.end, self.window_s, self.device, self.names = end, window_s, device, names
        self.watch = Watch() if device == "cuda" else None
        out.parent.mkdir(parents=True, exist_ok=True)
        self.lines = out.open("a")

    def write(self, **row: Any) -> None:
        self.lines.write(json.dumps(row) + "\n")
        self.lines.flush()

    def started(self, mode: str, environment: dict[str, str], within_s: float) -> dict[str, Remote]:
        """The workers that came up; the others are noted."""
        all_of_them = {name: Remote(name, self.device, environment) for name in self.names}
        last, up = time.monotonic() + within_s, {}
        for name, remote in all_of_them.items():
            answer = remote.answer(last - time.monotonic())
            if "ready" in answer:
                up[name] = remote
            else:
                self.write(what="note", mode=mode, job=name, note=answer.get("failed", "ended"))
                remote.process.kill()
                remote.process.wait()
        return up

    def together(self, remotes: list[Remote]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Rates of workers that run at the same time, and what the device says meanwhile."""
        now = time.monotonic()
        start, end = now + RAMP_S, now + RAMP_S + self.window_s
        watching: contextlib.AbstractContextManager[dict[str, Any]] = contextlib.nullcontext({})
        if self.watch:
            watching = self.watch.over(start, end)
        with watching as seen:
            for remote in remotes:
                remote.tell(do="run", until=end + 0.1)
            answers = [remote.answer(self.window_s + 30) for remote in remotes]
        return [
            rate(answer["ended"], start, end) if "ended" in answer else {"failed": answer.get("failed")}
            for answer in answers
        ], seen

    def phase(self, mode: str, environment: dict[str, str], until: float, within_s: float) -> None:
        """All jobs alone, then pairs while there is time; the profiles take the time that is left."""
        up = self.started(mode, environment, within_s)
        if len(up) < 2:
            self.write(what="note", mode=mode, note=f"{len(up)} of {len(self.names)} jobs came up")
        for name, remote in up.items():
            (alone,), seen = self.together([remote])
            remote.tell(do="figures")
            entry = {**JOBS, **TINY}[name]
            self.write(what="alone", mode=mode, name=name, **entry, **alone, **seen, **remote.answer(60))
        kept = 12.0 if mode == "turns" else 0.0
        for a, b in rounds(self.names):
            if time.monotonic() + self.window_s + 1.0 + kept > until:
                break
            if a in up and b in up:
                found, seen = self.together([up[a], up[b]])
                self.write(what="pair", mode=mode, a=a, b=b, of_a=found[0], of_b=found[1], **seen)
        if mode == "turns":
            for name, remote in up.items():
                if time.monotonic() > until:
                    break
                remote.tell(do="profile")
                self.write(what="profile", name=name, **remote.answer(30))
        for remote in up.values():
            remote.end()


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str] | None]:
    """A server of our own; None where there is none to start."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **places}
        try:
            subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True, timeout=20)
        except (OSError, subprocess.SubprocessError):
            yield None
            return
        try:
            yield places
        finally:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run(
                    ["nvidia-cuda-mps-control"], input=b"quit\n", env=environment, timeout=20, check=False
                )


def main() -> None:
    """Alone and in pairs, taking turns and under MPS, while there is time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--window", type=float, default=2.0, help="seconds in which rates count")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--jobs", type=int, default=10, help="how many of the ten jobs")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(options.worker, options.device)
        return
    begun = time.monotonic()
    end = begun + options.seconds
    names = list(JOBS if options.device == "cuda" else TINY)[: options.jobs // 2 * 2]
    study = Study(options.out, end, options.window, options.device, names)
    study.write(what="note", **(study.watch.machine() if study.watch else {}), cores=os.cpu_count())
    study.phase("turns", {}, begun + 0.55 * options.seconds, READY_S)
    with mps() as places:
        if places is None:
            study.write(what="note", mode="mps", note="no nvidia-cuda-mps-control, or it does not start")
        else:
            study.phase("mps", places, end, min(MPS_READY_S, end - time.monotonic()))
            log = Path(places["CUDA_MPS_LOG_DIRECTORY"]) / "server.log"
            said = log.read_text()[-600:] if log.is_file() else "no log of the server"
            study.write(what="note", mode="mps", note=said)
    study.write(what="note", note=f"done in {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
