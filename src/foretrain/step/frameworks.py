"""Names what training frameworks do differently: fused kernels, precision of gradients, overlap, when the
host waits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from foretrain.graph.fusion import COMPILED, Fusion
from foretrain.job import Job
from foretrain.workload import Framework

NO_FUSION = Fusion()
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The habits of a framework that shape a step on many devices; the defaults are those of plain
    PyTorch."""

    fusion: Fusion = NO_FUSION
    flash_attention: bool = False
    """Attention runs as one kernel even where the captured model writes it out."""
    fuses_softmax: bool = False
    """Where attention is in separate kernels: scaling, mask and softmax are one of them."""
    attention_generation: int | None = None
    """Which FlashAttention it calls; None for the fastest attention that the device's libraries have."""
    optimizers: tuple[tuple[str, str], ...] = ()
    """Optimizers that it has as one fused kernel, by the name in the job."""
    keeps_fp32_gradients: bool = False
    """Gradients of bf16 weights are added up in a persistent fp32 buffer, and the optimizer keeps fp32
    weights."""
    uses_ddp_beside: bool = False
    """With fp32 gradients, torch's DistributedDataParallel all the same: its buckets, and low-precision
    gradients until a pass ends."""
    loss_copies: float | None = None
    """Copies of the logits in fp32 that its own cross entropy holds at once; None for what the captured loss
    needs."""
    parameter_copies: float = 0.0
    """Copies of the largest parameter that its checks make after a step."""
    gathers_on_own_stream: bool = False
    """What tensor parallelism gathers forward comes on a stream of its own; torch reuses its memory once the
    device has passed it."""
    reduces_in_fp32: bool = False
    """Gradients of low-precision weights go over the network in fp32."""
    casts_shards: bool = False
    """ZeRO 3 fetches parameters and hands out gradients in the precision of the computation."""
    bucket_bytes: float = 25 * _MIB
    """Gradients that are summed up in one call; 0 for all of them in one."""
    overlaps_reduce: bool = True
    """Gradients are summed up while the backward pass runs."""
    overlaps_gather: bool = False
    """Parameters of ZeRO 1 and 2 are handed out while the next forward pass runs."""
    overlaps_tensor: bool = False
    """The collectives of tensor parallelism run beside the weight gradients in the backward pass."""
    overlaps_tensor_forward: bool = False
    """With sequence parallelism they also run beside the products that they feed or follow, piece by
    piece."""
    fuses_permutation: bool = False
    """Tokens are sorted to experts and back by kernels that only copy."""
    host: float = 1.0
    """Host time of a call beside that of a plain PyTorch model: the framework's own Python around it."""
    step_s: float = 0.0
    """Host time of a step that belongs to no operator: logging, timers, reading the loss and the norm of
    gradients."""
    selective_recompute: Literal["attention", "half"] = "attention"
    """What selective recomputation runs again: attention between its projections, or all but attention and
    every second product."""
    checkpoint_hooks: bool = False
    """Recomputation without reentrance (``torch.utils.checkpoint``, the default of timm and transformers):
    each tensor that is saved for the backward pass goes through Python."""
    clips_gradients: bool = False
    waits_each_step: bool = False
    """The host reads the loss or the norm of the gradients in each step."""
    waits_at_messages: bool = False
    """The host waits for the device at each message of the pipeline."""
    metadata_messages: int = 0
    """Small messages that the host sends and reads ahead of each message of the pipeline."""
    stalls_s: tuple[float, float] = (0.0, 0.0)
    """Least time of a layer and micro-batch, and what each member of its tensor team adds, where a pipeline's
    messages leave the node."""
    logs_memory_of: Literal["first", "last", "fullest"] = "fullest"
    """Which stage of a pipeline its memory figures are of."""
    tensor_message_s: float = 0.0
    """Least time of a collective for each member of a tensor team that spans nodes."""
    balances_by: Literal["layers", "work"] = "layers"
    """How layers are dealt out to the stages of a pipeline."""


_PYTORCH = Profile(checkpoint_hooks=True)
_MEGATRON = Profile(
    loss_copies=1.5,
    logs_memory_of="last",
    flash_attention=True,
    fusion=Fusion(norms=True, chains=True),
    optimizers=(("adam", "adam-fused"), ("adamw", "adamw-fused")),
    keeps_fp32_gradients=True,
    reduces_in_fp32=True,
    bucket_bytes=0.0,
    overlaps_reduce=False,
    overlaps_tensor=True,
    overlaps_tensor_forward=True,
    fuses_permutation=True,
    host=2.0,
    step_s=25e-3,
    clips_gradients=True,
    waits_each_step=True,
    waits_at_messages=True,
)
_NANOTRON = Profile(
    uses_ddp_beside=True,
    loss_copies=2.5,
    parameter_copies=4.0,
    gathers_on_own_stream=True,
    tensor_message_s=45e-6,  # as the stalls: from its runs with tensor teams of 16 and 32
    flash_attention=True,
    attention_generation=2,
    fusion=Fusion(norms=True),
    optimizers=(("adam", "adam-fused"), ("adamw", "adamw-fused")),
    keeps_fp32_gradients=True,
    reduces_in_fp32=True,
    overlaps_reduce=True,
    overlaps_tensor=True,
    host=1.2,
    step_s=15e-3,
    clips_gradients=True,
    waits_each_step=True,
    waits_at_messages=True,
    metadata_messages=2,
    stalls_s=(
        1.5e-3,
        2.6e-3,
    ),
    # seen in all its public runs on H100 with tensor and pipeline over several nodes, at any batch and width
    balances_by="work",
    logs_memory_of="first",
)
_FSDP = Profile(
    flash_attention=True,
    attention_generation=2,
    casts_shards=True,
    clips_gradients=True,
    waits_each_step=True,
)

_PROFILES: dict[Framework, Profile] = {
    "pytorch": _PYTORCH,
    "adaptdl": Profile(host=1.5, step_s=50e-3, overlaps_reduce=False, waits_each_step=True),
    "megatron": _MEGATRON,
    "nanotron": _NANOTRON,
    "llm-foundry": dataclasses.replace(_FSDP, fusion=Fusion(losses=True), attention_generation=1),
    "fms-fsdp": dataclasses.replace(_FSDP, checkpoint_hooks=True),
    "torchtitan": dataclasses.replace(
        _FSDP,
        fusion=Fusion(norms=True),
        selective_recompute="half",
        checkpoint_hooks=True,
        reduces_in_fp32=True,
        optimizers=_MEGATRON.optimizers,
    ),
    "internevo": dataclasses.replace(
        _MEGATRON, overlaps_reduce=True, bucket_bytes=512 * _MIB, overlaps_tensor=False
    ),
}


_PROFILES["automodel"] = dataclasses.replace(_PROFILES["torchtitan"], attention_generation=None)
"""NeMo Automodel: torch's FSDP2 with the layers and the attention of Transformer Engine."""
_PROFILES["deepspeed"] = Profile(
    optimizers=_MEGATRON.optimizers,
    bucket_bytes=1e9,  # reduce_bucket_size = 5e8 elements, of two bytes
    overlaps_reduce=False,  # overlap_comm is off but for stage 3
    checkpoint_hooks=True,
    clips_gradients=True,
    waits_each_step=True,  # for the norm of gradients, and whether they are finite
)
"""DeepSpeed's ZeRO, with the defaults of its zero/config.py."""


def _habits(job: Job) -> Profile:
    """Of the framework, whatever the job trains; DeepSpeed switches overlap_comm on with stage 3."""
    found = _PROFILES[job.workload.training.framework]
    if job.workload.training.framework == "deepspeed" and job.plan.shard == "zero3":
        return dataclasses.replace(found, overlaps_reduce=True)
    return found


_CAST: dict[str, Literal["bf16", "fp16"]] = {"amp-bf16": "bf16", "amp-fp16": "fp16"}
"""What the computation sees where parameters are cast as they are fetched."""


def profile(job: Job) -> Profile:
    """The facts of the job's framework, of its training loop where it trains; ``compile`` fuses as torch's
    compiler does."""
    training = job.workload.training
    found = _habits(job)
    if training.framework == "megatron":
        found = _megatron(found, job)
    if not job.trains:
        found = dataclasses.replace(found, step_s=0.0, clips_gradients=False, waits_each_step=False)
    if training.compile:
        found = dataclasses.replace(found, fusion=_compiled(job), checkpoint_hooks=False)
    return found


def _compiled(job: Job) -> Fusion:
    """What torch's compiler makes one kernel of. Models of transformers compute their loss themselves; with
    autocast the compiler has cut the graph before it wherever that was seen."""
    training, processors = job.workload.training, job.cluster.groups[0].device.sms
    own_loss = job.workload.model.source == "transformers" and training.mode == "train"
    return dataclasses.replace(
        COMPILED,
        losses=own_loss,
        logits=own_loss and not training.precision.startswith("amp"),
        processors=processors or COMPILED.processors,
    )


def _megatron(found: Profile, job: Job) -> Profile:
    """Its distributed optimizer (ZeRO 1) is used with overlap; fp16 with full recomputation marks its code of
    2020 to 2022."""
    if job.plan.shard != "none":
        found = dataclasses.replace(found, overlaps_reduce=True, overlaps_gather=True, bucket_bytes=160e6)
    if (job.workload.model.config or {}).get("attn_implementation") == "eager":
        found = dataclasses.replace(found, flash_attention=False)
    if _is_early(job):
        found = dataclasses.replace(
            found,
            flash_attention=False,
            fuses_softmax=True,
            overlaps_tensor_forward=False,
            host=1.1,
            step_s=0.0,
        )
    return found


def _is_early(job: Job) -> bool:
    """Whether it is Megatron's code of 2020 to 2022: Megatron-LM 1 to 3, before core 0.1."""
    version = job.workload.training.version
    if version is not None:
        return version >= (1,)
    return job.workload.training.precision == "fp16" and job.plan.recompute == "full"


def logged_stage(job: Job) -> int:
    """The stage of a pipeline whose memory the framework reports; -1 for the fullest one."""
    return {"fullest": -1, "first": 0, "last": job.plan.pipeline - 1}[profile(job).logs_memory_of]


def as_framework_runs_it(job: Job) -> Job:
    """The job with the optimizer, the attention and the precision that its framework has for it."""
    work, habits = job.workload, profile(job)
    model, training = work.model, work.training
    fused = dict(habits.optimizers).get(training.optimizer)
    if fused is not None:
        training = dataclasses.replace(training, optimizer=fused)
    in_fp32 = training.adapter is not None and training.adapter.precision == "fp32"
    if habits.keeps_fp32_gradients and training.precision in ("bf16", "fp16", "fp8") and not in_fp32:
        training = dataclasses.replace(training, master_weights=True)
    if habits.casts_shards and job.plan.shard == "zero3" and training.precision in _CAST:
        cast, adapter = _CAST[training.precision], training.adapter
        if adapter is not None:
            adapter = dataclasses.replace(adapter, precision=cast, base=None)
        training = dataclasses.replace(training, precision=cast, adapter=adapter, master_weights=True)
    if habits.flash_attention is False and training.framework == "megatron" and model.config is not None:
        model = dataclasses.replace(model, config={**model.config, "attn_implementation": "eager"})
    return dataclasses.replace(job, workload=dataclasses.replace(work, model=model, training=training))


def attention_factor(habits: Profile, capability: float) -> float:
    """Time of the framework's attention beside the fastest one that is known for the device.

    FlashAttention reaches 25 to 40 % of an A100's rate and its second version 50 to 73 % (Dao 2023, arXiv
    2307.08691); the second one is 1.5 to 2 times slower on an H100 than later kernels (Shah et al. 2024,
    arXiv 2407.08608).
    """
    if habits.attention_generation == 1:
        return 1.8
    return 1.5 if habits.attention_generation == 2 and capability >= 9 else 1.0
