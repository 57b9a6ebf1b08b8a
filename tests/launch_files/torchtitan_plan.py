"""A plan for torchtitan's main branch, August 2026."""

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.llama3.config_registry import llama3_70b

SEQUENCE = 8 * 1024


def base():
    c = llama3_70b()
    c.metrics.log_freq = 1
    return c


def plan():
    c = base()
    c.training = TrainingConfig(
        num_tokens_per_microbatch_per_dp_rank=2 * SEQUENCE,
        num_tokens_per_train_step=64 * SEQUENCE,
        max_context_length=SEQUENCE,
        steps=1000,
        mixed_precision_reduce="bfloat16",
    )
    c.parallelism = ParallelismConfig(
        data_parallel_replicate_degree=2,
        data_parallel_shard_degree=-1,
        fsdp_reshard_after_forward="never",
        tensor_parallel_degree=8,
        context_parallel_degree=1,
    )
    c.parallelism.spmd_backend = "default"
    c.activation_checkpoint = FullAC.Config()
    c.compile = CompileConfig(enable=True, components=["model", "loss"])
    return c
