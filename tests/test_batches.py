"""Two traces of a model give its graph at any other batch size, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretrain.capture import _trace, _trace_rank, capture
from foretrain.graph import OpGraph
from foretrain.graph.batches import BatchFamily, NotLinear
from foretrain.job import Job

WIDTH = 8
TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
GROUPED = {**TEXT, "num_key_value_heads": 2}
TIMM = (
    "resnet18", "densenet121", "mobilenetv3_small_050", "efficientnet_b0", "regnetx_002", "ghostnet_050",
    "convnext_atto", "nfnet_l0", "tresnet_m", "vit_tiny_patch16_224", "mixer_s32_224", "poolformer_s12",
    "xcit_nano_12_p16_224", "swin_tiny_patch4_window7_224", "coat_lite_tiny", "cait_xxs24_224",
)  # fmt: skip
SHALLOW: dict[str, dict[str, Any]] = {
    "densenet121": {"block_config": [2, 3, 2, 2]},
    "convnext_atto": {"depths": [2, 1, 2, 1]},
    "vit_tiny_patch16_224": {"depth": 3},
    "xcit_nano_12_p16_224": {"depth": 3},
    "swin_tiny_patch4_window7_224": {"depths": [2, 2, 2, 2]},
    "coat_lite_tiny": {"serial_depths": [2, 1, 1, 2]},
    "cait_xxs24_224": {"depth": 3},
}
"""Arguments that leave out layers that are like others."""
FIXED_SIZE = ("vit", "mixer", "xcit", "swin", "coat", "cait")
TORCHVISION = ("squeezenet1_1", "shufflenet_v2_x0_5", "googlenet")
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 128},
    "bert": TEXT,
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 128},
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "vocab_size": 128},
    "gemma2": {**GROUPED, "head_dim": 8, "sliding_window": 16},
    "mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
}
TASKS = {"bert": "masked-lm", "t5": "seq2seq-lm"}


def a_job(name: str, batch: int, cluster: Any = None, plan: Any = None, **training: Any) -> Job:
    if name in TRANSFORMERS:
        config = {"model_type": name, **TRANSFORMERS[name]}
        model: dict[str, Any] = {
            "source": "transformers",
            "task": TASKS.get(name, "causal-lm"),
            "config": config,
        }
        training = {"sequence": 32, "precision": "bf16", "optimizer": "adamw", **training}
    else:
        model = {"source": "timm" if name in TIMM else "torchvision", "name": name}
        model["args"] = SHALLOW.get(name, {})
        training = {"image": 224 if name.startswith(FIXED_SIZE) else 64, "precision": "amp-bf16", **training}
    return Job.read({
        "model": model, "training": {"global_batch": batch, **training},
        "cluster": cluster or {"device": "h100"}, "plan": plan or {},
    })  # fmt: skip


def traced(name: str, batch: int, **training: Any) -> OpGraph:
    return _trace(a_job(name, batch, **training), batch)


@pytest.mark.parametrize("name", [*TIMM, *TORCHVISION, *TRANSFORMERS])
def test_a_derived_graph_is_the_traced_one(name: str) -> None:
    family = BatchFamily.of(traced(name, 8), traced(name, 32))
    assert family.at(5).digest() == traced(name, 5).digest()


@pytest.mark.parametrize(
    "training",
    [
        {"mode": "infer"},
        {"channels_last": True},
        {"precision": "fp32"},
        {"optimizer": "lamb"},
        {"adapter": "qlora:2"},
    ],
    ids=str,
)
def test_so_it_is_for_every_kind_of_training(training: dict[str, Any]) -> None:
    first, second, third = (traced("resnet18", batch, **training) for batch in (16, 4, 7))
    assert BatchFamily.of(first, second).at(7).digest() == third.digest()


@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_so_it_is_for_a_rank(model: str) -> None:
    def rank(batch: int) -> OpGraph:
        plan = {"tensor": 2, "micro_batch": batch}
        job = a_job(model, 2 * batch, {"device": "h100", "devices_per_node": 2}, plan)
        return _trace_rank(job, batch)

    first, second, third = (rank(batch) for batch in (4, 8, 3))
    assert (first.accumulates, first.stack is not None) == (True, True)
    assert BatchFamily.of(first, second).at(3).digest() == third.digest()


def test_a_family_survives_its_file(tmp_path: Path) -> None:
    first, second = (traced("llama", batch) for batch in (8, 32))
    BatchFamily.of(first, second).save(tmp_path / "family.zst")
    family = BatchFamily.load(tmp_path / "family.zst")
    assert [family.at(batch).digest() for batch in (8, 32)] == [first.digest(), second.digest()]


# Modules in hand


class Function(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.function(self.linear(x))
        return result


def graph(function: Any, batch: int) -> OpGraph:
    return capture(Function(function), torch.zeros(batch, WIDTH), loss=torch.sum)


def test_operators_that_are_equal_at_one_batch_only_are_told_apart() -> None:
    """A batch as large as the width makes the activations look like the weights."""

    def squares(x: Tensor) -> Tensor:
        return (
            x * x
            + (torch.ones(WIDTH, WIDTH, device=x.device) * torch.ones(WIDTH, WIDTH, device=x.device)).sum()
        )

    for pair, asked in (((4, 16), WIDTH), ((WIDTH, 16), 5), ((5, WIDTH), 16)):
        family = BatchFamily.of(*(graph(squares, batch) for batch in pair))
        derived, traced = family.at(asked), graph(squares, asked)
        assert len(derived.operators) == len(traced.operators)
        assert derived.digest() == traced.digest()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x @ x.T, "two dimensions grow"),
        (lambda x: (x[:, None] - x[None]).flatten(), "two dimensions grow"),
        (lambda x: x.sum().expand(x.shape[0] ** 2), "not in proportion"),
        (lambda x: x[: x.shape[0] // 3], "no whole number per sample"),
        (lambda x: x[1:] - x[:-1], "not in proportion"),
        (lambda x: sum(part.sum() for part in x.split(4)), "number of operators"),
        (lambda x: x.relu() if x.shape[0] < 10 else x.tanh(), "becomes"),
        (lambda x: x / (1 / x.shape[0]), "becomes"),
        (lambda x: torch.ones(3, 16, device=x.device)[:, : x.shape[0]] @ x, "a tensor of fixed size is cut"),
    ],
    ids=["contrastive", "pairs", "square", "third", "differences", "chunks", "switch", "fraction", "table"],
)  # fmt: skip
def test_what_does_not_grow_in_lines_is_refused(function: Any, reason: str) -> None:
    with pytest.raises(NotLinear, match=reason):
        BatchFamily.of(graph(function, 8), graph(function, 12))


def test_graphs_of_two_models_are_no_family() -> None:
    with pytest.raises(NotLinear):
        BatchFamily.of(graph(torch.relu, 8), graph(torch.tanh, 16))


@pytest.mark.parametrize("batches", [(8, 8), (1, 8), (8, 1)])
def test_two_batch_sizes_of_at_least_two_samples_are_needed(batches: tuple[int, int]) -> None:
    with pytest.raises(NotLinear, match="do not tell lines apart"):
        BatchFamily.of(*(graph(torch.relu, batch) for batch in batches))


def test_a_batch_of_one_sample_is_not_derived() -> None:
    with pytest.raises(NotLinear, match="less than 2"):
        BatchFamily.of(graph(torch.relu, 8), graph(torch.relu, 16)).at(1)
