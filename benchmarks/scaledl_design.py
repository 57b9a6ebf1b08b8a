"""Compares ways to choose the runs that ScaleDL learns from: its error on left-out runs against the budget.

    python benchmarks/scaledl_cases.py --data DIR --cache DIR
    python benchmarks/scaledl_design.py --cache DIR [--seeds 2]

Candidates are runs of the H200 (one family in five left out), or of the public multi-device runs (the largest
third of the numbers of devices of each source left out). A run costs its forecast step on all its devices; a
budget is a share of what all candidates cost. D-optimal is for a log-quadratic model of device time, host
time, kernels, devices, exposed communication and bubble, as ``foretrain design --predictor scaledl`` has it;
cost-aware draws at random, cheap runs first.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

import reading
from foretrain.evaluate import Scores
from foretrain.measure.candidates import row_candidates
from foretrain.measure.design import design
from foretrain.predictors.scaledl.graph import design_figures
from scaledl_ablation import Study, full

H200_FOLD = 2
WAYS: Mapping[str, str] = {
    "random": "random",
    "D-optimal": "d-optimal",
    "half and half": "half-d-optimal",
    "cost-aware": "cheap-random",
}
BUDGETS = (0.02, 0.1)


def parts(study: Study) -> dict[str, tuple[list[int], list[int]]]:
    """Candidates and left-out runs, by what is studied."""
    on_h200 = np.char.startswith(study.source, "h200") & (study.devices == 1)
    many = ~on_h200 & ~np.isin(study.source, ["neusight", "rtx3090", "ets_t4", "h200_fsdp"])
    larger = study.tests("scales")[0]
    fold = study.fold == H200_FOLD
    masks = {"H200": (on_h200 & ~fold, on_h200 & fold), "distributed": (many & ~larger, many & larger)}
    return {
        name: (np.flatnonzero(inside).tolist(), np.flatnonzero(test).tolist())
        for name, (inside, test) in masks.items()
    }


def chosen(study: Study, pool: Sequence[int], way: str, share: float, seed: int) -> list[int]:
    rows = [design_figures(study.known[i].graph) for i in pool]
    cost_s = (study.base_s * study.devices)[list(pool)]
    labels = [{"run": i} for i in pool]
    candidates = row_candidates(rows, cost_s.tolist(), labels, quadratic=True)
    found = design(WAYS[way], candidates, budget_s=share * float(cost_s.sum()), seed=seed)
    return [pool[i] for i in found.chosen.tolist()]


def error(study: Study, test: Sequence[int], logs: Sequence[float]) -> float:
    """The mean over sources of their mean relative errors."""
    places = np.array(test)
    told_s, measured_s = study.base_s[places] * np.exp(np.array(logs)), study.measured_s[places]
    sources = study.source[places]
    by_source = [sources == one for one in set(sources.tolist())]
    return float(np.mean([Scores.of(measured_s[mine], told_s[mine]).mape for mine in by_source]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=reading.existing, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    study = Study(Path(options.cache))
    for name, (pool, test) in parts(study).items():
        plain = error(study, test, [0.0] * len(test))
        print(f"{name}: {len(pool)} candidates, {len(test)} left out; layer-wise {plain:.1%}", flush=True)
        for share in BUDGETS:
            for way in WAYS:
                errors, counts = [], []
                for seed in range(1 if way in ("D-optimal", "half and half") else options.seeds):
                    mine = chosen(study, pool, way, share, seed)
                    answers = full(study, mine, test, seed)["full"].tolist()
                    errors.append(error(study, test, answers))
                    counts.append(len(mine))
                cells = ", ".join(f"{one:.1%}" for one in errors)
                print(
                    f"{name}, {share:.0%} of the budget, {way}: {np.mean(counts):.0f} runs, {cells}",
                    flush=True,
                )


if __name__ == "__main__":
    reading.run(main)
