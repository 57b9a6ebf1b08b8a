"""Scores what each part of ScaleDL adds, and D-optimal against random choice of the runs to learn from.

    python benchmarks/scaledl_ablation.py [--runs data/h200_steps.jsonl] [--cache DIR] [--results FILE]

Leave-model-out: every architecture family is forecast by operator models and networks that have not seen it.
The operator models of a fold take minutes to learn; ``--cache`` keeps them. The settings of the network were
fixed before any test fold was scored.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from sklearn.ensemble import ExtraTreesRegressor

import reading
from foretrain.architectures import family
from foretrain.evaluate import split_runs
from foretrain.job import Run, read_runs
from foretrain.measure.candidates import table_candidates
from foretrain.measure.design import design
from foretrain.predictors.conformal import Factors
from foretrain.predictors.deletepop import DeletePopPredictor
from foretrain.predictors.scaledl.network import train
from foretrain.predictors.scaledl.predictor import (
    NODE_COLUMNS,
    RUN_COLUMNS,
    LayerGraph,
    ScaleDLPredictor,
    intervals,
)

Array = npt.NDArray[np.float64]

BUDGETS = (60, 120)
SEEDS = 3
SIZES = ("flops", "bytes", "kernels", "launches")
FREE = 6.0
"""Bound of the logarithm when there is no step time to correct."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Part:
    """Some runs of a fold: what is known of them without measuring, and what was measured."""

    graphs: Sequence[LayerGraph]
    measured_s: Array
    kin: Sequence[str]

    def __getitem__(self, chosen: Sequence[int]) -> Part:
        return Part(
            graphs=[self.graphs[i] for i in chosen],
            measured_s=self.measured_s[list(chosen)],
            kin=[self.kin[i] for i in chosen],
        )

    @property
    def base_s(self) -> Array:
        return np.array([graph.base_s for graph in self.graphs])

    @property
    def columns(self) -> Array:
        """The run-level features."""
        return np.array([graph.run for graph in self.graphs], dtype=np.float64)


# Methods: runs to learn from and runs to forecast in, step times of the latter out


def device_sum(known: Part, asked: Part) -> Array:
    return np.exp(asked.columns[:, RUN_COLUMNS.index("device_time")])


def layer_wise(known: Part, asked: Part) -> Array:
    return asked.base_s


def graph_only(known: Part, asked: Part) -> Array:
    """No operator models: FLOPs, bytes and counts of the layers to the step time."""
    middle_s = float(np.exp(np.log(known.measured_s).mean()))
    network, _ = train(
        [_bare(graph, middle_s) for graph in known.graphs], known.measured_s, known.kin, bound=FREE
    )
    return middle_s * np.exp(network.log_factors([_bare(graph, middle_s) for graph in asked.graphs]))


def trees(known: Part, asked: Part) -> Array:
    """The control: the same correction by trees from the run-level features, without the graph."""
    model = ExtraTreesRegressor(300, min_samples_leaf=4, random_state=0)
    model.fit(known.columns, np.log(known.measured_s / known.base_s))
    return asked.base_s * np.exp(model.predict(asked.columns))


def full(known: Part, asked: Part, seed: int = 0) -> tuple[Array, Factors]:
    """The forecasts, and the bounds of their intervals."""
    network, held_out = train(known.graphs, known.measured_s, known.kin, seed=seed)
    return asked.base_s * np.exp(network.log_factors(asked.graphs)), intervals(known.measured_s / held_out)


DEVICE = "additive only: sum of device times"
LAYERS = "layer-wise only: host and device timeline (DeletePop, not calibrated)"
CONTROL = "layer-wise + trees on the run-level features (control)"
FULL = "full: layer-wise + GNN"
METHODS: Mapping[str, Callable[[Part, Part], Array]] = {
    DEVICE: device_sum,
    LAYERS: layer_wise,
    "GNN only: FLOPs, bytes and counts to step time": graph_only,
    CONTROL: trees,
}


def _bare(graph: LayerGraph, base_s: float) -> LayerGraph:
    """The graph without anything that an operator or host model said."""
    sizes = sizes_of(graph)
    columns = [NODE_COLUMNS.index(name) for name in NODE_COLUMNS if not name.endswith(("_time", "_share"))]
    share = np.expm1(graph.nodes[:, NODE_COLUMNS.index("bytes")])
    return dataclasses.replace(
        graph,
        nodes=np.ascontiguousarray(graph.nodes[:, columns]),
        run=sizes,
        share=share / max(float(share.sum()), 1e-9),
        base_s=base_s,
    )


def sizes_of(graph: LayerGraph) -> npt.NDArray[np.float32]:
    """Logarithms of the FLOPs, bytes, kernels and launches of the whole step."""
    columns = graph.nodes[:, [NODE_COLUMNS.index(name) for name in SIZES]].astype(np.float64)
    return np.log1p(np.expm1(columns).sum(axis=0)).astype(np.float32)


# Which runs to learn from


def choose(method: str, known: Part, count: int, seed: int) -> list[int]:
    """Runs by their run-level features: for D-optimal a log-quadratic model of them."""
    sizes = np.array([sizes_of(graph) for graph in known.graphs], dtype=np.float64)
    columns = dict(zip((*RUN_COLUMNS[:2], *SIZES), (*known.columns[:, :2].T, *sizes.T), strict=True))
    candidates = table_candidates(
        columns, known.base_s, [{"run": i} for i in range(len(known.graphs))], quadratic=True
    )
    return sorted(design(method, candidates, count=count, seed=seed).chosen.tolist())


# The study


def study(runs: Sequence[Run], cache: Path | None) -> dict[str, list[list[float]]]:
    """Forecasts of the runs of all folds, for each method and seed, in the order of the measured times."""
    choices = [(method, count) for count in BUDGETS for method in ("random", "d-optimal")]
    forecasts: dict[str, list[list[float]]] = {
        name: [[]] for name in ("fold", "measured", "low", "high", *METHODS, FULL)
    }
    forecasts.update({f"{method} {count}": [[] for _ in range(SEEDS)] for method, count in choices})
    for number, fold in enumerate(split_runs(runs, "leave-model-out")):
        assert fold.train is not None
        predictor = ScaleDLPredictor(
            operators_without(frozenset(family(runs[i].job.workload.model) for i in fold.test), cache, number)
        )
        known, asked = (part(predictor, [runs[i] for i in places]) for places in (fold.train, fold.test))
        forecasts["fold"][0] += [float(number)] * len(asked.graphs)
        forecasts["measured"][0] += asked.measured_s.tolist()
        for name, method in METHODS.items():
            forecasts[name][0] += method(known, asked).tolist()
        step_s, bounds = full(known, asked)
        for name, factor in ((FULL, 1.0), ("low", bounds.low), ("high", bounds.high)):
            forecasts[name][0] += (factor * step_s).tolist()
        print(f"fold {number}: compared", flush=True)
        for choice, count in choices:
            for seed in range(SEEDS):
                step_s, _ = full(known[choose(choice, known, count, seed)], asked, seed)
                forecasts[f"{choice} {count}"][seed] += step_s.tolist()
        print(f"fold {number}: done", flush=True)
    return forecasts


def operators_without(families: frozenset[str], cache: Path | None, number: int) -> DeletePopPredictor:
    path = None if cache is None else cache / f"fold{number}"
    if path is not None and path.exists():
        return DeletePopPredictor.load(path)
    learned = DeletePopPredictor().without(families=families)
    if path is not None:
        learned.save(path)
    return learned


def part(predictor: ScaleDLPredictor, runs: Sequence[Run]) -> Part:
    return Part(
        graphs=[predictor.layer_graph(run) for run in runs],
        measured_s=np.array([run.measured["step_time_s"] for run in runs]),
        kin=[family(run.job.workload.model) for run in runs],
    )


def report(forecasts: Mapping[str, list[list[float]]]) -> str:
    measured = np.array(forecasts["measured"][0])

    def errors(name: str, seed: int = 0) -> Array:
        return np.abs(np.array(forecasts[name][seed]) / measured - 1)

    lines = [
        f"{len(measured)} runs, leave-model-out",
        "",
        "| what | MAPE | median | p90 |",
        "|---|---|---|---|",
    ]
    for name in (*METHODS, FULL):
        error = errors(name)
        lines.append(
            f"| {name} | {error.mean():.1%} | {np.median(error):.1%} | {np.quantile(error, 0.9):.1%} |"
        )
    inside = (np.array(forecasts["low"][0]) <= measured) & (measured <= np.array(forecasts["high"][0]))
    fold, (plain, control, whole) = (
        np.array(forecasts["fold"][0]),
        (errors(name) for name in (LAYERS, CONTROL, FULL)),
    )
    by_fold = [
        (plain[fold == one].mean(), control[fold == one].mean(), whole[fold == one].mean())
        for one in np.unique(fold)
    ]
    lines += [
        "",
        "MAPE by fold, layer-wise / control / full: "
        + ", ".join(" / ".join(f"{value:.1%}" for value in row) for row in by_fold),
    ]
    busy = np.array(forecasts[DEVICE][0]) > 0.9 * np.array(forecasts[LAYERS][0])
    for what, chosen in (("device", busy), ("host", ~busy)):
        means = " / ".join(f"{error[chosen].mean():.1%}" for error in (plain, control, whole))
        lines.append(f"The same on the {chosen.sum()} runs that the {what} bounds: {means}")
    lines += ["", f"80 % intervals of the full model hold {inside.mean():.0%} of the runs", ""]
    lines += [
        "| runs to learn from | random, MAPE | random, median | D-optimal, MAPE | D-optimal, median |",
        "|---" * 5 + "|",
    ]
    for count in BUDGETS:
        cells = []
        for method in ("random", "d-optimal"):
            each = [errors(f"{method} {count}", seed) for seed in range(SEEDS)]
            for figure in (np.mean, np.median):
                values = [float(figure(error)) for error in each]
                cells.append(f"{np.mean(values):.1%} ± {np.std(values):.1%}")
        lines.append(f"| {count} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=reading.existing, default=Path("data/h200_steps.jsonl"))
    parser.add_argument("--cache", type=Path, help="folder that keeps the operator models of the folds")
    parser.add_argument("--results", type=Path, help="write every forecast (JSON)")
    options = parser.parse_args()
    forecasts = study([run for _, run in read_runs(options.runs)], options.cache)
    print(report(forecasts))
    if options.results:
        options.results.write_text(json.dumps(forecasts))


if __name__ == "__main__":
    reading.run(main)
