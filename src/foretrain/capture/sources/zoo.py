"""Builds models of timm and torchvision, and makes the two import."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.abc
import importlib.util
import inspect
import re
import sys
import unittest.mock
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from foretrain.capture.sources.loaded import LoadedModel, build_on, building, classifier_loss, numbers
from foretrain.capture.sources.torchvision_ops import follow_operators, import_with_operators
from foretrain.capture.sources.vision_tasks import Size, VisionTask, load_task
from foretrain.errors import CaptureError, ForetrainError, InputError, first_line, unknown
from foretrain.workload import Training, Workload

_NOT_LOADED = "pretrained weights are not loaded: they change no shape"

# timm


def load_timm(workload: Workload, batch: int, device: str) -> LoadedModel:
    """Build a model of timm for images of the job's size, or of the model's own."""
    timm = import_zoo("timm")
    name, training = workload.model.name, workload.training
    assert name is not None
    if not timm.is_model(name):
        raise unknown("model.name", name, timm.list_models(), "a timm model;")
    arguments = _class_argument(workload.model.args, training)
    notes = (_NOT_LOADED,) if arguments.pop("pretrained", False) else ()
    usual = _timm_size(timm, name, arguments)
    size = training.image_shape or usual
    if size[0] != usual[0]:
        arguments = {"in_chans": size[0], **arguments}
    with building(f"model {name}"), _named_arguments(timm.model_entrypoint(name)):
        module = _timm_module(timm, name, arguments, size, usual, device)
    if size != usual:
        _explain_size(module, name, size, usual)
    return LoadedModel(
        module=module, inputs=(numbers((batch, *size), device),), loss=classifier_loss(), notes=notes
    )


def _timm_size(timm: Any, name: str, arguments: Mapping[str, Any]) -> Size:
    """The image that a model is made for: what its arguments say, else its configuration."""
    config = timm.get_pretrained_cfg(name)
    channels, height, width = config.input_size if config is not None else (3, 224, 224)
    if (given := arguments.get("img_size")) is not None:
        height, width = (given, given) if isinstance(given, int) else given
    return arguments.get("in_chans", channels), height, width


def _timm_module(
    timm: Any, name: str, arguments: dict[str, Any], size: Size, usual: Size, device: str
) -> torch.nn.Module:
    """The model, made for images of another size where that is a question of its constructor."""

    def build(**more: Any) -> torch.nn.Module:
        return build_on(lambda: timm.create_model(name, **{**arguments, **more}), device)

    if size[1:] != usual[1:] and "img_size" not in arguments:
        try:
            return build(img_size=size[1:])
        except (AssertionError, RuntimeError, ValueError) as error:
            raise _wrong_size(name, size, usual, error) from error
        except TypeError as error:
            if _unexpected(error)[1] != "img_size":
                raise
    return build()


# torchvision


def load_torchvision(workload: Workload, batch: int, device: str) -> LoadedModel:
    """Build a model of torchvision with what its task takes: images, clips, pairs of frames, targets."""
    models = import_zoo("torchvision").models
    name, training = workload.model.name, workload.training
    assert name is not None
    if name not in models.list_models():
        raise unknown("model.name", name, models.list_models(), "a torchvision model;")
    builder = models.get_model_builder(name)
    arguments = _class_argument(workload.model.args, training)
    task = VisionTask.of(name, builder.__module__, arguments)
    arguments.pop("frames", None)
    arguments = {**_size_arguments(name, task, training.image_shape), **arguments}
    with building(f"model {name}"), _named_arguments(builder), _no_downloads(models):
        module = build_on(lambda: builder(**arguments), device)
    if training.image_shape not in (None, task.image):
        _explain_size(module, name, training.image_shape, task.image)
    loaded = load_task(task, module, batch, training.image_shape, training.mode, device)
    notes = _weight_notes(module, arguments, training.mode)
    return dataclasses.replace(loaded, notes=(*notes, *loaded.notes))


def _size_arguments(name: str, task: VisionTask, image: Size | None) -> dict[str, Any]:
    """What a constructor must be told of the images; those of the inceptions would fill their weights."""
    size = image or task.image
    if name.startswith("vit_"):
        return {"image_size": size[-1]}
    if name == "maxvit_t":
        return {"input_size": size[1:]}
    return {"init_weights": False} if name.endswith(("googlenet", "inception_v3")) else {}


def _weight_notes(module: torch.nn.Module, arguments: Mapping[str, Any], mode: str) -> Iterator[str]:
    """What pretrained weights, which are not loaded, leave in a model."""
    if any(arguments.get(name) for name in _WEIGHTS):
        yield _NOT_LOADED
    frozen = sum(one.numel() for one in module.parameters() if not one.requires_grad)
    if frozen and mode == "train":
        yield (
            f"{frozen:,} parameters of the pretrained backbone are frozen, as torchvision does"
            " (model.args.trainable_backbone_layers)"
        )


_WEIGHTS = ("weights", "weights_backbone", "pretrained", "pretrained_backbone")


@contextlib.contextmanager
def _no_downloads(models: Any) -> Iterator[None]:
    """Weights that a constructor asks for are neither fetched nor read."""
    with (
        unittest.mock.patch.object(models.WeightsEnum, "get_state_dict", return_value={}),
        unittest.mock.patch.object(torch.nn.Module, "load_state_dict", return_value=None),
    ):
        yield


# Both


def _class_argument(args: Mapping[str, Any], training: Training) -> dict[str, Any]:
    """Constructor arguments; ``training.classes`` stands for ``num_classes``."""
    if training.classes is None:
        return dict(args)
    if args.get("num_classes", training.classes) != training.classes:
        raise InputError(
            f"training.classes: {training.classes} contradicts model.args.num_classes = {args['num_classes']}"
        )
    return {"num_classes": training.classes, **args}


def _unexpected(error: TypeError) -> tuple[str, str]:
    """Which function refused which argument: ("ResNet", "depth")."""
    found = re.search(r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'", str(error))
    return (found[1], found[2]) if found else ("", "")


@contextlib.contextmanager
def _named_arguments(builder: Callable[..., Any]) -> Iterator[None]:
    """An argument that a model does not have, as one line with those that it has."""
    try:
        yield
    except TypeError as error:
        refused_by, argument = _unexpected(error)
        home = sys.modules[builder.__module__]
        refused = getattr(home, refused_by, None)
        if refused is None:
            raise
        allowed = [name for name in inspect.signature(refused).parameters if name not in ("self", "kwargs")]
        raise unknown("model.args", argument, allowed, f"an argument of {refused_by}:") from error


def _explain_size(module: torch.nn.Module, name: str, size: Size, usual: Size) -> None:
    """Let a model that stops at an image of another size than its own say so."""
    forward = module.forward

    @functools.wraps(forward)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except (ForetrainError, torch.OutOfMemoryError, NotImplementedError):
            raise
        except (AssertionError, RuntimeError, ValueError) as error:
            raise _wrong_size(name, size, usual, error) from error

    module.forward = explained


def _wrong_size(name: str, size: Size, usual: Size, error: Exception) -> CaptureError:
    return CaptureError(
        f"training.image: {list(size)} is not what {name} takes ({first_line(error)}); "
        f"its own size is {list(usual)}"
    )


def import_zoo(name: str) -> Any:
    """Import torchvision or timm; where torchvision is built for another torch, with stand-ins for its
    operators."""
    try:
        library = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise CaptureError(f"model.source: {name} is not installed; install foretrain[zoo]") from error
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise CaptureError(f"model.source: {name} does not import ({first_line(error)})") from error
        library = import_with_operators(name)
    follow_operators()
    return library


def installed(package: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(package) is not None
    return False


@contextlib.contextmanager
def mended_imports() -> Iterator[None]:
    """Inside of this block whoever imports torchvision, itself or with a library that does, gets what
    ``import_zoo`` gives."""
    finder = _Mending()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Mending(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torchvision in the place of Python's own finders, and has it imported by them."""

    _busy = False

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        if name != "torchvision" or self._busy:
            return None
        self._busy = True
        try:
            if importlib.util.find_spec(name) is None:
                return None
            import_zoo(name)
        finally:
            self._busy = False
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return sys.modules[spec.name]

    def exec_module(self, module: Any) -> None:
        """It has run."""


def quiet_zoo_import() -> None:
    """transformers imports torchvision for its image models: make that import work first where torchvision is
    installed."""
    if importlib.util.find_spec("torchvision") is not None:
        with contextlib.suppress(CaptureError):
            import_zoo("torchvision")
