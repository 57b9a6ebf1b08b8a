"""Traces one step of a module on the meta device as an OpGraph: no weights, no GPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from foretrain.capture.sources.loaded import (
    AUTOCAST_DTYPES,
    WEIGHT_DTYPES,
    Loss,
    has_own_loss,
    in_channels_last,
)
from foretrain.capture.tracing.checkpoints import followed_checkpoints
from foretrain.capture.tracing.constants import Constants
from foretrain.capture.tracing.cuda import cuda_behaviour
from foretrain.capture.tracing.cuda_kernels import served_attention
from foretrain.capture.tracing.devices import OnMeta, is_of
from foretrain.capture.tracing.failures import FOLLOWED, error_context
from foretrain.capture.tracing.guesses import same_draws
from foretrain.capture.tracing.nested import map_tensors, tensors_in
from foretrain.capture.tracing.optimizers import StepFunction, build_optimizer, weights_of_words
from foretrain.capture.tracing.recorder import OperatorRecorder
from foretrain.capture.tracing.sparse import tables_of
from foretrain.errors import CaptureError
from foretrain.graph import OpGraph


def trace_step(
    module: torch.nn.Module,
    inputs: tuple[Any, ...] | Mapping[str, Any],
    loss: Loss | None,
    *,
    samples: int,
    tokens: int = 0,
    mode: str = "train",
    precision: str = "fp32",
    optimizer: str = "sgd",
    optimizer_settings: Mapping[str, Any] | None = None,
    updated: frozenset[str] | None = None,
    master_weights: bool = False,
    scales_loss: bool | None = None,
    channels_last: bool = False,
    accumulate: bool = False,
    info: Mapping[str, Any] | None = None,
    around: contextlib.AbstractContextManager[Any] | None = None,
    own_gradients: bool = False,
    constants: Constants | None = None,
) -> OpGraph:
    """Trace forward, loss, backward and optimizer (or forward alone, in ``infer`` mode) of a module that
    lives on meta.

    The optimizer updates all parameters, or those whose names are in ``updated``. Where nothing else is said,
    the loss of amp-fp16 is scaled.

    Forward and loss run inside ``around``. With ``own_gradients``, adding to a gradient belongs to the layer
    of its parameter. ``constants`` are the values that are known from building it.
    """
    constants = constants or Constants()
    constants.of_library = constants.of_library or _is_of_library(module)
    module, inputs = prepare(module, inputs, precision, channels_last, constants)
    with contextlib.suppress(NotImplementedError):  # an exported module runs as it was exported
        module.train(mode == "train")
    if constants.everything:
        constants.assumptions.append(FOLLOWED)
        constants.draw((*module.parameters(), *module.buffers(), *tensors_in(inputs)))
    recorder = OperatorRecorder(module, inputs, constants, own_gradients)
    with error_context(recorder):
        step = (
            build_optimizer(
                optimizer,
                [one for name, one in module.named_parameters() if updated is None or name in updated],
                master_weights=master_weights,
                settings=optimizer_settings,
                tables=tables_of(module),
                words=weights_of_words(module),
            )
            if mode == "train"
            else None
        )
    if step is not None:
        if scales_loss or (scales_loss is None and precision == "amp-fp16"):
            step.scale_loss()
        recorder.hold(list(step.state_tensors()), "optimizer_state")
        if step.rows.tables and step.rows.note is not None:
            constants.assumptions.append(step.rows.note)
        if accumulate:
            _hold_gradients(module, but=step.rows.tables)
    with (
        recorder.reference_counting(),
        recorder,
        error_context(recorder),
        same_draws(),
        followed_checkpoints(recorder, cuda_behaviour),
    ):
        low_dtype, around = AUTOCAST_DTYPES.get(precision), around or contextlib.nullcontext()
        computed = _run(recorder, module, inputs, loss, step, low_dtype, around)
    known = {**(info or {}), **({"own_loss": True} if computed else {})}
    graph = recorder.finish(samples=samples, tokens=tokens, accumulates=accumulate, info=known)
    module.zero_grad(set_to_none=True)
    return graph


def _hold_gradients(module: torch.nn.Module, *, but: Iterable[torch.nn.Parameter]) -> None:
    """Give parameters the gradients of earlier micro-batches, to which the traced one adds; ``but`` tables of
    sparse gradients."""
    sparse = {id(table) for table in but}
    for parameter in module.parameters():
        adds = parameter.requires_grad and id(parameter) not in sparse
        parameter.grad = torch.empty_like(parameter) if adds else None


def _is_of_library(module: torch.nn.Module) -> bool:
    """Whether the code of a model is that of transformers, whose questions to data are known."""
    return type(module).__module__.partition(".")[0] == "transformers"


def prepare(
    module: torch.nn.Module,
    inputs: tuple[Any, ...] | Mapping[str, Any],
    precision: str,
    channels_last: bool,
    constants: Constants,
) -> tuple[torch.nn.Module, tuple[Any, ...] | Mapping[str, Any]]:
    """The module and its inputs on meta, in the weight dtype and memory format of the job; real integer
    inputs stay known."""
    known = {name: constants.value(buffer) for name, buffer in module.named_buffers()}
    module = module.to("meta")
    dtype = WEIGHT_DTYPES.get(precision)
    if dtype is not None:
        module = module.to(dtype)
    if channels_last:
        module = in_channels_last(module)
    for name, buffer in module.named_buffers():
        if (value := known.get(name)) is not None:
            constants.know(buffer, value.to(buffer.dtype, copy=True))

    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        real, value = constants.value(value), value.to("meta")
        if dtype is not None and value.is_floating_point():
            value = value.to(dtype)
        elif real is not None and not real.is_floating_point():
            constants.know(value, real.clone())
        return value.to(memory_format=torch.channels_last) if channels_last and value.dim() == 4 else value

    placed = map_tensors(place, inputs)
    return module, placed if isinstance(placed, Mapping) else tuple(placed)


def _run(
    recorder: OperatorRecorder, module: torch.nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any],
    loss: Loss | None, step: StepFunction | None,
    low_dtype: torch.dtype | None, around: contextlib.AbstractContextManager[Any],
) -> bool:  # fmt: skip
    """Run a step; whether the module computed its loss itself."""
    recorder.phase = "forward"
    with (
        Answers(recorder.constants),
        recorder.constants.followed(),
        cuda_behaviour(low_dtype),
        torch.set_grad_enabled(step is not None),
        recorder.layers(),
        served_attention() if step is None and low_dtype is None else contextlib.nullcontext(),
        around,
    ):
        output = module(**inputs) if isinstance(inputs, Mapping) else module(*inputs)
        value = loss(output) if loss is not None and step is not None else None
        computed = has_own_loss(output) if step is not None else False
        value = value if step is None or value is None else step.scaled(value)
    if step is None:
        return computed
    if value is None:
        raise CaptureError("loss: missing; the model's output has no .loss and no loss was given")
    _check_loss(value)
    del output
    recorder.end_forward()
    recorder.phase = "backward"
    with (
        Answers(recorder.constants),
        recorder.layers(recompute=functools.partial(cuda_behaviour, low_dtype)),
    ):
        value.backward()
    recorder.mark_gradients(module.parameters())
    for parameter in (unused := recorder.without_gradients(module.parameters())):
        parameter.grad = None
    recorder.never_made(step.unused_state({id(parameter) for parameter in unused}))
    recorder.phase = "optimizer"
    with torch.no_grad():
        step()
    module.zero_grad(set_to_none=True)
    del value
    return computed


class Answers(OnMeta):
    """Python-level questions to a tensor (``f"{index}"``, ``.tolist()``, ``.to("cpu")``) are answered where
    its value is known; lengths of a packed sequence lie on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asks = func in _QUESTIONS or (func is torch.Tensor.to and _names_cpu(*args[1:], **(kwargs or {})))
        if asks and args[0].is_meta and (value := self._constants.answer(args[0])) is not None:
            return func(value, *args[1:], **(kwargs or {}))
        if func == _PACK and args[1].is_meta and (value := self._constants.answer(args[1])) is not None:
            args = (args[0], value, *args[2:])
        if func is torch.Tensor.__getitem__ and args[0].is_meta:
            args = (args[0], self._constants.listed(args[1]))
        return super().__torch_function__(func, types, args, kwargs)


_QUESTIONS = {
    torch.Tensor.__format__,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.cpu,
}
_PACK = torch._VF._pack_padded_sequence


def _names_cpu(*args: Any, **kwargs: Any) -> bool:
    """Whether what a tensor is sent ``.to`` is the CPU."""
    return any(is_of(one, "cpu") for one in (*args[:1], kwargs.get("device")))


def _check_loss(value: Any) -> None:
    """Refuse what no backward pass can start from."""
    if not isinstance(value, torch.Tensor):
        raise CaptureError(f"loss: it gives {type(value).__name__}; a tensor of one number is allowed")
    if value.numel() != 1:
        raise CaptureError(f"loss: it gives a tensor of shape {list(value.shape)}; one number is allowed")
    if not value.requires_grad:
        raise CaptureError("loss: it does not depend on any weight that is trained, so there is no gradient")
