"""Reads the operator datasets that costs were learned from, and learns costs anew without a part of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from foretrain.costs.learned import LearnedCosts
from foretrain.costs.measured import MeasuredOperator, load_measured
from foretrain.errors import InputError
from foretrain.predictors.base import find_source


class OperatorFile(NamedTuple):
    """A file of measured operators, as it was when it was learned from."""

    path: Path
    sha256: str
    device: str


def datasets_of(sources: Iterable[Mapping[str, Any]]) -> tuple[OperatorFile, ...]:
    """The operator datasets among what models were learned from, where they are still to be found."""
    return tuple(
        OperatorFile(find_source(source).resolve(), source["sha256"], source["device"])
        for source in sources
        if "device" in source
    )


def operators_of(datasets: Iterable[OperatorFile]) -> Iterator[MeasuredOperator]:
    for dataset in datasets:
        yield from load_measured(dataset.path, dataset.device)


@functools.lru_cache(maxsize=8)
def learned_without(
    datasets: tuple[OperatorFile, ...], families: frozenset[str], devices: frozenset[str]
) -> tuple[LearnedCosts, Mapping[str, float]]:
    """Learn operator models without some families and devices: a minute's work, that several predictors ask
    for."""
    return forgetting(operators_of(datasets), families, devices)


def forgetting(
    operators: Iterable[MeasuredOperator], families: frozenset[str], devices: frozenset[str]
) -> tuple[LearnedCosts, Mapping[str, float]]:
    """Operator models, and dispatch costs by the name of the operator where these are known, learned without
    some families and devices."""
    from foretrain.costs.fitting import dispatch_costs, fit_costs

    kept = [one for one in operators if one.known_without(families) and one.device not in devices]
    if not kept:
        raise InputError(
            f"operators: none is left without {', '.join(sorted(families | devices))}; "
            "learn from more of them"
        )
    return fit_costs(kept), dispatch_costs(kept)
