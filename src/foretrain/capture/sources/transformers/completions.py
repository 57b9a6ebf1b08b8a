"""Completes default configurations of transformers that lack something, or have parts that do not fit
together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SIGLIP_896 = {"model_type": "siglip_vision_model", "image_size": 896, "patch_size": 14}
_HALF_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_IDEFICS_364 = {"model_type": "idefics3_vision", "image_size": 364, "patch_size": 14}
_LLAMA4_VISION = {"hidden_size": 1408, "vision_output_dim": 4096}
_LFM2_ATTENTION = (2, 6, 10, 14, 18, 21)
_LFM2_LAYERS = ["full_attention" if layer in _LFM2_ATTENTION else "conv" for layer in range(24)]
_JANUS_TEXT = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400,
}  # fmt: skip
_OVIS2_TEXT = {
    "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2,
}  # fmt: skip
_TWO_ROTARIES = {
    layers: {"rope_type": "default", "rope_theta": 10000.0}
    for layers in ("full_attention", "sliding_attention")
}
_DEEPSEEK_OCR_TEXT = {
    "hidden_size": 1280, "intermediate_size": 6848, "moe_intermediate_size": 896, "num_hidden_layers": 12,
    "num_attention_heads": 10, "num_key_value_heads": 10, "num_experts_per_tok": 6,
    "mlp_layer_types": ["dense", *["sparse"] * 11],
}  # fmt: skip
_GRANITE_PROJECTOR = {
    "model_type": "blip_2_qformer", "hidden_size": 1024, "encoder_hidden_size": 1024,
    "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 2,
    "cross_attention_frequency": 1,
}  # fmt: skip
_QWEN3_HEADS = {"num_attention_heads": 32, "head_dim": 128}
_HUNYUAN_VL = {
    "head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 16, 16, 16]},
}
_FORECAST = {"prediction_length": 24}

COMPLETIONS: Mapping[str, Mapping[str, Any]] = {
    "aria": {"vision_config": {"model_type": "idefics3_vision", "image_size": 490, "patch_size": 14}},
    "autoformer": _FORECAST,
    "chameleon": {"vocabulary_map": {"<image>": 8711}},
    "cohere_compass": {"text_config": {"rope_parameters": _TWO_ROTARIES}},
    "cohere_compass_text": {"rope_parameters": _TWO_ROTARIES},
    "dbrx": {"attn_config": {"rope_theta": 500000.0, "kv_n_heads": 8, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "deepseek_ocr2": {"text_config": _DEEPSEEK_OCR_TEXT},
    "deepseek_ocr2_text": _DEEPSEEK_OCR_TEXT,
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "emu3": {"vocabulary_map": {"<image>": 151643}},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "gemma3": {"vision_config": _SIGLIP_896},
    "glm4v": {"text_config": {"rope_parameters": _HALF_ROTARY}},
    "glm46v": {"text_config": {"model_type": "glm4v_text", "rope_parameters": _HALF_ROTARY}},
    "glmga": {"text_config": {"model_type": "glm4v_text", "rope_parameters": _HALF_ROTARY}},
    "glm4v_text": {"rope_parameters": _HALF_ROTARY},
    "glm_image_text": {"rope_parameters": _HALF_ROTARY},
    "glm_image": {"text_config": {"rope_parameters": _HALF_ROTARY}},
    "glm4v_moe": {"text_config": {"head_dim": 128}},
    "glm4v_moe_text": {"head_dim": 128},
    "granite_speech": {"projector_config": _GRANITE_PROJECTOR},
    "granite_speech_plus": {"projector_config": _GRANITE_PROJECTOR},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hunyuan_vl": {"text_config": _HUNYUAN_VL},
    "hunyuan_vl_text": _HUNYUAN_VL,
    "idefics3": {"vision_config": _IDEFICS_364},
    "informer": _FORECAST,
    "janus": {"text_config": _JANUS_TEXT},
    "lfm2_moe": {"num_hidden_layers": 24, "layer_types": _LFM2_LAYERS},
    "llama4": {"vision_config": _LLAMA4_VISION},
    "llama4_vision_model": _LLAMA4_VISION,
    "lw_detr": {"projector_scale_factors": [1.0]},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "oneformer": {"is_training": True},
    "ovis2": {"text_config": _OVIS2_TEXT},
    "qwen2_audio": {"ignore_index": -100},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 151652},
    "qwen3_omni_moe_text": _QWEN3_HEADS,
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 151652, "text_config": _QWEN3_HEADS},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 768},
    "qwen2_vl": {"vision_config": {"hidden_size": 8192}},
    "shieldgemma2": {"vision_config": _SIGLIP_896},
    "smolvlm": {"vision_config": {**_IDEFICS_364, "model_type": "smolvlm_vision"}},
    "step3p5": {"sliding_window": 512},
    "step3p7": {"text_config": {"sliding_window": 512}},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}, "vision_config": _SIGLIP_896},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "timm_backbone": {"backbone": "resnet50"},
    "time_series_transformer": _FORECAST,
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
}
"""Keys by model type with which its default can be built and called; sizes are those usual for the type."""


def completed(model_type: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The keys of a job with those that it must have beside them, and the names of these."""
    return _merged(COMPLETIONS.get(model_type, {}), given)


def _merged(more: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    whole, added = dict(given), []
    for name, value in more.items():
        if name not in given:
            whole[name] = value
            added.append(name)
        elif isinstance(value, Mapping) and isinstance(given[name], Mapping) and name.endswith("_config"):
            own = given[name].get("model_type")
            if own is None or own == value.get("model_type", own):
                whole[name], inner = _merged(value, given[name])
                added += [f"{name}.{key}" for key in inner if key != "model_type"]
    return whole, added
