"""Collectives of tensor parallelism beside products: which belong together, and what plans and frameworks do
of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from foretrain.errors import InputError
from foretrain.graph import Op, Operator, OpGraph, Phase, TensorSpec
from foretrain.job import Job
from foretrain.step.frameworks import TensorOverlap, profile
from foretrain.step.tensor_overlap import hidden_s

TOKENS, WIDTH, WIDE, TEAM = 64, 32, 128, 4
WHOLE, PART = (TOKENS, WIDTH), (TOKENS // TEAM, WIDTH)
Call = tuple[str, tuple[tuple[int, int], ...], tuple[int, int], float]
"""Name, shapes of inputs and of the output, seconds."""
FORWARD: list[Call] = [  # a gated MLP: two layers cut by columns and one by rows
    ("all_gather", (PART,), WHOLE, 2.0),
    ("mm", (WHOLE, (WIDTH, WIDE)), (TOKENS, WIDE), 1.5),
    ("mm", (WHOLE, (WIDTH, WIDE)), (TOKENS, WIDE), 1.5),
    ("mul", ((TOKENS, WIDE), (TOKENS, WIDE)), (TOKENS, WIDE), 9.0),
    ("mm", ((TOKENS, WIDE), (WIDE, WIDTH)), WHOLE, 1.0),
    ("reduce_scatter", (WHOLE,), PART, 2.0),
]
BACKWARD: list[Call] = [
    ("all_gather", (PART,), WHOLE, 2.0),
    ("mm", ((WIDTH, TOKENS), (TOKENS, WIDE)), (WIDTH, WIDE), 1.0),
    ("mm", (WHOLE, (WIDTH, WIDE)), (TOKENS, WIDE), 1.0),
    ("mul", ((TOKENS, WIDE), (TOKENS, WIDE)), (TOKENS, WIDE), 9.0),
    ("all_gather", (PART,), WHOLE, 2.0),
    ("mm", ((WIDE, TOKENS), WHOLE), (WIDE, WIDTH), 1.5),
    ("mm", ((TOKENS, WIDE), (WIDE, WIDTH)), WHOLE, 1.5),
    ("mm", ((WIDE, TOKENS), WHOLE), (WIDE, WIDTH), 1.5),
    ("mm", ((TOKENS, WIDE), (WIDE, WIDTH)), WHOLE, 1.5),
    ("reduce_scatter", (WHOLE,), PART, 2.0),
]


def hidden(calls: list[Call], overlap: TensorOverlap, phase: Phase) -> list[float]:
    """Of each collective, as a share of what products of its length would hide."""
    ops = tuple(
        Op(
            Operator(
                name, "default" if name in ("mm", "mul") else "tensor",
                tuple(TensorSpec(shape, "bfloat16") for shape in inputs), (TensorSpec(output, "bfloat16"),),
                {}, 0, 0, 0, True,
            ),
            phase, "", (), (),
        )
        for name, inputs, output, _ in calls
    )  # fmt: skip
    graph = OpGraph(ops=ops, buffers=(), samples=1)
    times = np.array([seconds for *_, seconds in calls])
    found = hidden_s(graph, np.arange(len(calls)), times, overlap, backward=phase == "backward")
    assert not found[[name in ("mm", "mul") for name, *_ in calls]].any()
    return [round(value / 0.8, 6) for value, (name, *_) in zip(found, calls, strict=True) if "_" in name]


def test_what_is_gathered_feeds_all_products_that_take_it_and_sums_follow_the_one_that_makes_them() -> None:
    assert hidden(FORWARD, "piecewise", "forward") == [2.0, 1.0]
    assert hidden(FORWARD, "behind", "forward") == [0.0, 0.0]
    assert hidden(FORWARD, "none", "forward") == [0.0, 0.0]


def test_backward_both_collectives_of_a_layer_cut_by_columns_run_behind_products() -> None:
    """That of a layer cut by rows needs pieces: its product waits for it."""
    assert hidden(BACKWARD, "behind", "backward") == [0.0, 2.0, 2.0]
    assert hidden(BACKWARD, "piecewise", "backward") == [1.0, 2.0, 2.0]
    assert hidden(BACKWARD, "none", "backward") == [0.0, 0.0, 0.0]


def test_the_input_may_be_gathered_again_after_the_product_for_its_gradient() -> None:
    rows, gather, (weights, inputs, *_), sums = BACKWARD[:4], BACKWARD[4], BACKWARD[5:9], BACKWARD[9]
    assert hidden([*rows, inputs, gather, weights, sums], "behind", "backward") == [0.0, 1.5, 1.5]


def test_a_sum_of_gradients_runs_beside_the_products_for_weights_of_its_own_layer() -> None:
    calls = [call for call in BACKWARD[1:-1] if call[0] != "all_gather"]
    assert hidden([*calls, ("all_reduce", (WHOLE,), WHOLE, 4.0)], "behind", "backward") == [3.0]


def job(framework: str, *, compile: bool = False, **plan: Any) -> Job:
    return Job.read({
        "model": {"source": "timm", "name": "made-up"},
        "training": {"global_batch": 8, "framework": framework, "compile": compile, "precision": "bf16"},
        "cluster": {"node": "dgx-h100"},
        "plan": {"tensor": 8, **plan},
    })  # fmt: skip


@pytest.mark.parametrize(
    ("framework", "pieces", "switch", "expected"),
    [
        ("megatron", True, None, "piecewise"),
        ("megatron", False, None, "behind"),
        ("megatron", True, False, "behind"),
        ("nanotron", True, None, "behind"),
        ("nanotron", True, False, "none"),
        ("torchtitan", True, None, "none"),
        ("torchtitan", True, True, "piecewise"),
    ],
)
def test_frameworks_overlap_as_they_do_unless_the_plan_says_otherwise(
    framework: str, pieces: bool, switch: bool | None, expected: str
) -> None:
    overlap = {} if switch is None else {"overlap": {"tensor": switch}}
    made = job(framework, compile=bool(switch), sequence_parallel=pieces, **overlap)
    assert profile(made).tensor_overlap == expected


def test_overlap_needs_what_makes_it() -> None:
    with pytest.raises(InputError, match=r"plan\.overlap\.tensor: true needs sequence_parallel = true"):
        job("megatron", overlap={"tensor": True})
    with pytest.raises(InputError, match=r"plan\.overlap\.tensor: true needs training\.compile"):
        profile(job("torchtitan", overlap={"tensor": True}, sequence_parallel=True))
