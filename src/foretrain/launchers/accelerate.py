"""Reads the YAML of Hugging Face accelerate (1.15 and earlier), and the options of ``accelerate launch``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from foretrain.launchers import deepspeed
from foretrain.launchers.settings import (
    Key,
    Keys,
    Reading,
    Setting,
    one_of,
    take,
    text,
    whole,
    yes,
)

READER = "accelerate"

_PRECISIONS = {"no": "fp32", "fp32": "fp32", "bf16": "amp-bf16", "fp16": "amp-fp16", "fp8": "fp8"}
_KINDS = {
    "no": "none", "multi_gpu": "none", "multi_cpu": "none", "tp": "none", "fsdp": "fsdp",
    "deepspeed": "deepspeed", "megatron_lm": "megatron",
}  # fmt: skip


def _strategy(value: Any) -> str:
    """Read the strategy of FSDP1, by name or number."""
    names = {"1": "zero3", "full_shard": "zero3", "2": "zero2", "shard_grad_op": "zero2", "3": "none",
             "no_shard": "none", "4": "hybrid", "hybrid_shard": "hybrid", "5": "hybrid2",
             "hybrid_shard_zero2": "hybrid2"}  # fmt: skip
    return str(one_of(names)(value))


def _reshard(value: Any) -> Any:
    """A switch of FSDP2; FSDP1 has the strategy under this name too."""
    if str(value).lower() in ("full_shard", "shard_grad_op", "hybrid_shard", "no_shard"):
        return str(value).lower() != "shard_grad_op"
    return yes(value)


_FSDP: Keys = {
    "fsdp_version": Key("own.fsdp_version", whole, "plan.shard"),
    "fsdp_reshard_after_forward": Key("own.reshard", _reshard, "plan.reshard"),
    "fsdp_sharding_strategy": Key("own.strategy", _strategy, "plan.shard"),
    "fsdp_offload_params": Key("plan.offload", yes),
    "fsdp_activation_checkpointing": Key("own.fsdp_checkpointing", yes, "plan.recompute"),
}
_PARALLEL: Keys = {
    "dp_replicate_size": Key("plan.replicate", whole),
    "dp_shard_size": Key("run.shard_degree", whole),
    "tp_size": Key("plan.tensor", whole),
    "cp_size": Key("plan.context", whole),
    "cp_comm_strategy": Key("plan.context_exchange", one_of({"allgather": "allgather", "alltoall": "ring"})),
    "sp_size": Key("own.sequence_ranks", whole, "plan.context"),
}
_MEGATRON: Keys = {
    "tp_degree": Key("plan.tensor", whole),
    "pp_degree": Key("plan.pipeline", whole),
    "num_micro_batches": Key("run.accumulation", whole),
    "sequence_parallelism": Key("plan.sequence_parallel", yes),
    "use_distributed_optimizer": Key("own.distributed_optimizer", yes, "plan.shard"),
}
KEYS: Keys = {
    "num_processes": Key("run.devices", whole),
    "num_machines": Key("cluster.nodes", whole),
    "mixed_precision": Key("own.mixed", one_of(_PRECISIONS), "training.precision"),
    "distributed_type": Key("own.kind", one_of(_KINDS), "plan.shard"),
    "gradient_accumulation_steps": Key("run.accumulation", whole),
    "use_fsdp": Key("own.use_fsdp", yes, "plan.shard"),
    "use_deepspeed": Key("own.use_deepspeed", yes, "plan.shard"),
    "zero_stage": Key("plan.shard", one_of(deepspeed.STAGES)),
    "dynamo_config.dynamo_backend": Key("own.dynamo", text, "training.compile"),
    "dynamo_backend": Key("own.dynamo", text, "training.compile"),
    "fp8_config.backend": Key("own.fp8_backend", text, "training.fp8"),
    "deepspeed_config.zero_stage": Key("plan.shard", one_of(deepspeed.STAGES)),
    "deepspeed_config.offload_optimizer_device": Key(
        "plan.offload", one_of({"none": None, "cpu": True, "nvme": True})
    ),
    "deepspeed_config.gradient_accumulation_steps": Key("run.accumulation", whole),
    **_FSDP,
    **{f"fsdp_config.{name}": key for name, key in _FSDP.items()},
    **{f"fsdp_config.{name.removeprefix('fsdp_')}": key for name, key in _FSDP.items()},
    **{f"parallelism_config_{name}": key for name, key in _PARALLEL.items()},
    **{f"parallelism_config.parallelism_config_{name}": key for name, key in _PARALLEL.items()},
    **{f"parallelism_config.{name}": key for name, key in _PARALLEL.items()},
    **{f"megatron_lm_config.megatron_lm_{name}": key for name, key in _MEGATRON.items()},
}

IGNORED = (
    "compute_environment debug downcast_bf16 enable_cpu_affinity machine_rank main_process_ip "
    "main_process_port main_training_function rdzv_* same_network use_cpu tpu_* gpu_ids max_restarts role "
    "tee log_dir commands command_file multi_gpu num_cpu_threads_per_process dynamo_config.* dynamo_* "
    "fsdp_config.fsdp_auto_wrap_policy fsdp_config.fsdp_transformer_layer_cls_to_wrap "
    "fsdp_config.fsdp_state_dict_type fsdp_config.fsdp_cpu_ram_efficient_loading "
    "fsdp_config.fsdp_sync_module_states fsdp_config.fsdp_use_orig_params "
    "fsdp_config.fsdp_backward_prefetch fsdp_config.fsdp_forward_prefetch fsdp_config.fsdp_min_num_params "
    "fsdp_* deepspeed_config.zero3_init_flag deepspeed_config.deepspeed_config_file "
    "deepspeed_config.zero3_save_16bit_model deepspeed_config.deepspeed_multinode_launcher config_file "
    "deepspeed_config.gradient_clipping deepspeed_config.deepspeed_moe_layer_cls_names "
    "deepspeed_config.deepspeed_hostfile deepspeed_config.offload_param_nvme_path "
    "deepspeed_config.offload_optimizer_nvme_path parallelism_config.parallelism_config_sp_backend "
    "parallelism_config.parallelism_config_sp_* fp8_config.* mpirun_config* ipex_config* "
    "megatron_lm_config.* deepspeed_config_file zero3_* gradient_clipping use_parallelism_config"
)
UNMODELLED = "deepspeed_config.offload_param_device offload_param_device"


def read(reading: Reading, settings: Iterable[Setting]) -> None:
    """The keys of accelerate's YAML, or options of ``accelerate launch``."""
    kept = [one for one in settings if one.value not in ({}, None)]
    take(
        reading,
        kept,
        KEYS,
        READER,
        ignored=IGNORED,
        unmodelled=UNMODELLED,
        name=lambda key: key.lstrip("-").replace("-", "_"),
    )
    finish(reading)


def finish(reading: Reading) -> None:
    """Put together what takes several keys; files of other readers have their say before."""
    own = reading.tables.setdefault("own", {})
    kind = own.get("kind")
    kind = "fsdp" if own.get("use_fsdp") else "deepspeed" if own.get("use_deepspeed") else kind
    reading.default("training.framework", "pytorch")
    if kind == "deepspeed":
        own.setdefault("bf16", own.get("mixed") == "amp-bf16")
        own.setdefault("fp16", own.get("mixed") == "amp-fp16")
        deepspeed.finish(reading)
    elif kind == "megatron":
        reading.set("training.framework", "megatron")
        reading.set("training.precision", str(own.get("mixed", "fp32")).removeprefix("amp-"))
        if own.get("distributed_optimizer"):
            reading.set("plan.shard", "zero1")
    else:
        if own.get("mixed") not in (None, "fp32"):
            reading.default("training.precision", own["mixed"])
        _sharding(reading, own, kind)
    if own.get("mixed") == "fp8" and kind != "megatron":
        te = str(own.get("fp8_backend", "")).lower() == "te"
        reading.set("training.fp8", "delayed" if te else "tensorwise")
    if str(own.get("dynamo", "no")).lower() == "inductor":
        reading.set("training.compile", True)
    if own.get("fsdp_checkpointing"):
        reading.set("plan.recompute", "full")
    if (ranks := own.get("sequence_ranks", 1)) > 1:
        reading.set("plan.context", ranks)
        reading.set("plan.context_exchange", "alltoall")


def _sharding(reading: Reading, own: dict[str, Any], kind: str | None) -> None:
    strategy = own.get("strategy", "zero3")
    if kind != "fsdp":
        reading.default("plan.shard", "none")
        return
    if strategy.startswith("hybrid"):
        reading.set("plan.shard", "zero2" if strategy.endswith("2") else "zero3")
        reading.set("run.replicate_nodes", True)
    else:
        reading.set("plan.shard", strategy)
    if own.get("reshard") is not None and own.get("strategy") is None:
        reading.set("plan.reshard", bool(own["reshard"]))
