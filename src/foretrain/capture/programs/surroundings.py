"""Stands in for what is around a training: what it reports to, and the checkpoints that it begins with."""

from __future__ import annotations

import contextlib
import sys
import types
import unittest.mock
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from foretrain.capture.programs.pretence import Quiet

_TRACKERS = (
    "wandb", "mlflow", "comet_ml", "neptune", "clearml", "aim", "tensorboardX", "torch.utils.tensorboard",
)  # fmt: skip
"""Packages and modules that write down how a training goes."""


def trackers(text: str) -> list[Any]:
    """In place of those that the text of a program names."""
    return [
        unittest.mock.patch("torch.profiler.profile", Quiet),
        *(_instead_of(name) for name in _TRACKERS if name.rpartition(".")[2] in text),
    ]


@contextlib.contextmanager
def _instead_of(name: str) -> Iterator[None]:
    before, sys.modules[name] = sys.modules.get(name), _Tracker(name)
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


def checkpoints(note: Callable[[str], None]) -> list[Any]:
    """Nothing is taken from them; ``note`` is told of those that are not here."""
    return [
        unittest.mock.patch("torch.load", _loading(torch.load, note)),
        unittest.mock.patch.object(torch.optim.Optimizer, "load_state_dict", _nothing),
        unittest.mock.patch.object(torch.amp.GradScaler, "load_state_dict", _nothing),
    ]


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


class _Tracker(types.ModuleType):
    """A package that is told how a training goes; options that it is given are there as its ``config``."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Quiet if name[0].isupper() else Quiet()

    def init(self, *_args: Any, config: Any = None, **_kwargs: Any) -> Any:
        given = config if isinstance(config, Mapping) else vars(config) if config is not None else {}
        self.config = _Options(given)
        run = Quiet()
        vars(run)["config"] = self.config
        return run


class _Options(dict[str, Any]):
    """Options by name or by attribute."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def update(self, *args: Any, **given: Any) -> None:
        given.pop("allow_val_change", None)
        super().update(*(vars(one) if hasattr(one, "__dict__") else one for one in args), **given)


class _Absent(dict[str, Any]):
    """A checkpoint that is not there: whatever is looked up in it is another, or nothing."""

    def __missing__(self, _name: str) -> _Absent:
        return _Absent()

    def __add__(self, other: int) -> int:
        return other


def _loading(load: Callable[..., Any], note: Callable[[str], None]) -> Callable[..., Any]:
    """``torch.load`` on the CPU; of a file that is not here, nothing, since weights do not change a step."""

    def loaded(file: Any, *_args: Any, **kwargs: Any) -> Any:
        if isinstance(file, str | Path) and not Path(file).exists():
            note(f"{file} is not here: the weights in it do not change a step")
            return _Absent()
        return load(file, **{**kwargs, "map_location": "cpu"})

    return loaded
