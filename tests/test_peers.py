"""Tools of others as predictors: they say what they say, and refuse what is not theirs in one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from foretrain.errors import InputError, UnsupportedJob
from foretrain.job import Job
from foretrain.predictors import get

PEERS = Path(__file__).parents[1] / "benchmarks" / "peers.py"


def job(**training: Any) -> Job:
    return Job.read(
        {
            "model": {"source": "torchvision", "name": "resnet18"},
            "training": {"global_batch": 256, "image": 224, "optimizer": "adamw", **training},
            "cluster": {"device": "h200-sxm-141gb"},
        }
    )


def test_what_accelerate_says_is_not_refused_for_being_impossible() -> None:
    pytest.importorskip("accelerate")
    found = get(f"{PEERS}:AccelerateEstimate").predict(job(precision="amp-bf16"))["peak_memory_bytes"]
    assert found.median == pytest.approx(
        2 * 4 * 11.69e6, rel=0.01
    )  # weights, gradients and Adam need twice that
    assert found.low == found.high


def test_what_a_tool_does_not_know_is_refused() -> None:
    with pytest.raises(UnsupportedJob, match="resnet18: it knows training with Adam alone"):
        get(f"{PEERS}:AccelerateEstimate").predict(job(optimizer="sgd"))


def test_a_tool_that_is_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(InputError, match="deepspeed: deepspeed is not installed"):
        get(f"{PEERS}:DeepSpeedEstimate").predict(job(precision="amp-bf16"))
