"""Makes sound and time series as transformers' models take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from foretrain.capture.sources.transformers.shapes import Shapes

_SECONDS = 10
"""Length of a recording beside text, or where the model starts from a spectrogram."""

_SAMPLES = 16_000
_FRAMES_PER_SECOND = 100
_SAMPLES_PER_FRAME = 320
"""Of a codec that hears samples and a spectrogram at once."""

_MELS = (
    "num_mel_bins",
    "input_feat_per_channel",
    "feature_projection_input_dim",
    "input_feat_size",
    "feature_size",
    "input_dim",
)
"""Keys for how many numbers a frame of sound has."""

_FRAMES_FIRST = ("speech_to_text", "univnet")
"""Types that convolve over time and turn their input themselves."""

_FRAMES_LAST = ("clvp", "qwen3_asr", "qwen3_asr_encoder")
"""Types that take time last though they do not convolve over it at once."""

_STACKED = {
    "fun_asr_nano": 7,
    "fun_asr_nano_encoder": 7,
    "granite_speech5_ctc": 4,
    "granite_speech5_encoder": 4,
}
"""Frames, or frames and their changes, that stand in one row."""

_MASKED_LATER = ("granite_speech", "granite_speech_plus")
"""Types whose mask is one of the rows that their tower gives."""

_USUAL_MELS = 128


def _is_alone(shapes: Shapes) -> bool:
    """Whether sound is all that the model is given, so that the job's sequence is its length."""
    return "input_ids" not in shapes.signature


def _length(shapes: Shapes, usual: int) -> int:
    if _is_alone(shapes) and shapes.training.sequence is not None:
        shapes.used.add("sequence")
        return shapes.training.sequence
    return usual


def _samples(shapes: Shapes) -> torch.Tensor | None:
    """Raw samples, with a dimension for channels where they are compressed; a spectrogram of fixed length."""
    if _is_beside_images(shapes):
        return None
    names = shapes.signature
    if "input_values_cutoffs" in names:  # a text to speak, without an example of the voice
        return None
    if names.keys() >= {"inputs", "input_features"} and shapes.size(*_MELS) is not None:
        return None
    frames, mels = (getattr(shapes.config, name, None) for name in ("max_length", "num_mel_bins"))
    if frames is not None and mels is not None:
        return shapes.numbers(shapes.batch, frames, mels)
    if _is_alone(shapes):
        shapes.used.add("sequence")
    length = _length(shapes, _SAMPLES)
    if shapes.size("audio_channels", "hop_length", "downsampling_ratios") is not None:
        channels = int(shapes.size("audio_channels", default=1))
        return shapes.numbers(shapes.batch, channels, length)
    return shapes.numbers(shapes.batch, length)


def frames_and_mels(shapes: Shapes) -> tuple[int, int]:
    """Frames of a spectrogram, and its mel bins."""
    mels = int(shapes.size(*_MELS, default=_USUAL_MELS)) * _STACKED.get(shapes.config.model_type, 1)
    for part in shapes.parts:
        positions = getattr(part, "max_source_positions", None)
        if positions is not None and _is_turned(shapes, mels) and getattr(part, "num_mel_bins", None):
            return 2 * int(positions), mels
    if {"input_values", "input_features"} <= set(shapes.signature) and _is_alone(shapes):
        return _length(shapes, _SAMPLES) // _SAMPLES_PER_FRAME, mels
    return _length(shapes, _SECONDS * _FRAMES_PER_SECOND), mels


def _is_turned(shapes: Shapes, mels: int) -> bool:
    """Whether the model convolves over time at once, so that time comes last."""
    if shapes.config.model_type in _FRAMES_LAST:
        return True
    return shapes.config.model_type not in _FRAMES_FIRST and any(
        isinstance(module, torch.nn.Conv1d) and module.in_channels == mels and module.kernel_size[0] > 1
        for module in shapes.module.modules()
    )


def _spectrogram(shapes: Shapes) -> torch.Tensor | None:
    if _is_beside_images(shapes) or ("inputs" in shapes.signature and shapes.size(*_MELS) is None):
        return None
    frames, mels = frames_and_mels(shapes)
    if "is_longer" in shapes.signature:
        return shapes.numbers(shapes.batch, 1, frames, mels)
    if "feature_lens" in shapes.signature:
        return shapes.numbers(mels, shapes.batch * frames)
    if shapes.config.model_type == "pop2piano":
        return shapes.numbers(shapes.batch, frames, shapes.hidden)
    if _is_turned(shapes, mels):
        return shapes.numbers(shapes.batch, mels, frames)
    return shapes.numbers(shapes.batch, frames, mels)


def _frame_mask(shapes: Shapes) -> torch.Tensor | None:
    if _is_beside_images(shapes) or shapes.config.model_type in _MASKED_LATER:
        return None
    return shapes.ones(shapes.batch, frames_and_mels(shapes)[0])


def _is_beside_images(shapes: Shapes) -> bool:
    """A model that takes images and sound is trained on images here; one may be built without ears."""
    if getattr(shapes.config, "audio_config", 0) is None:
        return True
    return shapes.task == "image-text-to-text" and "pixel_values" in shapes.signature


def _sample_mask(shapes: Shapes) -> torch.Tensor | None:
    values = _samples(shapes)
    return None if values is None else shapes.ones(shapes.batch, values.shape[-1], dtype=torch.bool)


# Series of numbers: in time, of an agent


def _steps(key: str | None, whole: bool = False) -> Callable[[Shapes], torch.Tensor]:
    """What an agent saw, did or got at each step."""

    def make(shapes: Shapes) -> torch.Tensor:
        if whole:
            return shapes.known(torch.arange(shapes.length).expand(shapes.batch, -1))
        width = 1 if key is None else int(shapes.size(key, default=1))
        return shapes.numbers(shapes.batch, shapes.length, width)

    return make


def _past(shapes: Shapes) -> int:
    lags = getattr(shapes.config, "lags_sequence", None)
    return int(shapes.size("context_length", default=512)) + (max(lags) if lags else 0)


def _future(shapes: Shapes) -> int:
    return int(shapes.size("prediction_length", "horizon_length", default=24))


def _values(length: Callable[[Shapes], int]) -> Callable[[Shapes], torch.Tensor]:
    """A number per point in time, or one per channel."""

    def make(shapes: Shapes) -> torch.Tensor:
        channels = shapes.size("num_input_channels", "input_size", default=1)
        shape = (shapes.batch, length(shapes))
        many = channels > 1 or shapes.size("num_input_channels") is not None
        return shapes.numbers(*shape, channels) if many else shapes.numbers(*shape)

    return make


def _time_features(length: Callable[[Shapes], int]) -> Callable[[Shapes], torch.Tensor]:
    return lambda shapes: shapes.numbers(
        shapes.batch, length(shapes), int(shapes.size("num_time_features", default=0))
    )


def _static(key: str, whole: bool) -> Callable[[Shapes], torch.Tensor | None]:
    def make(shapes: Shapes) -> torch.Tensor | None:
        count = int(shapes.size(key, default=0))
        if not count:
            return None
        return shapes.ones(shapes.batch, count) if whole else shapes.numbers(shapes.batch, count)

    return make


SIGNALS: dict[str, Callable[[Shapes], Any]] = {
    "input_values": _samples,
    "input_features": _spectrogram,
    "input_features_mask": _frame_mask,
    "feature_attention_mask": _frame_mask,
    "audio_mel": _spectrogram,
    "audio_mel_mask": lambda shapes: torch.zeros(shapes.batch, frames_and_mels(shapes)[0], dtype=torch.bool),
    "spectrogram": lambda shapes: shapes.numbers(
        shapes.batch, _SECONDS * _FRAMES_PER_SECOND, int(shapes.size("model_in_dim", *_MELS, default=80))
    ),
    "padding_mask": _sample_mask,
    "feature_lens": lambda shapes: shapes.known([frames_and_mels(shapes)[0]] * shapes.batch),
    "is_longer": lambda shapes: shapes.known([[0]] * shapes.batch),
    "mel_spectrogram": lambda shapes: shapes.numbers(
        shapes.batch, int(shapes.size("mel_dim", default=80)), _SECONDS * _FRAMES_PER_SECOND
    ),
    "states": _steps("state_dim"),
    "actions": _steps("act_dim"),
    "rewards": _steps(None),
    "returns_to_go": _steps(None),
    "timesteps": _steps(None, whole=True),
    "past_values": _values(_past),
    "past_time_features": _time_features(_past),
    "past_observed_mask": lambda shapes: shapes.ones(*_values(_past)(shapes).shape),
    "future_time_features": _time_features(_future),
    "static_categorical_features": _static("num_static_categorical_features", whole=True),
    "static_real_features": _static("num_static_real_features", whole=False),
}
"""What makes an input of this name; None where the model can do without."""

future_values = _values(_future)
