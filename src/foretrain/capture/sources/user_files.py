"""Builds the model that a function or a class of a user's file describes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from foretrain.capture.programs.pretence import beside_a_gpu
from foretrain.capture.programs.targets import BATCH_NAMES, located, read_source
from foretrain.capture.recording import recording
from foretrain.capture.sources.detection import IMAGE, is_detector, load_detector
from foretrain.capture.sources.inputs import check_batch, check_classes, check_inputs, default_inputs, holds
from foretrain.capture.sources.loaded import (
    LoadedModel,
    Loss,
    build_on_meta,
    building,
    classifier_loss,
    own_loss,
)
from foretrain.capture.sources.wrapped import (
    is_compiled,
    materialise,
    not_compiling,
    on_one_process,
    without_compile,
)
from foretrain.capture.sources.zoo import mended_imports
from foretrain.capture.tracing.constants import Constants
from foretrain.capture.tracing.nested import tensors_in
from foretrain.errors import CaptureError, InputError, unknown
from foretrain.workload import Workload

# The user's own


def load_python(workload: Workload, batch: int, device: str) -> LoadedModel:
    """Build what a function of a user's file gives, with its inputs and loss or the usual ones."""
    model, training = workload.model, workload.training
    assert model.name is not None
    path, function = located(model.name, workload.base)
    constants = Constants()
    compiled: list[str] = []
    notes: list[str] = []
    with contextlib.ExitStack() as undone:
        if device == "meta":
            undone.enter_context(not_compiling(path.parent, compiled))
            undone.enter_context(on_one_process(path.read_text(errors="replace"), notes))
        module, inputs, loss = _made(workload, path, function, batch, device, constants)
    compiled += [type(module).__name__] if is_compiled(module) else []
    if inputs is None and loss is None and is_detector(module):
        check_classes(f"model {model.name}", module, training.classes)
        if training.sequence is not None:
            raise InputError(f"training.sequence: not used by a detector; model {model.name} takes images")
        image = training.image_shape or IMAGE
        found = load_detector(module, batch, image, training.mode, device)
        return dataclasses.replace(
            found, constants=constants, compiled=compiled, notes=[*found.notes, *notes]
        )
    if inputs is None:
        inputs = default_inputs(training, batch, device)
    else:
        if not holds(inputs, batch):
            twice = _made(workload, path, function, 2 * batch, "meta", Constants())[1]
            check_batch(model.name, batch, inputs, twice)
        check_inputs(
            f"model {model.name}", inputs, batch, sequence=training.sequence, image=training.image_shape
        )
    if device == "meta":
        materialise(module, inputs)
    check_classes(f"model {model.name}", module, training.classes)
    tokens = batch * training.sequence if training.sequence else 0
    return LoadedModel(
        module=without_compile(module) if device == "meta" or training.compile else module,
        inputs=inputs,
        loss=loss or classifier_loss(inputs),
        tokens=tokens,
        constants=constants,
        compiled=compiled,
        notes=notes,
    )


def given_rows(workload: Workload) -> int | None:
    """Samples in the inputs that a function gives of its own accord; None where it gives none."""
    path, function = located(str(workload.model.name), workload.base)
    with beside_a_gpu():
        inputs = _made(workload, path, function, 1, "meta", Constants())[1]
    first = next((one for one in tensors_in(inputs) if one.dim()), None)
    return None if first is None else int(first.shape[0])


def _made(
    workload: Workload, path: Path, function: str, batch: int, device: str, constants: Constants
) -> tuple[torch.nn.Module, Any, Loss | None]:
    """What the user's function returns for a batch, or the user's class with its defaults."""
    what, args = f"model {workload.model.name}", workload.model.args
    with recording(path), beside(path), mended_imports(), building(what):
        made_in_file = function in read_source(path).assigned
        build = (
            _call_on(device, constants, lambda: _named_in(loaded_file(path), path, function))
            if made_in_file
            else _named_in(loaded_file(path), path, function)
        )
        if isinstance(build, torch.nn.Module):
            made: Any = build
        elif inspect.isclass(build):
            _check_class(what, build, args)
            made = _call_on(device, constants, lambda: build(**args))
        else:
            first, named = _call_arguments(what, build, args, batch)
            made = _call_on(device, constants, lambda: build(*first, **named))
    parts = made if isinstance(made, tuple) else (made,)
    if parts and type(parts[0]).__name__ == "ExportedProgram":
        parts = (parts[0].module(), *parts[1:])
    if inspect.iscoroutine(made):
        made.close()
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], torch.nn.Module):
        raise CaptureError(
            f"{what}: returned {type(made).__name__}; "
            "a module, (module, inputs) or (module, inputs, loss) is allowed"
        )
    module, inputs, loss = (*parts, None, None)[:3]
    if isinstance(inputs, torch.nn.Module | str | bytes | int | float | complex | type):
        raise CaptureError(
            f"{what}: returned inputs of type {type(inputs).__name__}; "
            "a tensor, a tuple or a dict of tensors is allowed"
        )
    if loss is not None and not callable(loss):
        raise CaptureError(
            f"{what}: returned a loss of type {type(loss).__name__}; "
            "a function of the module's output is allowed"
        )
    scalar = None if loss is None else _one_number(what, loss)
    return module, (inputs,) if isinstance(inputs, torch.Tensor) else inputs, scalar


def _one_number(what: str, loss: Callable[[Any], Any]) -> Loss:
    """A user's loss, which may give its number among others."""
    with contextlib.suppress(ValueError):  # a signature that Python does not know
        try:
            inspect.signature(loss.forward if isinstance(loss, torch.nn.Module) else loss).bind(None)
        except TypeError as error:
            raise CaptureError(
                f"{what}: its loss is called with the module's output alone ({error}); "
                "return one that holds the targets, such as lambda output: loss(output, targets)"
            ) from error

    @functools.wraps(loss, updated=())
    def number(output: Any) -> Any:
        value = loss(output)
        own = None if isinstance(value, torch.Tensor) else own_loss(value)
        return value if own is None else own

    return number


def _check_class(what: str, build: type, args: Mapping[str, Any]) -> None:
    """A class is a model where its constructor needs no more than the job's ``args``."""
    if not issubclass(build, torch.nn.Module):
        raise CaptureError(
            f"{what}: the class is no torch.nn.Module; name one, or a function that takes batch"
        )
    needed = [
        name
        for name, parameter in inspect.signature(build).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name not in args
    ]
    if needed:
        raise InputError(
            f"model.args.{needed[0]}: missing; the class {build.__name__} needs {', '.join(needed)}"
        )


def _batch_name(parameters: Mapping[str, inspect.Parameter], args: Mapping[str, Any]) -> str | None:
    """The parameter that is the batch, among those that the job's ``args`` do not give.

    A name that starts with an underscore is one that the function does not use; it is the batch where it has
    to be given.
    """
    free = {
        name: one
        for name, one in parameters.items()
        if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) and name not in args
    }
    for pattern in BATCH_NAMES:
        for name in free:
            if pattern.fullmatch(name.lstrip("_")):
                return name
    for name, one in free.items():
        if not name.strip("_") or (name.startswith("_") and one.default is one.empty):
            return name
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return "batch" if takes_any and "batch" not in args else None


def _call_arguments(
    what: str, build: Callable[..., Any], args: Mapping[str, Any], batch: int
) -> tuple[list[Any], dict[str, Any]]:
    """What a function is called with, by position and by name: the job's ``args``, and the batch by the name
    that it has in the function; another parameter would become the batch silently."""
    parameters = inspect.signature(build).parameters
    name = _batch_name(parameters, args)
    if (
        name is None
        and all(
            one.default is not one.empty or key in args or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
            for key, one in parameters.items()
        )
        and not any(_batch_name({own: parameters[own]}, {}) for own in args if own in parameters)
    ):
        return [], dict(args)
    if name is None:
        for own in args:
            if own in parameters and _batch_name({own: parameters[own]}, {}) is not None:
                raise InputError(
                    f"model.args.{own}: {args[own]!r} stands where {what} takes the job's batch; leave it out"
                )
        taken = ", ".join(one for one, kind in parameters.items() if kind.kind is not kind.VAR_POSITIONAL)
        raise InputError(
            f"model.name: {what.removeprefix('model ')} takes {taken or 'no arguments'}; "
            "a function that takes batch is allowed"
        )
    given = {**args, name: batch}
    first = []
    for key, one in parameters.items():
        if one.kind is not one.POSITIONAL_ONLY or (key not in given and one.default is one.empty):
            break
        first.append(given.pop(key, one.default))
    return first, given


def _call_on(device: str, constants: Constants, build: Callable[[], Any]) -> Any:
    """As ``build_on``, for functions that return inputs and a loss beside the module."""
    if device == "meta":
        return build_on_meta(build, constants)
    with torch.device(device):
        return build()


@contextlib.contextmanager
def beside(path: Path) -> Iterator[None]:
    """The folder of a user's file is importable; what was imported from it is forgotten, as another job's may
    have the same name."""
    folder, before = str(path.parent.resolve()), set(sys.modules)
    writes, sys.dont_write_bytecode = (
        sys.dont_write_bytecode,
        True,
    )  # a module edited within a second would be taken from its bytecode
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        sys.dont_write_bytecode = writes
        for new in [new for new in set(sys.modules) - before if _lies_in(folder, sys.modules[new])]:
            del sys.modules[new]


def _lies_in(folder: str, module: ModuleType) -> bool:
    """By its file, or by its folders where it is a package, which may have no file."""
    places = (getattr(module, "__file__", None), *getattr(module, "__path__", ()))
    return any(str(place).startswith(folder + os.sep) for place in places)


def loaded_file(path: Path) -> ModuleType:
    """A user's file, run as a module."""
    spec = importlib.util.spec_from_file_location(f"foretrain_user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with building(f"model {path}"):
        spec.loader.exec_module(module)
    return module


def _named_in(module: ModuleType, path: Path, name: str) -> Any:
    """What a name of a user's file stands for."""
    functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    if name not in functions:
        raise unknown("model.name", name, functions, f"a function of {path}; it has")
    return getattr(module, name)
