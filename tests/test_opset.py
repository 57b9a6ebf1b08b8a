"""What operators are: every one that was measured or traced is known by name, as are its relatives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from foretrain.capture import capture_job
from foretrain.costs import workspace
from foretrain.graph import flops
from foretrain.graph.opset import (
    _NAMES,
    KINDS,
    PRODUCTS,
    communicates,
    is_attention,
    is_product,
    permutes,
    traits,
    waits,
)
from foretrain.job import Job

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
        ("torchvision.nms", "sort"),
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


# Traced models

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 128}
MAMBA = {name: value for name, value in TINY.items() if name != "num_attention_heads"}
T5 = {"model_type": "t5", "d_model": 32, "d_ff": 64, "num_layers": 1}
ZOO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "resnet10t": ({"source": "timm"}, {"image": 64, "optimizer": "adamw"}),
    "test_vit": ({"source": "timm"}, {"optimizer": "lamb"}),
    "test_convnext": ({"source": "timm"}, {"precision": "fp32", "optimizer": "adafactor"}),
    "test_efficientnet": ({"source": "timm"}, {"channels_last": True, "optimizer": "rmsprop"}),
    "shufflenet_v2_x0_5": ({"source": "torchvision"}, {"image": 64}),
    "llama": ({"task": "causal-lm", "config": {"model_type": "llama", **TINY}}, {"optimizer": "adamw-fused"}),
    "mixtral": ({"task": "causal-lm", "config": {"model_type": "mixtral", **TINY}}, {}),
    "mamba": ({"task": "causal-lm", "config": {"model_type": "mamba", **MAMBA}}, {}),
    "deberta": ({"task": "masked-lm", "config": {"model_type": "deberta-v2", **TINY}}, {}),
    "t5": ({"task": "seq2seq-lm", "config": T5}, {}),
}


@pytest.mark.parametrize("name", ZOO)
def test_every_traced_operator_has_traits(name: str) -> None:
    model, training = ZOO[name]
    is_image = "source" in model
    job = Job.read(
        {
            "model": {**model, "name": name} if is_image else {"source": "transformers", **model},
            "training": {"global_batch": 2, "precision": "amp-bf16", **training}
            | ({} if is_image else {"sequence": 32}),
            "cluster": {"device": "h200-sxm-141gb"},
        }
    )
    names = {operator.name for operator in capture_job(job).operators}
    assert [one for one in sorted(names) if traits(one).kind == "unknown"] == []


# Formulas


def test_only_operators_that_multiply_have_flops() -> None:
    kinds = {traits(name).kind for name in flops.FORMULAS}
    assert kinds == {*PRODUCTS, "convolution", "attention", "recurrence", "state space"}


def test_workspaces_are_of_known_operators() -> None:
    assert [name for name in workspace.RULES if traits(name).kind == "unknown"] == []
