"""Reads names of optimizers, precisions, shardings and the like as people spell them elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from foretrain.errors import InputError, unknown


def plain(text: object) -> str:
    """A spelling without its case, its separators and the module it is written in.

    >>> plain("torch.optim.AdamW"), plain("bf16_mixed"), plain(" ZeRO-3 ")
    ('adamw', 'bf16-mixed', 'zero-3')
    """
    last = re.sub(r"^[a-z][\w.]*\.(?=[a-z_])", "", str(text).strip().lower())
    return re.sub(r"[\s_-]+", "-", last).strip("-")


class Spellings:
    """The names of a field, what else each is called, and what cannot be taken for one of them."""

    def __init__(
        self, names: Iterable[str], also: Mapping[str, str], unclear: Mapping[str, str] | None = None
    ) -> None:
        """``also`` has other spellings behind each name, ``unclear`` what to say of spellings; both split at
        blanks."""
        self.names = tuple(names)
        self._meant = {plain(name): name for name in self.names}
        for name, spellings in also.items():
            self._meant |= dict.fromkeys(spellings.split(), name)
        self._unclear = {
            spelling: what for spellings, what in (unclear or {}).items() for spelling in spellings.split()
        }

    def __call__(self, value: Any, where: str) -> str:
        """The field's own name for what is meant, in the shape of a parser of ``schema``."""
        if not isinstance(value, str | int) or value in self.names:
            return self._known(value, where)
        spelled = plain(value)
        if spelled in self._unclear:
            raise InputError(f"{where}: {value!r} {self._unclear[spelled]}")
        return self._meant.get(spelled) or self._known(value, where)

    def meant(self, value: str) -> str | None:
        """The field's own name for what is meant; None where it is none."""
        return self._meant.get(plain(value))

    def _known(self, value: Any, where: str) -> str:
        if not isinstance(value, str) or value not in self.names:
            raise unknown(where, value, self.names)
        return value


SOURCES = {
    "transformers": "hf huggingface hugging-face",
    "torchvision": "torchvision.models models tv",
    "timm": "pytorch-image-models",
    "python": "py",
}

COMPILE_MODES = {
    "default": "true inductor",
    "reduce-overhead": "cudagraphs cuda-graphs",
    "max-autotune": "autotune",
}

MODES = {
    "train": "training fit pretrain pretraining finetune finetuning fine-tuning",
    "infer": "inference eval evaluate evaluation predict prediction forward serve serving",
}

PRECISIONS = {
    "fp32": "float32 float f32 32 32-true single full fp32-true no none",
    "tf32": "tensorfloat32 tensorfloat-32",
    "bf16": "bfloat16 bf16-true bf16-pure pure-bf16",
    "fp16": "float16 half f16 16-true fp16-true fp16-pure pure-fp16",
    "amp-bf16": "bf16-mixed mixed-bf16 bf16-amp bfloat16-mixed mixed-bfloat16 autocast-bf16 bf16-autocast",
    "amp-fp16": "amp 16 16-mixed fp16-mixed mixed-fp16 fp16-amp float16-mixed mixed-float16 autocast-fp16 "
    "fp16-autocast native-amp torch-amp",
    "fp8": "float8 fp8-hybrid fp8-e4m3 e4m3 fp8-mixed bf16-with-fp8-mixed transformer-engine",
}
"""``amp`` alone is what torch.autocast takes on CUDA without a dtype; ``16`` what Lightning takes."""

FP8 = {
    "tensorwise": "tensor per-tensor dynamic",
    "rowwise": "row per-row axiswise",
    "rowwise-gw-hp": "rowwise-with-gw-hp",
    "delayed": "delayed-scaling hybrid fp8-ds",
    "current": "current-scaling fp8-cs",
    "blockwise": "block per-block deepseek fp8-sc subchannel",
    "mxfp8": "mx fp8-mx",
    "nvfp4": "nv-fp4 fp4",
}

UNCLEAR_PRECISIONS = {
    "mixed mixed-precision autocast automatic": "may be either; give amp-bf16 or amp-fp16",
    "int8 8bit 8-bit int4 mxfp4": "is not modelled; training runs in "
    "fp32, tf32, amp-bf16, amp-fp16, bf16, fp16 or fp8",
    "mxfp8": "is a way of scaling fp8; give precision fp8 and fp8 = 'mxfp8'",
    "nvfp4 fp4": "is a way of casting for products; give precision fp8 and fp8 = 'nvfp4'",
    "4bit 4-bit nf4 qlora": "is what frozen weights are kept in beside adapters; give adapter = 'qlora:16'",
    "fp64 float64 double 64 64-true": "is not modelled; fp32 is the widest",
}

OPTIMIZERS = {
    "sgd": "momentum sgd-momentum momentum-sgd sgdm nesterov sgd-nesterov",
    "sgd-plain": "plain-sgd vanilla-sgd sgd-vanilla sgd-no-momentum",
    "adam": "adam-torch",
    "adamw": "adam-w adamw-torch adamw-hf adamw-torch-foreach torch-adamw decoupledadamw decoupled-adamw",
    "adam-fused": "adam-torch-fused",
    "adamw-fused": "fused-adamw adamw-torch-fused adamw-apex-fused fusedadamw fusedadam fused-adam",
    "lamb": "fusedlamb fused-lamb",
    "adamw-8bit": "adamw8bit adamw-bnb-8bit paged-adamw-8bit pagedadamw8bit 8bit-adamw",
    "rmsprop": "rms-prop",
    "adafactor": "ada-factor",
    "adagrad": "ada-grad",
    "adadelta": "ada-delta",
}
"""FusedAdam of DeepSpeed and of apex decays weights as AdamW does unless it is told otherwise."""

_OTHER_OPTIMIZERS = (
    "paged-adamw paged-adamw-32bit adam8bit adam-8bit "
    "lion lion-8bit lion-32bit paged-lion-8bit paged-lion-32bit sophia galore galore-adamw apollo-adamw "
    "shampoo soap schedule-free-adamw"
)
UNCLEAR_OPTIMIZERS = {
    _OTHER_OPTIMIZERS: "is not modelled; adamw keeps two fp32 states for each weight, adafactor and sgd less",
    "fused": "may be either; give adam-fused or adamw-fused",
}


def _stages(stage: int) -> str:
    """List what a stage of ZeRO is called by those who count them."""
    counted = ("zero", "zero-", "zero-stage-", "zero-stage", "stage-", "stage", "deepspeed-stage-", "")
    return " ".join(f"{prefix}{stage} deepspeed-{prefix}{stage}" for prefix in counted)


SHARDS = {
    "none": f"{_stages(0)} ddp distributeddataparallel distributed-data-parallel no-shard noshard multi-gpu "
    "replicate replicated ddp-find-unused-parameters-true off false",
    "zero1": f"{_stages(1)} zero-redundancy-optimizer zeroredundancyoptimizer distributed-optimizer "
    "use-distributed-optimizer optim",
    "zero2": f"{_stages(2)} shard-grad-op optim-grads fsdp-shard-grad-op",
    "zero3": f"{_stages(3)} fsdp fsdp1 fsdp2 fully-shard full-shard fully-sharded fullyshardeddataparallel "
    "fully-sharded-data-parallel full-shard-auto-wrap fsdp-full-shard optim-grads-params megatron-fsdp "
    "torch-fsdp2",
}

_HYBRID = "hybrid-shard hybrid-shard-zero2 hsdp fsdp-hybrid-shard zero-plus-plus zero++ mics"
_OFFLOADED = (
    "deepspeed-stage-1-offload deepspeed-stage-2-offload deepspeed-stage-3-offload zero2-offload "
    "zero3-offload zero-offload"
)
UNCLEAR_SHARDS = {
    "deepspeed zero": "does not say which stage; give zero1, zero2 or zero3",
    _HYBRID: "is not modelled: states are sharded over all data-parallel devices; give zero2 or zero3",
    _OFFLOADED: "is two fields; give zero2 or zero3, and offload = true",
    "true": "does not say how; give zero1, zero2 or zero3 (FSDP)",
    "dp dataparallel data-parallel": "is torch's data parallelism in one process, which is not modelled; "
    "none is DDP",
}

SCHEDULES = {
    "gpipe": "schedulegpipe g-pipe",
    "1f1b": "schedule1f1b one-forward-one-backward pipedream pipedream-flush pipedream-1f1b non-interleaved",
    "interleaved": "interleaved1f1b interleaved-1f1b scheduleinterleaved1f1b interleaved-pipeline vpp",
    "zero-bubble": "zb zb1p zbh1 zb-h1 interleavedzerobubble scheduleinterleavedzerobubble",
    "zbv": "zb-v zbvzerobubble schedulezbvzerobubble",
    "dualpipe": "dual-pipe",
}

_OTHER_SCHEDULES = "dualpipev scheduledualpipev loopedbfs scheduleloopedbfs chimera"
UNCLEAR_SCHEDULES = {
    _OTHER_SCHEDULES: "is not modelled; give gpipe, 1f1b, interleaved, zero-bubble, zbv or dualpipe"
}

RECOMPUTE = {
    "none": "no off false never disabled",
    "selective": "recompute-activations selective-ac selective-activation-checkpointing sac core-attn "
    "core-attention",
    "operators": "op ops operator per-op per-op-sac every-second-product",
    "full": "true yes on gradient-checkpointing activation-checkpointing checkpoint checkpointing fullac "
    "full-ac uniform block all",
}

FRAMEWORKS = {
    "pytorch": "torch pytorch-lightning lightning transformers accelerate huggingface hf trainer trl axolotl "
    "llama-factory llamafactory fsdp2 unsloth",
    "megatron": "megatron-lm megatronlm megatron-core mcore megatron-bridge bridge nemo nemo-megatron "
    "nemo2 primus",
    "llm-foundry": "llmfoundry mosaicml composer mosaicml-llm-foundry",
    "torchtitan": "torch-titan",
    "internevo": "intern-evo",
    "fms-fsdp": "fms",
    "deepspeed": "deep-speed zero megatron-deepspeed",
    "automodel": "nemo-automodel",
}
