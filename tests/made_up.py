"""What the tests of operator models and of predictors learn from: operators and runs whose times follow a
simple rule."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from foretrain.cluster import Catalog, Device
from foretrain.costs.features import describe
from foretrain.costs.measured import MeasuredOperator, matmul_precision, operator_key
from foretrain.graph import Buffer, Op, Operator, OpGraph, TensorSpec
from foretrain.graph.flops import flops
from foretrain.job import Job
from foretrain.predictors.deletepop import DeletePopPredictor
from foretrain.predictors.deletepop.calibration import TIMES
from foretrain.run import Run

H200 = Catalog.load().device("h200-sxm-141gb")
MODEL = """
import torch

def net(batch, width=16):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))
"""
"""A file of a user's own."""


# Operators


def spec(*shape: int, dtype: str = "float32", strides: tuple[int, ...] | None = None) -> TensorSpec:
    return TensorSpec(shape, dtype, strides)


def call(
    name: str, *inputs: TensorSpec, outputs: tuple[TensorSpec, ...] = (), launches: bool = True, **args: Any
) -> Operator:
    outputs = outputs or inputs[:1]
    read, written = (sum(one.size_bytes for one in some) for some in (inputs, outputs))
    return Operator(
        name, "default", inputs, outputs, args, flops(name, args, inputs, outputs), read, written, launches
    )


def product(m: int, k: int, n: int, dtype: str = "float32") -> Operator:
    return call("mm", spec(m, k, dtype=dtype), spec(k, n, dtype=dtype), outputs=(spec(m, n, dtype=dtype),))


def one_product(samples: int = 4) -> OpGraph:
    """A step of one matrix product."""
    operator = product(samples, 4, 4)
    return OpGraph(
        ops=(Op(operator, "forward", "layer", (0, 1), (2,)),),
        buffers=(
            Buffer(64, "weights", -1, 1),
            Buffer(16 * samples, "inputs", -1, 1),
            Buffer(16 * samples, "temporaries", 0, 1),
        ),
        samples=samples,
        tokens=0,
        parameters=16,
        accumulates=False,
        info={"mode": "train", "precision": "fp32", "optimizer": "sgd"},
    )


def measured(
    operator: Operator,
    factor: float,
    device: Device = H200,
    precision: str = "fp32",
    families: str = "resnet",
) -> MeasuredOperator:
    """An operator that takes its roofline times a factor."""
    key = operator_key(operator.name, operator.inputs, operator.args, matmul_precision(operator, precision))
    return MeasuredOperator(
        name=operator.name, inputs=operator.inputs, args=operator.args, flops=operator.flops,
        bytes=operator.bytes, device=device.name,
        device_s=describe(operator, device, precision).ideal_s * factor, host_s=12e-6, precision=precision,
        key=key, families=frozenset({families}), kernels=2,
    )  # fmt: skip


def made_up(device: Device = H200, count: int = 80) -> list[MeasuredOperator]:
    draw = random.Random(0)
    found = []
    for _ in range(count):
        m, k, n = (draw.randint(500, 8000) for _ in range(3))
        found.append(measured(product(m, k, n), 2.0, device))
        found.append(measured(call("relu", spec(m, k)), 1.5, device))
        found.append(measured(call("gelu", spec(m, k)), 3.0, device))
    return [*found, measured(call("native_layer_norm", spec(4096, 512), normalized_shape=[512]), 1.2, device)]


def dataset(path: Path, operators: list[MeasuredOperator], device: str = "") -> Path:
    """An operator dataset as ``measure ops`` and ``pack`` make it."""
    columns = {
        "key": [one.key for one in operators], "name": [one.name for one in operators],
        "inputs": [json.dumps([[one.shape, one.dtype,
        one.strides] for one in some.inputs]) for some in operators],
        "args": [json.dumps(dict(one.args)) for one in operators], "flops": [one.flops for one in operators],
        "bytes": [one.bytes for one in operators], "cold_s": [one.device_s * 1.1 for one in operators],
        "warm_s": [one.device_s * 0.9 for one in operators], "host_s": [one.host_s for one in operators],
        "precision": ["" if one.precision == "fp32" else one.precision for one in operators],
        "kernel_names": ["[]"] * len(operators),
        "kernels": [one.kernels for one in operators],
        "families": [" ".join(sorted(one.families)) for one in operators],
    }  # fmt: skip
    table = pyarrow.table(columns).replace_schema_metadata({"catalog_device": device} if device else {})
    pyarrow.parquet.write_table(table, path)
    return path


# Runs

MODELS = """
import torch

def mlp(batch, width, depth=4):
    layers = [part for _ in range(depth) for part in (torch.nn.Linear(width, width), torch.nn.GELU())]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 10)), (torch.zeros(batch, width),)

def convolutions(batch, width, depth=4):
    layers = [part for _ in range(depth) for part in
              (torch.nn.Conv2d(width, width, 3, padding=1), torch.nn.BatchNorm2d(width), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(width * 256, 10)), (torch.zeros(batch, width, 16, 16),)
"""


def job(
    base: Path,
    model: str = "mlp",
    batch: int = 4096,
    width: int = 2048,
    device: str = "a100-sxm-80gb",
    **training: Any,
) -> Job:
    section = {"source": "python", "name": f"models.py:{model}", "args": {"width": width}}
    cluster = {"device": device, **({"cores_per_device": 4} if device == "cpu" else {})}
    return Job.read(
        {"model": section, "training": {"global_batch": batch, **training}, "cluster": cluster}, base=base
    )


def measure(
    job: Job, factor: float, predictor: DeletePopPredictor | None = None, times: Iterable[str] = TIMES
) -> Run:
    """A run that takes what the predictor says, times a factor."""
    forecast = (predictor or DeletePopPredictor()).predict(job)
    return Run(job=job, measured={time: factor * forecast[time].median for time in times})
