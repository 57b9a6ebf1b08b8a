"""Follows the checkpoints of ``torch.utils.checkpoint`` while a step is traced: what they compute again is
told apart, and runs as it did in the forward pass."""

from __future__ import annotations

import contextlib
import functools
import types
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint as checkpoints

from foretrain.capture.tracing.cuda import casting, casting_to, forget_casts
from foretrain.capture.tracing.recorder import Recorder

Region = Callable[[torch.dtype | None], contextlib.AbstractContextManager[None]]
"""What a recomputation runs inside, by the dtype that its forward pass was cast to."""


@contextlib.contextmanager
def followed_checkpoints(recorder: Recorder, region: Region) -> Iterator[None]:
    """Tell the recorder what the checkpoints that are made meanwhile, of either kind, compute again."""

    def told(function: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(_run, recorder, region, recorder.layer, casting_to(), function)

    plain, reentrant = checkpoints._checkpoint_without_reentrant_generator, checkpoints.CheckpointFunction

    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return plain(told(function), *args, **kwargs)

    def apply(function: Callable[..., Any], *args: Any) -> Any:
        return reentrant.apply(told(function), *args)

    with (
        unittest.mock.patch.object(checkpoints, "_checkpoint_without_reentrant_generator", generator),
        unittest.mock.patch.object(checkpoints, "CheckpointFunction", types.SimpleNamespace(apply=apply)),
    ):
        yield


def _run(
    recorder: Recorder, region: Region, layer: str, dtype: torch.dtype | None, function: Callable[..., Any],
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    if recorder.phase != "backward" or not recorder.is_traced():
        return function(*args, **kwargs)
    with recorder.recomputing(layer, region(dtype)):
        return function(*args, **kwargs)


@contextlib.contextmanager
def cast_anew(dtype: torch.dtype | None) -> Iterator[None]:
    """An autocast region of its own: what it casts of weights is forgotten where it ends."""
    try:
        with casting(dtype):
            yield
    finally:
        forget_casts()
