"""FLOP formulas, by hand: a multiply-add is two, and operators without a formula are free."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.graph import TensorSpec
from foretrain.graph.flops import FORMULAS, flops, register

Shapes = list[tuple[int, ...]]
MASKS = {"all": [True, True, True], "weight only": [False, True, True], "bias only": [False, False, True]}
LSTM = {"mode": 2, "hidden_size": 20, "num_layers": 2}


def count(name: str, inputs: Shapes, outputs: Shapes, **args: Any) -> int:
    return flops(
        name,
        args,
        [TensorSpec(shape, "float32") for shape in inputs],
        [TensorSpec(shape, "float32") for shape in outputs],
    )


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "args", "expected"),
    [
        ("mm", [(3, 4), (4, 5)], [(3, 5)], {}, 2 * 3 * 4 * 5),
        ("addmm", [(5,), (3, 4), (4, 5)], [(3, 5)], {}, 2 * 3 * 4 * 5),
        ("bmm", [(7, 3, 4), (7, 4, 5)], [(7, 3, 5)], {}, 2 * 7 * 3 * 4 * 5),
        ("baddbmm", [(7, 3, 5), (7, 3, 4), (7, 4, 5)], [(7, 3, 5)], {}, 2 * 7 * 3 * 4 * 5),
        # 2 samples, 3 -> 8 channels, 3 x 3 filter, 10 x 10 positions
        (
            "convolution",
            [(2, 3, 12, 12), (8, 3, 3, 3)],
            [(2, 8, 10, 10)],
            {"transposed": False},
            2 * 2 * 100 * 8 * 3 * 9,
        ),
        # 4 groups: each filter sees 2 of 8 channels
        (
            "convolution",
            [(2, 8, 12, 12), (8, 2, 3, 3)],
            [(2, 8, 10, 10)],
            {"groups": 4},
            2 * 2 * 100 * 8 * 2 * 9,
        ),
        # depthwise
        ("convolution", [(1, 8, 6, 6), (8, 1, 3, 3)], [(1, 8, 4, 4)], {"groups": 8}, 2 * 16 * 8 * 9),
        # transposed: every input position meets the filter bank
        (
            "convolution",
            [(2, 3, 5, 5), (3, 8, 2, 2)],
            [(2, 8, 10, 10)],
            {"transposed": True},
            2 * 2 * 25 * 3 * 8 * 4,
        ),
        # one and three dimensions
        ("convolution", [(2, 3, 12), (8, 3, 3)], [(2, 8, 10)], {}, 2 * 2 * 10 * 8 * 3 * 3),
        ("convolution", [(2, 3, 4, 4, 4), (8, 3, 1, 1, 1)], [(2, 8, 4, 4, 4)], {}, 2 * 2 * 64 * 8 * 3),
        # 2 x 4 heads, 6 queries, 5 keys, width 8 and 16: scores and their product with the values
        (
            "_scaled_dot_product_flash_attention",
            [(2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 16)],
            [],
            {},
            2 * 2 * 4 * 6 * 5 * (8 + 16),
        ),
        # one LSTM layer of width 20 on 10 steps of 3 sequences of width 7
        ("_cudnn_rnn", [(10, 3, 7)], [], {**LSTM, "num_layers": 1}, 2 * 30 * 4 * 20 * (7 + 20)),
        ("_cudnn_rnn", [(10, 3, 7)], [], LSTM, 2 * 30 * 4 * 20 * ((7 + 20) + (20 + 20))),
        (
            "_cudnn_rnn",
            [(10, 3, 7)],
            [],
            {**LSTM, "bidirectional": True},
            2 * 2 * 30 * 4 * 20 * ((7 + 20) + (40 + 20)),
        ),
        ("_cudnn_rnn", [(10, 3, 7)], [], {**LSTM, "mode": 3}, 2 * 30 * 3 * 20 * ((7 + 20) + (20 + 20))),
        ("_cudnn_rnn", [(10, 3, 7)], [], {**LSTM, "mode": 1, "num_layers": 1}, 2 * 30 * 20 * (7 + 20)),
        ("relu", [(100, 100)], [(100, 100)], {}, 0),
        ("an operator nobody knows", [], [], {}, 0),
    ],
)
def test_formula(name: str, inputs: Shapes, outputs: Shapes, args: dict[str, Any], expected: int) -> None:
    assert count(name, inputs, outputs, **args) == expected


@pytest.mark.parametrize(("mask", "gradients"), [("all", 2), ("weight only", 1), ("bias only", 0)])
def test_a_convolution_costs_one_forward_per_gradient_asked_for(mask: str, gradients: int) -> None:
    forward = count("convolution", [(2, 8, 12, 12), (8, 2, 3, 3)], [(2, 8, 10, 10)], groups=4)
    backward = count(
        "convolution_backward",
        [(2, 8, 10, 10), (2, 8, 12, 12), (8, 2, 3, 3)],
        [],
        groups=4,
        output_mask=MASKS[mask],
    )
    assert backward == gradients * forward


def test_the_backward_of_a_transposed_convolution_counts_input_positions() -> None:
    forward = count("convolution", [(2, 3, 5, 5), (3, 8, 2, 2)], [(2, 8, 10, 10)], transposed=True)
    inputs: Shapes = [(2, 8, 10, 10), (2, 3, 5, 5), (3, 8, 2, 2)]
    assert count("convolution_backward", inputs, [], transposed=True, output_mask=MASKS["all"]) == 2 * forward


def test_the_backward_of_attention_makes_five_products() -> None:
    q, k, v = (2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 8)
    forward = count("_scaled_dot_product_efficient_attention", [q, k, v], [])
    assert count("_scaled_dot_product_efficient_attention_backward", [q, q, k, v], []) == forward // 2 * 5


def test_the_backward_of_a_recurrence_costs_two_forwards() -> None:
    assert count("_cudnn_rnn_backward", [(10, 3, 7)], [], **LSTM) == 2 * count(
        "_cudnn_rnn", [(10, 3, 7)], [], **LSTM
    )


def test_packed_sequences_count_their_steps() -> None:
    assert count("_cudnn_rnn", [(30, 7)], [], **LSTM, batch_sizes=[3] * 10) == count(
        "_cudnn_rnn", [(10, 3, 7)], [], **LSTM
    )


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.integers(1, 8))
def test_a_batched_product_is_the_sum_of_its_products(m: int, k: int, n: int, batch: int) -> None:
    assert count("bmm", [(batch, m, k), (batch, k, n)], [(batch, m, n)]) == batch * count(
        "mm", [(m, k), (k, n)], [(m, n)]
    )


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 16), st.integers(1, 16))
def test_a_pointwise_convolution_is_a_matrix_product(
    batch: int, side: int, channels: int, filters: int
) -> None:
    convolution = count(
        "convolution",
        [(batch, channels, side, side), (filters, channels, 1, 1)],
        [(batch, filters, side, side)],
    )
    assert convolution == count(
        "mm", [(batch * side * side, channels), (channels, filters)], [(batch * side * side, filters)]
    )


def test_a_formula_is_registered_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretrain.graph.flops.FORMULAS", dict(FORMULAS))

    @register("one", "two")
    def formula(_args: Any, inputs: Any, _outputs: Any) -> int:
        return len(inputs)

    assert count("one", [(1,), (2,)], []) == count("two", [(1,), (2,)], []) == 2
