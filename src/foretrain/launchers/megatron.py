"""Reads the arguments of Megatron-LM (core 0.20 and earlier ones), which Megatron-Bridge's fields are too."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from foretrain.errors import InputError
from foretrain.launchers.megatron_model import MODEL_KEYS, OTHER_MODELS, model_table
from foretrain.launchers.settings import (
    Key,
    Keys,
    Reading,
    Setting,
    When,
    count,
    dashed,
    dtype,
    no,
    one_of,
    share,
    spelled,
    take,
    text,
    whole,
    yes,
)

READER = "megatron"

_MODULES = {
    "core_attn": "attention", "layernorm": "norms", "mlp": "mlp", "moe": "experts",
    "moe_act": "expert_activation", "shared_experts": "shared_experts", "mla_up_proj": "mla_up",
}  # fmt: skip
"""What selective recomputation can be told to run again."""


def _modules(value: Any) -> list[str]:
    read = one_of(_MODULES)
    return [read(one) for one in (value if isinstance(value, list | tuple) else str(value).split())]


_RECIPES = {
    "tensorwise": "current",
    "delayed": "delayed",
    "mxfp8": "mxfp8",
    "blockwise": "blockwise",
    "custom": None,
}
_GRAPHS = {"none": "none", "local": "layers", "transformer_engine": "layers", "full_iteration": "step"}

_PLAN: Keys = {
    "tensor_model_parallel_size": Key("plan.tensor", whole),
    "pipeline_model_parallel_size": Key("plan.pipeline", whole),
    "context_parallel_size": Key("plan.context", whole),
    "expert_model_parallel_size": Key("plan.expert", whole),
    "expert_tensor_parallel_size": Key("plan.expert_tensor", whole),
    "sequence_parallel": Key("plan.sequence_parallel", yes),
    "num_virtual_stages_per_pipeline_rank": Key("plan.virtual_stages", whole),
    "virtual_pipeline_model_parallel_size": Key("plan.virtual_stages", whole),
    "num_layers_per_virtual_pipeline_stage": Key("own.virtual_layers", whole, "plan.virtual_stages"),
    "pipeline_model_parallel_layout": Key("own.layout", text, "plan.stages"),
    "decoder_first_pipeline_num_layers": Key("own.first_layers", whole, "plan.stages"),
    "decoder_last_pipeline_num_layers": Key("own.last_layers", whole, "plan.stages"),
    "num_layers_in_first_pipeline_stage": Key("own.first_layers", whole, "plan.stages"),
    "num_layers_in_last_pipeline_stage": Key("own.last_layers", whole, "plan.stages"),
    "account_for_embedding_in_pipeline_split": Key("own.embedding_counts", yes, "plan.stages"),
    "account_for_loss_in_pipeline_split": Key("own.loss_counts", yes, "plan.stages"),
    "cp_comm_type": Key(
        "plan.context_exchange",
        one_of({"p2p": "ring", "a2a": "alltoall", "allgather": "allgather", "all_gather": "allgather",
                "a2a+p2p": "ring"}),
    ),
    "use_distributed_optimizer": Key("own.distributed_optimizer", yes, "plan.shard"),
    "use_megatron_fsdp": Key("own.fsdp", yes, "plan.shard"),
    "use_custom_fsdp": Key("own.fsdp", yes, "plan.shard"),
    "use_torch_fsdp2": Key("own.fsdp", yes, "plan.shard"),
    "torch_fsdp2_reshard_after_forward": Key("plan.reshard", yes),
    "data_parallel_sharding_strategy": Key("own.strategy", spelled("shard"), "plan.shard"),
    "num_distributed_optimizer_instances": Key("plan.replicate", whole),
    "overlap_grad_reduce": Key("plan.overlap.gradients", yes),
    "overlap_param_gather": Key("plan.overlap.parameters", yes),
    "tp_comm_overlap": Key("plan.overlap.tensor", yes),
    "overlap_moe_expert_parallel_comm": Key("plan.overlap.experts", yes),
    "overlap_p2p_communication": Key("plan.overlap.messages", yes),
    "overlap_p2p_comm": Key("plan.overlap.messages", yes),
    "no_overlap_p2p_communication": Key("plan.overlap.messages", no),
    "grad_reduce_in_bf16": Key("training.gradient_precision", When("bf16")),
    "grad_reduce_in_fp32": Key("training.gradient_precision", lambda value: "fp32" if yes(value) else "bf16"),
    "recompute_activations": Key("plan.recompute", When("selective")),
    "recompute_granularity": Key(
        "plan.recompute", one_of({"selective": "selective", "full": "full", "none": None})
    ),
    "recompute_method": Key("own.recompute_method", text, "plan.recompute"),
    "recompute_num_layers": Key("own.recompute_layers", whole, "plan.recompute_every"),
    "recompute_modules": Key("own.recompute_modules", _modules, "plan.recompute_modules"),
    "optimizer_cpu_offload": Key("plan.offload", yes),
    "fine_grained_activation_offloading": Key("plan.offload_activations", yes),
    "cpu_offloading": Key("plan.offload_activations", yes),
    "moe_token_dispatcher_type": Key(
        "own.dispatcher",
        one_of({"alltoall": "alltoall", "alltoall_seq": "alltoall", "allgather": "allgather",
                "flex": "flex"}),
        "plan.dispatcher",
    ),
    "moe_flex_dispatcher_backend": Key(
        "own.flex", one_of({"deepep": "deepep", "hybridep": "hybridep"}), "plan.dispatcher"
    ),
    "moe_enable_deepep": Key("own.flex", When("deepep"), "plan.dispatcher"),
    "moe_expert_capacity_factor": Key("plan.expert_capacity", share),
    "moe_router_force_load_balancing": Key("plan.expert_imbalance", When(1.0)),
    "fp8_param_gather": Key("plan.fp8_gather", yes),
    "fp8_param": Key("plan.fp8_gather", yes),
    "use_nccl_ub": Key("plan.registered_buffers", yes),
}  # fmt: skip

_TRAINING: Keys = {
    "micro_batch_size": Key("run.micro", whole),
    "global_batch_size": Key("run.batch", whole),
    "seq_length": Key("training.sequence", whole),
    "train_iters": Key("training.steps", count),
    "train_samples": Key("own.train_samples", count, "training.samples"),
    "eval_interval": Key("own.eval_interval", count, "training.evaluate_every"),
    "eval_iters": Key("own.eval_iters", count, "training.evaluate_samples"),
    "save": Key("own.save", text, "training.checkpoint_every"),
    "save_interval": Key("own.save_interval", count, "training.checkpoint_every"),
    "bf16": Key("own.half", When("bf16"), "training.precision"),
    "fp16": Key("own.half", When("fp16"), "training.precision"),
    "fp8": Key("own.fp8", text, "training.precision"),
    "fp8_format": Key("own.fp8", text, "training.precision"),
    "fp8_hybrid": Key("own.fp8", When("hybrid"), "training.precision"),
    "fp8_e4m3": Key("own.fp8", When("e4m3"), "training.precision"),
    "fp8_recipe": Key("own.fp8_recipe", one_of(_RECIPES), "training.fp8"),
    "fp4": Key("own.fp4", text, "training.precision"),
    "fp4_format": Key("own.fp4", text, "training.precision"),
    "optimizer": Key("training.optimizer", spelled("optimizer")),
    "use_precision_aware_optimizer": Key("own.precision_aware", yes, "training.optimizer_state"),
    "exp_avg_dtype": Key("own.moment", dtype, "training.optimizer_state"),
    "exp_avg_sq_dtype": Key("own.second_moment", dtype, "training.optimizer_state"),
    "main_grads_dtype": Key("own.main_grads", dtype, "training.gradient_precision"),
    "accumulate_allreduce_grads_in_fp32": Key("training.gradient_precision", When("fp32")),
    "gradient_accumulation_fusion": Key("training.fused_accumulation", yes),
    "no_gradient_accumulation_fusion": Key("training.fused_accumulation", no),
    "cuda_graph_impl": Key("training.graphs", one_of(_GRAPHS)),
    "enable_cuda_graph": Key("training.graphs", When("layers")),
    "external_cuda_graph": Key("training.graphs", When("layers")),
    "attention_backend": Key(
        "training.attention",
        one_of({"auto": None, "fused": "cudnn", "flash": "flash", "unfused": "eager", "local": "eager"}),
    ),
    "use_flash_attn": Key("training.attention", When("flash")),
    "cross_entropy_loss_fusion": Key("training.loss", When("fused")),
    "mtp_num_layers": Key("training.mtp_layers", count),
}

KEYS: Keys = {**_PLAN, **_TRAINING, **MODEL_KEYS}

IGNORED = (
    "lr lr_* min_lr weight_decay* adam_* sgd_* clip_grad seed init_method* data_path data_cache_path "
    "split train_data_path valid_data_path test_data_path data_args_path mock_data load ckpt_* "
    "pretrained_checkpoint no_load_* no_save_* finetune log_* timing_* tensorboard_* wandb_* merge_file "
    "vocab_file tokenizer_type tokenizer_* distributed_* num_workers exit_* eod_* reset_* dataloader_type "
    "hidden_dropout attention_dropout layernorm_epsilon norm_epsilon rotary_base rotary_percent "
    "rotary_scaling_factor rope_* use_rope_scaling moe_aux_loss_coeff moe_router_load_balancing_type "
    "moe_router_dtype moe_z_loss_coeff moe_router_score_function moe_router_enable_expert_bias "
    "moe_router_bias_update_rate moe_router_topk_scaling_factor moe_router_pre_softmax moe_grouped_gemm "
    "moe_permute_fusion moe_router_fusion moe_router_padding_for_* moe_pad_expert_input_to_capacity "
    "moe_token_drop_policy moe_deepep_num_sms moe_per_layer_logging use_mcore_models transformer_impl "
    "no_masked_softmax_fusion attention_softmax_in_fp32 no_create_attention_mask_in_dataloader "
    "no_mmap_bin_files manual_gc* use_legacy_models async_save use_dist_ckpt dist_ckpt_* "
    "auto_detect_ckpt_format ckpt_format loss_scale initial_loss_scale min_loss_scale loss_scale_window "
    "override_opt_param_scheduler override_opt_* use_checkpoint_* fp8_margin fp8_amax_history_len "
    "fp8_amax_compute_algo fp8_interval mtp_loss_scaling_factor bias_* apply_layernorm_1p "
    "rotary_interleaved rotary_seq_len_interpolation_factor mscale* beta_fast beta_slow rope_type "
    "enable_experimental cross_entropy_fusion_impl disable_straggler_* log_interval check_for_nan* "
    "no_check_for_nan* rerun_* use_pytorch_profiler profile* nccl_* apply_rope_fusion no_rope_fusion "
    "no_bias_* te_rng_tracker inference_* deterministic_mode local_rank overlap_cpu_optimizer_* "
    "use_torch_optimizer_for_cpu_offload exit_interval eval_* high_priority_stream_groups "
    "fake_process_group decoder_seq_length no_persist_layer_norm delay_* qk_clip* hidden_act account_* "
    "train_sync_interval moe_router_group_topk_scaling no_position_embedding export_* "
    "first_last_layers_bf16 num_layers_at_*_in_bf16 calculate_per_token_loss"
)
"""Changes neither time nor memory, or is what a forecast takes anyway."""

UNMODELLED = (
    "empty_unused_memory_level optimizer_offload_fraction main_params_dtype ddp_bucket_size "
    "ddp_num_buckets fsdp_double_buffer delay_wgrad_compute sliding_window* rampup_batch_size "
    "cuda_graph_modules cuda_graph_scope moe_apply_probs_on_input attention_output_gate "
    "overlap_param_gather_with_optimizer_step moe_shared_expert_overlap tp_comm_bootstrap_backend "
    "window_size hybrid_* is_hybrid_model mamba_* spec moe_latent_size microbatch_group_size_per_vp_stage "
    "activation_offload_fraction cpu_offloading_num_layers offload_modules encoder_* decoder_* "
    "align_grad_reduce align_param_gather defer_embedding_wgrad_compute softmax_type moe_use_legacy_*"
)
"""Would change a forecast, and no job says it."""


def read(reading: Reading, settings: Iterable[Setting]) -> None:
    """The arguments of ``pretrain_gpt.py`` and its kin."""
    take(reading, settings, KEYS, READER, ignored=IGNORED, unmodelled=UNMODELLED, name=dashed)
    finish(reading)


def finish(reading: Reading) -> None:
    """Put together what takes several arguments."""
    own = reading.tables.setdefault("own", {})
    reading.set("training.framework", "megatron")
    reading.default("training.optimizer", "adam", "Megatron's own")
    _precision(reading, own)
    _sharding(reading, own)
    if not own.get("recipe"):
        reading.default("plan.recompute", "none")
        _overlap(reading)
    if own.get("num_layers") and own.get("hidden_size") and own.get("program") not in OTHER_MODELS:
        reading.set("model", model_table(reading, own))
    _stages(reading, own)
    _recomputation(reading, own)
    dispatcher = own.get("flex", "deepep") if own.get("dispatcher") == "flex" else own.get("dispatcher")
    if dispatcher:
        reading.set("plan.dispatcher", dispatcher)
    batch = reading.get("run.batch")
    if own.get("train_samples"):
        reading.set("training.samples", own["train_samples"])
        reading.set("training.epochs", 1)
    if own.get("eval_interval") and own.get("eval_iters") and batch:
        reading.set("training.evaluate_every", own["eval_interval"])
        reading.set("training.evaluate_samples", own["eval_iters"] * batch)
    if own.get("save") and own.get("save_interval"):
        reading.set("training.checkpoint_every", own["save_interval"])


def _precision(reading: Reading, own: dict[str, Any]) -> None:
    half = own.get("half", "fp32")
    if own.get("fp4") or own.get("fp8"):
        half = "fp8"
        reading.set("training.fp8", "nvfp4" if own.get("fp4") else own.get("fp8_recipe") or "delayed")
    reading.default("training.precision", half)
    if own.get("precision_aware"):
        moment = own.get("moment", "fp32")
        if own.get("second_moment", moment) != moment:
            reading.assumed.append(f"training.optimizer_state = {moment}: both moments as the first")
        reading.set("training.optimizer_state", moment)
        if own.get("main_grads") in ("fp32", "bf16"):
            reading.set("training.gradient_precision", own["main_grads"])


def _sharding(reading: Reading, own: dict[str, Any]) -> None:
    if own.get("fsdp"):
        shard = own.get("strategy", "none" if reading.whose("own.strategy") else "zero3")
    else:
        shard = "zero1" if own.get("distributed_optimizer") else None
    if shard is not None:
        reading.set("plan.shard", shard)


def _overlap(reading: Reading) -> None:
    """Say what Megatron-LM runs beside computation only where an argument asks for it."""
    if reading.get("plan.tensor", 1) > 1 and reading.get("plan.sequence_parallel"):
        reading.default("plan.overlap.tensor", value=False, why="without --tp-comm-overlap")
    if reading.get("plan.shard") == "zero1":
        reading.default("plan.overlap.gradients", value=False, why="without --overlap-grad-reduce")
        reading.default("plan.overlap.parameters", value=False, why="without --overlap-param-gather")


def _stages(reading: Reading, own: dict[str, Any]) -> None:
    """Layers of each stage, and how many a rank has."""
    pipeline, layers = reading.get("plan.pipeline", 1), own.get("num_layers") or 0
    if layout := own.get("layout"):
        counts = stage_counts(layout)
        where = reading.where("own.layout")
        if len(counts) % pipeline or sum(counts) != layers:
            raise InputError(
                f"{where}{reading.said('own.layout', 'the layout')} has {len(counts)} stages with "
                f"{sum(counts)} layers, not {layers} on {pipeline} ranks"
            )
        reading.set("plan.stages", counts)
        if len(counts) > pipeline:
            reading.set("plan.virtual_stages", len(counts) // pipeline)
    elif pipeline > 1 and layers and (uneven := _uneven(own, pipeline, layers)):
        if min(uneven) < 0 or sum(uneven) != layers:
            where = reading.where("own.first_layers", "own.last_layers", "own.embedding_counts")
            raise InputError(f"{where}{layers} layers do not divide over {pipeline} stages: {uneven}")
        reading.set("plan.stages", uneven)
    if (of_each := own.get("virtual_layers")) and pipeline > 1:
        if layers % (pipeline * of_each):
            raise InputError(
                f"{reading.where('own.virtual_layers')}{of_each} layers of each virtual stage do not divide "
                f"{layers} layers on {pipeline} stages"
            )
        reading.set("plan.virtual_stages", layers // (pipeline * of_each))
    if reading.get("plan.virtual_stages", 1) > 1:
        reading.set("plan.schedule", "interleaved")
    else:
        reading.tables.get("plan", {}).pop("virtual_stages", None)


def _uneven(own: dict[str, Any], pipeline: int, layers: int) -> list[int]:
    """Layers of stages where the first or the last has fewer; empty where all have as many."""
    first, last = own.get("first_layers"), own.get("last_layers")
    embedding, loss = bool(own.get("embedding_counts")), bool(own.get("loss_counts"))
    if embedding or loss:
        each = (layers + embedding + loss) / pipeline
        counts = [math.floor(each)] * pipeline
        counts[0] -= embedding
        counts[-1] -= loss
        return counts
    if first is None and last is None:
        return []
    between = pipeline - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    middle = [rest // between] * between if between else []
    return [*([first] if first is not None else []), *middle, *([last] if last is not None else [])]


def stage_counts(layout: str) -> list[int]:
    """Layers of each stage of ``--pipeline-model-parallel-layout``: ``E`` the embedding, ``t`` a layer, ``m``
    one of multi-token prediction, ``L`` the loss.

    >>> stage_counts("E|(t|)*3,m|m||L"), stage_counts("Ettt|(tt|)*2t*3,L")
    ([0, 1, 1, 1, 0, 0, 0, 0], [3, 2, 2, 3])
    """
    plain = layout.strip("\"'").replace(" ", "").replace(",", "")
    while (repeated := re.search(r"\(([^()]*)\)(?:\*(\d+))?", plain)) or (
        repeated := re.search(r"([A-Za-z])\*(\d+)", plain)
    ):
        times = int(repeated[2] or 1)
        plain = plain[: repeated.start()] + repeated[1] * times + plain[repeated.end() :]
    return [stage.count("t") for stage in plain.split("|")]


def _recomputation(reading: Reading, own: dict[str, Any]) -> None:
    recompute = reading.get("plan.recompute")
    modules = own.get("recompute_modules", [])
    if recompute == "selective" and modules and modules != ["attention"]:
        reading.set("plan.recompute_modules", modules)
    layers, again = own.get("num_layers"), own.get("recompute_layers")
    if recompute == "full" and own.get("recompute_method") == "block" and layers and again:
        chunk = layers // (reading.get("plan.pipeline", 1) * reading.get("plan.virtual_stages", 1))
        every = max(1, round(chunk / again))
        if every > 1:
            reading.set("plan.recompute_every", every)
            reading.assumed.append(
                f"plan.recompute_every = {every}: {again} of {chunk} layers, as if evenly spread"
            )
