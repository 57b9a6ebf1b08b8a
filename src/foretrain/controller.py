"""PredictDDL's controller: a job in, checked, completed with the cluster that is there, embedded, predicted and recorded; a forecast out."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foretrain.capture import capture_job
from foretrain.catalog import Catalog
from foretrain.errors import ForetrainError, InputError, invalid
from foretrain.files import append_lines
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.measure.nvml import Gpu, gpu_count
from foretrain.measure.resources import AUTO, find_interface, memory_limit
from foretrain.predictors import get
from foretrain.predictors.base import Predictor
from foretrain.predictors.predictddl import PredictDDLPredictor

DEFAULT = "predictddl"


# What is there


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """A cluster as it was found: nodes that are alike."""

    source: str
    """"local" or "ray"."""
    nodes: int
    cores_per_node: int
    memory_bytes: float
    """Of a node."""
    gpus_per_node: int = 0
    gpu_memory_bytes: float | None = None
    link_bytes_per_s: float | None = None
    """Between nodes, per direction, where the system tells."""

    def cluster(self, device: str | None = None, cores_per_device: int = 1) -> dict[str, Any]:
        """The [cluster] section of a job on all of it: a worker for each GPU of this kind, else for so many cores."""
        if self.gpus_per_node and device is None:
            raise InputError(f"cluster.device: missing; {self.gpus_per_node} GPUs were found, name what they are")
        on_gpus = bool(self.gpus_per_node) and device is not None and not Catalog.load().device(device).is_cpu
        workers = self.gpus_per_node if on_gpus else self.cores_per_node // cores_per_device
        if workers < 1:
            raise invalid("cluster.cores_per_device", cores_per_device, f"at most the {self.cores_per_node} cores of a node")
        section: dict[str, Any] = {"device": device or "cpu", "devices_per_node": workers, "nodes": self.nodes}
        if not on_gpus:
            section["cores_per_device"] = cores_per_device
        if self.link_bytes_per_s and self.nodes > 1:
            section["inter_node"] = {"bandwidth": self.link_bytes_per_s}
        return section


def local_resources() -> Resources:
    """This machine."""
    gpus = gpu_count()
    return Resources(
        source="local",
        nodes=1,
        cores_per_node=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=memory_limit(),
        gpus_per_node=gpus,
        gpu_memory_bytes=float(Gpu(0).memory()[1]) if gpus else None,
        link_bytes_per_s=_link_speed(),
    )


def ray_resources(nodes: list[Mapping[str, Any]] | None = None) -> Resources:
    """The live Ray cluster that this process is connected to; ``nodes`` as ``ray.nodes()`` lists them."""
    alive = [node["Resources"] for node in (_ray_nodes() if nodes is None else nodes) if node.get("Alive")]
    if not alive:
        raise InputError("cluster: Ray knows no node that is alive")
    return Resources(
        source="ray",
        nodes=len(alive),
        cores_per_node=int(min(node.get("CPU", 0) for node in alive)),
        memory_bytes=float(min(node.get("memory", 0.0) for node in alive)),
        gpus_per_node=int(min(node.get("GPU", 0) for node in alive)),
    )


def _ray_nodes() -> list[Mapping[str, Any]]:
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ForetrainError("ray is not installed; install foretrain[ray]") from error
    if not ray.is_initialized():
        raise InputError("cluster: this process is connected to no Ray cluster; call ray.init first")
    return list(ray.nodes())


def _link_speed() -> float | None:
    """Bytes per second of the interface of the default route, as its driver tells it."""
    try:
        speed = int(Path(f"/sys/class/net/{find_interface(AUTO)}/speed").read_text())
    except (OSError, ValueError):
        return None
    return speed * 1e6 / 8 if speed > 0 else None


# The controller


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A forecast, the resources that completed its job (if any), and how long it took."""

    forecast: Forecast
    resources: Resources | None
    seconds: float


class Controller:
    """One object for all requests; they may come from many threads at once.

    ``records`` is a file of JSON lines: every request with its answer or the reason why there is none.
    """

    def __init__(self, predictor: str | Path | Predictor = DEFAULT, *, records: Path | None = None) -> None:
        self.predictor = predictor if isinstance(predictor, Predictor) else get(predictor)
        self.records = records
        self._tracing, self._writing = threading.Lock(), threading.Lock()

    def ask(self, job: Job | Mapping[str, Any], *, resources: Resources | None = None) -> Answer:
        """Check, complete, embed, predict, record. A job without a cluster gets the ``resources`` (by default, this machine)."""
        start = time.perf_counter()
        found = None
        try:
            if isinstance(job, Mapping):
                job, found = _complete(job, resources)
            if isinstance(self.predictor, PredictDDLPredictor):
                self.predictor.check(job)  # before a model is traced for nothing
            with self._tracing:  # torch traces one model at a time; a cached graph is read in milliseconds
                capture_job(job)
            forecast = self.predictor.predict(job)
        except ForetrainError as error:
            self._record({"job": job.to_dict() if isinstance(job, Job) else dict(job), "refused": str(error)})
            raise
        answer = Answer(forecast=forecast, resources=found, seconds=time.perf_counter() - start)
        self._record(_line(answer))
        return answer

    def _record(self, line: Mapping[str, Any]) -> None:
        if self.records is None:
            return
        stamped = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "predictor": self.predictor.name, **line}
        with self._writing:
            append_lines(self.records, [json.dumps(stamped, sort_keys=True, default=str)])


def _complete(data: Mapping[str, Any], resources: Resources | None) -> tuple[Job, Resources | None]:
    """A job from its tables, on the cluster that is there when it names none."""
    if "cluster" in data:
        return Job.read(data), None
    found = resources or local_resources()
    return Job.read({**data, "cluster": found.cluster()}), found


def _line(answer: Answer) -> dict[str, Any]:
    return {
        "job": answer.forecast.job.to_dict(),
        "quantities": {name: [one.median, one.low, one.high] for name, one in answer.forecast.quantities.items()},
        "assumptions": list(answer.forecast.assumptions),
        "resources": None if answer.resources is None else dataclasses.asdict(answer.resources),
        "seconds": answer.seconds,
    }
