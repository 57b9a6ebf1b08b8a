"""Parameters, model FLOPs and MFU: by the formulas of the literature, the same whatever the plan."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import golden
from foretrain.api import make_job
from foretrain.capture import capture
from foretrain.forecast import Estimate
from foretrain.job import Job
from foretrain.model_flops import ModelFlops
from foretrain.step.counting import model_flops
from foretrain.step.graph import step_graph

CONFIG: dict[str, Any] = golden.LLAMA["config"]  # type: ignore[assignment]
SEQUENCE, BATCH = 1024, 32
NODE = {"node": "dgx-h100"}


@functools.cache
def jobs() -> dict[str, Job]:
    return golden.jobs()


def counted(name: str) -> ModelFlops:
    return model_flops(jobs()[name], step_graph(jobs()[name]))


def llama_parameters() -> int:
    """Of attention with grouped keys, of three matrices of an MLP, of norms, and of two embeddings."""
    width, layers = CONFIG["hidden_size"], CONFIG["num_hidden_layers"]
    keys = width * CONFIG["num_key_value_heads"] // CONFIG["num_attention_heads"]
    layer = 2 * width * width + 2 * width * keys + 3 * width * CONFIG["intermediate_size"] + 2 * width
    return int(layers * layer + width + 2 * width * CONFIG["vocab_size"])


@pytest.mark.parametrize("name", ["ZeRO 1", "tensor", "pipeline, gpipe", "experts", "context"])
def test_parameters_are_those_of_the_whole_model_on_every_plan(name: str) -> None:
    found = counted(name)
    assert found.trainable == found.parameters
    if name != "experts":
        assert found.parameters == llama_parameters()
    else:
        alone = Job.read({**jobs()[name].to_dict(), "cluster": golden.H100, "plan": {}})
        assert found.parameters == model_flops(alone, step_graph(alone)).parameters


@pytest.mark.parametrize("name", ["accumulation", "ZeRO 1", "tensor", "pipeline, gpipe", "recompute full"])
def test_a_language_model_has_six_flops_for_a_parameter_and_a_token_and_those_of_attention(name: str) -> None:
    """As PaLM counts them (Chowdhery et al. 2022, appendix B); looking up an embedding takes none."""
    found = counted(name)
    width, layers = CONFIG["hidden_size"], CONFIG["num_hidden_layers"]
    norms = (2 * layers + 1) * width
    multiplied = llama_parameters() - width * CONFIG["vocab_size"] - norms
    expected = 6 * multiplied + 12 * layers * width * SEQUENCE
    assert found.per_token == pytest.approx(expected, rel=1e-3)


def test_recomputation_counts_for_the_hardware_alone() -> None:
    none, full, selective = map(counted, ("compile", "recompute full", "recompute selective"))
    assert none.flops == full.flops == selective.flops
    assert none.recomputed == 0 < selective.recomputed < full.recomputed < full.flops / 3
    second = Estimate(1.0, 1.0, 1.0)
    mfu, hfu = full.mfu(second), full.hfu(second)
    assert mfu is not None
    assert hfu is not None
    assert hfu.median / mfu.median == pytest.approx(1 + full.recomputed / full.flops)


@pytest.mark.parametrize(
    ("model", "options", "peak"),
    [
        ("resnet18", {"precision": "amp-bf16"}, "bf16"),
        ("resnet18", {"precision": "tf32"}, "tf32"),
        ("resnet18", {"precision": "fp32"}, "tf32"),  # cuDNN's convolutions
        ("resnet18", {"precision": "amp-bf16", "device": "v100"}, "fp32"),  # which has no bf16
        ("vit_b_32", {"precision": "fp32"}, "fp32"),  # one convolution, next to no FLOPs
    ],
)
def test_the_peak_is_that_of_the_format_that_is_used(model: str, options: dict[str, Any], peak: str) -> None:
    job = make_job(model, batch=8, **options)
    found = model_flops(job, step_graph(job))
    assert found.peak_format == peak
    assert found.peak_flops_per_s == job.cluster.device.peak_flops(peak)


def test_a_mixed_cluster_has_the_peaks_of_all_its_devices() -> None:
    job = jobs()["mixed, even"]
    peaks = [group.device.peak_flops("bf16") * group.world_size for group in job.cluster.groups]
    assert counted("mixed, even").peak_flops_per_s == sum(peaks)


def test_frozen_parameters_are_told_apart(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    graph = capture(model, torch.zeros(2, 8))
    graph.save(path := tmp_path / "frozen.json.zst")
    found = model_flops(job := make_job(str(path)), step_graph(job))
    assert (found.parameters, found.trainable) == (72 + 36, 36)
    products = 2 * 2 * (8 * 8 + 8 * 4)
    assert found.flops == products + 2 * 2 * 8 * 4  # one gradient: that of the weights of the second
