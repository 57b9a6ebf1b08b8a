"""Names what each framework can do with a plan, so that nothing is proposed that it cannot run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from foretrain.errors import unknown
from foretrain.plan import Recompute, Schedule, Shard
from foretrain.workload import Framework

Degree = Literal["tensor", "pipeline", "context", "expert"]
DEGREES: tuple[Degree, ...] = get_args(Degree)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ability:
    """Lists what a target, a framework with its usual launcher, can run."""

    target: str
    framework: Framework
    degrees: frozenset[Degree] = frozenset()
    """Ways of cutting a model that it has beside replicas and their shards."""
    shards: tuple[Shard, ...] = ("none",)
    without_pipeline: tuple[Shard, ...] = ()
    """Of these, those that are planned without pipelines alone."""
    schedules: tuple[Schedule, ...] = ("1f1b",)
    recomputes: tuple[Recompute, ...] = ("none", "full")
    replicates: bool = False
    """Copies of a model that is sharded over the others (HSDP)."""
    reshards: tuple[bool | None, ...] = (None,)
    """Whether ZeRO 3 lets go of parameters between passes; None for its habit."""
    offloads: bool = False
    cuts_sequences: bool = False
    """Sequence parallelism beside tensor parallelism."""
    expert_widths: Literal["one", "tensor", "any"] = "one"
    """Ranks that share an expert: one, as many as a tensor team, or either."""
    language_models_only: bool = False
    """It has models of its own, which the job's must be one of."""
    reasons: Mapping[Degree, str] = field(default_factory=dict, hash=False)
    """Why it lacks what it lacks, by degree."""

    def shards_in(self, pipeline: int) -> tuple[Shard, ...]:
        """List what may be sharded in a pipeline of so many stages."""
        return tuple(one for one in self.shards if pipeline == 1 or one not in self.without_pipeline)


_ALL: frozenset[Degree] = frozenset(DEGREES)
_NO_PIPELINE = "has no pipelines; megatron and torchtitan do"
_NO_EXPERTS = "keeps the experts of a layer together; megatron and torchtitan deal them out"

_MEGATRON = Ability(
    target="megatron",
    framework="megatron",
    degrees=_ALL,
    shards=("zero1", "zero3"),  # its distributed optimizer moves what all-reduce does, and hides it
    without_pipeline=("zero3",),  # Megatron-FSDP
    schedules=("1f1b", "interleaved"),
    recomputes=("none", "selective", "full"),
    offloads=True,
    cuts_sequences=True,
    expert_widths="any",
    language_models_only=True,
)
_TORCHTITAN = Ability(
    target="torchtitan",
    framework="torchtitan",
    degrees=_ALL,
    shards=("zero3",),
    schedules=("1f1b", "interleaved", "zero-bubble", "zbv"),
    recomputes=("none", "operators", "full"),
    replicates=True,
    reshards=(None, False),
    cuts_sequences=True,
    language_models_only=True,
)
_FSDP2 = Ability(
    target="fsdp2",
    framework="pytorch",
    degrees=frozenset({"tensor"}),
    shards=("none", "zero3"),  # zero1 where it is asked for: no run of ours tells how well it does
    recomputes=("none", "full"),
    replicates=True,
    reshards=(None, False),
    reasons={
        "pipeline": f"fsdp2 {_NO_PIPELINE}",
        "context": "fsdp2 cuts no sequences; accelerate, megatron and torchtitan do",
        "expert": f"fsdp2 {_NO_EXPERTS}",
    },
)
_ACCELERATE = Ability(
    target="accelerate",
    framework="pytorch",
    degrees=frozenset({"tensor", "context"}),
    shards=("none", "zero3"),
    recomputes=("none", "full"),
    replicates=True,
    reshards=(None, False),
    reasons={"pipeline": f"accelerate {_NO_PIPELINE}", "expert": f"accelerate {_NO_EXPERTS}"},
)
_DEEPSPEED = Ability(
    target="deepspeed",
    framework="deepspeed",
    shards=("zero1", "zero2", "zero3"),
    recomputes=("none", "full"),
    offloads=True,
    reasons={
        "tensor": "deepspeed's ZeRO is planned without tensor parallelism; megatron and torchtitan have it",
        "pipeline": "deepspeed's pipelines need a model that is written as one; megatron and torchtitan "
        "cut any",
        "context": "deepspeed's sequence parallelism is not planned; megatron and torchtitan have it",
        "expert": f"deepspeed {_NO_EXPERTS}",
    },
)
_NANOTRON = Ability(
    target="nanotron",
    framework="nanotron",
    degrees=frozenset({"tensor", "pipeline"}),
    shards=("none", "zero1"),
    recomputes=("none", "full"),
    cuts_sequences=True,
    language_models_only=True,
    reasons={"context": "nanotron cuts no sequences", "expert": f"nanotron {_NO_EXPERTS}"},
)
_AUTOMODEL = Ability(
    target="automodel",
    framework="automodel",
    degrees=_ALL,
    shards=("zero3",),
    schedules=("1f1b", "interleaved"),
    recomputes=("none", "full"),
    replicates=True,
    cuts_sequences=True,
    language_models_only=True,
)


def _sharded_only(framework: Framework) -> Ability:
    reasons = dict.fromkeys(DEGREES, f"{framework} shards and replicates; it cuts no layers")
    return Ability(
        target=framework,
        framework=framework,
        shards=("zero3",),
        recomputes=("none", "selective", "full"),
        reasons=reasons,
    )


TARGETS: Mapping[str, Ability] = {
    ability.target: ability
    for ability in (
        _MEGATRON,
        _TORCHTITAN,
        _FSDP2,
        _DEEPSPEED,
        _ACCELERATE,
        _AUTOMODEL,
        _NANOTRON,
        _sharded_only("llm-foundry"),
        _sharded_only("fms-fsdp"),
    )
}
"""By the name that ``--framework`` takes."""
_BY_FRAMEWORK: Mapping[Framework, str] = {"pytorch": "fsdp2", "adaptdl": "fsdp2", "internevo": "megatron"}
"""What plans jobs of frameworks that are no target themselves."""


def ability_of(target: str | None, framework: Framework) -> Ability:
    """Find the abilities of a target by its name, else of the job's framework."""
    name = target or _BY_FRAMEWORK.get(framework, framework)
    if name == "pytorch":
        name = "fsdp2"
    if name not in TARGETS:
        raise unknown("framework", name, TARGETS)
    return TARGETS[name]
