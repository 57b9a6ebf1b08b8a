"""Runs a part of a module on meta before it is traced, to see the shape of what it gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from foretrain.capture.tracing.constants import Answering, Constants
from foretrain.capture.tracing.cuda import cuda_behaviour
from foretrain.capture.tracing.tracer import Recorder, _Answers, _prepare, is_of_library


def probe(module: torch.nn.Module, call: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:
    """What ``call(**inputs)``, a method of the module, gives on meta; nothing is recorded."""
    constants = Constants(guesses=is_of_library(module))
    _, placed = _prepare(module, inputs, "fp32", False, constants)
    assert isinstance(placed, Mapping)
    with (
        Recorder(module, placed, constants),
        _Answers(constants),
        cuda_behaviour(None),
        torch.no_grad(),
    ):
        return call(**placed)


_FEW = 16
"""Elements that a buffer of sizes or shares (a stride, the length of a kernel) has at most."""

_OF_BATCH_NORM = ("num_batches_tracked", "running_mean", "running_var")


def know_buffers(module: torch.nn.Module, build: Callable[[], torch.nn.Module]) -> None:
    """Give small buffers on meta the values that their constructor computed.

    A model that has some is built once more for that, on meta with values beside.
    """
    names = [
        name
        for name, buffer in module.named_buffers()
        if buffer.numel() <= _FEW and not name.endswith(_OF_BATCH_NORM)
    ]
    if not names:
        return
    answering = Answering()
    with torch.device("meta"), answering, _Answers(answering.constants):
        again = dict(build().named_buffers())
    buffers = dict(module.named_buffers())
    for name in names:
        value = answering.constants.value(again[name])
        if value is not None and not value.is_meta:
            buffers[name].known_value = value  # type: ignore[attr-defined]
