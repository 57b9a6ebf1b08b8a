"""Undoes what a user's code wraps its model in, compilers, replicas and shards, and says where they were."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import types
import unittest.mock
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from foretrain.capture.programs.pretence import DISTRIBUTED_ANSWERS, answering
from foretrain.capture.sources.loaded import building
from foretrain.capture.tracing.devices import OnMeta
from foretrain.capture.tracing.nested import map_tensors

_ORIGINAL = "_torchdynamo_orig_callable"
"""Where a compiled function keeps the one that it was made of."""


def _original(function: Any) -> Any:
    """What a compiled function was made of; None of another one."""
    return getattr(function, _ORIGINAL, None) if isinstance(function, types.FunctionType) else None


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether ``torch.compile`` was applied to a module or to a part of it."""
    return any(
        hasattr(child, "_orig_mod")
        or getattr(child, "_compiled_call_impl", None) is not None
        or _original(inspect.getattr_static(type(child), "forward", None)) is not None
        or any(_original(value) is not None for value in vars(child).values())
        for child in module.modules()
    )


def without_compile(module: torch.nn.Module) -> torch.nn.Module:
    """The module as it was before ``torch.compile``; what it is wrapped in goes, in place."""
    module = getattr(module, "_orig_mod", module)
    for child in module.modules():
        if getattr(child, "_compiled_call_impl", None) is not None:
            child._compiled_call_impl = None
        if (original := _original(inspect.getattr_static(type(child), "forward", None))) is not None:
            child.forward = types.MethodType(original, child)
        for name, value in list(vars(child).items()):
            if (original := _original(value)) is not None:
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


@contextlib.contextmanager
def on_one_process(text: str, notes: list[str]) -> Iterator[None]:
    """Inside of this block code finds a group of one process, and modules that it wraps for several stay as
    they are. ``text`` is what the code is read from, ``notes`` is what to say of it."""
    patches: list[Any] = []

    def left_out(name: str) -> Any:
        class Itself:
            def __new__(cls, module: torch.nn.Module, *_args: Any, **_options: Any) -> Any:
                notes.append(f"{name} around the model is left out: the plan says how it is spread")
                return module

        return Itself

    if "DataParallel" in text:
        patches.append(unittest.mock.patch("torch.nn.DataParallel", left_out("DataParallel")))
    if "istributed" in text and torch.distributed.is_available():
        names = [("torch.nn.parallel", "DistributedDataParallel")]
        if "fsdp" in text.lower():
            names += [("torch.distributed.fsdp", one) for one in ("FullyShardedDataParallel", "fully_shard")]
        patches += [unittest.mock.patch(f"{place}.{name}", left_out(name)) for place, name in names]
        if not torch.distributed.is_initialized():
            patches += answering("torch.distributed", DISTRIBUTED_ANSWERS)
    if "flex_attention" in text:
        place = "torch.nn.attention.flex_attention"
        patches.append(unittest.mock.patch(f"{place}.flex_attention", _flex_attention(notes)))
        patches.append(unittest.mock.patch(f"{place}.create_block_mask", return_value=None))
    with contextlib.ExitStack() as all_patches:
        for patch in patches:
            all_patches.enter_context(patch)
        yield


def _flex_attention(notes: list[str]) -> Callable[..., Any]:
    """Attention over every pair, which is what its FLOPs count everywhere."""

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_mods: Any, scale: float | None = None,
        enable_gqa: bool = False, **_options: Any,
    ) -> torch.Tensor:  # fmt: skip
        notes.append("flex_attention is costed as the fused attention over all pairs, without its mask")
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, scale=scale, enable_gqa=enable_gqa
        )

    return attend


def is_lazy(module: torch.nn.Module) -> bool:
    """Whether layers of it take their shapes from the first input."""
    lazy = UninitializedParameter | UninitializedBuffer
    return any(isinstance(one, lazy) for one in (*module.parameters(), *module.buffers()))


def materialise(module: torch.nn.Module, inputs: Any) -> None:
    """Run lazy layers once, so that they have their shapes."""
    if not is_lazy(module):
        return
    placed = map_tensors(lambda tensor: tensor.to("meta"), inputs)
    with torch.no_grad(), torch.device("meta"), OnMeta(), building(f"model {type(module).__name__}"):
        module.to("meta")(**placed) if isinstance(placed, Mapping) else module.to("meta")(*placed)


def _telling(function: Callable[..., Any], compiled: list[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        compiled.append(getattr(function, "__name__", "a function"))
        return function(*args, **kwargs)

    return called
