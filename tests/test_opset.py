"""What operators are: every one that was measured or traced is known by name, and relatives derive from it."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet
import pytest

from foretrain.graph.opset import (
    _NAMES,
    KINDS,
    communicates,
    is_attention,
    is_product,
    permutes,
    traits,
    waits,
)

OPERATORS = Path(__file__).parents[1] / "data" / "ops_h200.parquet"


def test_every_measured_operator_has_traits() -> None:
    names = set(pyarrow.parquet.read_table(OPERATORS, columns=["name"]).column("name").to_pylist())
    assert [name for name in sorted(names) if traits(name).kind == "unknown"] == []


def test_a_name_is_of_one_kind_and_every_kind_has_names() -> None:
    names = [name for row in _NAMES.values() for name in row.split()]
    assert len(names) == len(set(names))
    assert {*_NAMES, "unknown"} == set(KINDS)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("add_", "pointwise"),
        ("gelu_backward", "activation"),
        ("native_batch_norm_backward", "channel norm"),
        ("_foreach_norm", "vector norm"),
        ("_fused_rms_norm", "row norm"),
        ("_fused_adamw_", "optimizer"),
        ("slice", "view"),
        ("slice_backward", "copy"),
        ("torchvision.nms", "unknown"),
        ("unheard_of_backward", "unknown"),
        ("", "unknown"),
    ],
)
def test_kinds_of_relatives(name: str, kind: str) -> None:
    assert traits(name).kind == kind


def test_a_gradient_is_not_random_though_its_operator_is() -> None:
    assert traits("native_dropout").random
    assert traits("bernoulli_").random
    assert not traits("native_dropout_backward").random


def test_lists_of_tensors() -> None:
    assert all(traits(name).multi_tensor for name in ("_foreach_add_", "_fused_adamw_", "_fused_sgd_"))
    assert not any(traits(name).multi_tensor for name in ("add_", "_fused_rms_norm", "fused"))


def test_questions_by_name() -> None:
    assert [name for name in ("mm", "bmm", "_grouped_mm", "mv", "convolution") if is_product(name)] == [
        "mm",
        "bmm",
        "_grouped_mm",
    ]
    assert is_attention("_scaled_dot_product_flash_attention_backward")
    assert permutes("index_put_")
    assert communicates("all_to_all")
    assert waits("_local_scalar_dense")
