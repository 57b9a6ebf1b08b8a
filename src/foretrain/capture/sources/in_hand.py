"""Readies a module in hand for a job: inputs at its micro-batch, a loss with its targets, its optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from foretrain.capture.sources.inputs import default_inputs, tensors_of
from foretrain.capture.sources.loaded import Loss
from foretrain.capture.tracing.optimizers import usual_settings
from foretrain.errors import CaptureError, InputError
from foretrain.job import Training
from foretrain.options import optimizer_name, optimizer_settings, unwrapped_optimizer

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


def samples_in(inputs: Any) -> int | None:
    """Rows of the first tensor; None where no tensor has rows."""
    tensors = tensors_of(_plain(inputs))
    return tensors[0].shape[0] if tensors else None


def sequence_in(inputs: Any) -> int | None:
    """Tokens of each sample, where the inputs call themselves token ids."""
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    return ids.shape[1] if isinstance(ids, torch.Tensor) and ids.dim() == 2 else None


def _plain(inputs: Any) -> Any:
    return dict(inputs) if isinstance(inputs, Mapping) else inputs


def made_inputs(training: Training, samples: int) -> tuple[torch.Tensor, ...]:
    """Images or token ids, as the job says."""
    if training.image is None and training.sequence is None:
        raise InputError(
            "inputs: missing; a module is captured with example inputs: give them, or image=, or sequence="
        )
    return default_inputs(training, samples, "meta")


def resized(inputs: Any, wanted: int) -> Any:
    """The inputs with ``wanted`` samples: every tensor with a row per sample gets that many.

    A tensor whose rows could be samples in another way, or not be samples at all, is refused. Inputs without
    rows are taken to be what the job says.
    """
    inputs, samples = _plain(inputs), samples_in(inputs)
    if samples is None or samples == wanted:
        return inputs
    for tensor in tensors_of(inputs):
        rows = tensor.shape[0]
        if rows != samples and (samples == 1 or (rows % samples == 0 and rows)):
            raise InputError(
                f"inputs: of {samples} samples, and the job takes {wanted} at once; how a tensor of "
                f"{list(tensor.shape)} grows with them is not clear: give inputs of {wanted} samples"
            )
    return resized_like(inputs, samples, wanted)


def resized_like(value: Any, samples: int, wanted: int) -> Any:
    """Tensors with a row for each of ``samples`` samples with as many as are wanted."""
    return tree_map(lambda leaf: _with_rows(leaf, samples, wanted), value)


def _with_rows(leaf: Any, samples: int, wanted: int) -> Any:
    """Integers keep their values, repeated; what else a tensor holds does not matter."""
    if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != samples:
        return leaf
    if not leaf.is_floating_point() and not leaf.is_meta:
        return leaf[torch.arange(wanted, device=leaf.device) % samples]
    shape, strides = (wanted, *leaf.shape[1:]), leaf.stride()
    if strides[0] < max(
        (size * stride for size, stride in zip(shape[1:], strides[1:], strict=True)), default=1
    ):
        strides = torch.empty(shape, device="meta").stride()
    empty = torch.empty_strided(shape, strides, dtype=leaf.dtype, device="meta")
    return empty.requires_grad_(leaf.requires_grad)


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


def loss_at(loss: Loss | None, samples: int, wanted: int) -> Loss | None:
    """A loss whose own tensors (targets that it closes over) have a row for each of ``wanted`` samples."""
    if loss is None or samples == wanted:
        return loss
    weights = [*loss.parameters(), *loss.buffers()] if isinstance(loss, torch.nn.Module) else []
    rows = _OtherRows(samples, wanted, weights)

    def at_wanted(output: Any) -> torch.Tensor:
        with rows:
            rows.made(output)
            return loss(output)

    return at_wanted


class _OtherRows(TorchFunctionMode):
    """Resizes tensors that come from outside, the first time that a function is called with each."""

    def __init__(self, samples: int, wanted: int, kept: list[torch.Tensor]) -> None:
        super().__init__()
        self._samples, self._wanted = samples, wanted
        self._resized: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for tensor in kept:
            self.made(tensor)

    def made(self, value: Any) -> None:
        """What was computed here already has the rows that it should have."""
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                self._resized[id(tensor)] = (tensor, tensor)

    def _place(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._resized:
            with torch._C.DisableTorchFunction():
                self._resized[id(value)] = (value, _with_rows(value, self._samples, self._wanted))
        return self._resized[id(value)][1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*tree_map(self._place, args), **tree_map(self._place, kwargs or {}))
        self.made(output)
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
    found: dict[str, Any] = {
        name: value if given[name] else type(value)()
        for name, value in _SHAPING.items()
        if name in given and name in usual and bool(given[name]) != bool(usual[name])
    }
    said = [f"{name} {given[name]}" for name in found]
    if given.get("foreach") is False or found.get("fused"):
        found["foreach"] = False
        said += ["foreach False"] if not found.get("fused") else []
    return (
        found,
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


def at_other_size(error: CaptureError, samples: int, wanted: int) -> CaptureError:
    """What to do where a module does not run with inputs that were resized."""
    return CaptureError(
        f"inputs: of {samples} samples, resized to the {wanted} that the job takes at once: {error}; give "
        f"inputs (and targets) of {wanted} samples, or micro_batch={samples}"
    )
