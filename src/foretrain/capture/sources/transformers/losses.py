"""Gives transformers' models losses that can be traced: objects are matched, and every output gets one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from foretrain.errors import CaptureError


def fix_matching() -> None:
    """Let detection losses match objects to the first queries on meta, which has no costs to compare."""
    for name, module in list(sys.modules.items()):
        found = vars(module).get("linear_sum_assignment") if name.startswith("transformers.") else None
        if found is not None and found is not _assign:
            _originals.append(found)
            vars(module)["linear_sum_assignment"] = _assign


_originals: list[Any] = []


def _assign(costs: Any, *args: Any, **kwargs: Any) -> Any:
    """scipy's ``linear_sum_assignment``; in order for costs that have no values."""
    if not (isinstance(costs, torch.Tensor) and costs.is_meta):
        return _originals[0](costs, *args, **kwargs)
    import numpy

    pairs = numpy.arange(min(costs.shape))
    return pairs, pairs


class OwnOrMean:
    """The loss that a model computes itself; where it has none, the mean of its main output, and a note."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.notes: list[str] = []

    def __call__(self, output: Any) -> torch.Tensor:
        own = getattr(output, "loss", None)
        if isinstance(own, torch.Tensor):
            return own if own.dim() == 0 else own.mean()
        learnt = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        if not learnt:
            raise CaptureError(f"loss: no output of {self._model} depends on a weight")
        note = f"{self._model} has no loss; the mean of its output is taken"
        if note not in self.notes:
            self.notes.append(note)
        return learnt[0].float().mean()


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    values = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ()
    )
    return [tensor for value in values for tensor in _tensors(value)]
