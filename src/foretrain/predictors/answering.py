"""Forecasts a job with all that is told beside the figures."""

from __future__ import annotations

from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.predictors.base import Predictor
from foretrain.predictors.evidence import with_evidence
from foretrain.predictors.fitting_changes import with_remedies
from foretrain.predictors.recomputation import with_recomputation


def answer(predictor: Predictor, job: Job) -> Forecast:
    """Forecast a job, with the measured runs like it, what would make it fit and what recomputation does."""
    forecast = with_remedies(with_evidence(predictor.predict(job), predictor), predictor)
    return with_recomputation(forecast, predictor)
