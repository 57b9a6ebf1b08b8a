"""Tests CherryPick: its process goes through its runs and is unsure elsewhere."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foretrain import predictors
from foretrain.errors import UnsupportedJob
from foretrain.job import Job
from foretrain.predictors.checks import check_predictor
from foretrain.predictors.cherrypick import (
    CherryPickPredictor,
    Process,
    configuration,
    expected_improvement,
)
from foretrain.run import Run
from workloads import job

WORKERS = (1, 2, 3, 4, 6, 8, 12, 16)


def valley(one: Job) -> float:
    """Best at six workers."""
    return 1.0 + (math.log(one.cluster.world_size) - math.log(6)) ** 2


def runs() -> list[Run]:
    return [
        Run(job=job(workers=workers), measured={"step_time_s": valley(job(workers=workers))})
        for workers in (1, 2, 4, 8, 16)
    ]


def test_it_passes_the_conformance_checks() -> None:
    check_predictor(predictors.get("cherrypick"), job(samples=50_000, epochs=2))


def test_it_is_surer_near_its_runs() -> None:
    fitted = CherryPickPredictor().fit(runs())
    near, far = (fitted.predict(job(workers=workers))["step_time_s"] for workers in (4, 64))
    assert near.median == pytest.approx(valley(job(workers=4)), rel=0.1)
    assert near.high / near.low < far.high / far.low


def test_a_workload_without_runs_is_refused() -> None:
    with pytest.raises(UnsupportedJob, match=r"^model: no run of 'vgg11'"):
        CherryPickPredictor().fit(runs()).predict(job("vgg11"))


def test_improvement_is_expected_where_the_cost_may_be_lower() -> None:
    rows = np.array([configuration(job(workers=workers)) for workers in WORKERS])
    process = Process.learn(rows[[0, -1]], np.array([3.0, 2.0]))
    gains = expected_improvement(process, rows, best=2.0)
    assert (gains >= 0).all()
    assert gains[1:-1].max() > gains[0]
