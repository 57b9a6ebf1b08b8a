"""Makes the inputs of a transformers model for a task, by the signature of its forward method and its
configuration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from foretrain.capture.sources.transformers.images import IMAGES, image_tokens, too_short, tower
from foretrain.capture.sources.transformers.shapes import Shapes
from foretrain.capture.sources.transformers.signals import SIGNALS, frames_and_mels
from foretrain.capture.sources.transformers.targets import TRANSCRIPT, Inputs, make_targets
from foretrain.errors import InputError

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
"""Tasks whose recordings come with a mask."""


def make_inputs(shapes: Shapes) -> Inputs:
    """Features, targets and masks that the model is called with when it learns the task."""
    features = _features(shapes)
    targets = make_targets(shapes, features)
    if _decodes(shapes) and ("labels" not in targets or shapes.task in _GIVEN_TO_DECODER):
        targets["decoder_input_ids"] = _decoded(shapes)
    inputs = {**features, **targets}
    if "visual_attention_mask" in features:
        inputs["attention_mask"] = torch.ones_like(features["input_ids"])
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
    if shapes.config.model_type in _CROSS and "encoder_hidden_states" in shapes.signature:
        width = int(shapes.size("encoder_hidden_size", "cross_hidden_size", default=shapes.hidden))
        features["encoder_hidden_states"] = shapes.numbers(shapes.batch, shapes.length, width)
    missing = [name for name in required if name not in features and _is_required(shapes.signature[name])]
    for name in missing:
        features[name] = _required(shapes, name)
    return features


_CROSS = ("blip_2_qformer", "t5gemma2_decoder", "dia_decoder")
"""Parts that look at what another part gives, though their code has a default for it."""


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
    "image_attention_mask visual_feats visual_pos visual_embeds states actions rewards returns_to_go "
    "timesteps text_inputs visual_attention_mask feature_lens is_longer".split()
)
"""Inputs that a model is given where it takes them, though its code has a default."""

_BESIDE_TEXT = frozenset(("input_ids", "visual_feats", "visual_pos"))


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
        return shapes.numbers(shapes.batch, shapes.hidden, TRANSCRIPT)
    if name == "audio_input_ids":
        return shapes.ones(
            shapes.batch, TRANSCRIPT, int(shapes.size("num_mel_bins", "n_mel_bins", default=80))
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
        encoder_decoder or shapes.task == "base" or shapes.task in _GIVEN_TO_DECODER
    )


_GIVEN_TO_DECODER = ("rnnt", "tdt")
"""Tasks whose models do not derive what their decoder is given from the labels."""


def _decoded(shapes: Shapes) -> torch.Tensor:
    heard = {"input_features", "input_values"} & set(shapes.signature)
    alone = _is_fed_by_decoder(shapes) or "input_ids" not in shapes.signature
    return shapes.tokens(TRANSCRIPT) if heard and alone else shapes.ids()
