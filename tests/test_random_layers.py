"""Random layers cover the kinds that they name, and their operators are balanced at every point of the list."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from foretrain.capture import capture_job
from foretrain.graph import OpGraph
from foretrain.graph.opset import traits
from foretrain.job import Job
from foretrain.measure.instances import Instance, collect

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def operators() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import random_operators

        yield random_operators
    finally:
        sys.path.remove(str(BENCHMARKS))


def traced(seed: int) -> OpGraph:
    args = {"seed": seed, "count": 60, "dtype": "float32"}
    model = {"source": "python", "name": "random_layers.py:bag", "args": args}
    training = {"global_batch": 1, "optimizer": "sgd"}
    job = {"model": model, "training": training, "cluster": {"device": "h200-sxm-141gb"}}
    return capture_job(Job.read(job, base=BENCHMARKS))


@pytest.fixture(scope="module")
def instances() -> list[Instance]:
    return [one for one in collect([(traced(3), "fp32")]) if one.phase != "optimizer"]


def test_a_bag_has_many_kinds_in_both_layouts_with_their_gradients(instances: list[Instance]) -> None:
    kinds = {traits(one.name).kind for one in instances}
    assert kinds >= {"convolution", "channel norm", "batched product", "softmax", "pooling", "attention"}
    convolutions = [one for one in instances if one.name == "convolution_backward"]
    assert {one.inputs[1].channels_last for one in convolutions} == {False, True}
    assert all(one.inputs[0].strides is None or 0 not in one.inputs[0].strides for one in convolutions)


def test_every_beginning_of_the_list_is_balanced(operators: Any, instances: list[Instance]) -> None:
    ordered = operators.balanced(instances, seed=1)
    assert sorted(one.key for one in ordered) == sorted(one.key for one in instances)
    first = [operators.group_of(one)[0] for one in ordered[: len(ordered) // 4]]
    everywhere = [operators.group_of(one)[0] for one in ordered]
    assert first.count("convolution") / len(first) > everywhere.count("convolution") / len(everywhere)
    assert len(set(first)) > len(set(everywhere)) / 2
