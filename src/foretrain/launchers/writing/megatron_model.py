"""Writes the arguments of Megatron's pretrain_gpt.py that describe a model of transformers."""

from __future__ import annotations

import math
from typing import Any

from foretrain.errors import invalid
from foretrain.job import Job
from foretrain.launchers.writing.limits import cannot
from foretrain.launchers.writing.model_config import given, rotary, sizes
from foretrain.workload import Model

_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
_ROTARY = ("--position-embedding-type", "rope")
_GATED = ("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", *_ROTARY)
_BIASED = ("--normalization", "LayerNorm")

_LAYERS: dict[str, tuple[str, ...]] = {
    "llama": _GATED,
    "mistral": _GATED,
    "qwen2": (*_GATED, "--add-qkv-bias"),
    "qwen3": (*_GATED, "--qk-layernorm"),
    "mixtral": _GATED,
    "qwen3_moe": (*_GATED, "--qk-layernorm"),
    "deepseek_v3": (*_GATED, "--multi-latent-attention", "--qk-layernorm"),
    "nemotron": (
        *("--squared-relu", "--normalization", "LayerNorm", "--apply-layernorm-1p"),
        *("--disable-bias-linear", *_ROTARY),
    ),
    "gpt_neox": (*_BIASED, *_ROTARY),
    "gpt2": (*_BIASED, "--position-embedding-type", "learned_absolute"),
}
"""What the layers of each type are made of."""
_TIED = ("gpt2",)
"""Types whose output shares the weights of the embedding where the configuration does not say."""
_REFUSED = {
    "attention_bias": "Megatron's llama layers have no biases",
    "mlp_bias": "Megatron's llama layers have no biases",
    "use_sliding_window": "windows of attention are not written",
}
"""Switches that these layers have not."""
_MULTIPLE = 128
"""To which Megatron fills up vocabularies, for each tensor-parallel rank."""


def model_arguments(job: Job) -> tuple[list[str], list[str], list[str]]:
    """The arguments, those of the vocabulary apart, and what they leave out."""
    model, training = job.workload.model, job.workload.training
    kind = model.model_type
    if kind not in _LAYERS or model.task not in (None, "causal-lm"):
        what = f"{model.task} of {kind}" if kind in _LAYERS else kind or model.source
        raise invalid(
            "model", what, f"one of {', '.join(_LAYERS)} as causal-lm, which pretrain_gpt.py trains"
        )
    _check(job, kind)
    size = sizes(model, _SIZES if kind != "gpt2" else [one for one in _SIZES if one != "intermediate_size"])
    hidden, heads = size["hidden_size"], size["num_attention_heads"]
    ffn = size.get("intermediate_size") or given(model, "intermediate_size") or 4 * hidden
    words = ["--num-layers", size["num_hidden_layers"], "--hidden-size", hidden, "--ffn-hidden-size", ffn]
    words += ["--num-attention-heads", heads, *_LAYERS[kind]]
    groups = given(model, "num_key_value_heads", heads)
    if kind != "deepseek_v3" and groups not in (None, heads):
        words += ["--group-query-attention", "--num-query-groups", groups]
    head = given(model, "head_dim")
    if kind != "deepseek_v3" and head is not None and head * heads != hidden:
        words += ["--kv-channels", head]
    positions = max(size["max_position_embeddings"] or 0, training.sequence or 0)
    words += ["--seq-length", training.sequence, "--max-position-embeddings", positions]
    if not given(model, "tie_word_embeddings", kind in _TIED):
        words.append("--untie-embeddings-and-output-weights")
    words += _experts(model, kind, size)
    rotated, notes = _rotary(model, kind)
    words += [*rotated, *_norm(model)]
    vocabulary, padded = _vocabulary(size["vocab_size"], job.plan.tensor)
    if training.mtp_layers:
        words += ["--mtp-num-layers", training.mtp_layers]
    return [str(word) for word in words], [str(word) for word in vocabulary], [*notes, *padded]


def _check(job: Job, kind: str) -> None:
    model, config = job.workload.model, job.workload.model.config or {}
    if job.workload.training.sequence is None:
        raise invalid("training.sequence", None, "the length that pretrain_gpt.py needs")
    for name, why in _REFUSED.items():
        if config.get(name):
            raise cannot("megatron", f"model.config.{name}", config[name], why)
    window, sequence = config.get("sliding_window"), job.workload.training.sequence
    if kind in ("mistral", "mixtral") and window is not None and window < sequence:
        raise cannot(
            "megatron", "model.config.sliding_window", window, "windows of attention are not written"
        )
    if kind == "gpt_neox" and given(model, "use_parallel_residual", True):
        raise cannot(
            "megatron",
            "model.config.use_parallel_residual",
            True,
            "its layers run attention before the rest; false is possible",
        )


def _experts(model: Model, kind: str, size: dict[str, Any]) -> list[Any]:
    if kind not in ("mixtral", "qwen3_moe", "deepseek_v3"):
        return []
    layers = size["num_hidden_layers"]
    words: list[Any] = ["--moe-grouped-gemm", "--moe-router-load-balancing-type", "aux_loss"]
    if kind == "mixtral":
        config = sizes(model, ("num_local_experts", "num_experts_per_tok"))
        each, dense = size["intermediate_size"], list[int]()
        words += ["--num-experts", config["num_local_experts"]]
    elif kind == "qwen3_moe":
        config = sizes(model, ("num_experts", "num_experts_per_tok", "moe_intermediate_size"))
        each, every = config["moe_intermediate_size"], given(model, "decoder_sparse_step", 1)
        only = given(model, "mlp_only_layers", []) or []
        dense = [number for number in range(layers) if number in only or (number + 1) % every]
        words += ["--num-experts", config["num_experts"]]
    else:
        config = sizes(
            model,
            ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts",
             "first_k_dense_replace", "n_group", "topk_group", "q_lora_rank", "kv_lora_rank",
             "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        )  # fmt: skip
        each, dense = config["moe_intermediate_size"], list(range(config["first_k_dense_replace"]))
        words = ["--moe-grouped-gemm", "--num-experts", config["n_routed_experts"]]
        words += ["--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"]
        if config["n_shared_experts"]:
            words += ["--moe-shared-expert-intermediate-size", config["n_shared_experts"] * each]
        if (config["n_group"] or 1) > 1:
            words += ["--moe-router-num-groups", config["n_group"]]
            words += ["--moe-router-group-topk", config["topk_group"]]
        if config["q_lora_rank"] is not None:
            words += ["--q-lora-rank", config["q_lora_rank"]]
        words += ["--kv-lora-rank", config["kv_lora_rank"], "--qk-head-dim", config["qk_nope_head_dim"]]
        words += ["--qk-pos-emb-head-dim", config["qk_rope_head_dim"], "--v-head-dim", config["v_head_dim"]]
    words += ["--moe-router-topk", config["num_experts_per_tok"], "--moe-ffn-hidden-size", each]
    if dense:
        pattern = "".join("0" if number in dense else "1" for number in range(layers))
        words += ["--moe-layer-freq", "([" + ",".join(pattern) + "])"]
    return words


def _rotary(model: Model, kind: str) -> tuple[list[Any], list[str]]:
    if kind == "gpt2":
        return [], []
    config, words, notes = rotary(model), list[Any](), list[str]()
    if config["rope_theta"] is not None:
        words += ["--rotary-base", int(config["rope_theta"])]
    share = given(model, "rotary_pct", given(model, "partial_rotary_factor"))
    if share is not None:
        words += ["--rotary-percent", share]
    if config["rope_type"] == "llama3":
        words += ["--use-rope-scaling", "--rope-scaling-factor", config.get("factor", 8.0)]
    elif config["rope_type"] != "default":
        notes.append(f"model.config.rope_scaling: {config['rope_type']} as Megatron has it by itself")
    return words, notes


def _norm(model: Model) -> list[Any]:
    for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"):
        if (given_epsilon := given(model, name)) is not None:
            return ["--norm-epsilon", given_epsilon]
    return []


def _vocabulary(words: int, tensor: int) -> tuple[list[Any], list[str]]:
    """The size of the vocabulary. Megatron fills it up to a multiple for each tensor-parallel rank: the
    largest one that leaves it as it is, or the usual one. Its tokenizer without words has one token more than
    it is told."""
    multiple = math.gcd(words, _MULTIPLE * tensor) // tensor if words % tensor == 0 else _MULTIPLE
    notes = []
    if words % tensor:
        filled = -(-words // (multiple * tensor)) * multiple * tensor
        notes.append(f"model.config.vocab_size = {words}: Megatron fills it up to {filled}")
    return ["--vocab-size", words - 1, "--make-vocab-size-divisible-by", multiple], notes
