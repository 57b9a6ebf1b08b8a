"""Devices of one kind: a device that no figure makes faster is not forecast faster."""

from __future__ import annotations

import pytest

from foretrain.cluster import Catalog
from foretrain.costs.relatives import relative, slowdowns
from foretrain.job import Job
from foretrain.predictors import get
from foretrain.predictors.deletepop import DeletePopPredictor

CATALOG = Catalog()
H100, H200, A100 = (CATALOG.device(name) for name in ("h100-sxm-80gb", "h200-sxm-141gb", "a100-sxm-80gb"))
MEASURED = ("h200-sxm-141gb",)


def test_relatives_run_the_same_kernels() -> None:
    found = relative(H100, MEASURED)
    assert found is not None
    assert found.name == H200.name
    assert relative(A100, MEASURED) is None


def test_a_measured_device_has_no_need_of_one() -> None:
    assert relative(H200, MEASURED) is None


def test_names_that_no_catalogue_has_are_passed_over() -> None:
    assert relative(H100, ("mine",)) is None


def test_what_may_be_slower_is_the_memory_alone() -> None:
    arithmetic, memory = slowdowns(H100, H200)
    assert arithmetic == 1.0
    assert memory == pytest.approx(4800 / 3350, rel=0.01)


def test_a_convolution_net_takes_no_less_on_a_device_with_slower_memory() -> None:
    def device_s(device: str) -> dict[str, float]:
        tables = {
            "model": {"source": "torchvision", "name": "resnet18"},
            "training": {"global_batch": 64, "image": 64, "classes": 10, "precision": "amp-bf16"},
            "cluster": {"device": device},
        }
        predictor = get("deletepop")
        assert isinstance(predictor, DeletePopPredictor)
        return predictor.step(Job.read(tables)).by("operator")

    theirs, own = device_s("h200"), device_s("h100")
    kinds = set(theirs) - {"mm", "addmm"}  # products of such devices were measured
    assert {"convolution_backward", "native_batch_norm"} < kinds
    for name in kinds:
        assert 1 - 1e-9 <= own[name] / theirs[name] <= 1.45, name
