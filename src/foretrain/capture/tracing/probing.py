"""Runs a part of a module on meta before it is traced, to see the shape of what it gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from foretrain.capture.tracing.constants import Constants
from foretrain.capture.tracing.cuda import cuda_behaviour
from foretrain.capture.tracing.recorder import OperatorRecorder
from foretrain.capture.tracing.tracer import Answers, prepare


def probe(
    module: torch.nn.Module, call: Callable[..., Any], inputs: Mapping[str, Any], known: Constants
) -> Any:
    """What ``call(**inputs)``, a method of a library's module, gives on meta; nothing is recorded, and what
    is ``known`` stays as it is."""
    constants = Constants(of_library=True)
    for buffer in module.buffers():
        if (value := known.value(buffer)) is not None:
            constants.know(buffer, value.clone())
    _, placed = prepare(module, inputs, "fp32", False, constants)
    assert isinstance(placed, Mapping)
    with (
        OperatorRecorder(module, placed, constants),
        Answers(constants),
        cuda_behaviour(None),
        torch.no_grad(),
    ):
        return call(**placed)
