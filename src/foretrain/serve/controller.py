"""Checks a job, completes it with the cluster there is, forecasts and records it: the controller of
PredictDDL."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foretrain.catalog import Catalog
from foretrain.errors import ForetrainError, InputError, invalid
from foretrain.fanout.cluster import check_installed, connect
from foretrain.files import append_lines
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.measure.nvml import gpu_count
from foretrain.measure.resources import AUTO, find_interface, memory_limit
from foretrain.predictors import get
from foretrain.predictors.answering import answer
from foretrain.predictors.base import Predictor

DEFAULT = "predictddl"
_LINK_TIMEOUT_S = 60.0
"""For a task on each node of a Ray cluster to start and say how fast its link is."""


# What is there


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResources:
    """A machine as it was found."""

    name: str
    cores: int
    memory_bytes: float
    gpus: int = 0
    gpu_kind: str | None = None
    """As the system names it."""
    link_bytes_per_s: float | None = None
    """To other nodes, per direction, where the system tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterResources:
    """A cluster as it was found."""

    source: str
    """"local" or "ray"."""
    nodes: tuple[NodeResources, ...]

    def cluster(self, device: str | None = None, cores_per_device: int = 1) -> dict[str, Any]:
        """The [cluster] section of a job on all of it: a worker for each GPU, or for so many cores of each
        node.

        Nodes without room for a worker are left out, and the others count as the smallest of them.
        """
        on_gpus = device is not None and not Catalog.load().device(device).is_cpu
        gpus = sum(node.gpus for node in self.nodes)
        if gpus and device is None:
            kinds = ", ".join(sorted({node.gpu_kind for node in self.nodes if node.gpu_kind}))
            raise InputError(
                f"cluster.device: missing; {gpus} GPUs{f' ({kinds})' if kinds else ''} "
                "were found, name what they are, or cpu"
            )
        if cores_per_device < 1:
            raise invalid("cluster.cores_per_device", cores_per_device, "1 or more")
        used = self.used(on_gpus, cores_per_device)
        section: dict[str, Any] = {
            "device": device or "cpu",
            "devices_per_node": min(_rooms(used, on_gpus, cores_per_device)),
            "nodes": len(used),
        }
        if not on_gpus:
            section["cores_per_device"] = cores_per_device
        speeds = [node.link_bytes_per_s for node in used if node.link_bytes_per_s is not None]
        if speeds and len(used) > 1:
            section["inter_node"] = {"bandwidth": min(speeds)}
        return section

    def used(self, on_gpus: bool, cores_per_device: int = 1) -> list[NodeResources]:
        """The nodes with room for a worker."""
        rooms = _rooms(self.nodes, on_gpus, cores_per_device)
        nodes = [node for node, room in zip(self.nodes, rooms, strict=True) if room > 0]
        if not nodes and on_gpus:
            raise InputError("cluster.device: a GPU, but none was found")
        if not nodes:
            raise invalid(
                "cluster.cores_per_device",
                cores_per_device,
                f"at most the {max(node.cores for node in self.nodes)} cores of a node",
            )
        return nodes

    def notes(self, job: Job) -> tuple[str, ...]:
        """Say what a job on this cluster takes as simpler than it is."""
        device = job.cluster.device
        used, kept = (
            self.used(not device.is_cpu, device.cores if device.is_cpu else 1),
            job.cluster.devices_per_node,
        )
        lines = []
        if len(used) < len(self.nodes):
            lines.append(
                f"cluster: {len(self.nodes) - len(used)} of {len(self.nodes)} "
                "nodes have no room for a worker and are left out"
            )
        if max(_rooms(used, not device.is_cpu, device.cores if device.is_cpu else 1)) > kept:
            lines.append(
                f"cluster: its nodes differ; {kept} workers on each, as many as the smallest has room for"
            )
        return tuple(lines)


def _rooms(nodes: Iterable[NodeResources], on_gpus: bool, cores_per_device: int) -> list[int]:
    """Count the workers that each node has room for."""
    return [node.gpus if on_gpus else node.cores // cores_per_device for node in nodes]


def local_resources() -> ClusterResources:
    """This machine."""
    return ClusterResources(
        source="local",
        nodes=(
            NodeResources(
                name=platform.node() or "localhost",
                cores=len(os.sched_getaffinity(0))
                if hasattr(os, "sched_getaffinity")
                else os.cpu_count() or 1,
                memory_bytes=memory_limit(),
                gpus=gpu_count(),
                link_bytes_per_s=link_speed(),
            ),
        ),
    )


def ray_resources(address: str | None = None) -> ClusterResources:
    """The live Ray cluster that this process is connected to, or the one that answers at ``address`` ("auto":
    one on this machine)."""
    check_installed()
    import ray

    if not ray.is_initialized():
        if address is None:
            raise InputError(
                "address: missing, and this process is connected "
                "to no Ray cluster; give the one to ask, such as auto"
            )
        connect(address, field="address")
    alive = [node for node in ray.nodes() if node.get("Alive")]
    if not alive:
        raise InputError("cluster: Ray knows no node that is alive")
    links = _ray_links([node["NodeID"] for node in alive])
    return ClusterResources(
        source="ray", nodes=tuple(_ray_node(node, links[node["NodeID"]]) for node in alive)
    )


def _ray_node(node: Mapping[str, Any], link: float | None) -> NodeResources:
    """A node as ``ray.nodes()`` lists it: what it offers to tasks."""
    offered = node["Resources"]
    kinds = sorted(name.partition(":")[2] for name in offered if name.startswith("accelerator_type:"))
    return NodeResources(
        name=str(node.get("NodeManagerHostname") or node.get("NodeManagerAddress")),
        cores=int(offered.get("CPU", 0)),
        memory_bytes=float(offered.get("memory", 0.0)),
        gpus=int(offered.get("GPU", 0)),
        gpu_kind=", ".join(kinds) or None,
        link_bytes_per_s=link,
    )


_known_links: dict[str, float | None] = {}
"""By Ray's node: the speed of a link does not change."""


def _ray_links(nodes: Sequence[str]) -> dict[str, float | None]:
    """The link speed of each node, which a task there reads; None where it does not tell in time."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def read() -> float | None:
        from foretrain.serve.controller import link_speed

        return link_speed()

    task = ray.remote(num_cpus=0, max_retries=0)(read)
    asked = {
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(): node
        for node in nodes
        if node not in _known_links
    }
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=_LINK_TIMEOUT_S) if asked else ([], [])
    for one in done:
        try:
            _known_links[asked[one]] = ray.get(one)
        except (ray.exceptions.RayError, ImportError):  # a node that was just lost, or without foretrain
            _known_links[asked[one]] = None
    _known_links.update((asked[one], None) for one in late)
    return {node: _known_links[node] for node in nodes}


def link_speed() -> float | None:
    """Bytes per second of the interface of the default route, as its driver tells it."""
    try:
        speed = int(Path(f"/sys/class/net/{find_interface(AUTO)}/speed").read_text())
    except (OSError, ValueError):
        return None
    return speed * 1e6 / 8 if speed > 0 else None


# The controller


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerAnswer:
    """A forecast, the resources that completed its job (if any), and how long it took."""

    forecast: Forecast
    resources: ClusterResources | None
    seconds: float


class Controller:
    """Answers all requests; they may come from many threads at once.

    ``resources`` tells what a job without a cluster runs on: ``local_resources``, or ``ray_resources`` (or a
    partial of it with an address), asked anew for each such job. ``records`` is a file of JSON lines: every
    request with its answer or the reason why there is none.
    """

    def __init__(
        self,
        predictor: str | Path | Predictor = DEFAULT,
        *,
        resources: Callable[[], ClusterResources] = local_resources,
        records: Path | None = None,
    ) -> None:
        self.predictor = predictor if isinstance(predictor, Predictor) else get(predictor)
        self.resources, self.records = resources, records
        self._writing, self._collecting, self._forecasting = (threading.Lock() for _ in range(3))

    def ask(
        self, job: Job | Mapping[str, Any], *, device: str | None = None, cores_per_device: int = 1
    ) -> ControllerAnswer:
        """Check, complete, embed, predict, record.

        A job without a cluster gets the one that is there, with a worker for each GPU (``device`` says which)
        or for so many cores.
        """
        start = time.perf_counter()
        resources = None
        try:
            if not isinstance(job, Job):
                job, resources = self._complete(job, device, cores_per_device)
            forecast = self._forecast(job)
            if resources is not None:
                forecast = dataclasses.replace(
                    forecast, assumptions=(*forecast.assumptions, *resources.notes(job))
                )
        except ForetrainError as error:
            self._record({"job": job.to_dict() if isinstance(job, Job) else job, "refused": str(error)})
            raise
        answer = ControllerAnswer(forecast=forecast, resources=resources, seconds=time.perf_counter() - start)
        if self.records is not None:
            self._record(_line(answer))
        return answer

    def _forecast(self, job: Job) -> Forecast:
        """Forecast one job at a time: torch traces and embeds with state of the whole process."""
        self.predictor.check(job)  # before a model is traced for nothing
        with self._forecasting:
            return answer(self.predictor, job)

    def _complete(
        self, data: Mapping[str, Any], device: str | None, cores_per_device: int
    ) -> tuple[Job, ClusterResources | None]:
        """A job from its tables, on the cluster that is there when it names none."""
        if not isinstance(data, Mapping):
            raise invalid("job", data, "a table with model, training and, if known, cluster and plan")
        if "cluster" in data:
            return Job.read(data), None
        with self._collecting:
            resources = self.resources()
        return Job.read({**data, "cluster": resources.cluster(device, cores_per_device)}), resources

    def _record(self, line: Mapping[str, Any]) -> None:
        if self.records is None:
            return
        stamped = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "predictor": self.predictor.name,
            **line,
        }
        with self._writing:
            append_lines(self.records, [json.dumps(stamped, sort_keys=True, default=str)])


def _line(answer: ControllerAnswer) -> dict[str, Any]:
    return {
        "job": answer.forecast.job.to_dict(),
        "quantities": {
            name: [one.median, one.low, one.high] for name, one in answer.forecast.quantities.items()
        },
        "assumptions": list(answer.forecast.assumptions),
        "resources": None if answer.resources is None else dataclasses.asdict(answer.resources),
        "seconds": answer.seconds,
    }
