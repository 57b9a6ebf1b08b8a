"""Lists the plans that a framework can run on a cluster: how layers are cut, and all that goes with a cut."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretrain.cluster import Group
from foretrain.errors import InputError, first_line, unknown
from foretrain.job import Job
from foretrain.placing import group_sizes
from foretrain.plan import Plan, Schedule, Shard
from foretrain.planner.abilities import Ability, Degree
from foretrain.planner.facts import Facts

AXES = (
    "tensor", "pipeline", "context", "expert", "expert_tensor", "micro_batch", "shard", "replicate",
    "reshard", "recompute", "schedule", "virtual_stages", "offload", "balance",
)  # fmt: skip
"""Fields of a plan that are searched; ``data`` is what is left of the devices."""
HELD = (*AXES, "data")
"""What a search can be held to."""
ACCUMULATION = "accumulation"
"""The same of the micro-batches of a step, which follow from the others."""
LONG_SEQUENCE = 8_192
"""Tokens of a sample from which on ranks that share a sequence are looked at from the start; for shorter ones
only where nothing else fits."""
_MOST_STAGES = 64
_MOST_CHUNKS = 8
_WIDEST_TEAM = 8
"""Devices of a tensor team, where an NVLink domain reaches over several nodes."""
_MOST_SAMPLES, _MOST_TOKENS = 512, 65_536
"""Of a micro-batch."""
_USUAL_TOKENS = 8_192
"""Of a micro-batch that a search begins with."""
_USUAL_SAMPLES = 32
"""The same of models whose samples are no sequences."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cut:
    """Says how the layers of a model are cut and what a rank handles at once: what its graph depends on."""

    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    micro_batch: int = 1

    def is_leaner_than(self, other: Cut) -> bool:
        """Whether a rank holds less, of two that are one step apart.

        >>> Cut(tensor=2).is_leaner_than(Cut()), Cut(micro_batch=2).is_leaner_than(Cut())
        (True, False)
        """
        degrees = ("tensor", "context", "expert", "expert_tensor")
        return self.micro_batch < other.micro_batch or any(
            getattr(self, name) > getattr(other, name) for name in degrees
        )

    @property
    def words(self) -> str:
        names = {
            name: getattr(self, name)
            for name in ("tensor", "context", "expert", "expert_tensor")
            if getattr(self, name) > 1
        }
        return ", ".join(
            f"{name} {value}" for name, value in {**names, "micro-batch": self.micro_batch}.items()
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Space:
    """The plans of a job on its cluster."""

    job: Job
    """With any plan."""
    own: Plan = field(default_factory=Plan)
    """What is not searched is taken from here."""
    ability: Ability
    facts: Facts
    allowed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values that single axes are held to."""
    offloads: bool = False
    """Whether an optimizer on the host is among the plans."""
    pipelines_only: bool = False
    """Whether plans without a pipeline are those of another order of the same groups."""
    refused: Counter[str] = field(default_factory=Counter)
    """Why plans are none, and how many."""

    def __post_init__(self) -> None:
        for name in self.allowed:
            if name not in (*HELD, ACCUMULATION):
                raise unknown("plan", name, HELD, "an axis of the search; these are")

    def job_with(self, plan: Plan) -> Job:
        return dataclasses.replace(self.job, plan=plan)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Devices of each group, which teams and stages must divide."""
        return group_sizes(self.job.cluster)

    @property
    def is_mixed(self) -> bool:
        return len(self.sizes) > 1

    # Cuts

    def cuts(self, *, contexts: bool = False) -> list[Cut]:
        """List all cuts that divide what they must; ``contexts``: also of short sequences."""
        all_cuts = [
            dataclasses.replace(layers, micro_batch=micro)
            for tensor in self._tensors()
            for context in self._contexts(every=contexts)
            for expert, width in self._experts(tensor)
            if self._is_legal(
                layers := Cut(tensor=tensor, context=context, expert=expert, expert_tensor=width)
            )
            for micro in self._micro_batches(layers)
        ]
        return sorted(set(all_cuts))

    def neighbours(self, *, contexts: bool = False) -> dict[Cut, list[Cut]]:
        """List all cuts, each with those one step away."""
        cuts = self.cuts(contexts=contexts)
        silent = dataclasses.replace(self, refused=Counter())
        return neighbours(cuts, lambda cut: {samples for _, _, samples in silent._replicas(cut)})

    def first(self, cuts: Sequence[Cut]) -> list[Cut]:
        """List the cuts that a search begins with: layers uncut and cut over half a node, experts over a
        node, with the micro-batch nearest to a usual one; and of the first of them the one without
        accumulation, which is what a job is forecast with where nothing is planned."""
        in_node = min(group.devices_per_node for group in self.job.cluster.groups)
        micro = self._usual_micro_batch()
        usual = [
            Cut(tensor=tensor, expert=min(in_node, self.facts.experts or 1), micro_batch=micro)
            for tensor in (1, max(1, in_node // 2))
        ]
        nearest = [min(cuts, key=lambda cut: _distance(cut, wanted)) for wanted in usual]
        whole = self._without_accumulation(nearest[0])
        return list(dict.fromkeys([*nearest, whole] if whole in cuts else nearest))

    def _without_accumulation(self, cut: Cut) -> Cut:
        """Let a replica handle all its samples at once, where each is a team of its own."""
        batch, world = self.job.workload.training.global_batch, self.job.cluster.world_size
        return dataclasses.replace(cut, micro_batch=batch * cut.tensor * cut.context // world)

    def _usual_micro_batch(self) -> int:
        sequence = self.facts.sequence
        return max(1, _USUAL_TOKENS // sequence) if sequence else _USUAL_SAMPLES

    def _tensors(self) -> Sequence[int]:
        in_each = [set(_teams_in(group)) for group in self.job.cluster.groups]
        return self._degrees("tensor", sorted(set.intersection(*in_each)))

    def _contexts(self, *, every: bool) -> Sequence[int]:
        sequence = self.facts.sequence or 0
        wanted = every or sequence >= LONG_SEQUENCE
        return self._degrees("context", _powers(64) if wanted and sequence else [1])

    def _experts(self, tensor: int) -> Iterator[tuple[int, int]]:
        count = self.facts.experts or 1
        degrees = self._degrees("expert", [n for n in _powers(count) if count % n == 0])
        for expert in degrees:
            widths = {"one": (1,), "tensor": (tensor,), "any": (1, tensor)}[self.ability.expert_widths]
            if count == 1 or expert == 1:
                widths = (tensor,) if count > 1 else (1,)
            for width in dict.fromkeys(self.allowed.get("expert_tensor", widths)):
                yield expert, width

    def _micro_batches(self, layers: Cut) -> set[int]:
        """Sizes of micro-batches that replicas of layers so cut deal their samples out to: those that are
        held, else all that divide them up to a size, and all samples at once where there is no pipeline."""
        most = min(_MOST_SAMPLES, max(1, _MOST_TOKENS // (self.facts.sequence or 1)))
        sizes: set[int] = set()
        for pipeline, data, samples in self._replicas(layers):
            if "micro_batch" in self.allowed:
                sizes |= {micro for micro in self.allowed["micro_batch"] if self._divides(data, micro)}
            elif ACCUMULATION in self.allowed:
                passes = self.allowed[ACCUMULATION]
                sizes |= {samples // count for count in passes if samples % count == 0}
            else:
                sizes |= {micro for micro in range(1, min(most, samples) + 1) if samples % micro == 0}
                sizes |= {samples} if pipeline == 1 else set()
        return sizes

    def _replicas(self, cut: Cut) -> Iterator[tuple[int, int, int]]:
        """Stages of a pipeline that a cut may have, with how many replicas there are then and how many
        samples of a batch each of them has."""
        world, batch = self.job.cluster.world_size, self.job.workload.training.global_batch
        for pipeline in self._pipelines(cut):
            data = world // (cut.tensor * cut.context * pipeline)
            if data not in self.allowed.get("data", (data,)):
                continue
            if batch % data == 0:
                yield pipeline, data, batch // data
            else:
                self._no(f"data {data} does not divide the batch of {batch}")

    def _divides(self, data: int, micro: int) -> bool:
        """Whether a batch is so many micro-batches of each replica."""
        batch = self.job.workload.training.global_batch
        if batch % (data * micro):
            return self._no(f"data {data} x micro-batch {micro} does not divide the batch of {batch}")
        return True

    def _degrees(self, name: Degree, usual: Sequence[int]) -> Sequence[int]:
        """The values of a degree: as they are held, else those that are usual where the framework has it."""
        held = self.allowed.get(name)
        if name not in self.ability.degrees or (self.ability.language_models_only and not self._has_layers()):
            if held and max(held) > 1:
                why = self.ability.reasons.get(name, f"{self.ability.target} does not have it for this model")
                raise InputError(f"plan.{name}: {max(held)}: {why}")
            return [1]
        return list(held) if held else usual

    def _has_layers(self) -> bool:
        return self.job.workload.model.source == "transformers"

    def _is_legal(self, cut: Cut) -> bool:
        facts = self.facts
        if facts.heads is not None and facts.heads % cut.tensor:
            return self._no(f"tensor {cut.tensor} does not divide {facts.heads} attention heads")
        if cut.tensor > 1 and not self._divides_tokens(cut):
            return False
        if cut.context > 1 and facts.sequence and facts.sequence % (2 * cut.context):
            return self._no(f"context {cut.context} does not divide half of {facts.sequence} tokens")
        least = max(cut.tensor * cut.context, cut.expert * cut.expert_tensor)
        for devices in self.sizes:
            if devices % (cut.tensor * cut.context) or devices % (cut.expert * cut.expert_tensor):
                terms = f"max(tensor x context, expert x expert_tensor) = {least}"
                return self._no(f"{terms} does not divide {devices} devices")
        if cut.expert > 1 and cut.tensor > 1 and cut.expert_tensor == 1 and not self.ability.cuts_sequences:
            return self._no("experts beside tensor teams need sequence parallelism")
        return True

    def _divides_tokens(self, cut: Cut) -> bool:
        tokens = (self.facts.sequence or 0) // cut.context
        if self.ability.cuts_sequences and tokens % cut.tensor:
            return self._no(f"tensor {cut.tensor} does not divide {tokens} tokens for sequence parallelism")
        return True

    # Plans

    def plans(self, cut: Cut) -> Iterator[Plan]:
        """The plans of a cut, each with its number of replicas."""
        for pipeline, data, samples in self._replicas(cut):
            if samples % cut.micro_batch:
                continue
            passes = samples // cut.micro_batch
            if passes not in self.allowed.get(ACCUMULATION, (passes,)):
                continue
            for (schedule, chunks), sharding, recompute, offload, balance in itertools.product(
                self._schedules(pipeline, passes),
                self._shardings(data * cut.context, data, pipeline),
                self.recomputes(),
                (False, True) if self.offloads and self.ability.offloads else (False,),
                self.balances(pipeline),
            ):
                plan = self._plan(
                    cut,
                    data=data,
                    pipeline=pipeline,
                    schedule=schedule,
                    virtual_stages=chunks,
                    recompute=recompute,
                    offload=offload,
                    balance=balance,
                    **sharding,
                )
                if plan is not None:
                    yield plan

    def _plan(self, cut: Cut, **fields: Any) -> Plan | None:
        """Make a plan with what the job's own plan says of all else; None where the two contradict each
        other."""
        kept: dict[str, Any] = {name: getattr(self.own, name) for name in _KEPT}
        deals_experts = self.facts.experts and "expert" in self.ability.degrees
        kept["expert_tensor"] = cut.expert_tensor if deals_experts else None
        if fields["recompute"] == "full" and (kept["overlap"] or {}).get("experts"):
            kept["overlap"] = {name: on for name, on in kept["overlap"].items() if name != "experts"} or None
        if cut.expert == 1 and cut.tensor == 1:
            kept["dispatcher"] = None
        try:
            return Plan(
                tensor=cut.tensor,
                context=cut.context,
                expert=cut.expert,
                micro_batch=cut.micro_batch,
                sequence_parallel=cut.tensor > 1 and self.ability.cuts_sequences,
                **kept,
                **fields,
            )
        except InputError as error:
            self._no(first_line(error))
            return None

    def _pipelines(self, cut: Cut) -> Iterator[int]:
        world, layers = self.job.cluster.world_size, self.facts.layers
        most = min(_MOST_STAGES, layers or 1, world)
        team, experts = cut.tensor * cut.context, cut.expert * cut.expert_tensor
        for pipeline in self._degrees("pipeline", range(1 + self.pipelines_only, most + 1)):
            if world % (pipeline * team) == 0 and (world // pipeline) % experts == 0:
                if pipeline == 1 or not any(devices % (world // pipeline) for devices in self.sizes):
                    yield pipeline
                else:
                    self._no(f"stages of {world // pipeline} devices would lie on groups that differ")
            elif pipeline in self.allowed.get("pipeline", ()):
                least = pipeline * max(team, experts)
                self._no(
                    f"pipeline x max(tensor x context, expert x expert_tensor) = {least} for {world} devices"
                )

    def _schedules(self, pipeline: int, passes: int) -> Iterator[tuple[Schedule, int | None]]:
        """List ways to run a pipeline, with how many chunks a rank has where it has several."""
        if pipeline == 1:
            yield "1f1b", None
            return
        layers = self.facts.layers or pipeline
        for schedule in self.allowed.get("schedule", self.ability.schedules):
            if schedule == "interleaved":
                if passes % pipeline:
                    self._no(f"interleaved: {passes} micro-batches are no multiple of {pipeline} stages")
                    continue
                own = math.ceil(layers / pipeline)
                usual = [
                    n for n in range(2, min(own, _MOST_CHUNKS) + 1) if own % n == 0 and n * pipeline <= layers
                ]
                for chunks in self.allowed.get("virtual_stages", usual):
                    yield schedule, chunks
            elif schedule == "zbv" and 2 * pipeline > layers:
                self._no(f"zbv: 2 x {pipeline} chunks are more than {layers} layers")
            elif schedule == "dualpipe" and self.is_mixed:
                self._no("dualpipe: stages from either end would lie on groups that differ")
            elif schedule == "dualpipe" and (pipeline % 2 or passes < 2 * pipeline or passes % 2):
                self._no("dualpipe needs twice as many micro-batches as stages, both even")
            elif self.job.trains or schedule in ("1f1b", "gpipe"):
                yield schedule, None

    def _shardings(self, ranks: int, data: int, pipeline: int) -> Iterator[dict[str, Any]]:
        """List what is sharded among replicas, with copies of it and what stays gathered."""
        if ranks == 1 or not self.job.trains:
            yield {"shard": "none"}
            return
        shards: Sequence[Shard] = self.allowed.get("shard", self.ability.shards_in(pipeline))
        for shard in shards:
            for replicate in self._copies(data) if shard == "zero3" else (1,):
                reshards = self.ability.reshards if shard == "zero3" and pipeline == 1 else (None,)
                for reshard in self.allowed.get("reshard", reshards) if shard == "zero3" else (None,):
                    yield {"shard": shard, "replicate": replicate, "reshard": reshard}

    def _copies(self, data: int) -> Sequence[int]:
        """List the copies of a sharded model: one, or one on every node."""
        if "replicate" in self.allowed:
            return [copies for copies in self.allowed["replicate"] if data % copies == 0]
        nodes = self.job.cluster.nodes
        wanted = (1, nodes) if self.ability.replicates and nodes > 1 and data % nodes == 0 else (1,)
        return [copies for copies in wanted if copies < data or copies == 1]

    def balances(self, pipeline: int) -> Sequence[Any]:
        """List how a batch, or the layers of a pipeline, are dealt out to groups that differ."""
        if "balance" in self.allowed:
            return self.allowed["balance"]
        if not self.is_mixed:
            return (self.own.balance,)
        return ("speed",) if pipeline > 1 else ("even", "speed")

    def recomputes(self) -> Sequence[Any]:
        if not self.job.trains:
            return ("none",)
        return tuple(self.allowed.get("recompute", self.ability.recomputes))

    def _no(self, reason: str) -> bool:
        self.refused[reason] += 1
        return False


_KEPT = (
    "tensor_plan", "reduce_precision", "fp8_gather", "expert_capacity", "expert_imbalance",
    "dispatcher", "routing", "overlap", "registered_buffers", "offload_activations",
)  # fmt: skip
"""Of the job's own plan, what is not searched and holds for every plan."""


def _teams_in(group: Group) -> Iterator[int]:
    """Sizes of tensor teams that nodes of a group divide into, or an NVLink domain of several."""
    own = group.devices_per_node
    widest = max(own, min(_WIDEST_TEAM, group.domain))
    for size in range(1, widest + 1):
        if own % size == 0 or (size % own == 0 and widest % size == 0):
            yield size


def _distance(cut: Cut, other: Cut) -> tuple[float, Cut]:
    """Count how often sizes have to be doubled or halved to come from one to the other."""
    names = [one.name for one in dataclasses.fields(Cut)]
    return sum(abs(math.log2(getattr(cut, name) / getattr(other, name))) for name in names), cut


def _powers(most: int) -> list[int]:
    """Powers of two up to a number, and the number itself."""
    return sorted({*(2**i for i in range(most.bit_length()) if 2**i <= most), most})


def neighbours(
    cuts: Sequence[Cut], samples: Callable[[Cut], Collection[int]] = lambda cut: ()
) -> dict[Cut, list[Cut]]:
    """List, of each cut, those that are one step away: one of their sizes is the next larger or smaller one
    that there is, or twice or half as large. With the ``samples`` that replicas of a cut may have, a
    micro-batch is next to another of those that divide the same number of samples.

    >>> [one.tensor for one in neighbours([Cut(tensor=n) for n in (1, 2, 8)])[Cut(tensor=2)]]
    [1, 8]
    >>> [one.micro_batch for one in neighbours([Cut(micro_batch=n) for n in (2, 3, 4)])[Cut(micro_batch=2)]]
    [3, 4]
    >>> cuts = [Cut(micro_batch=n) for n in (1, 2, 4, 5, 25)]
    >>> [one.micro_batch for one in neighbours(cuts, lambda cut: (25, 100))[Cut(micro_batch=5)]]
    [1, 4, 25]
    """
    near_to: dict[Cut, set[Cut]] = {cut: set() for cut in cuts}
    for one_size in dataclasses.fields(Cut):
        lines: dict[Cut, list[Cut]] = {}
        for cut in sorted(cuts):
            lines.setdefault(dataclasses.replace(cut, **{one_size.name: 0}), []).append(cut)
        for line in lines.values():
            shared = samples(line[0]) if one_size.name == "micro_batch" else ()
            parts = [[cut for cut in line if number % cut.micro_batch == 0] for number in shared]
            for part in parts or [line]:
                for one, other in _next_to_each_other(part, [getattr(cut, one_size.name) for cut in part]):
                    near_to[one].add(other)
                    near_to[other].add(one)
    return {cut: sorted(near) for cut, near in near_to.items()}


def _next_to_each_other(line: Sequence[Cut], sizes: Sequence[int]) -> Iterator[tuple[Cut, Cut]]:
    for (i, one), (j, other) in itertools.combinations(enumerate(line), 2):
        if j == i + 1 or sizes[j] == 2 * sizes[i]:
            yield one, other
