"""Scores how the Ray performance models interpolate and extrapolate, beside Ernest.

    python benchmarks/ray_models.py --data DIR [--only pollux,gavel] [--along workers,steps,cores,links]
                                    [--runs 20] [--seeds 1] [--inner 4] [--processes 2] [--json OUT]

Of every model and dimension (workers, work of a step, cores, steps or samples of an epoch, links) with three
values or more, inner values (at most ``--inner`` of them, evenly over their range) are forecast from the
others, and the largest third from what is below. Of what may be learned from, at most ``--runs`` runs are
drawn at random. DIR holds the public tables and runs.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import reading
from foretrain import predictors
from foretrain.evaluate import Scores
from foretrain.fanout import fan_out
from foretrain.predictors.conformal import Factors
from foretrain.predictors.ray_models import RayModelsPredictor
from foretrain.predictors.ray_models.columns import Array, ScaleTable
from foretrain.predictors.ray_models.predictor import data_of
from foretrain.predictors.ray_models.scaling import ScaleModel, ernest_times_s
from foretrain.predictors.ray_models.search import Budget
from foretrain.run import Run, read_runs
from foretrain.splits import Part, extrapolation, interpolation

OWN = Path(__file__).parents[1] / "data"
KINDS = {"interpolation": interpolation, "extrapolation": extrapolation}


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Runs of one model, from one source."""

    source: str
    label: str
    table: ScaleTable
    times_s: Array
    data: tuple[str, ...] = ()
    """The columns that are sizes of the data."""
    samples: Array | None = None
    """Of an epoch, where runs tell."""

    def parts(self, dimension: str, kind: str) -> list[Part]:
        """Along a number of the table, or the samples. A run on one node has no link between nodes, so that
        along these it is always learned from."""
        values = self.samples if dimension == "samples" else self.table.number(dimension)
        if values is None:
            return []
        split = np.flatnonzero(self.table.nodes > 1) if dimension == "links" else np.arange(len(values))
        kept = np.setdiff1d(np.arange(len(values)), split)
        found = KINDS[kind](values[split]) if len(np.unique(values[split])) > 2 else []
        return [(np.sort(np.concatenate([kept, split[train]])), split[test]) for train, test in found]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    source: str
    label: str
    dimension: str
    kind: str
    trained: int
    tested: int
    error: float
    without_forecast: float
    ernest: float
    coverage: float
    seconds: float


def by_cell(series: Series) -> Series:
    """With the repeats of a cell as one run of their median time."""
    columns = np.column_stack([*series.table.scales.values(), series.table.levels])
    _, first, cell = np.unique(columns, axis=0, return_index=True, return_inverse=True)
    times_s = np.array([np.median(series.times_s[cell == number]) for number in range(len(first))])
    samples = None if series.samples is None else series.samples[first]
    return dataclasses.replace(series, table=series.table.take(first), times_s=times_s, samples=samples)


# Sources


def own_and_runs(data: Path, wanted: tuple[str, ...]) -> Iterator[Series]:
    """Files of runs: the forecast of each job is known."""
    files = {
        "ray campaign": OWN / "ray_campaign.jsonl.zst",
        "ray nodes": OWN / "ray_nodes_campaign.jsonl.zst",
        "ray slow nodes": OWN / "ray_nodes_slow.jsonl.zst",
        "links campaign": OWN / "links_campaign.jsonl.zst",
        "cpu16 ddp": OWN / "cpu16_ddp.jsonl",
        "cpu16 campaign": OWN / "cpu16_campaign.jsonl.zst",
        "pollux runs": data / "runs" / "pollux_t4.jsonl",
    }
    for source, path in files.items():
        if not source.startswith(wanted):
            continue
        by_model = defaultdict(list)
        for _, run in read_runs(path):
            by_model[run.job.workload.model.key].append(run)
        for runs in by_model.values():
            if len(runs) < 6:
                continue
            yield from series_of(runs, source)


def series_of(runs: Sequence[Run], source: str, *, physics: str | None = predictors.DEFAULT) -> list[Series]:
    """Of the steps and of the epochs of one model."""
    tables = RayModelsPredictor(physics=physics).tables(runs)[1]
    samples = np.array([run.job.workload.training.samples or np.nan for run in runs])
    return [
        Series(
            source=f"{source}, {kind}s",
            label=runs[0].job.workload.model.label,
            table=table,
            times_s=times_s,
            data=data_of(tables),
            samples=samples if len(samples) == len(table) and np.isfinite(samples).all() else None,
        )
        for kind, (table, times_s) in tables.items()
    ]


def tables(data: Path, wanted: tuple[str, ...]) -> Iterator[Series]:
    """Public tables of step times, whose models are not known as jobs."""
    rows: dict[tuple[str, str], list[tuple[float, float, float, float]]] = defaultdict(list)
    for row in _rows(data, "pollux_t4_steps"):
        if row["kind"] == "placements":
            rows["pollux table", row["model"]].append(
                (float(row["gpus"]), float(row["nodes"]), float(row["local_bsz"]), float(row["step_time_s"]))
            )
    for row in _rows(data, "gavel_throughputs"):
        if row["table"] == "physical" and row["batch_per_device"] and float(row["steps_per_s"]) > 0:
            devices, apart = float(row["devices"]), row["placement"] != "consolidated"
            if devices > 1 or not apart:  # the rate is that of all devices together
                rows["gavel", f"{row['model']} on {row['device']}"].append(
                    (
                        devices,
                        devices if apart else 1.0,
                        float(row["batch_per_device"]),
                        devices / float(row["steps_per_s"]),
                    )
                )
    for row in _rows(data, "shockwave_throughputs"):
        if row["batch_per_device"]:
            devices = float(row["devices"])
            rows["shockwave", f"{row['model']} on {row['device']}"].append(
                (devices, 1.0, float(row["batch_per_device"]), devices / float(row["steps_per_s"]))
            )
    for row in _rows(data, "rubick_a800_steps"):
        if row["tensor"] == row["pipeline"] == "1":
            devices = float(row["devices"])
            rows["rubick", f"{row['model']}, {row['exec_plan']}"].append(
                (
                    devices,
                    float(row["nodes"]),
                    float(row["global_batch"]) / devices,
                    float(row["step_time_s"]),
                )
            )
    for (source, label), found in rows.items():
        points: dict[tuple[float, ...], list[float]] = defaultdict(list)
        for *point, time_s in found:
            points[tuple(point)].append(time_s)
        if len(points) >= 6:
            workers, nodes, batch = (np.array(column) for column in zip(*points, strict=True))
            ones = np.ones(len(points))
            table = ScaleTable(
                workers=workers,
                nodes=nodes,
                cores=ones,
                work=batch,
                traffic=ones,
                steps=ones,
                levels=np.zeros((len(points), 0)),
            )
            yield Series(
                source=source,
                label=label,
                table=table,
                times_s=np.array([float(np.median(times)) for times in points.values()]),
            )


def _rows(data: Path, name: str) -> list[dict[str, str]]:
    with (data / "tables" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# Scores


def parts(
    series: Series, along: Sequence[str], runs: int, seeds: int, inner: int = 4
) -> Iterator[tuple[str, str, Part]]:
    """Every dimension and kind; where there is more to learn from than allowed, one part per seed."""
    for name in along:
        for kind in KINDS:
            found = series.parts(name, kind)
            places = np.linspace(0, len(found) - 1, inner).round().astype(int).tolist() if found else []
            for train, test in [found[i] for i in sorted(set(places))]:
                for seed in range(seeds if len(train) > runs else 1):
                    kept = np.sort(np.random.default_rng(seed).permutation(train)[:runs])
                    if len(kept) >= 4:
                        yield name, kind, (kept, test)


def score(shared: bool, item: tuple[Series, str, str, Part]) -> Score:
    """``shared`` says whether it is scored without our own forecast as well."""
    series, dimension, kind, (train, test) = item
    known, asked, known_s, asked_s = (
        series.table.take(train),
        series.table.take(test),
        series.times_s[train],
        series.times_s[test],
    )
    begun = time.process_time()
    model = ScaleModel.fit(known, known_s, Budget())
    forecast_s, spreads = _tell(model, asked, series.data)
    seconds = time.process_time() - begun
    held = [
        forecast_s[i] * spread.low <= asked_s[i] <= forecast_s[i] * spread.high
        for i, spread in enumerate(spreads)
    ]
    blind = forecast_s
    if known.forecast_s is not None and shared:
        bare, other = (dataclasses.replace(table, forecast_s=None) for table in (known, asked))
        blind = _tell(ScaleModel.fit(bare, known_s, Budget()), other, series.data)[0]
    ernest = ernest_times_s(known, known_s, asked)
    own, without, rival = (Scores.of(asked_s, one).mape for one in (forecast_s, blind, ernest))
    return Score(
        source=series.source,
        label=series.label,
        dimension=dimension,
        kind=kind,
        trained=len(train),
        tested=len(test),
        error=own,
        without_forecast=without,
        ernest=rival,
        coverage=float(np.mean(held)),
        seconds=seconds,
    )


def _tell(model: ScaleModel, asked: ScaleTable, data: tuple[str, ...]) -> tuple[Array, list[Factors]]:
    """As a forecast is made: seconds and intervals of each row."""
    rows = [model.tell(asked.take(np.array([i])), data) for i in range(len(asked))]
    return np.array([time_s for time_s, _ in rows]), [spread for _, spread in rows]


def show(scores: Sequence[Score]) -> None:
    """Means over parts, then over the models of a source."""
    groups: Mapping[tuple[str, str, str], dict[str, list[Score]]] = defaultdict(lambda: defaultdict(list))
    for one in scores:
        groups[one.source, one.dimension, one.kind][one.label].append(one)
    print(
        f"{'source':28} {'dimension':9} {'kind':14} models parts    own  no forecast  ernest  coverage  CPU s"
    )
    means: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (source, dimension, kind), models in sorted(groups.items()):
        figures = {
            name: float(
                np.mean([np.mean([getattr(score, name) for score in own]) for own in models.values()])
            )
            for name in ("error", "without_forecast", "ernest", "coverage", "seconds")
        }
        count = sum(len(own) for own in models.values())
        print(
            f"{source:28} {dimension:9} {kind:14} {len(models):6d} "
            f"{count:5d} {figures['error']:6.1%} {figures['without_forecast']:12.1%}"
            f" {figures['ernest']:7.1%} {figures['coverage']:9.0%} {figures['seconds']:6.2f}"
        )
        means[kind].append((figures["error"], figures["ernest"]))
    for kind, pairs in means.items():
        own, ernest = np.mean(pairs, axis=0)
        better = sum(mine <= rival for mine, rival in pairs)
        print(
            f"mean of the {len(pairs)} {kind} lines: {own:.1%}, "
            f"Ernest {ernest:.1%} ({ernest / own:.2f}x); at least as good in {better}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=reading.existing, required=True)
    parser.add_argument("--only", default="", help="starts of the names of sources, with commas")
    every = "workers,steps,cores,work,nodes,links"
    parser.add_argument("--along", default=every, help="dimensions, with commas")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--inner", type=int, default=4)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--cells", action="store_true", help="repeats of a cell count by their median")
    parser.add_argument("--kinds", default="step,epoch", help="times that are scored, with commas")
    parser.add_argument("--no-blind", action="store_true", help="not without our own forecast")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wanted = tuple(options.only.split(",")) if options.only else ("",)
    kinds = tuple(f"{kind}s" for kind in options.kinds.split(","))
    found = [
        series
        for source in (own_and_runs, tables)
        for series in source(options.data, wanted)
        if series.source.startswith(wanted) and (", " not in series.source or series.source.endswith(kinds))
    ]
    found = [by_cell(series) for series in found] if options.cells else found
    items = [
        (series, *part)
        for series in found
        for part in parts(series, options.along.split(","), options.runs, options.seeds, options.inner)
    ]
    random.Random(0).shuffle(items)
    scores = []
    for one in fan_out(score, items, shared=not options.no_blind, processes=options.processes):
        scores.append(one)
        if options.json:
            options.json.write_text(json.dumps([dataclasses.asdict(each) for each in scores], indent=1))
    show(scores)


if __name__ == "__main__":
    reading.run(main)
