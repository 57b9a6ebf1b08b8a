"""Makes the inputs of a transformers model for a task, by the signature of its forward method and its
configuration."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch

from foretrain.capture.sources.transformers.images import IMAGES, image_tokens, too_short, tower
from foretrain.capture.sources.transformers.shapes import DETECTS, OBJECTS, Shapes
from foretrain.capture.sources.transformers.signals import SIGNALS, frames_and_mels, future_values
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


_HEARD = ("ctc", "rnnt", "tdt")


def make_inputs(shapes: Shapes) -> Inputs:
    """Features, targets and masks that the model is called with when it learns the task."""
    features = _features(shapes)
    targets = _targets(shapes, features)
    if _decodes(shapes) and ("labels" not in targets or shapes.task in _TOLD):
        targets["decoder_input_ids"] = _decoded(shapes)
    inputs = {**features, **targets}
    if shapes.task in _MASKED and "decoder_input_ids" not in targets and "input_ids" in features:
        ids = features["input_ids"]
        if _takes(shapes, "attention_mask"):
            inputs["attention_mask"] = torch.ones_like(ids)
    elif shapes.task in _HEARD and "input_features" in features and _takes(shapes, "attention_mask"):
        inputs["attention_mask"] = shapes.ones(shapes.batch, frames_and_mels(shapes)[0])
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
    if not text_alone:
        required += _asked_by_towers(shapes)
    wanted = [
        name
        for name in shapes.signature
        if name in required or (name in _BESIDE_TEXT if text_alone else name in _ALWAYS)
    ]
    main = getattr(shapes.module, "main_input_name", "input_ids")
    main = main[0] if isinstance(main, list) else main
    if main in shapes.signature and main not in wanted and not text_alone:
        wanted.append(main)
    features: Inputs = {}
    for name in wanted:
        if name in makers and name not in features and (value := makers[name](shapes)) is not None:
            features[name] = value
    for name in required:
        if name not in features and name.endswith("input_ids") and name != "input_ids":
            features[name] = shapes.ids()
    if _is_fed_by_decoder(shapes):
        return features
    if "input_ids" in wanted or ("input_ids" in shapes.signature and not features):
        features = {"input_ids": _ids(shapes, features), **features}
        if "bbox" in shapes.signature:
            features["bbox"] = shapes.ones(*features["input_ids"].shape, 4)
        if "lang_ids" in shapes.signature and getattr(shapes.config, "languages", None):
            features["lang_ids"] = shapes.known([0] * shapes.batch)
        features.update(_token_kinds(shapes, features))
    missing = [name for name in required if name not in features and _is_required(shapes.signature[name])]
    for name in missing:
        features[name] = _required(shapes, name)
    return features


def _asked_by_towers(shapes: Shapes) -> list[str]:
    """Inputs that the model passes on to a tower which cannot do without them."""
    beside = "pixel_values" in shapes.signature
    methods = [tower(shapes, kind) for kind in (("image",) if beside else ("audio",))]
    return [
        name
        for method in methods
        if method is not None
        for name, parameter in inspect.signature(method).parameters.items()
        if _is_required(parameter)
        and name in shapes.signature
        and (name in {**IMAGES, **SIGNALS} or name.endswith("input_ids"))
    ]


_ALWAYS = frozenset(
    "input_ids pixel_values image_grid_thw image_sizes spatial_shapes pixel_attention_mask flattened_patches "
    "input_features input_values input_features_mask feature_attention_mask past_values past_time_features "
    "future_time_features static_categorical_features static_real_features aspect_ratio_ids "
    "aspect_ratio_mask cross_attention_mask target_sizes image_position_ids image_embeds_position_mask "
    "image_attention_mask visual_feats visual_pos states actions rewards returns_to_go timesteps feature_lens is_longer".split()
)
"""Inputs that a model is given where it takes them, though its code has a default."""

_BESIDE_TEXT = frozenset(("input_ids",))


def _is_fed_by_decoder(shapes: Shapes) -> bool:
    """Whether the text of the model is what its decoder writes: what is heard is all that it is given."""
    names = set(shapes.signature)
    heard = bool(names & {"input_features", "input_values"})
    return shapes.task == "speech-seq2seq" and heard and "decoder_input_ids" in names


def _is_required(parameter: inspect.Parameter) -> bool:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in kinds


def _required(shapes: Shapes, name: str) -> Any:
    """Rows of the model's width for what is given in place of tokens or patches."""
    if name in ("attention_mask", "past_observed_mask"):
        return shapes.ones(shapes.batch, shapes.length)
    if name == "latents":
        return shapes.numbers(shapes.batch, shapes.hidden, _TRANSCRIPT)
    if name == "audio_input_ids":
        return shapes.ones(
            shapes.batch, _TRANSCRIPT, int(shapes.size("num_mel_bins", "n_mel_bins", default=80))
        )
    if name == "hidden_states" and (width := shapes.size("input_dim")) is not None:
        return shapes.numbers(shapes.batch, shapes.length, int(width))
    if name in ("hidden_states", "inputs_embeds", "query_embeds", "patch_embeds", "encoder_hidden_states"):
        return shapes.numbers(shapes.batch, shapes.length, shapes.hidden)
    raise InputError(
        f"model.config.model_type: {shapes.config.model_type} needs {name!r}, which no job gives; a function "
        'that returns (module, inputs) does (source = "python")'
    )


# Text, with places for images and sound in it


def _ids(shapes: Shapes, features: Mapping[str, Any]) -> torch.Tensor:
    ids = shapes.ids()
    if (rows := _codebooks(shapes)) is not None:
        return ids[..., None].expand(-1, -1, rows).contiguous()
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
            raise too_short(shapes, ids.shape[1], 1 + sum(count for _, count in special))
        ids[:, start : start + count] = token
        start += count
    return ids


def _codebooks(shapes: Shapes) -> int | None:
    """Tokens that stand at one place, where the model writes sound beside text."""
    keys = _CODEBOOKS.get(shapes.config.model_type)
    return None if keys is None else int(shapes.size(keys[0])) + keys[1]


_CODEBOOKS = {"kyutai_speech_to_text": ("num_codebooks", 1), "dia_decoder": ("num_channels", 0)}

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
    return "decoder_input_ids" in shapes.signature and (
        encoder_decoder or shapes.task == "base" or shapes.task in _TOLD
    )


_TOLD = ("rnnt", "tdt")
"""Tasks whose models do not derive what their decoder is given from the labels."""


def _decoded(shapes: Shapes) -> torch.Tensor:
    heard = {"input_features", "input_values"} & set(shapes.signature)
    alone = _is_fed_by_decoder(shapes) or "input_ids" not in shapes.signature
    return shapes.tokens(_TRANSCRIPT) if heard and alone else shapes.ids()


_TRANSCRIPT = 64
"""Tokens that are spoken in a sample."""


# Targets


def _targets(shapes: Shapes, features: Mapping[str, Any]) -> Inputs:
    if _cannot_learn(shapes):
        return {}
    pairs = "return_loss" in shapes.signature and "codebook_pixel_values" not in shapes.signature
    if pairs and shapes.task in ("zero-shot-image-classification", "base", "pretraining"):
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
    if "input_ids" in features and features["input_ids"].dim() == 2:
        return {"labels": features["input_ids"]}
    return {"labels": shapes.ids()}


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
    "speech-seq2seq": _transcript(_TRANSCRIPT),
    "time-series-prediction": _series,
    "text-to-spectrogram": _speech,
    "text-to-waveform": lambda shapes, features: (
        _speech(shapes, features) if "duration_labels" in shapes.signature else _language(shapes, features)
    ),
    **dict.fromkeys(DETECTS, _objects),
}  # fmt: skip

TARGETS = frozenset(
    "labels start_positions end_positions bool_masked_pos mask_labels class_labels return_loss "
    "future_values spectrogram_labels duration_labels pitch_labels energy_labels".split()
)
"""Inputs from which a loss is computed."""
