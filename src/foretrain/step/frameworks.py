"""Names what training frameworks do differently: fused kernels, precision of gradients, overlap, when the
host waits."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Literal

from foretrain.errors import InputError
from foretrain.graph.fusion import COMPILED, Fusion
from foretrain.job import Job
from foretrain.plan import Plan
from foretrain.workload import Framework

TensorOverlap = Literal["none", "behind", "piecewise"]

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
    sharding: Literal["parameters", "flat", "buffers"] = "parameters"
    """How ZeRO 3 keeps a block: parameter by parameter (FSDP2), copied out of what is gathered and into what
    is reduced; as a flat one (FSDP1), which is gathered in place, and the host waits until it may gather the
    next; or in buffers that kernels read and add to in place (Megatron)."""
    splits_root: bool = False
    """ZeRO 3 gathers embedding and head by themselves, not together as what is left of the model."""
    keeps_in_pipeline: bool = True
    """Stages of a pipeline under ZeRO 3 gather parameters once in a step and hand out gradients once, as
    torch's schedules do."""
    syncs_last: bool = False
    """They do so without a pipeline too."""
    prefetches: bool = True
    """ZeRO 3 gathers the parameters of a block while the one before it runs."""
    bucket_bytes: float = 25 * _MIB
    """Gradients that are summed up in one call; 0 for all of them in one."""
    overlaps_reduce: bool = True
    """Gradients are summed up while the backward pass runs."""
    overlaps_gather: bool = False
    """Parameters of ZeRO 1 and 2 are handed out while the next forward pass runs."""
    socket_slowdown: float = 1.0
    """Time of summing up gradients over sockets between nodes, beside that of one process per device."""
    tensor_overlap: TensorOverlap = "none"
    """What of the collectives of tensor parallelism runs beside products: of column-parallel layers in the
    backward pass those that it issues ahead (behind), or with sequence parallelism all of them in pieces."""
    joins_projections: bool = False
    """Query, key and value are one product, and so are the halves of a gated layer."""
    fuses_accumulation: bool = False
    """Products that make weight gradients add them to the fp32 ones themselves."""
    fuses_permutation: bool = False
    """Tokens are sorted to experts and back by kernels that only copy."""
    products_by_expert: bool = False
    """Each expert of a rank has a product of its own, which the host issues (Transformer Engine's grouped
    layers)."""
    cut_product_s: tuple[float, float] = (0.0, 0.0)
    """What the host needs beside for a product of a layer that is cut, forward and backward: DTensors find
    out how their results are laid out."""
    host: float = 1.0
    """Host time of a call beside that of a plain PyTorch model: the framework's own Python around it."""
    step_s: float = 0.0
    """Host time of a step that belongs to no operator: logging, timers, reading the loss and the norm of
    gradients."""
    pass_s: float = 0.0
    """Host time of each forward and backward pass of a chunk that belongs to no operator: fetching its
    input, contexts, letting go of outputs, reducing the loss."""
    selective_recompute: Literal["attention", "half"] = "attention"
    """What selective recomputation runs again: attention between its projections, or all but attention and
    every second product."""
    stops_recomputing: bool = False
    """Full recomputation of a layer ends where its backward pass asks for nothing more, as that of
    ``torch.utils.checkpoint`` without reentrance does by itself: its last product mostly runs once.
    Megatron's runs to the end, and so does torchtitan's (``early_stop`` is off)."""
    checkpoint_hooks: bool = False
    """Recomputation without reentrance (``torch.utils.checkpoint``, the default of timm and transformers):
    each tensor that is saved for the backward pass goes through Python."""
    clips_gradients: bool = False
    waits_each_step: bool = False
    """The host reads the loss or the norm of the gradients in each step."""
    issues_ahead: bool = True
    """The host issues kernels while the device runs earlier ones."""
    waits_at_messages: bool = False
    """The host waits for the device at each message of the pipeline."""
    metadata_messages: int = 0
    """Small messages that the host sends and reads ahead of each message of the pipeline."""
    stalls_s: tuple[float, float] = (0.0, 0.0)
    """Least time of a layer and micro-batch, and what each member of its tensor team adds, where a pipeline's
    messages leave the node."""
    far_message_s: float = 0.0
    """What a message of the pipeline takes beside its transfer on 64 nodes or more, and where tensor teams
    span four."""
    logs_memory_of: Literal["first", "last", "fullest"] = "fullest"
    """Which stage of a pipeline its memory figures are of."""
    tensor_message_s: float = 0.0
    """Least time of a collective for each member of a tensor team that spans nodes."""
    balances_by: Literal["layers", "work", "ends"] = "layers"
    """How layers are dealt out to the stages of a pipeline: alike, by the work of products with that of the
    head, or alike where embedding and head count as a layer each."""
    chunks: int | None = None
    """Chunks of each rank of an interleaved pipeline, where the plan does not say; None for as many as
    divide."""


_PYTORCH = Profile(stops_recomputing=True, checkpoint_hooks=True, casts_shards=True)
_MEGATRON = Profile(
    sharding="buffers",
    loss_copies=1.5,
    logs_memory_of="last",
    flash_attention=True,
    fusion=Fusion(norms=True, chains=True),
    optimizers=(("adam", "adam-fused"), ("adamw", "adamw-fused")),
    keeps_fp32_gradients=True,
    reduces_in_fp32=True,
    bucket_bytes=0.0,
    overlaps_reduce=False,
    tensor_overlap="piecewise",
    joins_projections=True,
    fuses_accumulation=True,
    fuses_permutation=True,
    products_by_expert=True,
    host=2.0,
    step_s=25e-3,
    pass_s=0.8e-3,  # from megatron_ci, where interleaving costs as much as it saves; vtrain and sailor agree
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
    tensor_overlap="behind",
    joins_projections=True,
    host=1.2,
    step_s=15e-3,
    clips_gradients=True,
    waits_each_step=True,
    waits_at_messages=True,
    metadata_messages=2,
    # seen in its public runs on H100 and EFA alone, at any batch, about as large for its models of 1B and 3B;
    # the cause is not known
    stalls_s=(4.2e-3, 2.1e-3),
    far_message_s=0.5,
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
    # AdaptiveDataParallel is a DistributedDataParallel. Replicas are pods, in which NCCL opens one connection
    # to each neighbour; AWS limits a flow to 5 Gb/s, half of what sockets reach elsewhere.
    "adaptdl": Profile(host=1.5, step_s=50e-3, socket_slowdown=2.0, waits_each_step=True),
    "megatron": _MEGATRON,
    "nanotron": _NANOTRON,
    "llm-foundry": dataclasses.replace(
        _FSDP, fusion=Fusion(losses=True), attention_generation=1, sharding="flat"
    ),
    "fms-fsdp": dataclasses.replace(_FSDP, stops_recomputing=True, checkpoint_hooks=True, sharding="flat"),
    "torchtitan": dataclasses.replace(
        _FSDP,
        fusion=Fusion(norms=True),
        selective_recompute="half",
        splits_root=True,
        cut_product_s=(0.39e-3, 0.24e-3),  # a rank of data 8 x tensor 8 on an H200, benchmarks/ranks_gpu.py
        checkpoint_hooks=True,
        reduces_in_fp32=True,
        optimizers=_MEGATRON.optimizers,
        balances_by="ends",  # first_stage_less_layers = last_stage_less_layers = 1 by default
        chunks=2,
    ),
    "internevo": dataclasses.replace(
        _MEGATRON, overlaps_reduce=True, bucket_bytes=512 * _MIB, tensor_overlap="none", pass_s=0.0
    ),
}


_PROFILES["automodel"] = dataclasses.replace(
    _PROFILES["torchtitan"],
    attention_generation=None,
    splits_root=False,
    syncs_last=True,
    stops_recomputing=True,
)
"""NeMo Automodel: torch's FSDP2 with the layers and the attention of Transformer Engine; gradients of
micro-batches stay on the rank until the last (``prepare_for_grad_accumulation``)."""
_PROFILES["deepspeed"] = Profile(
    optimizers=_MEGATRON.optimizers,
    bucket_bytes=1e9,  # reduce_bucket_size = 5e8 elements, of two bytes
    overlaps_reduce=False,  # overlap_comm is off but for stage 3
    stops_recomputing=True,
    checkpoint_hooks=True,
    clips_gradients=True,
    waits_each_step=True,  # for the norm of gradients, and whether they are finite
)
"""DeepSpeed's ZeRO, with the defaults of its zero/config.py."""


def _habits(job: Job) -> Profile:
    """Name the habits of the framework, whatever the job trains; DeepSpeed switches overlap_comm on with
    stage 3."""
    habits = _PROFILES[job.workload.training.framework]
    if job.workload.training.framework == "deepspeed" and job.plan.shard == "zero3":
        return dataclasses.replace(habits, overlaps_reduce=True)
    return habits


_CAST: dict[str, Literal["bf16", "fp16"]] = {"amp-bf16": "bf16", "amp-fp16": "fp16"}
"""What the computation sees where parameters are cast as they are fetched."""


@functools.lru_cache(maxsize=1024)
def profile(job: Job) -> Profile:
    """The facts of the job's framework, of its training loop where it trains; ``compile`` fuses as torch's
    compiler does."""
    training = job.workload.training
    habits = _habits(job)
    if training.gradient_precision is not None and not habits.keeps_fp32_gradients:
        raise InputError(
            f"training.gradient_precision: {training.framework} adds gradients up as its weights are; "
            "leave it out"
        )
    if job.plan.offload_activations and not job.trains:
        raise InputError('plan.offload_activations: true needs mode = "train"')
    if training.framework == "megatron":
        habits = _megatron(habits, job)
    if training.loss in ("fused", "chunked"):
        habits = dataclasses.replace(habits, fusion=dataclasses.replace(habits.fusion, losses=True))
    if training.fused_accumulation is not None and habits.keeps_fp32_gradients:
        habits = dataclasses.replace(habits, fuses_accumulation=training.fused_accumulation)
    if training.attention is not None:
        merged = training.attention not in ("eager", "sdpa")
        habits = dataclasses.replace(habits, flash_attention=merged)
    if training.attention in ("eager", "cudnn"):
        habits = dataclasses.replace(habits, attention_generation=None)
    habits = dataclasses.replace(habits, tensor_overlap=_tensor_overlap(habits, job))
    if not job.trains:
        habits = dataclasses.replace(habits, step_s=0.0, clips_gradients=False, waits_each_step=False)
    if training.compile:
        habits = dataclasses.replace(
            habits, fusion=_compiled(job), checkpoint_hooks=False, cut_product_s=(0.0, 0.0)
        )
    return _as_planned(habits, job.plan)


def _as_planned(habits: Profile, plan: Plan) -> Profile:
    """Change the habits by what the plan says otherwise of its replicas."""
    overlap = plan.overlap or {}
    if "gradients" in overlap:
        habits = dataclasses.replace(habits, overlaps_reduce=overlap["gradients"])
    if "parameters" in overlap:
        habits = dataclasses.replace(
            habits, overlaps_gather=overlap["parameters"], prefetches=overlap["parameters"]
        )
    return habits


def _tensor_overlap(habits: Profile, job: Job) -> TensorOverlap:
    """Tell how tensor parallelism overlaps: as the plan says, or the framework does: Megatron's recipes
    switch user buffers on, torch's asynchronous tensor parallelism is off. Both need sequence parallelism;
    without its switch Megatron still issues backward collectives ahead, nanotron does not."""
    plan, training, habit = job.plan, job.workload.training, habits.tensor_overlap
    wanted = (plan.overlap or {}).get("tensor")
    if wanted and plan.tensor > 1 and training.framework in _BY_COMPILER and not training.compile:
        raise InputError(
            f"plan.overlap.tensor: true needs training.compile with framework {training.framework!r}, "
            "whose compiler takes products apart"
        )
    if wanted is False:
        return "behind" if habit == "piecewise" else "none"
    if wanted:
        return "piecewise"
    return "behind" if habit == "piecewise" and not plan.sequence_parallel else habit


_BY_COMPILER: tuple[Framework, ...] = ("pytorch", "torchtitan", "automodel", "fms-fsdp", "llm-foundry")
"""Frameworks whose tensor parallelism overlaps by a pass of torch's compiler."""


def _compiled(job: Job) -> Fusion:
    """Say what torch's compiler makes one kernel of. Models of transformers compute their loss themselves;
    with autocast the compiler has cut the graph before it wherever that was seen."""
    training, processors = job.workload.training, job.cluster.groups[0].device.sms
    own_loss = job.workload.model.source == "transformers" and training.mode == "train"
    return dataclasses.replace(
        COMPILED,
        losses=own_loss,
        logits=own_loss and not training.precision.startswith("amp"),
        processors=processors or COMPILED.processors,
    )


_MEGATRON_FP32: dict[str, Any] = {
    "host": 1.1,
    "step_s": 0.0,
    "tensor_overlap": "behind",
    "issues_ahead": False,
}
"""In fp32 it is Megatron-DeepSpeed that is used, whose layers are those of Megatron's earlier code. In its
public runs (sailor, GH200) a micro-batch takes 51 ms and 22 ms for each sample, from 1 to 8 of them: what
the host needs for it and what the device does, one after the other; why is not known."""


_MEGATRON_BUCKET_BYTES = 160e6
"""Of gradients that its distributed optimizer sums up at once."""
_EARLY_HOST = 1.1
"""Factor on the host's time in its early code."""


def _megatron(habits: Profile, job: Job) -> Profile:
    """Complete Megatron's habits: its distributed optimizer (ZeRO 1) is used with overlap; fp16 with full
    recomputation marks its code of 2020 to 2022, which waits for every collective of tensor parallelism."""
    if job.plan.shard != "none":
        habits = dataclasses.replace(
            habits, overlaps_reduce=True, overlaps_gather=True, bucket_bytes=_MEGATRON_BUCKET_BYTES
        )
    if (job.workload.model.config or {}).get("attn_implementation") == "eager":
        habits = dataclasses.replace(habits, flash_attention=False)
    if job.workload.training.precision in ("fp32", "tf32"):
        habits = dataclasses.replace(habits, **_MEGATRON_FP32)
    if _is_early(job):
        habits = dataclasses.replace(
            habits,
            flash_attention=False,
            fuses_softmax=True,
            tensor_overlap="none",
            fuses_accumulation=False,
            host=_EARLY_HOST,
            step_s=0.0,
        )
    return habits


def _is_early(job: Job) -> bool:
    """Whether it is Megatron's code of 2020 to 2022: Megatron-LM 1 to 3, before core 0.1."""
    version = job.workload.training.version
    if version is not None:
        return version >= (1,)
    return job.workload.training.precision == "fp16" and job.plan.recompute == "full"


def logged_stage(job: Job) -> int:
    """The stage of a pipeline whose memory the framework reports; -1 for the fullest one."""
    return {"fullest": -1, "first": 0, "last": job.plan.pipeline - 1}[profile(job).logs_memory_of]


def _brings_its_optimizer(job: Job) -> bool:
    """Whether what is trained is a program, whose code makes the optimizer."""
    if job.workload.model.source != "python":
        return False
    from foretrain.capture.programs.settings import is_program

    try:
        return is_program(job.workload)
    except InputError:  # the file is gone: its graph may be known all the same
        return False


@functools.lru_cache(maxsize=1024)
def as_framework_runs_it(job: Job) -> Job:
    """The job with the optimizer, the attention and the precision that its framework has for it."""
    work, habits = job.workload, profile(job)
    model, training = work.model, work.training
    fused = dict(habits.optimizers).get(training.optimizer)
    if fused is not None and not _brings_its_optimizer(job):
        training = dataclasses.replace(training, optimizer=fused)
    if training.adapter is not None:
        kept = training.adapter.kept_in(training.precision, training.framework)
        training = dataclasses.replace(
            training, adapter=dataclasses.replace(training.adapter, precision=kept)
        )
    in_fp32 = training.adapter is not None and training.adapter.precision == "fp32"
    if habits.keeps_fp32_gradients and training.precision in ("bf16", "fp16", "fp8") and not in_fp32:
        training = dataclasses.replace(training, master_weights=True)
    if habits.casts_shards and job.plan.shard == "zero3" and training.precision in _CAST:
        cast, adapter = _CAST[training.precision], training.adapter
        if adapter is not None:
            adapter = dataclasses.replace(adapter, precision=cast, base=None)
        training = dataclasses.replace(training, precision=cast, adapter=adapter, master_weights=True)
    if training.framework == "torchtitan" and job.plan.shard == "zero3" and training.precision == "fp8":
        training = dataclasses.replace(training, master_weights=True)  # training.dtype is float32
    own = habits.flash_attention is False and training.framework == "megatron" and model.config is not None
    chosen = training.attention or ("eager" if own else None)
    if chosen in ("eager", "sdpa"):  # others are merged in the graph, whatever the model writes out
        model = dataclasses.replace(model, config={**(model.config or {}), "attn_implementation": chosen})
    return dataclasses.replace(job, workload=dataclasses.replace(work, model=model, training=training))


def attention_factor(habits: Profile, capability: float) -> float:
    """Time of the framework's attention beside the fastest one that is known for the device.

    FlashAttention reaches 25 to 40 % of an A100's rate and its second version 50 to 73 % (Dao 2023, arXiv
    2307.08691). The second one is 1.5 to 2 times slower on an H100 than later kernels (Shah et al. 2024,
    arXiv 2407.08608), and 1.75 times slower than cuDNN's on an H200 (``data/h200_fsdp.jsonl``, context 4).
    """
    if habits.attention_generation is None:
        return 1.0
    first = _FIRST_FLASH if habits.attention_generation == 1 else 1.0
    return first * (_SECOND_FLASH_ON_HOPPER if capability >= _HOPPER else 1.0)


_FIRST_FLASH, _SECOND_FLASH_ON_HOPPER = 1.8, 1.75
_HOPPER = 9.0
"""Its compute capability."""
