"""Makes candidates for measurement: rows of features and costs of tables, operators or cluster sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrain.errors import InputError

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """Holds what could be measured: a row of features, a cost in seconds and a label for each."""

    names: tuple[str, ...]
    """One per feature."""
    features: Array
    cost_s: Array
    labels: Sequence[Mapping[str, Any]]

    def __post_init__(self) -> None:
        rows = len(self.cost_s)
        if not rows:
            raise InputError("candidates: there are none")
        if self.features.shape != (rows, len(self.names)) or len(self.labels) != rows:
            shape = f"{len(self.names)} names, {rows} costs, {len(self.labels)} labels"
            raise InputError(f"candidates: features of shape {self.features.shape} do not go with {shape}")
        for name, column in zip((*self.names, "cost_s"), (*self.features.T, self.cost_s), strict=True):
            _check_finite(name, column)
        if self.cost_s.min() <= 0:
            row = int(self.cost_s.argmin())
            raise InputError(
                f"candidates: cost_s of row {row + 1} is {self.cost_s[row]:g}, not a positive number"
            )

    def take(self, rows: Sequence[int]) -> Candidates:
        """Keep these rows alone."""
        places = list(rows)
        return Candidates(
            names=self.names,
            features=self.features[places],
            cost_s=self.cost_s[places],
            labels=[self.labels[place] for place in places],
        )


def table_candidates(
    columns: Mapping[str, Array],
    cost_s: Array,
    labels: Sequence[Mapping[str, Any]],
    *,
    quadratic: bool = False,
) -> Candidates:
    """Standardised columns of numbers, with a constant and (``quadratic``) squares and products."""
    names, features = _polynomial(
        {name: np.asarray(column, dtype=np.float64) for name, column in columns.items()}, quadratic
    )
    kept = _independent(features)
    return Candidates(
        names=tuple(names[place] for place in kept), features=features[:, kept], cost_s=cost_s, labels=labels
    )


def row_candidates(
    rows: Sequence[Mapping[str, float]],
    cost_s: Sequence[float],
    labels: Sequence[Mapping[str, Any]],
    *,
    quadratic: bool = False,
) -> Candidates:
    """Rows of figures by name; one that a row lacks is 0 there."""
    return table_candidates(_columns(rows), np.array(cost_s, dtype=np.float64), labels, quadratic=quadratic)


def plain_candidates(
    rows: Sequence[Mapping[str, float]],
    cost_s: Sequence[float],
    labels: Sequence[Mapping[str, Any]],
    *,
    quadratic: bool = False,
) -> Candidates:
    """Make candidates of rows of features as they are, for a law whose terms they are."""
    if quadratic:
        raise InputError("--quadratic: the law has its own terms")
    columns = _columns(rows)
    return Candidates(
        names=tuple(columns),
        features=np.column_stack(list(columns.values())),
        cost_s=np.array(cost_s, dtype=np.float64),
        labels=labels,
    )


def _columns(rows: Sequence[Mapping[str, float]]) -> dict[str, Array]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([row.get(name, 0.0) for row in rows], dtype=np.float64) for name in names}


def _polynomial(columns: Mapping[str, Array], quadratic: bool) -> tuple[list[str], Array]:
    """A constant, the standardised columns, and their squares and products, standardised too."""
    rows = len(next(iter(columns.values())))
    names, linear = _standardised(columns, rows)
    pairs = [(i, j) for i in range(len(names)) for j in range(i, len(names))] if quadratic else []
    more, products = _standardised(
        {f"{names[i]} * {names[j]}": linear[:, i] * linear[:, j] for i, j in pairs}, rows
    )
    return ["1", *names, *more], np.hstack([np.ones((rows, 1)), linear, products])


def _standardised(columns: Mapping[str, Array], rows: int) -> tuple[list[str], Array]:
    """Columns of mean 0 and variance 1; those that do not vary tell nothing and are left out."""
    for name, column in columns.items():
        _check_finite(name, column)
    names = [name for name, column in columns.items() if np.ptp(column) > 1e-9 * np.abs(column).max()]
    kept = [(columns[name] - columns[name].mean()) / columns[name].std() for name in names]
    return names, np.column_stack(kept) if kept else np.empty((rows, 0))


def _check_finite(name: str, column: Array) -> None:
    if not np.isfinite(column).all():
        row = int(np.argmin(np.isfinite(column)))
        raise InputError(f"candidates: {name} of row {row + 1} is {column[row]}, not a finite number")


def ernest_cost(machines: float, scale: float, *, whole_s: float = 3600.0) -> float:
    """Seconds of a run on a share ``scale`` of the data when the whole takes ``whole_s`` on one machine
    and speeds up ideally."""
    return whole_s * scale / machines


def cluster_candidates(
    machines: Iterable[int],
    scales: Iterable[float],
    cost_model: Callable[[float, float], float] = ernest_cost,
) -> Candidates:
    """Make a candidate of every number of machines with every share of the data, with Ernest's features ``[1,
    scale / machines, log machines, machines]``."""
    points = [(count, scale) for count in dict.fromkeys(machines) for scale in dict.fromkeys(scales)]
    for count, scale in points:
        if count < 1 or not 0 < scale <= 1:
            raise InputError(
                f"cluster: {count} machines on {scale:g} of the data; machines are at least 1, scales "
                "above 0 and at most 1"
            )
    return plain_candidates(
        [ernest_row(count, scale) for count, scale in points],
        [cost_model(count, scale) for count, scale in points],
        [{"machines": count, "scale": scale} for count, scale in points],
    )


def ernest_row(machines: float, scale: float) -> dict[str, float]:
    """The terms of Ernest's law."""
    return {
        "1": 1.0,
        "scale / machines": scale / machines,
        "log machines": math.log(machines),
        "machines": float(machines),
    }


def operator_candidates(
    rows: Sequence[Mapping[str, Any]], *, quadratic: bool = False, per_family: bool = False
) -> Candidates:
    """Operator instances: rows with ``op``, ``flops``, ``bytes``, ``dims``, ``cost_s`` and, where they vary,
    ``family`` and ``dtype``.

    The features are the logarithms of FLOPs, bytes and dimensions, the share of compute in a roofline that
    turns at the median arithmetic intensity, and a column for each operator and dtype but the first.
    ``per_family`` gives every family (by default the operators) coefficients of its own, as layer-wise models
    have.
    """
    try:
        cost = np.array([row["cost_s"] for row in rows], dtype=np.float64)
        families = np.array([str(row.get("family", row["op"])) for row in rows])
        numbers = _operator_numbers(rows)
        kinds = _one_hot("op", [str(row["op"]) for row in rows]) | _one_hot(
            "dtype", [str(row.get("dtype", "")) for row in rows]
        )
    except KeyError as error:
        raise InputError(
            f"operators: a row has no {error.args[0]!r}; op, flops, bytes, dims and cost_s are needed"
        ) from error
    families = families if per_family else np.full(len(rows), "all")
    blocks = [_block(family, families == family, numbers, kinds, quadratic) for family in np.unique(families)]
    names = tuple(name if per_family else name.removeprefix("all: ") for block, _ in blocks for name in block)
    return Candidates(
        names=names, features=np.hstack([columns for _, columns in blocks]), cost_s=cost, labels=rows
    )


def _operator_numbers(rows: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
    flops = np.array([max(row["flops"], 1) for row in rows], dtype=np.float64)
    size = np.array([max(row["bytes"], 1) for row in rows], dtype=np.float64)
    rank = max((len(row["dims"]) for row in rows), default=0)
    dims = np.ones((len(rows), rank))
    for place, row in enumerate(rows):
        dims[place, : len(row["dims"])] = np.maximum(row["dims"], 1)
    intensity = flops / size
    return {
        "log flops": np.log(flops),
        "log bytes": np.log(size),
        **{f"log dim {place}": np.log(dims[:, place]) for place in range(rank)},
        "compute share": intensity / (intensity + np.median(intensity)),
    }


def _one_hot(kind: str, values: Sequence[str]) -> dict[str, Array]:
    """A column for each value but the first, which the constant stands for."""
    return {
        f"{kind}={name}": np.array([float(value == name) for value in values])
        for name in sorted(set(values))[1:]
    }


def _block(
    family: str,
    inside: npt.NDArray[np.bool_],
    numbers: Mapping[str, Array],
    kinds: Mapping[str, Array],
    quadratic: bool,
) -> tuple[list[str], Array]:
    """The columns of one family, zero elsewhere; those that follow from others of the block are left out."""
    names, own = _polynomial({name: column[inside] for name, column in numbers.items()}, quadratic)
    more, marks = _standardised({name: column[inside] for name, column in kinds.items()}, len(own))
    own = np.hstack([own, marks])
    kept = _independent(own)
    columns = np.zeros((len(inside), len(kept)))
    columns[inside] = own[:, kept]
    return [f"{family}: {[*names, *more][place]}" for place in kept], columns


def _independent(features: Array) -> list[int]:
    """The columns that are not linear combinations of earlier ones (Gram-Schmidt)."""
    basis = np.empty((len(features), 0))
    kept = []
    for place, column in enumerate(features.T):
        rest = column - basis @ (basis.T @ column)
        rest -= basis @ (basis.T @ rest)
        if (size := float(np.linalg.norm(rest))) > 1e-6 * float(np.linalg.norm(column)):
            basis = np.column_stack([basis, rest / size])
            kept.append(place)
    return kept
