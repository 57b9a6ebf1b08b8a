"""Reads operators with their measured times: what operator models learn from and look up."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretrain.costs.roofline import Computes, arithmetic
from foretrain.errors import ForetrainError, InputError, first_line
from foretrain.graph import TensorSpec
from foretrain.graph.flops import flops

ANY = "*"
"""Stands for operators that were drawn from models of any family."""
RANDOM_LAYERS = "random-layers"
"""The family of operators of layers whose shapes were drawn, of no model."""

_JSON_COLUMNS = ("inputs", "args", "kernel_names")
_COLUMNS = (
    "key",
    "name",
    "precision",
    "flops",
    "bytes",
    "cold_s",
    "warm_s",
    "host_s",
    "kernels",
    *_JSON_COLUMNS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOperator:
    """One call of an operator on one device, and the seconds that the device and the host spent on it."""

    name: str
    inputs: tuple[TensorSpec, ...]
    args: Mapping[str, Any]
    flops: int
    bytes: int
    device: str
    device_s: float
    host_s: float | None = None
    kernels: int | None = None
    precision: str = "fp32"
    """Of the job: it decides whether fp32 matrix products are rounded to TF32."""
    key: str = ""
    """What exactly is called, for looking it up again."""
    families: frozenset[str] = frozenset()
    """Architecture families whose models call it."""

    def known_without(self, held_out: frozenset[str]) -> bool:
        """Whether it would have been measured if no model of these families had been looked at."""
        return not held_out or (
            ANY not in self.families and not (self.families and self.families <= held_out)
        )

    @property
    def of_random_layers(self) -> bool:
        return RANDOM_LAYERS in self.families

    @classmethod
    def of(
        cls,
        name: str,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        args: Mapping[str, Any],
        device: str,
        device_s: float,
    ) -> MeasuredOperator:
        """Make an operator with the FLOPs and the least traffic that follow from the shapes."""
        traffic = sum(spec.size_bytes for spec in (*inputs, *outputs))
        work = flops(name, args, inputs, outputs)
        return cls(
            name=name, inputs=inputs, args=args, flops=work, bytes=traffic, device=device, device_s=device_s
        )


def operator_key(
    name: str, inputs: Iterable[TensorSpec], args: Mapping[str, Any], precision: str = ""
) -> str:
    """A hash of what is called: the same for an operator of a graph and for the one measured in its place."""
    content = [name, [[spec.shape, spec.dtype, spec.strides] for spec in inputs], args, precision]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:20]


def matmul_precision(operator: Computes, precision: str) -> str:
    """TF32 only changes matrix products of fp32 tensors; cuDNN's convolutions are in TF32 in either case."""
    return "tf32" if arithmetic(operator, precision) == "tf32" != arithmetic(operator, "fp32") else ""


def load_columns(path: Path) -> dict[str, list[Any]]:
    """An operator dataset by columns; ``inputs``, ``args`` and ``kernel_names`` as parsed JSON."""
    _, parquet = parquet_library()
    try:
        columns: dict[str, list[Any]] = parquet.read_table(path).to_pydict()
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as Parquet ({first_line(error)})") from error
    missing = [name for name in _COLUMNS if name not in columns]
    if missing:
        raise InputError(f"{path}: not an operator dataset; it has no column {', '.join(missing)}")
    for name in _JSON_COLUMNS:
        columns[name] = [json.loads(text) for text in columns[name]]
    return columns


def load_measured(path: Path, device: str | None = None) -> Iterator[MeasuredOperator]:
    """The operators of a dataset, of the device that it names unless another catalogue name is given.

    The device time is the mean of a cold and a warm cache, as a step has both.
    """
    _, parquet = parquet_library()
    if not path.exists():
        raise InputError(
            f"{path}: no such operator dataset; foretrain measure ops makes one, and data/ of the repository "
            "has ours"
        )
    columns = load_columns(path)
    device = device or (parquet.read_schema(path).metadata or {}).get(b"catalog_device", b"").decode()
    if not device:
        raise InputError(
            f"{path}: does not say which device of the catalogue it was measured on; give --device"
        )
    families = columns.get("families") or [""] * len(columns["key"])
    for i, key in enumerate(columns["key"]):
        yield MeasuredOperator(
            **{name: columns[name][i] for name in ("name", "args", "flops", "bytes", "host_s", "kernels")},
            inputs=tuple(
                TensorSpec(tuple(shape), dtype, None if strides is None else tuple(strides))
                for shape, dtype, strides in columns["inputs"][i]
            ),
            device=device,
            device_s=(columns["cold_s"][i] + columns["warm_s"][i]) / 2,
            precision=columns["precision"][i] or "fp32",
            key=key,
            families=frozenset(families[i].split()),
        )


def parquet_library() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ForetrainError("pyarrow is not installed; install foretrain[learn]") from error
    return pyarrow, pyarrow.parquet
