"""Scores what each part of ScaleDL adds on runs of families, devices and scales that were left out.

    python benchmarks/scaledl_cases.py --data DIR --cache DIR
    python benchmarks/scaledl_ablation.py --cache DIR [--only families devices scales] [--seen] [--ship DIR]

Every run is forecast by operator models that have not seen its family (``scaledl_cases.py``), so that what
the networks learn is what such forecasts miss; --seen lets them learn from forecasts whose operator models
have seen all families (``scaledl_cases.py --shipped``) instead, and asks them about the others. Three splits:
the families of a fold, the devices of a fold, and of each source the largest third of its numbers of devices,
left out of all sources. Networks learn from at most 80 runs of a source. Each fold that is done is kept in
the cache; some ten minutes on one core.
--ship src/foretrain/predictors/scaledl/fitted learns from all sources and writes what the package ships.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from sklearn.ensemble import ExtraTreesRegressor

import reading
import scaledl_cases
from foretrain.catalog import Catalog
from foretrain.evaluate import Scores
from foretrain.predictors.deletepop.calibration import without_memory
from foretrain.predictors.scaledl.correction import Place
from foretrain.predictors.scaledl.graph import NODE_COLUMNS, PLAN_COLUMNS, RUN_COLUMNS, LayerGraph
from foretrain.predictors.scaledl.network import Known, free_network, train
from foretrain.predictors.scaledl.predictor import ScaleDLPredictor

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

FOLDS = 5
MOST = 80
"""Runs of a source that are learned from."""
LEAST = 5
"""Runs of a source in a split below which it does not count in the mean."""
SPLITS = ("families", "devices", "scales")


class Study:
    """All runs, and what is known of each."""

    def __init__(self, cache: Path, seen: bool = False) -> None:
        self.cases = scaledl_cases.read_all(cache)
        facts = [case.facts for case in self.cases]
        self.source, self.family, self.mode = (
            np.array([str(one[name]) for one in facts]) for name in ("source", "family", "mode")
        )
        self.device = np.array([without_memory(one["device"]) for one in facts])
        self.devices = np.array([one["devices"] for one in facts])
        self.fold = np.array([one["fold"] for one in facts])
        self.measured_s, self.measured_busy_s = (
            np.array([one[name] for one in facts]) for name in ("measured_s", "measured_busy_s")
        )
        self.known = [known(case) for case in self.cases]
        self.taught = self.known
        """What networks learn from."""
        if seen:
            others = {case.facts["key"]: known(case) for case in scaledl_cases.read_all(cache, shipped=True)}
            self.taught = [others[case.facts["key"]] for case in self.cases]
        self.base_s, self.additive_s, self.busy_s = (
            np.array([getattr(case.graph, name) for case in self.cases])
            for name in ("base_s", "additive_s", "busy_s")
        )

    def tests(self, split: str) -> list[Mask]:
        """The runs that each fold of a split leaves out."""
        if split == "families":
            return [self.fold == fold for fold in range(FOLDS)]
        if split == "devices":
            filled, dealt = [0] * FOLDS, {}
            for name, count in Counter(self.device.tolist()).most_common():
                place = min(range(FOLDS), key=lambda i: filled[i])
                dealt[name], filled[place] = place, filled[place] + count
            places = np.array([dealt[name] for name in self.device.tolist()])
            return [places == fold for fold in range(FOLDS)]
        large = np.zeros(len(self.known), dtype=np.bool_)
        for source in set(self.source.tolist()):
            mine = self.source == source
            sizes = np.unique(self.devices[mine])
            if len(sizes) > 1:
                large[mine] = self.devices[mine] > sizes[-1 - max(1, len(sizes) // 3)]
        return [large]

    def inside(self, test: Mask, most: int = MOST, seed: int = 0) -> list[int]:
        """Runs to learn from: at most so many of a source."""
        found: list[int] = []
        for source in dict.fromkeys(self.source.tolist()):
            mine = np.flatnonzero((self.source == source) & ~test).tolist()
            found += sorted(random.Random(seed).sample(mine, min(most, len(mine))))
        return found


def known(case: scaledl_cases.Known) -> Known:
    facts = case.facts
    return Known(
        graph=case.graph,
        family=facts["family"],
        measured_s=facts["measured_s"],
        place=Place(
            device=without_memory(facts["device"]),
            framework=facts["framework"],
            mode=facts["mode"],
            devices=facts["devices"],
        ),
    )


# Methods: logarithms that are added to the forecasts of the engine


def graph_only(study: Study, inside: Sequence[int], test: Sequence[int]) -> Array:
    """No operator models: FLOPs, bytes, counts and the plan, and what the device's data sheet says."""
    middle_s = float(np.exp(np.log(study.measured_s[list(inside)]).mean()))
    bare = {i: dataclasses.replace(study.known[i], graph=_bare(study, i, middle_s)) for i in [*inside, *test]}
    answers = free_network([bare[i] for i in inside], [bare[i] for i in test])
    logs: Array = np.log(middle_s) + answers - np.log(study.base_s[list(test)])
    return logs


def _bare(study: Study, place: int, base_s: float) -> LayerGraph:
    graph, facts = study.cases[place].graph, study.cases[place].facts
    left_out = ("device_time", "host_time", "device_share", "host_share", "exposed")
    columns = [i for i, name in enumerate(NODE_COLUMNS) if name not in left_out]
    moved = np.expm1(graph.nodes[:, NODE_COLUMNS.index("bytes")])
    sizes = [
        np.log1p(np.expm1(graph.nodes[:, NODE_COLUMNS.index(name)].astype(np.float64)).sum())
        for name in ("flops", "bytes", "kernels", "sent")
    ]
    device = Catalog.load().device(facts["device"])
    sheet = [np.log(device.memory_bytes_per_s), np.log(device.peak_flops("bf16"))]
    run = [*sizes, *sheet, *graph.run[[RUN_COLUMNS.index(name) for name in PLAN_COLUMNS]]]
    return dataclasses.replace(
        graph,
        nodes=np.ascontiguousarray(graph.nodes[:, columns]),
        run=np.array(run, dtype=np.float32),
        share=(moved / max(float(moved.sum()), 1e-9)).astype(np.float32),
        base_s=base_s,
        busy_s=base_s,
    )


def trees(study: Study, inside: Sequence[int], test: Sequence[int]) -> Array:
    """The control: the same correction by trees from the run-level features, without the graph."""
    columns = np.array([one.graph.run for one in study.known], dtype=np.float64)
    target = np.log(study.measured_s / study.base_s)
    counts = Counter(study.source[list(inside)].tolist())
    weights = [1.0 / np.sqrt(counts[source]) for source in study.source[list(inside)].tolist()]
    model = ExtraTreesRegressor(200, min_samples_leaf=4, max_features=0.4, random_state=0)
    model.fit(columns[list(inside)], target[list(inside)], sample_weight=weights)
    return np.asarray(model.predict(columns[list(test)]))


def full(study: Study, inside: Sequence[int], test: Sequence[int], seed: int = 0) -> Mapping[str, Array]:
    """The correction as it counts, its intervals, and the correction without its gate."""
    correction, _ = train([study.taught[i] for i in inside], seed=seed)
    asked = [study.known[i] for i in test]
    found = [correction.log_factor(one.graph, one.place) for one in asked]
    bounds = [correction.factors[correction.region.trust(one.place)] for one in asked]
    print(f"  shares {json.dumps(correction.gates)}", flush=True)
    return {
        "full": np.array(found),
        "not gated": correction.raw([one.graph for one in asked]),
        "low": np.log([one.low for one in bounds]),
        "high": np.log([one.high for one in bounds]),
    }


METHODS: Mapping[str, Callable[[Study, Sequence[int], Sequence[int]], Array]] = {
    "GNN only": graph_only,
    "control": trees,
}


def run(study: Study, split: str, cache: Path) -> dict[str, Array]:
    """What every method adds to the logarithm of the engine's forecast, of every run; NaN where a run was in
    no test. With other residuals to learn from only the networks differ."""
    found: dict[str, Array] = {}
    seen = study.taught is not study.known
    methods = {} if seen else METHODS
    for number, test in enumerate(study.tests(split)):
        path = cache / f"ablation-{split}-{number}{'-seen' if seen else ''}.json"
        places = np.flatnonzero(test).tolist()
        if not path.exists():
            print(f"{split} {number}: {len(places)} runs left out", flush=True)
            inside = study.inside(test)
            answers = {name: method(study, inside, places).tolist() for name, method in methods.items()}
            answers |= {name: values.tolist() for name, values in full(study, inside, places).items()}
            path.write_text(json.dumps(answers))
        for name, values in json.loads(path.read_text()).items():
            found.setdefault(name, np.full(len(test), np.nan))[places] = values
    return found


# Figures


def report(study: Study, split: str, found: Mapping[str, Array]) -> list[str]:
    """A table of a split: mean relative errors by source, and in the mean over sources."""
    forecasts = {
        "additive": study.additive_s,
        "layer-wise": study.base_s,
        **{
            name: study.base_s * np.exp(found[name])
            for name in (*METHODS, "not gated", "full")
            if name in found
        },
    }
    lines = [
        f"| {split} left out | runs | {' | '.join(forecasts)} | RMSE layer-wise | RMSE full | 80 % |",
        "|---" * (len(forecasts) + 5) + "|",
    ]
    table, squares = [], []
    asked = ~np.isnan(found["full"])
    for source in dict.fromkeys(study.source.tolist()):
        mine = asked & (study.source == source)
        if not mine.any():
            continue
        measured = study.measured_s[mine]
        scores = [Scores.of(measured, values[mine]) for values in forecasts.values()]
        errors, rmse = [one.mape for one in scores], [one.rmse for one in scores]
        left = np.log(measured / study.base_s[mine]) - found["full"][mine]
        inside = float(((found["low"][mine] <= left) & (left <= found["high"][mine])).mean())
        if mine.sum() >= LEAST:
            table.append(errors)
            squares.append([one / rmse[1] for one in rmse])
        cells = " | ".join(f"{one:.1%}" for one in errors)
        plain, whole = rmse[1], rmse[-1]
        lines.append(f"| {source} | {mine.sum()} | {cells} | {plain:.3g} s | {whole:.3g} s | {inside:.0%} |")
    means, ratios = np.mean(table, axis=0), np.exp(np.mean(np.log(squares), axis=0))
    lines.append(f"| mean of sources | | {' | '.join(f'{one:.1%}' for one in means)} | | | |")
    lines.append(f"| RMSE over layer-wise | | {' | '.join(f'{one:.2f}' for one in ratios)} | | | |")
    lines += ["", f"full over layer-wise: {means[-1] / means[1] - 1:+.1%}"]
    lines.append(f"RMSE of additive over full: {ratios[0] / ratios[-1]:.2f}")
    return [*lines, *_busy(study, found)]


def _busy(study: Study, found: Mapping[str, Array]) -> list[str]:
    """The busy time, which is not corrected, by operator models without the family."""
    lines = []
    for mode in ("train", "infer"):
        mine = ~np.isnan(found["full"]) & (study.mode == mode) & (study.measured_busy_s > 0)
        if mine.any():
            busy = Scores.of(study.measured_busy_s[mine], study.busy_s[mine])
            lines.append(f"busy time, {mode}, {busy.n} runs: {busy.mape:.1%}, median {busy.median_ape:.1%}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=reading.existing, required=True)
    parser.add_argument("--only", nargs="*", default=list(SPLITS), choices=SPLITS)
    parser.add_argument(
        "--seen", action="store_true", help="learn from forecasts that have seen all families"
    )
    parser.add_argument("--ship", type=Path, help="folder of the predictor that learns from all")
    options = parser.parse_args()
    study = Study(options.cache, options.seen)
    if options.ship:
        nothing = np.zeros(len(study.known), dtype=np.bool_)
        learned, _ = train([study.known[i] for i in study.inside(nothing)])
        ScaleDLPredictor(None, learned).save(options.ship)
        print(json.dumps({"gates": learned.gates, "factors": learned.factors}, indent=1))
        return
    for split in options.only:
        print("\n".join(["", *report(study, split, run(study, split, options.cache))]), flush=True)


if __name__ == "__main__":
    reading.run(main)
