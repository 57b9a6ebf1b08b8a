"""Driple on runs of unseen models: every figure in every setting, beside simple baselines and the white box; and transfer to a new setting.

    python benchmarks/driple.py score METHOD... --results DIR [--settings ...]    forecasts of held-out runs, one file per method
    python benchmarks/driple.py table --results DIR [--each]                      the errors
    python benchmarks/driple.py transfer --target "cpu ps 4"                      error and time against the number of target samples
    python benchmarks/driple.py h200 METHOD...                                    utilisation of the H200

Methods: mean, flops, sums, whitebox, improved, gcn, gin, gat, mpnn. A run is forecast by what has
learned from runs of other architecture families only. Errors: spans as shares of the measuring window and utilisation in absolute terms; bytes per
second and memory as the mean absolute logarithm of the ratio.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from foretrain.capture import capture_job
from foretrain.families import family
from foretrain.forecast import Forecast
from foretrain.job import Job, Run, read_runs
from foretrain.predictors.deletepop import DeletePopPredictor
from foretrain.predictors.driple import Cases, network_module
from foretrain.predictors.driple_features import (
    SETTING_COLUMNS,
    TARGETS,
    TWELVE,
    Array,
    exchanges,
    figures_of,
    scaled,
    setting_of,
    unscaled,
    whole_columns,
    without_network,
)  # fmt: skip
from foretrain.predictors.resources_whitebox import Whitebox

CAMPAIGN = Path("data/cpu16_campaign.jsonl.zst")
H200 = Path("data/h200_load.jsonl.zst")
FEWEST = 60
"""Samples of a setting that is scored by itself."""
SHOWN = ("device_utilization_idle_s", "device_utilization_active_s", "device_utilization_peak", "memory_utilization_peak",
         "network_rx_idle_s", "network_rx_active_s", "network_rx_peak")  # fmt: skip
"""The distinct figures: memory is held throughout, and on loopback what is sent is what is received."""
REFERENCES = ("gcn", "gin", "gat", "mpnn")


def remembering() -> DeletePopPredictor:
    """DeletePop with an answer kept for every job."""
    predictor = DeletePopPredictor()
    kept: dict[int, tuple[Job, Forecast]] = {}
    plain = predictor.predict

    def predict(job: Job) -> Forecast:
        if id(job) not in kept:
            kept[id(job)] = job, dataclasses.replace(plain(job), timeline=None, memory=None)
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
        """Sums over the step of each run."""
        return np.stack([whole_columns(capture_job(run.job)) for run in self.runs])

    @functools.cached_property
    def plain(self) -> Cases:
        """As the reference sees the runs."""
        return Cases.of([run.job for run in self.runs], list(self.measured), improved=False)

    def corrected(self, known: Sequence[int]) -> Cases:
        """As the improved network sees them, the white box's constants learned from ``known``."""
        levels = Whitebox(self.schedules).fit([self.runs[i] for i in known]).levels
        return Cases.of([run.job for run in self.runs], list(self.measured), levels=levels, schedules=self.schedules)


def by_setting(study: Study, known: Sequence[int], asked: Sequence[int], one: Callable[[list[int], list[int]], Array]) -> Array:
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
    return by_setting(study, known, asked, lambda a, b: np.tile(unscaled(targets[a].mean(axis=0)), (len(b), 1)))


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
        here, there = (np.column_stack([np.ones(len(i)), np.clip((columns[i] - centre) / scale, -3, 3)]) for i in (a, b))
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


def _network(study: Study, cases: Cases, known: list[int], asked: list[int]) -> Array:
    network, _ = network_module().train(cases.part(known).samples(), [study.families[i] for i in known], seed=study.seed)
    return cases.part(asked).figures(network.figures(cases.part(asked).samples()))


def reference(kind: str, study: Study, known: list[int], asked: list[int]) -> Array:
    """The published network, one per setting."""

    def one(a: list[int], b: list[int]) -> Array:
        network, _ = network_module().train(study.plain.part(a).samples(), [study.families[i] for i in a], kind, seed=study.seed)
        return study.plain.part(b).figures(network.figures(study.plain.part(b).samples()))

    return by_setting(study, known, asked, one)


METHODS: dict[str, Callable[[Study, list[int], list[int]], Array]] = {
    "mean": mean, "flops": flops, "sums": sums, "whitebox": whitebox, "improved": improved,
    **{kind: functools.partial(reference, kind) for kind in REFERENCES},
}  # fmt: skip


# Scores


def read(path: Path, settings: Sequence[str] = ()) -> list[Run]:
    runs = [run for _, run in read_runs(path)]
    return [run for run in runs if figures_of(run) is not None and (not settings or setting_of(run.job) in settings)]


def held_out(study: Study, method: str, rows: Sequence[int], file: Path) -> None:
    """The figures of each run by what has learned from other families; what the file holds is not learned again."""
    found = np.load(file) if file.exists() else np.full((len(study.runs), len(TARGETS)), np.nan)
    for name in sorted(set(study.families)):
        asked = [i for i in rows if study.families[i] == name and np.isnan(found[i]).any()]
        known = [i for i in range(len(study.runs)) if study.families[i] != name]
        if not asked:
            continue
        start = time.perf_counter()
        found[asked] = METHODS[method](study, known, asked)
        silent = [i for i in asked if not exchanges(study.runs[i].job)]
        if method not in REFERENCES:
            found[silent] = without_network(found[silent])
        np.save(file, found)
        print(f"{method}: {name}, {len(asked)} runs, {time.perf_counter() - start:.1f} s", flush=True)


def errors(found: Array, measured: Array) -> Array:
    return np.abs(scaled(found) - scaled(measured))


def score(options: argparse.Namespace) -> None:
    study = Study(read(CAMPAIGN), remembering(), options.seed)
    module = network_module()
    if options.epochs is not None:
        module.REFERENCE_SCHEDULE = dataclasses.replace(module.REFERENCE_SCHEDULE, epochs=options.epochs, patience=options.epochs // 3)
    options.results.mkdir(parents=True, exist_ok=True)
    rows = [i for i, setting in enumerate(study.settings) if not options.settings or setting in options.settings]
    for method in options.methods:
        held_out(study, method, rows, options.results / f"{method}.npy")


def table(options: argparse.Namespace) -> None:
    runs = read(CAMPAIGN)
    settings = np.array([setting_of(run.job) for run in runs])
    measured = np.stack([found for run in runs if (found := figures_of(run)) is not None])
    large = [name for name in sorted(set(settings)) if (settings == name).sum() >= FEWEST]
    columns = [TARGETS.index(name) for name in SHOWN]
    files = [path for name in METHODS if (path := options.results / f"{name}.npy").exists()]
    names = [
        name.replace("device_utilization", "device")
        .replace("memory_utilization", "memory")
        .replace("network_rx", "network")
        .removesuffix("_s")
        for name in SHOWN
    ]
    print("| setting | method | " + " | ".join(names) + " | mean of 7 | mean of 12 |\n|---|---|" + "---|" * (len(names) + 2))
    overall: dict[str, list[Array]] = {}
    for setting in large:
        for file in files:
            error = errors(np.load(file), measured)[settings == setting]
            if np.isnan(error).any():
                continue
            each = error.mean(axis=0)
            overall.setdefault(file.stem, []).append(each)
            _row(f"{setting} ({(settings == setting).sum()})", file.stem, each, columns)
    for name, each in overall.items():
        _row(f"mean of {len(each)}", f"**{name}**", np.mean(each, axis=0), columns)


def _row(setting: str, method: str, each: Array, columns: Sequence[int]) -> None:
    cells = " | ".join(f"{each[i]:.3f}" for i in columns)
    print(f"| {setting} | {method} | {cells} | {each[columns].mean():.3f} | {each[: len(TWELVE)].mean():.3f} |")


# Transfer

TRANSFER_FOLDS = 4


def transfer(options: argparse.Namespace) -> None:
    """Tailor a network that has not seen the target setting, with ever more of its samples; and learn it from scratch."""
    study = Study(read(CAMPAIGN), remembering(), options.seed)
    rows: dict[tuple[str, int], list[tuple[float, float, float, int]]] = {}
    for fold in options.folds:
        for key, result in _tailored(study, options.target, fold, options.samples).items():
            rows.setdefault(key, []).append(result)
            print(fold, key, *(round(figure, 4) for figure in result), flush=True)
    print(f"| {options.target} | samples | error | training, s | measuring, s | all, s |\n|---|---|---|---|---|---|")
    for (how, count), results in sorted(rows.items()):
        error = sum(one[0] * one[3] for one in results) / sum(one[3] for one in results)
        training, measuring = (float(np.mean([one[i] for one in results])) for i in (1, 2))
        print(f"| {how} | {count or 'all'} | {error:.4f} | {training:.1f} | {measuring:.0f} | {training + measuring:.0f} |", flush=True)


def _tailored(study: Study, target: str, fold: int, counts: Sequence[int]) -> dict[tuple[str, int], tuple[float, float, float, int]]:
    """Error, seconds of training and of measuring, and runs scored; the key says how and with how many samples (0: all).

    Samples are spread evenly over what there is, by the ratio of exchange to computation.
    """
    module = network_module()
    held = set(sorted(set(study.families))[fold::TRANSFER_FOLDS])
    known = [i for i, name in enumerate(study.families) if name not in held]
    theirs = [i for i in known if study.settings[i] == target]
    asked = [i for i, name in enumerate(study.families) if name in held and study.settings[i] == target]
    elsewhere = [i for i in known if study.settings[i] != target]
    cases = study.corrected(elsewhere)
    kin = study.families
    columns = [TARGETS.index(name) for name in SHOWN]

    def error(network: object) -> float:
        found = cases.part(asked).figures(network.figures(cases.part(asked).samples()))  # type: ignore[attr-defined]
        return float(errors(found, study.measured[asked])[:, columns].mean())

    def seconds(rows: Sequence[int]) -> float:
        return float(sum(study.runs[i].provenance["seconds"] for i in rows))

    start = time.perf_counter()
    before, _ = module.train(cases.part(elsewhere).samples(), [kin[i] for i in elsewhere], seed=study.seed, members=2)
    print(f"fold {fold}: learned from {len(elsewhere)} runs of other settings in {time.perf_counter() - start:.1f} s", flush=True)
    results = {("as it is", 0): (error(before), 0.0, 0.0, len(asked))}
    ratio = cases.settings[:, SETTING_COLUMNS.index("log exchange over compute")]
    order = sorted(theirs, key=lambda i: float(ratio[i]))
    for count in (*counts, 0):
        chosen = [order[i] for i in np.unique(np.linspace(0, len(order) - 1, count or len(order)).round().astype(int))]
        for how in ("transfer", "from scratch"):
            start = time.perf_counter()
            if how == "transfer":
                made = module.transfer(before, cases.part(chosen).samples(), seed=study.seed)
            else:
                made, _ = module.train(cases.part(chosen).samples(), [kin[i] for i in chosen], seed=study.seed, members=2)
            results[how, count] = error(made), time.perf_counter() - start, seconds(chosen), len(asked)
    return results


# The H200


def h200(options: argparse.Namespace) -> None:
    """Mean absolute error of utilisation, in percentage points, on unseen families."""
    study = Study(read(H200), remembering(), options.seed)
    names = sorted(set(study.families))
    for method in options.methods:
        found = np.full(study.measured.shape, np.nan)
        for fold in range(5):
            held = set(names[fold::5])
            asked, known = [], []
            for i, name in enumerate(study.families):
                (asked if name in held else known).append(i)
            found[asked] = METHODS[method](study, known, asked)
        off = np.abs(found - study.measured) * 100
        device, memory = (off[:, TARGETS.index(name)].mean() for name in ("device_utilization", "memory_utilization"))
        print(f"| {method} | {len(study.runs)} | {device:.1f} | {memory:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    commands = parser.add_subparsers(required=True)
    scoring = commands.add_parser("score")
    scoring.add_argument("methods", nargs="+", choices=METHODS)
    scoring.add_argument("--settings", nargs="*", default=())
    scoring.add_argument("--epochs", type=int, help="of the references, in place of what the predictor takes")
    scoring.set_defaults(run=score)
    listing = commands.add_parser("table")
    listing.set_defaults(run=table)
    moving = commands.add_parser("transfer")
    moving.add_argument("--target", required=True)
    moving.add_argument("--samples", type=int, nargs="*", default=[6, 12, 24])
    moving.add_argument("--folds", type=int, nargs="*", default=range(TRANSFER_FOLDS))
    moving.set_defaults(run=transfer)
    gpu = commands.add_parser("h200")
    gpu.add_argument("methods", nargs="+", choices=METHODS)
    gpu.set_defaults(run=h200)
    for command in (scoring, listing):
        command.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
