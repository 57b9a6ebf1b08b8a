"""Holds the answer: quantities with intervals, what it costs, the memory of ranks, and what was assumed."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from foretrain.duration import Duration, ModelSize, duration, paced
from foretrain.errors import ForetrainError, InputError
from foretrain.estimate import Estimate, Factors
from foretrain.job import Job
from foretrain.model_flops import ModelFlops
from foretrain.quantities import QUANTITIES
from foretrain.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from foretrain.predictors.evidence import Evidence
    from foretrain.predictors.fitting_changes import Remedy
    from foretrain.predictors.recomputation import Recomputation
    from foretrain.step.play import Step

__all__ = [
    "Duration",
    "Estimate",
    "Factors",
    "Forecast",
    "ModelSize",
    "PeakMoment",
    "RankMemory",
    "chance_of_running_out",
    "fullest_of",
    "usable_memory",
    "whole_training",
]

RENDERERS = "foretrain.report.notebook"
"""The module that draws forecasts, looked up when one is shown: it is made of what is above this one."""

_NEEDS = {
    "tokens_per_s": "give sequence",
    "epoch_time_s": "give samples",
    "total_time_s": "give steps, or samples and epochs",
    "startup_time_s": "give steps, or samples and epochs",
}
"""What a job must say for a forecast to have a quantity."""

IDLE_POWER = 0.15
"""Share of the TDP that an idle accelerator draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMoment:
    """The moment of a step at which memory is fullest."""

    phase: str
    """forward, backward or optimizer; before a step where nothing in it takes more than what is held."""
    operator: str = ""
    layer: str = ""

    def to_dict(self) -> dict[str, str]:
        return {"phase": self.phase, "operator": self.operator, "layer": self.layer}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Peak memory of one rank of a pipeline stage, by category, and what the allocator holds beside it."""

    stage: int
    by_category: Mapping[str, float]
    cached_bytes: float = 0.0
    """Held by the caching allocator and in no tensor at the peak."""
    returnable_bytes: float = 0.0
    """Of what is cached, as much as torch could do without on a device that is full; looked for where it
    matters."""
    open_bytes: float = 0.0
    """Less that it would need with settings that the job leaves open; looked for where it matters."""
    returns: int = 0
    """How often a step finds its device full and returns what is cached to it, which takes time."""
    peak: PeakMoment | None = None
    """When the peak is reached; None where it is estimated without a moment."""
    capacity_bytes: float | None = None
    """Of its device, where the ranks of a mixed cluster hold parts of the batch, or layers, of their own."""

    @property
    def allocated_bytes(self) -> float:
        return sum(self.by_category.values())

    @property
    def reserved_bytes(self) -> float:
        return self.allocated_bytes + self.cached_bytes

    @property
    def needed_bytes(self) -> float:
        """Give the memory of the smallest device on which it runs."""
        return self.reserved_bytes - self.returnable_bytes

    @property
    def fullness(self) -> float:
        """Give what is reserved as a share of its device, where that is told."""
        return self.reserved_bytes / (self.capacity_bytes or 1.0)


_OUTSIDE_TORCH_BYTES = 1.5 * 2**30
"""Of a device that is one of many: about half a GiB is CUDA's context, the rest NCCL's. Public runs of
nanotron have up to 76.9 of the 79.1 GiB of an H100 reserved by torch."""
_MOST_OUTSIDE = 0.04
"""Of a device's memory: of the smallest ones in use NCCL takes less."""
_OPEN_SHARE = 2 / 3
"""That a setting which the job leaves open is the one that saves memory: so it is in three of four public
sources of Megatron's runs, and all of those on more than a node."""
_LEAST_IMPORTANT = ("traced with ",)
"""How notes begin that few need to read."""


def not_included(job: Job) -> str:
    """Say what the time and the cost of the whole training leave out."""
    training, cluster = job.workload.training, job.cluster
    fields: dict[str, object] = {"waiting for data": training.loader_rate, "failures": cluster.node_mtbf}
    if training.mode == "train":
        fields |= {"evaluation": training.evaluate_every, "checkpoints": training.checkpoint_every}
    parts = [name for name, given in fields.items() if given is None]
    return f"not included: {', '.join([*parts, 'storage and data transfer'])}"


def fullest_of(ranks: Sequence[RankMemory]) -> RankMemory:
    """The rank with most allocated; of ranks on devices that differ, beside what each has."""
    return max(ranks, key=lambda rank: rank.allocated_bytes / (rank.capacity_bytes or 1.0))


def usable_memory(job: Job, capacity_bytes: float) -> float:
    """Give what is left of a device for torch beside CUDA's context and, of many, the buffers of NCCL."""
    if job.cluster.world_size == 1 or any(group.device.is_cpu for group in job.cluster.groups):
        return capacity_bytes
    return capacity_bytes - min(_OUTSIDE_TORCH_BYTES, _MOST_OUTSIDE * capacity_bytes)


def chance_of_running_out(needed: Estimate, rank: RankMemory | None, usable_bytes: float) -> float:
    """Give the chance that a rank asks for more than is usable; settings that its job leaves open and that
    save memory count for two thirds."""
    chance = needed.chance_above(usable_bytes)
    if rank is None or not rank.open_bytes:
        return chance
    least = needed * max(0.0, 1.0 - rank.open_bytes / rank.needed_bytes)
    return chance * (1.0 - _OPEN_SHARE) + least.chance_above(usable_bytes) * _OPEN_SHARE


class NoQuantity(KeyError):
    """A quantity that a forecast does not have, with what it has."""

    def __str__(self) -> str:
        return str(self.args[0])


def the_pandas() -> Any:
    """The library, where something is to be its DataFrame."""
    try:
        import pandas
    except ImportError as error:
        raise ForetrainError("to_frame: pandas is not installed; install pandas, or use to_dict") from error
    return pandas


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Holds what a predictor says of a job.

    A quantity is ``forecast["step_time_s"]`` or ``forecast.step_time_s``; ``in`` and iteration go over their
    names. Printed, it is the summary that ``foretrain predict`` shows; in a notebook, a table.
    """

    job: Job
    predictor: str
    quantities: Mapping[str, Estimate]
    bound: str = ""
    """What limits the step, in words."""
    assumptions: tuple[str, ...] = ()
    ranks: tuple[RankMemory, ...] = ()
    """What a rank of each pipeline stage holds at its peak; empty when the predictor does not tell."""
    duration: Duration | None = None
    """What the whole training's time goes to; None where it is not known how long it is, or not of what."""
    flops: ModelFlops | None = None
    """Parameters and arithmetic of a step; None where the model could not be traced."""
    step: Step | None = field(default=None, repr=False)
    """What the predictor saw inside the step; None when it does not look there."""
    evidence: Evidence | None = field(default=None, repr=False)
    """What measured runs say of it; None where nobody has asked, or none are kept."""

    remedies: tuple[Remedy, ...] | None = field(default=None, repr=False)
    """Changes that make a job fit that does not, the smallest first; None where it fits or nobody has
    asked."""

    recomputation: Recomputation | None = field(default=None, repr=False)
    """What it saves and costs, where the plan recomputes and somebody asked."""

    def __post_init__(self) -> None:
        for name in self.quantities:
            if name not in QUANTITIES:
                raise ValueError(f"{name!r} is not a quantity")

    # Quantities

    def __getitem__(self, quantity: str) -> Estimate:
        if quantity not in self.quantities:
            raise NoQuantity(self._lacks(quantity))
        return self.quantities[quantity]

    def __getattr__(self, name: str) -> Estimate:
        """Asked for what is no field and no property: a quantity."""
        quantities: Mapping[str, Estimate] = self.__dict__.get("quantities", {})
        if name in quantities:
            return quantities[name]
        lacks = name if name.startswith("_") or not quantities else self._lacks(name)
        raise AttributeError(lacks, name=name, obj=self)

    def __contains__(self, quantity: object) -> bool:
        return quantity in self.quantities

    def __iter__(self) -> Iterator[str]:
        return iter(self.quantities)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.quantities})

    def _lacks(self, name: str) -> str:
        if name in QUANTITIES:
            return f"{name}: not in this forecast; {_NEEDS.get(name, f'{self.predictor} does not give it')}"
        public = [one for one in dir(type(self)) if not one.startswith("_")]
        near = difflib.get_close_matches(str(name), [*self.quantities, *public], n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        return f"{name}: not in this forecast; {meant}it has {', '.join(self.quantities)}"

    # Shown

    def __repr__(self) -> str:
        job, step, peak = self.job, *map(self.quantities.get, ("step_time_s", "peak_memory_bytes"))
        devices = " and ".join(f"{one.world_size} x {one.device.name}" for one in job.cluster.groups)
        batch = f"batch {job.workload.training.global_batch:,}"
        words = [f"{job.workload.model.label}, {batch}, on {devices}"]
        if step is not None:
            low, high = format_seconds(step.low), format_seconds(step.high)
            words.append(f"{format_seconds(step.median)} per step [{low} to {high}]")
        if peak is not None:
            words.append(f"{format_bytes(peak.median)} at peak" + ("" if self.fits else ", does not fit"))
        return f"<Forecast: {'; '.join(words)}>"

    def __str__(self) -> str:
        return str(pkgutil.resolve_name(f"{RENDERERS}:to_text")(self))

    def _repr_html_(self) -> str:
        return str(pkgutil.resolve_name(f"{RENDERERS}:to_html")(self))

    def to_frame(self) -> Any:
        """A pandas DataFrame with a row for each quantity: median, 80 % and 95 % bounds, unit."""
        pandas = the_pandas()
        rows = {name: (value, QUANTITIES[name]) for name, value in self.quantities.items()}
        rows |= {"cost_usd": (self.cost, "USD")} if self.cost is not None else {}
        rows |= {"energy_j": (self.energy_j, "J")} if self.energy_j is not None else {}
        columns = ("median", "low", "high", "low_95", "high_95")
        return pandas.DataFrame(
            [[*(getattr(value, name) for name in columns), unit] for value, unit in rows.values()],
            index=pandas.Index(list(rows), name="quantity"),
            columns=[*columns, "unit"],
        )

    def inside(self, purpose: str) -> Step:
        """The step that the predictor looked into, for a ``purpose``; an error when it did not."""
        if self.step is None:
            raise InputError(
                f"predictor: {self.predictor!r} does not look inside the step, so there is no {purpose}"
            )
        return self.step

    @property
    def mfu(self) -> Estimate | None:
        """Model FLOPs utilisation; None where the FLOPs or the devices' peak are not known."""
        time = self.quantities.get("step_time_s")
        return None if self.flops is None or time is None else self.flops.mfu(time)

    @property
    def all_assumptions(self) -> list[str]:
        """List what was taken without being given, what the predictor assumed, and what is not included; what
        matters most comes first."""
        job = self.job
        taken = [f"not given, so taken: {', '.join(job.assumed)}"] if job.assumed else []
        if job.plan.shard != "none" and job.cluster.world_size == 1:
            taken.append(f"plan.shard: {job.plan.shard} saves nothing on one device")
        least = [note for note in self.assumptions if str(note).startswith(_LEAST_IMPORTANT)]
        own = [note for note in self.assumptions if note not in least]
        left_out = [] if "total_time_s" not in self.quantities else [not_included(job)]
        return [*taken, *own, *left_out, *least]

    # Money and energy

    @property
    def price_per_hour(self) -> float | None:
        """Dollars for the whole cluster, with its parameter servers."""
        return self.job.price_per_hour

    @property
    def cost(self) -> Estimate | None:
        """Dollars for the whole training."""
        total, price = self.quantities.get("total_time_s"), self.price_per_hour
        return None if total is None or price is None else total * (price / 3600)

    @property
    def energy_j(self) -> Estimate | None:
        """Joules for the whole training, all devices together: at the power of a step while they work, else
        idle."""
        total, power = self.quantities.get("total_time_s"), self.quantities.get("power_w")
        if total is None or power is None:
            return None
        working = 1.0 if self.duration is None else self.duration.working_share
        highest = max((group.device.tdp_w or 0.0 for group in self.job.cluster.groups), default=0.0)
        mean_w = working * power.median + (1 - working) * IDLE_POWER * highest
        return total * (mean_w * self.job.cluster.world_size)

    # Memory

    @property
    def memory_capacity_bytes(self) -> float:
        """Give the memory of the smallest device; where devices hold parts of their own size, of the one that
        is fullest."""
        own = fullest_of(self.ranks).capacity_bytes if self.ranks else None
        return own or min(group.device.memory_bytes for group in self.job.cluster.groups)

    @property
    def memory_by_category(self) -> dict[str, int]:
        """Bytes of the fullest rank at its peak."""
        sizes = fullest_of(self.ranks).by_category if self.ranks else {}
        return {name: int(size) for name, size in sizes.items()}

    @property
    def fullest(self) -> Estimate | None:
        """Estimate what the fullest rank needs; the quantities are of the rank whose memory the framework
        reports.

        That is what the allocator holds; where the device has less, what is left when it has returned its
        cache."""
        peak = self.quantities.get("reserved_memory_bytes") or self.quantities.get("peak_memory_bytes")
        allocated = self.quantities.get("peak_memory_bytes")
        if peak is None or allocated is None or not self.ranks:
            return peak
        rank = fullest_of(self.ranks)
        needed = rank.needed_bytes / rank.reserved_bytes if rank.returnable_bytes else 1.0
        return peak * (needed * rank.allocated_bytes / allocated.median)

    @property
    def memory_short_of(self) -> Literal["tensors", "fragmentation", "cache"] | None:
        """Say what of the fullest rank goes beyond its device, by medians: its tensors; what lies between
        them; or only what is cached, which torch returns to the device and asks for again in each step. None
        where it runs without that, or it is not known."""
        if not self.ranks or self.fullest is None:
            return None
        rank, capacity = fullest_of(self.ranks), self.memory_capacity_bytes
        if rank.allocated_bytes > capacity:
            return "tensors"
        if self.fullest.median > capacity:
            return "fragmentation"
        return "cache" if rank.returns else None

    @property
    def peak_moment(self) -> PeakMoment | None:
        """Name the moment when the fullest rank reaches its peak; None when it is not known."""
        return fullest_of(self.ranks).peak if self.ranks else None

    @property
    def usable_memory_bytes(self) -> float:
        """Give the memory that may be used of the fullest device."""
        return usable_memory(self.job, self.memory_capacity_bytes)

    @property
    def out_of_memory_chance(self) -> float | None:
        """The probability that the allocator asks for more than a device has; None when it is not known."""
        if self.fullest is None:
            return None
        rank = fullest_of(self.ranks) if self.ranks else None
        return chance_of_running_out(self.fullest, rank, self.usable_memory_bytes)

    @property
    def fits(self) -> bool | None:
        """Whether the device of every rank more likely has memory enough than not; None when it is not
        known."""
        chance = self.out_of_memory_chance
        return None if chance is None else chance <= 0.5

    def to_dict(self, *, breakdown: bool = True) -> dict[str, Any]:
        """Plain JSON values; medians and 80 % bounds in SI units. Without its breakdown by phase and operator
        it is there sooner."""
        result: dict[str, Any] = {
            "predictor": self.predictor,
            "job": self.job.to_dict(),
            "quantities": {name: value.to_dict() for name, value in self.quantities.items()},
            "bound": self.bound,
            "flops": None if self.flops is None else self.flops.to_dict(self.quantities.get("step_time_s")),
            "fits": self.fits,
            "out_of_memory_chance": self.out_of_memory_chance,
            "fits_with": None if self.remedies is None else [one.to_dict() for one in self.remedies],
            "recomputation": None if self.recomputation is None else self.recomputation.to_dict(),
            "memory_capacity_bytes": self.memory_capacity_bytes,
            "memory_short_of": self.memory_short_of,
            "peak_moment": None if self.peak_moment is None else self.peak_moment.to_dict(),
            "memory_by_category_bytes": self.memory_by_category,
            "memory_by_stage_bytes": [rank.allocated_bytes for rank in self.ranks],
            "total_time_parts": None
            if self.duration is None
            else {
                part.name: {**part.time_s.to_dict(), "source": part.source} for part in self.duration.parts
            },
            "cost_usd": None if self.cost is None else self.cost.to_dict(),
            "energy_j": None if self.energy_j is None else self.energy_j.to_dict(),
            "price_usd_per_hour": self.price_per_hour,
            "price_source": self.job.cluster.price_source or None,
            "assumptions": self.all_assumptions,
        }
        if self.evidence is not None:
            result["evidence"] = self.evidence.to_dict()
        if self.step is not None:
            result["step_breakdown_s"] = self.step.causes_s
        if self.step is not None and breakdown:
            result["breakdown_s"] = {grouping: self.step.by(grouping) for grouping in ("phase", "operator")}
        return result


def whole_training(
    job: Job, step_time: Estimate, size: ModelSize | None = None, *, forward_s: float | None = None
) -> dict[str, Estimate]:
    """Throughput, epoch and total time that follow from the time of a step; the total is more than its steps
    (``duration``)."""
    training = job.workload.training
    quantities = {"step_time_s": step_time, "samples_per_s": step_time.inverse(training.global_batch)}
    if training.sequence:
        quantities["tokens_per_s"] = step_time.inverse(training.global_batch * training.sequence)
    if training.steps_per_epoch is not None:
        quantities["epoch_time_s"] = paced(job, step_time) * training.steps_per_epoch
    whole = duration(job, step_time, size, forward_s=forward_s)
    if whole is not None:
        quantities["total_time_s"] = whole.time_s
    return quantities
