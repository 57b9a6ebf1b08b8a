"""Finds the smallest changes of a job that make it fit into memory where it does not, and what they cost in
time."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from foretrain.allocator_settings import AllocatorSettings
from foretrain.catalog import Catalog
from foretrain.cluster import Cluster, Device
from foretrain.errors import ForetrainError
from foretrain.forecast import Estimate, Forecast, fullest_of
from foretrain.job import Job
from foretrain.plan import Shard, divisors
from foretrain.predictors.base import Predictor
from foretrain.progress import tell

MOST_FORECASTS = 8
"""That a search makes."""
ENOUGH = 3
"""Changes that are told."""
SAFE_CHANCE = 0.1
"""Of running out of memory, up to which a job fits."""
_MARGIN = 1.1
"""How far a quick estimate of memory may lie above the capacity for a forecast to be worth its time."""
_TRIES = 2
"""Forecasts for a change that comes in sizes, from the largest that the quick estimate lets through."""
_FOR_SEVERAL = 3
"""Forecasts that are kept for several changes together, until one alone is found that does."""
_PER_SAMPLE = ("inputs", "activations", "temporaries")
"""Categories of memory that grow with the micro-batch."""
_SHARDED: dict[Shard, tuple[str, ...]] = {
    "zero1": ("optimizer_state",),
    "zero2": ("optimizer_state", "gradients"),
    "zero3": ("optimizer_state", "gradients", "weights"),
}
"""Categories that each way of sharding divides by the replicas."""
_IN_NODE = 8
"""Devices that a node grows to, where the job names no node."""
_LEAN_OPTIMIZERS = {"adafactor": 0.1, "sgd": 0.5, "sgd-plain": 0.0}
"""In the order in which they are tried, with the share of the optimizer's state that each may need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change that makes a job fit."""

    change: str
    """In words: ``micro_batch 4``."""
    fields: Mapping[str, Any]
    """The same as fields of the job: ``{"plan.micro_batch": 4}``."""
    memory: Estimate
    """That the fullest rank needs."""
    capacity_bytes: float
    chance: float
    """Of running out of memory."""
    step_time: Estimate | None
    slower: float | None
    """How much longer a sample takes, as a share: 0.03 is 3 % more."""
    price_per_hour: float | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "change": self.change,
            "fields": dict(self.fields),
            "memory_bytes": self.memory.to_dict(),
            "memory_capacity_bytes": self.capacity_bytes,
            "out_of_memory_chance": self.chance,
            "step_time_s": None if self.step_time is None else self.step_time.to_dict(),
            "time_change": self.slower,
            "price_usd_per_hour": self.price_per_hour,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChange:
    """A changed job, in words and fields."""

    job: Job
    words: str
    fields: Mapping[str, Any]

    def then(self, other: JobChange) -> JobChange:
        """Make both changes: ``other`` was made from this one's job."""
        words = f"{self.words}, {other.words}" if self.words else other.words
        return JobChange(job=other.job, words=words, fields={**self.fields, **other.fields})


Changes = Callable[["_Search", JobChange], Iterator[JobChange]]
"""Ways to change a job, the smallest first."""


def with_remedies(forecast: Forecast, predictor: Predictor) -> Forecast:
    """The forecast with the changes that would make its job fit, where it does not or may not."""
    if _fits(forecast) is not False:
        return forecast
    return dataclasses.replace(forecast, remedies=tuple(_Search(forecast, predictor).remedies()))


def _fits(forecast: Forecast) -> bool | None:
    """Whether a step runs, most likely, without torch returning memory in it; None when it is not known."""
    chance = forecast.out_of_memory_chance
    return None if chance is None else chance <= SAFE_CHANCE and forecast.memory_short_of is None


class _Search:
    """Asks a predictor for changed jobs: one change at a time, then several together."""

    def __init__(self, forecast: Forecast, predictor: Predictor) -> None:
        self.forecast, self.predictor, self._left = forecast, predictor, MOST_FORECASTS
        self.last = forecast
        """Of the change that was asked for last."""
        need, held = forecast.fullest, forecast.memory_by_category
        assert need is not None
        self.capacity = forecast.memory_capacity_bytes
        scale = need.median / (sum(held.values()) or need.median)
        self.held = {name: size * scale for name, size in held.items()} or {"weights": need.median}

    def remedies(self) -> list[Remedy]:
        start = JobChange(job=self.forecast.job, words="", fields={})
        fitting: list[Remedy] = []
        for changes in (*_SINGLE, *_LAST):
            if len(fitting) == ENOUGH or (fitting and changes in _LAST):
                break
            tries = min(_TRIES, self._left - (0 if fitting else _FOR_SEVERAL))
            if (remedy := self._first_that_fits(changes(self, start), tries)) is not None:
                fitting.append(remedy)
        if not fitting:
            together = self._first_that_fits(_together(self, start), self._left)
            fitting += [together] if together is not None else []
        return sorted(fitting, key=_size_of_change)

    def _first_that_fits(self, changes: Iterator[JobChange], tries: int) -> Remedy | None:
        """The first change that is a job at all and fits."""
        with contextlib.suppress(ForetrainError):
            for change in changes:
                if self._left <= 0 or tries <= 0:
                    return None
                self._left, tries = self._left - 1, tries - 1
                if (remedy := self._asked(change)) is not None:
                    return remedy
        return None

    def _asked(self, change: JobChange) -> Remedy | None:
        """Forecast the changed job, where the predictor can tell and the job fits with it."""
        tell(f"it does not fit; trying {change.words}")
        try:
            changed = self.predictor.predict(change.job)
        except ForetrainError:
            return None
        self.last = changed
        memory, chance = changed.fullest, changed.out_of_memory_chance
        if memory is None or chance is None or not _fits(changed):
            return None
        before, after = (one.quantities.get("samples_per_s") for one in (self.forecast, changed))
        return Remedy(
            change=change.words,
            fields=change.fields,
            memory=memory,
            capacity_bytes=changed.memory_capacity_bytes,
            chance=chance,
            step_time=changed.quantities.get("step_time_s"),
            slower=None if before is None or after is None else before.median / after.median - 1.0,
            price_per_hour=changed.price_per_hour,
        )

    def may_fit(self, **shares: float) -> bool:
        """Whether the memory would do if of each category only this share were left, by a quick estimate."""
        return self.need(**shares) <= _MARGIN * self.capacity

    def need(self, **shares: float) -> float:
        return sum(size * shares.get(name, 1.0) for name, size in self.held.items())


def _size_of_change(remedy: Remedy) -> tuple[int, float]:
    """Order changes: what changes nothing but time comes before what changes numbers, and that before other
    machines; among these, what costs least time."""
    fields = " ".join(remedy.fields)
    machines, numbers = "cluster." in fields, "precision" in fields or "optimizer" in fields
    return 2 * machines + numbers, 0.0 if machines or remedy.slower is None else max(0.0, remedy.slower)


# One change


def _allocator(search: _Search, start: JobChange) -> Iterator[JobChange]:
    """Segments that expand, where tensors fit and only what lies between them does not."""
    own, device = start.job.workload.training.allocator, start.job.cluster.groups[0].device
    if device.vendor != "nvidia" or AllocatorSettings.read(own or "").expandable_segments:
        return
    ranks = search.forecast.ranks
    if ranks and fullest_of(ranks).allocated_bytes <= search.capacity:
        expandable = "expandable_segments:True"
        kept = [part for part in (own or "").split(",") if part and "expandable_segments" not in part]
        settings = {"allocator": ",".join([*kept, expandable])}
        yield changed(start, f"allocator {expandable}", training=settings)


def _micro_batch(search: _Search, start: JobChange) -> Iterator[JobChange]:
    """Fewer samples at once: with gradients added up over more passes, or in inference with a smaller
    batch."""
    job, own = start.job, start.job.micro_batch
    of_rank = job.workload.training.global_batch // (job.plan.data or 1)
    sizes = [size for size in reversed(divisors(of_rank)) if size < own]
    tried = own
    for size in sizes:
        fits = search.may_fit(**dict.fromkeys(_PER_SAMPLE, size / own))
        if not fits or (tried < own and size > tried / 2):  # each try at most half of the one before
            continue
        tried = size
        if job.workload.training.mode == "infer":
            batch = size * (job.plan.data or 1)
            yield changed(start, f"batch {batch}", training={"global_batch": batch})
        else:
            yield changed(start, f"micro_batch {size}", plan={"micro_batch": size})


def _recompute(search: _Search, start: JobChange) -> Iterator[JobChange]:
    job = start.job
    plan = _all_recomputed(job)
    if job.workload.training.mode == "infer" or not plan:
        return
    if search.may_fit(activations=0.0):
        if job.plan.recompute == "none" and job.workload.training.sequence:
            yield changed(start, "recompute selective", plan={"recompute": "selective"})
        yield changed(start, "recompute full", plan=plan)


def _all_recomputed(job: Job) -> dict[str, Any]:
    """The fields of a plan that are other where every layer is recomputed whole."""
    fields: dict[str, Any] = {"recompute": "full", "recompute_every": 1, "recompute_modules": ()}
    if (job.plan.overlap or {}).get("experts"):
        fields["overlap"] = {**(job.plan.overlap or {}), "experts": False}
    return {name: value for name, value in fields.items() if getattr(job.plan, name) != value}


def _shard(search: _Search, start: JobChange) -> Iterator[JobChange]:
    job, order = start.job, list(_SHARDED)
    replicas = (job.plan.data or 1) * job.plan.context
    if replicas == 1 or job.plan.servers or job.workload.training.mode == "infer":
        return
    stronger = order if job.plan.shard == "none" else order[order.index(job.plan.shard) + 1 :]
    for shard in stronger:
        if search.may_fit(**dict.fromkeys((*_SHARDED[shard], "temporaries"), 1 / replicas)):
            yield changed(start, f"shard {shard}", plan={"shard": shard})


def _precision(search: _Search, start: JobChange) -> Iterator[JobChange]:
    if (halves := _half_precision(start.job)) is None:
        return
    for precision, fixed in ((halves, 1.0), (halves.removeprefix("amp-"), 0.5)):
        shares = dict.fromkeys((*_PER_SAMPLE, "workspaces"), 0.5)
        if search.may_fit(**shares, weights=fixed, gradients=fixed, optimizer_state=fixed):
            yield changed(start, f"precision {precision}", training={"precision": precision})


def _half_precision(job: Job) -> str | None:
    """Mixed precision that the devices have units for, where the job computes in fp32."""
    devices = [group.device for group in job.cluster.groups]
    if job.workload.training.precision not in ("fp32", "tf32") or any(one.is_cpu for one in devices):
        return None
    if all(one.bf16 for one in devices):
        return "amp-bf16"
    return "amp-fp16" if all(one.fp16 for one in devices) else None


def _tensor(search: _Search, start: JobChange) -> Iterator[JobChange]:
    """The layers of a language model over devices that each have all of them."""
    plan, cluster = start.job.plan, start.job.cluster
    if start.job.workload.model.source != "transformers" or plan.tensor > 1 or plan.expert > 1:
        return
    largest = min(group.devices_per_node for group in cluster.groups)
    for degree in (2, 4, 8):
        fits = degree <= largest and (plan.data or 1) % degree == 0
        if fits and search.may_fit(**dict.fromkeys(search.held, 1 / degree)):
            fields = {"tensor": degree, "data": (plan.data or 1) // degree}
            yield changed(start, f"tensor {degree}", plan=fields)


def _offload(search: _Search, start: JobChange) -> Iterator[JobChange]:
    job = start.job
    if job.plan.offload or job.plan.servers or job.workload.training.mode == "infer":
        return
    if not job.cluster.groups[0].device.is_cpu and search.may_fit(optimizer_state=0.0):
        yield changed(start, "offload (optimizer on the host)", plan={"offload": True})


def _larger_device(search: _Search, start: JobChange) -> Iterator[JobChange]:
    """The device of the same maker with the least memory that does; a newer one before an older one."""
    cluster, catalog = start.job.cluster, Catalog.load()
    device = cluster.groups[0].device
    if len(cluster.groups) > 1 or device.is_cpu:
        return
    known = (catalog.device(name) for name in catalog.names("devices"))
    larger = [one for one in known if _is_larger(one, device) and search.need() < one.memory_bytes]
    section = cluster.to_dict()
    section = {name: value for name, value in section.items() if name not in ("node", "price")}
    for one in sorted(larger, key=lambda one: (one.memory_bytes, -(one.year or 0)))[:_TRIES]:
        yield from _on(start, {**section, "device": one.name}, f"device {one.name}", {"device": one.name})


_LARGER = 1.05
"""Times the memory of a device that a larger one has at least."""


def _is_larger(other: Device, device: Device) -> bool:
    """A device of the same maker, with the same kind of links and formats at least as narrow, and more
    memory."""
    alike = other.vendor == device.vendor and (device.link == "pcie" or other.link == device.link)
    formats = all(getattr(other, name) or not getattr(device, name) for name in ("bf16", "fp8"))
    return alike and formats and other.memory_bytes > _LARGER * device.memory_bytes


def _more_devices(search: _Search, start: JobChange) -> Iterator[JobChange]:
    """Twice the devices or more, with everything sharded over them."""
    job, section = start.job, start.job.cluster.to_dict()
    training, replicas = job.workload.training, job.plan.data or 1
    if len(job.cluster.groups) > 1 or job.plan.servers or training.mode == "infer":
        return
    in_node, nodes = section["devices_per_node"], section["nodes"]
    of_rank = training.global_batch // replicas
    factor = 2
    while factor <= of_rank:
        if of_rank % factor == 0:
            before = 1 if job.plan.shard == "zero3" else replicas
            divided = dict.fromkeys((*_SHARDED["zero3"], "temporaries"), 1 / (factor * before))
            own = min(1.0, of_rank / factor / job.micro_batch)
            if search.may_fit(**{**dict.fromkeys(_PER_SAMPLE, own), **divided}):
                grows = nodes == 1 and in_node * factor <= _IN_NODE and "node" not in section
                inside = in_node * factor if grows else in_node
                grown = {**section, "devices_per_node": inside, "nodes": in_node * nodes * factor // inside}
                micro = None if job.plan.micro_batch is None else min(job.plan.micro_batch, of_rank // factor)
                plan = {"shard": "zero3", "data": replicas * factor, "micro_batch": micro}
                count = job.cluster.world_size * factor
                fields = {name: grown[name] for name in ("devices_per_node", "nodes")}
                words = f"{count} devices" + ("" if job.plan.shard == "zero3" else ", shard zero3")
                yield from _on(start, grown, words, fields, plan)
        factor *= 2


def _optimizer(search: _Search, start: JobChange) -> Iterator[JobChange]:
    """Another optimizer, which trains differently: the last resort."""
    own = start.job.workload.training.optimizer
    if start.job.workload.training.mode == "infer" or own in _LEAN_OPTIMIZERS:
        return
    for optimizer, share in _LEAN_OPTIMIZERS.items():
        if search.may_fit(optimizer_state=share):
            yield changed(start, f"optimizer {optimizer}", training={"optimizer": optimizer})


_SINGLE: tuple[Changes, ...] = (
    _allocator, _micro_batch, _recompute, _shard, _precision, _tensor, _offload, _larger_device,
    _more_devices,
)  # fmt: skip
"""In the order in which they are tried: what changes nothing but time, then numbers, then machines."""
_LAST: tuple[Changes, ...] = (_optimizer,)
"""Only where nothing else does."""


def _together(search: _Search, start: JobChange) -> Iterator[JobChange]:
    """Changes that each save most of something, one upon the other; then the same on more devices."""
    change, job, search.last = start, start.job, search.forecast
    training = job.workload.training.mode == "train"
    if job.micro_batch > 1 and training:
        change = changed(change, "micro_batch 1", plan={"micro_batch": 1})
    if training and (plan := _all_recomputed(job)):
        change = changed(change, "recompute full", plan=plan)
    if change is not start:
        yield change
    if (job.plan.data or 1) > 1 and job.plan.shard != "zero3" and training and not job.plan.servers:
        change = changed(change, "shard zero3", plan={"shard": "zero3"})
        yield change
    if (halves := _half_precision(job)) is not None:
        change = changed(change, f"precision {halves}", training={"precision": halves})
        yield change
    smaller = _Search(search.last, search.predictor)
    yield from _more_devices(smaller, change)
    yield from _larger_device(smaller, change)


# Changed jobs


def changed(start: JobChange, words: str, **sections: Mapping[str, Any]) -> JobChange:
    """Change fields of the plan or the training."""
    job, plan, training = start.job, start.job.plan, start.job.workload.training
    plan = dataclasses.replace(plan, **sections.get("plan", {}))
    training = dataclasses.replace(training, **sections.get("training", {}))
    workload = dataclasses.replace(job.workload, training=training)
    fields = {f"{name}.{key}": value for name, one in sections.items() for key, value in one.items()}
    changed = dataclasses.replace(job, workload=workload, plan=plan)
    return start.then(JobChange(job=changed, words=words, fields=fields))


def _on(
    start: JobChange,
    section: Mapping[str, Any],
    words: str,
    fields: Mapping[str, Any],
    plan: Mapping[str, Any] | None = None,
) -> Iterator[JobChange]:
    """Put the job on another cluster, where there is such a one."""
    try:
        cluster = Cluster.read(section)
        job = dataclasses.replace(
            start.job, cluster=cluster, plan=dataclasses.replace(start.job.plan, **(plan or {}))
        )
    except ForetrainError:
        return
    named = {f"cluster.{name}": value for name, value in fields.items()}
    named |= {f"plan.{name}": value for name, value in (plan or {}).items() if value is not None}
    yield start.then(JobChange(job=job, words=words, fields=named))
