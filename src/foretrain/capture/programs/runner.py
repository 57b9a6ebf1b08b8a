"""Runs a training program on meta until it has made a whole step in its usual state, and traces that step.

A step ends where an optimizer has stepped. Where several take turns (the two sides of a GAN), it goes from
one step of the one that steps least to its next, so that all of them are in it as often as in training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import unittest.mock
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from foretrain.capture.programs.data import Data
from foretrain.capture.programs.pretence import OneReplica, pretending
from foretrain.capture.programs.script_device import InScript
from foretrain.capture.tracing.checkpoints import cast_anew, followed_checkpoints
from foretrain.capture.tracing.constants import Constants
from foretrain.capture.tracing.cuda import casting, casting_to, cuda_behaviour, forget_casts
from foretrain.capture.tracing.failures import error_context
from foretrain.capture.tracing.nested import tensors_in
from foretrain.capture.tracing.recorder import DTYPES, OperatorRecorder
from foretrain.errors import CaptureError
from foretrain.graph import OpGraph, Weight
from foretrain.options import optimizer_name
from foretrain.workload import OPTIMIZERS, CompileMode

_MOST_STEPS = 24
"""Steps of optimizers after which those that have not stepped are taken to be unused."""


class StepSeen(BaseException):
    """Ends a program: a whole step was traced."""


@dataclass(slots=True)
class _Mark:
    optimizer: int
    position: int
    backward_passes: int
    root_calls: int
    samples: int


@dataclass(slots=True)
class _Habits:
    """What the program was seen to do."""

    casts: set[torch.dtype] = field(default_factory=set)
    compiles: bool | str = False
    """Whether, or in which mode."""
    backward_passes: int = 0
    first_input: torch.Size | None = None
    first_is_tokens: bool = False
    root: weakref.ref[torch.nn.Module] | None = None
    roots: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)
    root_calls: int = 0


class RunningProgram:
    """A training program while it runs; ``trace`` is called once."""

    def __init__(
        self,
        loaders: tuple[int, int] | None = None,
        cast: torch.dtype | None = None,
        *,
        text: str = "",
        with_values: bool = False,
    ) -> None:
        self._text = text
        self.constants = Constants(everything=with_values)
        self.data = Data(loaders)
        self._recorder = OperatorRecorder(None, (), self.constants)
        self._recorder.on = False
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._marks: list[_Mark] = []
        self._stepping = 0
        self._cast = cast
        self._habits = _Habits()
        self._casts_of: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()
        self._depth = 0
        self._graph: OpGraph | None = None
        self._foreign: set[int] = set()
        self._own_optimizer: torch.optim.Optimizer | None = None

    def trace(self, run: Callable[[], Any], info: Mapping[str, Any]) -> OpGraph:
        """Run the program until a whole step is seen, and give its graph."""
        gc.collect()
        self._foreign = {_storage(tensor) for tensor in _alive()}
        with self._watching(), contextlib.suppress(StepSeen), error_context(self._recorder):
            run()
        if self._graph is None:
            made = len(self._marks)
            raise CaptureError(
                f"model {info['model']}: it ended after {made or 'no'} optimizer step{'s' * (made != 1)}; "
                "a step is traced from the end of one to the end of the next, so it has to make two"
            )
        return dataclasses.replace(self._graph, info={**info, **self._graph.info})

    def begin_anew(self) -> None:
        """Forget the optimizers that were made so far: others will train."""
        self._optimizers.clear()

    def _used(self) -> list[torch.optim.Optimizer]:
        """The optimizers that have stepped."""
        stepped = {mark.optimizer for mark in self._marks}
        return [one for one in self._optimizers if id(one) in stepped]

    def note(self, assumption: str) -> None:
        """What a forecast should say of how the program was run."""
        if assumption not in self.constants.assumptions:
            self.constants.assumptions.append(assumption)

    @property
    def backward_passes(self) -> int:
        return self._habits.backward_passes

    def own_optimizer(
        self, make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        """The optimizer of a program that leaves its update to others: made once, of all that has a
        gradient."""
        if self._own_optimizer is None:
            alive = (one for one in gc.get_objects() if type(one) is torch.nn.Parameter)
            self._own_optimizer = make([one for one in alive if one.grad is not None])
        return self._own_optimizer

    # While the program runs

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
            torch.nn.modules.module.register_module_forward_pre_hook(self._enter),
            torch.nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
        ]
        patches = (
            unittest.mock.patch("torch.autograd._engine_run_backward", self._backward),
            unittest.mock.patch.object(torch.optim.Optimizer, "__init__", self._knowing_optimizers()),
            pretending(self._text, self._compiled),
            self.data.watching(),
            followed_checkpoints(self._recorder, cast_anew),
        )
        try:
            with contextlib.ExitStack() as stack:
                for patch in patches:
                    stack.enter_context(patch)
                stack.enter_context(cuda_behaviour(self._cast))
                stack.enter_context(self._recorder.reference_counting())
                stack.enter_context(self._recorder)
                stack.enter_context(InScript(self.constants))
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _compiled(self, mode: str | None) -> None:
        self._habits.compiles = True
        if mode is not None and mode in get_args(CompileMode) and mode != "default":
            self._habits.compiles = mode

    def _knowing_optimizers(self) -> Callable[..., None]:
        def init(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            _OPTIMIZER_INIT(optimizer, *args, **kwargs)
            self._optimizers.add(optimizer)

        return init

    def _backward(self, *args: Any, **kwargs: Any) -> Any:
        before = self._recorder.phase
        self._recorder.end_forward()
        self._recorder.phase = "backward"
        self._habits.backward_passes += before != "backward"  # a checkpoint may run one inside of another
        try:
            with casting(None):
                return _ENGINE(*args, **kwargs)
        finally:
            self._recorder.phase = before
            self._recorder.updating = True
            if self._cast is not None:
                forget_casts()

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if not self._recorder.is_traced():
            return
        if self._depth == 0 and self._recorder.phase == "forward":
            self._recorder.updating = False
            self._name(module)
            self._note_root(module)
            if self.constants.everything and torch.is_grad_enabled():
                self.constants.draw((*module.parameters(), *module.buffers()))
        self._note_input(module, args)
        self._depth += 1
        if self._recorder.phase == "backward":  # computed again
            dtype = self._casts_of.get(module, casting_to())
            self._recorder.enter(module, functools.partial(casting, dtype))
        else:
            self._casts_of[module] = casting_to()
            self._recorder.enter(module)
        if self._recorder.on and (dtype := casting_to()) is not None:
            self._habits.casts.add(dtype)

    def _leave(self, _module: torch.nn.Module, _args: Any, _output: Any) -> None:
        if self._recorder.is_traced():
            self._depth -= 1
            self._recorder.leave()

    def _name(self, module: torch.nn.Module) -> None:
        """The paths of a module that runs on its own: those of the first one as they are, of others behind
        the name of their class."""
        if self._habits.root is None or self._habits.root() is None:
            self._habits.root = weakref.ref(module)
        inner = module.module if isinstance(module, OneReplica) else module
        prefix = "" if module is self._habits.root() else type(inner).__name__
        self._recorder.name_modules(
            {child: ".".join(filter(None, (prefix, path))) for path, child in inner.named_modules()}
        )

    def _note_root(self, module: torch.nn.Module) -> None:
        if self._recorder.on:
            self._habits.roots.add(module)
            self._habits.root_calls += self._habits.root is not None and module is self._habits.root()

    def _note_input(self, module: torch.nn.Module, args: Any) -> None:
        """What the first module that learns is given; a recurrence may have time before samples."""
        habits = self._habits
        if not self._recorder.on or not torch.is_grad_enabled():
            return
        first = next((one for one in tensors_in(args) if one.dim()), None)
        if first is None:
            return
        if habits.first_input is None:
            habits.first_input = first.shape
        if isinstance(module, torch.nn.Embedding) and first.shape == habits.first_input:
            habits.first_is_tokens = first.dim() == 2
        if isinstance(module, torch.nn.RNNBase) and first.dim() == 3 and not module.batch_first:
            shape = habits.first_input
            if len(shape) > 1 and shape[:2] == first.shape[:2]:
                habits.first_input = torch.Size((shape[1], shape[0], *shape[2:]))

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._stepping += 1
        if self._stepping == 1:
            self._recorder.mark_gradients(_parameters([optimizer]))
            self._recorder.phase = "optimizer"

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._stepping -= 1
        if self._stepping:
            return
        self._recorder.phase = "forward"
        self._optimizers.add(optimizer)
        if not self._recorder.on:
            self._begin()
        habits = self._habits
        self._marks.append(
            _Mark(id(optimizer), self._recorder.position, habits.backward_passes, habits.root_calls,
                  self.data.samples)
        )  # fmt: skip
        steps = Counter(mark.optimizer for mark in self._marks)
        waited_for = () if len(self._marks) >= _MOST_STEPS else map(id, self._optimizers)
        fewest = min(steps.values())
        if steps[id(optimizer)] == fewest >= 2 and all(one in steps for one in waited_for):
            self._graph = self._finish()
            raise StepSeen

    def _begin(self) -> None:
        """Begin to write down, with all that exists now: weights, gradients, the state of optimizers."""
        recorder = self._recorder
        recorder.on = self.data.trains = True
        trained = list(_parameters(self._optimizers))
        recorder.hold([parameter for parameter in trained if parameter.is_meta], "weights")
        recorder.hold([p.grad for p in trained if p.grad is not None], "gradients")
        for optimizer in self._optimizers:
            kept = [value for state in optimizer.state.values() for value in tensors_in(dict(state))]
            recorder.hold([value for value in kept if value.is_meta], "optimizer_state")
        for module in (one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)):
            held = (*module._parameters.values(), *module._buffers.values())
            recorder.hold([one for one in held if one is not None and self._is_own(one)], "weights")
        recorder.hold([tensor for tensor in _alive() if self._is_own(tensor)], "inputs")

    def _is_own(self, tensor: torch.Tensor) -> bool:
        """On the device, and made by this program, not by one before it."""
        return tensor.is_meta and _storage(tensor) not in self._foreign

    # When it has ended

    def _finish(self) -> OpGraph:
        last = self._marks[-1]
        first = next(mark for mark in reversed(self._marks[:-1]) if mark.optimizer == last.optimizer)
        samples, tokens = self._samples(first, last)
        weights = tuple(self._weights())
        graph = self._recorder.finish(
            samples=samples, tokens=tokens, accumulates=False, first=first.position,
            info={"training": self._training(samples, tokens)},
        )  # fmt: skip
        parameters = sum(weight.elements for weight in weights)
        return dataclasses.replace(graph, weights=weights, parameters=parameters)

    def _samples(self, first: _Mark, last: _Mark) -> tuple[int, int]:
        """Samples and tokens of the step: what its loaders gave, else the rows of the first input, as often
        as a whole pass was made."""
        habits = self._habits
        shape = habits.first_input or torch.Size((1,))
        samples = last.samples - first.samples
        if not samples:
            passes = last.backward_passes - first.backward_passes
            samples = shape[0] * (passes if passes == last.root_calls - first.root_calls else 1)
        tokens = samples * shape[1] if habits.first_is_tokens else 0
        return max(1, samples), tokens

    def _weights(self) -> Iterator[Weight]:
        """The parameters of the modules that ran, and whatever else is trained."""
        trained = {id(parameter): parameter for parameter in _parameters(self._used())}
        named = {
            id(parameter): (f"{self._recorder.path(module)}.{name}".lstrip("."), parameter)
            for root in self._habits.roots
            for module in root.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        others = {key: ("", parameter) for key, parameter in trained.items() if key not in named}
        for key, (name, parameter) in {**named, **others}.items():
            yield Weight(name, parameter.numel(), DTYPES[parameter.dtype], key in trained)

    def _training(self, samples: int, tokens: int) -> dict[str, Any]:
        """The fields of a job that the program decides."""
        training: dict[str, Any] = {"global_batch": samples, "precision": self._precision()}
        if tokens:
            training["sequence"] = tokens // samples
        if (name := self._optimizer_name()) is not None:
            training["optimizer"] = name
        if self._habits.compiles:
            training["compile"] = self._habits.compiles
        if self.data.size is not None:
            training["samples"] = self.data.size
        return training

    def _precision(self) -> str:
        casts = self._habits.casts
        if casts:
            return "amp-fp16" if torch.float16 in casts else "amp-bf16"
        sizes: Counter[torch.dtype] = Counter()
        for parameter in _parameters(self._used()):
            sizes[parameter.dtype] += parameter.numel()
        low = {torch.bfloat16: "bf16", torch.float16: "fp16"}
        common = sizes.most_common(1)[0][0] if sizes else torch.float32
        tf32 = torch.get_float32_matmul_precision() != "highest"
        return low.get(common, "tf32" if tf32 else "fp32")

    def _optimizer_name(self) -> str | None:
        steps = Counter(mark.optimizer for mark in self._marks)
        of_most = max(
            self._used(),
            key=lambda one: (sum(parameter.numel() for parameter in _parameters([one])), steps[id(one)]),
            default=None,
        )
        if of_most is None:
            return None
        kind = type(of_most).__name__
        if kind.lower() in OPTIMIZERS:
            return optimizer_name(of_most)
        self.note(f"its optimizer is {kind}, traced as it is; a job has no name for it")
        return None


def _alive() -> Iterator[torch.Tensor]:
    """The tensors on meta that somebody holds."""
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor) and one.is_meta and one.layout is torch.strided:
            yield one


def _storage(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _parameters(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.nn.Parameter]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


_ENGINE = torch.autograd.graph._engine_run_backward
_OPTIMIZER_INIT = torch.optim.Optimizer.__init__
