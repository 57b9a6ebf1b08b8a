"""Walks the tensors in what models take and give: nestings of lists, mappings, dataclasses and graphs."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a nesting of lists, tuples, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif _is_graph_data(value):
        yield from tensors_in(list(value.stores))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def _is_graph_data(value: Any) -> bool:
    """Whether it is a graph of PyTorch Geometric, or a batch of them."""
    return any(kind.__module__.startswith("torch_geometric.data") for kind in type(value).__mro__)


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The same nesting with every tensor changed; the caller's objects stay as they are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, PackedSequence):
        data, _, *order = value
        return PackedSequence(change(data), value.batch_sizes, *(map_tensors(change, one) for one in order))
    if _is_graph_data(value):
        return copy.copy(value).apply(change)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(change, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(change, item) for item in value)
    if isinstance(value, dict):
        changed = {name: map_tensors(change, item) for name, item in value.items()}
        return changed if type(value) is dict else _like(value, changed)
    if isinstance(value, UserDict):
        return _like(value, {"data": map_tensors(change, value.data)})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (field.name for field in dataclasses.fields(value))
        return _like(value, {name: map_tensors(change, getattr(value, name)) for name in fields})
    return value


def _like(value: Any, parts: Mapping[str, Any]) -> Any:
    """A shallow copy of an object with these items or attributes."""
    twin = copy.copy(value)
    for name, part in parts.items():
        if isinstance(twin, dict):
            twin[name] = part
        else:
            object.__setattr__(twin, name, part)
    return twin
