"""Compares CherryPick's search with Ernest's design and ours: who finds the cheapest configuration in time.

    python benchmarks/search.py --data DIR [--only NAMES] [--json OUT]

Measured configurations are replayed (workers, nodes and batch of a worker; the same samples in all): those of
a model of ``data/cpu16_campaign.jsonl.zst`` (all-reduce), of Pollux's and of Rubick's tables. What counts is
the device time of the whole training; a deadline is met by four in ten configurations. The search goes on
until no configuration promises 10 % less. What it has spent on measuring (so many steps and a start of each)
is what the others may spend: Ernest's design (A-optimal) with its law, ours (D-optimal, half of it at random)
with the Ray performance models, and a random choice with Ernest's law. All then take the cheapest
configuration that is in time, by what was measured or else by what they forecast.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import reading
from foretrain.errors import ForetrainError
from foretrain.job import Job
from foretrain.measure.candidates import Candidates
from foretrain.measure.design import METHODS, design
from foretrain.predictors.base import Predictor
from foretrain.predictors.cherrypick import CherryPickPredictor
from foretrain.predictors.ernest import ErnestPredictor
from foretrain.predictors.ray_models import RayModelsPredictor
from foretrain.run import Run, read_runs
from foretrain.search import next_turn

OWN = Path(__file__).parents[1] / "data"
SAMPLES = 1_000_000
STEPS, START_S = 20, 30.0
"""Steps that a measurement times, and seconds until a training runs."""
IN_TIME = 0.4
FEWEST = 8
SEEDS = 3

Point = tuple[int, int, int]
"""Workers, nodes, samples of a worker in a step."""
Workload = dict[Point, float]
"""Seconds of a step."""


# Workloads


def workloads(data: Path) -> Iterator[tuple[str, str, Workload]]:
    found: dict[tuple[str, str], dict[Point, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _, run in read_runs(OWN / "cpu16_campaign.jsonl.zst"):
        job, plan = run.job, run.job.plan
        if not plan.servers:
            point = (plan.data or 1, 1, job.workload.training.global_batch // (plan.data or 1))
            label = f"{job.workload.model.label} at {job.workload.training.image}"
            found["cpu16_campaign", label][point].append(run.measured["step_time_s"])
    for row in _rows(data, "pollux_t4_steps"):
        if row["kind"] == "placements":
            point = (int(row["gpus"]), int(row["nodes"]), int(row["local_bsz"]))
            found["pollux", row["model"]][point].append(float(row["step_time_s"]))
    for row in _rows(data, "rubick_a800_steps"):
        if row["tensor"] == row["pipeline"] == "1":
            devices = int(row["devices"])
            point = (devices, int(row["nodes"]), int(row["global_batch"]) // devices)
            found["rubick", f"{row['model']}, {row['exec_plan']}"][point].append(float(row["step_time_s"]))
    for (source, label), points in found.items():
        even = {
            point: float(np.median(times))
            for point, times in points.items()
            if point[0] % point[1] == 0 and point[2] > 0
        }
        if len(even) >= FEWEST:
            yield source, label, even


def _rows(data: Path, name: str) -> list[dict[str, str]]:
    with (data / "tables" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def job_of(point: Point) -> Job:
    """A job of this scale; which model it names does not matter, as nothing is captured."""
    workers, nodes, batch = point
    training = {"global_batch": workers * batch, "image": 32, "samples": SAMPLES, "epochs": 1}
    cluster = {"device": "t4", "devices_per_node": workers // nodes, "nodes": nodes, "price": 1.0}
    model = {"source": "torchvision", "name": "resnet18"}
    return Job.read({"model": model, "training": training, "cluster": cluster, "plan": {"data": workers}})


# Methods


class Replay:
    """Configurations of a workload whose steps were measured."""

    def __init__(self, workload: Workload) -> None:
        self.jobs = [job_of(point) for point in workload]
        self.step_s = np.array(list(workload.values()))
        self.workers = np.array([point[0] for point in workload])
        steps = np.array([job.workload.training.total_steps or 1 for job in self.jobs])
        self.time_s = self.step_s * steps
        self.deadline_s = float(np.quantile(self.time_s, IN_TIME))
        self.cost = self.time_s * self.workers
        self.spent = self.workers * (START_S + STEPS * self.step_s)
        self.best = float(self.cost[self.time_s <= self.deadline_s].min())

    def runs(self, rows: Sequence[int]) -> list[Run]:
        return [Run(job=self.jobs[i], measured={"step_time_s": float(self.step_s[i])}) for i in rows]

    def pick(self, rows: Sequence[int], predictor: Predictor | None) -> int:
        """The cheapest in time, by what was measured of these rows and by forecasts of the others."""
        times = np.full(len(self.jobs), np.inf)
        if predictor is not None:
            predictor.fit(self.runs(rows))
            for i, job in enumerate(self.jobs):
                try:
                    steps = job.workload.training.total_steps or 1
                    times[i] = predictor.predict(job)["step_time_s"].median * steps
                except ForetrainError:
                    continue
        times[list(rows)] = self.time_s[list(rows)]
        cost = np.where(times <= self.deadline_s, times * self.workers, np.inf)
        return int(np.argmin(cost) if np.isfinite(cost).any() else np.argmin(times))

    def search(self) -> list[int]:
        """What CherryPick's loop measures."""
        rows: list[int] = []
        while True:
            turn = next_turn(self.jobs, self.runs(rows), self.deadline_s)
            if turn.following is None:
                return rows
            rows.append(next(i for i, job in enumerate(self.jobs) if job is turn.following))

    def designed(self, method: str, predictor: Predictor, budget: float, seed: int = 0) -> list[int]:
        figures = [predictor.design_row(job) for job in self.jobs]
        names = sorted({name for row in figures for name in row})
        features = np.array([[row.get(name, 0.0) for name in names] for row in figures])
        labels: list[dict[str, Any]] = [{} for _ in self.jobs]
        every = Candidates(names=tuple(names), features=features, cost_s=self.spent, labels=labels)
        return [int(i) for i in design(method, every, budget_s=budget, seed=seed).chosen]


def score(workload: Workload) -> dict[str, list[tuple[float, bool, int]]]:
    """By method: what its choice costs over the best, whether it is late, and how many it measured."""
    replay = Replay(workload)
    tried = replay.search()
    budget = float(replay.spent[tried].sum())
    outcome: dict[str, list[tuple[float, bool, int]]] = defaultdict(list)

    def note(name: str, rows: Sequence[int], predictor: Predictor | None) -> None:
        chosen = replay.pick(rows, predictor)
        late = bool(replay.time_s[chosen] > replay.deadline_s)
        outcome[name].append((float(replay.cost[chosen] / replay.best), late, len(rows)))

    note("CherryPick's search", tried, None)
    note("the same runs, Gaussian process", tried, CherryPickPredictor())
    ours: Callable[[], Predictor] = lambda: RayModelsPredictor(physics=None)  # noqa: E731
    ernest = replay.designed("a-optimal", ErnestPredictor(), budget)
    note("Ernest's design and law", ernest, ErnestPredictor())
    for seed in range(SEEDS):
        drawn = replay.designed("random", ErnestPredictor(), budget, seed)
        note("random, Ernest's law", drawn, ErnestPredictor())
    half = replay.designed("half-d-optimal", ours(), budget)
    if len(half) >= 3:
        note("our design and Ray models", half, ours())
    note("the search's runs, Ray models", tried, ours())
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=reading.existing, required=True)
    parser.add_argument("--only", default="", help="starts of the names of sources, with commas")
    parser.add_argument("--most", type=int, default=100, help="workloads of a source")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    assert "half-d-optimal" in METHODS
    wanted = tuple(options.only.split(",")) if options.only else ("",)
    outcomes: dict[str, dict[str, list[tuple[float, float, float]]]] = defaultdict(lambda: defaultdict(list))
    counts: dict[str, int] = defaultdict(int)
    sizes: dict[str, list[int]] = defaultdict(list)
    for source, label, workload in workloads(options.data):
        if not source.startswith(wanted) or counts[source] >= options.most:
            continue
        counts[source] += 1
        sizes[source].append(len(workload))
        for method, rows in score(workload).items():
            ratio, late, count = (float(np.mean(column)) for column in zip(*rows, strict=True))
            outcomes[source][method].append((ratio, late, count))
        told = {method: means[-1] for method, means in outcomes[source].items()}
        print(source, label, len(workload), json.dumps(told), flush=True)
    for source, methods in outcomes.items():
        print(f"{source}: {counts[source]} workloads of {min(sizes[source])} to {max(sizes[source])}")
        for method, means in methods.items():
            ratios, lates, measured = (np.array(column, dtype=float) for column in zip(*means, strict=True))
            figures = f"{ratios.mean() - 1:+7.1%} cost, {lates.mean():4.0%} late, {measured.mean():5.1f} runs"
            print(f"  {method:34} {figures}")
    if options.json:
        options.json.write_text(json.dumps(outcomes, indent=1))


if __name__ == "__main__":
    reading.run(main)
