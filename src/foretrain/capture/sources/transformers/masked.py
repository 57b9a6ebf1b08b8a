"""Lets a masked language model answer for some tokens of a sample alone: those that were masked.

As in NVIDIA's and MLPerf's BERT: what the encoder makes of these tokens is taken out of the rest, so that
head and loss, which are as wide as the vocabulary, see no others.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from foretrain.errors import InputError, UnsupportedJob

_TASKS = ("masked-lm", "pretraining")


def predict_masked(module: Any, task: str, count: int) -> None:
    """Change a masked language model in place, so that it answers for ``count`` tokens of each sample."""
    if task not in _TASKS:
        raise InputError(f"training.predicted_tokens: {count} is for masked language models, not task {task}")
    encoder = getattr(module, "base_model", module)
    if encoder is module:
        raise UnsupportedJob(
            f"training.predicted_tokens: {count}, but {type(module).__name__} has no encoder before its head"
        )
    encoder.forward = functools.wraps(encoder.forward)(
        functools.partial(_with_some_tokens, encoder.forward, count)
    )


def _with_some_tokens(forward: Any, count: int, *args: Any, **kwargs: Any) -> Any:
    """What the encoder gives, with ``count`` tokens of each sample; which ones costs the same."""
    output = forward(*args, **kwargs)
    hidden = output[0]
    if hidden.dim() != 3 or hidden.shape[1] < count:
        raise UnsupportedJob(
            f"training.predicted_tokens: {count}, but the encoder gives values of shape {tuple(hidden.shape)}"
        )
    samples = hidden.shape[0]
    rows = torch.arange(samples * count, device=hidden.device)
    chosen = hidden.flatten(0, 1).index_select(0, rows).unflatten(0, (samples, count))
    if isinstance(output, tuple):
        return (chosen, *output[1:])
    output[next(iter(output))] = chosen
    return output
