"""Finds the list of repeated blocks of a deep model, tells which of them are alike, and cuts the model down
to its distinct ones."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from foretrain.graph import Stack

LEAST_BLOCKS = 4
"""A shorter list is traced whole."""

_INTERNAL = frozenset(vars(nn.Module())) | {"forward"}


def block_lists(module: nn.Module) -> dict[str, nn.ModuleList | nn.Sequential]:
    """The outermost lists of modules, by path; lists inside the members of another one are left out."""
    lists: dict[str, nn.ModuleList | nn.Sequential] = {}
    for path, child in module.named_modules():
        inside = any(path.startswith(f"{other}.") for other in lists)
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(child) and path and not inside:
            lists[path] = child
    return lists


def find_stack(module: nn.Module) -> Stack | None:
    """The list that holds most of the model's weights beside its embeddings, if only a few of its blocks are
    distinct."""
    path = largest_list(module)
    if path is None or not _is_numbered(blocks := module.get_submodule(path)):
        return None
    return _stack_of(path, list(blocks.children()))


def largest_list(module: nn.Module) -> str | None:
    """The path of the list of blocks that holds most of the model's weights beside its embeddings; None where
    none does."""
    sizes = {
        path: _elements(blocks) for path, blocks in block_lists(module).items() if len(blocks) >= LEAST_BLOCKS
    }
    if not sizes:
        return None
    path = max(sizes, key=sizes.__getitem__)
    embeddings = {
        id(p): p.numel()
        for child in module.modules()
        if isinstance(child, nn.Embedding)
        for p in child.parameters()
    }
    return path if 2 * sizes[path] >= _elements(module) - sum(embeddings.values()) else None


def _is_numbered(blocks: nn.Module) -> bool:
    return all(name == str(i) for i, (name, _) in enumerate(blocks.named_children()))


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _stack_of(path: str, blocks: list[nn.Module]) -> Stack | None:
    """The first and the last block stand for themselves, as autograd begins and ends there; each kind between
    them is traced between others."""
    kinds = _kinds(blocks)
    end = len(blocks) - 1
    inner = {kind: i for i, kind in reversed(list(enumerate(kinds))[1:end])}
    last = next(i for i in range(max(inner.values()) + 1, len(blocks)) if kinds[i] == kinds[end])
    if last == end:
        return None
    nearest = {kinds[i]: i for i in range(1, last)}
    between = tuple(i if i < last else nearest[kinds[i]] for i in range(1, end))
    return Stack(path, len(blocks), last + 1, (0, *between, last))


def truncate(module: nn.Module, stack: Stack) -> None:
    """Leave only the first ``traced`` blocks in the model."""
    parent, _, name = stack.path.rpartition(".")
    blocks = module.get_submodule(stack.path)
    assert isinstance(blocks, nn.ModuleList | nn.Sequential)
    for _ in range(stack.layers - stack.traced):
        del blocks[len(blocks) - 1]
    assert getattr(module.get_submodule(parent), name) is blocks


class CallOrder:
    """Records in which order the blocks of a list are called, to see that each runs once in the forward pass,
    after the one before it."""

    def __init__(self, blocks: nn.Module) -> None:
        self._calls: list[int] = []
        self._members = len(list(blocks.children()))
        self._hooks = [
            block.register_forward_pre_hook(functools.partial(self._note, i))
            for i, block in enumerate(blocks.children())
        ]

    def _note(self, number: int, _module: nn.Module, _args: Any) -> None:
        if torch._C._current_autograd_node() is None:  # not in the backward pass, where some run again
            self._calls.append(number)

    def is_plain(self) -> bool:
        for hook in self._hooks:
            hook.remove()
        return self._calls == list(range(self._members))


# Which blocks are alike


def _kinds(blocks: list[nn.Module]) -> list[int]:
    """A number for each block; alike ones have the same."""
    described = [dict(_describe(block)) for block in blocks]
    counting = _counting_keys(described)
    numbers: dict[Any, int] = {}
    keys = [frozenset((key, value) for key, value in one.items() if key not in counting) for one in described]
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _counting_keys(described: list[dict[Any, Any]]) -> set[Any]:
    """What goes up by one from block to block is the block's own number."""
    first = described[0]
    return {
        key
        for key, start in first.items()
        if type(start) is int
        and all(type(one.get(key)) is int and one[key] == start + i for i, one in enumerate(described))
    }


def _describe(block: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    """Everything that shapes what a block does, by module path and attribute."""
    for path, module in block.named_modules():
        yield (path, "class"), type(module)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            yield (
                (path, name),
                None if tensor is None else (tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad),
            )
        for name, value in vars(module).items():
            if name not in _INTERNAL:
                yield (path, name), _plain(value)


def _plain(value: Any) -> Any:
    """A value to compare by.

    Fractions scale numbers, not shapes: only whether one is zero counts. Objects do not count.
    """
    if isinstance(value, float):
        return value != 0.0
    if value is None or isinstance(value, bool | int | str | torch.dtype | type):
        return value
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    return value.__qualname__ if isinstance(value, types.FunctionType) else ""
