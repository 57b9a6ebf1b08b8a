"""Tells how fast a job runs on its GPUs: by the trace, by a table of throughputs, or by a Predictor."""

from __future__ import annotations

import ast
import dataclasses
import gzip
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from foretrain.cluster import Cluster
from foretrain.errors import ForetrainError, InputError, UnsupportedJob, unknown
from foretrain.files import parse_json, read_text
from foretrain.job import Job
from foretrain.predictors.base import Predictor
from foretrain.scheduling.jobs import TraceJob
from foretrain.scheduling.machines import packed

Shape = tuple[int, ...]
"""GPUs per node, most first."""

MOST_RISK = 0.05
"""Chance of running out of memory that is taken, where nothing is said."""
_PARALLEL = 0.95
"""Share of a job that runs in parallel (Amdahl), where nothing better is known about jobs that change their
size."""


class UnknownLength(InputError):
    """How much work a job is cannot be told; ``why`` says the same of any job."""

    def __init__(self, job: TraceJob, why: str) -> None:
        super().__init__(f"trace: job {job.name!r} {why}")
        self.why = why


class Speeds(ABC):
    """What a job does in a second, in the units of its ``work``."""

    @abstractmethod
    def work(self, job: TraceJob) -> float:
        """How much there is to do."""

    @abstractmethod
    def rate(self, job: TraceJob, device: str, shape: Shape) -> float:
        """Work per second on GPUs of one kind; 0 where the job cannot run."""

    def checkpoint_write_s(self, job: TraceJob) -> float:
        """How long a job writes at each of its checkpoints."""
        return 0.0

    def why_not(self, job: TraceJob, devices: Iterable[str]) -> str:
        """Why a job runs on none of the devices."""
        return f"runs on none of the cluster's devices ({', '.join(devices)})"


class TraceSpeeds(Speeds):
    """The trace's own durations.

    On more or fewer GPUs than asked for Amdahl's law holds; each further node may cost some speed.
    """

    def __init__(
        self,
        devices: Mapping[str, float] | None = None,
        slowdown_per_node: float = 0.0,
        parallel: float = _PARALLEL,
    ) -> None:
        self._devices = dict(devices or {})
        self._slowdown = slowdown_per_node
        self._parallel = parallel

    def work(self, job: TraceJob) -> float:
        if job.duration_s is None:
            raise UnknownLength(job, "has steps and no duration; give a table of throughputs")
        return job.duration_s

    def rate(self, job: TraceJob, device: str, shape: Shape) -> float:
        gpus = sum(shape)
        scale = 1.0 if gpus == job.gpus else self._speedup(gpus) / self._speedup(job.gpus)
        across = 1.0 + self._slowdown * (len(shape) - 1)
        return scale * self._devices.get(device, 1.0) / across

    def _speedup(self, gpus: int) -> float:
        return 1.0 / (1.0 - self._parallel + self._parallel / gpus)


class ThroughputTable(Speeds):
    """Steps per second by device, job type and number of GPUs, as Gavel publishes them."""

    def __init__(self, table: Mapping[tuple[str, str, int], float], name: str = "table") -> None:
        self._table = dict(table)
        self._name = name
        self.devices = tuple(dict.fromkeys(device for device, _, _ in table))

    @classmethod
    def load(cls, path: Path) -> ThroughputTable:
        """Gavel's ``simulation_throughputs.json``, plain or compressed, without pairs of jobs on one GPU."""
        try:
            text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else read_text(path)
            document = parse_json(text)
            table = {
                (device, *_job_type(key)): float(rates["null"])
                for device, entries in document.items()
                for key, rates in entries.items()
            }
        except (
            *(OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError, SyntaxError),
        ) as error:
            raise InputError(
                f"{path}: not a table of throughputs by device, (job type, GPUs) and partner ({error})"
            ) from error
        return cls(table, str(path))

    def work(self, job: TraceJob) -> float:
        if job.steps is None:
            raise UnknownLength(job, "has no number of steps, which a table of throughputs needs")
        return job.steps

    def rate(self, job: TraceJob, device: str, shape: Shape) -> float:
        """The entry of the table; 0 where it has none for that type on that many GPUs."""
        name = self._named(device)
        if name not in self.devices:
            raise unknown(f"{self._name}: device", device, self.devices)
        return self._table.get((name, job.kind, sum(shape)), 0.0)

    def alone(self, kind: str, device: str) -> float | None:
        """Steps per second of a kind of job on one GPU; None where the table does not say."""
        return self._table.get((self._named(device), kind, 1)) or None

    def why_not(self, job: TraceJob, devices: Iterable[str]) -> str:
        return f"no throughput of that job type on that many GPUs in {Path(self._name).name}"

    def _named(self, device: str) -> str:
        """The table's name of a device, which may be how its full name begins: "v100" of "v100-sxm-16gb"."""
        return device if device in self.devices else device.partition("-")[0]


def _job_type(key: str) -> tuple[str, int]:
    kind, gpus = ast.literal_eval(key)
    return str(kind), int(gpus)


class PredictedSpeeds(Speeds):
    """Steps per second as a predictor forecasts them.

    Each type of job has a template, whose cluster and plan become those of the GPUs. Jobs of a type without a
    template run as the trace says. ``sections`` tell the nodes and links of each kind of device, where the
    cluster has them; otherwise those of the template hold. Where the chance of running out of memory is
    greater than ``memory_risk``, or the predictor cannot cost the job, it does not run.
    """

    def __init__(
        self,
        predictor: Predictor,
        templates: Mapping[str, Job],
        otherwise: Speeds | None = None,
        sections: Mapping[str, Mapping[str, Any]] | None = None,
        memory_risk: float = MOST_RISK,
    ) -> None:
        self._risk = memory_risk
        self._why: dict[tuple[str, str], str] = {}
        self._predictor = predictor
        self._templates = dict(templates)
        self._otherwise = otherwise or TraceSpeeds()
        self._sections = dict(sections or {})
        self._step_s: dict[tuple[str, str, Shape], float] = {}
        self._chance: dict[tuple[str, str, Shape], float | None] = {}

    def work(self, job: TraceJob) -> float:
        """Steps; a job with only a duration does what the template does in it on the GPUs asked for."""
        template = self._templates.get(job.kind)
        if template is None:
            return self._otherwise.work(job)
        if job.steps is not None:
            return job.steps
        if template.workload.training.total_steps is not None and job.duration_s is None:
            return template.workload.training.total_steps
        device = job.device or template.cluster.device.name
        section = self._sections.get(device, {})
        per_node = int(section.get("devices_per_node", template.cluster.devices_per_node))
        try:
            step_s = self.step_s(job.kind, device, packed(job.gpus, per_node))
        except InputError as error:
            raise UnknownLength(
                job, f"has a duration and no steps, and these are not known: {error}"
            ) from error
        return self._otherwise.work(job) / step_s

    def rate(self, job: TraceJob, device: str, shape: Shape) -> float:
        if job.kind not in self._templates:
            return self._otherwise.rate(job, device, shape)
        try:
            step_s = self.step_s(job.kind, device, shape)
        except InputError as error:
            self._why[job.kind, device] = str(error)
            return 0.0
        chance = self._chance[job.kind, device, shape]
        if chance is not None and chance > self._risk:
            out = f"runs out of memory on {device} with a chance of {chance:.0%}"
            self._why[job.kind, device] = f"{job.kind} {out} (at most {self._risk:.0%} is taken)"
            return 0.0
        return 1.0 / step_s

    def why_not(self, job: TraceJob, devices: Iterable[str]) -> str:
        kinds = list(devices)
        reasons = [self._why[job.kind, device] for device in kinds if (job.kind, device) in self._why]
        return "; ".join(dict.fromkeys(reasons)) if reasons else super().why_not(job, kinds)

    def step_s(self, kind: str, device: str, shape: Shape) -> float:
        """Predicted time of a step. Uneven placements are taken as even ones over as many nodes."""
        key = (kind, device, shape)
        if key not in self._step_s:
            job = placed(self._templates[kind], device, shape, self._sections.get(device))
            try:
                forecast = self._predictor.predict(job)
            except UnsupportedJob as error:
                raise InputError(
                    f"template {kind} on {'+'.join(map(str, shape))} GPUs of {device}: {error}"
                ) from error
            if "step_time_s" not in forecast.quantities:
                raise ForetrainError(
                    f"predictor {self._predictor.name}: gives no step_time_s, which the simulator needs"
                )
            self._step_s[key] = forecast.quantities["step_time_s"].median
            self._chance[key] = forecast.out_of_memory_chance
        return self._step_s[key]


def placed(template: Job, device: str, shape: Shape, nodes_and_links: Mapping[str, Any] | None = None) -> Job:
    """A template's job on other GPUs: data parallelism makes the difference, the batch per device stays."""
    gpus = sum(shape)
    nodes = len(shape) if gpus % len(shape) == 0 else gpus
    section = nodes_and_links
    if section is None:
        same = template.cluster.device.name == device
        section = template.cluster.to_dict() if same else {"device": device}
    cluster = Cluster.read({**section, "devices_per_node": gpus // nodes, "nodes": nodes})
    plan, training = template.plan, template.workload.training
    split = plan.tensor * plan.pipeline * plan.context
    if gpus % split:
        raise InputError(
            f"gpus: {gpus} is not a multiple of the template's tensor x pipeline x context = {split}"
        )
    data = gpus // split
    batch = math.ceil(training.global_batch / (plan.data or 1)) * data
    workload = dataclasses.replace(
        template.workload, training=dataclasses.replace(training, global_batch=batch)
    )
    return Job(workload=workload, cluster=cluster, plan=dataclasses.replace(plan, data=data))
