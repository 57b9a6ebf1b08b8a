"""Tailors Driple's network to a setting it has not seen with few runs, beside one that learns from scratch.

    python benchmarks/driple_transfer.py [--targets "cpu ps 4" ...] [--seeds 0 1 2] [--shares 0.1 0.2 0.5]

Scored on unseen families of the target setting, in the folds and units of ``driple.py``, as the mean over the
distinct figures. Which runs to measure is chosen before any is measured, by a D-optimal design within a share
of their number and of their forecast time. Seconds: of measuring, as the campaign noted them, and CPU seconds
of learning.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import reading
from driple import CAMPAIGN, SHOWN, Study, errors, folds, read, remembering
from foretrain.measure.design import d_optimal
from foretrain.predictors.driple.cases import Cases, network_module
from foretrain.predictors.driple.features import TARGETS, Array

TARGET_SETTINGS = ("cpu ps 4", "cpu allreduce 2", "cpu allreduce 4", "cpu ps 1", "cpu ps 2")
"""The first is the one on which the ridge of the transfer, the design and the share of runs were chosen."""
COLUMNS = [TARGETS.index(name) for name in SHOWN]
RANDOM_DRAWS, FIFTH = 8, 0.2
_DESIGN_RIDGE = 0.1
Result = tuple[float, float, float, int]
"""Error, seconds of measuring and of learning, and runs scored."""


def chosen(network: Any, cases: Cases, rows: Sequence[int], cost_s: Array, share: float) -> list[int]:
    """What tells most of the figures, at most a share of the runs and of their time."""
    module = network_module()
    _, beside = network.members[0].inner(*module.batched(cases.part(rows).samples())[:3])
    features = beside.numpy().astype(np.float64) / np.sqrt(beside.shape[1])
    cost = cost_s + cost_s.mean()  # a run takes a while to start
    price = np.maximum(cost / cost.sum(), 1.0 / len(rows))
    return [rows[i] for i in d_optimal(features, price, share, ridge=_DESIGN_RIDGE)]


def tailored(
    study: Study, target: str, fold: set[int], shares: Sequence[float]
) -> dict[tuple[str, float], Result]:
    """By how it was learned and from which share of the runs."""
    module = network_module()
    known = [i for i in range(len(study.runs)) if i not in fold]
    theirs = [i for i in known if study.settings[i] == target]
    asked = [i for i in sorted(fold) if study.settings[i] == target]
    elsewhere = [i for i in known if study.settings[i] != target]
    cases = study.corrected(elsewhere)
    cost_s = np.array([study.schedules.predict(study.runs[i].job)["step_time_s"].median for i in theirs])

    def result(network: Any, rows: Sequence[int], learning_s: float) -> Result:
        found = cases.part(asked).figures(network.figures(cases.part(asked).samples()))
        measuring_s = float(sum(study.runs[i].provenance["seconds"] for i in rows))
        return (
            float(errors(found, study.measured[asked])[:, COLUMNS].mean()),
            measuring_s,
            learning_s,
            len(asked),
        )

    def scratch(rows: Sequence[int]) -> Result:
        start = time.process_time()
        made, _ = module.train(cases.part(rows).samples(), [study.families[i] for i in rows], seed=study.seed)
        return result(made, rows, time.process_time() - start)

    def transfer(rows: Sequence[int]) -> Result:
        start = time.process_time()
        made = module.transfer(before, cases.part(rows).samples())
        return result(made, rows, time.process_time() - start)

    before, _ = module.train(
        cases.part(elsewhere).samples(), [study.families[i] for i in elsewhere], seed=study.seed
    )
    results = {
        ("as it is", 0.0): result(before, [], 0.0),
        ("from scratch", 1.0): scratch(theirs),
        ("transfer", 1.0): transfer(theirs),
    }
    draw = np.random.default_rng(study.seed)
    for share in shares:
        rows = chosen(before, cases, theirs, cost_s, share)
        results["transfer", share] = transfer(rows)
        if share == FIFTH:
            results["from scratch", share] = scratch(rows)
        some = [
            transfer(draw.choice(theirs, int(share * len(theirs)), replace=False).tolist())
            for _ in range(RANDOM_DRAWS)
        ]
        results["transfer, random runs", share] = (
            *np.mean([one[:3] for one in some], axis=0).tolist(),
            len(asked),
        )
    return results


def study_target(study: Study, target: str, seeds: Sequence[int], shares: Sequence[float]) -> None:
    rows: dict[tuple[str, float], list[Result]] = {}
    for seed in seeds:
        for fold in folds(study, "family"):
            for key, result in tailored(study.with_seed(seed), target, fold, shares).items():
                rows.setdefault(key, []).append(result)
    means = {
        key: np.average(np.array(found)[:, :3], axis=0, weights=[one[3] for one in found])
        for key, found in rows.items()
    }
    whole = means["from scratch", 1.0]
    for (how, share), (error, measuring, learning) in sorted(
        means.items(), key=lambda item: (item[0][1], item[0][0])
    ):
        spent = measuring + learning
        faster = f"{(whole[1] + whole[2]) / spent:.1f}x" if spent else ""
        cells = [
            target,
            how,
            f"{share:.0%}",
            f"{error:.4f}",
            f"{error / whole[0]:.2f}x",
            f"{measuring:.0f}",
            f"{learning:.2f}",
            faster,
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", default=TARGET_SETTINGS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.15, 0.2, 0.5])
    options = parser.parse_args()
    study = Study(read(CAMPAIGN), remembering())
    print(
        "| target | learned | runs | error | to scratch with "
        "all | measuring, s | learning, CPU s | faster by |\n|---|---|---|---|---|---|---|---|"
    )
    for target in options.targets:
        study_target(study, target, options.seeds, options.shares)


if __name__ == "__main__":
    reading.run(main)
