"""Builds the networks of diffusion models, with noisy latents, time steps and prompts to train them on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from foretrain.capture.sources.diffusion.dit import DiT, PixArt
from foretrain.capture.sources.diffusion.layers import Denoiser
from foretrain.capture.sources.diffusion.mmdit import Flux, MMDiT
from foretrain.capture.sources.diffusion.unet import UNet
from foretrain.capture.sources.loaded import LoadedModel, build_on, building, numbers
from foretrain.errors import InputError, invalid, unknown
from foretrain.model_names import exact_preset, model_presets
from foretrain.workload import Workload

NETWORKS: Mapping[str, type[Denoiser]] = {
    "unet": UNet,
    "dit": DiT,
    "pixart": PixArt,
    "mmdit": MMDiT,
    "flux": Flux,
}
_STEPS = 1000
"""Of the noise, which a time step is drawn from."""


def load_diffusion(workload: Workload, batch: int, device: str) -> LoadedModel:
    """The network of a diffusion model with a batch of noisy latents; its loss is the error of the noise."""
    name, training = workload.model.name, workload.training
    assert name is not None
    entry = exact_preset(name)
    if entry is None or entry["source"] != "diffusion":
        known = [name for name, preset in model_presets().items() if preset["source"] == "diffusion"]
        raise unknown("model.name", name, known, "a diffusion model;")
    network = NETWORKS[entry["network"]]
    arguments = {**entry["config"], **_checked(network, workload)}
    with building(f"model {entry['name']}"):
        module = build_on(lambda: network(**arguments), device)
    assert isinstance(module, Denoiser)
    height, width = _places(module, training.image_shape or (3, entry["image"], entry["image"]))
    inputs = {
        argument: _values(argument, shape, device)
        for argument, shape in module.shapes(batch, height, width).items()
    }
    return LoadedModel(
        module=module, inputs=inputs, loss=_noise_loss(module), notes=tuple(_notes(workload, module))
    )


def _checked(network: type[Denoiser], workload: Workload) -> dict[str, Any]:
    """The job's arguments, all of which the network has."""
    allowed = inspect.signature(network).parameters
    arguments, classes = dict(workload.model.args), workload.training.classes
    for argument in arguments:
        if argument not in allowed:
            raise unknown("model.args", argument, allowed, f"an argument of {network.__name__}:")
    if classes is None:
        return arguments
    if "classes" not in allowed:
        raise InputError(
            f"training.classes: {classes} is not used by {workload.model.name}, which has prompts"
        )
    return {"classes": classes, **arguments}


def _places(module: Denoiser, image: tuple[int, int, int]) -> tuple[int, int]:
    """Rows and columns of the network's input for images of a size in pixels."""
    side = module.compression * module.step
    if any(pixels % side for pixels in image[1:]) or image[0] != 3:
        raise invalid("training.image", list(image), f"[3, height, width] in multiples of {side} pixels")
    return image[1] // module.compression, image[2] // module.compression


def _values(argument: str, shape: tuple[int, ...], device: str) -> torch.Tensor:
    if argument == "labels":
        return torch.zeros(shape, dtype=torch.long, device="cpu" if device == "meta" else device)
    if argument == "steps":
        return torch.full(shape, _STEPS // 2, dtype=torch.long, device="cpu" if device == "meta" else device)
    return numbers(shape, device)


def _noise_loss(module: Denoiser) -> Callable[[torch.Tensor], torch.Tensor]:
    def loss(output: torch.Tensor) -> torch.Tensor:
        """The squared error against the noise that was added; a predicted variance is left out."""
        predicted = output[:, : module.channels].float()
        return F.mse_loss(predicted, torch.randn_like(predicted))

    return loss


def _notes(workload: Workload, module: Denoiser) -> Iterator[str]:
    if module.compression > 1:
        size = f"1/{module.compression} of the image's sides"
        yield f"the autoencoder is not included: latents, of {size}, are computed beforehand"
    if "context" in module.shapes(1, module.step, module.step):
        yield "encoders of prompts are not included: their outputs are computed beforehand"
    if workload.training.mode == "infer":
        yield "one denoising step; a picture takes as many as its sampler has"
