"""Asks whether a learned embedding of the graph tells more of a step time than counts of operators do.

    foretrain embed train --objective OBJECTIVE --out DIR/OBJECTIVE.safetensors       # for each of them
    python benchmarks/embeddings.py --h200 data/h200_steps.jsonl --rtx timm_rtx3090.jsonl DIR/*.safetensors

Three places where it could: whole families left out with many and with few families to learn from, and a
dataset type of which there are ten runs. Each is scored in three forms: the embedding and the cluster alone
(the paper's), beside operator counts, and beside these over the physical baseline. What is scored is never
learned from; the regressor is chosen inside of what is learned from, over families.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

import predictddl as home
import reading
from foretrain.architectures import family
from foretrain.capture import capture_job
from foretrain.evaluate import Scores
from foretrain.job import Job
from foretrain.predictors.predictddl.baseline import Physics, baseline, fit_baseline, physics
from foretrain.predictors.predictddl.features import cluster_columns, dataset_type, work_of
from foretrain.predictors.predictddl.predictor import embedding_module
from foretrain.predictors.predictddl.primitives import Primitives, primitives
from foretrain.predictors.predictddl.regressors import CANDIDATES, Problem, Scaled, choose
from foretrain.run import Run

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Embeds = Callable[[Sequence[Primitives]], Array]
FEW = ("constant", "log-linear, ridge 3", "log-linear, ridge 30", "svr, cost 3")
FORMS = ("alone", "beside counts", "beside counts, ratio")
FEW_FAMILIES, FEW_RUNS, DRAWS = 6, 10, 4
SAMPLED = 160
"""Architectures of timm, drawn once: an embedding takes a while for each."""


class Table:
    """Runs with all that a form may see of them."""

    def __init__(self, runs: Sequence[Run], embeddings: Mapping[str, Embeds]) -> None:
        self.runs = runs
        self._baselines: dict[bytes, Array] = {}
        graphs = [capture_job(run.job) for run in runs]
        works = [work_of(run.job, graph) for run, graph in zip(runs, graphs, strict=True)]
        jobs = [run.job for run in runs]
        self.terms: Physics = physics(works, jobs)
        self.targets = np.log([run.measured["step_time_s"] for run in runs])
        measured = [run.measured.get("device_busy_s") or np.nan for run in runs]
        self.busy = np.log(np.array(measured, dtype=np.float64))
        self.counts = np.array([work.columns for work in works])
        self.cluster = np.array(
            [cluster_columns(job, work.parameters) for job, work in zip(jobs, works, strict=True)]
        )
        self.families = np.array([family(run.job.workload.model) for run in runs])
        self.types = np.array([dataset_type(job) for job in jobs])
        first = {_input(job): place for place, job in enumerate(jobs)}
        drawn = [primitives(graphs[place]) for place in first.values()]
        where = [list(first).index(_input(job)) for job in jobs]
        self.embedded = {name: network(drawn)[where] for name, network in embeddings.items()}
        self.embedded["none"] = np.zeros((len(runs), 0))

    def rows(self, form: str, embedding: str) -> Array:
        parts = [self.embedded[embedding], self.cluster]
        return np.hstack(parts if form == "alone" else [*parts, self.counts])

    def error(self, form: str, embedding: str, known: Mask, asked: Mask) -> Array:
        """Relative errors of what is asked, by what is known."""
        rows, base = self.rows(form, embedding), np.zeros(len(self.targets))
        if form.endswith("ratio"):
            base = self.based(known)
        rest = self.targets - base
        problem = Problem(
            rows=rows[known], terms=None, targets=rest[known], groups=self.families[known].tolist(),
            types=["all"] * int(known.sum()), steps=[str(i) for i in np.flatnonzero(known)],
        )  # fmt: skip
        chosen = choose(problem, FEW, folds=3)["all"].name
        model = Scaled.learn(CANDIDATES[chosen](), rows[known], rest[known])
        return np.expm1(np.clip(model.predict(rows[asked]) - rest[asked], -5, 5))

    def based(self, known: Mask) -> Array:
        """The physical baseline of all runs, fitted to those that are known; once for each split."""
        key = known.tobytes()
        if key not in self._baselines:
            logs = fit_baseline(self.terms[known], self.targets[known], busy=self.busy[known])
            self._baselines[key] = baseline(logs, self.terms)
        return self._baselines[key]


def _input(job: Job) -> str:
    """What an embedding, which is per sample, depends on."""
    training = job.workload.training
    return f"{job.workload.model.label} {training.image_shape} {training.sequence} {training.precision}"


# Splits


def families_out(table: Table, folds: int = 5) -> list[tuple[Mask, Mask]]:
    names = sorted(set(table.families.tolist()))
    held = [np.isin(table.families, names[fold::folds]) for fold in range(folds)]
    return [(~one, one) for one in held]


def few_families(table: Table) -> list[tuple[Mask, Mask]]:
    names = sorted(set(table.families.tolist()))
    parts = []
    for draw in range(DRAWS):
        known = np.isin(table.families, random.Random(draw).sample(names, FEW_FAMILIES))
        parts.append((known, ~known))
    return parts


def new_type(table: Table) -> list[tuple[Mask, Mask]]:
    """Ten runs of text beside all of images; the rest of text whose families are not among the ten."""
    text = np.flatnonzero(table.types == "text")
    parts = []
    for draw in range(DRAWS):
        few = random.Random(draw).sample(text.tolist(), FEW_RUNS)
        known = table.types != "text"
        known[few] = True
        asked = (table.types == "text") & ~np.isin(table.families, table.families[few])
        parts.append((known, asked))
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("embedding", type=reading.existing, nargs="*")
    parser.add_argument("--h200", type=reading.existing, required=True)
    parser.add_argument("--rtx", type=reading.existing)
    options = parser.parse_args()
    home.keep_graphs()
    network = embedding_module()
    embeddings: dict[str, Embeds] = {"random": network.untrained()}
    embeddings |= {path.stem: network.load(path) for path in options.embedding}
    h200 = Table(home.traced(home.read(options.h200)), embeddings)
    settings = {
        "H200, families out": (h200, families_out(h200)),
        f"H200, {FEW_FAMILIES} families known": (h200, few_families(h200)),
        f"H200, text with {FEW_RUNS} runs": (h200, new_type(h200)),
    }
    if options.rtx:
        runs = home.one_each(home.read(options.rtx))
        rtx = Table(home.traced(_sampled(runs)), embeddings)
        settings["RTX 3090, families out"] = (rtx, families_out(rtx))
        settings[f"RTX 3090, {FEW_FAMILIES} families known"] = (rtx, few_families(rtx))
    for form in FORMS:
        print(
            f"\n{form}\n\n| embedding | {' | '.join(settings)} |\n|---{'|---' * len(settings)}|", flush=True
        )
        for name in ("none", *embeddings):
            cells = []
            for table, parts in settings.values():
                errors = [table.error(form, name, known, asked) for known, asked in parts]
                means = [Scores.of_errors(error).mape for error in errors]
                cells.append(f"{Scores.of_errors(np.concatenate(errors)).mape:.1%} ± {np.std(means):.1%}")
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


def _sampled(runs: Sequence[Run]) -> list[Run]:
    return random.Random(0).sample(list(runs), min(SAMPLED, len(runs)))


if __name__ == "__main__":
    reading.run(main)
