"""Finds layers that have a low-rank adapter beside them, and says how the adapter is cut with its layer.

An adapter is known by its shapes: beside a frozen layer a thin one that reads what it reads, and another
that makes what it makes, both trained. So peft's, ours and those that users write (``base``, ``a``, ``b``; a
linear layer that holds its own two) are found alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

Style = Literal["torch", "megatron"]
"""Who cuts adapters. With torch (peft, Automodel) the thin dimension stays whole. Megatron's
``ParallelLinearAdapter`` cuts it and gathers what the first thin layer makes; beside a row layer the second
is cut by outputs, and those are gathered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedLayer:
    """Paths of a layer as its model calls it, of its frozen weights, and of the two thin layers."""

    path: str
    base: str
    down: str
    up: str


def is_linear(module: nn.Module) -> bool:
    """A matrix product with a weight: torch's own, or GPT-2's, whose weight is transposed."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def adapted_layers(module: nn.Module) -> list[AdaptedLayer]:
    """The layers of a module that have an adapter."""
    return [layer for path, child in module.named_modules() for layer in _adapted(path, child)]


def _adapted(path: str, child: nn.Module) -> Iterator[AdaptedLayer]:
    inner = dict(_linear_parts(child))
    trained = [name for name, layer in inner.items() if _is_trained(layer)]
    if len(trained) < 2:
        return
    candidates = ("", *inner) if is_linear(child) else tuple(inner)
    for base in candidates:
        if _is_trained(child.get_submodule(base)):
            continue
        rows, columns = _sizes(child.get_submodule(base))
        for down in trained:
            rank, read = _sizes(inner[down])
            for up in trained:
                if rank < min(rows, columns) and read == columns and _sizes(inner[up]) == (rows, rank):
                    names = (f"{path}.{name}" if name else path for name in (base, down, up))
                    yield AdaptedLayer(path=path, **dict(zip(("base", "down", "up"), names, strict=True)))
                    return


def _is_trained(layer: Any) -> bool:
    return bool(layer.weight.requires_grad)


def _linear_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Linear children, and those that stand alone in a dictionary, as peft keeps the adapters of a layer."""
    for name, child in module.named_children():
        if is_linear(child):
            yield name, child
        elif isinstance(child, nn.ModuleDict) and len(child) == 1:
            key, only = next(iter(child.items()))
            if is_linear(only):
                yield f"{name}.{key}", only


def _sizes(layer: Any) -> tuple[int, int]:
    """Results and inputs of a linear layer."""
    rows, columns = layer.weight.shape
    return (rows, columns) if isinstance(layer, nn.Linear) else (columns, rows)


def adapter_roles(layer: AdaptedLayer, roles: Mapping[str, str], style: Style) -> dict[str, str]:
    """How the two thin layers are cut, where the roles do not say it."""
    by_base = {
        "column": ("column" if style == "megatron" else "replicate", "column"),
        "row": ("row", "column" if style == "megatron" else "replicate"),
        "vocab": ("replicate", "vocab"),
    }
    down, up = by_base.get(roles.get(layer.base, "replicate"), ("replicate", "replicate"))
    return {layer.down: roles.get(layer.down, down), layer.up: roles.get(layer.up, up)}
