"""Tools of others as predictors: they say what they say, and refuse what is not theirs in one line."""

from __future__ import annotations

import math
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


# torch's own tools

NETS = """
import torch

WIDE, HIDDEN = 64, 256

def mlp(batch):
    layers = torch.nn.Linear(WIDE, HIDDEN, bias=False), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 8, bias=False)
    return torch.nn.Sequential(*layers), (torch.zeros(batch, WIDE),), lambda output: output.sum()

def half_frozen(batch):
    module, inputs, loss = mlp(batch)
    module[0].requires_grad_(False)
    return module, inputs, loss

def product(batch):
    return torch.nn.Linear(4096, 4096, bias=False), (torch.zeros(batch, 4096),), lambda output: output.sum()

def attention(batch):
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = torch.nn.Linear(64, 64)

        def forward(self, x):
            heads = self.heads(x)[:, None]
            return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)

    return Attention(), (torch.zeros(batch, 128, 64),), lambda output: output.sum()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path


def net(folder: Path, name: str, **training: Any) -> Job:
    document = {
        "model": {"source": "python", "name": f"nets.py:{name}"},
        "training": {"global_batch": 4096, "optimizer": "sgd-plain", **training},
        "cluster": {"device": "h200-sxm-141gb"},
    }
    return Job.read(document, base=folder)


def test_memtracker_counts_what_autograd_saves(folder: Path) -> None:
    pytest.importorskip("torch")
    batch, wide, hidden, out = 4096, 64, 256, 8
    kept = wide * hidden + hidden * out + batch * wide  # weights and inputs
    # The gradient of the second weight; what ReLU gave, its gradient, and that of what it was given.
    in_backward = hidden * out + 3 * batch * hidden
    found = get(f"{PEERS}:MemTracker").predict(net(folder, "mlp"))["peak_memory_bytes"]
    assert found.median == pytest.approx(4 * (kept + in_backward), rel=1e-4)


def test_memtracker_sees_the_casts_of_autocast(folder: Path) -> None:
    """Activations are half as large, and inputs and weights are there twice."""
    pytest.importorskip("torch")
    whole, cast = (
        get(f"{PEERS}:MemTracker")
        .predict(net(folder, "mlp", precision=precision))["peak_memory_bytes"]
        .median
        for precision in ("fp32", "amp-bf16")
    )
    assert 0.5 < cast / whole < 0.6


def test_memtracker_refuses_weights_that_are_not_trained(folder: Path) -> None:
    pytest.importorskip("torch")
    with pytest.raises(UnsupportedJob, match="cannot register a hook on a tensor that doesn't require"):
        get(f"{PEERS}:MemTracker").predict(net(folder, "half_frozen"))


def test_runtime_estimator_is_a_roofline_of_the_jobs_device(folder: Path) -> None:
    """Of a product of squares: half of its operations at three quarters of the peak rate, as torch has it."""
    pytest.importorskip("torch")
    asked = net(folder, "product", mode="infer", optimizer="sgd")
    found = get(f"{PEERS}:RuntimeEstimator").predict(asked)
    rate = asked.cluster.device.peak_flops("fp32")
    assert math.isclose(found["step_time_s"].median, 4096**3 / (0.75 * rate), rel_tol=1e-6)
    assert found["device_busy_s"].median == found["step_time_s"].median


def test_runtime_estimator_refuses_attention_in_16_bits(folder: Path) -> None:
    """It takes the dtype of an operator from its outputs, and fused attention has two."""
    pytest.importorskip("torch")
    with pytest.raises(UnsupportedJob, match="Only support single out dtype"):
        get(f"{PEERS}:RuntimeEstimator").predict(net(folder, "attention", precision="amp-bf16"))


@pytest.mark.parametrize("tool", ["MemTracker", "RuntimeEstimator"])
def test_compiled_steps_are_not_asked_of_torchs_tools(tool: str, folder: Path) -> None:
    with pytest.raises(UnsupportedJob, match="asked of eager steps on one device alone"):
        get(f"{PEERS}:{tool}").predict(net(folder, "mlp", compile=True))
