"""Makes candidates of jobs: what a predictor looks at in each, and what measuring it takes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretrain.errors import ForetrainError, InputError, first_line
from foretrain.job import Job
from foretrain.measure.campaign import Cell, cell_of
from foretrain.measure.candidates import Array, Candidates, plain_candidates, row_candidates
from foretrain.predictors.base import Predictor

_START_S, _TIMED_S, _STEPS, _EPOCH_LIMIT_S = 5.0, 3.0, 10, 20.0
"""What a measurement takes: the start of its processes, so long or so many steps, and an epoch up to this."""

_MACHINE = ("host", "machines")
"""Of a cluster, what says where it was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCandidates:
    """Jobs that could be measured, with what is known of others, and why some are none."""

    cells: Sequence[Cell]
    candidates: Candidates
    known: Array | None
    """Features of what was measured before."""
    unpriced: str | None
    """Why it is not known of any of them how long it takes; None where it is."""
    left_out: Sequence[str]


def job_candidates(
    cells: Iterable[Cell],
    predictor: Predictor,
    *,
    measured: Iterable[Job] = (),
    row: Callable[[Job], Mapping[str, float]] | None = None,
    step_s: Callable[[Job], float],
    labels: Sequence[Mapping[str, Any]] | None = None,
    quadratic: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> JobCandidates:
    """Make a candidate of each job, but for those that were measured; ``row`` has the features of a job as
    they are, where they are not what the predictor looks at, and ``step_s`` expects a step's time, or
    refuses: such a job is left out, unless all are. Squares and products of the features are there where
    ``quadratic`` asks for them or what the predictor looks at has them."""
    before = list(measured)
    seen = {key for job in before for key in _keys_of_measured(job)}
    wanted: list[tuple[Cell, Mapping[str, Any]]] = []
    for number, cell in enumerate(cells):
        if (key := _key(cell.job)) not in seen:
            seen.add(key)
            wanted.append((cell, labels[number] if labels is not None else _label(cell)))
    look = row or predictor.design_row
    rows, left_out = dict[int, Mapping[str, float]](), dict[int, str]()
    jobs = [cell.job for cell, _ in wanted] + before
    for number, job in enumerate(jobs):
        try:
            rows[number] = look(job)
        except ForetrainError as error:
            left_out[number] = _refusal(job, error)
        progress(number + 1, len(jobs))
    costs, unpriced = dict[int, float](), dict[int, str]()
    for number in (number for number in rows if number < len(wanted)):
        try:
            costs[number] = measuring_s(jobs[number], step_s(jobs[number]))
        except ForetrainError as error:
            unpriced[number] = _refusal(jobs[number], error)
    if costs:
        left_out |= unpriced
    reasons = [reason for number, reason in sorted(left_out.items()) if number < len(wanted)]
    kept = [number for number in rows if number not in left_out]
    chosen = [wanted[number] for number in kept if number < len(wanted)]
    if not chosen:
        why = reasons[0] if reasons else "all of them were measured before"
        raise InputError(f"candidates: there is none to choose for {predictor.name} ({why})")
    paid = [costs.get(number, 1.0) for number in kept]
    shown = [label for _, label in chosen]
    nothing: list[Mapping[str, Any]] = [{}] * (len(kept) - len(chosen))
    make = row_candidates if row is None else plain_candidates
    bent = quadratic or (row is None and predictor.quadratic_design)
    every = make([rows[number] for number in kept], paid, [*shown, *nothing], quadratic=bent)
    return JobCandidates(
        cells=[cell for cell, _ in chosen],
        candidates=every.take(range(len(chosen))),
        known=every.features[len(chosen) :] if nothing else None,
        unpriced=None if costs else next(iter(unpriced.values())),
        left_out=reasons,
    )


def measuring_s(job: Job, step_s: float) -> float:
    """Seconds that measuring takes, by the time of a step."""
    epoch_s = (job.workload.training.steps_per_epoch or 0) * step_s
    return _START_S + max(_TIMED_S, _STEPS * step_s) + (epoch_s if epoch_s <= _EPOCH_LIMIT_S else 0.0)


def scaled(job: Job, machines: int, share: float) -> Job:
    """A job on another number of workers and a share of its data.

    Of ``training.samples`` where the job has them, each worker's batch as it is; else of the batch, which the
    workers split. Nodes stay as full as they are, or as the catalogue's node is.
    """
    document, cluster, training = job.to_dict(), job.cluster, dict(job.to_dict()["training"])
    if len(cluster.groups) > 1:
        raise InputError("cluster.groups: several kinds of nodes cannot be scaled; give a job on one kind")
    batch = training["global_batch"]
    if "samples" in training:
        training["samples"] = max(1, round(training["samples"] * share))
        training["global_batch"] = max(1, batch // cluster.world_size) * machines
    else:
        training["global_batch"] = max(1, round(batch * share / machines)) * machines
    in_node = cluster.node.devices if cluster.node is not None else cluster.devices_per_node
    nodes = machines // in_node if machines > in_node and (cluster.node or cluster.nodes > 1) else 1
    if machines % nodes:
        raise InputError(f"--cluster: {machines} workers do not fill nodes of {in_node}")
    place = {**document["cluster"], "devices_per_node": machines // nodes, "nodes": nodes}
    plan = {name: value for name, value in document["plan"].items() if name not in ("data", "micro_batch")}
    sections = {"model": document["model"], "training": training, "cluster": place, "plan": plan}
    return Job.read(sections, base=job.workload.base)


def line_of(cell: Cell, home: Path, **about: Any) -> dict[str, Any]:
    """A job as ``measure steps`` and ``measure campaign`` read it, from a file in ``home``."""
    how = {"cores_per_worker": cell.cores, "link": cell.link}
    provenance = {"source": "foretrain design", **how, **about}
    return {"job": cell.job.seen_from(home).to_dict(), "provenance": provenance}


def cells_of_jobs(jobs: Iterable[Job]) -> list[Cell]:
    """Make the cells that ``measure campaign`` would run on this machine."""
    return [cell_of(job, {}) for job in jobs]


def _key(job: Job, without: Sequence[str] = ()) -> str:
    document = job.seen_from(Path()).to_dict()
    place = {name: value for name, value in document["cluster"].items() if name not in without}
    return json.dumps({**document, "cluster": place}, sort_keys=True)


def _keys_of_measured(job: Job) -> Iterator[str]:
    """List the keys of the jobs that it measures: a run knows its host and machines, a job may leave them
    open."""
    for named in range(len(_MACHINE) + 1):
        for without in itertools.combinations(_MACHINE, named):
            yield _key(job, without)


def _refusal(job: Job, error: ForetrainError) -> str:
    size = f"{job.cluster.world_size} workers, batch {job.workload.training.global_batch:,}"
    return f"{job.workload.model.label}, {size}: {first_line(error)}"


def _label(cell: Cell) -> dict[str, Any]:
    job, training = cell.job, cell.job.workload.training
    label = {"model": job.workload.model.label, "workers": job.cluster.world_size, "nodes": job.cluster.nodes}
    if job.cluster.groups[0].device.is_cpu:
        label["cores"] = cell.cores
    sizes = {"batch": training.global_batch, "samples": training.samples, "link": cell.link}
    return {**label, **{name: size for name, size in sizes.items() if size is not None}}
