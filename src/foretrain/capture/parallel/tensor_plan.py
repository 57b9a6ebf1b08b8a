"""Decides which layers of a model are cut by columns, by rows or by vocabulary: by the user's word, the
library's own plan, or names in common use."""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from foretrain.capture.parallel.adapted import Style, adapted_layers, adapter_roles, is_linear
from foretrain.capture.sources.linear_attention import is_delta_rule
from foretrain.capture.sources.state_space import is_state_space
from foretrain.errors import invalid
from foretrain.plan import TENSOR_ROLES

ROLES = TENSOR_ROLES

_COLUMN = frozenset("""
q_proj k_proj v_proj qkv_proj qkv Wqkv c_attn q_attn query key value query_key_value q k v q_lin k_lin v_lin
wq wk wv linear_qkv qkv_lin
q_b_proj kv_b_proj gate_proj up_proj gate_up_proj c_fc fc1 fc1_g fc1_x linear1 lin1 Wi wi wi_0 wi_1 w1 w3
w12 dense_h_to_4h linear_fc1 fc_in to_qkv to_q to_k to_v to_kv q_linear k_linear v_linear query_proj key_proj
value_proj W_q W_k W_v w_q w_k w_v qkv_linear input_linear ffn
intermediate_dense
""".split())  # fmt: skip
_ROW = frozenset(
    """
o_proj out_proj c_proj dense_4h_to_h down_proj fc2 linear2 lin2 out_lin Wo wo w2 proj linear_proj linear_fc2
o fc_out to_out o_linear out_linear W_o w_o output_linear ffn_output
output_dense
""".split()
)
_KEYS_AND_VALUES = frozenset(
    """
k_proj v_proj key value k v k_lin v_lin wk wv to_k to_v to_kv k_linear v_linear key_proj value_proj W_k W_v
w_k w_v
""".split()
)
_FUSED = frozenset("qkv_proj qkv Wqkv c_attn query_key_value linear_qkv qkv_lin to_qkv qkv_linear".split())
_DENSE = (
    ("intermediate.dense", "column"),
    ("output.dense", "row"),
    ("attention.dense", "row"),
    ("self_attn.dense", "row"),
)
"""Endings of layers that are called ``dense`` whatever they do."""


def reads_keys(path: str) -> bool:
    """Whether a layer makes keys or values alone, which may have fewer heads than queries."""
    return path.rpartition(".")[2] in _KEYS_AND_VALUES


def is_fused(path: str) -> bool:
    """Whether a layer makes queries, keys and values at once."""
    return path.rpartition(".")[2] in _FUSED


def layer_roles(
    module: nn.Module, given: Mapping[str, str] | None = None, style: Style = "torch"
) -> dict[str, str]:
    """The role of every layer that has one, by path; a layer with an adapter has that of its name, and its
    adapter what goes with it."""
    for pattern, role in (given or {}).items():
        if role not in ROLES:
            raise invalid(f"plan.tensor_plan.{pattern}", role, f"one of {', '.join(ROLES)}")
    library, adapted = _library_plan(module), adapted_layers(module)
    names = {layer.base: layer.path for layer in adapted}
    beside = {path for layer in adapted for path in (layer.down, layer.up)}
    roles: dict[str, str] = {}
    for path, child in module.named_modules():
        if not (is_linear(child) or isinstance(child, nn.Embedding)):
            continue
        own = _given_role(path, given or {})
        if own is None and path not in beside:
            name = names.get(path, path)
            called = module.get_submodule(name)
            own = _given_role(name, given or {}) or _vocabulary_role(module, called)
            own = own or _state_space_role(module, name)
            own = own or library.get(_generic(name)) or _named_role(name, child)
        if own is not None:
            roles[path] = own
    roles |= {} if is_of_library(module) else _shaped_roles(module, roles, names, beside)
    for layer in adapted:
        roles |= adapter_roles(layer, roles, style)
    return roles


def _shaped_roles(
    module: nn.Module, roles: Mapping[str, str], names: Mapping[str, str], beside: Collection[str]
) -> dict[str, str]:
    """Roles of layers of unknown names beside each other in a repeated block, by their shapes: the last takes
    what the others make of the width that it gives."""
    families: dict[str, list[tuple[str, nn.Linear]]] = {}
    for path, child in module.named_modules():
        owner = names.get(path, path).rpartition(".")[0]
        if isinstance(child, nn.Linear) and "*" in _generic(owner) and path not in beside:
            families.setdefault(owner, []).append((path, child))
    all_roles: dict[str, str] = {}
    for layers in families.values():
        (*firsts, (last_path, last)) = layers
        makes = [layer.out_features for _, layer in firsts]
        alike = all(layer.in_features == last.out_features for _, layer in firsts)
        if firsts and alike and max(makes) >= last.in_features and roles.get(last_path, "row") == "row":
            shaped = dict.fromkeys((path for path, _ in firsts), "column") | {last_path: "row"}
            if all(roles.get(path, role) == role for path, role in shaped.items()):
                all_roles |= shaped
    return all_roles


def _given_role(path: str, given: Mapping[str, str]) -> str | None:
    return next((role for pattern, role in given.items() if fnmatch.fnmatchcase(path, pattern)), None)


def _vocabulary_role(module: nn.Module, child: nn.Module) -> str | None:
    """The token embedding and the layer that gives logits, where the model says which they are."""
    for name in ("get_input_embeddings", "get_output_embeddings") if is_of_library(module) else ():
        with contextlib.suppress(NotImplementedError):  # of models with several
            found = getattr(module, name)()
            tied = isinstance(child, nn.Embedding) and child.weight is getattr(found, "weight", None)
            if child is found or tied:
                return "vocab"
    return None


_STATE_SPACE = {"in_proj": "column", "x_proj": "row", "dt_proj": "column", "out_proj": "row"}
"""Projections of a state-space layer: heads (channels, in Mamba) are divided, and so are groups."""


def _state_space_role(module: nn.Module, path: str) -> str | None:
    owner, _, name = path.rpartition(".")
    parent = module.get_submodule(owner)
    if is_delta_rule(parent):
        return "row" if name == "out_proj" else "column"
    return _STATE_SPACE.get(name) if is_state_space(parent) else None


def is_of_library(module: nn.Module) -> bool:
    """Whether it is a model of transformers."""
    return hasattr(module, "get_output_embeddings") and hasattr(module, "config")


def _generic(path: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _library_plan(module: Any) -> dict[str, str]:
    """What transformers itself says, in our words; styles for parameters that are no layer of their own are
    left out."""
    plan: Mapping[str, str] = getattr(module, "_tp_plan", None) or {}
    words = {}
    for pattern, style in plan.items():
        if style.startswith("embedding"):
            words[pattern] = "vocab"
        elif "colwise" in style:
            words[pattern] = "column"
        elif "rowwise" in style:
            words[pattern] = "row"
    return words


def _named_role(path: str, child: nn.Module) -> str | None:
    """By the name of a layer inside a repeated block."""
    if not is_linear(child) or "*" not in _generic(path):
        return None
    above, _, leaf = path.rpartition(".")
    if leaf == "0":  # a layer with what follows it, dropout say
        leaf = above.rpartition(".")[2]
    if leaf == "dense":
        return next((role for ending, role in _DENSE if path.endswith(ending)), None)
    return "column" if leaf in _COLUMN else "row" if leaf in _ROW else None


def seen_layers(paths: Iterable[str]) -> str:
    """Layers for an error message, those of repeated blocks once."""
    names = list(dict.fromkeys(map(_generic, paths)))
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more if names else "the layers"
