"""Builds the module, inputs and loss of a job's [model] section, on the meta device or a real one."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from foretrain.capture.recording import recording
from foretrain.capture.sources.transformers_models import load_transformers
from foretrain.capture.tracing.constants import Answering
from foretrain.capture.tracing.devices import OnMeta, Unfilled
from foretrain.errors import CaptureError, ForetrainError, InputError, first_line, unknown
from foretrain.job import Training, Workload

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


def load_model(workload: Workload, batch: int, device: str = "meta") -> LoadedModel:
    """Build the workload's model for one (micro-)batch of ``batch`` samples, on meta (to trace it) or on a
    device (to run it)."""
    if batch < 1:
        raise InputError(f"batch: {batch} is not 1 or more")
    return _SOURCES[workload.model.source](workload, batch, device)


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
def _building(what: str) -> Iterator[None]:
    """Errors of a model's constructor as one line."""
    try:
        yield
    except ForetrainError:
        raise
    except ImportError as error:
        raise CaptureError(f"{what}: {error}") from error
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


def _build(build: Callable[[], torch.nn.Module], device: str) -> torch.nn.Module:
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


def _numbers(shape: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.empty(shape, device=device) if device == "meta" else torch.randn(shape, device=device)


# Image libraries


def _image(training: Training, default: tuple[int, int, int]) -> tuple[int, int, int]:
    return training.image_shape or default


def _timm(workload: Workload, batch: int, device: str) -> LoadedModel:
    timm = import_zoo("timm")
    model = workload.model
    assert model.name is not None
    if not timm.is_model(model.name):
        raise unknown("model.name", model.name, timm.list_models(), "a timm model;")
    with _building(f"model {model.name}"):
        module = _build(
            lambda: timm.create_model(model.name, **_class_argument(model.args, workload.training)), device
        )
    defaults: Mapping[str, Any] = getattr(module, "default_cfg", None) or {}
    size = _image(workload.training, tuple(defaults.get("input_size", (3, 224, 224))))
    return LoadedModel(module=module, inputs=(_numbers((batch, *size), device),), loss=classifier_loss())


def _torchvision(workload: Workload, batch: int, device: str) -> LoadedModel:
    models = import_zoo("torchvision").models
    model = workload.model
    assert model.name is not None
    if model.name not in models.list_models():
        raise unknown("model.name", model.name, models.list_models(), "a torchvision model;")
    arguments = _class_argument(model.args, workload.training)
    if model.name in ("googlenet", "inception_v3"):
        arguments = {"init_weights": False, **arguments}
    if "image_size" in inspect.signature(
        models.get_model_builder(model.name)
    ).parameters or model.name.startswith("vit_"):
        arguments = {"image_size": _image(workload.training, (3, 224, 224))[-1], **arguments}
    with _building(f"model {model.name}"):
        module = _build(lambda: models.get_model(model.name, **arguments), device)
    size = _image(workload.training, (3, 299, 299) if model.name == "inception_v3" else (3, 224, 224))
    return LoadedModel(module=module, inputs=(_numbers((batch, *size), device),), loss=classifier_loss())


def _class_argument(args: Mapping[str, Any], training: Training) -> dict[str, Any]:
    """Constructor arguments; ``training.classes`` stands for ``num_classes``."""
    if training.classes is None:
        return dict(args)
    if args.get("num_classes", training.classes) != training.classes:
        raise InputError(
            f"training.classes: {training.classes} contradicts model.args.num_classes = {args['num_classes']}"
        )
    return {"num_classes": training.classes, **args}


def import_zoo(name: str) -> Any:
    """Import torchvision or timm; a torchvision built for another torch lacks two operator schemas, which are
    then defined."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise CaptureError(f"model.source: {name} is not installed; install foretrain[zoo]") from error
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise CaptureError(f"model.source: {name} does not import ({first_line(error)})") from error
    for partial in [module for module in sys.modules if module.split(".")[0] in (name, "torchvision")]:
        del sys.modules[partial]
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)
    return importlib.import_module(name)


_KEPT: list[torch.library.Library] = []


# Language and other models of transformers


def _transformers(workload: Workload, batch: int, device: str) -> LoadedModel:
    _quiet_zoo_import()
    with _building(f"model {workload.model.label}"):
        module, inputs, tokens, notes = load_transformers(
            workload.model, workload.training, batch, lambda build: _build(build, device), device
        )
    return LoadedModel(module=module, inputs=inputs, loss=classifier_loss(), tokens=tokens, notes=notes)


def _quiet_zoo_import() -> None:
    """transformers imports torchvision for its image models: make that import work first where torchvision is
    installed."""
    if importlib.util.find_spec("torchvision") is not None:
        with contextlib.suppress(CaptureError):
            import_zoo("torchvision")


# The user's own


def _python(workload: Workload, batch: int, device: str) -> LoadedModel:
    model, training = workload.model, workload.training
    assert model.name is not None
    file, _, function = model.name.rpartition(":")
    path = Path(file) if Path(file).is_absolute() else workload.base / file
    if not path.is_file():
        raise InputError(f"model.name: {str(path)!r} is not a file")
    module, inputs, loss = _made(workload, path, function, batch, device)
    if inputs is None:
        inputs = _default_inputs(training, batch, device)
    else:
        if not _holds(inputs, batch):
            twice = _made(workload, path, function, 2 * batch, "meta")[1]
            _check_batch(model.name, batch, inputs, twice)
        check_inputs(
            f"model {model.name}", inputs, batch, sequence=training.sequence, image=training.image_shape
        )
    check_classes(f"model {model.name}", module, training.classes)
    tokens = batch * training.sequence if training.sequence else 0
    return LoadedModel(
        module=_not_compiled(module, training.compile, f"model {model.name}"),
        inputs=inputs,
        loss=loss or classifier_loss(),
        tokens=tokens,
    )


def _made(
    workload: Workload, path: Path, function: str, batch: int, device: str
) -> tuple[torch.nn.Module, Any, Loss | None]:
    """What the user's function returns for a batch, or the user's class with its defaults."""
    what, args = f"model {workload.model.name}", workload.model.args
    with recording(path), _beside(path), _building(what):
        build = _function(path, function)
        if inspect.isclass(build):
            _check_class(what, build, args)
            made = _call_on(device, lambda: build(**args))
        else:
            first, named = _call_arguments(what, build, args, batch)
            made = _call_on(device, lambda: build(*first, **named))
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], torch.nn.Module):
        raise CaptureError(
            f"{what}: returned {type(made).__name__}; "
            "a module, (module, inputs) or (module, inputs, loss) is allowed"
        )
    module, inputs, loss = (*parts, None, None)[:3]
    return module, (inputs,) if isinstance(inputs, torch.Tensor) else inputs, loss


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


_BATCH_NAMES = tuple(
    re.compile(pattern)
    for pattern in (
        "batch",
        "batch_?(size|sz)",
        "((micro|mini|local|global|train|input|per_device|per_gpu|n|num)_?)+batch(_?(size|sz))?",
        "batch(_size)?_per_(device|gpu|rank)",
        "bsz?",
        "b",
        "(n_|num_)?samples",
        "n",
    )
)
"""Whole names that functions take the batch by; of several, the one that comes first here."""


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
    for pattern in _BATCH_NAMES:
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


def _tensors(inputs: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(inputs) if isinstance(value, torch.Tensor) and value.dim()]


def _holds(inputs: Any, batch: int) -> bool:
    """Whether the first input has one row per sample; any batch does where there is no tensor to tell."""
    tensors = _tensors(inputs)
    return not tensors or tensors[0].shape[0] == batch


def _check_batch(name: str, batch: int, inputs: Any, twice: Any) -> None:
    """Inputs that are laid out otherwise (time first, all nodes of several graphs) must at least grow with
    the batch."""
    shapes, others = ([tuple(tensor.shape) for tensor in _tensors(value)] for value in (inputs, twice))
    if shapes == others:
        raise InputError(
            f"training.global_batch: model {name} returns inputs of shape {list(shapes[0])} "
            f"whatever the batch is; the job asks for {batch} samples at once"
        )


def check_inputs(
    what: str, inputs: Any, batch: int, *, sequence: int | None, image: tuple[int, ...] | None
) -> None:
    """Refuse a sequence length or an image size of the job that a model's own inputs do not have; rows of
    features are no sequences."""
    tensors = list(_tensors(inputs))
    shapes = [tuple(tensor.shape) for tensor in tensors]
    shown = " and ".join(str(list(shape)) for shape in shapes[:3]) or "no shape"
    tokens = [tuple(one.shape) for one in tensors if one.dim() > 2 or not one.is_floating_point()]
    if sequence is not None and not any({sequence, batch * sequence} & set(shape) for shape in tokens):
        raise InputError(f"training.sequence: {sequence} is not what {what} is given: inputs of {shown}")
    if image is not None and not any(shape[-3:] == tuple(image) for shape in shapes):
        raise InputError(f"training.image: {list(image)} is not what {what} is given: inputs of {shown}")


def check_classes(what: str, module: torch.nn.Module, classes: int | None) -> None:
    """Refuse a number of classes that no weight of a model, which the job does not build, has."""
    if classes is not None and not any(classes in weight.shape for weight in module.parameters()):
        raise InputError(f"training.classes: {classes} is not what {what} has: no weight is {classes} wide")


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether ``torch.compile`` was applied to a module or to a part of it."""
    return any(
        hasattr(child, "_orig_mod") or getattr(child, "_compiled_call_impl", None) is not None
        for child in module.modules()
    )


def without_compile(module: torch.nn.Module) -> torch.nn.Module:
    """The module as it was before ``torch.compile``; what it is wrapped in goes, in place."""
    module = getattr(module, "_orig_mod", module)
    for child in module.modules():
        if getattr(child, "_compiled_call_impl", None) is not None:
            child._compiled_call_impl = None
        for name, part in child._modules.items():
            if isinstance(whole := getattr(part, "_orig_mod", None), torch.nn.Module):
                child._modules[name] = whole
    return module


def _not_compiled(module: torch.nn.Module, expected: bool, what: str) -> torch.nn.Module:
    if not is_compiled(module):
        return module
    if not expected:
        raise InputError(f"training.compile: false, but {what} is wrapped in torch.compile; set it to true")
    return without_compile(module)


def _call_on(device: str, build: Callable[[], Any]) -> Any:
    """As ``_build``, for functions that return inputs and a loss beside the module."""
    if device == "meta":
        return build_on_meta(build)
    with torch.device(device):
        return build()


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[None]:
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


def _function(path: Path, name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(f"foretrain_user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with _building(f"model {path}"):
        spec.loader.exec_module(module)
    functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    if name not in functions:
        raise unknown("model.name", name, functions, f"a function of {path}; it has")
    return getattr(module, name)  # type: ignore[no-any-return]


def _default_inputs(training: Training, batch: int, device: str) -> tuple[torch.Tensor, ...]:
    if training.image_shape is not None and training.sequence is not None:
        raise InputError(
            "training.sequence: not used beside training.image; the model has one of the two inputs"
        )
    if training.image_shape is not None:
        return (_numbers((batch, *training.image_shape), device),)
    if training.sequence is not None:
        make = torch.empty if device == "meta" else torch.zeros
        return (make(batch, training.sequence, dtype=torch.long, device=device),)
    raise InputError(
        "training.image: missing; the model function returned "
        "no inputs, so give training.image or training.sequence"
    )


def _onnx(workload: Workload, batch: int, device: str) -> LoadedModel:
    from foretrain.capture.sources.onnx.module import load_onnx

    assert workload.model.name is not None
    path = Path(workload.model.name)
    path = path if path.is_absolute() else workload.base / path
    if not path.is_file():
        raise InputError(f"model.name: {str(path)!r} is not a file")
    with _building(f"model {path}"):
        module, inputs = load_onnx(path, batch=batch) if device == "meta" else _onnx_on(path, batch, device)
    training = workload.training
    check_inputs(f"model {path.name}", inputs, batch, sequence=training.sequence, image=training.image_shape)
    check_classes(f"model {path.name}", module, training.classes)
    tokens = batch * training.sequence if training.sequence else 0
    return LoadedModel(module=module, inputs=inputs, loss=classifier_loss(), tokens=tokens)


def _onnx_on(path: Path, batch: int, device: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """The file's own weights, and random inputs in place of the examples."""
    from foretrain.capture.sources.onnx.module import build

    module, examples = build(path, batch=batch, keep_data=True)
    inputs = [torch.zeros(example.shape, dtype=example.dtype, device=device) for example in examples]
    return module.to(device), tuple(
        value.normal_() if value.is_floating_point() else value for value in inputs
    )


_SOURCES: dict[str, Callable[[Workload, int, str], LoadedModel]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "transformers": _transformers,
    "python": _python,
    "onnx": _onnx,
}
