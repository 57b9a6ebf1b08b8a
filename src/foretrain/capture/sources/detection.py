"""Gives torchvision's detection models images with targets, and says what their networks find in them.

Much of a detector is decided by data: which anchors lie on objects, which boxes overlap, how many are kept.
Targets are known, so matching them to anchors is computed. What depends on weights is assumed: every number
that a detector bounds is at its bound. On a real device nothing is assumed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from foretrain.capture.sources.loaded import LoadedModel, numbers
from foretrain.capture.tracing.constants import assume, known_value

OBJECTS = 7
"""Per image: 860,001 boxes in the 118,287 images of COCO's train2017."""
IMAGE = (3, 480, 640)
"""The usual size of COCO's images, before the model scales them."""
_SMALLEST = 32.0
"""Pixels of the shortest side of an assumed box."""
_SIZES = 4
"""Different lengths of the sides of assumed boxes, up to about half of the image."""
_SURE = 10.0
"""A logit whose probability is above every threshold."""


def load_detector(
    module: Any, batch: int, image: tuple[int, int, int], mode: str, device: str
) -> LoadedModel:
    """The model with a batch of images and, to train it, their objects."""
    images = [numbers(image, device) for _ in range(batch)]
    notes = [
        f"images of {image[1]}x{image[2]} pixels, which the model itself scales to {_scaled(module, image)}"
    ]
    if mode == "infer":
        _assume_outputs(module)
        kept = _detections_per_image(module)
        notes.append(f"detections fill their bound of {kept} per image")
        return LoadedModel(module=module, inputs=(images,), loss=None, notes=tuple(notes))
    targets = [_target(module, image, number, device) for number in range(batch)]
    boxes = [target["boxes"].cpu() for target in targets]
    module.transform.register_forward_pre_hook(functools.partial(_know_boxes, boxes))
    _assume_outputs(module)
    notes.append(f"{OBJECTS} objects per image")
    if _is_two_stage(module):
        sampler = module.roi_heads.fg_bg_sampler
        positive = int(sampler.batch_size_per_image * sampler.positive_fraction)
        notes.append(
            f"{sampler.batch_size_per_image} proposals per image are sampled, {positive} of them on objects"
        )
    return LoadedModel(module=module, inputs=(images, targets), loss=sum_of_losses, notes=("; ".join(notes),))


def is_detector(module: torch.nn.Module) -> bool:
    """Whether a module is one of torchvision's detectors, whoever built it."""
    kinds = {kind.__module__.rpartition(".")[0] for kind in type(module).__mro__}
    return "torchvision.models.detection" in kinds and hasattr(module, "transform")


def sum_of_losses(losses: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What a detector returns in training, added up as torchvision's own training script does."""
    return torch.stack(list(losses.values())).sum()


def _is_two_stage(module: Any) -> bool:
    return hasattr(module, "roi_heads")


def _detections_per_image(module: Any) -> int:
    return int((module.roi_heads if _is_two_stage(module) else module).detections_per_img)


def _scaled(module: Any, image: tuple[int, int, int]) -> str:
    transform = module.transform
    if transform.fixed_size is not None:
        width, height = transform.fixed_size
        return f"{height}x{width}"
    short, long = min(image[1:]), max(image[1:])
    scale = min(transform.min_size[-1] / short, transform.max_size / long)
    return f"{int(image[1] * scale)}x{int(image[2] * scale)}"


# Targets


def _target(module: Any, image: tuple[int, int, int], number: int, device: str) -> dict[str, torch.Tensor]:
    _, height, width = image
    target = {
        "boxes": _boxes(OBJECTS, height, width, seed=number).to("cpu" if device == "meta" else device),
        "labels": torch.ones(OBJECTS, dtype=torch.long, device="cpu" if device == "meta" else device),
    }
    heads = module.roi_heads if _is_two_stage(module) else None
    if heads is not None and heads.has_mask():
        target["masks"] = torch.zeros((OBJECTS, height, width), dtype=torch.uint8, device=device)
    if heads is not None and heads.has_keypoint():
        points = heads.keypoint_predictor.kps_score_lowres.out_channels
        target["keypoints"] = _points(target["boxes"], points)
    return target


def _boxes(count: int, height: int, width: int, seed: int) -> torch.Tensor:
    """Boxes of a few sizes, small to large, anywhere; the same for the same seed: left, top, right,
    bottom."""
    drawn = torch.rand((count, 4), generator=torch.Generator().manual_seed(seed))
    image, smallest = torch.tensor([width, height]), min(_SMALLEST, min(height, width) / 4)
    step = (drawn[:, :2] * _SIZES).floor() / _SIZES
    sides = (smallest * (image / smallest) ** step).floor()
    corner = ((image - sides) * drawn[:, 2:]).floor()
    return torch.cat([corner, corner + sides], dim=1)


def _points(boxes: torch.Tensor, count: int) -> torch.Tensor:
    """Visible keypoints along the diagonal of each box."""
    share = torch.linspace(0.1, 0.9, count, device=boxes.device)[None, :, None]
    places = boxes[:, None, :2] + share * (boxes[:, None, 2:] - boxes[:, None, :2])
    return torch.cat([places, torch.ones_like(places[..., :1])], dim=2)


def _know_boxes(boxes: list[torch.Tensor], _transform: Any, args: tuple[Any, ...]) -> None:
    for target, known in zip(args[1], boxes, strict=True):
        assume(target["boxes"], known)
        if "keypoints" in target:
            assume(target["keypoints"], _points(known, target["keypoints"].shape[1]))


# What the networks find


def _assume_outputs(module: Any) -> None:
    if _is_two_stage(module):
        module.rpn.filter_proposals = functools.partial(_proposals, module.rpn.filter_proposals)
        module.roi_heads.select_training_samples = functools.partial(
            _samples, module.roi_heads.fg_bg_sampler, module.roi_heads.select_training_samples
        )
        module.roi_heads.postprocess_detections = functools.partial(
            _detections, module.roi_heads.postprocess_detections
        )
    else:
        module.head.register_forward_hook(_anchor_scores)


def _proposals(
    filter_proposals: Callable[..., Any],
    proposals: torch.Tensor,
    objectness: torch.Tensor,
    image_shapes: list[tuple[int, int]],
    *rest: Any,
) -> Any:
    """Of all anchors as many become proposals as are allowed, of all sizes and anywhere in the image."""
    height, width = image_shapes[0]
    whole_image = torch.tensor([0.0, 0.0, width, height])
    assume(proposals, whole_image.expand(proposals.shape))
    assume(objectness, torch.zeros(1).expand(objectness.shape))
    boxes, scores = filter_proposals(proposals, objectness, image_shapes, *rest)
    for number, (kept, (height, width)) in enumerate(zip(boxes, image_shapes, strict=True)):
        assume(kept, _boxes(len(kept), height, width, seed=number))
    return boxes, scores


def _samples(
    sampler: Any,
    select: Callable[..., Any],
    proposals: list[torch.Tensor],
    targets: list[dict[str, torch.Tensor]],
) -> Any:
    """Of the proposals of an image as many lie on objects as are sampled of such."""
    for boxes, target in zip(proposals, targets, strict=True):
        anywhere, objects = known_value(boxes), known_value(target["boxes"])
        if boxes.is_meta and anywhere is not None and objects is not None:
            positive = min(int(sampler.batch_size_per_image * sampler.positive_fraction), len(boxes))
            on_objects = objects[torch.arange(positive) % len(objects)]
            assume(boxes, torch.cat([on_objects, anywhere[positive:]]))
    return select(proposals, targets)


def _detections(
    postprocess: Callable[..., Any], logits: torch.Tensor, regression: torch.Tensor, *rest: Any
) -> Any:
    """Every proposal shows an object of one class, just where it lies."""
    if logits.is_meta:
        assume(logits, _one_class_each(*logits.shape))
        assume(regression, torch.zeros(1).expand(regression.shape))
    return postprocess(logits, regression, *rest)


def _anchor_scores(head: Any, _args: Any, outputs: dict[str, torch.Tensor]) -> None:
    """Every anchor shows an object of one class, about where it lies."""
    logits, regression = outputs["cls_logits"], outputs["bbox_regression"]
    if not logits.is_meta:
        return
    centred = "bbox_ctrness" in outputs  # boxes are distances from a centre, not differences to an anchor
    assume(regression, torch.full((1,), float(centred)).expand(regression.shape))
    if head.training and not _mines_negatives(head):
        return
    assume(logits, _one_class_each(*logits.shape[1:]).expand(logits.shape))
    if centred:
        assume(outputs["bbox_ctrness"], torch.full((1,), _SURE).expand(outputs["bbox_ctrness"].shape))


def _mines_negatives(head: Any) -> bool:
    """SSD's loss takes the anchors without object that are classified worst."""
    return type(head).__name__.startswith("SSD")


def _one_class_each(boxes: int, classes: int) -> torch.Tensor:
    """Logits in which each box has one class, in turn, and none has the first, the background."""
    logits = torch.full((boxes, classes), -_SURE)
    logits[torch.arange(boxes), 1 + torch.arange(boxes) % max(classes - 1, 1) if classes > 1 else 0] = _SURE
    return logits
