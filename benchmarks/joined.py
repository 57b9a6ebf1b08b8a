"""Scores the joined predictor beside each of those that it joins, by source, on runs that were left out.

    python benchmarks/joined.py --data DIR [--only NAMES] [--cache FOLDER] [--predictors NAMES]

Of every source at most ``--most`` runs are taken, evenly over it (of some sources all runs of a few models),
and left out in turn: jobs, families, devices, the largest third along each number. Each predictor forecasts
what is left out by the rest; the joined one chooses and weighs by the runs of other parts alone. The best
single one is told by hindsight, over all left-out runs of the source. Forecasts are kept in ``--cache``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from foretrain.evaluate import Scores
from foretrain.predictors.joined import relations
from foretrain.predictors.joined.choosing import WEIGHTINGS, Array, LeftOut, chosen_weightings, errors_of
from foretrain.predictors.joined.members import read_names
from foretrain.predictors.joined.trying import STEP, try_out
from foretrain.run import Run, read_runs

OWN = Path(__file__).parents[1] / "data"
NAMES = "deletepop,predictddl,ray_models,ernest,cherrypick,flops"
SOURCES = {
    "links_campaign": ("own", "links_campaign.jsonl.zst", 0),
    "ray_campaign": ("own", "ray_campaign.jsonl.zst", 0),
    "cpu16_ddp": ("own", "cpu16_ddp.jsonl", 0),
    "ray_nodes_campaign": ("own", "ray_nodes_campaign.jsonl.zst", 0),
    "cpu16_campaign": ("own", "cpu16_campaign.jsonl.zst", 8),
    "pollux_t4": ("data", "runs/pollux_t4.jsonl", 0),
    "timm_rtx3090": ("data", "runs/timm_rtx3090.jsonl", 0),
    "vtrain_a100": ("data", "runs/vtrain_a100_single_node.jsonl", 0),
    "nanotron_h100": ("data", "runs/nanotron_h100.jsonl", 0),
    "links_idle": ("own", "links_idle.jsonl.zst", 0),
    "ray_nodes_slow": ("own", "ray_nodes_slow.jsonl.zst", 0),
    "h200_steps": ("own", "h200_steps.jsonl", 0),
    "dgxc_h100": ("data", "runs/dgxc_h100.jsonl", 0),
    "mpt_a100": ("data", "runs/llm_foundry_mpt_a100.jsonl", 0),
}
"""Where the runs are, and of how many models, spread over the file, all are taken (0: of all)."""


def runs_of(name: str, data: Path, most: int) -> list[Run]:
    where, file, models = SOURCES[name]
    runs = [run for _, run in read_runs((OWN if where == "own" else data) / file) if run.measured.get(STEP)]
    if models:
        keys = list(dict.fromkeys(run.job.workload.model.key for run in runs))
        kept = set(keys[:: max(1, len(keys) // models)][:models])
        runs = [run for run in runs if run.job.workload.model.key in kept]
    return runs[:: -(-len(runs) // most)]


def forecasts(name: str, options: argparse.Namespace) -> LeftOut:
    """What each predictor forecast of each left-out run, computed once."""
    cache = options.cache / f"{name}.json" if options.cache else None
    if cache is not None and cache.is_file():
        return LeftOut.from_dict(json.loads(cache.read_text()))
    runs = runs_of(name, options.data, options.most)
    parts = relations.parts(runs, options.folds)
    begun = time.monotonic()
    left_out, _ = try_out(runs, parts, read_names(options.predictors, "predictors"))
    print(f"{name}: {len(runs)} runs, {len(parts)} parts, {time.monotonic() - begun:.0f} s", flush=True)
    if cache is not None:
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_text(json.dumps(left_out.to_dict()))
    return left_out


def alone(left_out: LeftOut) -> dict[str, Array]:
    """What each predictor misses; where it refuses, what the usual one as it comes does."""
    usual = left_out.misses[:, 0]
    return {
        name: np.where(np.isfinite(column), column, usual)
        for name, column in zip(left_out.members, left_out.misses.T, strict=True)
    }


def mean(misses: Array, among: Sequence[bool] | Array) -> float:
    errors = errors_of(misses[np.asarray(among, dtype=bool)])
    there = errors[np.isfinite(errors)]
    return Scores.of_errors(there).mape if len(there) else np.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", default=",".join(SOURCES))
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--predictors", default=NAMES)
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--most", type=int, default=120)
    options = parser.parse_args()
    totals: dict[str, list[float]] = {}
    headings = ("source", "kind", "left out", "best single", "its error", "joined", "used")
    print(f"| {' | '.join(headings)} |\n{'|---' * len(headings)}|")
    for name in options.only.split(","):
        left_out = forecasts(name, options)
        ways, joined = chosen_weightings(left_out)
        singles = alone(left_out)
        known = np.isfinite(joined)
        for relation in (*dict.fromkeys(left_out.relations), None):
            mine = known & np.array([relation in (None, one) for one in left_out.relations])
            errors = {one: mean(misses, mine) for one, misses in singles.items()}
            best = min(errors, key=lambda one: errors[one])
            used = "" if relation is None else ways[relation]
            row = [name, relation or "all", int(mine.sum()), best, errors[best], mean(joined, mine), used]
            print(
                "| " + " | ".join(f"{x:.1%}" if isinstance(x, float) else str(x) for x in row) + " |",
                flush=True,
            )
            if relation is None:
                for one, error in {**errors, "joined": mean(joined, mine)}.items():
                    totals.setdefault(one, []).append(error)
        fixed = {way: mean(left_out.missed(way), known) for way in WEIGHTINGS}
        print(f"{name}: ways { ({way: round(error, 4) for way, error in fixed.items()}) }", flush=True)
    print({one: f"{np.mean(errors):.1%}" for one, errors in totals.items()})


if __name__ == "__main__":
    main()
