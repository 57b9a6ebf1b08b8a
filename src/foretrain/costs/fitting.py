"""Measured operators in; operator models, a lookup of exact instances and the host's dispatch costs out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretrain.catalog import Catalog
from foretrain.costs.features import SERIAL, Described, describe
from foretrain.costs.learned import GENERAL, LearnedCosts, Lookup, OperatorModel, effect_name
from foretrain.costs.measured import MeasuredOperator
from foretrain.costs.trees import grow
from foretrain.errors import ForetrainError

_LEAST = 40
"""Operators below which a family gets the effects of names alone."""
_OWN = 10_000
"""Operators from which a device has models of its own."""
_EVENT_TIMED_S = 60e-6
"""Shorter times of devices that were timed by events hold launch gaps; they are left out."""
_EVENT_TIMED = frozenset({"p4", "p100-pcie-16gb", "v100-pcie-32gb", "a100-pcie-40gb", "a100-pcie-80gb", "mi100", "mi210"})
_SETTINGS = {"num_leaves": 31, "learning_rate": 0.07, "max_depth": 9, "feature_fraction": 0.7, "bagging_fraction": 0.8, "bagging_freq": 1}
_TREES = 220


@dataclass(frozen=True, slots=True)
class _Sample:
    operator: MeasuredOperator
    described: Described


def fit_costs(operators: Iterable[MeasuredOperator], tell: Callable[[str], None] = lambda _: None) -> LearnedCosts:
    """Models for all devices together, and for each device with many operators its own."""
    _check_library()
    catalog = Catalog.load()
    samples: dict[str, list[_Sample]] = {}
    keys: dict[str, dict[int, float]] = {}
    for one in operators:
        device = catalog.device(one.device, "device")
        if one.device_s <= 0 or (one.device_s < _EVENT_TIMED_S and device.name in _EVENT_TIMED):
            continue
        described = describe(one, device, one.precision)
        samples.setdefault(described.family, []).append(_Sample(one, described))
        if one.key:
            keys.setdefault(device.name, {})[int(one.key[:16], 16)] = one.device_s
    counts: dict[str, int] = {}
    for sample in (sample for group in samples.values() for sample in group):
        counts[sample.operator.device] = counts.get(sample.operator.device, 0) + 1
    models: dict[str, dict[str, OperatorModel]] = {GENERAL: {}}
    for family, group in sorted(samples.items()):
        tell(f"{family}: {len(group):,} operators")
        models[GENERAL][family] = _fit(family, group, least_in_leaf=20)
        for name in sorted(name for name, count in counts.items() if count >= _OWN and name in keys):
            own = [sample for sample in group if sample.operator.device == name]
            if len(own) >= _LEAST or (own and family == SERIAL):
                models.setdefault(name, {})[family] = _fit(family, own, least_in_leaf=5)
    return LearnedCosts(models, {device: _lookup(table) for device, table in sorted(keys.items())})


def _fit(family: str, samples: Sequence[_Sample], *, least_in_leaf: int) -> OperatorModel:
    seconds = np.array([sample.operator.device_s for sample in samples])
    targets = np.log(seconds / np.array([sample.described.ideal_s for sample in samples]))
    names = np.array([effect_name(sample.operator.name) for sample in samples])
    weights = _weights(seconds, [sample.operator.device for sample in samples])
    if family == SERIAL:
        return OperatorModel(None, _effects(names, targets, weights, prior=0.0, strength=3), 0.0)
    effects = _effects(names, targets, weights, prior=float(np.average(targets, weights=weights)), strength=5)
    default = float(np.median(list(effects.values())))
    if len(samples) < _LEAST:
        return OperatorModel(None, effects, default)
    rows = np.array([[*sample.described.figures, effects[name]] for sample, name in zip(samples, names, strict=True)])
    forest = grow(rows, targets, weights, trees=_TREES, min_data_in_leaf=least_in_leaf, **_SETTINGS)
    return OperatorModel(forest, effects, default)


def _weights(seconds: npt.NDArray[np.float64], devices: Sequence[str]) -> npt.NDArray[np.float64]:
    """Long operators count more, as steps are made of them; a device with many operators counts more, but not in proportion."""
    weights = np.clip(seconds / 1e-5, 0.1, 10.0) ** 0.5
    each = np.array(devices)
    for device in set(devices):
        weights[each == device] /= float(np.sum(each == device)) ** 0.5
    return np.asarray(weights / weights.mean())


def _effects(
    names: npt.NDArray[np.str_], targets: npt.NDArray[np.float64], weights: npt.NDArray[np.float64], *, prior: float, strength: float
) -> dict[str, float]:
    """The mean of each name, drawn to the prior where a name has few operators."""
    effects = {}
    for name in sorted(set(names.tolist())):
        mine = names == name
        count = float(mine.sum())
        effects[name] = float((np.average(targets[mine], weights=weights[mine]) * count + prior * strength) / (count + strength))
    return effects


def _lookup(table: dict[int, float]) -> Lookup:
    ordered = sorted(table.items())
    return Lookup(np.array([key for key, _ in ordered], dtype=np.uint64), np.array([value for _, value in ordered], dtype=np.float32))


def dispatch_costs(operators: Iterable[MeasuredOperator]) -> dict[str, float]:
    """Median host seconds by operator name; of multi-tensor operators per tensor."""
    found: dict[str, list[float]] = {}
    for one in operators:
        if one.host_s is not None:
            many = one.name.startswith(("_foreach", "_fused"))
            found.setdefault(one.name, []).append(one.host_s / (max(1, len(one.inputs)) if many else 1))
    return {name: float(f"{np.median(values):.4g}") for name, values in sorted(found.items())}


def _check_library() -> None:
    try:
        import lightgbm  # noqa: F401
    except ModuleNotFoundError as error:
        raise ForetrainError("lightgbm is not installed; install foretrain[learn]") from error
