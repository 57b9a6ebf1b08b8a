"""Makes optimizers by name: one call is one step, as torch runs it on CUDA (foreach kernels unless the name
says fused)."""

from __future__ import annotations

import contextlib
import inspect
import unittest.mock
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foretrain.capture.tracing.eight_bit import EightBitAdamW, bitsandbytes
from foretrain.capture.tracing.meta_outputs import describe, remembered
from foretrain.capture.tracing.nested import tensors_in
from foretrain.capture.tracing.sparse import RowUpdate
from foretrain.errors import CaptureError

_TORCH: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.01, "momentum": 0.9, "foreach": True}),
    "sgd-plain": ("SGD", {"lr": 0.01, "foreach": True}),
    "adam": ("Adam", {"lr": 1e-3, "foreach": True}),
    "sparse-adam": ("Adam", {"lr": 1e-3, "foreach": True}),
    "adamw": ("AdamW", {"lr": 1e-3, "foreach": True}),
    "adam-fused": ("Adam", {"lr": 1e-3, "fused": True}),
    "adamw-fused": ("AdamW", {"lr": 1e-3, "fused": True}),
    "adafactor": ("Adafactor", {"lr": 1e-2, "foreach": True}),
    "adagrad": ("Adagrad", {"lr": 1e-2, "foreach": True}),
    "rmsprop": ("RMSprop", {"lr": 1e-2, "foreach": True}),
    "nadam": ("NAdam", {"lr": 1e-3, "foreach": True}),
    "radam": ("RAdam", {"lr": 1e-3, "foreach": True}),
    "adamax": ("Adamax", {"lr": 1e-3, "foreach": True}),
    "adadelta": ("Adadelta", {"lr": 1.0, "foreach": True}),
    "asgd": ("ASGD", {"lr": 1e-2, "foreach": True}),
    "rprop": ("Rprop", {"lr": 1e-2, "foreach": True}),
}


class StepFunction:
    """An optimizer whose state exists: calling it runs one step over the gradients of its parameters."""

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        masters: list[torch.Tensor] | None,
        rows: RowUpdate,
    ) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._masters = masters
        self.rows = rows
        self._scaler: torch.amp.GradScaler | None = None

    def scale_loss(self) -> None:
        """From now on, scale the loss and unscale gradients before they are used, as ``GradScaler`` does."""
        self._scaler = torch.amp.GradScaler("meta")
        self._scaler._lazy_init_scale_growth_tracker(torch.device("meta"))

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self._scaler is None else self._scaler.scale(loss)

    def __call__(self) -> None:
        self.rows.step()
        if self._scaler is not None:
            self._scaler.step(self._optimizer)
            self._scaler.update()
            return
        if self._masters is None:
            self._optimizer.step()
            return
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self._optimizer.step()
        torch._foreach_copy_(list[torch.Tensor](self._parameters), self._masters)
        self._optimizer.zero_grad(set_to_none=True)

    def unused_state(self, unused: Collection[int]) -> Iterator[torch.Tensor]:
        """What it keeps of parameters, given by their ids, that no gradient comes to: torch makes no state of
        these. Its fp32 masters are there all the same."""
        for parameter, target in zip(self._parameters, self._masters or self._parameters, strict=True):
            if id(parameter) in unused:
                yield from tensors_in(self._optimizer.state.get(target))

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """What the optimizer keeps between steps on the device, fp32 masters included."""
        yield from self._masters or ()
        if self._scaler is not None and self._scaler._scale is not None:
            yield self._scaler._scale
            yield cast(torch.Tensor, self._scaler._growth_tracker)
        yield from self.rows.state_tensors()
        for state in self._optimizer.state.values():
            yield from (
                value for value in state.values() if isinstance(value, torch.Tensor) and value.is_meta
            )


def build_optimizer(
    name: str,
    parameters: list[torch.nn.Parameter],
    *,
    master_weights: bool = False,
    settings: Mapping[str, Any] | None = None,
    tables: Sequence[torch.nn.Parameter] = (),
    words: Collection[int] = (),
) -> StepFunction:
    """The optimizer ``name`` over ``parameters``, with the state it has after its first step; ``settings`` in
    place of those that the name stands for. ``tables`` have sparse gradients; ``words`` are those that
    ``weights_of_words`` names."""
    apart = {id(table) for table in tables}
    trained = [one for one in parameters if one.requires_grad and id(one) not in apart]
    if not trained and not apart:
        raise CaptureError("model: it has no trainable parameter; use training.mode = 'infer'")
    masters = (
        [torch.nn.Parameter(parameter.detach().float()) for parameter in trained] if master_weights else None
    )
    targets = masters if masters is not None else trained
    with _fused_on_meta():
        of_words = [target for one, target in zip(trained, targets, strict=True) if id(one) in words]
        optimizer = optimizer_of(name, targets, settings, of_words) if targets else _Joined()
    kept = [parameter.grad for parameter in targets]
    for parameter in targets:
        parameter.grad = torch.empty_like(parameter)
    with torch.no_grad(), _AnyAnswer(), _fused_on_meta():  # type: ignore[no-untyped-call]
        optimizer.step()
    for parameter, gradient in zip(targets, kept, strict=True):
        parameter.grad = gradient
    return StepFunction(trained, optimizer, masters, RowUpdate(name, list(tables)))  # type: ignore[arg-type]


def optimizer_of(
    name: str,
    parameters: list[torch.nn.Parameter],
    settings: Mapping[str, Any] | None = None,
    of_words: Collection[torch.nn.Parameter] = (),
) -> torch.optim.Optimizer:
    """The optimizer itself, without state yet; ``of_words`` are embeddings, and what scores their words."""
    if name == "muon":
        return _muon(parameters, {id(one) for one in of_words})
    if name in _BUILDERS:
        return _BUILDERS[name](name, parameters)
    class_name, usual = _TORCH[name]
    return getattr(torch.optim, class_name)(parameters, **{**usual, **(settings or {})})  # type: ignore[no-any-return]


def usual_settings(name: str) -> dict[str, Any]:
    """What the optimizer of a name is set to; empty for one that torch does not have."""
    if name not in _TORCH:
        return {}
    class_name, usual = _TORCH[name]
    parameters = inspect.signature(getattr(torch.optim, class_name)).parameters.values()
    return {**{one.name: one.default for one in parameters if one.default is not one.empty}, **usual}


def _fused_on_meta() -> contextlib.AbstractContextManager[Any]:
    """torch checks that fused optimizers get tensors of a GPU; here meta stands for one."""
    return unittest.mock.patch(
        "torch.optim.optimizer._get_fused_kernels_supported_devices", return_value=["meta", "cuda"]
    )


class _AnyAnswer(TorchDispatchMode):
    """Some optimizers look at norms of weights; for the shape of a step any number will do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        inputs: list[torch.Tensor] = []
        named = describe(func, args, kwargs or {}, inputs)
        return remembered(func, func, args, kwargs or {}, named, inputs)


def weights_of_words(module: torch.nn.Module) -> frozenset[int]:
    """Ids of a model's embeddings, and of the layers that score the words of the largest."""
    tables = [one.weight for one in module.modules() if isinstance(one, torch.nn.Embedding)]
    largest = max(tables, key=torch.Tensor.numel, default=None)
    scores = [
        one.weight
        for one in module.modules()
        if isinstance(one, torch.nn.Linear) and largest is not None and one.weight.shape == largest.shape
    ]
    return frozenset(id(one) for one in (*tables, *scores))


def _muon(parameters: list[torch.nn.Parameter], of_words: Collection[int]) -> torch.optim.Optimizer:
    """Muon for the matrices of hidden layers, AdamW for the rest, embeddings and the scores of words among
    it, as ``torch.optim.Muon`` is meant to be used."""
    if not hasattr(torch.optim, "Muon"):
        raise CaptureError(f"training.optimizer: 'muon' needs torch 2.9 or newer, not {torch.__version__}")
    matrices = [one for one in parameters if one.dim() == 2 and id(one) not in of_words]
    kept = {id(one) for one in matrices}
    others = [one for one in parameters if id(one) not in kept]
    parts = [torch.optim.Muon(matrices, lr=1e-3)] if matrices else []
    return _Joined(*parts, *([torch.optim.AdamW(others, lr=1e-3, foreach=True)] if others else []))


class _Joined(torch.optim.Optimizer):
    """Several optimizers stepped as one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        parameters = [p for part in self.parts for group in part.param_groups for p in group["params"]]
        super().__init__(parameters or [{"params": []}], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()
            self.state.update(part.state)


class _Lamb(torch.optim.Optimizer):
    """LAMB (You et al.

    2020) in foreach form: Adam's update, scaled per tensor by the ratio of weight to update norms.
    """

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in parameters]
        for parameter in parameters:
            if parameter not in self.state:
                self.state[parameter] = {
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        average = [self.state[p]["exp_avg"] for p in parameters]
        square = [self.state[p]["exp_avg_sq"] for p in parameters]
        torch._foreach_lerp_(average, gradients, 0.1)
        torch._foreach_mul_(square, 0.999)
        torch._foreach_addcmul_(square, gradients, gradients, 0.001)
        denominator = torch._foreach_sqrt(square)
        torch._foreach_add_(denominator, 1e-6)
        update = torch._foreach_div(average, denominator)
        torch._foreach_add_(update, parameters, alpha=0.01)
        weight_norm = torch._foreach_norm(parameters)
        update_norm = torch._foreach_norm(update)
        ratio = torch._foreach_div(weight_norm, update_norm)
        torch._foreach_mul_(update, ratio)
        torch._foreach_add_(parameters, update, alpha=-1e-3)


def _eight_bit(_name: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if all(parameter.is_meta for parameter in parameters):
        return EightBitAdamW(parameters)
    return bitsandbytes().optim.AdamW8bit(parameters)  # type: ignore[no-any-return]


_BUILDERS: dict[str, Callable[[str, list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "lamb": lambda _, parameters: _Lamb(parameters),
    "adamw-8bit": _eight_bit,
}
