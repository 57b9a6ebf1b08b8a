"""Makes what a transformers model is to learn from its inputs, by the task."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch

from foretrain.capture.sources.transformers.shapes import DETECTS, OBJECTS, Shapes
from foretrain.capture.sources.transformers.signals import future_values

Inputs = dict[str, Any]

TRANSCRIPT = 64
"""Tokens that are spoken in a sample."""


def make_targets(shapes: Shapes, features: Mapping[str, Any]) -> Inputs:
    """The targets of the task that the model has a place for; none where its code refuses them."""
    if _cannot_learn(shapes):
        return {}
    if "codebook_pixel_values" in shapes.signature:  # a loss needs another model's tokens of the image
        return {"return_loss": False}
    if "return_loss" in shapes.signature and shapes.task in (
        "zero-shot-image-classification",
        "base",
        "pretraining",
    ):
        return {"return_loss": True}
    maker = _TARGETS.get(shapes.task)
    made = maker(shapes, features) if maker else {}
    return {name: value for name, value in made.items() if name in shapes.signature}


def _cannot_learn(shapes: Shapes) -> bool:
    """Whether the library's code refuses labels: training is not written there."""
    code = inspect.getsource(inspect.unwrap(type(shapes.module).forward))
    refuses = re.search(r"if labels is not None:\s+raise \w+", code) is not None
    return refuses or (shapes.task in ("rnnt", "tdt") and find_spec("torchaudio") is None)


def _language(shapes: Shapes, features: Mapping[str, Any]) -> Inputs:
    if "input_values_cutoffs" in shapes.signature:  # sound is written, a token for each codebook
        return {"labels": shapes.ones(shapes.batch, shapes.length, int(shapes.size("num_codebooks")))}
    if "visual_attention_mask" in features:  # regions of the image stand behind the text
        return {"labels": shapes.tokens(shapes.length + features["visual_attention_mask"].shape[1])}
    if shapes.config.model_type in _PADDED:
        return {"labels": shapes.tokens(shapes.config.max_position_embeddings)}
    if (predicted := shapes.training.predicted_tokens) is not None:
        return {"labels": shapes.tokens(predicted)}
    if "input_ids" in features and features["input_ids"].dim() == 2:
        return {"labels": features["input_ids"]}
    return {"labels": shapes.ids()}


_PADDED = ("perceiver",)
"""Types that answer for every position they have, whatever the length of a text is."""


def _token_labels(shapes: Shapes, features: Mapping[str, Any]) -> Inputs:
    ids = features["input_ids"]
    return {"labels": ids if shapes.device == "meta" else ids % shapes.labels}


def _span(shapes: Shapes, _features: Mapping[str, Any]) -> Inputs:
    if "start_positions" in shapes.signature:
        return {"start_positions": shapes.position(), "end_positions": shapes.position()}
    if hasattr(shapes.config, "num_qa_labels"):
        return {"labels": shapes.integers(shapes.config.num_qa_labels, shapes.batch)}
    return {"labels": shapes.ids()}


def _class(shapes: Shapes, _features: Mapping[str, Any]) -> Inputs:
    return {"labels": shapes.label()}


def _pixel_classes(shapes: Shapes, features: Mapping[str, Any]) -> Inputs:
    pixels = features["pixel_values"]
    return {"labels": shapes.integers(shapes.labels, shapes.batch, *_pixel_shape(pixels))}


def _pixel_shape(pixels: torch.Tensor) -> torch.Size:
    return pixels.shape[-2:]


def _pixel_numbers(shapes: Shapes, features: Mapping[str, Any]) -> Inputs:
    return {"labels": shapes.numbers(shapes.batch, *_pixel_shape(features["pixel_values"]))}


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
    masks = [shapes.numbers(OBJECTS, *_pixel_shape(_pixels(features))) for _ in range(shapes.batch)]
    if "pixel_values_videos" in features:
        return {}
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


def _speech(shapes: Shapes, features: Mapping[str, Any]) -> Inputs:
    """Frames to speak, two for each token, with how long, high and loud each token is."""
    tokens = features["input_ids"].shape[1]
    mels = int(shapes.size("num_mel_bins", default=80))
    spectrogram = shapes.numbers(shapes.batch, _FRAMES_PER_TOKEN * tokens, mels)
    per_token = [shapes.numbers(shapes.batch, tokens, 1) for _ in range(2)]
    return {
        "labels": spectrogram,
        "spectrogram_labels": spectrogram,
        "duration_labels": _FRAMES_PER_TOKEN * shapes.ones(shapes.batch, tokens),
        "pitch_labels": per_token[0],
        "energy_labels": per_token[1],
    }


_FRAMES_PER_TOKEN = 2


def _waveform(shapes: Shapes, features: Mapping[str, Any]) -> Inputs:
    if "duration_labels" in shapes.signature:
        return _speech(shapes, features)
    return {} if "labels_mask" in shapes.signature else _language(shapes, features)


def _series(shapes: Shapes, _features: Mapping[str, Any]) -> Inputs:
    return {"future_values": future_values(shapes)}


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
    "speech-seq2seq": _transcript(TRANSCRIPT),
    "time-series-prediction": _series,
    "text-to-spectrogram": _speech,
    "text-to-waveform": _waveform,
    **dict.fromkeys(DETECTS, _objects),
}  # fmt: skip

TARGETS = frozenset(
    "labels start_positions end_positions bool_masked_pos mask_labels class_labels return_loss "
    "future_values spectrogram_labels duration_labels pitch_labels energy_labels".split()
)
"""Inputs from which a loss is computed."""
