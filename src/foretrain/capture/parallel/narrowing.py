"""Narrows the layers of a module to one tensor-parallel rank: their weights, and the attributes from which
the module makes its shapes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from foretrain.capture.parallel.adapted import is_linear
from foretrain.capture.parallel.tensor_plan import is_fused, reads_keys
from foretrain.capture.sources.linear_attention import is_delta_rule
from foretrain.capture.sources.state_space import is_chunked, is_state_space
from foretrain.errors import InputError

_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "nheads", "nhead", "heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
_HEAD_WIDTH = (
    "head_dim",
    "head_size",
    "attention_head_size",
    "key_value_proj_dim",
    "qk_head_dim",
    "dim_head",
)
_GROUPS = ("num_key_value_groups", "n_rep", "num_queries_per_kv")
_WIDTHS = ("split_size", "all_head_size", "attn_dim", "inner_dim", "embed_dim")
_EXPERT_WIDTHS = ("intermediate_dim", "intermediate_size", "expert_dim", "moe_intermediate_size")


@dataclass(frozen=True, slots=True)
class _Heads:
    """Heads of queries, and those of keys and values, of the whole attention and of one rank."""

    queries: int
    keys: int
    local_queries: int
    local_keys: int


class Narrowing:
    """Narrows the layers of a module for a group of ``degree`` ranks; tied weights stay tied.

    With ``keeps_sizes``, numbers that the module's code computes with stay those of the whole.
    """

    def __init__(
        self,
        module: nn.Module,
        degree: int,
        field: str = "plan.tensor",
        *,
        keeps_sizes: bool = False,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._module, self._degree, self._keeps_sizes = module, degree, keeps_sizes
        self._field = field
        self._names = names or {}  # of layers inside of one with an adapter: the name of that one
        self._whole: dict[int, tuple[nn.Parameter, int]] = {}  # a part -> itself, and the size that was cut
        self._holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for child in module.modules():
            for name, parameter in child._parameters.items():
                if parameter is not None:
                    self._holders.setdefault(parameter, []).append((child, name))

    # Linear layers

    def narrow(self, columns: list[str], rows: list[str]) -> None:
        """Cut column layers by output and row layers by input, and divide the heads of the attention around
        them."""
        families: dict[str, list[str]] = {}
        for path in columns:
            families.setdefault(self.owner(path), []).append(path)
        for parent_path, paths in families.items():
            self._narrow_family(self._module.get_submodule(parent_path), paths)
        for path in rows:
            layer = self._module.get_submodule(path)
            dim = 1 - _output_dim(layer)
            self._resize(layer, dim, self._share(_weight(layer).shape[dim], f"inputs of {path}"))
        if not self._keeps_sizes:
            cut = (name for path in (*columns, *rows) for name in (path, self._names.get(path, path)))
            self._divide_heads({self._module.get_submodule(path) for path in cut})

    def owner(self, path: str) -> str:
        """The path of the module that calls a layer."""
        return self._names.get(path, path).rpartition(".")[0]

    def _narrow_family(self, parent: nn.Module, paths: list[str]) -> None:
        if is_delta_rule(parent):
            self._narrow_delta_rule(parent, paths)
            return
        if is_state_space(parent):
            self._narrow_state_space(parent, paths)
            return
        heads = self._heads(parent)
        widths: dict[int, int] = {}
        for path in paths:
            layer = self._module.get_submodule(path)
            dim = _output_dim(layer)
            width = _weight(layer).shape[dim]
            widths[width] = self._part_of(self._names.get(path, path), width, heads)
            self._resize(layer, dim, widths[width])
        if heads is not None:
            self._narrow_beside(parent, heads, widths)

    def ratio(self, path: str) -> int:
        """How many times a rank's part of a column layer's outputs makes the whole."""
        weight = _weight(self._module.get_submodule(path))
        whole = self._whole[id(weight)][1] if id(weight) in self._whole else weight.shape[0]
        return whole // weight.shape[_output_dim(self._module.get_submodule(path))]

    def _heads(self, parent: nn.Module) -> _Heads | None:
        """The heads of an attention; None for another module."""
        sized = _first(parent, _HEAD_WIDTH) is not None
        config = getattr(parent, "config", None) if sized else None
        if config is None and self._keeps_sizes:
            config = getattr(parent, "config", None)
        queries = _first(parent, _HEADS) or _first(config, _HEADS)
        if queries is None:
            return None
        keys = _first(parent, _KEY_HEADS) or _first(config, _KEY_HEADS) or queries
        if queries % self._degree:
            raise InputError(f"plan.tensor: {self._degree} does not divide the {queries} attention heads")
        if keys % self._degree and self._degree % keys:
            raise InputError(
                f"plan.tensor: {self._degree} neither divides the "
                f"{keys} key and value heads nor is a multiple of them"
            )
        return _Heads(queries, keys, queries // self._degree, max(1, keys // self._degree))

    def _part_of(self, path: str, width: int, heads: _Heads | None) -> int:
        """Outputs of a layer that one rank has; key and value heads are copied where there are fewer than
        ranks."""
        if heads is not None and heads.keys != heads.queries:
            if reads_keys(path) and width % heads.keys == 0:
                return width // heads.keys * heads.local_keys
            both = heads.queries + 2 * heads.keys
            if is_fused(path) and width % both == 0:
                return width // both * (heads.local_queries + 2 * heads.local_keys)
        return self._share(width, f"outputs of {path}")

    def _share(self, size: int, what: str) -> int:
        if size % self._degree:
            raise InputError(f"{self._field}: {self._degree} does not divide the {size} {what}")
        return size // self._degree

    def _narrow_beside(self, parent: nn.Module, heads: _Heads, widths: dict[int, int]) -> None:
        """What stands beside the layers of an attention and goes by heads or by their width."""
        _set_all(parent, _GROUPS, heads.local_queries // heads.local_keys)
        for name in () if self._keeps_sizes else _WIDTHS:
            value = getattr(parent, name, None)
            if type(value) is int and value % heads.queries == 0:
                setattr(parent, name, value // heads.queries * heads.local_queries)
        for parameter in list(parent._parameters.values()):
            if parameter is not None and parameter.shape == (heads.queries,):
                self._cut(parameter, 0, heads.local_queries)
        for name, child in parent.named_children():
            if isinstance(child, nn.Embedding) and child.embedding_dim == heads.queries:
                child.embedding_dim = heads.local_queries
                self._cut(_weight(child), 1, heads.local_queries)
            elif "norm" in name:
                self._narrow_norm(child, widths)

    def _narrow_norm(self, norm: nn.Module, widths: dict[int, int]) -> None:
        """A norm over the features of all heads."""
        for parameter in list(norm._parameters.values()):
            if parameter is not None and parameter.dim() == 1 and parameter.shape[0] in widths:
                self._cut(parameter, 0, widths[parameter.shape[0]])
        shape = getattr(norm, "normalized_shape", None)
        if isinstance(shape, tuple) and shape[-1] in widths:
            norm.normalized_shape = (widths[shape[-1]],)  # type: ignore[assignment]

    def _narrow_state_space(self, mixer: Any, paths: list[str]) -> None:
        """As Megatron's ``MambaMixer``: channels are divided by heads, and what goes into and out of states
        by groups of heads, which are copied where there are fewer than ranks. The channels of Mamba have no
        heads, and what goes into their states is summed up (``x_proj``)."""
        inner = self._share(mixer.intermediate_size, "channels of a state-space layer")
        width, channels = 2 * inner, inner
        if is_chunked(mixer):
            heads = self._share(mixer.num_heads, "heads of a state-space layer")
            groups, state = mixer.n_groups, mixer.ssm_state_size
            if groups % self._degree and self._degree % groups:
                raise InputError(
                    f"plan.tensor: {self._degree} neither divides the {groups} groups of a state-space layer "
                    "nor is a multiple of them"
                )
            local = max(1, groups // self._degree)
            channels = inner + 2 * local * state
            width = inner + channels + heads
            mixer.num_heads, mixer.n_groups, mixer.conv_dim = heads, local, channels
            if hasattr(mixer, "groups_time_state_size"):
                mixer.groups_time_state_size = local * state
            norm = getattr(mixer, "norm", None)
            if norm is not None:
                self._narrow_norm(norm, {mixer.intermediate_size: inner})
                norm.group_size = min(getattr(norm, "group_size", inner), inner)
                norm.n_groups = local
        for path in paths:
            layer = self._module.get_submodule(path)
            first = path.rpartition(".")[2] == "in_proj" or self._names.get(path, "").endswith(".in_proj")
            self._resize(layer, _output_dim(layer), width if first else inner)
        self._narrow_channels(mixer, channels)
        for name, buffer in mixer._buffers.items():
            if buffer is not None and name == "mup_vector":
                mixer._buffers[name] = buffer[..., :width].contiguous()
        mixer.intermediate_size = inner

    def _narrow_delta_rule(self, mixer: Any, paths: list[str]) -> None:
        """Linear attention: heads of keys and of values are divided."""
        for name in ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim"):
            if hasattr(mixer, name):
                setattr(mixer, name, self._share(getattr(mixer, name), f"{name} of linear attention"))
        for path in paths:
            layer = self._module.get_submodule(path)
            dim = _output_dim(layer)
            self._resize(layer, dim, self._share(_weight(layer).shape[dim], f"outputs of {path}"))
        self._narrow_channels(mixer, self._share(mixer.conv1d.out_channels, "channels of linear attention"))

    def _narrow_channels(self, mixer: Any, channels: int) -> None:
        """Decay rates and steps by heads, and the convolution of each channel."""
        for name in ("A_log", "D", "dt_bias"):
            if (parameter := mixer._parameters.get(name)) is not None:
                self._cut(parameter, 0, self._share(parameter.shape[0], name))
        self._cut(_weight(mixer.conv1d), 0, channels)
        if mixer.conv1d.bias is not None:
            self._cut(mixer.conv1d.bias, 0, channels)
        mixer.conv1d.in_channels = mixer.conv1d.out_channels = mixer.conv1d.groups = channels

    def _divide_heads(self, cut: set[nn.Module]) -> None:
        """Counts of heads wherever a module or a configuration keeps them, but for modules whose layers stay
        whole."""
        holders: dict[int, Any] = {}
        adapted = {self._module.get_submodule(name) for name in self._names.values()}
        for child in self._module.modules():
            layers = {layer for layer in child.children() if is_linear(layer) or layer in adapted}
            if (layers and not layers & cut) or is_state_space(child):
                continue
            config = getattr(child, "config", None)
            holders |= {
                id(one): one
                for one in (child, config, getattr(config, "text_config", None))
                if one is not None
            }
        for holder in holders.values():
            _fix_head_width(holder)
            queries, keys = _first(holder, _HEADS), _first(holder, _KEY_HEADS)
            if queries is not None and queries % self._degree == 0:
                _set_all(holder, _HEADS, queries // self._degree)
            if keys is not None:
                _set_all(holder, _KEY_HEADS, max(1, keys // self._degree))

    # Experts and vocabulary

    def narrow_experts(self, path: str, holder: nn.Module) -> None:
        """Cut the inner width of every expert: the first product by columns, the second by rows."""
        transposed = bool(getattr(holder, "is_transposed", False))
        for name, parameter in list(holder._parameters.items()):
            first = name.startswith(("gate", "up"))
            if parameter is None or not (parameter.dim() == 3 or (first and parameter.dim() == 2)):
                continue
            dim = 2 if parameter.dim() == 3 and first == transposed else 1
            self._cut(parameter, dim, self._share(parameter.shape[dim], f"inner features of {path}.{name}"))
        for name in _EXPERT_WIDTHS:
            if isinstance(getattr(holder, name, None), int):
                setattr(holder, name, getattr(holder, name) // self._degree)

    def narrow_vocabulary(self, layer: nn.Module) -> int:
        """Cut an embedding or the layer that gives logits by tokens, padded to a multiple of the group; the
        tokens that a rank has."""
        dim = _output_dim(layer)
        weight = _weight(layer)
        tied = self._whole.get(id(weight))
        whole = tied[1] if tied is not None else weight.shape[dim]
        part = -(-whole // self._degree)
        if isinstance(layer, nn.Embedding):
            layer.num_embeddings = part
            layer.padding_idx = (
                layer.padding_idx if layer.padding_idx is not None and layer.padding_idx < part else None
            )
        self._resize(layer, dim, part)
        for child in self._module.modules():
            if any(one is layer for one in child.children()):
                for parameter in list(child._parameters.values()):
                    if parameter is not None and parameter.shape == (whole,):  # a bias that is added apart
                        self._cut(parameter, 0, part)
            for holder in (child, getattr(child, "config", None)):
                for name in ("vocab_size", "decoder_vocab_size"):
                    if holder is not None and getattr(holder, name, None) == whole:
                        setattr(holder, name, part)
            for name, buffer in child._buffers.items():
                if buffer is not None and buffer.dim() and buffer.shape[-1] == whole:
                    child._buffers[name] = buffer[..., :part].contiguous()
        return part

    # Parameters

    def _resize(self, layer: nn.Module, dim: int, size: int) -> None:
        by_output = dim == _output_dim(layer)
        if _weight(layer).shape[dim] != size:
            self._cut(_weight(layer), dim, size)
        bias = layer._parameters.get("bias")
        if bias is not None and by_output and bias.shape[0] != size:
            self._cut(bias, 0, size)
        for name in ("out_features", "nf") if by_output else ("in_features", "nx"):
            if hasattr(layer, name):
                setattr(layer, name, size)

    def _cut(self, parameter: nn.Parameter, dim: int, size: int) -> None:
        """Put a part in the place of a parameter, wherever it is used."""
        shape = [*parameter.shape[:dim], size, *parameter.shape[dim + 1 :]]
        part = nn.Parameter(
            torch.empty(shape, dtype=parameter.dtype, device=parameter.device), parameter.requires_grad
        )
        self._whole[id(part)] = part, parameter.shape[dim]
        holders = self._holders.pop(parameter)
        for owner, name in holders:
            owner._parameters[name] = part
        self._holders[part] = holders


def _first(holder: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(holder, name, None) if holder is not None else None
        if type(value) is int:
            return value
    return None


def _set_all(holder: Any, names: tuple[str, ...], value: int) -> None:
    for name in names:
        if type(getattr(holder, name, None)) is int:
            setattr(holder, name, value)


def _fix_head_width(config: Any) -> None:
    """Let a configuration say how wide a head is where it leaves that to width over heads."""
    width, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    if type(width) is int and type(heads) is int and not isinstance(config, nn.Module):
        with contextlib.suppress(AttributeError, RuntimeError):  # it is computed, or of each layer
            config.head_dim = getattr(config, "head_dim", None) or width // heads


def _weight(layer: nn.Module) -> nn.Parameter:
    weight = layer._parameters["weight"]
    assert weight is not None
    return weight


def _output_dim(layer: nn.Module) -> int:
    """Of the weight: rows, but for GPT-2's transposed layers."""
    return 0 if isinstance(layer, nn.Linear | nn.Embedding) else 1
