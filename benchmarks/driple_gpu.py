"""Measures the twelve resource figures of training jobs on a GPU, with and without an input pipeline.

    python benchmarks/driple_gpu.py choose --out benchmarks/driple_cells.jsonl      # which jobs, loaders
    python benchmarks/driple_gpu.py measure benchmarks/driple_cells.jsonl --out DIR --seconds 480
    python benchmarks/driple_gpu.py pack DIR... --out data/h200_resources.jsonl

``choose`` takes models that ran on an H200 (``data/h200_*.jsonl``), two of a family, other batches and
precisions, and for each no loader and two loaders. ``measure`` builds a model once and watches its steps with
each; first of all it finds out how fast NVML's counters follow a load that comes and goes
(``DIR/response.jsonl``). Any beginning of the list is a balanced sample of it. What ``DIR`` holds is not
measured again; what fails is in ``DIR/failures.jsonl``. ``pack`` leaves NVML's raw samples out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foretrain.architectures import family
from foretrain.job import Job
from foretrain.run import Run, read_runs

DATA = Path("data")
SOURCES = ("h200_steps.jsonl", "h200_vision.jsonl", "h200_transformers.jsonl")
PER_FAMILY = 2
BATCHES = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
SHORTEST_S, LONGEST_S = 0.006, 0.16
"""Of the steps of jobs that are chosen, so that a window of half a second has several."""
MOST_BYTES = 50e9
LOADING_LIMIT_S = 0.3
"""A batch takes its loaders no longer."""
LISTS = ("rcnn", "retinanet", "fcos", "ssd", "raft")
"""Parts of the names of models that are called with lists of pictures of their own sizes."""
OF_STEPS = ("step_time_s", "samples_per_s")
"""What is no figure of a step that waits for data."""
RESERVE_S = 12.0
"""Before the end of the time, in which no model is built any more."""


# Which cells


def plain(run: Run) -> bool:
    """A training as it comes, that is neither very short nor very long."""
    training, plan, measured = run.job.workload.training, run.job.plan, run.measured
    usual = training.mode == "train" and not training.compile and plan.recompute == "none"
    usual = usual and not any(part in str(run.job.workload.model.name) for part in LISTS)
    short = SHORTEST_S <= measured.get("step_time_s", 0.0) <= LONGEST_S
    return (
        usual and short and training.precision != "fp8" and measured.get("peak_memory_bytes", 0) < MOST_BYTES
    )


def chosen(seed: int) -> list[tuple[Job, float]]:
    """Jobs with the step time that a job like it had, the first of every family before the second of any."""
    draw = random.Random(seed)
    runs = [run for name in SOURCES for _, run in read_runs(DATA / name) if plain(run)]
    families: dict[str, list[Run]] = {}
    for run in draw.sample(runs, len(runs)):
        known = families.setdefault(family(run.job.workload.model), [])
        if run.job.workload.model.key not in [one.job.workload.model.key for one in known]:
            known.append(run)
    turns = []
    for turn in range(PER_FAMILY):
        there = [runs[turn] for _, runs in sorted(families.items()) if len(runs) > turn]
        turns.append(spaced(draw.sample(there, len(there)), draw))
    return [changed(run, draw) for turn in turns for run in turn]


def spaced(runs: list[Run], draw: random.Random) -> list[Run]:
    """In an order in which every beginning has its share of each source of models."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.job.workload.model.source, []).append(run)
    places = [
        ((number + draw.random()) / len(group), source, number)
        for source, group in sorted(groups.items())
        for number in range(len(group))
    ]
    return [groups[source][number] for _, source, number in sorted(places)]


def changed(run: Run, draw: random.Random) -> tuple[Job, float]:
    """The job with another batch and precision."""
    training = run.job.workload.training
    near = [one for one in BATCHES if training.global_batch / 2 <= one <= training.global_batch * 1.5]
    batch = draw.choice(near or [training.global_batch])
    precisions = {"amp-bf16": 4, "fp32": 3, "tf32": 1, "amp-fp16": 1}
    if run.job.workload.model.source == "transformers":
        precisions |= {"bf16": 3}
    precision: Any = draw.choices(list(precisions), list(precisions.values()))[0]
    new = dataclasses.replace(training, global_batch=batch, precision=precision, grad_scaler=None)
    workload = dataclasses.replace(run.job.workload, training=new)
    return (
        dataclasses.replace(run.job, workload=workload),
        run.measured["step_time_s"] * (batch / training.global_batch) ** 0.7,
    )


def kinds_of(job: Job) -> dict[str, float]:
    """Kinds of loaders that can feed a job, and about how many seconds a sample takes them."""
    training, source = job.workload.training, job.workload.model.source
    if source in ("timm", "torchvision") and not (job.workload.model.name or "").startswith(
        ("r3d", "mc3", "r2plus1d", "s3d", "mvit_v", "swin3d", "raft")
    ):
        side = training.image if isinstance(training.image, int) else 224
        return {"decode": 5e-4 + 5.5e-8 * side**2, "crop": 1e-4 + 1.2e-8 * side**2}
    if training.sequence and training.sequence <= 4096 and source == "transformers":
        return {"tokenize": 1.0e-5 * training.sequence, "slice": 2e-5}
    if source == "python":
        return {"slice": 2e-5}
    return {"noise": 2e-3, "slice": 2e-4}


def loaders(job: Job, step_s: float, draw: random.Random) -> list[dict[str, Any] | None]:
    """None, one that really works, and another that works or delivers at a rate of its own."""
    batch, kinds = job.micro_batch, kinds_of(job)
    found: list[dict[str, Any] | None] = [None]
    for number in range(2):
        kind = draw.choice(list(kinds))
        workers = draw.choice((1, 1, 2) if number == 0 else (1, 2, 2, 4))
        while batch * kinds[kind] / workers > LOADING_LIMIT_S:
            workers *= 2
        one: dict[str, Any] = {"kind": kind, "workers": workers}
        if (number == 1 and draw.random() < 0.5) or batch * kinds[kind] / workers < 0.15 * step_s:
            loading_s = min(LOADING_LIMIT_S, step_s * math.exp(draw.uniform(math.log(0.5), math.log(5.0))))
            one = {"kind": "paced", "workers": workers, "rate": round(batch / (loading_s * workers), 1)}
        if one not in found:
            found.append(one)
    return found


def choose(options: argparse.Namespace) -> None:
    draw = random.Random(options.seed + 1)
    lines = [
        {"job": job.to_dict(), "loaders": loaders(job, step_s, draw)} for job, step_s in chosen(options.seed)
    ]
    options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    families = {family(Job.read(line["job"], base=DATA).workload.model) for line in lines}
    cells = sum(len(line["loaders"]) for line in lines)
    print(f"{len(lines)} models of {len(families)} families, {cells} cells in {options.out}")


# Measuring


def key(cell: dict[str, Any]) -> str:
    return json.dumps(cell, sort_keys=True)


def lines_of(path: Path) -> Iterator[Any]:
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:  # half a line of a run that was cut off
                continue


def measure(options: argparse.Namespace) -> None:
    begun = time.monotonic()
    import torch

    from foretrain.measure.steps import forget_jobs
    from foretrain.measure.watching import Watcher

    options.out.mkdir(parents=True, exist_ok=True)
    runs, failures = options.out / "runs.jsonl", options.out / "failures.jsonl"
    done = {key(line["cell"]) for path in (runs, failures) for line in lines_of(path)}
    with Watcher() as watcher, runs.open("a") as good, failures.open("a") as bad:
        if options.device == "cuda" and not options.skip and not (options.out / "response.jsonl").exists():
            try:
                response(options.out / "response.jsonl", watcher)
            except Exception as error:
                print(f"response: {error}", flush=True)
        for line in [json.loads(one) for one in options.cells.read_text().splitlines()][options.skip :]:
            if time.monotonic() - begun > options.seconds - RESERVE_S:
                print("no time is left for another model", flush=True)
                break
            cells = [{"job": line["job"], "loader": loader} for loader in line["loaders"][: options.most]]
            todo = [cell for cell in cells if key(cell) not in done]
            if todo:
                measure_cells(todo, options, watcher, good, bad, begun)
                if options.device == "cuda":
                    forget_jobs()
                watcher.forget(time.time() - 1.0)
    print(f"{time.monotonic() - begun:.0f} s, {torch.__version__}", flush=True)


def measure_cells(
    cells: list[dict[str, Any]], options: argparse.Namespace, watcher: Any, good: Any, bad: Any, begun: float
) -> None:
    """Build the model once, and watch it with each loader; what fails ends nothing else."""
    from foretrain.measure.loading import Loader
    from foretrain.measure.step_resources import Session, Window

    start = time.monotonic()
    job = Job.read(cells[0]["job"], base=DATA)
    if options.device == "cpu":
        cluster = Job.read({**cells[0]["job"], "cluster": {"device": "cpu", "cores_per_device": 1}}).cluster
        job = dataclasses.replace(job, cluster=cluster)
    try:
        session = Session(job, options.device, watcher, Window())
    except Exception as error:
        for cell in cells:
            fail(bad, cell, error)
        return
    built_s = time.monotonic() - start
    for cell in cells:
        if time.monotonic() - begun > options.seconds - RESERVE_S / 3:
            break
        try:
            run = session.measure(None if cell["loader"] is None else Loader(**cell["loader"]))
        except Exception as error:
            fail(bad, cell, error)
            if "CUDA error" in str(error):
                raise
            continue
        good.write(json.dumps({**run.to_dict(), "cell": cell, "built_s": built_s}) + "\n")
        good.flush()
        said, about = run.measured, run.provenance
        print(
            f"{time.monotonic() - begun:5.0f} s {job.workload.model.label} {job.workload.training.precision} "
            f"{cell['loader']} build {built_s:.1f} in {about['seconds']:.1f} step {about['pace_s']:.4f} "
            f"profiled {about.get('step_time_profiled_s', 0):.4f} busy {said['device_utilization']:.3f} "
            f"rx {said['network_rx_bytes_per_s']:.3g}",
            flush=True,
        )


def fail(bad: Any, cell: dict[str, Any], error: Exception) -> None:
    where = traceback.format_exception(error)[-3:]
    bad.write(
        json.dumps({"cell": cell, "error": f"{type(error).__name__}: {error}"[:400], "at": where}) + "\n"
    )
    bad.flush()
    print(f"failed: {type(error).__name__}: {error}"[:300], flush=True)


def pack(options: argparse.Namespace) -> None:
    """The runs of campaigns as one file, with figures of all that profiler and counters saw."""
    from foretrain.measure.gpu_series import joined_series, link_rates, slowed_by, whole_turns
    from foretrain.measure.resources import Series, twelve_figures

    lines, short = [], 0
    for line in (line for folder in options.folders for line in lines_of(folder / "runs.jsonl")):
        job, measured, about = line["job"], line["measured"], line["provenance"]
        series = Series.read(about["resources"]["series"])
        nvml = about.pop("nvml")
        samples = nvml["plain"]
        training = job["training"]
        pace_s = about.setdefault("pace_s", measured.get("step_time_s"))
        loading_s = None
        if "loader_rate" in training:
            loading_s = training["global_batch"] / (training["loader_rate"] * training["loader_workers"])
            measured = {name: value for name, value in measured.items() if name not in OF_STEPS}
        if "slowed_by" not in about:
            about["slowed_by"] = slowed_by(about["step_time_profiled_s"], pace_s, loading_s)
            series = joined_series(series, link_rates(samples), about["slowed_by"])
        workers = training.get("loader_workers", 1)
        if workers > 1 and loading_s > 0.8 * pace_s:
            cut = whole_turns(series, workers * loading_s)
            if cut is None:
                short += 1
                continue
            series = cut
        about["resources"] |= {"figures": twelve_figures(series), "series": series.to_dict()}
        means = {"device_utilization": series.mean("device_utilization")}
        means |= {f"{name}_bytes_per_s": series.mean(name) for name in ("network_rx", "network_tx")}
        about["built_s"] = line["built_s"]
        read = [share for part in nvml.values() for share in (part.get("use") or {}).get("memory_busy", ())]
        if loading_s is None and read:  # NVML's average, which bursts fall out of
            means["memory_busy"] = sum(read) / len(read)
        use = samples.get("use") or {}
        about["nvml_utilization"] = sum(use["utilization"]) / len(use["utilization"]) if use else None
        held = about["held_before_bytes"]
        about["held_before_bytes"] = held[0] if isinstance(held, list) else held
        lines.append(json.dumps({"job": job, "measured": {**measured, **means}, "provenance": about}))
    options.out.write_text("".join(f"{line}\n" for line in lines))
    print(f"{len(lines)} runs in {options.out}; {short} were watched for less than a turn of their loader")


def response(path: Path, watcher: Any) -> None:
    """What NVML says while a load comes and goes in known times: how long its averages are."""
    import torch

    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    host = torch.empty(64 << 20, dtype=torch.uint8).pin_memory()
    there = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    a @ a
    torch.cuda.synchronize()
    time.sleep(1.0)
    for on_s, off_s, turns in ((0.5, 0.5, 2), (0.1, 0.1, 6), (0.03, 0.03, 15)):
        edges = []
        begun = time.time()
        for _ in range(turns):
            start = time.time()
            while time.time() - start < on_s:
                for _ in range(4):
                    a @ a
                torch.cuda.synchronize()
            edges.append((start - begun, time.time() - begun))
            time.sleep(off_s)
        ended = time.time()
        copies = []
        begun_copies = time.time()
        for _ in range(turns):
            start = time.time()
            count = 0
            while time.time() - start < on_s:
                there.copy_(host, non_blocking=True)
                torch.cuda.synchronize()
                count += 1
            copies.append((start - begun_copies, time.time() - begun_copies, count * host.nbytes))
            time.sleep(off_s)
        ended_copies = time.time()
        time.sleep(0.3)
        row: dict[str, Any] = {"on_s": on_s, "off_s": off_s, "busy": edges, "copies": copies}
        for kind in ("use", "pcie", "counters"):
            row[kind] = [
                {**one, "time_s": one["time_s"] - begun} for one in watcher.between(begun, ended + 0.3, kind)
            ]
            row[f"{kind}_copies"] = [
                {**one, "time_s": one["time_s"] - begun_copies}
                for one in watcher.between(begun_copies, ended_copies + 0.3, kind)
            ]
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        levels = {kind: len(row[kind]) for kind in ("use", "pcie", "counters")}
        print(f"response: {on_s} s on and off, samples {levels}", flush=True)
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    choosing, measuring, packing = (commands.add_parser(name) for name in ("choose", "measure", "pack"))
    packing.set_defaults(run=pack)
    packing.add_argument("folders", type=Path, nargs="+")
    packing.add_argument("--out", type=Path, required=True)
    choosing.set_defaults(run=choose)
    choosing.add_argument("--out", type=Path, required=True)
    choosing.add_argument("--seed", type=int, default=0)
    measuring.set_defaults(run=measure)
    measuring.add_argument("cells", type=Path)
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--seconds", type=float, default=480.0)
    measuring.add_argument("--skip", type=int, default=0, help="lines of the list that others have measured")
    measuring.add_argument("--most", type=int, default=3, help="loaders of a model, none counted in")
    measuring.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
