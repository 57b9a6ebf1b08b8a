"""Builds a model of the transformers library from a configuration alone, with inputs and labels, on meta or
on a device."""

from __future__ import annotations

from typing import Any

import torch

from foretrain.capture.sources.loaded import build_on
from foretrain.capture.sources.transformers.configuration import check_positions, read_config
from foretrain.capture.sources.transformers.inputs import make_inputs
from foretrain.capture.sources.transformers.losses import fix_matching
from foretrain.capture.sources.transformers.masked import predict_masked
from foretrain.capture.sources.transformers.shapes import Shapes
from foretrain.capture.sources.transformers.targets import TARGETS
from foretrain.capture.sources.transformers.tasks import CLASSIFIES, build_class, choose_task
from foretrain.capture.tracing.constants import Constants
from foretrain.errors import InputError
from foretrain.workload import Model, Training


def load_transformers(
    model: Model,
    training: Training,
    batch: int,
    device: str,
    constants: Constants,
) -> tuple[torch.nn.Module, dict[str, Any], int, tuple[str, ...]]:
    """The module, its keyword inputs, the tokens in them, and what a forecast should say of them; on meta,
    ``constants`` learn the values of buffers."""
    import transformers

    transformers.logging.set_verbosity_error()
    config, attention, notes = read_config(transformers, model, training)
    task, others = choose_task(transformers, config, model.task)
    if model.task is None and len(set(others) - {"base", "pretraining", "text-encoding"}) > 1:
        notes = (*notes, f"model.task: {task} taken")
    options = {} if attention is None else {"attn_implementation": attention}
    if training.classes is not None and task not in CLASSIFIES:
        raise InputError(f"training.classes: {training.classes} is not used by task = {task!r}")
    module = build_on(lambda: build_class(transformers, config, task, **options), device, constants)
    fix_matching()
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    check_positions(module, training.sequence)
    if training.predicted_tokens is not None:
        predict_masked(module, task, training.predicted_tokens)
    shapes = Shapes(module, config, training, batch, task, device, constants)
    inputs = make_inputs(shapes)
    for name in ("sequence", "image"):
        if (value := getattr(training, name)) is not None and name not in shapes.used:
            raise InputError(f"training.{name}: {value} is not used by {config.model_type}, task = {task!r}")
    tokens = batch * training.sequence if training.sequence else 0
    if training.mode != "train":
        return module, _served(inputs, config, task), tokens, (*notes, *shapes.notes)
    return module, inputs, tokens, (*notes, *shapes.notes)


def _served(inputs: dict[str, Any], config: Any, task: str) -> dict[str, Any]:
    """What a model is asked with when nothing is learned: no targets, as with them it computes its loss.

    A decoder gets the tokens that training derives from the targets.
    """
    kept = {name: value for name, value in inputs.items() if name not in TARGETS}
    if getattr(config, "is_encoder_decoder", False) and "labels" in inputs and task in _DECODING:
        kept["decoder_input_ids"] = inputs["labels"]
    return kept


_DECODING = ("seq2seq-lm", "speech-seq2seq", "pretraining", "image-text-to-text")
