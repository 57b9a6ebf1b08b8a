"""Runs of a training and a deadline in; configurations of data, workers and machines with time, cost and the chance of being late out."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretrain.catalog import Catalog
from foretrain.errors import ForetrainError, InputError, first_line, unknown
from foretrain.forecast import Estimate
from foretrain.job import Job, Run
from foretrain.predictors.base import Predictor


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What may be chosen from; what is left out is taken from the runs."""

    samples: tuple[int, ...] = ()
    epochs: float | None = None
    workers: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()
    instances: tuple[str, ...] = ()
    """Machines by their names in the catalogue."""
    batch: int | None = None
    """Samples per step over all workers; without it each worker keeps the batch that it has in the runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One configuration: how long the whole training takes, what it costs, and how likely it misses the deadline."""

    job: Job
    total_time_s: Estimate
    cost: Estimate | None
    """Dollars; None where nothing is known of the price."""
    late: float
    notes: tuple[str, ...] = ()

    @property
    def device_seconds(self) -> float:
        return self.total_time_s.median * self.job.cluster.world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The configurations, the cheapest that are likely enough in time first; and those that could not be forecast, with the reason."""

    options: tuple[Option, ...]
    refused: Mapping[str, str]
    deadline_s: float
    risk: float

    @property
    def best(self) -> Option | None:
        return self.options[0] if self.options and self.options[0].late <= self.risk else None


def template(runs: Sequence[Run], model: str | None = None) -> Job:
    """The job that most runs of the model have, but for its scale; with the batch per worker that most of those have, or else the largest."""
    labels = collections.Counter(run.job.workload.model.label for run in runs)
    if model is None and len(labels) > 1:
        raise InputError(
            f"model: the runs are of {len(labels)} models; choose one of {', '.join(sorted(labels)[:12])}"
        )
    name = model or next(iter(labels), None)
    if name is None:
        raise InputError("runs: there are none to learn from")
    if name not in labels:
        raise unknown("model", name, labels)
    mine = [run.job for run in runs if run.job.workload.model.label == name]
    kinds = collections.Counter(_but_for_scale(job) for job in mine)
    usual = kinds.most_common(1)[0][0]
    alike = [job for job in mine if _but_for_scale(job) == usual]
    batches = collections.Counter(_batch(job) for job in alike)
    batch = max(batches, key=lambda one: (batches[one], one))
    return next(job for job in alike if _batch(job) == batch)


def _batch(job: Job) -> int:
    """Samples of a worker in a step."""
    return job.workload.training.global_batch // (job.plan.data or 1)


def _but_for_scale(job: Job) -> str:
    document = job.to_dict()
    training = {
        name: value
        for name, value in document["training"].items()
        if name not in ("global_batch", "samples", "epochs", "steps")
    }
    plan = {name: value for name, value in document["plan"].items() if name not in ("data", "micro_batch")}
    return json.dumps([document["model"], training, job.cluster.device.name, plan], sort_keys=True)


def candidates(
    base: Job, runs: Sequence[Run], wishes: Wishes, catalog: Catalog | None = None
) -> tuple[list[Job], dict[str, str]]:
    """The jobs of all configurations, and why others are none; workers beyond those of the runs go up to twice as many."""
    known = catalog or Catalog.load()
    mine = [run.job for run in runs if run.job.workload.model.label == base.workload.model.label]
    counts = wishes.workers or _grown({job.cluster.world_size for job in mine})
    cores = wishes.cores or tuple(
        sorted(
            {
                job.cluster.device.cores
                for job in mine
                if job.cluster.device.is_cpu and job.cluster.device.cores
            }
        )
    )
    samples = wishes.samples or _only(
        base.workload.training.samples, "samples", "how many samples an epoch has"
    )
    epochs = wishes.epochs or base.workload.training.epochs or 1.0
    jobs, refused = [], {}
    for count, workers in itertools.product(samples, counts):
        for section in _clusters(base, workers, cores, wishes.instances, known):
            try:
                jobs.append(_scaled(base, section, workers, wishes.batch, count, epochs, known))
            except ForetrainError as error:
                refused[f"{workers} workers on {section.get('node') or section['device']}"] = first_line(
                    error
                )
    return list({json.dumps(job.to_dict(), sort_keys=True): job for job in jobs}.values()), refused


def _only(value: int | None, name: str, what: str) -> tuple[int, ...]:
    if value is None:
        raise InputError(f"{name}: missing; the runs do not say {what}")
    return (value,)


def _grown(counts: set[int]) -> tuple[int, ...]:
    return tuple(sorted(counts | {2 * max(counts)}))


def _clusters(
    base: Job, workers: int, cores: Sequence[int], instances: Sequence[str], catalog: Catalog
) -> Iterator[dict[str, Any]]:
    """Sections of job files: machines of each kind, as many as the workers fill; one machine that they fill in part."""
    device, group = base.cluster.device, base.cluster.groups[0]
    if device.is_cpu:
        for each in cores or (device.cores or 1,):
            yield {"device": device.name, "devices_per_node": workers, "nodes": 1, "cores_per_device": each}
        return
    named = list(instances) or ([group.node.name] if group.node else [])
    if not named:
        in_node = max(group.devices_per_node, 1)
        nodes = max(1, workers // in_node) if workers % in_node == 0 else 1
        yield {"device": device.name, "devices_per_node": workers // nodes, "nodes": nodes}
    for name in named:
        node = catalog.node(name, "instances")
        if workers <= node.devices:
            yield {"device": device.name, "node": node.name, "devices_per_node": workers, "nodes": 1}
        elif workers % node.devices == 0:
            yield {
                "device": device.name,
                "node": node.name,
                "devices_per_node": node.devices,
                "nodes": workers // node.devices,
            }


def _scaled(
    base: Job,
    cluster: Mapping[str, Any],
    workers: int,
    batch: int | None,
    samples: int,
    epochs: float,
    catalog: Catalog,
) -> Job:
    document = base.to_dict()
    rest = base.plan.tensor * base.plan.pipeline * base.plan.context
    if workers % rest:
        raise InputError(f"workers: {workers} is not a multiple of tensor x pipeline x context = {rest}")
    data = workers // rest
    training = {name: value for name, value in document["training"].items() if name != "steps"}
    training |= {"global_batch": batch or _batch(base) * data, "samples": samples, "epochs": epochs}
    plan = {**document["plan"], "data": data}
    return Job.read(
        {"model": document["model"], "training": training, "cluster": dict(cluster), "plan": plan},
        catalog=catalog,
        base=base.workload.base,
    )


def advise(
    predictor: Predictor, jobs: Sequence[Job], deadline_s: float, *, risk: float = 0.1, refused: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Advice:  # fmt: skip
    """Forecast every configuration; the cheapest that is late with a probability of at most ``risk`` comes first."""
    if not deadline_s > 0:
        raise InputError(f"deadline: {deadline_s:g} s is not more than zero")
    if not 0 < risk < 1:
        raise InputError(f"risk: {risk:g} is not between 0 and 1")
    options, without = [], dict(refused or {})
    for done, job in enumerate(jobs, start=1):
        try:
            forecast = predictor.predict(job)
            total = forecast["total_time_s"]
            options.append(
                Option(
                    job=job,
                    total_time_s=total,
                    cost=forecast.cost,
                    late=total.chance_above(deadline_s),
                    notes=forecast.assumptions,
                )
            )
        except ForetrainError as error:
            without[describe(job)] = first_line(error)
        progress(done, len(jobs))
    ordered = sorted(options, key=lambda option: _rank(option, risk))
    return Advice(options=tuple(ordered), refused=without, deadline_s=deadline_s, risk=risk)


def _rank(option: Option, risk: float) -> tuple[Any, ...]:
    """In time before late; then what it costs; then device hours, where nothing is known of prices."""
    in_time = option.late <= risk
    cost = option.cost.median if option.cost is not None else option.device_seconds
    return (not in_time, cost if in_time else option.late, option.total_time_s.median)


def machines(job: Job) -> str:
    """What a configuration is booked as."""
    cluster = job.cluster
    node, device = cluster.groups[0].node, cluster.device
    if node is not None:
        return f"{cluster.nodes} x {node.name}"
    return (
        f"{device.name}, {device.cores} cores each"
        if device.is_cpu
        else f"{cluster.nodes} nodes with {device.name}"
    )


def describe(job: Job) -> str:
    """A configuration in a few words."""
    return f"{job.cluster.world_size} workers on {machines(job)}, {job.workload.training.samples:,} samples"


def to_dict(advice: Advice) -> dict[str, Any]:
    """Plain JSON values, in SI units."""
    rows = [
        {
            "configuration": describe(option.job),
            "job": option.job.to_dict(),
            "total_time_s": dataclasses.asdict(option.total_time_s),
            "cost_usd": None if option.cost is None else dataclasses.asdict(option.cost),
            "chance_late": option.late,
            "in_time": option.late <= advice.risk,
            "notes": list(option.notes),
        }
        for option in advice.options
    ]
    return {
        "deadline_s": advice.deadline_s,
        "risk": advice.risk,
        "options": rows,
        "refused": dict(advice.refused),
    }
