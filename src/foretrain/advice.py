"""Ranks configurations of data, workers and machines by time, cost and the chance of missing a deadline."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretrain.catalog import Catalog
from foretrain.cluster import Cluster
from foretrain.errors import ForetrainError, InputError, first_line, unknown
from foretrain.forecast import Estimate
from foretrain.job import Job
from foretrain.predictors.base import Predictor
from foretrain.run import Run
from foretrain.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Says what may be chosen from; what is left out is taken from the runs."""

    samples: tuple[int, ...] = ()
    epochs: float | None = None
    workers: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()
    instances: tuple[str, ...] = ()
    """Machines by their names in the catalogue."""
    batch: int | None = None
    """Samples per step over all workers; without it each worker keeps the batch that it has in the runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedConfiguration:
    """One configuration: how long the whole training takes, what it costs, and how likely it is late."""

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
    """The configurations, the cheapest that are likely enough in time first."""

    options: tuple[RatedConfiguration, ...]
    refused: Mapping[str, str]
    """Those that could not be forecast, with the reason."""
    deadline_s: float
    risk: float
    data: str = ""
    """How much data there is to train on, and who says so."""

    @property
    def best(self) -> RatedConfiguration | None:
        return self.options[0] if self.options and self.options[0].late <= self.risk else None


def template(runs: Sequence[Run], model: str | None = None) -> Job:
    """The job that most runs of the model have, but for its scale; with their most usual batch per worker."""
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
    jobs = [run.job for run in runs if run.job.workload.model.label == name]
    kinds = collections.Counter(_but_for_scale(job) for job in jobs)
    usual = kinds.most_common(1)[0][0]
    alike = [job for job in jobs if _but_for_scale(job) == usual]
    batches = collections.Counter(_batch(job) for job in alike)
    usual_batch = max(batches, key=lambda batch: (batches[batch], batch))
    return next(job for job in alike if _batch(job) == usual_batch)


def _batch(job: Job) -> int:
    """Samples of a worker in a step."""
    return job.workload.training.global_batch // (job.plan.data or 1)


_SCALE = {"training": ("global_batch", "samples", "epochs", "steps"), "plan": ("data", "micro_batch")}


def _but_for_scale(job: Job) -> str:
    document = job.to_dict()
    for section, names in _SCALE.items():
        document[section] = {key: value for key, value in document[section].items() if key not in names}
    kept = [document[section] for section in ("model", "training", "plan")]
    return json.dumps([*kept, job.cluster.device.name], sort_keys=True)


def candidates(
    base: Job, runs: Sequence[Run], wishes: Wishes, catalog: Catalog | None = None
) -> tuple[list[Job], dict[str, str]]:
    """The jobs of all configurations, one at least, and why others are none; workers go up to twice those of
    the runs."""
    catalog = catalog or Catalog.load()
    clusters = [run.job.cluster for run in runs if run.job.workload.model.label == base.workload.model.label]
    counts = wishes.workers or _grown({cluster.world_size for cluster in clusters})
    used = {cluster.device.cores for cluster in clusters if cluster.device.is_cpu}
    cores = wishes.cores or tuple(sorted(filter(None, used)))
    samples, epochs = wishes.samples or (_most_samples(base, runs),), _epochs(base, wishes)
    jobs, refused = [], {}
    for count, workers in itertools.product(samples, counts):
        for section in _clusters(base, workers, cores, wishes.instances, clusters, catalog):
            try:
                jobs.append(_scaled(base, section, workers, wishes.batch, count, epochs, catalog))
            except ForetrainError as error:
                label = f"{counted(workers, 'worker')} on {section.get('node') or section['device']}"
                refused[label] = first_line(error)
    if not jobs:
        field = "instances" if wishes.instances else "workers"
        reasons = "; ".join(dict.fromkeys(refused.values())) or "they fill no machine"
        raise InputError(f"{field}: no configuration is left: {reasons}")
    return list({json.dumps(job.to_dict(), sort_keys=True): job for job in jobs}.values()), refused


def _sizes(base: Job, runs: Sequence[Run]) -> list[int]:
    """List the sizes of the data that runs of the model have, the largest last."""
    trainings = [run.job.workload.training for run in runs if run.job.workload.model == base.workload.model]
    return sorted({training.samples for training in trainings if training.samples is not None})


def _most_samples(base: Job, runs: Sequence[Run]) -> int:
    sizes = _sizes(base, runs)
    if not sizes:
        raise InputError(
            "samples: missing; the runs do not say how many samples an epoch has: give --samples"
        )
    return sizes[-1]


def _epochs(base: Job, wishes: Wishes) -> float:
    return wishes.epochs or base.workload.training.epochs or 1.0


def data_taken(base: Job, runs: Sequence[Run], wishes: Wishes) -> str:
    """Say in words how much data the configurations train on, and how often."""
    sizes = _sizes(base, runs)
    if wishes.samples:
        amount = f"{', '.join(f'{count:,}' for count in wishes.samples)} samples an epoch"
    elif len(sizes) > 1:
        most = f"the most of the runs, which have {sizes[0]:,} to {sizes[-1]:,}"
        amount = f"{sizes[-1]:,} samples an epoch, {most} (--samples takes others)"
    else:
        whose = "as in the runs" if any(run.measured for run in runs) else "as the job has it"
        amount = f"{_most_samples(base, runs):,} samples an epoch, {whose} (--samples takes others)"
    epochs = _epochs(base, wishes)
    return f"{amount}; {epochs:g} epoch{'s' if epochs != 1 else ''}"


def _grown(counts: set[int]) -> tuple[int, ...]:
    return tuple(sorted(counts | {2 * max(counts)}))


def _clusters(
    base: Job,
    workers: int,
    cores: Sequence[int],
    instances: Sequence[str],
    clusters: Sequence[Cluster],
    catalog: Catalog,
) -> Iterator[dict[str, Any]]:
    """Sections of job files: machines of each kind, as many as the workers fill, or one filled in part;
    without a choice, nodes as those of the runs (``clusters``), with their links."""
    device, group = base.cluster.device, base.cluster.groups[0]
    named = list(instances) or ([group.node.name] if group.node else [])
    parts = [{"cores_per_device": each} for each in cores or (device.cores or 1,)] if device.is_cpu else [{}]
    like = [each for each in (base.cluster, *clusters) if _machine(each) == _machine(base.cluster)]
    held = {each.nodes for each in like if each.world_size == workers and workers % each.nodes == 0}
    links = {name: link for name, link in base.cluster.to_dict().items() if name in _LINKS}
    for part in parts:
        for name in named:
            node = catalog.node(name, "instances")
            in_node = min(workers, node.devices)
            filled = {workers // in_node} if workers % in_node == 0 else set()
            for nodes in sorted(filled if instances else filled | held):
                section = {"device": device.name, "node": node.name, **part}
                yield {**section, "devices_per_node": workers // nodes, "nodes": nodes}
        if not named:
            for nodes in sorted(held or {_nodes_as(like, workers)}):
                section = {"device": device.name, **links, **part}
                yield {**section, "devices_per_node": workers // nodes, "nodes": nodes}


def _machine(cluster: Cluster) -> tuple[str, str | None]:
    """The device of a cluster, and the name of its nodes where it tells."""
    node = cluster.groups[0].node
    return cluster.device.name, node.name if node else None


def _nodes_as(clusters: Sequence[Cluster], workers: int) -> int:
    """Count the nodes of workers that no cluster has as many of: one where all have one, otherwise as few as
    the fullest nodes allow."""
    most = max(each.groups[0].devices_per_node for each in clusters)
    if workers <= most or all(each.nodes == 1 for each in clusters):
        return 1
    return workers // math.gcd(workers, most)


_LINKS = ("intra_node", "inter_node")


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
    sections = {"model": document["model"], "training": training, "cluster": dict(cluster), "plan": plan}
    return Job.read(sections, catalog=catalog, base=base.workload.base)


def check_wanted(deadline_s: float, risk: float) -> None:
    """Refuse what no configuration can meet."""
    if not deadline_s > 0:
        raise InputError(f"deadline: {deadline_s:g} s is not more than zero")
    if not 0 < risk < 1:
        raise InputError(f"risk: {risk:g} is not between 0 and 1")


def advise(
    predictor: Predictor,
    jobs: Sequence[Job],
    deadline_s: float,
    *,
    risk: float = 0.1,
    refused: Mapping[str, str] | None = None,
    data: str = "",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Advice:
    """Forecast every configuration; the cheapest whose chance to be late is at most ``risk`` comes first."""
    check_wanted(deadline_s, risk)
    options, without = [], dict(refused or {})
    for done, job in enumerate(jobs, start=1):
        try:
            forecast = predictor.predict(job)
            total, notes = forecast["total_time_s"], forecast.assumptions
            late = total.chance_above(deadline_s)
            options.append(
                RatedConfiguration(job=job, total_time_s=total, cost=forecast.cost, late=late, notes=notes)
            )
        except ForetrainError as error:
            without[describe(job)] = first_line(error)
        progress(done, len(jobs))
    ordered = sorted(options, key=lambda option: _rank(option, risk))
    return Advice(options=tuple(ordered), refused=without, deadline_s=deadline_s, risk=risk, data=data)


def _rank(option: RatedConfiguration, risk: float) -> tuple[Any, ...]:
    """Rank by being in time before late; then by what it costs; then by device hours, where nothing is known
    of prices."""
    in_time = option.late <= risk
    cost = option.cost.median if option.cost is not None else option.device_seconds
    return (not in_time, cost if in_time else option.late, option.total_time_s.median)


def machines(job: Job) -> str:
    """Name what a configuration is booked as."""
    cluster = job.cluster
    node, device = cluster.groups[0].node, cluster.device
    if node is not None:
        return f"{cluster.nodes} x {node.name}"
    if device.is_cpu:
        nodes = f"{cluster.nodes} nodes with " if cluster.nodes > 1 else ""
        return f"{nodes}{device.name}, {counted(device.cores, 'core')} each"
    return f"{counted(cluster.nodes, 'node')} with {device.name}"


def notes(options: Sequence[RatedConfiguration]) -> list[str]:
    """List what the forecasts of these configurations note, each with those that it is said of."""
    said: dict[str, list[str]] = {}
    for option in options:
        configuration = f"{counted(option.job.cluster.world_size, 'worker')} on {machines(option.job)}"
        for note in option.notes:
            said.setdefault(note, []).append(configuration)
    return [
        note if len(whom) == len(options) else f"{'; '.join(dict.fromkeys(whom))}: {note}"
        for note, whom in said.items()
    ]


def describe(job: Job) -> str:
    """A configuration in a few words."""
    workers = counted(job.cluster.world_size, "worker")
    return f"{workers} on {machines(job)}, {job.workload.training.samples:,} samples"


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
    asked = {"deadline_s": advice.deadline_s, "risk": advice.risk, "data": advice.data}
    return {**asked, "options": rows, "refused": dict(advice.refused)}
