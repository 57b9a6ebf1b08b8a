"""Lists what may be changed around a job: batch, device, count of devices, precision and plan, and makes the
job of each combination."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretrain.catalog import Catalog
from foretrain.cluster import Cluster
from foretrain.errors import InputError
from foretrain.job import Job
from foretrain.plan import Plan
from foretrain.planner.clusters import Wanted, clusters_of

USUAL_DEVICES = (
    "h100-sxm-80gb", "a100-sxm-80gb", "h200-sxm-141gb", "b200", "l40s", "mi300x", "l4", "rtx-4090",
)  # fmt: skip
"""What most people book; the job's own comes before them."""
_USUAL_PRECISIONS = ("amp-bf16", "bf16", "fp32")
_DOUBLINGS = 4
"""The batch goes from a sixteenth of the job's to sixteen times it."""
LARGE_PARAMETERS = 3e9
"""From which on a language model is cut over devices in usual plans."""
_SHARDS = {"none": "", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3 (FSDP)"}
_DEGREES = ("tensor", "pipeline", "context", "expert")
_BATCH_NEARNESS = {0: 0.0, 1: 0.8, 2: 0.6, 3: 1.1, 4: 1.4}
"""By doublings from the job's own batch, how late a point is forecast: two first, as between them figures
are interpolated."""
_AXIS_COST = {"device": 1.0, "count": 1.0, "plan": 1.0, "precision": 1.3}
"""How late a change of each axis is forecast; another precision is another model to trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One combination of what may be changed."""

    batch: int
    device: str
    count: int
    precision: str
    plan: str

    @property
    def series(self) -> str:
        """Name all of the combination but the batch, as the page looks it up."""
        return f"{self.device}|{self.count}|{self.precision}|{self.plan}"

    def to_dict(self) -> dict[str, str | int]:
        return {name: getattr(self, name) for name in ("batch", "device", "count", "precision", "plan")}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Says what may be changed around a job, and to what."""

    job: Job
    batches: tuple[int, ...]
    devices: tuple[str, ...]
    counts: tuple[int, ...]
    precisions: tuple[str, ...]
    plans: Mapping[str, Plan]
    """By what the page calls them, without their data-parallel degree."""
    catalog: Catalog = field(repr=False)
    clusters: Mapping[tuple[str, int], Cluster] = field(default_factory=dict, repr=False)
    """Those that are known as they are."""

    @property
    def start(self) -> View:
        """The job itself."""
        return self.view_of(self.job)

    def view_of(self, job: Job) -> View:
        """The combination that a job is."""
        training = job.workload.training
        return View(
            batch=training.global_batch,
            device=device_name(job.cluster),
            count=job.cluster.world_size,
            precision=training.precision,
            plan=plan_key(job.plan),
        )

    def job_at(self, view: View) -> Job:
        """The job of a combination; an error in one line where there is none such."""
        own = self.job
        if view == self.start:
            return own
        shard = self.plans[view.plan].shard
        if view.count == 1 and shard != "none":
            raise InputError(f"plan.shard: {shard!r} has no other device to share with; choose another plan")
        changes: dict[str, Any] = {"global_batch": view.batch, "precision": view.precision}
        training = dataclasses.replace(own.workload.training, **changes)
        kept = [one for one in own.assumed if view.precision in one or not one.startswith("precision ")]
        return dataclasses.replace(
            own,
            workload=dataclasses.replace(own.workload, training=training),
            cluster=self._cluster(view.device, view.count),
            plan=self.plans[view.plan],
            assumed=tuple(kept),
        )

    def _cluster(self, device: str, count: int) -> Cluster:
        known = self.clusters.get((device, count))
        if known is not None:
            return known
        wanted = Wanted(kinds=(device,), counts=(count,))
        return clusters_of(self.job, wanted, self.catalog)[0]

    def views(self) -> list[View]:
        """List all combinations, those first that people look at first: one change before two, the job's own
        batch before others."""
        all_views = [
            View(batch=batch, device=device, count=count, precision=precision, plan=plan)
            for device in self.devices
            for count in self.counts
            for precision in self.precisions
            for plan in self.plans
            for batch in self.batches
        ]
        start = self.start
        return sorted(all_views, key=lambda view: _lateness(view, start))


def _lateness(view: View, start: View) -> float:
    axes = sum(cost for name, cost in _AXIS_COST.items() if getattr(view, name) != getattr(start, name))
    doublings = round(abs(math.log2(view.batch / start.batch)))
    late = axes + _BATCH_NEARNESS.get(doublings, 2.0)
    return late + 0.05 * abs(math.log2(view.count / start.count))


def device_name(cluster: Cluster) -> str:
    """Name a cluster's devices; groups that differ are one choice."""
    return " + ".join(dict.fromkeys(group.device.name for group in cluster.groups))


def around(job: Job, catalog: Catalog, *, parameters: float | None = None) -> Choices:
    """Usual changes of one job."""
    training, own = job.workload.training, device_name(job.cluster)
    mixed = len(job.cluster.groups) > 1
    devices = [own] if mixed else [own, *(name for name in USUAL_DEVICES if name != own)]
    precisions = dict.fromkeys([training.precision, *_USUAL_PRECISIONS])
    counts = [job.cluster.world_size] if mixed else _counts(job.cluster.world_size)
    plans = _usual_plans(job, parameters or 0.0, several=max(counts) > 1)
    return Choices(
        job=job,
        batches=batches_around(job),
        devices=tuple(devices),
        counts=tuple(counts),
        precisions=tuple(precisions),
        plans={plan_key(plan): plan for plan in plans},
        catalog=catalog,
        clusters={(own, job.cluster.world_size): job.cluster},
    )


def of_jobs(jobs: Sequence[Job], catalog: Catalog) -> Choices:
    """Gather what several jobs of one workload differ in, the first of them in the middle."""
    first = jobs[0]
    plans: dict[str, Plan] = {}
    for job in jobs:
        plans.setdefault(plan_key(job.plan), dataclasses.replace(job.plan, data=None))
    return Choices(
        job=first,
        batches=batches_around(first),
        devices=tuple(dict.fromkeys(device_name(job.cluster) for job in jobs)),
        counts=tuple(sorted({job.cluster.world_size for job in jobs})),
        precisions=(first.workload.training.precision,),
        plans=plans,
        catalog=catalog,
        clusters={(device_name(job.cluster), job.cluster.world_size): job.cluster for job in jobs},
    )


def batches_around(job: Job) -> tuple[int, ...]:
    """The job's own batch, doubled and halved a few times, as far as whole samples go to every rank."""
    own = job.workload.training.global_batch
    least = (job.plan.data or 1) * (job.plan.micro_batch or 1)
    batches = {own}
    for doublings in range(-_DOUBLINGS, _DOUBLINGS + 1):
        size = own * 2.0**doublings
        unit = least if size >= least else 1
        if size >= 1:
            batches.add(max(1, round(size / unit)) * unit)
    return tuple(sorted(batches))


def _counts(own: int) -> list[int]:
    """The job's own number, up to four times as many and as few as one."""
    powers = {2**i for i in range(1 + own.bit_length())} | {1, 2, 4, 8}
    kept = {count for count in powers if own / 8 <= count <= max(8, own * 4)} | {own, own * 2, own * 4, 1}
    return sorted(count for count in kept if own > 1 or count <= 8)


def _usual_plans(job: Job, parameters: float, *, several: bool) -> Iterator[Plan]:
    """The job's own, then others in the order in which they are tried."""
    own = dataclasses.replace(job.plan, data=None)
    yield own
    if not job.trains or own.servers:
        return
    plain = _changed(own, replicate=1, reshard=None, recompute_modules=(), recompute_every=1)
    for shard in ("none", "zero1", "zero2", "zero3") if several else ():
        yield _changed(plain, shard=shard)
    kept = {"recompute": "full" if own.recompute == "none" else "none"}
    yield _changed(plain, **kept)
    if several:
        yield _changed(plain, shard="zero3", recompute="full")
    if not several or parameters < LARGE_PARAMETERS or not job.workload.training.sequence:
        return
    for tensor in (2, 4, 8):
        yield _changed(plain, tensor=tensor)
    yield _changed(plain, pipeline=4, micro_batch=own.micro_batch or 1, stages=None)


def _changed(plan: Plan, **fields: object) -> Plan:
    return dataclasses.replace(plan, **fields)  # type: ignore[arg-type]


# Names


@functools.lru_cache(maxsize=1024)
def _plan_words(plan: Plan) -> tuple[str, ...]:
    words = [f"{name} {getattr(plan, name)}" for name in _DEGREES if getattr(plan, name) > 1]
    shard = _SHARDS[plan.shard]
    words += [shard] if shard else []
    words += [f"recompute {plan.recompute}"] if plan.recompute != "none" else []
    words += [f"micro-batch {plan.micro_batch}"] if plan.micro_batch else []
    named_elsewhere = {"data", "shard", "recompute", "micro_batch", *_DEGREES}
    for one in dataclasses.fields(Plan):
        value, usual = getattr(plan, one.name), one.default
        if one.name not in named_elsewhere and value != usual:
            name = one.name.replace("_", " ")
            words.append(name if value is True else f"{name} {_value_words(value)}")
    return tuple(words)


def _value_words(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key} {one}" for key, one in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return " ".join(map(str, value))
    return str(value).lower()


def plan_label(plan: Plan) -> str:
    """``tensor 4, ZeRO-1, recompute full``; plain data parallelism has a name of its own."""
    words = list(_plan_words(dataclasses.replace(plan, data=None)))
    if plan.shard == "none" and not any(getattr(plan, name) > 1 for name in _DEGREES) and not plan.servers:
        words.insert(0, "data parallel")
    return ", ".join(words)


def plan_key(plan: Plan) -> str:
    """Write a plan as it stands in the address of a view: ``tensor-4-zero-1-recompute-full``."""
    return re.sub(r"[^a-z0-9]+", "-", plan_label(plan).lower()).strip("-")
