"""Learns a predictor from runs and keeps it in a folder, with the runs that say how far off it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from foretrain.errors import UnsupportedJob
from foretrain.predictors.base import Predictor
from foretrain.predictors.records import of_learned
from foretrain.run import Run


def learn_into(
    folder: Path,
    predictor: Predictor,
    runs: Sequence[Run],
    *,
    tell: Callable[[str], None] = lambda what: None,
) -> int:
    """Fit and save; returns how many runs were learned from, at least one."""
    predictor.fit(runs)
    taken = len(runs) - len(predictor.left_out_)
    if not taken:
        raise UnsupportedJob(f"predictor: none of {len(runs)} runs could be used ({predictor.left_out_[0]})")
    if predictor.records_ is None:  # one that tried left-out runs has them already
        tell("forecasting the runs again")
        predictor.records_ = of_learned(predictor, runs)
    predictor.save(folder)
    return taken
