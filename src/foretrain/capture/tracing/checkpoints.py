"""Follows the checkpoints of ``torch.utils.checkpoint`` while a step is traced: what they compute again is
told apart, and runs as it did in the forward pass."""

from __future__ import annotations

import contextlib
import functools
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint as checkpoints

from foretrain.capture.tracing.cuda import casting, casting_to, forget_casts
from foretrain.capture.tracing.recorder import OperatorRecorder

_OF_CHECKPOINT, _OF_RECOMPUTATION, _OF_POLICY = 11, 20, 3
"""What a checkpoint does on the host when it is made and when it recomputes (contexts, states of random
generators), and what deciding on an operator takes, beside packing or unpacking one tensor: 45, 85 and 13 us
beside 4.2 us on an AMD EPYC with torch 2.13, by blocks of 1, 4 and 12 linear layers."""
Region = Callable[[torch.dtype | None], contextlib.AbstractContextManager[None]]
"""What a recomputation runs inside, by the dtype that its forward pass was cast to."""


@contextlib.contextmanager
def followed_checkpoints(recorder: OperatorRecorder, region: Region) -> Iterator[None]:
    """Tell the recorder what the checkpoints that are made meanwhile, of either kind, compute again."""

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        recorder.hooks += _OF_CHECKPOINT
        return functools.partial(_run, recorder, region, recorder.layer, casting_to(), function)

    plain, reentrant = checkpoints._checkpoint_without_reentrant_generator, checkpoints.CheckpointFunction
    run = getattr(reentrant.apply, "__func__")  # noqa: B009 (the stubs take it for a plain function)
    patch = unittest.mock.patch.object

    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return plain(noted(function), *args, **kwargs)

    def apply(kind: type, function: Callable[..., Any], *args: Any) -> Any:
        return run(kind, noted(function), *args)

    with contextlib.ExitStack() as patches:
        patches.enter_context(patch(checkpoints, "_checkpoint_without_reentrant_generator", generator))
        patches.enter_context(patch(reentrant, "apply", classmethod(apply)))
        for name in ("_checkpoint_hook", "_recomputation_hook"):
            patches.enter_context(patch(checkpoints, name, _counted_hooks(recorder, name)))
        for mode in (checkpoints._CachingTorchDispatchMode, checkpoints._CachedTorchDispatchMode):
            patches.enter_context(patch(mode, "__torch_dispatch__", _counted_policy(recorder, mode)))
        yield


def _counted_hooks(recorder: OperatorRecorder, name: str) -> Callable[..., Any]:
    """The hooks of torch by that name, by which checkpoints see each tensor that is saved and asked for."""
    kind = getattr(checkpoints, name)

    def counted(hook: Callable[[Any], Any], value: Any) -> Any:
        recorder.hooks += 1
        return hook(value)

    def make(*args: Any) -> Any:
        made = kind(*args)
        for one in ("pack_hook", "unpack_hook"):
            setattr(made, one, functools.partial(counted, getattr(made, one)))
        return made

    return make


def _counted_policy(recorder: OperatorRecorder, mode: Any) -> Callable[..., Any]:
    """What a mode of selective checkpointing does with an operator."""
    dispatch = mode.__torch_dispatch__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.hooks += _OF_POLICY
        return dispatch(self, *args, **kwargs)

    return counted


def _run(
    recorder: OperatorRecorder, region: Region, layer: str, dtype: torch.dtype | None,
    function: Callable[..., Any], *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    if recorder.phase != "backward" or not recorder.is_traced():
        return function(*args, **kwargs)
    recorder.hooks += _OF_RECOMPUTATION
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
