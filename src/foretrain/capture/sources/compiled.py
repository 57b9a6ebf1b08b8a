"""Undoes ``torch.compile`` in a user's model, which is traced as it was before, and says where it was."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

_ORIGINAL = "_torchdynamo_orig_callable"
"""Where a compiled function keeps the one that it was made of."""


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether ``torch.compile`` was applied to a module or to a part of it."""
    return any(
        hasattr(child, "_orig_mod")
        or getattr(child, "_compiled_call_impl", None) is not None
        or hasattr(type(child).forward, _ORIGINAL)
        or any(hasattr(value, _ORIGINAL) for value in vars(child).values())
        for child in module.modules()
    )


def without_compile(module: torch.nn.Module) -> torch.nn.Module:
    """The module as it was before ``torch.compile``; what it is wrapped in goes, in place."""
    module = getattr(module, "_orig_mod", module)
    for child in module.modules():
        if getattr(child, "_compiled_call_impl", None) is not None:
            child._compiled_call_impl = None
        if (original := getattr(type(child).forward, _ORIGINAL, None)) is not None:
            child.forward = types.MethodType(original, child)
        for name, value in list(vars(child).items()):
            if (original := getattr(value, _ORIGINAL, None)) is not None:
                setattr(child, name, original)
        for name, part in child._modules.items():
            if isinstance(whole := getattr(part, "_orig_mod", None), torch.nn.Module):
                child._modules[name] = whole
    return module


@contextlib.contextmanager
def not_compiling(folder: Path, compiled: list[str]) -> Iterator[None]:
    """Inside of this block ``torch.compile`` gives back what it is given. Names of modules that the code of a
    folder compiles are added to ``compiled``, those of functions when they are called."""
    place = str(folder.resolve()) + os.sep

    def is_own() -> bool:
        file = str(sys._getframe(2).f_globals.get("__file__", ""))
        return os.path.realpath(file).startswith(place)

    def compile(model: Any = None, **_options: Any) -> Any:
        own = is_own()
        if model is None:
            return lambda function: _telling(function, compiled) if own else function
        if not isinstance(model, torch.nn.Module):
            return _telling(model, compiled) if own else model
        compiled.extend([type(model).__name__] if own else ())
        return model

    def compile_module(module: torch.nn.Module, *_args: Any, **_options: Any) -> None:
        compiled.extend([type(module).__name__] if is_own() else ())

    with (
        unittest.mock.patch("torch.compile", compile),
        unittest.mock.patch.object(torch.nn.Module, "compile", compile_module),
    ):
        yield


def _telling(function: Callable[..., Any], compiled: list[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        compiled.append(getattr(function, "__name__", "a function"))
        return function(*args, **kwargs)

    return called
