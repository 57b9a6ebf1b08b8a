"""Holds a built model with its inputs and loss; builds modules on the meta device or a real one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from foretrain.capture.sources.quantised import packed_away
from foretrain.capture.tracing.constants import Answering, Constants
from foretrain.capture.tracing.devices import OnMeta, Unfilled
from foretrain.capture.tracing.nested import tensors_in
from foretrain.errors import CaptureError, ForetrainError, InputError, first_line
from foretrain.tracebacks import raised_at

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
    notes: Sequence[str] = ()
    """What a forecast should say of how it was built."""
    constants: Constants | None = None
    """Values on meta that are known from building it."""
    compiled: list[str] = field(default_factory=list)
    """What of it ``torch.compile`` was applied to, before it was undone; functions when they have run."""


def parameter_counts(module: torch.nn.Module) -> list[int]:
    """All distinct parameters of a module, and those of them that are trained."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
    whole = sum(size for size, _ in sizes) + packed_away(module)
    return [whole, sum(size for size, trained in sizes if trained)]


def classifier_loss(inputs: Any = ()) -> Loss:
    """The model's own loss where its output is or carries one, else cross-entropy of its logits against class
    labels, drawn once: of images their second dimension, of each of the tokens that ``inputs`` begin with
    their last."""
    first = next(tensors_in(inputs), None)
    words = first is not None and first.dim() == 2 and not first.is_floating_point()
    tokens = tuple(first.shape) if first is not None and words else ()
    drawn: dict[torch.Size, torch.Tensor] = {}

    def targets(logits: torch.Tensor) -> torch.Tensor:
        shape = torch.Size((logits.shape[0], *logits.shape[2:]))
        if logits.is_meta:
            return torch.empty(shape, dtype=torch.long, device=logits.device)
        if shape not in drawn:
            drawn[shape] = torch.randint(logits.shape[1], shape, device=logits.device)
        return drawn[shape]

    def loss(output: Any) -> torch.Tensor:
        if (own := own_loss(output)) is not None:
            return own
        logits = _logits(output)
        if logits.dim() < 2 or not logits.is_floating_point():
            raise CaptureError(
                f"loss: an output of shape {list(logits.shape)} "
                "has no default loss; let the function return (module, inputs, loss)"
            )
        if logits.dim() == 3 and logits.shape[:2] == tokens:
            logits = logits.flatten(0, 1)
        return F.cross_entropy(logits, targets(logits))

    return loss


def own_loss(output: Any) -> torch.Tensor | None:
    """The loss that a model has computed: its output, what the output calls so, the one scalar in it, or the
    sum of a mapping of scalars."""
    if _is_scalar(output):
        return output  # type: ignore[no-any-return]
    parts = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    if isinstance(named := parts.get("loss", getattr(output, "loss", None)), torch.Tensor):
        return named.mean() if named.dim() else named
    if isinstance(output, Mapping) and output and all(map(_is_scalar, output.values())):
        return torch.stack(list(output.values())).sum()
    if isinstance(output, list | tuple):
        scalars = [part for part in output if _is_scalar(part)]
        return scalars[0] if len(scalars) == 1 else None
    return None


def has_own_loss(output: Any) -> bool:
    """Whether a model has computed its loss, as ``own_loss`` finds it, without computing anything."""
    parts = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    values = list(output.values()) if isinstance(output, Mapping) else output
    scalars = [_is_scalar(one) for one in values] if isinstance(values, list | tuple) else []
    return (
        _is_scalar(output)
        or isinstance(parts.get("loss", getattr(output, "loss", None)), torch.Tensor)
        or (bool(scalars) and (all(scalars) if isinstance(output, Mapping) else sum(scalars) == 1))
    )


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.dim() and value.requires_grad


def _logits(output: Any) -> torch.Tensor:
    """The main output of a model that returns a tensor, a tuple (auxiliary heads follow), a mapping or a
    dataclass."""
    while not isinstance(output, torch.Tensor):
        if getattr(output, "logits", None) is not None:
            output = output.logits
        elif isinstance(output, Mapping):
            output = output["out"] if "out" in output else next(iter(output.values()))
        elif isinstance(output, list | tuple) and output:
            output = output[0]
        elif dataclasses.is_dataclass(output) and (first := next(tensors_in(output), None)) is not None:
            output = first
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
        raise CaptureError(f"{what}: {first_line(error)}{_at(error)}") from error
    except Exception as error:
        raise CaptureError(f"{what}: {type(error).__name__}: {first_line(error)}{_at(error)}") from error
    except SystemExit as stop:
        code = "" if stop.code is None else repr(stop.code)
        raise CaptureError(f"{what}: it calls sys.exit({code}){_at(stop)}") from stop


def _at(error: BaseException) -> str:
    """The line of the user's own code, where the error came out of it."""
    where = raised_at(error)
    return f" (at {where})" if where else ""


def build_on_meta(build: Callable[[], T], constants: Constants | None = None) -> T:
    """Build without allocating weights; a constructor that computes with real numbers gets those that do not
    depend on weights, and they stay known in ``constants``."""
    constants = constants or Constants()
    try:
        with torch.device("meta"), Unfilled(constants), Answering(constants):
            return build()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if "meta" not in str(error).lower():
            raise
    with OnMeta():
        return build()


def build_on(
    build: Callable[[], torch.nn.Module], device: str, constants: Constants | None = None
) -> torch.nn.Module:
    """On the device itself, so that weights and buffers are those of the constructor; on the CPU first where
    it computes with numpy. On meta, ``constants`` learn what is known."""
    if device == "meta":
        return build_on_meta(build, constants)
    try:
        with torch.device(device):
            return build().to(device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, NotImplementedError):
        if device == "cpu":
            raise
        return build().to(device)


def in_channels_last(module: torch.nn.Module) -> torch.nn.Module:
    """The module with its weights laid out channels last, as torch does it."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    deep = next((name for name, one in tensors if one.dim() == 5), None)
    if deep is not None:
        raise InputError(
            f"training.channels_last: true, but {deep} has 5 dimensions, which torch does not lay out so; "
            "leave it out"
        )
    return module.to(memory_format=torch.channels_last)  # type: ignore[no-any-return, call-overload]


def numbers(shape: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.empty(shape, device=device) if device == "meta" else torch.randn(shape, device=device)
