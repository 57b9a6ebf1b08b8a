"""Costs operators by the roofline (Williams et al. 2009): the longer of arithmetic and memory traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from foretrain.cluster import Device
from foretrain.costs.base import Column
from foretrain.costs.kernels import kernel_count
from foretrain.graph import Operator, TensorSpec
from foretrain.graph.opset import PRODUCTS, SCALED, traits


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Peak rates scaled by one efficiency each, plus the shortest time that a kernel takes."""

    compute_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    kernel_floor_s: float = 2e-6

    def device_time_s(self, operators: Sequence[Operator], device: Device, precision: str) -> Column:
        flops = np.array([operator.flops for operator in operators], dtype=np.float64)
        traffic = np.array([operator.bytes for operator in operators], dtype=np.float64)
        launches = np.array([operator.launches for operator in operators], dtype=np.float64)
        rate = np.array(
            [device.peak_flops(arithmetic(operator, precision)) for operator in operators], dtype=np.float64
        )
        compute_s = flops / (rate * self.compute_efficiency)
        memory_s = traffic / (device.memory_bytes_per_s * self.memory_efficiency)
        return launches * np.maximum(np.maximum(compute_s, memory_s), self.kernel_floor_s)

    def kernels(self, operators: Sequence[Operator], device: Device, precision: str) -> Column:
        return np.array([kernel_count(operator) for operator in operators], dtype=np.float64)


class Computes(Protocol):
    """An operator as far as its number format depends on it."""

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...


def arithmetic(operator: Computes, precision: str) -> str:
    """The format of an operator's numbers: fp32 becomes TF32 in cuDNN always, in products on request."""
    inputs, kind = operator.inputs, traits(operator.name).kind
    dtype = _SHORT.get(inputs[operator.name == SCALED].dtype, "fp32") if inputs else "fp32"
    if dtype == "fp32" and (kind in _BY_CUDNN or (precision == "tf32" and kind in PRODUCTS)):
        return "tf32"
    return "fp8" if precision == "fp8" and kind in _IN_FP8 else dtype


_BY_CUDNN = ("convolution", "recurrence")
_IN_FP8 = ("grouped product",)
"""Experts are traced in bf16; other products of a step in fp8 have inputs in fp8."""
_SHORT = {
    "float64": "fp64",
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "float4_e2m1fn_x2": "fp4",
}
