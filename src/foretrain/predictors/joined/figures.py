"""Learns how busy device, memory and network are, which tells nothing of a step's time, and sets it beside a
forecast."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from foretrain.errors import ForetrainError, first_line
from foretrain.forecast import Forecast
from foretrain.predictors.base import Report
from foretrain.predictors.driple.predictor import DriplePredictor
from foretrain.predictors.driple.transfers import TransferCheck
from foretrain.run import Run

_FEWEST = 8
"""Runs with figures from which on they are learned from: of fewer, too few can be left out to tell whether
that helps."""


def learn_figures(
    runs: Sequence[Run], families: frozenset[str], devices: frozenset[str]
) -> tuple[DriplePredictor | None, Report]:
    """Tailor Driple to those of the runs that have figures of resources, and say what there is to say of it;
    None where they are few, or where left-out runs do not bear it out.

    After forgetting families or devices, what ships is not there to be tailored, and it learns anew.
    """
    measured = [run for run in runs if (run.provenance.get("resources") or {}).get("figures")]
    if len(measured) < _FEWEST:
        return None, ()
    try:
        if families or devices:
            return DriplePredictor().without(families, devices).fit(measured), ()
        tailored = DriplePredictor.load(DriplePredictor.shipped).fit(measured)
    except ForetrainError as error:
        return None, (f"not joined: {DriplePredictor.name}: {first_line(error)}",)
    if _gains(tailored.transfers_):
        return tailored, tailored.report()
    why = f"tailored to {len(measured):,} runs it is no better on left-out ones than as it comes"
    return None, (f"not joined: {DriplePredictor.name}: {why}",)


def _gains(checks: Sequence[TransferCheck]) -> bool:
    """Whether errors on left-out runs are lower after the transfer, over runs and figures."""
    means = [np.mean(list(check.errors.values()), axis=0) for check in checks if check.errors]
    if not means:
        return False
    weights = [check.runs for check in checks if check.errors]
    before, after = np.average(means, axis=0, weights=weights)
    return bool(after < before)


def with_figures(forecast: Forecast, driple: DriplePredictor) -> Forecast:
    """Put what a forecast does not say of resources beside it."""
    try:
        of_resources = driple.predict(forecast.job)
    except ForetrainError:
        return forecast
    more = {
        name: estimate
        for name, estimate in of_resources.quantities.items()
        if name not in forecast.quantities
    }
    return dataclasses.replace(
        forecast,
        quantities={**forecast.quantities, **more},
        assumptions=(*forecast.assumptions, *(f"resources: {note}" for note in of_resources.assumptions)),
    )
