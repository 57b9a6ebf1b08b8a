"""Compares predictors with measured runs, in a worker process: a leaderboard, and what learning changed."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from foretrain import predictors
from foretrain.architectures import family
from foretrain.errors import ForetrainError, first_line
from foretrain.estimate import Estimate
from foretrain.predictors.base import Predictor
from foretrain.predictors.likeness import describe
from foretrain.progress import tell
from foretrain.run import Run, read_runs
from foretrain.schema import read
from foretrain.serve.requests import LeaderboardRequest

_MOST_ROWS = 2000
"""Of single runs in an answer."""
_MOST_CHANGED = 200
"""Runs that are forecast before and after learning."""
_MOST_REASONS = 10

Row = dict[str, Any]


def leaderboard(task: Mapping[str, Any]) -> dict[str, Any]:
    """Forecasts of predictors beside the runs of a file: errors and coverage, of each family too."""
    asked = read(LeaderboardRequest, task["request"], "")
    runs = [run for _, run in read_runs(Path(task["runs"])) if run.measured.get(asked.quantity, 0) > 0]
    scores, rows, reasons = [], [], Counter[str]()
    total = len(runs) * len(task["where"])
    for number, (name, where) in enumerate(task["where"].items()):
        own: list[Row] = []
        for row in _rows(predictors.get(where), runs, asked.quantity, number * len(runs), total):
            if "refused" in row:
                reasons[f"{name}: {row['refused']}"] += 1
            else:
                own.append({"predictor": name, **row})
        rows += own
        scores.append(
            {
                "predictor": name,
                "unsupported": len(runs) - len(own),
                **_score(own),
                "families": _families(own),
            }
        )
    scores.sort(key=lambda one: (one["median_ape"] is None, one["median_ape"] or 0.0))
    return {
        "quantity": asked.quantity,
        "runs": len(runs),
        "predictors": scores,
        "rows": rows[:_MOST_ROWS],
        "reasons": [{"reason": reason, "runs": n} for reason, n in reasons.most_common(_MOST_REASONS)],
    }


def _rows(predictor: Predictor, runs: Sequence[Run], quantity: str, done: int, total: int) -> Iterator[Row]:
    for number, run in enumerate(runs):
        tell("forecasting the runs", done + number, total)
        about = {
            "run": describe(run.job),
            "family": family(run.job.workload.model),
            "device": run.job.cluster.groups[0].device.name,
            "measured": run.measured[quantity],
        }
        try:
            estimate = predictor.predict(run.job).quantities.get(quantity)
        except ForetrainError as error:
            yield {**about, "refused": first_line(error)}
            continue
        if estimate is None:
            yield {**about, "refused": f"no {quantity}"}
        else:
            yield {**about, **_against(estimate, run.measured[quantity])}


def _against(estimate: Estimate, measured: float) -> Row:
    return {
        "predicted": estimate.median,
        "low": estimate.low,
        "high": estimate.high,
        "error": estimate.median / measured - 1,
    }


def _score(rows: Sequence[Row]) -> dict[str, Any]:
    """Errors are shares of what was measured; None where there is nothing to compare."""
    errors = [abs(row["error"]) for row in rows]
    return {
        "n": len(rows),
        "mape": statistics.fmean(errors) if errors else None,
        "median_ape": statistics.median(errors) if errors else None,
        "bias": statistics.median(row["error"] for row in rows) if rows else None,
        "coverage": statistics.fmean(row["low"] <= row["measured"] <= row["high"] for row in rows)
        if rows
        else None,
    }


def _families(rows: Sequence[Row]) -> list[dict[str, Any]]:
    names = sorted({row["family"] for row in rows})
    return [{"family": name, **_score([row for row in rows if row["family"] == name])} for name in names]


def changes(before: Predictor, after: Predictor, runs: Sequence[Run]) -> dict[str, Any]:
    """Forecasts of runs by a predictor as it was and as it has learned; of many runs, some spread over
    them."""
    chosen = runs[:: max(1, -(-len(runs) // _MOST_CHANGED))]
    timed = [run for run in chosen if run.measured.get("step_time_s", 0) > 0]
    olds = list(_rows(before, timed, "step_time_s", 0, 2 * len(timed)))
    news = list(_rows(after, timed, "step_time_s", len(timed), 2 * len(timed)))
    both = [(old, new) for old, new in zip(olds, news, strict=True) if "error" in old and "error" in new]
    return {
        "quantity": "step_time_s",
        "before": _score([old for old, _ in both]),
        "after": _score([new for _, new in both]),
        "runs": [
            {
                **{name: old[name] for name in ("run", "family", "device", "measured")},
                "before": {name: old[name] for name in ("predicted", "low", "high", "error")},
                "after": {name: new[name] for name in ("predicted", "low", "high", "error")},
            }
            for old, new in both
        ],
    }
