"""Scores PredictDDL on architectures and cluster sizes that were not seen, as its paper does.

    python benchmarks/predictddl.py score --runs data/cpu16_campaign.jsonl.zst [--embedding FILE ...]
                                          [--results FILE] [--plot FILE]
    python benchmarks/predictddl.py score --runs timm_rtx3090.jsonl --one-each --folds 5
    python benchmarks/predictddl.py models-out --runs data/links_idle.jsonl.zst --known FILE ...
    python benchmarks/predictddl.py select --runs DIR --out runs.jsonl
    python benchmarks/predictddl.py speed --runs data/cpu16_campaign.jsonl.zst

Beside it stand Ernest, CherryPick, a FLOPs regression and DeletePop. Leave-one-architecture-out and
leave-family-out: whoever forecasts a run has learned from no run of its architecture (its family). Ernest and
CherryPick then put all other architectures into one law; beside that they are scored with profiling runs of
the very workload. ``models-out`` leaves the models of one file out of all files, one at a time. ``select``
writes the public runs that the shipped predictors of GPUs learn from.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import reading
from foretrain.architectures import family
from foretrain.capture import cache, capture_job
from foretrain.errors import ForetrainError, UnsupportedJob, first_line
from foretrain.evaluate import Scores
from foretrain.measure.candidates import Candidates
from foretrain.measure.design import design
from foretrain.predictors import get
from foretrain.predictors.base import Predictor
from foretrain.predictors.cherrypick import CherryPickPredictor
from foretrain.predictors.ernest import TERMS, ErnestPredictor, terms
from foretrain.predictors.flops_regression import FlopsPredictor
from foretrain.predictors.predictddl.predictor import PredictDDLPredictor
from foretrain.predictors.seen import workload_key
from foretrain.run import Run, read_runs

Array = npt.NDArray[np.float64]
Groups = Callable[[Run], str]
PROFILED = 4
"""Runs of a workload that Ernest and CherryPick are given, by Ernest's design."""
PLOTTED = (
    "Ernest, all workloads in one law",
    "FLOPs regression",
    "PredictDDL, paper's form, parameters",
    "PredictDDL, ratio form, parameters",
)


# Data


def read(path: Path) -> list[Run]:
    """Runs of training with a step time."""
    return [
        run
        for _, run in read_runs(path)
        if run.job.workload.training.mode == "train" and run.measured.get("step_time_s")
    ]


def one_each(runs: Sequence[Run]) -> list[Run]:
    """The last run of each architecture whose images are stored channel by channel."""
    return list(
        {architecture(run): run for run in runs if not run.job.workload.training.channels_last}.values()
    )


def traced(runs: Sequence[Run]) -> list[Run]:
    """The runs whose model can be traced; the others are named."""
    found = []
    for run in runs:
        try:
            capture_job(run.job)
            found.append(run)
        except ForetrainError as error:
            print(f"left out: {architecture(run)}: {first_line(error)}")
    return found


def architecture(run: Run) -> str:
    return run.job.workload.model.label


def kin(run: Run) -> str:
    return family(run.job.workload.model)


def splits(
    runs: Sequence[Run], of: Groups, at_most: int | None = None
) -> Iterator[tuple[list[int], list[int]]]:
    """For each group: the runs of the others, the runs of it; groups joined to ``at_most`` folds."""
    names = sorted({of(run) for run in runs})
    folds = min(at_most or len(names), len(names))
    for fold in range(folds):
        held = {name for number, name in enumerate(names) if number % folds == fold}
        yield (
            [i for i, run in enumerate(runs) if of(run) not in held],
            [i for i, run in enumerate(runs) if of(run) in held],
        )


def keep_graphs() -> None:
    """Hold the graphs of all runs in memory: every fold asks for them again."""
    cache.read_graph = functools.lru_cache(maxsize=None)(cache.read_graph.__wrapped__)


PUBLIC = ("ets_t4", "pollux_t4", "nvidia_deeplearningexamples")
"""Public runs of data-parallel training on T4 and A100, beside those of ``timm_rtx3090``."""
SAMPLED = 200
"""Runs of ``ets_t4`` that are drawn: each has classes of its own and so a graph of its own."""


def select(options: argparse.Namespace) -> None:
    """Write the public runs that the shipped predictors of GPUs learn from, without those on V100."""
    chosen = one_each(read(options.runs / "timm_rtx3090.jsonl"))
    for name in PUBLIC:
        runs = read(options.runs / f"{name}.jsonl")
        if name == "ets_t4":
            random.Random(0).shuffle(runs)
            runs = runs[:SAMPLED]
        chosen += [run for run in runs if not run.job.cluster.device.name.startswith("v100")]
    options.out.write_text("".join(json.dumps(run.to_dict()) + "\n" for run in chosen))
    print(f"{len(chosen)} runs in {options.out}")


# Scores


def forecasts(
    make: Callable[[], Predictor], runs: Sequence[Run], parts: Sequence[tuple[list[int], list[int]]]
) -> tuple[Array, Array, Array]:
    """Medians and bounds of the 80 % interval of every run; not a number where there is none."""
    found = np.full((3, len(runs)), np.nan)
    for known, asked in parts:
        try:
            predictor = make().fit([runs[i] for i in known])
        except ForetrainError:
            continue
        for i in asked:
            try:
                estimate = predictor.predict(runs[i].job)["step_time_s"]
                found[:, i] = estimate.median, estimate.low, estimate.high
            except UnsupportedJob:
                continue
    return found[0], found[1], found[2]


def as_shipped(name: str, runs: Sequence[Run]) -> tuple[Array, Array, Array]:
    """The same of a predictor with what it comes with."""
    predictor, found = get(name), np.full((3, len(runs)), np.nan)
    for i, run in enumerate(runs):
        with contextlib.suppress(UnsupportedJob):
            estimate = predictor.predict(run.job)["step_time_s"]
            found[:, i] = estimate.median, estimate.low, estimate.high
    return found[0], found[1], found[2]


def profiling(runs: Sequence[Run], count: int = PROFILED) -> list[tuple[list[int], list[int]]]:
    """For each workload with enough runs: those that Ernest's A-optimal design picks, and the others."""
    by_workload: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        by_workload.setdefault(workload_key(run.job), []).append(i)
    parts = []
    for places in by_workload.values():
        rows = np.array([terms(runs[i].job) for i in places])
        cost = np.array([runs[i].measured["step_time_s"] * runs[i].job.cluster.world_size for i in places])
        if len({tuple(row) for row in rows.tolist()}) <= count:
            continue
        candidates = Candidates(names=TERMS, features=rows, cost_s=cost, labels=[{"run": i} for i in places])
        chosen = {places[i] for i in design("a-optimal", candidates, count=count).chosen.tolist()}
        same = {json.dumps(terms(runs[i].job)) for i in chosen}
        parts.append(
            (
                sorted(chosen),
                [i for i in places if i not in chosen and json.dumps(terms(runs[i].job)) not in same],
            )
        )
    return parts


def line(name: str, measured: Array, found: tuple[Array, Array, Array]) -> str:
    median, low, high = found
    there = np.isfinite(median)
    if not there.any():
        return f"| {name} | 0 | | | | |"
    scores = Scores.of(measured[there], median[there], low[there], high[there])
    cells = " | ".join(f"{share:.1%}" for share in (scores.mape, scores.median_ape, scores.p90_ape))
    return f"| {name} | {scores.n} | {cells} | {scores.coverage:.0%} |"


def wanted(name: str, only: Sequence[str]) -> bool:
    return not only or any(part in name for part in only)


def contenders(
    embeddings: Mapping[str, Path], only: Sequence[str] = ()
) -> dict[str, Callable[[], Predictor]]:
    """All that learn from runs of other architectures, or ``only`` those with one of these in their name."""
    made: dict[str, Callable[[], Predictor]] = {
        "Ernest, all workloads in one law": lambda: ErnestPredictor(pooled=True),
        "CherryPick, all workloads in one process": lambda: CherryPickPredictor(pooled=True),
        "FLOPs regression": FlopsPredictor,
        "PredictDDL, ratio form, no embedding": lambda: PredictDDLPredictor(embedding=None),
    }
    for label, path in embeddings.items():
        made[f"PredictDDL, ratio form, {label}"] = functools.partial(PredictDDLPredictor, embedding=path)
        made[f"PredictDDL, paper's form, {label}"] = functools.partial(
            PredictDDLPredictor, form="paper", embedding=path
        )
    return {name: make for name, make in made.items() if wanted(name, only)}


def score(options: argparse.Namespace) -> None:
    keep_graphs()
    runs = traced(one_each(read(options.runs)) if options.one_each else read(options.runs))
    measured = np.array([run.measured["step_time_s"] for run in runs])
    embeddings = {path.stem: path for path in options.embedding}
    kept: dict[str, Any] = {"measured": measured.tolist(), "labels": [architecture(run) for run in runs]}
    head = [
        "",
        "| predictor | runs | MAPE | median | p90 | 80 % intervals hold |",
        "|---|---|---|---|---|---|",
    ]
    for title, of in (("leave one architecture out", architecture), ("leave a family out", kin)):
        parts = list(splits(runs, of, options.folds))
        print(f"\n{title}: {len(runs)} runs, {len(parts)} folds", *head, sep="\n", flush=True)
        if of is architecture and wanted("DeletePop", options.only):
            print(line("DeletePop, as shipped", measured, as_shipped("deletepop", runs)), flush=True)
        for name, make in contenders(embeddings, options.only).items():
            found = forecasts(make, runs, parts)
            kept[f"{title}: {name}"] = [some.tolist() for some in found]
            print(line(name, measured, found), flush=True)
    if len({run.job.cluster.world_size for run in runs}) > 1:
        _score_scales(runs, measured, contenders(embeddings, options.only), kept, head)
    if options.results:
        options.results.write_text(json.dumps(kept))
    if options.plot:
        plot(kept, options.plot)


def models_out(options: argparse.Namespace) -> None:
    """The models of ``--runs`` one at a time, learned from all files' runs of the others."""
    keep_graphs()
    asked = traced(read(options.runs))
    runs = asked + traced([run for path in options.known for run in read(path)])
    measured = np.array([run.measured["step_time_s"] for run in runs])
    held = range(len(asked))
    print(
        f"models out: {len(asked)} runs",
        "| model | runs | MAPE | median | p90 | 80 % intervals hold |",
        "|---|---|---|---|---|---|",
        sep="\n",
    )
    every = np.full((3, len(runs)), np.nan)
    for name in sorted({architecture(run) for run in asked}):
        known = [i for i, run in enumerate(runs) if architecture(run) != name]
        found = np.array(
            forecasts(
                PredictDDLPredictor, runs, [(known, [i for i in held if architecture(runs[i]) == name])]
            )
        )
        every = np.where(np.isfinite(found), found, every)
        print(line(name, measured, (found[0], found[1], found[2])), flush=True)
    print(line("all", measured, (every[0], every[1], every[2])))


def _score_scales(
    runs: Sequence[Run],
    measured: Array,
    makers: Mapping[str, Callable[[], Predictor]],
    kept: Mapping[str, Any],
    head: Sequence[str],
) -> None:
    """Cluster sizes that were not seen, and Ernest with the runs that it needs."""
    sizes = np.array([run.job.cluster.world_size for run in runs])
    large = [(np.flatnonzero(sizes <= 4).tolist(), np.flatnonzero(sizes > 4).tolist())]
    print(
        f"\nunseen cluster sizes: learned up to 4 workers, forecast {len(large[0][1])} runs of more",
        *head,
        sep="\n",
    )
    for name, make in {
        "Ernest, a law for each workload": ErnestPredictor,
        "CherryPick, a process for each workload": CherryPickPredictor,
        **makers,
    }.items():
        print(line(name, measured, forecasts(make, runs, large)), flush=True)
    for count in (PROFILED, PROFILED + 1):
        _score_profiled(runs, measured, kept, head, count)


def _score_profiled(
    runs: Sequence[Run], measured: Array, kept: Mapping[str, Any], head: Sequence[str], count: int
) -> None:
    """Ernest and CherryPick with runs of the very workload, beside forecasts without any of its model."""
    parts = profiling(runs, count)
    asked = [i for _, some in parts for i in some]
    print(
        f"\nwith {count} profiling runs of each workload (Ernest's "
        f"design): {len(asked)} other runs of {len(parts)} workloads",
        *head,
        sep="\n",
    )
    for name, make in {"Ernest": ErnestPredictor, "CherryPick": CherryPickPredictor}.items():
        print(line(f"{name}, given the runs", measured, forecasts(make, runs, parts)), flush=True)
    for name in [key for key in kept if key.startswith("leave one architecture out: PredictDDL")]:
        found = np.full((3, len(runs)), np.nan)
        found[:, asked] = np.array(kept[name])[:, asked]
        print(
            line(
                f"{name.partition(': ')[2]}, no run of the architecture",
                measured,
                (found[0], found[1], found[2]),
            ),
            flush=True,
        )


def plot(kept: Mapping[str, Any], path: Path) -> None:
    """Predicted against measured on logarithmic axes, a panel for each predictor."""
    start = "leave one architecture out: "
    names = [start + name for name in PLOTTED if start + name in kept]
    measured = np.array(kept["measured"])
    ends = (
        float(np.floor(np.log10(measured.min()) * 2) / 2),
        float(np.ceil(np.log10(measured.max()) * 2) / 2),
    )
    panels = [
        _panel(name.removeprefix(start), measured, np.array(kept[name][0]), ends, 300 * number)
        for number, name in enumerate(names)
    ]
    size = f'width="{300 * len(names)}" height="330" font-family="sans-serif" font-size="12"'
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><rect '
        f'width="100%" height="100%" fill="white"/>{"".join(panels)}</svg>\n'
    )


def _panel(title: str, measured: Array, predicted: Array, ends: tuple[float, float], left: int) -> str:
    low, high = ends
    side = 230

    def place(values: Array) -> Array:
        return np.clip((np.log10(values) - low) / (high - low), 0, 1) * side

    there = np.isfinite(predicted)
    pairs = zip(place(measured[there]), side - place(predicted[there]), strict=True)
    points = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="#1f77b4" fill-opacity="0.4"/>' for x, y in pairs
    )
    decades = [10.0**power for power in range(int(np.ceil(low)), int(np.floor(high)) + 1)]
    ticks = "".join(
        f'<text x="{place(np.array([one]))[0]:.0f}" y="{side + 16}" text-anchor="middle">{one:g}</text>'
        f'<text x="-6" y="{side - place(np.array([one]))[0] + 4:.0f}" '
        f'text-anchor="end">{one:g}</text>'
        for one in decades
    )
    frame = f'<rect width="{side}" height="{side}" fill="none" stroke="black"/>'
    frame += f'<line x1="0" y1="{side}" x2="{side}" y2="0" stroke="grey"/>'
    words = f'<text x="0" y="-10">{title}</text>'
    words += f'<text x="{side / 2}" y="{side + 34}" text-anchor="middle">measured step (s)</text>'
    return f'<g transform="translate({left + 45}, 40)">{frame}{points}{ticks}{words}</g>'


# Speed


def speed(options: argparse.Namespace) -> None:
    """Seconds from a new workload to its forecast; CPU time too, for machines with other work."""
    runs = read(options.runs)
    asked = [run for run in runs if run.job.cluster.world_size == 4][::7]
    start, busy = time.perf_counter(), time.process_time()
    predictor = PredictDDLPredictor().fit(runs)
    print(
        f"PredictDDL learns from {len(runs)} runs in {time.perf_counter() - start:.1f} "
        f"s, {time.process_time() - busy:.1f} s of it on the CPU"
    )
    predictor.predict(asked[0].job)
    steps: dict[str, Callable[[Run], object]] = {
        "tracing the model": lambda run: capture_job(run.job, refresh=True),
        "regression": lambda run: predictor.predict(run.job),
        "a graph that was seen": lambda run: predictor.predict(run.job),
    }
    times: dict[str, list[tuple[float, float]]] = {what: [] for what in steps}
    for run in asked[1:]:
        for what, do in steps.items():
            start, busy = time.perf_counter(), time.process_time()
            do(run)
            times[what].append((time.perf_counter() - start, time.process_time() - busy))
    for what, some in times.items():
        wall, busy = np.median(np.array(some), axis=0) * 1e3
        print(f"PredictDDL, {what}: median of {len(some)} {wall:.1f} ms, {busy:.1f} ms of it on the CPU")
    parts = profiling(runs)
    fits, measuring = [], []
    for known, others in parts:
        start = time.perf_counter()
        law = ErnestPredictor().fit([runs[i] for i in known])
        law.predict(runs[(others or known)[0]].job)
        fits.append(time.perf_counter() - start)
        measuring.append(sum(float(runs[i].provenance.get("seconds", 0.0)) for i in known))
    print(
        f"Ernest: fit and predict median {np.median(fits) * 1e3:.1f} "
        f"ms, after profiling runs that took {np.median(measuring):.1f} s (median)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for name, what in (
        ("score", score),
        ("models-out", models_out),
        ("select", select),
        ("speed", speed),
    ):
        command = commands.add_parser(name)
        command.set_defaults(what=what)
        command.add_argument("--runs", type=reading.existing, required=True)
        if name == "models-out":
            command.add_argument("--known", type=reading.existing, nargs="*", default=[])
        if name == "select":
            command.add_argument("--out", type=Path, required=True)
        if name == "score":
            command.add_argument(
                "--embedding",
                type=Path,
                action="append",
                default=[],
                help="a trained embedding; may be repeated",
            )
            command.add_argument(
                "--only",
                action="append",
                default=[],
                help="score predictors with this in their name; may be repeated",
            )
            command.add_argument("--folds", type=int, help="join architectures (families) to so many folds")
            command.add_argument(
                "--one-each",
                action="store_true",
                help="the last run of each architecture, images stored channel by channel",
            )
            command.add_argument("--results", type=Path, help="write every forecast (JSON)")
            command.add_argument("--plot", type=Path, help="write predicted against measured (SVG)")
    options = parser.parse_args()
    options.what(options)


if __name__ == "__main__":
    reading.run(main)
