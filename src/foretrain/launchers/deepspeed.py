"""Reads the JSON of DeepSpeed (0.19 and earlier)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from foretrain.launchers.settings import (
    Key,
    Keys,
    Reading,
    Setting,
    When,
    dtype,
    one_of,
    spelled,
    take,
    whole,
    yes,
)

READER = "deepspeed"

STAGES = {"0": "none", "1": "zero1", "2": "zero2", "3": "zero3"}
_PLACES = {"none": None, "cpu": True, "nvme": True}


def _hpz(value: Any) -> int | None:
    """Parameters are kept within groups of so many ranks; 1 is none."""
    size = whole(value)
    return None if size in (None, 1) else size


KEYS: Keys = {
    "train_batch_size": Key("run.batch", whole),
    "train_micro_batch_size_per_gpu": Key("run.micro", whole),
    "gradient_accumulation_steps": Key("run.accumulation", whole),
    "bf16.enabled": Key("own.bf16", yes, "training.precision"),
    "bfloat16.enabled": Key("own.bf16", yes, "training.precision"),
    "fp16.enabled": Key("own.fp16", yes, "training.precision"),
    "torch_autocast.enabled": Key("own.autocast", yes, "training.precision"),
    "torch_autocast.dtype": Key("own.autocast_dtype", dtype, "training.precision"),
    "bf16.bf16_master_weights_and_grads": Key("own.no_master", yes, "training.master_weights"),
    "bf16.bf16_optimizer_states": Key("training.optimizer_state", When("bf16")),
    "communication_data_type": Key("plan.reduce_precision", dtype),
    "zero_optimization.stage": Key("plan.shard", one_of(STAGES)),
    "zero_optimization.overlap_comm": Key("plan.overlap.gradients", yes),
    "zero_optimization.offload_optimizer.device": Key("plan.offload", one_of(_PLACES)),
    "zero_optimization.cpu_offload": Key("plan.offload", yes),
    "zero_optimization.zero_hpz_partition_size": Key("plan.reshard", _hpz),
    "zero_optimization.mics_shard_size": Key("run.shard_degree", whole),
    "tensor_parallel.autotp_size": Key("plan.tensor", whole),
    "tensor_parallel.tp_overlap_comm": Key("plan.overlap.tensor", yes),
    "sequence_parallel_size": Key("own.sequence_ranks", whole, "plan.context"),
    "expert_parallel.enabled": Key("own.experts", yes, "plan.expert"),
    "expert_parallel.autoep_size": Key("own.expert_ranks", whole, "plan.expert"),
    "optimizer.type": Key("training.optimizer", spelled("optimizer")),
    "compile.deepcompile": Key("training.compile", yes),
}

IGNORED = (
    "optimizer.params* scheduler* gradient_clipping steps_per_print wall_clock_breakdown "
    "prescale_gradients gradient_predivide_factor sparse_gradients dump_state memory_breakdown "
    "tensorboard* wandb* csv_monitor* comet* flops_profiler* comms_logger* autotuning* elasticity* "
    "checkpoint* data_efficiency* curriculum_learning* zero_allow_untested_optimizer "
    "zero_force_ds_cpu_optimizer fp16.* bf16.* amp* zero_optimization.contiguous_gradients "
    "zero_optimization.reduce_scatter zero_optimization.allgather_partitions "
    "zero_optimization.stage3_gather_16bit_weights_on_model_save "
    "zero_optimization.stage3_gather_fp16_weights_on_model_save zero_optimization.offload_optimizer.* "
    "zero_optimization.round_robin_gradients zero_optimization.ignore_unused_parameters "
    "zero_optimization.load_from_fp32_weights zero_optimization.elastic_checkpoint "
    "zero_optimization.legacy_stage1 zero_optimization.memory_efficient_linear "
    "zero_optimization.offload_param.pin_memory zero_optimization.offload_param.buffer_* "
    "zero_optimization.offload_param.max_in_cpu zero_optimization.offload_param.nvme_path "
    "zero_optimization.cpu_offload_use_pin_memory tensor_parallel.preset_model "
    "tensor_parallel.tp_grain_size expert_parallel.preset_model activation_checkpointing.* aio.* "
    "hybrid_engine* seed communication_data_type_* zero_optimization.mics_hierarchical_params_gather "
    "torch_autocast.lower_precision_safe_modules compile.*"
)
_SIZES = {
    "reduce_bucket_size": 5e8,
    "allgather_bucket_size": 5e8,
    "stage3_prefetch_bucket_size": 5e7,
    "stage3_param_persistence_threshold": 1e5,
    "sub_group_size": 1e9,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
}
"""Elements of what is gathered, kept and summed up at once: DeepSpeed's own, which a forecast takes."""
UNMODELLED = (
    "data_types.grad_accum_dtype zero_optimization.zero_quantized_* zero_optimization.zenflow* "
    "zero_optimization.zeropp_* zero_optimization.offload_param.device "
    "zero_optimization.cpu_offload_params zero_optimization.log_trace* sparse_attention* "
    "compression_training* pipeline* superoffload* zero_optimization.leaf_module"
)


def read(reading: Reading, settings: Iterable[Setting]) -> None:
    """The keys of a configuration."""
    kept = []
    for setting in settings:
        name = setting.key.removeprefix("zero_optimization.")
        if name in _SIZES:
            usual = setting.value in ("auto", _SIZES[name])
            (reading.ignored if usual else reading.unmodelled).append(setting)
        elif setting.value == {}:
            reading.ignored.append(setting)
        else:
            kept.append(setting)
    take(reading, kept, KEYS, READER, ignored=IGNORED, unmodelled=UNMODELLED)
    finish(reading)


def finish(reading: Reading) -> None:
    """Put together what takes several keys."""
    own = reading.tables.setdefault("own", {})
    reading.set("training.framework", "deepspeed")
    half = "bf16" if own.get("bf16") else "fp16" if own.get("fp16") else None
    if half is not None:
        reading.set("training.precision", half)
        reading.set("training.master_weights", not own.get("no_master", False))
        for path in ("training.precision", "training.master_weights"):
            reading.sources.pop(path, None)
    elif own.get("autocast"):
        reading.set("training.precision", f"amp-{own.get('autocast_dtype', 'bf16')}")
    reading.default("plan.shard", "none")
    if (ranks := own.get("sequence_ranks", 1)) > 1:
        reading.set("plan.context", ranks)
        reading.set("plan.context_exchange", "alltoall")
    if own.get("experts") and own.get("expert_ranks"):
        reading.set("plan.expert", own["expert_ranks"])
