"""Gives torchvision's models that do not classify images what they are trained with: clips, pairs of frames,
maps of classes; detectors have a module of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from foretrain.capture.sources.detection import IMAGE, load_detector
from foretrain.capture.sources.loaded import LoadedModel, Loss, classifier_loss, numbers
from foretrain.errors import InputError, invalid

Size = tuple[int, int, int]
"""Channels, height and width."""

_AUXILIARY_WEIGHT = 0.5
"""Of the auxiliary head of a segmentation model, in torchvision's training script."""
_FLOW_DECAY = 0.8
"""Of RAFT's losses, from each estimate back to the one before (Teed and Deng 2020, section 3.3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionTask:
    """What a model is given where the job does not say."""

    kind: str
    image: Size = (3, 224, 224)
    frames: int = 0
    """Of a clip; 0 where the input is an image."""

    @classmethod
    def of(cls, name: str, module: str, args: Mapping[str, Any]) -> VisionTask:
        """The task of a torchvision model by its name, the Python module that builds it, and its
        arguments."""
        kind = module.split(".")[-2]
        if kind == "detection":
            return cls(kind=kind, image=IMAGE)
        if kind == "segmentation":
            return cls(kind=kind, image=(3, 480, 480))
        if kind == "optical_flow":
            return cls(kind=kind, image=(3, 368, 496))
        if kind == "video":
            usual = _FRAMES.get(name, 16)
            frames = args.get("frames", usual)
            if not isinstance(frames, int) or isinstance(frames, bool) or frames < 1:
                raise invalid("model.args.frames", frames, "a number of frames, 1 or more")
            if name.startswith("mvit_") and frames != usual:
                raise invalid("model.args.frames", frames, f"{usual}, which is all that {name} takes")
            small = name in ("r3d_18", "mc3_18", "r2plus1d_18")
            return cls(kind=kind, image=(3, 112, 112) if small else (3, 224, 224), frames=frames)
        if "frames" in args:
            raise InputError(f"model.args.frames: {args['frames']!r}, but {name} is no model of clips")
        large = name.endswith("inception_v3")
        return cls(kind="classification", image=(3, 299, 299) if large else (3, 224, 224))


_FRAMES = {"s3d": 64, "swin3d_t": 32, "swin3d_s": 32, "swin3d_b": 32}
"""Per clip in the trainings of torchvision's weights; 16 for all others."""


def load_task(
    task: VisionTask, module: torch.nn.Module, batch: int, image: Size | None, mode: str, device: str
) -> LoadedModel:
    """The model with inputs for its task, and its loss."""
    size = image or task.image
    if task.kind == "detection":
        return load_detector(module, batch, size, mode, device)
    inputs: tuple[torch.Tensor, ...] = (numbers((batch, *size), device),)
    loss: Loss = classifier_loss()
    note = f"images of {size[1]}x{size[2]} pixels"
    if task.kind == "segmentation":
        loss = _segmentation_loss
    elif task.kind == "video":
        inputs = (numbers((batch, size[0], task.frames, *size[1:]), device),)
        note = f"clips of {task.frames} frames of {size[1]}x{size[2]} pixels"
    elif task.kind == "optical_flow":
        inputs = (*inputs, numbers((batch, *size), device))
        loss = _flow_loss
        note = f"pairs of {note}"
    is_said = task.kind == "classification" or (image is not None and not task.frames)
    return LoadedModel(module=module, inputs=inputs, loss=loss, notes=() if is_said else (note,))


def _segmentation_loss(output: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy at every pixel, of the main head and of the auxiliary one where there is one."""
    loss = _pixel_loss(output["out"])
    return loss + _AUXILIARY_WEIGHT * _pixel_loss(output["aux"]) if "aux" in output else loss


def _pixel_loss(logits: torch.Tensor) -> torch.Tensor:
    classes = torch.zeros((logits.shape[0], *logits.shape[2:]), dtype=torch.long, device=logits.device)
    return F.cross_entropy(logits, classes, ignore_index=255)


def _flow_loss(estimates: list[torch.Tensor]) -> torch.Tensor:
    """The distance of each estimate to the true flow; later ones weigh more."""
    flow = torch.zeros_like(estimates[-1])
    weights = [_FLOW_DECAY ** (len(estimates) - 1 - number) for number in range(len(estimates))]
    distances = [(estimate - flow).abs().mean() for estimate in estimates]
    return torch.stack([weight * one for weight, one in zip(weights, distances, strict=True)]).sum()
