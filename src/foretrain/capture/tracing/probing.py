"""Runs a part of a module on meta before it is traced, to see the shape of what it gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from foretrain.capture.tracing.constants import Constants
from foretrain.capture.tracing.cuda import cuda_behaviour
from foretrain.capture.tracing.tracer import Recorder, _Answers, _prepare


def probe(module: torch.nn.Module, call: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:
    """What ``call(**inputs)``, a method of the module, gives on meta; nothing is recorded."""
    constants = Constants()
    _, placed = _prepare(module, inputs, "fp32", False, constants)
    assert isinstance(placed, Mapping)
    with (
        Recorder(module, placed, constants),
        _Answers(constants),
        cuda_behaviour(None),
        torch.no_grad(),
    ):
        return call(**placed)
