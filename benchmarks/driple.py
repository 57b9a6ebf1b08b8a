"""Scores Driple on runs of unseen models, every figure in every setting, beside baselines and the white box.

    python benchmarks/driple.py score METHOD... --results DIR [--by family|model|run] [--seeds 0 1 2]
    python benchmarks/driple.py table --results DIR [--by ...]
    python benchmarks/driple.py h200 METHOD...

The first makes forecasts of held-out runs, the second prints their errors, the third the H200's utilisation.
Methods: mean, flops, sums, whitebox; improved, and improved without one of its parts; the references gcn,
gin, gat and mpnn. A run is forecast by what has learned from runs of other architecture families only (or
other models; or, to show what a leak is worth, other runs). Errors: spans as shares of the measuring window
and utilisation in absolute terms; bytes per second and memory as the mean absolute logarithm of the ratio.
``driple_transfer.py`` is about new settings.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import reading
from foretrain.architectures import family
from foretrain.capture import capture_job
from foretrain.forecast import Forecast
from foretrain.graph import PHASES
from foretrain.job import Job
from foretrain.predictors.deletepop import DeletePopPredictor
from foretrain.predictors.driple.cases import Cases, network_module
from foretrain.predictors.driple.features import (
    MEANS,
    NETWORK_FIGURES,
    NODE_COLUMNS,
    SETTING_COLUMNS,
    TARGETS,
    TWELVE,
    Array,
    certain,
    figures_of,
    scaled,
    setting_columns,
    setting_of,
    unscaled,
    whole_columns,
    without_network,
)
from foretrain.predictors.driple.whitebox import Whitebox
from foretrain.run import Run, read_runs

CAMPAIGN = Path("data/cpu16_campaign.jsonl.zst")
H200, H200_LOAD = Path("data/h200_resources.jsonl.zst"), Path("data/h200_load.jsonl.zst")
H200_FOLDS = 5
LOADING = slice(SETTING_COLUMNS.index("data loader"), None)
FEWEST = 60
"""Samples of a setting that is scored by itself."""
SHOWN = (
    "device_utilization_idle_s",
    "device_utilization_active_s",
    "device_utilization_peak",
    "memory_utilization_peak",
    "network_rx_idle_s",
    "network_rx_active_s",
    "network_rx_peak",
)
"""The distinct figures: memory is held throughout, and on loopback what is sent is what is received."""
REFERENCES = ("gcn", "gin", "gat", "mpnn")


def remembering() -> DeletePopPredictor:
    """DeletePop with an answer kept for every job."""
    predictor = DeletePopPredictor()
    kept: dict[int, tuple[Job, Forecast]] = {}
    plain = predictor.predict

    def predict(job: Job) -> Forecast:
        if id(job) not in kept:
            kept[id(job)] = job, plain(job)
        return kept[id(job)][1]

    predictor.predict = predict  # type: ignore[method-assign]
    return predictor


# Methods: the runs, those learned from, those asked for; figures out


@dataclasses.dataclass(frozen=True, eq=False)
class Study:
    """Runs with what several methods need of them."""

    runs: Sequence[Run]
    schedules: DeletePopPredictor
    seed: int = 0

    @functools.cached_property
    def measured(self) -> Array:
        return np.stack([found for run in self.runs if (found := figures_of(run)) is not None])

    @functools.cached_property
    def families(self) -> list[str]:
        return [family(run.job.workload.model) for run in self.runs]

    @functools.cached_property
    def settings(self) -> list[str]:
        return [setting_of(run.job) for run in self.runs]

    @functools.cached_property
    def sums(self) -> Array:
        """Sums over the step of each run, and how its data is loaded."""
        return np.stack(
            [
                np.concatenate([whole_columns(graph), setting_columns(run.job, graph)[LOADING]])
                for run in self.runs
                for graph in [capture_job(run.job)]
            ]
        )

    @functools.cached_property
    def plain(self) -> Cases:
        """As the reference sees the runs."""
        return Cases.of([run.job for run in self.runs], list(self.measured), improved=False)

    @functools.cached_property
    def models(self) -> list[str]:
        return [str(run.job.workload.model.name) for run in self.runs]

    def with_seed(self, seed: int) -> Study:
        """The same runs, and what was computed of them."""
        other = copy.copy(self)
        object.__setattr__(other, "seed", seed)
        return other

    @functools.cached_property
    def memories(self) -> Array:
        """Of the machine of each run, where its memory is a share of the host's."""
        limits = [(run.provenance.get("resources") or {}).get("memory_limit_bytes", 0.0) for run in self.runs]
        return np.array(limits, dtype=np.float64)

    def corrected(self, known: Sequence[int]) -> Cases:
        """As the improved network sees them, the white box's constants learned from ``known`` runs of the
        same machine."""
        whole: Cases | None = None
        for memory in np.unique(self.memories):
            here = self.memories == memory
            levels = Whitebox(self.schedules).fit([self.runs[i] for i in known if here[i]]).levels
            cases = Cases.of(
                [run.job for run in self.runs], list(self.measured), levels=levels, schedules=self.schedules
            )
            whole = cases if whole is None else _with_rows(whole, here, cases)
        assert whole is not None
        return whole


def _with_rows(cases: Cases, chosen: Array, others: Cases) -> Cases:
    """The chosen runs as the others have them."""
    columns = {
        name: np.where(chosen[:, None], getattr(others, name), getattr(cases, name))
        for name in ("schedule", "settings")
    }
    return dataclasses.replace(cases, **columns)


def by_setting(
    study: Study, known: Sequence[int], asked: Sequence[int], one: Callable[[list[int], list[int]], Array]
) -> Array:
    """A method that knows one setting at a time."""
    found = np.full((len(asked), len(TARGETS)), np.nan)
    for setting in sorted({study.settings[i] for i in asked}):
        mine, theirs = ([i for i in some if study.settings[i] == setting] for some in (known, asked))
        if mine:
            found[[asked.index(i) for i in theirs]] = one(mine, theirs)
    return found


def mean(study: Study, known: list[int], asked: list[int]) -> Array:
    """The mean of the setting."""
    targets = scaled(study.measured)
    return by_setting(
        study, known, asked, lambda a, b: np.tile(unscaled(targets[a].mean(axis=0)), (len(b), 1))
    )


def flops(study: Study, known: list[int], asked: list[int]) -> Array:
    """A regression on the logarithm of FLOPs, per setting."""
    return _regression(study, known, asked, np.log(np.exp(study.sums[:, :2]).sum(axis=1))[:, None], 1e-3)


def sums(study: Study, known: list[int], asked: list[int]) -> Array:
    """A ridge regression on all sums over the step, per setting: what a graph network has to beat."""
    return _regression(study, known, asked, study.sums, 5.0)


def _regression(study: Study, known: list[int], asked: list[int], columns: Array, ridge: float) -> Array:
    targets = scaled(study.measured)

    def one(a: list[int], b: list[int]) -> Array:
        centre, scale = columns[a].mean(axis=0), np.maximum(columns[a].std(axis=0), 1e-2)
        here, there = (
            np.column_stack([np.ones(len(i)), np.clip((columns[i] - centre) / scale, -3, 3)]) for i in (a, b)
        )
        penalty = ridge * np.eye(here.shape[1])
        penalty[0, 0] = 0.0
        return unscaled(there @ np.linalg.solve(here.T @ here + penalty, here.T @ targets[a]))

    return by_setting(study, known, asked, one)


def whitebox(study: Study, known: list[int], asked: list[int]) -> Array:
    """The schedule's figures."""
    fitted = Whitebox(study.schedules).fit([study.runs[i] for i in known])
    return np.stack([fitted.figures(study.runs[i].job) for i in asked])


def improved(study: Study, known: list[int], asked: list[int]) -> Array:
    return _network(study, study.corrected(known), known, asked)


def _network(
    study: Study, cases: Cases, known: list[int], asked: list[int], members: int | None = None
) -> Array:
    kin = [study.families[i] for i in known]
    network, _ = network_module().train(cases.part(known).samples(), kin, seed=study.seed, members=members)
    return cases.part(asked).figures(network.figures(cases.part(asked).samples()))


def reference(kind: str, study: Study, known: list[int], asked: list[int]) -> Array:
    """The published network, one per setting."""

    def one(a: list[int], b: list[int]) -> Array:
        network, _ = network_module().train(
            study.plain.part(a).samples(), [study.families[i] for i in a], kind, seed=study.seed
        )
        return study.plain.part(b).figures(network.figures(study.plain.part(b).samples()))

    return by_setting(study, known, asked, one)


# The improved network without one of its parts


def without_whitebox(cases: Cases) -> Cases:
    """It learns the figures themselves; only what is certain is still the schedule's."""
    kept = np.zeros_like(cases.schedule)
    kept[cases.certain] = cases.schedule[cases.certain]
    return dataclasses.replace(cases, schedule=kept, settings=cases.settings[:, : len(SETTING_COLUMNS)])


def without_graph(cases: Cases) -> Cases:
    """A network over the sums, the setting and the white box's word."""
    nothing = np.zeros((2, 0), dtype=np.int64)
    return dataclasses.replace(
        cases,
        graphs=[dataclasses.replace(g, nodes=np.zeros_like(g.nodes), edges=nothing) for g in cases.graphs],
    )


def without_sums(cases: Cases) -> Cases:
    return dataclasses.replace(
        cases, graphs=[dataclasses.replace(g, whole=np.zeros(0, dtype=np.float32)) for g in cases.graphs]
    )


def without_direction(cases: Cases) -> Cases:
    """Edges go both ways, and no node knows its phase."""
    first = NODE_COLUMNS.index(PHASES[0])
    graphs = []
    for graph in cases.graphs:
        nodes = graph.nodes.copy()
        nodes[:, first : first + len(PHASES)] = 0.0
        both = np.unique(np.concatenate([graph.edges, graph.edges[::-1]], axis=1), axis=1)
        graphs.append(dataclasses.replace(graph, nodes=nodes, edges=both))
    return dataclasses.replace(cases, graphs=graphs)


def ablated(change: Callable[[Cases], Cases], study: Study, known: list[int], asked: list[int]) -> Array:
    return _network(study, change(study.corrected(known)), known, asked)


def per_setting(study: Study, known: list[int], asked: list[int]) -> Array:
    """Without the columns of the setting: a network for each."""
    cases = study.corrected(known)
    cases = dataclasses.replace(cases, settings=cases.settings[:, len(SETTING_COLUMNS) :])
    return by_setting(study, known, asked, lambda a, b: _network(study, cases, a, b))


def single(study: Study, known: list[int], asked: list[int]) -> Array:
    """One network in place of four."""
    return _network(study, study.corrected(known), known, asked, members=1)


METHODS: dict[str, Callable[[Study, list[int], list[int]], Array]] = {
    "mean": mean,
    "flops": flops,
    "sums": sums,
    "whitebox": whitebox,
    "improved": improved,
    "no-whitebox": functools.partial(ablated, without_whitebox),
    "no-settings": per_setting,
    "no-direction": functools.partial(ablated, without_direction),
    "no-graph": functools.partial(ablated, without_graph),
    "no-sums": functools.partial(ablated, without_sums),
    "one-member": single,
    "graph-alone": functools.partial(ablated, lambda cases: without_sums(without_whitebox(cases))),
    **{kind: functools.partial(reference, kind) for kind in REFERENCES},
}
SEEDLESS = ("mean", "flops", "sums", "whitebox")


# Scores


def read(path: Path, settings: Sequence[str] = ()) -> list[Run]:
    runs = [run for _, run in read_runs(path)]
    return [
        run
        for run in runs
        if figures_of(run) is not None and (not settings or setting_of(run.job) in settings)
    ]


FOLDS = 4


def folds(study: Study, by: str) -> list[set[int]]:
    """The rows of each fold; families or models in the order of their names, runs in a random order."""
    if by == "run":
        order = np.random.default_rng(0).permutation(len(study.runs)).tolist()
        return [set(order[fold::FOLDS]) for fold in range(FOLDS)]
    groups = study.families if by == "family" else study.models
    names = sorted(set(groups))
    return [{i for i, name in enumerate(groups) if name in names[fold::FOLDS]} for fold in range(FOLDS)]


def held_out(study: Study, method: str, rows: Sequence[int], by: str, file: Path) -> None:
    """The figures of each run by what has learned from other folds, or as the file holds them."""
    found = np.load(file) if file.exists() else np.full((len(study.runs), len(TARGETS)), np.nan)
    for number, fold in enumerate(folds(study, by)):
        asked = [i for i in rows if i in fold and np.isnan(found[i]).any()]
        known = [i for i in range(len(study.runs)) if i not in fold]
        if not asked:
            continue
        start = time.process_time()
        found[asked] = METHODS[method](study, known, asked)
        silent = [i for i in asked if certain(study.runs[i].job)[NETWORK_FIGURES].all()]
        if method not in REFERENCES:
            found[silent] = without_network(found[silent])
        np.save(file, found)
        print(
            f"{method}: by {by}, seed {study.seed}, fold {number}, "
            f"{len(asked)} runs, {time.process_time() - start:.1f} s",
            flush=True,
        )


def errors(found: Array, measured: Array) -> Array:
    return np.abs(scaled(found) - scaled(measured))


def large_settings(settings: Sequence[str]) -> list[str]:
    return [name for name in sorted(set(settings)) if settings.count(name) >= FEWEST]


def score(options: argparse.Namespace) -> None:
    study = Study(read(CAMPAIGN), remembering())
    options.results.mkdir(parents=True, exist_ok=True)
    wanted = options.settings or large_settings(study.settings)
    rows = [i for i, setting in enumerate(study.settings) if setting in wanted]
    for method in options.methods:
        for seed in options.seeds[: 1 if method in SEEDLESS else None]:
            held_out(
                study.with_seed(seed),
                method,
                rows,
                options.by,
                options.results / f"{options.by}_{method}_{seed}.npy",
            )


def table(options: argparse.Namespace) -> None:
    """Errors, the mean over seeds; and how the references compare with the improved network."""
    study = Study(read(CAMPAIGN), remembering())
    settings, columns = np.array(study.settings), [TARGETS.index(name) for name in SHOWN]
    names = [
        name.replace("_utilization", "").replace("network_rx", "network").removesuffix("_s") for name in SHOWN
    ]
    print(
        "| setting | method | "
        + " | ".join(names)
        + " | mean of 7 | mean of 12 |\n|---|---|"
        + "---|" * (len(names) + 2)
    )
    overall: dict[str, dict[str, Array]] = {}
    for setting in large_settings(study.settings):
        for method in METHODS:
            files = sorted(options.results.glob(f"{options.by}_{method}_*.npy"))
            each = [errors(np.load(file), study.measured)[settings == setting].mean(axis=0) for file in files]
            if not each or np.isnan(np.array(each)[:, : len(TWELVE)]).any():
                continue
            overall.setdefault(method, {})[setting] = np.array(each)
            _row(f"{setting} ({(settings == setting).sum()})", method, np.mean(each, axis=0), columns)
    for method, found in overall.items():
        seeds = np.mean(list(found.values()), axis=0)
        _row(f"mean of {len(found)}", f"**{method}**", seeds.mean(axis=0), columns)
        if len(seeds) > 1:
            print(
                f"  {method}, mean of 7 by seed: "
                + ", ".join(f"{figure:.4f}" for figure in seeds[:, columns].mean(axis=1))
            )
    for method in [name for name in overall if name in REFERENCES and "improved" in overall]:
        _compare(method, overall[method], overall["improved"], columns)


def _compare(method: str, theirs: dict[str, Array], ours: dict[str, Array], columns: Sequence[int]) -> None:
    """In the mean over settings and figures, and the cells in which the improved network is worse."""
    settings = [name for name in theirs if name in ours]
    reference, better = (
        np.stack([one[name].mean(axis=0)[columns] for name in settings]) for one in (theirs, ours)
    )
    worse = [
        f"{settings[i]} {SHOWN[j]} {better[i, j]:.4f} against {reference[i, j]:.4f}"
        for i, j in np.argwhere(better > reference + 5e-5).tolist()
    ]
    print(
        f"\n{method}: {reference.mean() / better.mean():.2f}x "
        f"the error of improved; worse in {len(worse)} of {better.size} cells"
    )
    print("\n".join(f"  {one}" for one in worse))


def _row(setting: str, method: str, each: Array, columns: Sequence[int]) -> None:
    cells = " | ".join(f"{each[i]:.3f}" for i in columns)
    print(
        f"| {setting} | {method} | {cells} | {each[columns].mean():.3f} | {each[: len(TWELVE)].mean():.3f} |"
    )


# The H200


def h200(options: argparse.Namespace) -> None:
    """Errors of every figure on unseen families of the H200, the mean over seeds, in all runs and in those
    with a loader and without."""
    runs = read(H200)
    known_more = read(H200_LOAD) if options.beside else []
    study = Study([*runs, *known_more], remembering())
    scored = range(len(runs))
    names = sorted({study.families[i] for i in scored})
    shown = [
        name for name in (*TWELVE, *MEANS) if np.nanstd(study.measured[: len(runs), TARGETS.index(name)]) > 0
    ]
    columns = [TARGETS.index(name) for name in shown]
    loads = np.array([run.job.workload.training.loader_rate is not None for run in runs])
    print(
        f"{len(runs)} runs of {len(names)} families\n| method | runs | "
        + " | ".join(map(_short, shown))
        + " | mean |"
    )
    print("|---|---|" + "---|" * (len(shown) + 1))
    for method in options.methods:
        each = []
        for seed in options.seeds[: 1 if method in SEEDLESS else None]:
            found = np.full(study.measured.shape, np.nan)
            for fold in range(H200_FOLDS):
                asked = [i for i in scored if study.families[i] in names[fold::H200_FOLDS]]
                apart = {study.families[i] for i in asked}
                known = [i for i in range(len(study.runs)) if study.families[i] not in apart]
                found[asked] = METHODS[method](study.with_seed(seed), known, asked)
            each.append(errors(found, study.measured)[: len(runs)])
        off = np.mean(each, axis=0)[:, columns]
        for which, rows in (("all", loads | True), ("no loader", ~loads), ("loader", loads)):
            mean = np.nanmean(off[rows], axis=0)
            cells = " | ".join(f"{one:.3f}" for one in mean)
            print(f"| {method} | {which} {rows.sum()} | {cells} | {mean.mean():.3f} |", flush=True)


def _short(name: str) -> str:
    return (
        name.replace("_utilization", "")
        .replace("network_", "")
        .replace("_bytes_per_s", "")
        .removesuffix("_s")
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    scoring, listing, gpu = (commands.add_parser(name) for name in ("score", "table", "h200"))
    for command, what in ((scoring, score), (listing, table), (gpu, h200)):
        command.set_defaults(run=what)
    for command in (scoring, gpu):
        command.add_argument("methods", nargs="+", choices=METHODS)
        command.add_argument("--seeds", type=int, nargs="+", default=[0])
    gpu.add_argument("--beside", action="store_true", help="learn from the averages of h200_load as well")
    for command, kind in ((scoring, Path), (listing, reading.existing)):
        command.add_argument("--results", type=kind, required=True)
        command.add_argument(
            "--by",
            choices=("family", "model", "run"),
            default="family",
            help="what a fold's runs have not in common",
        )
    scoring.add_argument("--settings", nargs="*", default=())
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    reading.run(main)
