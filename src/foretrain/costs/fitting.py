"""Learns operator models, exact lookups and the host's dispatch costs from measured operators."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrain.catalog import Catalog, Device
from foretrain.costs.features import COLUMNS, SCALED_PRODUCT, SERIAL, Described, describe
from foretrain.costs.features.convolutions import ONE_DEVICE
from foretrain.costs.kernels import kernel_figures, kernel_kind
from foretrain.costs.learned import GENERAL, LearnedCosts, Lookup, OperatorModel
from foretrain.costs.measured import MeasuredOperator
from foretrain.costs.trees import grow
from foretrain.errors import ForetrainError
from foretrain.graph.opset import traits

_LEAST = 40
"""Operators below which a family gets the effects of names alone."""
_OWN = 10_000
"""Operators from which a device has models of its own."""
_EVENT_TIMED_S = 60e-6
"""Shorter times of devices that were timed by events hold launch gaps; they are left out."""
_EVENT_TIMED = frozenset(
    {"p4", "p100-pcie-16gb", "v100-pcie-32gb", "a100-pcie-40gb", "a100-pcie-80gb", "mi100", "mi210"}
)
_SETTINGS = {"num_leaves": 31, "feature_fraction": 0.7, "bagging_fraction": 0.8, "bagging_freq": 1}
_FOR_ALL = {**_SETTINGS, "trees": 220, "learning_rate": 0.07, "max_depth": 9, "min_data_in_leaf": 20}
_FOR_ONE = {**_SETTINGS, "trees": 400, "learning_rate": 0.045, "max_depth": 12, "min_data_in_leaf": 4}
_FOR_CHOICES = {
    **_FOR_ONE, "trees": 600, "learning_rate": 0.03, "num_leaves": 63, "min_data_in_leaf": 8,
    "feature_fraction": 0.5,
}  # fmt: skip
_CHOSEN = ("convolution", "convolution_backward", "depthwise", "depthwise_backward")
"""How trees are grown for all devices together, coarsely so that they carry over, and for one device; finer
for the families whose kernels a library chooses among by shape."""
_OF_RANDOM_LAYERS = 0.3
"""What an operator of layers of random shapes counts beside one of a model: steps are made of the latter."""
_FOR_KERNELS: dict[str, Any] = {
    **_SETTINGS,
    "trees": 100,
    "learning_rate": 0.12,
    "max_depth": 10,
    "min_data_in_leaf": 6,
}
_FEW_KERNELS_DIFFER = 0.05
"""The standard deviation of the logarithm of kernels per call below which a family has its kinds' means."""
_SLOWER = (0.5, 0.25)
"""Shares of the bandwidth of the virtual devices that stand beside a measured one."""
_SHARPNESS = 4.0
"""Of the bend between what multiprocessors and what memory bounds: the norm that joins both times."""


@dataclass(frozen=True, slots=True)
class _Sample:
    operator: MeasuredOperator
    described: Described
    seconds: float
    virtual: bool = False


def fit_costs(
    operators: Iterable[MeasuredOperator], tell: Callable[[str], None] = lambda _: None
) -> LearnedCosts:
    """Learn models for all GPUs together, and for each device with many operators its own; CPUs are costed by
    themselves, so that theirs say nothing here."""
    _check_library()
    samples, lookups = _samples(operators)
    every = [sample for group in samples.values() for sample in group]
    counts = Counter(sample.operator.device for sample in every if not sample.virtual)
    models: dict[str, dict[str, OperatorModel]] = {GENERAL: {}}
    for family, group in sorted(samples.items()):
        tell(f"{family}: {sum(not sample.virtual for sample in group):,} operators")
        models[GENERAL][family] = _fit(family, group, _FOR_ALL, ONE_DEVICE)
        for name in sorted(name for name, count in counts.items() if count >= _OWN and name in lookups):
            own = [
                sample
                for sample in group
                if sample.operator.device == name and sample.operator.key and not sample.virtual
            ]
            if len(own) >= _LEAST or (own and family == SERIAL):
                growth = _FOR_CHOICES if family in _CHOSEN else _FOR_ONE
                models.setdefault(name, {})[family] = _fit(family, own, growth)
    return LearnedCosts(
        models,
        {device: _lookup(table) for device, table in sorted(lookups.items())},
        kernel_kinds=_kernel_kinds(sample.operator for sample in every),
        kernel_models=kernel_models(
            (sample.operator, sample.described) for sample in every if not sample.virtual
        ),
    )


def _samples(
    operators: Iterable[MeasuredOperator],
) -> tuple[dict[str, list[_Sample]], dict[str, dict[int, tuple[float, int]]]]:
    """Sort the operators of GPUs by family, those that a slower memory would give beside them; and list the
    times and kernels of those with a key, by device."""
    catalog = Catalog.load()
    samples: dict[str, list[_Sample]] = {}
    lookups: dict[str, dict[int, tuple[float, int]]] = {}
    for operator in operators:
        device = catalog.device(operator.device, "device")
        by_events = operator.device_s < _EVENT_TIMED_S and device.name in _EVENT_TIMED
        if device.is_cpu or operator.device_s <= 0 or by_events:
            continue
        described = describe(operator, device, operator.precision)
        samples.setdefault(described.family, []).append(_Sample(operator, described, operator.device_s))
        if operator.key or described.family == SCALED_PRODUCT:
            for slower in _slower_memory(operator, device):
                samples.setdefault(slower.described.family, []).append(slower)
        if operator.key:
            table = lookups.setdefault(device.name, {})
            table[int(operator.key[:16], 16)] = operator.device_s, operator.kernels or 1
    return samples, lookups


def _slower_memory(operator: MeasuredOperator, device: Device) -> Iterator[_Sample]:
    """The operator on the same device with slower memory, for devices with less bandwidth per multiprocessor.

    A kernel that the multiprocessors bound takes as long as before, until the memory bounds it. Families that
    were measured on one device only would else carry its low share of a high bandwidth over to all others.
    """
    for share in _SLOWER:
        slow = dataclasses.replace(device, memory_bytes_per_s=device.memory_bytes_per_s * share)
        described = describe(operator, slow, operator.precision)
        memory_s = operator.bytes / (slow.memory_bytes_per_s * slow.sustained_memory)
        seconds = (operator.device_s**_SHARPNESS + memory_s**_SHARPNESS) ** (1 / _SHARPNESS)
        yield _Sample(operator, described, seconds, virtual=True)


def _fit(
    family: str,
    samples: Sequence[_Sample],
    growth: Mapping[str, Any],
    ignored: frozenset[str] = frozenset(),
) -> OperatorModel:
    """A model of one family; trees never ask for the figures that are ignored."""
    seconds = np.array([sample.seconds for sample in samples])
    targets = np.log(seconds / np.array([sample.described.ideal_s for sample in samples]))
    names = np.array([sample.operator.name for sample in samples])
    weights = np.array([_OF_RANDOM_LAYERS if sample.operator.of_random_layers else 1.0 for sample in samples])
    weights *= _weights(seconds, [f"{sample.operator.device}{'*' * sample.virtual}" for sample in samples])
    if family == SERIAL:
        return OperatorModel(None, _effects(names, targets, weights, prior=0.0, strength=3), 0.0)
    effects = _effects(names, targets, weights, prior=float(np.average(targets, weights=weights)), strength=5)
    default = float(np.median(list(effects.values())))
    if len(samples) < _LEAST:
        return OperatorModel(None, effects, default)
    rows = np.array(
        [[*sample.described.figures, effects[name]] for sample, name in zip(samples, names, strict=True)]
    )
    rows[:, [name in ignored for name in COLUMNS[family]]] = 0.0
    return OperatorModel(grow(rows, targets, weights, **growth), effects, default)


_WEIGHT_OF_ONE_S = 1e-5
"""The time of an operator that counts as one."""
_WEIGHTS = (0.1, 10.0)
"""Between which times count in proportion, before the root is taken."""


def _weights(seconds: npt.NDArray[np.float64], devices: Sequence[str]) -> npt.NDArray[np.float64]:
    """Long operators count more, as steps are made of them; a device with many less than in proportion."""
    weights = np.clip(seconds / _WEIGHT_OF_ONE_S, *_WEIGHTS) ** 0.5
    each = np.array(devices)
    for device in set(devices):
        weights[each == device] /= float(np.sum(each == device)) ** 0.5
    return np.asarray(weights / weights.mean())


def _effects(
    names: npt.NDArray[np.str_],
    targets: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64],
    *,
    prior: float,
    strength: float,
) -> dict[str, float]:
    """The mean of each name, drawn to the prior where a name has few operators."""
    effects = {}
    for name in sorted(set(names.tolist())):
        named = names == name
        count = float(named.sum())
        mean = float(np.average(targets[named], weights=weights[named]))
        effects[name] = round((mean * count + prior * strength) / (count + strength), 5)
    return effects


def _lookup(table: dict[int, tuple[float, int]]) -> Lookup:
    ordered = sorted(table.items())
    return Lookup(
        keys=np.array([key for key, _ in ordered], dtype=np.uint64),
        seconds=np.array([seconds for _, (seconds, _) in ordered], dtype=np.float32),
        kernels=np.array([kernels for _, (_, kernels) in ordered], dtype=np.uint16),
    )


def _kernel_kinds(operators: Iterable[MeasuredOperator]) -> dict[str, float]:
    """The mean number of kernels of each kind of operator and, for kinds never seen, of each name."""
    counts_by_kind: dict[str, list[int]] = {}
    for operator in operators:
        if operator.kernels is not None and not traits(operator.name).multi_tensor:
            for kind in (operator.name, kernel_kind(operator.name, operator.inputs)):
                counts_by_kind.setdefault(kind, []).append(operator.kernels)
    return {kind: round(float(np.mean(counts)), 2) for kind, counts in sorted(counts_by_kind.items())}


def kernel_models(
    operators: Iterable[tuple[MeasuredOperator, Described]],
) -> dict[str, OperatorModel]:
    """Learn how many kernels a call launches, by family, where its operators differ in it."""
    families: dict[str, list[tuple[MeasuredOperator, Described]]] = {}
    for one, described in operators:
        if one.kernels is not None and described.figures and not traits(one.name).multi_tensor:
            families.setdefault(described.family, []).append((one, described))
    models: dict[str, OperatorModel] = {}
    for family, members in sorted(families.items()):
        logs = np.log([max(1, one.kernels or 1) for one, _ in members])
        if len(members) < _LEAST or float(logs.std()) < _FEW_KERNELS_DIFFER:
            continue
        names, weights = np.array([one.name for one, _ in members]), np.ones(len(members))
        effects = _effects(names, logs, weights, prior=float(logs.mean()), strength=1)
        rows = np.array(
            [[*described.figures, *kernel_figures(one), effects[one.name]] for one, described in members]
        )
        models[family] = OperatorModel(grow(rows, logs, weights, **_FOR_KERNELS), effects, float(logs.mean()))
    return models


def dispatch_costs(operators: Iterable[MeasuredOperator]) -> dict[str, float]:
    """Median host seconds by operator name; of multi-tensor operators per tensor."""
    times_by_name: dict[str, list[float]] = {}
    for operator in operators:
        if operator.host_s is not None:
            many = traits(operator.name).multi_tensor
            times_by_name.setdefault(operator.name, []).append(
                operator.host_s / (max(1, len(operator.inputs)) if many else 1)
            )
    return {name: float(f"{np.median(values):.4g}") for name, values in sorted(times_by_name.items())}


def _check_library() -> None:
    try:
        import lightgbm  # noqa: F401
    except ModuleNotFoundError as error:
        raise ForetrainError("lightgbm is not installed; install foretrain[learn]") from error
