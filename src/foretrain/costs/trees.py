"""Holds boosted regression trees as arrays: grown by LightGBM, evaluated with numpy alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Forest:
    """Holds all trees in one set of columns of few bytes a node; a left child follows its parent, and a leaf
    leads to itself, so that every row walks as many levels."""

    roots: npt.NDArray[np.int32]
    feature: npt.NDArray[np.uint8]
    number: npt.NDArray[np.float32]
    """The threshold of a node, the value of a leaf."""
    skip: npt.NDArray[np.uint16]
    """From a node to its right child; 0 marks a leaf."""
    depth: int

    def predict(self, rows: Matrix) -> npt.NDArray[np.float64]:
        """The sum of the trees for each row."""
        node = np.broadcast_to(self.roots, (len(rows), len(self.roots))).astype(np.intp)
        first = np.arange(len(rows))[:, None] * rows.shape[1]
        single = rows.astype(np.float32).ravel()
        own = np.arange(len(self.skip), dtype=np.int32)
        children = np.column_stack([own + self.skip, own + (self.skip > 0)]).ravel()
        for _ in range(self.depth):
            goes_left = single.take(first + self.feature.take(node)) <= self.number.take(node)
            node = children.take(2 * node + goes_left)
        return np.asarray(self.number[node].sum(axis=1, dtype=np.float64))

    def to_columns(self) -> dict[str, npt.NDArray[Any]]:
        return {
            "roots": self.roots,
            "feature": self.feature,
            "number": self.number,
            "skip": self.skip,
            "depth": np.array([self.depth], dtype=np.int32),
        }

    @classmethod
    def from_columns(cls, columns: Mapping[str, npt.NDArray[Any]]) -> Forest:
        names = ("roots", "feature", "number", "skip")
        return cls(**{name: columns[name] for name in names}, depth=int(columns["depth"][0]))


def grow(
    rows: Matrix,
    targets: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64],
    *,
    trees: int,
    **settings: Any,
) -> Forest:
    """Fit trees to targets; the same input gives the same trees."""
    import lightgbm

    fixed = {
        "objective": "l2",
        "verbosity": -1,
        "seed": 0,
        "deterministic": True,
        "force_row_wise": True,
        "num_threads": 1,
    }
    data = lightgbm.Dataset(rows.astype(np.float32), targets, weight=weights, params={"verbosity": -1})
    booster = lightgbm.train({**fixed, **settings}, data, trees)
    return from_lightgbm([tree["tree_structure"] for tree in booster.dump_model()["tree_info"]])


def from_lightgbm(trees: Sequence[Mapping[str, Any]]) -> Forest:
    """The arrays of LightGBM's own description of numeric trees."""
    feature: list[int] = []
    threshold: list[float] = []
    value: list[float] = []
    skip: list[int] = []

    def add(tree: Mapping[str, Any], level: int) -> tuple[int, int]:
        """Append a node and all below it; returns its number and the deepest level."""
        number = len(feature)
        feature.append(tree.get("split_feature", 0))
        threshold.append(tree.get("threshold", 0.0))
        value.append(tree.get("leaf_value", 0.0))
        skip.append(0)
        if "left_child" not in tree:
            return number, level
        _, first = add(tree["left_child"], level + 1)
        right, second = add(tree["right_child"], level + 1)
        skip[number] = right - number
        return number, max(first, second)

    roots, depths = zip(*(add(tree, 0) for tree in trees), strict=True)
    distance = np.array(skip, dtype=np.uint16)
    return Forest(
        roots=np.array(roots, dtype=np.int32),
        feature=np.array(feature, dtype=np.uint8),
        number=np.where(distance == 0, np.array(value, dtype=np.float32), _below(threshold)),
        skip=distance,
        depth=max(depths),
    )


def _below(thresholds: Sequence[float]) -> npt.NDArray[np.float32]:
    """Round thresholds to single precision, never up: what was right of a threshold stays there."""
    double = np.array(thresholds, dtype=np.float64)
    single = double.astype(np.float32)
    return np.where(single > double, np.nextafter(single, np.float32(-np.inf)), single)
