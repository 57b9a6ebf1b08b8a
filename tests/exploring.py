"""A small training whose page tests look at: a table of forecasts around it, made once."""

from __future__ import annotations

import functools
from pathlib import Path

from foretrain.api import job_of
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.predictors import get
from foretrain.predictors.base import Predictor
from foretrain.web.table import ForecastTable, forecast_table

MODEL = """
from torch import nn

def net(batch):
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 16 * 16, 10))
"""
OPTIONS = {"device": "a100", "batch": 64, "image": 16, "samples": 50_000, "epochs": 20, "precision": "fp32"}
ENOUGH_S = 60.0
"""For all that tests look at, on a busy machine; it takes a few."""


@functools.cache
def predictor() -> Predictor:
    return get("deletepop")


def small_job(folder: Path, **options: object) -> Job:
    (folder / "tiny.py").write_text(MODEL)
    return job_of(str(folder / "tiny.py:net"), {**OPTIONS, **options})


def small_forecast(folder: Path, **options: object) -> Forecast:
    forecast = predictor().predict(small_job(folder, **options))
    return forecast


def small_table(folder: Path, *, seconds: float = 4.0, **options: object) -> ForecastTable:
    return forecast_table(small_forecast(folder, **options), predictor(), seconds=seconds)
