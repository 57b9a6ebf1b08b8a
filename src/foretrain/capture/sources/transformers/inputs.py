"""Makes the inputs of a transformers model for a task, by the signature of its forward method and its
configuration."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from foretrain.capture.sources.transformers.images import IMAGES, image_tokens
from foretrain.capture.sources.transformers.shapes import DETECTS, OBJECTS, Shapes
from foretrain.capture.sources.transformers.signals import SIGNALS
from foretrain.errors import InputError

Inputs = dict[str, Any]

TEXT_TASKS = frozenset(
    "causal-lm masked-lm seq2seq-lm sequence-classification token-classification question-answering "
    "multiple-choice next-sentence-prediction text-encoding".split()
)
"""Tasks of text alone: what else a model may be given is left out unless it must be there."""

_MASKED = frozenset(
    "masked-lm token-classification sequence-classification question-answering base image-text-to-text "
    "multimodal-lm visual-question-answering document-question-answering zero-shot-image-classification "
    "zero-shot-object-detection".split()
)
"""Tasks whose text comes with a mask; no token is padding, so a model that looks finds that it needs none."""


def make_inputs(shapes: Shapes) -> Inputs:
    """Features, targets and masks that the model is called with when it learns the task."""
    features = _features(shapes)
    targets = _targets(shapes, features)
    if _decodes(shapes) and not targets.keys() & {"labels", "decoder_input_ids"}:
        targets["decoder_input_ids"] = _decoded(shapes)
    inputs = {**features, **targets}
    if shapes.task in _MASKED and "decoder_input_ids" not in targets and "input_ids" in features:
        ids = features["input_ids"]
        if _takes(shapes, "attention_mask"):
            inputs["attention_mask"] = torch.ones_like(ids)
    return inputs


def _takes(shapes: Shapes, name: str) -> bool:
    kinds = {parameter.kind for parameter in shapes.signature.values()}
    return name in shapes.signature or (name in _BY_KEYWORD and inspect.Parameter.VAR_KEYWORD in kinds)


_BY_KEYWORD = ("attention_mask",)


def _features(shapes: Shapes) -> Inputs:
    """What the model looks at."""
    makers = {**IMAGES, **SIGNALS}
    required = [name for name, parameter in shapes.signature.items() if _is_required(parameter)]
    text_alone = shapes.task in TEXT_TASKS
    wanted = [
        name
        for name in shapes.signature
        if name in required or (name in _BESIDE_TEXT if text_alone else name in _ALWAYS)
    ]
    main = getattr(shapes.module, "main_input_name", "input_ids")
    if main in shapes.signature and main not in wanted and not text_alone:
        wanted.append(main)
    features: Inputs = {}
    for name in wanted:
        if name in makers and name not in features and (value := makers[name](shapes)) is not None:
            features[name] = value
    if "input_ids" in wanted or ("input_ids" in shapes.signature and not features):
        features = {"input_ids": _ids(shapes, features), **features}
        if "bbox" in shapes.signature:
            features["bbox"] = shapes.ones(*features["input_ids"].shape, 4)
        features.update(_token_kinds(shapes, features))
    missing = [name for name in required if name not in features]
    for name in missing:
        features[name] = _required(shapes, name)
    return features


_ALWAYS = frozenset(
    "input_ids pixel_values image_grid_thw image_sizes spatial_shapes pixel_attention_mask "
    "input_features input_values past_values flattened_patches".split()
)
_BESIDE_TEXT = frozenset(("input_ids",))


def _is_required(parameter: inspect.Parameter) -> bool:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in kinds


def _required(shapes: Shapes, name: str) -> Any:
    """Rows of the model's width for what is given in place of tokens or patches."""
    if name in ("attention_mask", "past_observed_mask"):
        return shapes.ones(shapes.batch, shapes.length)
    if name in ("hidden_states", "inputs_embeds", "query_embeds", "patch_embeds", "encoder_hidden_states"):
        return shapes.numbers(shapes.batch, shapes.length, shapes.hidden)
    raise InputError(
        f"model.config.model_type: {shapes.config.model_type} needs {name!r}, which no job gives; a function "
        "that returns (module, inputs) does (source = \"python\")"
    )


# Text, with places for images and sound in it


def _ids(shapes: Shapes, features: Mapping[str, Any]) -> torch.Tensor:
    ids = shapes.ids()
    if shapes.task == "multiple-choice":
        return ids[:, None].expand(-1, _CHOICES, -1).contiguous()
    special = image_tokens(shapes, features)
    if not special:
        return ids
    ids = ids.clone()
    ids[:] = _plain_token(shapes)
    start = 1
    for token, count in special:
        if start + count > ids.shape[1]:
            needed = start + sum(count for _, count in special)
            raise InputError(
                f"training.sequence: {ids.shape[1]} is too short for the {needed - 1} tokens that images and "
                f"sound take in {shapes.config.model_type}; give {needed} or more"
            )
        ids[:, start : start + count] = token
        start += count
    return ids


_CHOICES = 4
"""Answers to choose from."""


def _plain_token(shapes: Shapes) -> int:
    """A token that stands for nothing but text."""
    special = {
        value
        for part in shapes.parts
        for name, value in vars(part).items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    return next(token for token in range(1, len(special) + 2) if token not in special)


def _token_kinds(shapes: Shapes, features: Mapping[str, Any]) -> Inputs:
    """Which tokens stand for an image, where the model wants to be told."""
    if shapes.task in TEXT_TASKS or not features.keys() & {"pixel_values"}:
        return {}
    image = shapes.size("image_token_id", "image_token_index")
    if image is None:
        return {}
    kinds = (features["input_ids"] == image).long()
    return {
        name: kinds
        for name in ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")
        if name in shapes.signature
    }


def _decodes(shapes: Shapes) -> bool:
    """Whether the model has a decoder that must be given tokens."""
    encoder_decoder = getattr(shapes.config, "is_encoder_decoder", False)
    return "decoder_input_ids" in shapes.signature and (encoder_decoder or shapes.task == "base")


def _decoded(shapes: Shapes) -> torch.Tensor:
    heard = {"input_features", "input_values"} & set(shapes.signature) and "input_ids" not in shapes.signature
    return shapes.tokens(_TRANSCRIPT) if heard else shapes.ids()


_TRANSCRIPT = 64
"""Tokens that are spoken in a sample."""


# Targets


def _targets(shapes: Shapes, features: Mapping[str, Any]) -> Inputs:
    if _cannot_learn(shapes):
        return {}
    if "return_loss" in shapes.signature and shapes.task in ("zero-shot-image-classification", "base", "pretraining"):
        return {"return_loss": True}
    maker = _TARGETS.get(shapes.task)
    made = maker(shapes, features) if maker else {}
    return {name: value for name, value in made.items() if name in shapes.signature}


def _cannot_learn(shapes: Shapes) -> bool:
    """Whether the library's code refuses labels: training is not written there."""
    code = inspect.getsource(inspect.unwrap(type(shapes.module).forward))
    return re.search(r"if labels is not None:\s+raise NotImplementedError", code) is not None


def _language(shapes: Shapes, features: Mapping[str, Any]) -> Inputs:
    if "input_ids" in features and features["input_ids"].dim() == 2:
        return {"labels": features["input_ids"]}
    return {"labels": shapes.ids()}


def _token_labels(shapes: Shapes, features: Mapping[str, Any]) -> Inputs:
    ids = features["input_ids"]
    return {"labels": ids if shapes.device == "meta" else ids % shapes.labels}


def _span(shapes: Shapes, _features: Mapping[str, Any]) -> Inputs:
    if "start_positions" in shapes.signature:
        return {"start_positions": shapes.position(), "end_positions": shapes.position()}
    return {"labels": shapes.ids()}


def _class(shapes: Shapes, _features: Mapping[str, Any]) -> Inputs:
    return {"labels": shapes.label()}


def _pixel_classes(shapes: Shapes, features: Mapping[str, Any]) -> Inputs:
    pixels = features["pixel_values"]
    return {"labels": shapes.integers(shapes.labels, shapes.batch, *pixel_shape(pixels))}


def pixel_shape(pixels: torch.Tensor) -> torch.Size:
    return pixels.shape[-2:]


def _pixel_numbers(shapes: Shapes, features: Mapping[str, Any]) -> Inputs:
    return {"labels": shapes.numbers(shapes.batch, *pixel_shape(features["pixel_values"]))}


def _masked_patches(shapes: Shapes, features: Mapping[str, Any]) -> Inputs:
    patches = (features["pixel_values"].shape[-1] // shapes.vision.patch_size) ** 2
    masked = shapes.integers(3, shapes.batch, patches)
    return {"bool_masked_pos": torch.empty_like(masked, dtype=torch.bool) if masked.is_meta else masked == 1}


def _transcript(length: int) -> Callable[[Shapes, Mapping[str, Any]], Inputs]:
    def targets(shapes: Shapes, features: Mapping[str, Any]) -> Inputs:
        if "input_ids" in features:
            return _language(shapes, features)
        return {"labels": shapes.tokens(length)}

    return targets


def _objects(shapes: Shapes, features: Mapping[str, Any]) -> Inputs:
    """Objects of each image: their classes, boxes and masks."""
    shapes.note(f"{OBJECTS} objects in each image, matched to the model's first queries")
    classes = [shapes.integers(shapes.labels, OBJECTS) for _ in range(shapes.batch)]
    masks = [shapes.numbers(OBJECTS, *pixel_shape(_pixels(features))) for _ in range(shapes.batch)]
    if "mask_labels" in shapes.signature:
        return {"mask_labels": masks, "class_labels": classes}
    boxes = [shapes.numbers(OBJECTS, 4).abs() for _ in range(shapes.batch)]
    segments = shapes.task in ("image-segmentation", "instance-segmentation")
    return {
        "labels": [
            {"class_labels": one, "boxes": box, **({"masks": mask} if segments else {})}
            for one, box, mask in zip(classes, boxes, masks, strict=True)
        ]
    }


def _pixels(features: Mapping[str, Any]) -> torch.Tensor:
    pixels: torch.Tensor = next(value for name, value in features.items() if name.startswith("pixel_values"))
    return pixels


def _series(shapes: Shapes, features: Mapping[str, Any]) -> Inputs:
    return SIGNALS["future"](shapes)


_TARGETS: dict[str, Callable[[Shapes, Mapping[str, Any]], Inputs]] = {
    **dict.fromkeys(
        ("causal-lm", "masked-lm", "seq2seq-lm", "image-text-to-text", "multimodal-lm"), _language
    ),
    "pretraining": lambda shapes, features: _language(shapes, features) if "input_ids" in features else {},
    "token-classification": _token_labels,
    **dict.fromkeys(
        ("sequence-classification", "multiple-choice", "next-sentence-prediction", "image-classification",
         "video-classification", "audio-classification", "audio-xvector"), _class),
    **dict.fromkeys(("question-answering", "document-question-answering"), _span),
    "semantic-segmentation": _pixel_classes,
    "depth-estimation": _pixel_numbers,
    "masked-image-modeling": _masked_patches,
    "ctc": _transcript(32),
    "rnnt": _transcript(32),
    "tdt": _transcript(32),
    "speech-seq2seq": _transcript(_TRANSCRIPT),
    **dict.fromkeys(DETECTS, _objects),
}  # fmt: skip

TARGETS = frozenset(
    "labels start_positions end_positions bool_masked_pos mask_labels class_labels return_loss "
    "future_values".split()
)
"""Inputs from which a loss is computed."""
