"""Tests real modules of every source: finite weights and buffers, and a loss that training lowers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from foretrain.errors import InputError
from foretrain.measure.models import autocast, real_model, real_optimizer
from foretrain.schema import read
from foretrain.workload import Model, Training, Workload

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
}
NET = """
import torch

def bare(batch):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 10))

def whole(batch):
    targets = torch.randint(10, (batch,))
    loss = torch.nn.CrossEntropyLoss()
    return torch.nn.Linear(16, 10), torch.randn(batch, 16), lambda output: loss(output, targets)
"""


def language(model_type: str, task: str, **more: Any) -> dict[str, Any]:
    return {"source": "transformers", "task": task, "config": {"model_type": model_type, **SMALL, **more}}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "torchvision": (
        {"source": "torchvision", "name": "resnet18"},
        {"image": 32, "classes": 10, "channels_last": True},
    ),
    "auxiliary heads": ({"source": "torchvision", "name": "googlenet"}, {"image": 32, "classes": 10}),
    "timm": ({"source": "timm", "name": "test_vit"}, {"classes": 10, "optimizer": "adamw-fused"}),
    "python": ({"source": "python", "name": "net.py:bare"}, {"image": 8}),
    "python with all": ({"source": "python", "name": "net.py:whole"}, {"optimizer": "lamb"}),
    "causal-lm": (
        language("llama", "causal-lm", num_key_value_heads=2),
        {"sequence": 16, "precision": "amp-bf16", "optimizer": "adamw"},
    ),
    "experts": (
        language("mixtral", "causal-lm", num_key_value_heads=2, num_local_experts=2),
        {"sequence": 16},
    ),
    "adapters": (
        language("llama", "causal-lm", num_key_value_heads=2),
        {"sequence": 16, "precision": "bf16", "optimizer": "adamw", "adapter": {"kind": "qlora", "rank": 4}},
    ),
    "masked-lm": (language("bert", "masked-lm"), {"sequence": 16, "precision": "bf16"}),
    "question-answering": (language("bert", "question-answering"), {"sequence": 16}),
    "token-classification": (language("bert", "token-classification"), {"sequence": 16, "classes": 5}),
    "sequence-classification": (language("bert", "sequence-classification"), {"sequence": 16, "classes": 5}),
    "seq2seq-lm": (
        {
            "source": "transformers",
            "task": "seq2seq-lm",
            "config": {"model_type": "t5", "d_model": 32, "d_kv": 16, "num_layers": 1, "num_heads": 2},
        },
        {"sequence": 16},
    ),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small models gain nothing from more, and lose much where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def workload(tmp_path: Path, model: dict[str, Any], training: dict[str, Any]) -> Workload:
    (tmp_path / "net.py").write_text(NET)
    return Workload(
        model=read(Model, model, "model"),
        training=read(Training, {"global_batch": 4, **training}, "training"),
        base=tmp_path,
    )


@pytest.mark.parametrize("case", CASES)
def test_models_train(case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    work = workload(tmp_path, *CASES[case])
    model = real_model(work, 4, "cpu")
    assert all(
        tensor.isfinite().all()
        for tensor in (*model.module.parameters(), *model.module.buffers())
        if tensor.is_floating_point()
    )
    trained = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    optimizer = real_optimizer(work.training.optimizer, trained)
    losses = []
    for _ in range(6):
        with autocast(work.training.precision, "cpu"):
            loss = model.compute()
        loss.backward()
        with torch.no_grad():
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    assert all(map(math.isfinite, losses))
    assert min(losses[1:]) < losses[0]


def test_what_a_file_imports_is_read_anew_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules beside it and packages without an ``__init__``, even when edited within a second."""
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    work = workload(tmp_path, {"source": "python", "name": "net.py:make"}, {})
    (tmp_path / "net.py").write_text(
        "from a_side_of_it import side\nfrom a_package_of_it import part\n\ndef make(batch):\n"
        "    return part.make(batch, side)\n"
    )
    (tmp_path / "a_package_of_it").mkdir()
    for side, width in ((3, 4), (5, 6)):
        (tmp_path / "a_side_of_it.py").write_text(f"side = {side}\n")
        (tmp_path / "a_package_of_it" / "part.py").write_text(
            "import torch\n\ndef make(batch, side):\n    return "
            f"torch.nn.Linear(side, {width}), torch.randn(batch, side)\n"
        )
        assert real_model(work, 4, "cpu").output().shape == (4, width)
        inputs = real_model(work, 4, "cpu").inputs
        assert isinstance(inputs, tuple)
        assert inputs[0].shape == (4, side)


def test_inference_is_in_eval_mode(tmp_path: Path) -> None:
    work = workload(tmp_path, {"source": "torchvision", "name": "resnet18"}, {"image": 32, "mode": "infer"})
    assert not real_model(work, 2, "cpu").module.training


@pytest.mark.parametrize(
    ("model", "training", "line"),
    [
        ({"source": "graph", "name": "x.json.zst"}, {}, "is a captured graph, which cannot be run"),
        (
            {"source": "torchvision", "name": "resnet18"},
            {"precision": "fp8", "fp8": "delayed"},
            "'delayed' is Transformer Engine's and cannot be measured; tensorwise, rowwise",
        ),
        ({"source": "torchvision", "name": "resnet81"}, {}, "did you mean resnet18"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    model: dict[str, Any], training: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=line):
        real_model(workload(tmp_path, model, training), 4, "cpu")
