"""Networks of diffusion models: as large as published, and the steps that they are trained by."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from foretrain.capture.sources.diffusion import NETWORKS
from foretrain.capture.sources.models import load_model
from foretrain.capture.tracing.tracer import trace_step
from foretrain.errors import ForetrainError
from foretrain.graph import OpGraph
from foretrain.model_names import exact_preset, model_presets, model_section
from foretrain.workload import Model, Training, Workload

DIFFUSION = {name: preset for name, preset in model_presets().items() if preset["source"] == "diffusion"}
SMALL: dict[str, dict[str, Any]] = {
    "stable-diffusion-v1-5": {"width": 32, "blocks": 1, "context": 16},
    "stabilityai/stable-diffusion-xl-base-1.0": {"width": 64, "blocks": 1, "context": 16, "pooled": 8, "depths": [0, 1, 1], "middle_depth": 1},
    "openai/guided-diffusion-64": {"width": 32, "head_width": 32, "blocks": 1},
    "google/ddpm-cifar10-32": {"width": 32, "blocks": 1},
    "facebook/DiT-XL-2-256": {"width": 48, "depth": 2, "heads": 2},
    "PixArt-alpha/PixArt-XL-2-1024-MS": {"width": 48, "depth": 2, "heads": 2, "context": 16},
    "stabilityai/stable-diffusion-3.5-large": {"depth": 2, "context": 16, "pooled": 8},
    "black-forest-labs/FLUX.1-dev": {"width": 256, "heads": 2, "depth": 1, "single_depth": 1, "context": 16, "pooled": 8},
}  # fmt: skip
"""A model of every kind, made small."""


def workload(name: str, args: dict[str, Any] | None = None, **training: Any) -> Workload:
    model = Model(source="diffusion", name=name, args=args or {})
    return Workload(model=model, training=Training(global_batch=2, **training), base=Path())


def traced(work: Workload) -> OpGraph:
    loaded = load_model(work, 2)
    mode, precision = work.training.mode, work.training.precision
    return trace_step(loaded.module, loaded.inputs, loaded.loss, samples=2, mode=mode, precision=precision)


@pytest.mark.parametrize("name", DIFFUSION)
def test_a_network_has_as_many_parameters_as_published(name: str) -> None:
    entry = DIFFUSION[name]
    with torch.device("meta"):
        network = NETWORKS[entry["network"]](**entry["config"])
    assert sum(one.numel() for one in network.parameters()) == pytest.approx(entry["parameters"], rel=0.005)


@pytest.mark.parametrize(
    ("name", "billions"), [("DiT-S/2", 6.06), ("DiT-XL-2-256", 118.64), ("adm-imagenet-256", 1120)]
)
def test_a_network_multiplies_as_often_as_published(name: str, billions: float) -> None:
    graph = traced(workload(name, mode="infer"))
    assert graph.total("flops") / 2 / 2e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize("name", SMALL)
def test_a_step_is_traced_as_it_runs(name: str) -> None:
    work = workload(name, SMALL[name], image=64 if "context" in SMALL[name] or "depth" in SMALL[name] else 16)
    graph = traced(work)
    real = load_model(work, 2, "cpu")
    with FlopCounterMode(display=False) as counted:
        assert isinstance(real.inputs, Mapping)
        noise = real.module(**real.inputs)
        assert real.loss is not None
        real.loss(noise).backward()
    latents = real.inputs["latents"]
    assert (len(noise), *noise.shape[2:]) == (len(latents), *latents.shape[2:])
    assert all(one.grad is not None for one in real.module.parameters())
    products = sum(op.operator.flops for op in graph.ops if "attention" not in op.operator.name)
    assert products == sum(
        count for name, count in counted.get_flop_counts()["Global"].items() if "attention" not in str(name)
    )
    assert {op.phase for op in graph.ops} == {"forward", "backward", "optimizer"}


def test_latents_are_an_eighth_of_the_image_and_pixels_are_pixels() -> None:
    latents = load_model(workload("sd-1.5", SMALL["stable-diffusion-v1-5"], image=(3, 256, 128)), 2)
    pixels = load_model(workload("ddpm", SMALL["google/ddpm-cifar10-32"]), 2)
    assert latents.inputs["latents"].shape == (2, 4, 32, 16)  # type: ignore[call-overload]
    assert pixels.inputs["latents"].shape == (2, 3, 32, 32)  # type: ignore[call-overload]
    assert any(note.startswith("the autoencoder is not included") for note in latents.notes)
    assert any(note.startswith("encoders of prompts are not included") for note in latents.notes)
    assert pixels.notes == ()


def test_names_that_people_have() -> None:
    meant = exact_preset("runwayml/stable-diffusion-v1-5")
    assert meant is not None
    assert meant["name"] == "stable-diffusion-v1-5/stable-diffusion-v1-5"
    assert model_section("black-forest-labs/flux.1-dev", None) == (
        {"source": "diffusion", "name": "black-forest-labs/FLUX.1-dev"}, {"optimizer": "adamw", "image": 1024}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "args", "training", "message"),
    [
        (
            "stable-difusion-xl",
            {},
            {},
            r"^model\.name: 'stable-difusion-xl' is not a diffusion model; .*did you mean",
        ),
        ("ddpm", {"widht": 3}, {}, r"^model\.args: 'widht' is not an argument of UNet: .*did you mean width"),
        (
            "ddpm",
            {},
            {"image": 30},
            r"^training\.image: \[3, 30, 30\] is not \[3, height, width\] in multiples of 8 ",
        ),
        (
            "sd-1.5",
            {},
            {"image": (4, 64, 64)},
            r"^training\.image: \[4, 64, 64\] is not .*multiples of 64 pixels$",
        ),
        ("flux", {}, {"classes": 10}, r"^training\.classes: 10 is not used by flux, which has prompts$"),
        ("flux", {}, {"sequence": 10}, r"^training\.sequence: 10 is not used by a diffusion model$"),
    ],
)
def test_what_a_diffusion_model_cannot_take_is_one_line(
    name: str, args: dict[str, Any], training: dict[str, Any], message: str
) -> None:
    with pytest.raises(ForetrainError, match=message):
        load_model(workload(name, args, **training), 2)
