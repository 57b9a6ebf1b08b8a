"""Makes the model of Megatron's arguments: the type of transformers that has its layers."""

from __future__ import annotations

import ast
import math
from typing import Any

from foretrain.errors import InputError
from foretrain.launchers.settings import Key, Keys, Reading, When, count, one_of, share, text, whole, yes
from foretrain.model_names import find_preset


def _pattern(value: Any) -> Any:
    """Read how often a layer has experts: every so many, or a list of zeros and ones in Python's notation."""
    if isinstance(value, int | list):
        return value
    try:
        return _listed(ast.parse(str(value).strip(), mode="eval").body)
    except (SyntaxError, ValueError) as error:
        raise ValueError("a number, or a list such as ([0]*3+[1]*58)") from error


def _listed(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [_listed(one) for one in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Add):
        left, right = _listed(node.left), _listed(node.right)
        return left * right if isinstance(node.op, ast.Mult) else left + right
    raise ValueError(ast.dump(node))


def _own(name: str, read: Any = whole, shown: str = "") -> Key:
    return Key(f"own.{name}", read, f"model.config.{shown or name}")


MODEL_KEYS: Keys = {
    "num_layers": _own("num_layers", shown="num_hidden_layers"),
    "hidden_size": _own("hidden_size"),
    "ffn_hidden_size": _own("ffn_hidden_size", shown="intermediate_size"),
    "num_attention_heads": _own("num_attention_heads"),
    "group_query_attention": _own("grouped", yes, "num_key_value_heads"),
    "num_query_groups": _own("num_query_groups", shown="num_key_value_heads"),
    "kv_channels": _own("kv_channels", shown="head_dim"),
    "max_position_embeddings": _own("max_position_embeddings"),
    "vocab_size": _own("vocab_size"),
    "padded_vocab_size": _own("padded_vocab_size", shown="vocab_size"),
    "make_vocab_size_divisible_by": _own("vocab_multiple", shown="vocab_size"),
    "should_pad_vocab": _own("pads_vocab", yes, "vocab_size"),
    "tokenizer_model": _own("tokenizer_model", text, "vocab_size"),
    "tokenizer_type": _own("tokenizer_type", text, "vocab_size"),
    "swiglu": _own("gated", yes, "model_type"),
    "gated_linear_unit": _own("gated", yes, "model_type"),
    "squared_relu": _own("activation", When("relu2"), "hidden_act"),
    "normalization": _own(
        "norm", one_of({"layernorm": "layer", "rmsnorm": "rms", "layernorm1p": "layer"}), "model_type"
    ),
    "position_embedding_type": _own(
        "positions",
        one_of(
            {"rope": "rope", "learned_absolute": "learned", "none": "none", "yarn": "rope", "mrope": "rope"}
        ),
        "model_type",
    ),
    "use_rotary_position_embeddings": _own("positions", When("rope"), "model_type"),
    "untie_embeddings_and_output_weights": _own("untied", yes, "tie_word_embeddings"),
    "share_embeddings_and_output_weights": _own("shared_embeddings", yes, "tie_word_embeddings"),
    "disable_bias_linear": _own("no_bias", yes, "model_type"),
    "add_bias_linear": _own("bias", yes, "model_type"),
    "add_qkv_bias": _own("qkv_bias", yes, "model_type"),
    "qk_layernorm": _own("qk_norm", yes, "model_type"),
    "num_experts": _own("num_experts", count),
    "num_moe_experts": _own("num_experts", count, "num_experts"),
    "moe_router_topk": _own("topk", shown="num_experts_per_tok"),
    "moe_ffn_hidden_size": _own("moe_ffn_hidden_size", shown="moe_intermediate_size"),
    "moe_shared_expert_intermediate_size": _own("shared_size", count, "shared_expert_intermediate_size"),
    "moe_layer_freq": _own("moe_layers", _pattern, "first_k_dense_replace"),
    "moe_router_num_groups": _own("n_group", count),
    "moe_router_group_topk": _own("topk_group", count),
    "multi_latent_attention": _own("mla", yes, "model_type"),
    "q_lora_rank": _own("q_lora_rank", count),
    "kv_lora_rank": _own("kv_lora_rank"),
    "qk_head_dim": _own("qk_head_dim", shown="qk_nope_head_dim"),
    "qk_pos_emb_head_dim": _own("qk_pos_emb_head_dim", shown="qk_rope_head_dim"),
    "v_head_dim": _own("v_head_dim"),
    "moe_router_topk_limited_devices": _own("limited_devices", share, "n_group"),
}

OTHER_MODELS = frozenset(
    "pretrain_t5.py pretrain_mamba.py pretrain_retro.py pretrain_ict.py pretrain_vlm.py "
    "pretrain_vision_classify.py pretrain_vision_dino.py pretrain_vision_inpaint.py".split()
)
"""Programs whose models are not made of their arguments: they are to be named."""

_GPT2_WORDS = 50257
"""What Megatron's GPT-2 tokenizer knows."""
_MULTIPLE = 128
"""To which vocabularies are filled up, for each tensor-parallel rank."""


def model_table(reading: Reading, own: dict[str, Any]) -> dict[str, Any]:
    """The [model] section that the arguments describe."""
    layers, hidden, heads = own["num_layers"], own["hidden_size"], own.get("num_attention_heads")
    if heads is None:
        raise InputError(f"{reading.where('own.num_layers')}--num-attention-heads: missing")
    gated, rope = own.get("gated", False), own.get("positions", "learned") == "rope"
    ffn = own.get("ffn_hidden_size") or (int(8 * hidden / 3 / 64) * 64 if gated else 4 * hidden)
    grouped = own.get("grouped") or own.get("num_query_groups") is not None
    sequence = reading.get("training.sequence") or 0
    common = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("num_query_groups", 1) if grouped else heads,
        "intermediate_size": ffn,
        "vocab_size": _vocabulary(reading, own),
        "max_position_embeddings": max(sequence, own.get("max_position_embeddings") or 0),
        "tie_word_embeddings": own.get("shared_embeddings", not own.get("untied", False)),
    }
    if own.get("kv_channels"):
        common["head_dim"] = own["kv_channels"]
    if own.get("program") == "pretrain_bert.py":
        unlike = ("num_key_value_heads", "head_dim")
        config = {name: value for name, value in common.items() if name not in unlike}
        config = {"model_type": "bert", **config}
        return {"source": "transformers", "task": "masked-lm", "config": config}
    if own.get("num_experts") or own.get("mla"):
        config = _experts(common, own)
    elif gated:
        kind = "qwen3" if own.get("qk_norm") else "qwen2" if own.get("qkv_bias") else "llama"
        config = {"model_type": kind, **common}
        if not rope or own.get("norm") != "rms":
            reading.assumed.append(f"model: {kind}, with RMS norms and rotary positions")
    elif rope or grouped:
        config = {"model_type": "nemotron", **common, "hidden_act": own.get("activation", "gelu")}
    else:
        config = {
            "model_type": "gpt2", "n_embd": hidden, "n_layer": layers, "n_head": heads, "n_inner": ffn,
            "n_positions": common["max_position_embeddings"], "vocab_size": common["vocab_size"],
            "tie_word_embeddings": common["tie_word_embeddings"],
        }  # fmt: skip
    return {"source": "transformers", "task": "causal-lm", "config": config}


def _vocabulary(reading: Reading, own: dict[str, Any]) -> int:
    """The words of the tokenizer, filled up as Megatron does."""
    if own.get("padded_vocab_size"):
        return int(own["padded_vocab_size"])
    words = own.get("vocab_size")
    if words is None and own.get("tokenizer_model"):
        preset = find_preset(str(own["tokenizer_model"]))
        words = None if preset is None else preset["config"].get("vocab_size")
    if words is None:
        words = _GPT2_WORDS
        reading.assumed.append(f"model.config.vocab_size: the {words} words of GPT-2; give --vocab-size")
    if own.get("tokenizer_type") == "NullTokenizer":
        words += 1  # its end of a document
    multiple = own.get("vocab_multiple", _MULTIPLE) * reading.get("plan.tensor", 1)
    return int(math.ceil(words / multiple) * multiple)


def _dense_layers(own: dict[str, Any]) -> list[int]:
    """List the layers without experts."""
    layers, pattern = own["num_layers"], own.get("moe_layers", 1)
    if not own.get("num_experts"):
        return list(range(layers))
    if isinstance(pattern, int):
        return [number for number in range(layers) if number % pattern]
    return [number for number, has in enumerate(pattern[:layers]) if not has]


def _experts(common: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """A mixture of experts, or latent attention: the type that has the same parts."""
    experts, topk = own.get("num_experts") or 1, own.get("topk", 2)
    size, dense = own.get("moe_ffn_hidden_size") or common["intermediate_size"], _dense_layers(own)
    shared = own.get("shared_size") or 0
    first_dense = dense == list(range(len(dense)))
    if own.get("mla") or (shared and first_dense and dense):
        of_latent = {
            "q_lora_rank": own.get("q_lora_rank"),
            "kv_lora_rank": own.get("kv_lora_rank", 512),
            "qk_nope_head_dim": own.get("qk_head_dim", 128),
            "qk_rope_head_dim": own.get("qk_pos_emb_head_dim", 64),
            "v_head_dim": own.get("v_head_dim", 128),
            "num_key_value_heads": common["num_attention_heads"],
        }
        of_experts = {
            "moe_intermediate_size": size, "n_routed_experts": experts, "num_experts_per_tok": topk,
            "n_shared_experts": max(1, shared // size) if shared else 0,
            "first_k_dense_replace": len(dense),
        }  # fmt: skip
        if own.get("mla"):
            groups = {"n_group": own.get("n_group") or 1, "topk_group": own.get("topk_group") or 1}
            without_head = {name: value for name, value in common.items() if name != "head_dim"}
            return {"model_type": "deepseek_v3", **without_head, **of_latent, **of_experts, **groups}
        return {"model_type": "glm4_moe", **common, **of_experts, "use_qk_norm": bool(own.get("qk_norm"))}
    if not shared and not own.get("qk_norm") and not dense:
        return {
            "model_type": "mixtral", **common, "intermediate_size": size, "num_local_experts": experts,
            "num_experts_per_tok": topk,
        }  # fmt: skip
    kind = "qwen2_moe" if shared else "qwen3_moe"
    config = {
        "model_type": kind, **common, "num_experts": experts, "num_experts_per_tok": topk,
        "moe_intermediate_size": size, "mlp_only_layers": dense, "decoder_sparse_step": 1,
    }  # fmt: skip
    return config | ({"shared_expert_intermediate_size": shared} if shared else {})
