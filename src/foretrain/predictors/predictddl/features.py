"""Says what PredictDDL sees of a job and its captured step, as columns with names."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretrain.costs.roofline import arithmetic
from foretrain.graph import PHASES, OpGraph
from foretrain.job import Job
from foretrain.predictors.predictddl.families import COMPUTING, CONVOLUTIONS, FAMILIES, family_of
from foretrain.predictors.predictddl.gpu import DeviceWork, device_work, gpu_columns

Array = npt.NDArray[np.float64]

# Dataset types

_USUAL_SIDE = 224
_LEAST_SIDES = {"imagenet": 112, "tiny-imagenet": 56, "cifar10": 1}
"""By the name of a dataset whose images are of such a size: from which smaller side on."""


def dataset_type(job: Job) -> str:
    """Name what a predictor is trained for: text, or images of about the size of a well-known dataset's (the
    number of classes changes little), or a model's own inputs."""
    training, model = job.workload.training, job.workload.model
    if training.sequence is not None:
        return "text"
    if training.image_shape is not None:
        side = min(training.image_shape[1:])
    elif model.source in ("timm", "torchvision"):
        side = _USUAL_SIDE
    else:
        return "own inputs"
    return next(name for name, least in _LEAST_SIDES.items() if side >= least)


# What a worker does

FAMILY_COLUMNS = (
    *(f"{name}: log arithmetic" for name in COMPUTING),
    *(f"{name}: log traffic" for name in FAMILIES),
    *(f"log {name}" for name in ("calls", "parameters", "arithmetic", "traffic", "activations")),
)


@dataclass(frozen=True, eq=False, kw_only=True)
class OperatorWork:
    """Says what a worker does in a step: seconds at the device's peak rates, by family."""

    arithmetic_s: Array
    """Of ``FAMILIES``."""
    traffic_s: Array
    calls: float
    convolutions: float
    """Calls among them."""
    parameters: float
    activations_bytes: float
    on_gpu: DeviceWork | None = None
    """By parts of the step, where the device is a GPU."""

    @property
    def columns(self) -> Array:
        """Compute the figures that ``FAMILY_COLUMNS`` names, and of GPUs ``GPU_COLUMNS``."""
        sums = (
            self.calls,
            self.parameters,
            self.arithmetic_s.sum() * 1e6,
            self.traffic_s.sum() * 1e6,
            self.activations_bytes,
        )
        seconds = np.concatenate([self.arithmetic_s[: len(COMPUTING)], self.traffic_s])
        of_device = np.zeros(0) if self.on_gpu is None else gpu_columns(self.on_gpu)
        return np.concatenate([np.log1p(seconds * 1e6), np.log1p(sums), of_device])


def work_of(job: Job, graph: OpGraph) -> OperatorWork:
    """The operators of a step at the rates of the job's device, summed up by family."""
    device = job.cluster.device
    repeated, once = _sums(graph)
    flops, size, calls = (job.accumulation * one + other for one, other in zip(repeated, once, strict=True))
    rates = np.array([device.peak_flops(form) for form in _FORMATS])
    held = sum(buffer.size_bytes for buffer in graph.buffers if buffer.category == "activations")
    return OperatorWork(
        arithmetic_s=(flops.reshape(len(_FORMATS), -1) / rates[:, None]).sum(axis=0),
        traffic_s=size / device.memory_bytes_per_s,
        calls=float(calls.sum()),
        convolutions=float(calls[: len(CONVOLUTIONS)].sum()),
        parameters=float(max(graph.parameters, 1)),
        activations_bytes=float(held),
        on_gpu=None if device.is_cpu else device_work(graph, device).times(job.accumulation),
    )


_FORMATS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
_Sums = tuple[tuple[Array, ...], tuple[Array, ...]]
_known_sums: weakref.WeakKeyDictionary[OpGraph, _Sums] = weakref.WeakKeyDictionary()


def _sums(graph: OpGraph) -> _Sums:
    """FLOPs (by number format and family), bytes and calls (by family): of forward and backward, which
    repeat with every micro-batch, and of the optimizer."""
    if graph not in _known_sums:
        _known_sums[graph] = _summed(graph)
    return _known_sums[graph]


def _summed(graph: OpGraph) -> _Sums:
    precision = str(graph.info.get("precision", "fp32"))
    kinds, forms = (
        np.array(places, dtype=np.int64)[graph.operator_index]
        for places in (
            [FAMILIES.index(family_of(operator)) for operator in graph.operators],
            [_FORMATS.index(arithmetic(operator, precision)) for operator in graph.operators],
        )
    )
    launched, optimizer = graph.column("launches"), graph.phase_index == PHASES.index("optimizer")

    def sums(places: npt.NDArray[np.int64], column: Array, count: int) -> Array:
        return np.bincount(places, column, count).astype(np.float64)

    def parts(share: Array) -> tuple[Array, ...]:
        flops = sums(
            forms * len(FAMILIES) + kinds, graph.column("flops") * share, len(_FORMATS) * len(FAMILIES)
        )
        return flops, *(
            sums(kinds, column, len(FAMILIES)) for column in (graph.column("bytes") * share, share)
        )

    return parts(launched * ~optimizer), parts(launched * optimizer)


# Clusters

CLUSTER_COLUMNS = (
    *("log workers", "workers", "several workers", "log nodes"),
    *("parameter servers", "parameter servers x log workers"),
    *(
        "log cores",
        "log memory",
        "log FLOP/s",
        "log memory bandwidth",
        "log link bandwidth",
        "log batch per worker",
    ),
    *("log parameters x log workers", "log parameters x servers"),
)
IN_LAW = tuple(CLUSTER_COLUMNS.index(name) for name in ("log nodes", "log cores", "log link bandwidth"))
"""Columns that the baseline has as laws of its own, and few runs vary."""
_MANY_WORKERS = 16
"""The unit of the column "workers"."""


def cluster_columns(job: Job, parameters: float) -> Array:
    """Compute the figures that ``CLUSTER_COLUMNS`` names: what PredictDDL knows of the cluster, the batch,
    and how they meet the model's size."""
    cluster, device = job.cluster, job.cluster.device
    workers, servers = cluster.world_size, float(bool(job.plan.servers))
    link = cluster.inter_node if job.over_network else cluster.intra_node
    log_workers, log_parameters = math.log(workers), math.log(parameters)
    training = job.workload.training
    figures = (
        device.cores,
        device.memory_bytes,
        device.peak_flops(training.precision.removeprefix("amp-")),
        device.memory_bytes_per_s,
        link.bandwidth_bytes_per_s,
        training.global_batch / workers,
    )
    return np.array(
        [
            *(log_workers, workers / _MANY_WORKERS, float(workers > 1), math.log(cluster.nodes)),
            *(servers, servers * log_workers),
            *(math.log(figure) for figure in figures),
            *(log_parameters * log_workers, log_parameters * servers),
        ]
    )
