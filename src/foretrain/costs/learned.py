"""Costs operators by what was measured: looked up, else the roofline times a learned, bounded factor."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrain.cluster import Device
from foretrain.costs.base import Column
from foretrain.costs.cpu import cpu_time_s
from foretrain.costs.features import COLUMNS, SCALED_PRODUCT, SERIAL, Described, describe, of_rows_alone
from foretrain.costs.generated import generated_time_s, is_generated
from foretrain.costs.host import DispatchHost
from foretrain.costs.kernels import COUNTED, KERNEL_COLUMNS, kernel_count, kernel_figures, kernel_kind
from foretrain.costs.measured import matmul_precision, operator_key
from foretrain.costs.relatives import relative, slowdowns
from foretrain.costs.trees import Forest
from foretrain.errors import InputError, UnsupportedJob
from foretrain.files import write_atomically
from foretrain.graph import Operator
from foretrain.graph.opset import traits

FORMAT = "foretrain-operators/3"
_LOOKUP = ("keys", "seconds", "kernels")
GENERAL = "general"
"""The models that serve every device; those of a device that was measured much stand under its own name."""
_BOUNDS = (-1.2, 6.0)
"""Of the logarithm of time over roofline: Winograd beats it twice, tiny launches miss it by hundreds."""

_GROUPS: dict[str, str] = {
    "product": "products", SCALED_PRODUCT: "products",
    "attention": "products", "attention_backward": "products",
    "convolution": "convolutions", "convolution_backward": "convolutions",
    "depthwise": "depthwise", "depthwise_backward": "depthwise",
    "norm": "norms", "norm_backward": "norms",
}  # fmt: skip
_BY_LAYOUT = ("convolutions", "depthwise", "norms")
GROUPS = ("products", "traffic", *_BY_LAYOUT, *(f"{group}, channels last" for group in _BY_LAYOUT))
"""Operators that a calibration scales together: libraries have other kernels for other layouts."""


def group_of(described: Described) -> str:
    group = _GROUPS.get(described.family, "traffic")
    return f"{group}, channels last" if described.channels_last and group in _BY_LAYOUT else group


_AS = {
    "te.cast_transpose": "_to_copy", "te.amax": "amax", "moe.sum_rows": "sum",
    "_grouped_mm": "bmm", "_scaled_grouped_mm": "_scaled_mm",
    **dict.fromkeys(
        ("moe.permute", "moe.permute_backward", "moe.unpermute", "moe.unpermute_backward", "moe.sort_chunks",
         "moe.gate", "moe.gate_backward", "moe.add_bias", "moe.row_map"), "clone",
    ),
}  # fmt: skip
"""What kernels count as that were not learned from: those of Transformer Engine and of experts as operators
of torch that move as much in as plain a way, products of experts as batched ones."""


@dataclass(frozen=True, eq=False)
class OperatorModel:
    """The logarithm of time over roofline of one family: trees over figures, and an effect of the name."""

    forest: Forest | None
    names: Mapping[str, float]
    default: float
    """The effect of a name that was never measured."""

    def log_factors(self, names: Sequence[str], figures: Sequence[Sequence[float]]) -> Column:
        effects = np.array([self.names.get(name, self._nearest(name)) for name in names])
        if self.forest is None:
            return effects
        return self.forest.predict(np.column_stack([np.array(figures, dtype=np.float64), effects]))

    def _nearest(self, name: str) -> float:
        return self.names.get(_AS.get(name, name), self.default)


@dataclass(frozen=True, eq=False)
class Lookup:
    """Measured seconds and kernels by the first 16 digits of the operator's key."""

    keys: npt.NDArray[np.uint64]
    seconds: npt.NDArray[np.float32]
    kernels: npt.NDArray[np.uint16]

    def find(self, keys: Sequence[str]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Find which operators were measured, and where they stand in the columns."""
        wanted = np.array([int(key[:16], 16) for key in keys], dtype=np.uint64)
        if not len(self.keys):
            return np.zeros(len(keys), dtype=np.bool_), np.zeros(len(keys), dtype=np.int64)
        place = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        return self.keys[place] == wanted, place


Answer = Callable[[Sequence[Operator], Device, str], Column]
_MOST_ANSWERS = 100_000


@dataclass(frozen=True, eq=False)
class LearnedCosts:
    """A cost model (``costs/base.py``) with everything that was learned about operators."""

    models: Mapping[str, Mapping[str, OperatorModel]]
    """By device name or ``GENERAL``, then by family."""
    lookups: Mapping[str, Lookup] = field(default_factory=dict)
    scales: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Calibration: factors by device and group of families."""
    kernel_kinds: Mapping[str, float] = field(default_factory=dict)
    """Kernels per call, by ``kernel_kind``."""
    kernel_models: Mapping[str, OperatorModel] = field(default_factory=dict)
    """The logarithm of kernels per call, by family, where more than the kind decides."""
    _answers: dict[Any, dict[Operator, float]] = field(default_factory=dict, init=False, repr=False)
    """What was asked for before: a graph in memory is costed once for all plans that it has part in."""

    def device_time_s(self, operators: Sequence[Operator], device: Device, precision: str) -> Column:
        if device.is_cpu:
            return cpu_time_s(operators, device, precision)
        return self._remembered(self._times_s, operators, device, precision)

    def kernels(self, operators: Sequence[Operator], device: Device, precision: str) -> Column:
        return self._remembered(self._counts, operators, device, precision)

    def _remembered(
        self, answer: Answer, operators: Sequence[Operator], device: Device, precision: str
    ) -> Column:
        """An answer for each operator, found for those alone that were not asked about before."""
        question = (answer.__name__, device, precision)
        known = self._answers.setdefault(question, {})
        if len(known) > _MOST_ANSWERS:
            known = self._answers[question] = {}
        if new := [operator for operator in operators if operator not in known]:
            known.update(zip(new, answer(new, device, precision).tolist(), strict=True))
        return np.array([known[operator] for operator in operators])

    def _times_s(self, operators: Sequence[Operator], device: Device, precision: str) -> Column:
        times = np.zeros(len(operators))
        launching = [i for i, operator in enumerate(operators) if operator.launches]
        described = [describe_once(operators[i], device, precision) for i in launching]
        unknown = np.ones(len(launching), dtype=np.bool_)
        if device.name in self.lookups:
            known, place = self._measured([operators[i] for i in launching], device, precision)
            times[np.array(launching, dtype=np.int64)[known]] = self.lookups[device.name].seconds[
                place[known]
            ]
            unknown = ~known
        left = np.flatnonzero(unknown).tolist()
        estimated = [operators[launching[i]] for i in left]
        estimates = self._estimate(
            [operator.name for operator in estimated], [described[i] for i in left], device
        )
        times[[launching[i] for i in left]] = self._as_relatives(
            estimates, estimated, [described[i] for i in left], device, precision
        )
        for i in launching:
            if is_generated(operators[i]):
                times[i] = generated_time_s(operators[i], device)
        if device.name in self.scales:
            scale = self.scales[device.name]
            times[launching] *= [scale.get(group_of(one), 1.0) for one in described]
        return times

    def _counts(self, operators: Sequence[Operator], device: Device, precision: str) -> Column:
        counts = np.array([self._kernels(operator) for operator in operators], dtype=np.float64)
        launching = np.array([i for i, one in enumerate(operators) if one.launches], dtype=np.int64)
        unknown = np.ones(len(launching), dtype=np.bool_)
        if device.name in self.lookups:
            known, place = self._measured([operators[i] for i in launching.tolist()], device, precision)
            counts[launching[known]] = self.lookups[device.name].kernels[place[known]]
            unknown = ~known
        if self.kernel_models and not device.is_cpu:
            self._count(operators, launching[unknown].tolist(), device, precision, counts)
        return counts

    def _count(
        self,
        operators: Sequence[Operator],
        which: Sequence[int],
        device: Device,
        precision: str,
        counts: Column,
    ) -> None:
        """Enter the kernels of those operators whose family has a model that knows their name."""
        by_family: dict[str, list[int]] = {}
        for i in which:
            described = describe_once(operators[i], device, precision)
            model = self.kernel_models.get(described.family)
            known = model is not None and operators[i].name in model.names
            if known and not _counts_by_rule(operators[i]):
                by_family.setdefault(described.family, []).append(i)
        for family, members in by_family.items():
            figures = [
                [*describe_once(operators[i], device, precision).figures, *kernel_figures(operators[i])]
                for i in members
            ]
            logs = self.kernel_models[family].log_factors([operators[i].name for i in members], figures)
            counts[members] = np.maximum(1.0, np.exp(logs))

    def _kernels(self, operator: Operator) -> float:
        usual = kernel_count(operator)
        if not usual or _counts_by_rule(operator):
            return usual
        return self.kernel_kinds.get(
            kernel_kind(operator.name, operator.inputs), self.kernel_kinds.get(operator.name, usual)
        )

    def _measured(
        self, operators: Sequence[Operator], device: Device, precision: str
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        keys = [_key(operator, matmul_precision(operator, precision)) for operator in operators]
        return self.lookups[device.name].find(keys)

    def looked_up(
        self, operators: Sequence[Operator], device: Device, precision: str
    ) -> npt.NDArray[np.bool_]:
        """Tell which operators were measured on the very device."""
        is_known = np.zeros(len(operators), dtype=np.bool_)
        if device.name in self.lookups:
            launching = np.array(
                [i for i, operator in enumerate(operators) if operator.launches], dtype=np.int64
            )
            known, _ = self._measured([operators[i] for i in launching.tolist()], device, precision)
            is_known[launching[known]] = True
        return is_known

    def check(self, device: Device) -> None:
        """Refuse a GPU where no operator of any GPU was learned from."""
        if not device.is_cpu and not self.models.get(GENERAL):
            raise UnsupportedJob(
                f"cluster.device: {device.name!r} needs operator models, and this predictor has learned from "
                "no operator of a GPU; fit it to some, or take the shipped one"
            )

    def unmeasured(
        self, operators: Sequence[Operator], device: Device, precision: str
    ) -> dict[str, list[int]]:
        """The operators of families that were never measured, which have their roofline time, by family."""
        by_family: dict[str, list[int]] = {}
        for i, operator in enumerate(operators):
            if operator.launches and not device.is_cpu:
                family = describe_once(operator, device, precision).family
                if family not in self.models[GENERAL] and family not in self.models.get(device.name, {}):
                    by_family.setdefault(family, []).append(i)
        return by_family

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
                factors = model.log_factors(
                    [names[i] for i in members], [described[i].figures for i in members]
                )
                times[members] *= np.exp(np.clip(factors, *_BOUNDS))
        return times

    def _as_relatives(
        self,
        estimates: Column,
        operators: Sequence[Operator],
        described: Sequence[Described],
        device: Device,
        precision: str,
    ) -> Column:
        """Estimates within what a device of the same kind takes, as it was measured, times by how much this
        one may be slower. Products and attention are as they are: those of such devices were learned from."""
        other = relative(device, (name for name in self.models if name != GENERAL))
        if other is None:
            return estimates
        least, most = slowdowns(device, other)
        theirs = self.device_time_s(operators, other, precision)
        bound = np.array([_GROUPS.get(one.family) != "products" for one in described], dtype=np.bool_)
        return np.where(bound, np.clip(estimates, least * theirs, most * theirs), estimates)

    def scaled(self, device: str, factors: Mapping[str, float]) -> LearnedCosts:
        """Add a further calibration of one device."""
        before = self.scales.get(device, {})
        together = {
            group: before.get(group, 1.0) * factors.get(group, 1.0)
            for group in before.keys() | factors.keys()
        }
        return dataclasses.replace(self, scales={**self.scales, device: together})


def _counts_by_rule(operator: Operator) -> bool:
    """Whether the number of its kernels follows from how it is called."""
    of = traits(operator.name)
    if of.multi_tensor or of.kind == "recurrence" or operator.name in COUNTED:
        return True
    return of.kind == "row norm" and of_rows_alone(operator.args)


@functools.lru_cache(maxsize=100_000)
def describe_once(operator: Operator, device: Device, precision: str) -> Described:
    """Describe an operator as ``describe`` does, and remember it."""
    return describe(operator, device, precision)


@functools.lru_cache(maxsize=100_000)
def _key(operator: Operator, precision: str) -> str:
    """Operators are equal to themselves alone, so a graph in memory is hashed once."""
    return operator_key(operator.name, operator.inputs, operator.args, precision)


# On disk


def save_costs(path: Path, costs: LearnedCosts, host: DispatchHost, about: Mapping[str, Any]) -> None:
    """Write one safetensors file: trees and lookups as tensors, everything else as JSON in its header."""
    from safetensors.numpy import save

    tensors: dict[str, npt.NDArray[Any]] = {}
    models: dict[str, dict[str, Any]] = {}
    for scope, families in costs.models.items():
        for family, model in families.items():
            models.setdefault(scope, {})[family] = {
                "names": dict(model.names),
                "default": model.default,
                "columns": COLUMNS.get(family, ()),
            }
            if model.forest is not None:
                tensors.update(
                    {f"{scope}/{family}/{name}": column for name, column in model.forest.to_columns().items()}
                )
    for family, model in costs.kernel_models.items():
        assert model.forest is not None
        tensors.update(
            {f"kernels/{family}/{name}": column for name, column in model.forest.to_columns().items()}
        )
    for device, lookup in costs.lookups.items():
        tensors.update({f"lookup/{device}/{name}": getattr(lookup, name) for name in _LOOKUP})
    header = {
        "format": FORMAT,
        "models": models,
        "scales": costs.scales,
        "kernels": costs.kernel_kinds,
        "kernel_models": {
            family: {
                "names": dict(model.names),
                "default": model.default,
                "columns": (*COLUMNS[family], *KERNEL_COLUMNS),
            }
            for family, model in costs.kernel_models.items()
        },
        "host": host.to_dict(),
        "about": dict(about),
    }
    write_atomically(path, save(tensors, metadata={"foretrain": json.dumps(header, sort_keys=True)}))


def load_costs(path: Path) -> tuple[LearnedCosts, DispatchHost, dict[str, Any]]:
    """Read the file that ``save_costs`` wrote."""
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
    kernel_models: dict[str, OperatorModel] = {}
    scopes = {**header["models"], "kernels": header.get("kernel_models", {})}
    for scope, families in scopes.items():
        beside = KERNEL_COLUMNS if scope == "kernels" else ()
        for family, data in families.items():
            if family != SERIAL and tuple(data["columns"]) != (*COLUMNS[family], *beside):
                raise InputError(
                    f"{path}: the figures of {family} operators are others than this version computes; "
                    "fit it again"
                )
            prefix = f"{scope}/{family}/"
            columns = {
                name.removeprefix(prefix): tensor
                for name, tensor in tensors.items()
                if name.startswith(prefix)
            }
            into = kernel_models if scope == "kernels" else models.setdefault(scope, {})
            into[family] = OperatorModel(
                Forest.from_columns(columns) if columns else None, data["names"], data["default"]
            )
    devices = {name.split("/")[1] for name in tensors if name.startswith("lookup/")}
    lookups = {
        device: Lookup(*(tensors[f"lookup/{device}/{name}"] for name in _LOOKUP))
        for device in sorted(devices)
    }
    return (
        LearnedCosts(models, lookups, header["scales"], header["kernels"], kernel_models),
        DispatchHost(**header["host"]),
        header["about"],
    )
