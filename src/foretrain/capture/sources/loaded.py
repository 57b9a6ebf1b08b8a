"""Holds a built model with its inputs and loss; builds modules on the meta device or a real one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from foretrain.capture.tracing.constants import Answering
from foretrain.capture.tracing.devices import OnMeta, Unfilled
from foretrain.errors import CaptureError, ForetrainError, first_line

Loss = Callable[[Any], torch.Tensor]
T = TypeVar("T")

AUTOCAST_DTYPES = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}
"""What autocast casts to, by the precision of the job."""

WEIGHT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""What weights and inputs are kept in where that is not fp32, by the precision of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A module, what it is called with, and what turns its output into a scalar, all on one device."""

    module: torch.nn.Module
    inputs: tuple[Any, ...] | Mapping[str, Any]
    loss: Loss | None
    tokens: int = 0
    notes: tuple[str, ...] = ()
    """What a forecast should say of how it was built."""


def classifier_loss() -> Loss:
    """The model's own loss where its output carries one, else cross-entropy of its logits against class
    labels, drawn once."""
    drawn: dict[torch.Size, torch.Tensor] = {}

    def targets(logits: torch.Tensor) -> torch.Tensor:
        shape = torch.Size((logits.shape[0], *logits.shape[2:]))
        if logits.is_meta:
            return torch.empty(shape, dtype=torch.long, device=logits.device)
        if shape not in drawn:
            drawn[shape] = torch.randint(logits.shape[1], shape, device=logits.device)
        return drawn[shape]

    def loss(output: Any) -> torch.Tensor:
        own = getattr(output, "loss", None)
        if isinstance(own, torch.Tensor):
            return own
        logits = _logits(output)
        if logits.dim() < 2 or not logits.is_floating_point():
            raise CaptureError(
                f"loss: an output of shape {list(logits.shape)} "
                "has no default loss; let the function return (module, inputs, loss)"
            )
        return F.cross_entropy(logits, targets(logits))

    return loss


def _logits(output: Any) -> torch.Tensor:
    """The main output of a model that returns a tensor, a tuple (auxiliary heads follow) or a mapping."""
    while not isinstance(output, torch.Tensor):
        if getattr(output, "logits", None) is not None:
            output = output.logits
        elif isinstance(output, Mapping):
            output = output["out"] if "out" in output else next(iter(output.values()))
        elif isinstance(output, list | tuple) and output:
            output = output[0]
        else:
            raise CaptureError(
                f"loss: an output of type {type(output).__name__} "
                "has no default loss; let the function return (module, inputs, loss)"
            )
    return output


@contextlib.contextmanager
def building(what: str) -> Iterator[None]:
    """Errors of a model's constructor as one line."""
    try:
        yield
    except ForetrainError:
        raise
    except ImportError as error:
        raise CaptureError(f"{what}: {first_line(error)}") from error
    except Exception as error:
        raise CaptureError(f"{what}: {type(error).__name__}: {first_line(error)}") from error


def build_on_meta(build: Callable[[], T]) -> T:
    """Build without allocating weights; a constructor that computes with real numbers gets those that do not
    depend on weights."""
    try:
        with torch.device("meta"), Unfilled():
            return build()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if "meta" not in str(error).lower():
            raise
    try:
        with torch.device("meta"), OnMeta(), Answering():
            return build()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if "meta" not in str(error).lower():
            raise
    with OnMeta():
        return build()


def build_on(build: Callable[[], torch.nn.Module], device: str) -> torch.nn.Module:
    """On the device itself, so that weights and buffers are those of the constructor; on the CPU first where
    it computes with numpy."""
    if device == "meta":
        return build_on_meta(build)
    try:
        with torch.device(device):
            return build().to(device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, NotImplementedError):
        if device == "cpu":
            raise
        return build().to(device)


def numbers(shape: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.empty(shape, device=device) if device == "meta" else torch.randn(shape, device=device)
