"""Reads and checks the configuration of a transformers model: keys, sizes, positions."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from foretrain.capture.sources.transformers.completions import completed
from foretrain.errors import InputError, invalid, unknown
from foretrain.workload import Model, Training


def read_config(
    transformers: Any, model: Model, training: Training
) -> tuple[Any, str | None, tuple[str, ...]]:
    """The configuration, the implementation of attention that it asks for, and what of it has no effect."""
    given = {name: value for name, value in (model.config or {}).items() if name not in _OF_WEIGHTS}
    model_type = given.pop("model_type", model.name)
    attention = given.pop("attn_implementation", None)
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    if model_type not in known:
        raise unknown("model.config.model_type", model_type, known, "a transformers model type;")
    asked = {} if training.classes is None else {"num_labels": training.classes}
    if training.image_shape is not None and "image_size" not in given:
        asked["image_size"] = training.image_shape[-1]
    for name, value in asked.items():
        if given.get(name, value) != value:
            raise InputError(f"training.classes: {value} contradicts model.config.{name} = {given[name]}")
    whole, added = completed(model_type, given)
    config = transformers.AutoConfig.for_model(model_type, **copy.deepcopy({**whole, **asked}))
    ignored = list(_check_config(config, given))
    _fit_parts(config, given)
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            part.dtype = None
    if hasattr(config, "use_cache"):
        config.use_cache = training.mode == "infer" and bool(given.get("use_cache", False))
    if (
        getattr(config, "is_encoder_decoder", False)
        and getattr(config, "decoder_start_token_id", None) is None
    ):
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    notes = [*_notes(model_type, model.config or {}, ignored), *_beyond(config, training)]
    if added:
        notes.append(f"model.config: {', '.join(added)} filled in, as the library's default does not build")
    return config, attention, tuple(notes)


def _fit_parts(config: Any, given: Mapping[str, Any]) -> None:
    """Let the towers of a default configuration end as wide as the text model is."""
    width = getattr(getattr(config, "text_config", None), "hidden_size", None)
    for name, key in (("vision_config", "out_hidden_size"), ("audio_config", "output_dim")):
        part = getattr(config, name, None)
        if part is not None and getattr(part, key, None) and width and key not in (given.get(name) or {}):
            setattr(part, key, width)


def _beyond(config: Any, training: Training) -> Iterator[str]:
    """A model whose positions are computed runs beyond those it was made for, without a word of its own."""
    made_for = getattr(config, "max_position_embeddings", None)
    if isinstance(made_for, int) and training.sequence is not None and training.sequence > made_for:
        yield f"training.sequence: {training.sequence} is beyond the {made_for} positions of model.config"


def _notes(model_type: str, given: Mapping[str, Any], ignored: Iterable[str]) -> Iterator[str]:
    if of_weights := [name for name in _OF_WEIGHTS if given.get(name) and name != "auto_map"]:
        yield f"model.config: {', '.join(of_weights)} not used; training.precision says what weights are"
    unused_keys = [
        name
        for name in ignored
        if name.rpartition(".")[2] not in _NOT_THE_MODEL and not name.endswith(_TOKENS)
    ]
    if unused_keys:
        yield f"model.config: {', '.join(unused_keys)} not used by {model_type}"


# What a configuration may hold

_AT_LEAST_ONE = frozenset(
    "hidden_size num_hidden_layers num_attention_heads intermediate_size vocab_size".split()
)
_MAY_BE_NEGATIVE = ("_id", "_ids", "_index")
"""How the names of numbers end that are no count and no size."""


_OF_WEIGHTS = ("torch_dtype", "dtype", "quantization_config", "auto_map")
"""Keys of a published config.json that tell of the weights beside it, or of code."""

_NOT_THE_MODEL = frozenset(
    "finetuning_task prefix task_specific_params tokenizer_class tf_legacy_loss "
    "torchscript use_bfloat16".split()
)
"""Keys of published config.json files that say nothing of a model's shape."""

_PUBLISHED = _NOT_THE_MODEL | frozenset(
    "activation_dropout activation_function add_bias_logits add_cross_attention add_final_layer_norm "
    "apply_residual_connection_post_layernorm attention_bias attention_dropout attention_mode "
    "attention_softmax_in_fp32 aux_loss_alpha bias_dropout_fusion cache_implementation classif_dropout "
    "cross_attention_hidden_size directionality down_scale_factor downsampling_rates dropout ep_size "
    "experts_per_token extra_pos_embeddings feat_extract_dropout force_bos_token_to_be_generated "
    "forced_decoder_ids freeze_feat_extract_train fused_add_norm gap_size gradient_checkpointing "
    "hidden_activation ignore_attention_mask initial_context_length is_decoder layer_norm_epsilon "
    "mask_channel_length mask_channel_min_space mask_channel_other mask_channel_prob mask_channel_selection "
    "mask_time_length mask_time_min_space mask_time_other mask_time_prob mask_time_selection "
    "masked_softmax_fusion max_window_layers mlp_type moe_layer_freq n_ctx n_inner n_positions "
    "net_structure_type no_mask_channel_overlap no_mask_time_overlap norm_eps norm_type normalize_before "
    "normalize_embedding _num_labels num_memory_blocks offset_alibi output_past pad_vocab_size_multiple "
    "patch_norm path_norm pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers "
    "pooler_size_per_head pooler_type position_embedding_type pretraining_tp pruned_heads rms_norm rope_pct "
    "rotary rotary_scaling_factor scale_attention_softmax_in_fp32 scale_attn_weights scoring_func seq_aux "
    "seq_length skip_bias_add skip_bias_add_qkv sliding_window_size slow_but_exact ssm_cfg "
    "static_position_embeddings summary_activation summary_first_dropout summary_proj_to_labels "
    "summary_type summary_use_proj tie_encoder_decoder tie_weights_ topk_method untie_r use_mrope".split()
)
"""Keys that config.json files of the model hub hold and today's code of their models does not read."""

_TOKENS = ("_token_id", "_token_ids", "_token_index")

_TWINS = {"n_layer": "num_hidden_layers", "d_model": "hidden_size", "d_inner": "intermediate_size"}
"""Names of sizes that published files give beside those which count."""


def _is_harmless(config: Any, name: str, value: Any) -> bool:
    """Whether a key that the model does not read is known to stand in published files."""
    if name in _TWINS:
        return bool(getattr(config, _TWINS[name], None) == value)
    return name in _PUBLISHED or name.endswith(_TOKENS)


def _check_config(config: Any, given: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """The keys that have no effect and are known to have none.

    Other keys that the model does not know, numbers that it cannot have, and keys that others overrule are
    refused: the library keeps an unknown key without a word.
    """
    usual, field = _usual(config), f"model.config{path and '.'}{path}"
    for name in ignored_keys(config, given):
        if not _is_harmless(config, name, given[name]):
            raise unknown(f"{field}.{name}", name, _names(config), f"a key of {config.model_type};")
        yield f"{path}{path and '.'}{name}"
    for name, value in given.items():
        part = getattr(config, name, None)
        if isinstance(value, Mapping) and hasattr(part, "model_type"):
            yield from _check_config(part, value, f"{path}{path and '.'}{name}")
        if type(value) is not int:
            continue
        default = getattr(usual, name, None)
        common = next((key for key, own in config.attribute_map.items() if own == name), name)
        least = 1 if common in _AT_LEAST_ONE else 0
        signed = name.endswith(_MAY_BE_NEGATIVE) or (isinstance(default, int) and default < 0)
        if value < least and not signed:
            raise invalid(f"{field}.{name}", value, f"{least} or more")
        if type(part) is int and part != value:
            raise InputError(f"{field}.{name}: {value} contradicts another key; the model would have {part}")


def ignored_keys(config: Any, names: Iterable[str]) -> list[str]:
    """The names that were put on a configuration though neither its class nor the model's code reads them."""
    usual = _usual(config)
    kept = [name for name in names if name in vars(config) and not hasattr(usual, name)]
    if not kept:
        return []
    folder = Path(inspect.getfile(type(config))).parent
    code = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("model*.py")))
    return [name for name in kept if not re.search(rf"""(\bconfig\.|["']){re.escape(name)}\b""", code)]


def _usual(config: Any) -> Any:
    """The configuration with its defaults; its class where that has none for every key."""
    with contextlib.suppress(Exception):
        return type(config)()
    return type(config)


def _names(config: Any) -> set[str]:
    """The keys that a configuration is made with."""
    usual = _usual(config)
    own = vars(usual) if usual is not type(config) else inspect.signature(usual).parameters
    return {name for name in (*own, *config.attribute_map) if not name.startswith("_")}


_POSITION_TABLES = re.compile(r"position|(^|\.)wpe$")


def check_positions(module: torch.nn.Module, sequence: int | None) -> None:
    """Refuse a sequence that a learned table of positions is too short for; rotary positions have no end."""
    config = getattr(module, "config", None)
    if sequence is None or config is None:
        return
    if getattr(config, "axial_pos_embds", False) and sequence != (whole := math.prod(config.axial_pos_shape)):
        raise InputError(
            f"training.sequence: {sequence} is not the product of model.config.axial_pos_shape = "
            f"{list(config.axial_pos_shape)}; give {whole}, or another shape"
        )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = getattr(text, "max_position_embeddings", None)
    for path, table in module.named_modules():
        if not isinstance(limit, int) or not isinstance(table, torch.nn.Embedding):
            continue
        if _POSITION_TABLES.search(path) and 0 <= table.num_embeddings - limit <= _RESERVED_POSITIONS:
            padding = 0 if table.padding_idx is None else table.padding_idx + 1
            if sequence > (positions := min(limit, table.num_embeddings - padding)):
                raise InputError(
                    f"training.sequence: {sequence} is beyond the {positions} positions of "
                    f"{config.model_type}; model.config.max_position_embeddings gives it more"
                )


_RESERVED_POSITIONS = 8
"""Rows that a table of positions may have in front of the first token's (two in OPT and BART)."""
