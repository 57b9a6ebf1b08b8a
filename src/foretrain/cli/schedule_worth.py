"""Reads what policies are to believe, and shows what better forecasts are worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrain.errors import InputError, invalid, unknown

if TYPE_CHECKING:
    from rich.console import RenderableType

    from foretrain.scheduling.jobs import Trace
    from foretrain.scheduling.study import Outcome

COMPARED_WORKLOADS = 10
"""Workloads to compare predictors on, where nothing is said."""
_HEADS = {
    "average_jct_s": "average JCT",
    "average_wait_s": "wait",
    "missed_deadlines": "deadlines missed",
    "gpu_hours": "GPU h",
    "dollars": "dollars",
}


def errors_of(text: str) -> list[float]:
    """Fractions by which estimates are off, from text such as ``0,0.1,0.5``."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(0 <= value < 10 for value in values):
        raise invalid("--errors", text, "a list of fractions such as 0,0.1,0.5")
    return values


def beliefs_of(
    jobs: Trace, *, errors: str, residuals: Path | None, estimates: str | None, truth: str | None,
    correlation: str | None, compare: bool,
) -> list[dict[str, Any]]:  # fmt: skip
    """What policies go by, in each of the cases to compare."""
    from foretrain.scheduling.correlation import Shares, user_share
    from foretrain.scheduling.estimates import ResidualEstimates
    from foretrain.scheduling.study import BELIEFS

    has_limits = any(job.limit_s is not None for job in jobs.jobs)
    if truth is not None and residuals is None:
        raise InputError("--truth: needs --residuals, which tell how far forecasts are off")
    if compare and residuals is None:
        raise InputError("--compare-predictors: needs --residuals, the file of foretrain evaluate --json")
    named = [part.strip() for part in (estimates or "").split(",") if part.strip()]
    for name in named:
        if name not in BELIEFS:
            raise unknown("--estimates", name, BELIEFS)
    if compare:
        named = list(dict.fromkeys([*named, *(("requested",) if has_limits else ()), "history"]))
    shares = None if correlation is None else Shares.read(correlation)
    if shares is None and (by_user := user_share(jobs.jobs)):
        shares = Shares(user=by_user, measured=True)
    cases: list[dict[str, Any]] = [{"error": error} for error in errors_of(errors)]
    if residuals is not None:
        found = ResidualEstimates.load(residuals, shares=shares)
        if truth is not None and truth not in found:
            raise unknown("--truth", truth, found, "a predictor of the residuals:")
        cases += [
            {"error": each.mape, "residuals": residuals, "residuals_of": name} for name, each in found.items()
        ]
    cases += [{"beliefs": name} for name in named]
    more: dict[str, Any] = {"shares": shares, "truth_of": truth}
    if truth is not None:
        more["residuals"] = residuals
    return [{**more, **case} for case in cases]


def worth_tables(outcomes: Sequence[Outcome]) -> list[RenderableType]:
    """What estimates cost beside exact ones, in every figure."""
    from foretrain.report.tables import table
    from foretrain.scheduling.answers.worth import worth

    compared = worth(outcomes)
    if not compared:
        return []
    names = [name for name in _HEADS if any(name in each.figures for each in compared)]
    heads = ["policy", "estimates", *(_HEADS[name] for name in names)]
    rows = [
        [
            each.policy,
            each.estimates,
            *(each.figures[name].text() if name in each.figures else "" for name in names),
        ]
        for each in compared
    ]
    caption = (
        f"beside exact estimates; ± holds the mean 19 times of 20 over {compared[0].workloads} workloads"
    )
    return [table(heads, rows, right=heads[2:]), caption]
