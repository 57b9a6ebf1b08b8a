"""Readies a module in hand for a job: inputs at its micro-batch, a loss with its targets, its optimizer."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from foretrain.capture.sources.inputs import default_inputs
from foretrain.capture.sources.loaded import Loss
from foretrain.capture.tracing.nested import map_tensors, tensors_in
from foretrain.capture.tracing.optimizers import usual_settings
from foretrain.errors import CaptureError, InputError
from foretrain.options import optimizer_name, optimizer_settings, unwrapped_optimizer
from foretrain.workload import Training

_WRAPPERS = ("DataParallel", "DistributedDataParallel")


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module that others are replicas of."""
    while type(module).__name__ in _WRAPPERS and isinstance(
        inner := getattr(module, "module", None), torch.nn.Module
    ):
        module = inner
    return module


def title_of(module: torch.nn.Module) -> str:
    """``GPT (124M parameters)``."""
    module = getattr(module, "_orig_mod", module)
    count = float(sum(parameter.numel() for parameter in module.parameters()))
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{type(module).__name__} ({count / scale:.3g}{unit} parameters)"
    return f"{type(module).__name__} ({count:.0f} parameters)"


def precision_of(module: torch.nn.Module) -> str | None:
    """The low precision that all weights of a module are kept in; None for any other."""
    dtypes = {one.dtype for one in module.parameters() if one.is_floating_point()}
    return (
        {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(next(iter(dtypes))) if len(dtypes) == 1 else None
    )


# Inputs

_MOST_KNOWN = 2**22
"""Elements of resized inputs up to which a model may ask for the values of floating-point ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Example inputs of a module, and in which of their dimensions samples lie."""

    inputs: tuple[Any, ...] | Mapping[str, Any]
    samples: int | None
    """None where no tensor has rows; such inputs are taken to be what the job says."""
    along: int = 0

    @classmethod
    def of(cls, module: torch.nn.Module, inputs: Any) -> Example:
        """Samples are the rows of the first tensor, or its columns where layers find that time is first."""
        if inputs is None or isinstance(inputs, str | bool | int | float):
            raise InputError(f"inputs: {inputs!r} is not a tensor, or a tuple or a dict of them")
        if isinstance(inputs, Mapping):
            inputs = dict(inputs)
        elif not isinstance(inputs, list | tuple):
            inputs = (inputs,)
        first = next((tensor for tensor in tensors_in(inputs) if tensor.dim()), None)
        if first is None:
            return cls(inputs=inputs, samples=None)
        along = 1 if first.dim() > 1 and _time_first(module, inputs, first) else 0
        return cls(inputs=inputs, samples=first.shape[along], along=along)

    @classmethod
    def made(cls, training: Training, samples: int) -> Example:
        """Images or token ids, as the job says."""
        if training.image is None and training.sequence is None:
            raise InputError(
                "inputs: missing; a module is captured with some: give examples, or image=, or sequence="
            )
        return cls(inputs=default_inputs(training, samples, "meta"), samples=samples)

    @property
    def sequence(self) -> int | None:
        """Tokens of each sample, where the inputs call themselves token ids."""
        ids = self.inputs.get("input_ids") if isinstance(self.inputs, Mapping) else None
        return ids.shape[1 - self.along] if isinstance(ids, torch.Tensor) and ids.dim() == 2 else None

    def at(self, wanted: int) -> Any:
        """The inputs with so many samples: every tensor that has them gets as many.

        A tensor that could grow in another way, or not at all, is refused.
        """
        samples = self.samples
        if samples is None or samples == wanted:
            return self.inputs
        for tensor in (one for one in tensors_in(self.inputs) if one.dim()):
            rows = tensor.shape[0] if tensor.dim() <= self.along else tensor.shape[self.along]
            if rows != samples and (samples == 1 or (rows % samples == 0 and rows)):
                raise InputError(
                    f"inputs: of {samples} samples, and the job takes {wanted} at once; how a tensor of "
                    f"{list(tensor.shape)} grows with them is not clear: give inputs of {wanted} samples"
                )
        return self.like(self.inputs, wanted)

    def like(self, value: Any, wanted: int) -> Any:
        """Whatever has these samples with as many as are wanted."""
        if self.samples is None or self.samples == wanted:
            return value
        return map_tensors(lambda tensor: _resized(tensor, self.samples, wanted, self.along), value)


def _resized(tensor: torch.Tensor, samples: int | None, wanted: int, along: int) -> torch.Tensor:
    """Values are repeated, those of integers and of what is small enough to be looked at."""
    if not tensor.dim():
        return tensor
    along = along if tensor.dim() > along else 0
    if tensor.shape[along] != samples:
        return tensor
    shape = (*tensor.shape[:along], wanted, *tensor.shape[along + 1 :])
    held = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-held[dim], dim))
    strides, step = [0] * tensor.dim(), 1
    for dim in reversed(order if along == order[0] else range(tensor.dim())):
        strides[dim], step = step, step * shape[dim]
    known = not tensor.is_meta and (not tensor.is_floating_point() or math.prod(shape) <= _MOST_KNOWN)
    made = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device if known else "meta")
    if known:
        which = torch.arange(wanted, device=tensor.device) % samples
        made.copy_(tensor.detach().index_select(along, which))
    return made.requires_grad_(tensor.requires_grad)


def _time_first(module: torch.nn.Module, inputs: Any, first: torch.Tensor) -> bool:
    """Whether inputs go as they are into a layer of torch that takes time before samples."""
    from foretrain.capture import capture

    layers = [layer for layer in module.modules() if _takes_time_first(layer)]
    seen: list[torch.Size] = []

    def look(_layer: Any, args: Any, kwargs: Any) -> None:
        seen.extend(one.shape for one in tree_leaves((args, kwargs))[:1] if isinstance(one, torch.Tensor))

    hooks = [layer.register_forward_pre_hook(look, with_kwargs=True) for layer in layers]
    try:
        if layers:
            capture(module, inputs, mode="infer")
    except CaptureError:
        return False  # it is told when it is captured as the job says
    finally:
        for hook in hooks:
            hook.remove()
    rows, columns = first.shape[:2]
    return rows != columns and any(len(shape) == 3 and shape[:2] == (rows, columns) for shape in seen)


def _takes_time_first(layer: torch.nn.Module) -> bool:
    batch_first = getattr(
        layer, "batch_first", getattr(getattr(layer, "self_attn", None), "batch_first", None)
    )
    return batch_first is False and type(layer).__module__.startswith("torch.nn.")


# Losses


def loss_of(loss: Any, targets: Any) -> Loss | None:
    """A loss of the output alone: that of the user, given the targets where there are some."""
    if loss is not None and not callable(loss):
        raise InputError(f"loss: {loss!r} is not a callable from the module's output to a scalar")
    needs = 0 if loss is None else _needed(loss)
    if targets is None:
        if needs > 1:
            name = getattr(loss, "__name__", type(loss).__name__)
            raise InputError(
                f"loss: {name} takes {needs} arguments; give targets=..., or a loss of the output alone: "
                f"lambda output: {name}(output, targets)"
            )
        return loss  # type: ignore[no-any-return]
    if needs == 1 and not _takes_two(loss):
        raise InputError("targets: the loss takes the output alone; leave targets out, or let it take both")
    judge: Callable[..., Any] = F.cross_entropy if loss is None else loss
    by_tensor = loss is None or isinstance(loss, torch.nn.Module)

    def of_output(output: Any) -> torch.Tensor:
        return judge(_main(output) if by_tensor else output, targets)  # type: ignore[no-any-return]

    return of_output


def _main(output: Any) -> Any:
    """The tensor that a loss of torch judges, of an output that carries more."""
    if isinstance(output, Mapping):
        return output.get("logits", output)
    return output[0] if isinstance(output, list | tuple) and output else getattr(output, "logits", output)


def _signature(loss: Any) -> list[inspect.Parameter]:
    called = loss.forward if isinstance(loss, torch.nn.Module) else loss
    try:
        return list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):
        return []


def _needed(loss: Any) -> int:
    """Arguments that a loss cannot do without; 0 where it does not tell."""
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in by_position and one.default is one.empty for one in _signature(loss))


def _takes_two(loss: Any) -> bool:
    kinds = [one.kind for one in _signature(loss)]
    return inspect.Parameter.VAR_POSITIONAL in kinds or len(kinds) > 1


def loss_at(loss: Loss | None, example: Example, wanted: int) -> Loss | None:
    """The loss, with as many samples in its own tensors (targets that it closes over), and its value
    checked."""
    if loss is None:
        return None
    weights = [*loss.parameters(), *loss.buffers()] if isinstance(loss, torch.nn.Module) else []
    other_size = example.samples not in (None, wanted)

    def at_wanted(output: Any) -> torch.Tensor:
        with _OtherSize(example, wanted, [output, *weights]) if other_size else contextlib.nullcontext():
            value: Any = loss(output)
        if not isinstance(value, torch.Tensor):
            raise CaptureError(f"loss: it returned {type(value).__name__}; a tensor of one number is allowed")
        if value.numel() != 1:
            shape = list(value.shape)
            raise CaptureError(
                f"loss: it returned a tensor of {shape}; one number is allowed, such as a mean"
            )
        return value

    return at_wanted


class _OtherSize(TorchFunctionMode):
    """Resizes tensors that come from outside, the first time that a function is called with each."""

    def __init__(self, example: Example, wanted: int, kept: list[Any]) -> None:
        super().__init__()
        self._example, self._wanted = example, wanted
        self._resized: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._keep(kept)

    def _keep(self, value: Any) -> None:
        """What was computed here already has the size that it should have."""
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                self._resized[id(tensor)] = (tensor, tensor)

    def _place(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._resized:
            with torch._C.DisableTorchFunction():
                self._resized[id(value)] = (value, self._example.like(value, self._wanted))
        return self._resized[id(value)][1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*tree_map(self._place, args), **tree_map(self._place, kwargs or {}))
        self._keep(output)
        return output


# Optimizers

_SHAPING: dict[str, Any] = {
    "momentum": 0.9, "weight_decay": 0.01, "nesterov": True, "amsgrad": True, "centered": True, "fused": True,
}  # fmt: skip
"""Settings that decide what a step computes, by whether they are set, with a value for those that are."""


def settings_of(optimizer: Any) -> tuple[dict[str, Any], str]:
    """Keyword arguments where an optimizer computes otherwise than its name says, and these in words."""
    if optimizer is None or isinstance(optimizer, str):
        return {}, ""
    given, usual = optimizer_settings(optimizer), usual_settings(optimizer_name(optimizer))
    settings: dict[str, Any] = {
        name: value if given[name] else type(value)()
        for name, value in _SHAPING.items()
        if name in given and name in usual and bool(given[name]) != bool(usual[name])
    }
    said = [f"{name} {given[name]}" for name in settings]
    if given.get("foreach") is False or settings.get("fused"):
        settings["foreach"] = False
        said += ["foreach False"] if not settings.get("fused") else []
    return (
        settings,
        f"{optimizer_name(optimizer)} with {', '.join(said)}" if said else "",
    )


def updated_by(optimizer: Any, module: torch.nn.Module) -> frozenset[str] | None:
    """Names of the parameters that an optimizer has been given; None for all that need gradients."""
    optimizer = unwrapped_optimizer(optimizer)
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        return None
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = {name: id(one) for name, one in module.named_parameters() if one.requires_grad}
    updated = frozenset(name for name, parameter in trained.items() if parameter in held)
    if trained and not updated:
        raise InputError("optimizer: it holds no parameter of the module; make it from module.parameters()")
    return None if len(updated) == len(trained) else updated


def at_other_size(error: CaptureError, example: Example, wanted: int) -> CaptureError:
    """What to do where a module runs, but not with inputs that were resized."""
    return CaptureError(
        f"inputs: of {example.samples} samples, resized to the {wanted} that the job takes at once: {error}; "
        f"give inputs (and targets) of {wanted} samples, or micro_batch={example.samples}"
    )
