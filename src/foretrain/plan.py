"""Describes how a model is spread over devices: Plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from foretrain.errors import InputError, invalid, unknown

Shard = Literal["none", "zero1", "zero2", "zero3"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipe"]
Recompute = Literal["none", "selective", "operators", "full"]
Dispatcher = Literal["alltoall", "allgather", "deepep", "hybridep"]
Choice = Literal["random", "round-robin"]
ContextExchange = Literal["ring", "alltoall", "allgather"]
Overlap = Literal["gradients", "parameters", "tensor", "experts", "messages"]
RecomputedModule = Literal[
    "attention", "norms", "mlp", "experts", "expert_activation", "shared_experts", "mla_up"
]

_MOST_TO_DIVIDE = 10**10
"""Up to which a number is divided by all below its root: some milliseconds."""
TENSOR_ROLES = ("column", "row", "vocab", "replicate")
"""How a layer is cut under tensor parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Degrees of parallelism and what goes with them; the default is plain data parallelism over all
    devices."""

    data: int | None = None
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    shard: Shard = "none"
    micro_batch: int | None = None
    schedule: Schedule = "1f1b"
    recompute: Recompute = "none"
    recompute_every: int = 1
    """Of so many layers the first is recomputed; the others keep their activations."""
    sequence_parallel: bool = False
    tensor_plan: Mapping[str, str] | None = field(default=None, hash=False)
    """How layers are split under tensor parallelism, by patterns of their names: column, row, vocab or
    replicate."""
    virtual_stages: int | None = None
    """Pieces of the model on each rank, for ``schedule = "interleaved"`` or ``"zero-bubble"``."""
    balance: Literal["even", "speed"] | None = None
    """How a batch, or the layers of a pipeline, are dealt out to groups that differ: alike or by their speed;
    None: layers by speed, a batch alike."""
    offload: bool = False
    """The optimizer and its state live on the host."""
    replicate: int = 1
    """Copies of a model that is sharded over the others of ``data`` (HSDP)."""
    reshard: bool | int | None = None
    """Whether ZeRO 3 lets go of gathered parameters after the forward pass, or keeps them sharded over so
    many neighbours; None for what the framework does."""
    reduce_precision: Literal["fp32", "bf16"] | None = None
    """What gradients are in on the network; None for what the framework does."""
    fp8_gather: bool | None = None
    """Whether parameters travel in fp8 where products multiply them so; None: they do not."""
    expert_tensor: int | None = None
    """Degree to which each expert is cut; None for what the framework does."""
    expert_capacity: float | None = None
    """Rows that an expert takes at most, as a multiple of the mean; None where none are dropped."""
    expert_imbalance: float | None = None
    """Rows of the fullest rank of an expert group over the mean; None for 1, with intervals that are open to
    what trainings show."""
    dispatcher: Dispatcher | None = None
    """How tokens travel to their experts; None for what the framework does."""
    routing: Choice | None = None
    """Which experts tokens choose: any alike (also None), or neighbours one token after another, as
    benchmarks force it (torchtitan's ``moe_force_load_balance``, Automodel's ``fake_balanced_gate``)."""
    overlap: Mapping[str, bool] | None = field(default=None, hash=False)
    """What runs beside computation and what does not, where it differs from the framework's habit."""
    registered_buffers: bool | None = None
    """Whether collectives work in place on buffers that NCCL was told of (its user buffers, torch's symmetric
    memory) and so take few processors from computation; None: they do not."""
    recompute_modules: tuple[str, ...] = ()
    """Parts of a layer that are computed again, with ``recompute = "selective"``."""
    stages: tuple[int, ...] | None = None
    """Layers of each stage of a pipeline, or of each of their chunks in the order of the model."""
    context_exchange: ContextExchange | None = None
    """How context parallelism brings queries to all keys; None for what the framework does."""
    offload_activations: bool = False
    """What layers keep for the backward pass lies in host memory meanwhile."""
    servers: int = 0
    """Parameter servers beside the data-parallel workers; 0 for all-reduce."""
    asynchronous: bool = False
    """Workers of a parameter server do not wait for one another."""

    def __post_init__(self) -> None:
        for name in (
            "data", "tensor", "pipeline", "context", "expert", "micro_batch", "virtual_stages",
            "recompute_every", "replicate", "expert_tensor", "expert_capacity", "expert_imbalance",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise invalid(f"plan.{name}", value, "1 or more")
        self._check_replicas()
        self._check_recomputation()
        for name in self.overlap or {}:
            if name not in get_args(Overlap):
                raise unknown(f"plan.overlap.{name}", name, get_args(Overlap))
        self._check_exchange()
        if (self.overlap or {}).get("tensor") and self.tensor > 1 and not self.sequence_parallel:
            raise InputError(
                "plan.overlap.tensor: true needs sequence_parallel = true, whose collectives run in pieces"
            )
        if self.stages is not None and (min(self.stages, default=0) < 0 or len(self.stages) < self.pipeline):
            raise invalid("plan.stages", list(self.stages), f"at least {self.pipeline} counts of layers")
        if self.servers < 0:
            raise invalid("plan.servers", self.servers, "0 (all-reduce) or more")
        if self.asynchronous and not self.servers:
            raise InputError("plan.asynchronous: true needs parameter servers; give plan.servers")
        if self.servers and (self.shard != "none" or self.offload):
            held = "plan.offload" if self.offload else f"plan.shard = {self.shard!r}"
            raise InputError(
                f"plan.servers: {self.servers} hold the optimizer state already; leave out {held}"
            )
        for pattern, role in (self.tensor_plan or {}).items():
            if role not in TENSOR_ROLES:
                raise unknown(f"plan.tensor_plan.{pattern}", role, TENSOR_ROLES)
        if self.virtual_stages is not None and self.schedule not in ("interleaved", "zero-bubble"):
            raise InputError(
                f"plan.virtual_stages: {self.virtual_stages} needs "
                f"schedule = 'interleaved' or 'zero-bubble', not {self.schedule!r}"
            )

    def _check_recomputation(self) -> None:
        if self.recompute_every > 1 and self.recompute == "none":
            raise InputError(
                f"plan.recompute_every: {self.recompute_every} needs what is recomputed; give plan.recompute"
            )
        for name in self.recompute_modules:
            if name not in get_args(RecomputedModule):
                raise unknown("plan.recompute_modules", name, get_args(RecomputedModule))
        if self.recompute_modules and self.recompute != "selective":
            raise InputError(
                f"plan.recompute_modules: {', '.join(self.recompute_modules)} need "
                f"recompute = 'selective', not {self.recompute!r}"
            )

    def exchange_of_context(self, framework: str) -> ContextExchange:
        """Say how context parallelism brings queries to all keys, as the plan says or its framework does:
        Megatron passes keys and values around (``cp_comm_type`` p2p), torch gathers them."""
        return self.context_exchange or ("ring" if framework in _RINGS else "allgather")

    def _check_replicas(self) -> None:
        """Check what replicas share and exchange."""
        if self.replicate > 1 and self.shard == "none":
            raise InputError(
                f"plan.replicate: {self.replicate} copies of a model that is not sharded; give plan.shard"
            )
        if self.reshard is not None and self.shard != "zero3":
            raise InputError(f"plan.reshard: {_word(self.reshard)} is of shard = 'zero3', not {self.shard!r}")
        if self.reshard is not None and not isinstance(self.reshard, bool) and self.reshard < 2:
            raise invalid("plan.reshard", self.reshard, "true, false, or 2 or more neighbours")
        if self.context_exchange is not None and self.context == 1:
            raise InputError(
                f"plan.context_exchange: {self.context_exchange!r} needs plan.context of 2 or more"
            )

    def _check_exchange(self) -> None:
        """Check that what brings tokens to experts has a group of ranks that hold them; running it beside
        another micro-batch needs one that is there."""
        if self.dispatcher is not None and self.expert == 1 and self.tensor == 1:
            raise InputError(
                f"plan.dispatcher: {self.dispatcher!r} brings tokens to other ranks; give plan.expert"
            )
        if not (self.overlap or {}).get("experts"):
            return
        if self.expert == 1:
            raise InputError("plan.overlap.experts: true, but no tokens travel; give plan.expert")
        if self.recompute == "full":
            raise InputError("plan.overlap.experts: true does not go with plan.recompute = 'full'")
        if self.pipeline > 1 and self.schedule in ("gpipe", "1f1b"):
            raise InputError(
                f"plan.overlap.experts: true with plan.pipeline = {self.pipeline} needs schedule = "
                f"'interleaved', not {self.schedule!r}"
            )

    def expert_width(self, framework: str, world: int) -> int:
        """Ranks that share each expert: as the plan says, else as the framework has it.

        Without an expert group, the tensor team cuts experts as it does other layers. Megatron goes on so
        with one (``expert_tensor_parallel_size`` defaults to the tensor degree) where there are devices for
        it; torchtitan keeps experts whole then.
        """
        if self.expert_tensor is not None:
            return self.expert_tensor
        enough = world % (self.pipeline * self.expert * self.tensor) == 0
        follows = self.expert == 1 or (framework in _EXPERTS_FOLLOW_TENSOR and enough)
        return self.tensor if follows else 1


_RINGS = ("megatron", "internevo")
"""Frameworks whose context parallelism is a ring unless they are told otherwise."""


def _word(value: bool | int) -> str:
    return str(value).lower()


_EXPERTS_FOLLOW_TENSOR = ("megatron", "internevo")
"""Frameworks that cut experts as the tensor team cuts other layers unless they are told otherwise."""


def divisors(number: int) -> list[int]:
    """List what divides a number, in rising order; of one beyond ``_MOST_TO_DIVIDE`` its powers of two and
    what is left when they are taken out of it."""
    if number <= _MOST_TO_DIVIDE:
        small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    else:
        small = [1]
        while number % (2 * small[-1]) == 0:
            small.append(2 * small[-1])
    return sorted({*small, *(number // one for one in small)})
