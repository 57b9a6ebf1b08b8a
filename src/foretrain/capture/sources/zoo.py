"""Builds models of timm and torchvision, and makes the two import."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from foretrain.capture.sources.loaded import LoadedModel, build_on, building, classifier_loss, numbers
from foretrain.errors import CaptureError, InputError, first_line, unknown
from foretrain.job import Training, Workload

# Image libraries


def _image(training: Training, default: tuple[int, int, int]) -> tuple[int, int, int]:
    return training.image_shape or default


def load_timm(workload: Workload, batch: int, device: str) -> LoadedModel:
    timm = import_zoo("timm")
    model = workload.model
    assert model.name is not None
    if not timm.is_model(model.name):
        raise unknown("model.name", model.name, timm.list_models(), "a timm model;")
    with building(f"model {model.name}"):
        module = build_on(
            lambda: timm.create_model(model.name, **_class_argument(model.args, workload.training)), device
        )
    defaults: Mapping[str, Any] = getattr(module, "default_cfg", None) or {}
    size = _image(workload.training, tuple(defaults.get("input_size", (3, 224, 224))))
    return LoadedModel(module=module, inputs=(numbers((batch, *size), device),), loss=classifier_loss())


def load_torchvision(workload: Workload, batch: int, device: str) -> LoadedModel:
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
    with building(f"model {model.name}"):
        module = build_on(lambda: models.get_model(model.name, **arguments), device)
    size = _image(workload.training, (3, 299, 299) if model.name == "inception_v3" else (3, 224, 224))
    return LoadedModel(module=module, inputs=(numbers((batch, *size), device),), loss=classifier_loss())


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
