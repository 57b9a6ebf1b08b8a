"""Device times of operators: measured ones are looked up, the others are the roofline times a learned, bounded factor."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrain.cluster import Device
from foretrain.costs.base import Column
from foretrain.costs.features import COLUMNS, SERIAL, Described, describe
from foretrain.costs.host import DispatchHost
from foretrain.costs.measured import matmul_precision, operator_key
from foretrain.costs.roofline import Roofline
from foretrain.costs.trees import Forest
from foretrain.errors import InputError
from foretrain.files import write_atomically
from foretrain.graph import Operator

FORMAT = "foretrain-operators/1"
GENERAL = "general"
"""The models that serve every device; those of a device that was measured much stand under its own name."""
_BOUNDS = (-1.2, 6.0)
"""Of the logarithm of time over roofline: Winograd convolutions beat it by a factor of two, tiny launches miss it by hundreds."""

GROUPS: dict[str, str] = {
    "product": "products", "attention": "products", "attention_backward": "products",
    "convolution": "convolutions", "convolution_backward": "convolutions",
    "depthwise": "depthwise", "depthwise_backward": "depthwise",
    "norm": "norms", "norm_backward": "norms",
}  # fmt: skip
"""Families that a calibration scales together; the others are ``traffic``."""


def group_of(family: str) -> str:
    return GROUPS.get(family, "traffic")


@dataclass(frozen=True, eq=False)
class OperatorModel:
    """The logarithm of time over roofline for one family: trees over its figures, and an effect of the operator's name."""

    forest: Forest | None
    names: Mapping[str, float]
    default: float
    """The effect of a name that was never measured."""

    def log_factors(self, names: Sequence[str], figures: Sequence[Sequence[float]]) -> Column:
        effects = np.array([self.names.get(effect_name(name), self.default) for name in names])
        if self.forest is None:
            return effects
        return self.forest.predict(np.column_stack([np.array(figures, dtype=np.float64), effects]))


def effect_name(name: str) -> str:
    """Names that mean the same work in different libraries count as one."""
    for library in ("native_", "cudnn_", "miopen_"):
        if name.startswith(f"{library}batch_norm"):
            return name.removeprefix(library)
    return name


@dataclass(frozen=True, eq=False)
class Lookup:
    """Measured seconds by the first 16 digits of the operator's key."""

    keys: npt.NDArray[np.uint64]
    seconds: npt.NDArray[np.float32]

    def find(self, keys: Sequence[str]) -> Column:
        """NaN where an operator was not measured."""
        wanted = np.array([int(key[:16], 16) for key in keys], dtype=np.uint64)
        if not len(self.keys):
            return np.full(len(keys), np.nan)
        place = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        return np.where(self.keys[place] == wanted, self.seconds[place].astype(np.float64), np.nan)


@dataclass(frozen=True, eq=False)
class LearnedCosts:
    """A cost model (``costs/base.py``) with everything that was learned about operators."""

    models: Mapping[str, Mapping[str, OperatorModel]]
    """By device name or ``GENERAL``, then by family."""
    lookups: Mapping[str, Lookup] = field(default_factory=dict)
    scales: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Calibration: factors by device and group of families."""

    def device_time_s(self, operators: Sequence[Operator], device: Device, precision: str) -> Column:
        if device.is_cpu:
            return Roofline().device_time_s(operators, device, precision)
        times = np.zeros(len(operators))
        launching = [i for i, operator in enumerate(operators) if operator.launches]
        described = [describe(operators[i], device, precision) for i in launching]
        names = [operators[i].name for i in launching]
        times[launching] = self._estimate(names, described, device)
        if device.name in self.lookups:
            chosen = [operators[i] for i in launching]
            keys = [operator_key(one.name, one.inputs, one.args, matmul_precision(one, precision)) for one in chosen]
            measured = self.lookups[device.name].find(keys)
            known = ~np.isnan(measured)
            times[np.array(launching, dtype=np.int64)[known]] = measured[known]
        if device.name in self.scales:
            scale = self.scales[device.name]
            times[launching] *= [scale.get(group_of(one.family), 1.0) for one in described]
        return times

    def knows(self, device: Device) -> bool:
        """Whether operators were measured on this very device."""
        return device.name in self.models

    def _estimate(self, names: Sequence[str], described: Sequence[Described], device: Device) -> Column:
        times = np.array([one.ideal_s for one in described])
        by_family: dict[str, list[int]] = {}
        for i, one in enumerate(described):
            by_family.setdefault(one.family, []).append(i)
        for family, members in by_family.items():
            model = self.models.get(device.name, {}).get(family) or self.models[GENERAL].get(family)
            if model is not None:
                factors = model.log_factors([names[i] for i in members], [described[i].figures for i in members])
                times[members] *= np.exp(np.clip(factors, *_BOUNDS))
        return times

    def scaled(self, device: str, factors: Mapping[str, float]) -> LearnedCosts:
        """With a further calibration of one device."""
        before = self.scales.get(device, {})
        together = {group: before.get(group, 1.0) * factors.get(group, 1.0) for group in before.keys() | factors.keys()}
        return dataclasses.replace(self, scales={**self.scales, device: together})


# On disk


def save_costs(path: Path, costs: LearnedCosts, host: DispatchHost, about: Mapping[str, Any]) -> None:
    """One safetensors file: trees and lookups as tensors, everything else as JSON in its header."""
    from safetensors.numpy import save

    tensors: dict[str, npt.NDArray[Any]] = {}
    models: dict[str, dict[str, Any]] = {}
    for scope, families in costs.models.items():
        for family, model in families.items():
            names = {name: round(effect, 5) for name, effect in sorted(model.names.items())}
            models.setdefault(scope, {})[family] = {"names": names, "default": model.default, "columns": COLUMNS.get(family, ())}
            if model.forest is not None:
                tensors.update({f"{scope}/{family}/{name}": column for name, column in model.forest.to_columns().items()})
    for device, lookup in costs.lookups.items():
        tensors.update({f"lookup/{device}/keys": lookup.keys, f"lookup/{device}/seconds": lookup.seconds})
    header = {"format": FORMAT, "models": models, "scales": costs.scales, "host": dataclasses.asdict(host), "about": dict(about)}
    write_atomically(path, save(tensors, metadata={"foretrain": json.dumps(header, sort_keys=True)}))


def load_costs(path: Path) -> tuple[LearnedCosts, DispatchHost, dict[str, Any]]:
    """What ``save_costs`` wrote."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {}).get("foretrain", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as fitted operator models ({error})") from error
    if header.get("format") != FORMAT:
        raise InputError(f"{path}: format {header.get('format')!r} is not {FORMAT!r}; fit it again")
    models: dict[str, dict[str, OperatorModel]] = {}
    for scope, families in header["models"].items():
        for family, data in families.items():
            if family != SERIAL and tuple(data["columns"]) != COLUMNS[family]:
                raise InputError(f"{path}: the figures of {family} operators are others than this version computes; fit it again")
            prefix = f"{scope}/{family}/"
            columns = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            models.setdefault(scope, {})[family] = OperatorModel(
                Forest.from_columns(columns) if columns else None, data["names"], data["default"]
            )
    devices = {name.split("/")[1] for name in tensors if name.startswith("lookup/")}
    lookups = {device: Lookup(tensors[f"lookup/{device}/keys"], tensors[f"lookup/{device}/seconds"]) for device in sorted(devices)}
    return LearnedCosts(models, lookups, header["scales"]), DispatchHost(**header["host"]), header["about"]
