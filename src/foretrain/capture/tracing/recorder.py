"""Records every operator that reaches the meta device, and every storage from its birth to its release."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import sys
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from foretrain.capture.tracing import sparse, traffic
from foretrain.capture.tracing.constants import SHAPED_BY_DATA, Constants, together
from foretrain.capture.tracing.kernels import CUDA_OUTPUTS, cuda_name
from foretrain.capture.tracing.meta_outputs import describe, remembered
from foretrain.capture.tracing.nested import tensors_in
from foretrain.errors import CaptureError
from foretrain.graph import ITEM_BYTES, Buffer, Category, Op, Operator, OpGraph, Phase, TensorSpec
from foretrain.graph.flops import flops
from foretrain.graph.storage import paused_collector
from foretrain.progress import is_heard, tell

_TOLD_EVERY = 32
"""Operators between two reports of how far a trace is."""
DTYPES = {getattr(torch, name): name for name in ITEM_BYTES if hasattr(torch, name)}
ENOUGH_RECOMPUTED: tuple[type[BaseException], ...] = tuple(
    filter(None, [getattr(torch.utils.checkpoint, "_StopRecomputationError", None)])
)
"""With what torch ends a recomputation as soon as it has all that is asked for; no error."""


class OperatorRecorder(TorchDispatchMode):
    """Watches every operator that reaches the meta device, and every storage from its birth to its
    release.

    Of a whole program (no ``module``), steps follow one another: what one leaves is there when the next
    begins, data comes while it runs, and numbers that are read of it and not known are made up.
    """

    def __init__(
        self,
        module: torch.nn.Module | None,
        inputs: tuple[Any, ...] | Mapping[str, Any],
        constants: Constants,
        own_gradients: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.constants = constants
        self._sparse = sparse.SparseCalls(constants, self._dispatch)
        self.phase: Phase = "forward"
        self.on = True
        """Whether what happens is written down."""
        self.updating = False
        """Whether what runs without gradients, outside of modules, belongs to the update: clipping, averages
        of weights."""
        self._whole_program = module is None
        self._ops: list[Op] = []
        self._operators: dict[Any, Operator] = {}
        self._distinct: dict[
            Any, Operator
        ] = {}  # by content: several functions of torch are one operator on CUDA
        self._specs: dict[Any, TensorSpec] = {}
        self._buffers: list[list[Any]] = []  # size, category, born, dies
        self._live: dict[int, int] = {}  # storage address -> buffer
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._collecting = False
        self._layer = [""]
        self._recomputing = 0
        self.hooks = 0
        """Python functions of checkpoints that ran since the last operator."""
        self._around = contextlib.ExitStack()
        self._thread = threading.get_ident()
        self._error: BaseException | None = None
        self.failed = ""
        """The innermost layer that an error came out of."""
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        if module is not None:
            self.name_modules({child: name for name, child in module.named_modules()})
        self._owners = _owners(module) if own_gradients and module is not None else {}
        self._sequence: list[int] = []  # autograd sequence numbers of forward ops, ascending ...
        self._sequence_layer: list[str] = []  # ... and the layer each belongs to
        weights = [] if module is None else list(module.parameters())
        self._parameters = sum(parameter.numel() for parameter in weights)
        for parameter in () if constants.everything else weights:
            constants.forget(parameter)
        self.hold([*weights, *(() if module is None else module.buffers())], "weights")
        self.hold(inputs, "inputs")

    # What exists before the step

    def hold(self, values: Any, category: Category) -> None:
        """Tensors (in any nesting) that exist before the step begins."""
        for tensor in tensors_in(values):
            for part in sparse.stored(tensor):
                self._buffer(part, category, born=-1)

    def path(self, module: torch.nn.Module) -> str:
        """Where a module stands among those that are known by name."""
        return self._names.get(module, "")

    def name_modules(self, names: Mapping[torch.nn.Module, str]) -> None:
        """Further modules that may run, by the paths that they go by."""
        for module, name in names.items():
            self._names.setdefault(module, name)

    # While tracing

    @property
    def position(self) -> int:
        """Operators so far."""
        return len(self._ops)

    @property
    def layer(self) -> str:
        return self._layer[-1]

    @contextlib.contextmanager
    def layers(
        self, recompute: Callable[[], contextlib.AbstractContextManager[None]] | None = None
    ) -> Iterator[None]:
        """Follow which module is running, by its path in the model.

        Modules that run during the backward pass recompute activations: they do so inside the context
        ``recompute``.
        """

        def enter(module: torch.nn.Module, _args: Any) -> None:
            if self.is_traced():
                self.enter(module, recompute)

        def leave(_module: torch.nn.Module, _args: Any, _output: Any) -> None:
            if self.is_traced():
                self.leave()

        hooks = [
            torch.nn.modules.module.register_module_forward_pre_hook(enter),
            torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            self._around.close()
            for hook in hooks:
                hook.remove()

    def is_traced(self) -> bool:
        """Whether it is the traced thread that runs: hooks of modules hear of those of others too."""
        return threading.get_ident() == self._thread

    def enter(
        self,
        module: torch.nn.Module,
        around: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
    ) -> None:
        """A module begins to run; the outermost one inside the context ``around``."""
        if around is not None and len(self._layer) == 1 and not self._recomputing:
            self._around.enter_context(around())
        self._layer.append(self._names.get(module, self.layer))

    def leave(self) -> None:
        """The innermost module that runs has ended."""
        left = self._layer.pop()
        error = sys.exc_info()[1]
        if error is not None and error is not self._error and not isinstance(error, ENOUGH_RECOMPUTED):
            self._error, self.failed = error, left
        if len(self._layer) == 1:
            self._around.close()

    @contextlib.contextmanager
    def recomputing(self, layer: str, around: contextlib.AbstractContextManager[None]) -> Iterator[None]:
        """What runs meanwhile, the outermost inside the context ``around``, is computed again of ``layer``;
        what it leaves is kept for the backward pass."""
        first, self._recomputing = len(self._buffers), self._recomputing + 1
        self._layer.append(layer)
        try:
            with around if self._recomputing == 1 else contextlib.nullcontext():
                yield
        finally:
            self._layer.pop()
            self._recomputing -= 1
            self._keep(self._buffers[first:])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        args, kwargs = together(self.constants, func, args, kwargs)
        args = self.constants.without_masks(func, args)
        inputs: list[torch.Tensor] = []
        named = describe(func, args, kwargs, inputs)
        if sparse.is_sparse_call(func, args, inputs):
            return self._sparse.run(func, args, kwargs)
        output = self._output(func, args, kwargs, named, inputs)
        if self.on:
            self._record(func, args, kwargs, named, inputs, output)
        if self._computes(output):
            self.constants.follow(func, args, kwargs, output)
        return output

    def _dispatch(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        return self.__torch_dispatch__(func, (), args, kwargs)

    def _computes(self, output: Any) -> bool:
        """Whether a value may be asked for: of the forward pass, of what is computed again, positions, and
        numbers that an update is decided by."""
        if self.phase == "forward" or (self.phase == "backward" and torch.is_grad_enabled()):
            return True
        first = next(tensors_in(output), None)
        if first is None:
            return False
        number = self.phase == "optimizer" and not first.dim()
        return number or first.dtype in (torch.int64, torch.bool)

    def _output(
        self, func: Any, args: Any, kwargs: Any, named: dict[str, Any], inputs: list[torch.Tensor]
    ) -> Any:
        """What the call gives on meta; where it is known or CUDA gives something else, that."""
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            value = self.constants.answer(args[0])
            free = self._whole_program and (len(self._layer) == 1 or self.constants.everything)
            if value is None and (free or self.phase == "optimizer"):
                return _made_up(args[0])
            return func(*args) if value is None else value.item()
        if func is torch.ops.aten.equal.default and any(tensor.is_meta for tensor in args):
            same = self.constants.are_equal(*args)
            return func(*args) if same is None else same
        if func is torch.ops.aten.embedding.default:
            self._check_indices(args[0], args[1])
        if func in SHAPED_BY_DATA and (shaped := self.constants.shaped(func, args, kwargs)) is not None:
            return shaped
        if func in CUDA_OUTPUTS and any(tensor.is_meta for tensor in tensors_in(args)):
            return remembered(CUDA_OUTPUTS[func], func, args, kwargs, named, inputs)
        return remembered(func, func, args, kwargs, named, inputs)

    def _check_indices(self, table: torch.Tensor, indices: torch.Tensor) -> None:
        """A device stops at an index beyond a table, a position of a long sequence mostly; meta does not."""
        known = self.constants.value(indices)
        if known is not None and known.numel() and (largest := int(known.max())) >= table.shape[0]:
            rows = f"a table of {table.shape[0]} rows"
            raise CaptureError(
                f"module {self.layer or '(the model itself)'}: index {largest} is beyond {rows}"
            )

    def _record(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        named: dict[str, Any],
        inputs: list[torch.Tensor],
        output: Any,
    ) -> None:
        outputs = list(tensors_in(output))
        if not any(tensor.is_meta for tensor in (*inputs, *outputs)) or (
            not inputs and not any(tensor.numel() for tensor in outputs)
        ):
            return
        index = len(self._ops)
        came = index if self._whole_program else -1
        if self._whole_program and inputs and not any(tensor.is_meta for tensor in inputs):
            for tensor in outputs:  # data that the host sends
                self._buffer(tensor, "inputs", born=came)
            return
        written = list(_mutated(func, args, kwargs))
        reads = tuple(
            dict.fromkeys(self._buffer(tensor, "inputs", born=came) for tensor in inputs if tensor.is_meta)
        )
        fresh = len(self._buffers)
        results = [self._buffer(tensor, "temporaries", born=index) for tensor in outputs if tensor.is_meta]
        writes = tuple(
            dict.fromkeys(
                [
                    *(b for b in results if b >= fresh),
                    *(self._buffer(t, "inputs", born=came) for t in written if t.is_meta),
                ]
            )
        )
        operator = self._operator(func, named, inputs, outputs, written, changes=bool(writes))
        again, hooks, self.hooks = self._runs_again(), self.hooks, 0
        self._ops.append(Op(operator, self._phase_now(), self._current_layer(), reads, writes, again, hooks))
        if index % _TOLD_EVERY == 0 and is_heard():
            where = f"layer {self.layer}" if self.phase == "forward" and self.layer else self.phase
            tell(f"tracing: {index:,} operators, {where}")

    def _runs_again(self) -> bool:
        """Whether a checkpoint recomputes; or code that does so by itself, which runs modules in the backward
        pass."""
        by_itself = len(self._layer) > 1 and torch.is_grad_enabled()
        return self.phase == "backward" and (self._recomputing > 0 or by_itself)

    def _phase_now(self) -> Phase:
        without_gradients = self.updating and not torch.is_grad_enabled()
        return "optimizer" if without_gradients and self.phase == "forward" else self.phase

    def _operator(
        self,
        func: Any,
        args: dict[str, Any],
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        written: list[torch.Tensor],
        changes: bool,
    ) -> Operator:
        input_specs = tuple(map(self._spec, inputs))
        output_specs = tuple(map(self._spec, outputs))
        key = (func, input_specs, output_specs, repr(args), changes)
        if key not in self._operators:
            name = cuda_name(func, args, input_specs)
            launches = changes and traffic.launches(name)
            read, write = (
                traffic.bytes_moved(name, input_specs, output_specs, tuple(map(self._spec, written)))
                if launches
                else (0, 0)
            )
            count = flops(name, args, input_specs, output_specs) if launches else 0
            overload = func._overloadname
            content = (name, overload, input_specs, output_specs, repr(args), read, write, launches)
            self._operators[key] = self._distinct.setdefault(
                content,
                Operator(name, overload, input_specs, output_specs, args, count, read, write, launches),
            )
        return self._operators[key]

    def _spec(self, tensor: torch.Tensor) -> TensorSpec:
        key = (tensor.shape, tensor.dtype, tensor.stride())
        spec = self._specs.get(key)
        if spec is None:
            strides = None if tensor.is_contiguous() else tuple(tensor.stride())
            spec = self._specs[key] = TensorSpec(tuple(tensor.shape), DTYPES[tensor.dtype], strides)
        return spec

    def _buffer(self, tensor: torch.Tensor, category: Category, born: int) -> int:
        """The number of the tensor's storage; a storage never seen before is entered with this category and
        birth."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        number = self._live.get(address)
        if number is None:
            number = self._live[address] = len(self._buffers)
            self._buffers.append([storage.nbytes(), category, born, None])
            self._watches[number] = weakref.ref(storage, functools.partial(self._released, address, number))
        return number

    @contextlib.contextmanager
    def reference_counting(self) -> Iterator[None]:
        """Lifetimes as if no garbage collector ran: what only it would free, tensors in a cycle of
        references, lives until the end.

        It is off meanwhile; a model or another thread may still call it.
        """

        def note(phase: str, _info: Any) -> None:
            self._collecting = phase == "start"

        gc.callbacks.append(note)
        try:
            with paused_collector():
                yield
                self._watches.clear()
        finally:
            gc.callbacks.remove(note)

    def _released(self, address: int, number: int, _storage: object) -> None:
        if self._buffers[number][3] is None and not self._collecting:
            self._buffers[number][3] = len(self._ops) - 1
        if self._live.get(address) == number:
            del self._live[address]
        self._watches.pop(number, None)

    def _current_layer(self) -> str:
        """In the forward pass the running module; in the backward pass the one whose forward op made the
        autograd node."""
        if self.phase == "forward" or self._runs_again():
            number = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
            if not self._sequence or number > self._sequence[-1]:
                self._sequence.append(number)
                self._sequence_layer.append(self.layer)
            return self.layer
        if self.phase == "optimizer":
            return ""
        node = torch._C._current_autograd_node()
        if node is None or node.name() == "torch::autograd::AccumulateGrad":
            return self._owners.get(id(getattr(node, "variable", None)), "")
        position = bisect_left(self._sequence, node._sequence_nr())
        return (
            self._sequence_layer[min(position, len(self._sequence_layer) - 1)] if self._sequence_layer else ""
        )

    def end_forward(self) -> None:
        """Whatever the forward pass made and has not released by now is kept for the backward pass."""
        self._keep(self._buffers)

    def _keep(self, buffers: Iterable[list[Any]]) -> None:
        for buffer in buffers:
            if buffer[1] == "temporaries" and buffer[3] is None:
                buffer[1] = "activations"

    def mark_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """The gradients that the parameters hold after the backward pass."""
        for parameter in parameters:
            for part in sparse.stored(parameter.grad) if parameter.grad is not None else ():
                buffer = self._buffers[self._buffer(part, "gradients", born=-1)]
                if buffer[1] != "inputs" or part is parameter.grad:  # positions of rows may be the input
                    buffer[1] = "gradients"

    def without_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Those that the backward pass has not come to: they have no gradient, or one of earlier
        micro-batches that nothing was added to."""
        written = {number for op in self._ops if op.phase == "backward" for number in op.writes}

        def is_used(gradient: torch.Tensor | None) -> bool:
            if gradient is None or sparse.is_sparse(gradient):
                return gradient is not None
            number = self._live[gradient.untyped_storage()._cdata]
            return number in written or self._buffers[number][2] >= 0

        unused = [one for one in parameters if one.requires_grad and not is_used(one.grad)]
        self.never_made(one.grad for one in unused if one.grad is not None)
        return unused

    def never_made(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tensors that were held and are not there after all."""
        for tensor in tensors:
            if (number := self._live.get(tensor.untyped_storage()._cdata)) is not None:
                self._buffers[number][0] = 0

    def finish(
        self, *, samples: int, tokens: int, accumulates: bool, info: Mapping[str, Any], first: int = 0
    ) -> OpGraph:
        """The graph of what was written down, from the operator ``first`` on."""
        lives = [
            Buffer(0 if dies is not None and dies < first else size, category, max(born - first, -1),
                   (len(self._ops) if dies is None else dies) - first)
            for size, category, born, dies in self._buffers
        ]  # fmt: skip
        if self.constants.assumptions:
            info = {**info, "assumptions": self.constants.assumptions}
        return OpGraph(
            ops=tuple(self._ops[first:]),
            buffers=tuple(_carried(lives, len(self._ops) - first) if self._whole_program else lives),
            samples=samples,
            tokens=tokens,
            parameters=self._parameters,
            accumulates=accumulates,
            info=info,
        )


def _carried(buffers: list[Buffer], ops: int) -> list[Buffer]:
    """The buffers of a step that follows one like it.

    What is there when it begins and is let go while it runs was left by the step before, and this one leaves
    its like: one buffer, which dies in the next step. What is left without such an heir stays to the end.
    """
    left: dict[int, list[int]] = {}
    for number, buffer in enumerate(buffers):
        if buffer.born >= 0 and buffer.dies >= ops:
            left.setdefault(buffer.size_bytes, []).append(number)
    carried = list(buffers)
    for number, buffer in enumerate(buffers):
        if buffer.born >= 0 or buffer.dies >= ops or not buffer.size_bytes:
            continue
        carried[number] = dataclasses.replace(buffer, size_bytes=0)
        if heirs := left.get(buffer.size_bytes):
            heir = heirs.pop(0)
            carried[heir] = dataclasses.replace(buffers[heir], dies=ops + 1 + buffer.dies)
    return carried


def _made_up(tensor: torch.Tensor) -> bool | int | float:
    """What a result that nobody knows is taken to be where a program reads it."""
    if tensor.dtype == torch.bool:
        return False
    return 1.0 if tensor.is_floating_point() else 0


def _owners(module: torch.nn.Module) -> dict[int, str]:
    """The path of the module that each parameter belongs to, by the parameter's id; the first one where
    several share it."""
    owners: dict[int, str] = {}
    for path, child in module.named_modules():
        for parameter in child.parameters(recurse=False):
            owners.setdefault(id(parameter), path)
    return owners


def _mutated(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that the operator writes in place, by its schema."""
    if not func._schema.is_mutable:
        return
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(value)
    for argument in func._schema.arguments[len(args) :]:
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in kwargs:
            yield from tensors_in(kwargs[argument.name])
