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
    """All trees in one set of columns; a leaf leads to itself, so that every row walks as many levels."""

    roots: npt.NDArray[np.int32]
    feature: npt.NDArray[np.int16]
    threshold: npt.NDArray[np.float32]
    left: npt.NDArray[np.int32]
    right: npt.NDArray[np.int32]
    value: npt.NDArray[np.float32]
    depth: int

    def predict(self, rows: Matrix) -> npt.NDArray[np.float64]:
        """The sum of the trees for each row."""
        node = np.broadcast_to(self.roots, (len(rows), len(self.roots))).astype(np.intp)
        first = np.arange(len(rows))[:, None] * rows.shape[1]
        single = rows.astype(np.float32).ravel()
        children = np.column_stack([self.right, self.left]).ravel()
        for _ in range(self.depth):
            goes_left = single.take(first + self.feature.take(node)) <= self.threshold.take(node)
            node = children.take(2 * node + goes_left)
        return np.asarray(self.value[node].sum(axis=1, dtype=np.float64))

    def to_columns(self) -> dict[str, npt.NDArray[Any]]:
        """Few bytes per node: a left child follows its parent, and a leaf needs no threshold."""
        own = np.arange(len(self.left))
        leaf = self.left == own
        return {
            "roots": self.roots,
            "feature": self.feature.astype(np.uint8),
            "number": np.where(leaf, self.value, self.threshold),
            "skip": (self.right - own).astype(np.uint16),
            "depth": np.array([self.depth], dtype=np.int32),
        }

    @classmethod
    def from_columns(cls, columns: Mapping[str, npt.NDArray[Any]]) -> Forest:
        own = np.arange(len(columns["skip"]), dtype=np.int32)
        leaf, number = columns["skip"] == 0, columns["number"]
        nothing = np.float32(0)
        return cls(
            roots=columns["roots"],
            feature=columns["feature"].astype(np.int16),
            threshold=np.where(leaf, nothing, number),
            left=np.where(leaf, own, own + 1).astype(np.int32),
            right=(own + columns["skip"]).astype(np.int32),
            value=np.where(leaf, number, nothing),
            depth=int(columns["depth"][0]),
        )


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
    left: list[int] = []
    right: list[int] = []
    value: list[float] = []

    def add(tree: Mapping[str, Any], level: int) -> tuple[int, int]:
        """Append a node and all below it; returns its number and the deepest level."""
        number = len(feature)
        feature.append(tree.get("split_feature", 0))
        threshold.append(tree.get("threshold", 0.0))
        value.append(tree.get("leaf_value", 0.0))
        left.append(number)
        right.append(number)
        if "left_child" not in tree:
            return number, level
        left[number], first = add(tree["left_child"], level + 1)
        right[number], second = add(tree["right_child"], level + 1)
        return number, max(first, second)

    roots, depths = zip(*(add(tree, 0) for tree in trees), strict=True)
    return Forest(
        roots=np.array(roots, dtype=np.int32),
        feature=np.array(feature, dtype=np.int16),
        threshold=_below(threshold),
        left=np.array(left, dtype=np.int32),
        right=np.array(right, dtype=np.int32),
        value=np.array(value, dtype=np.float32),
        depth=max(depths),
    )


def _below(thresholds: Sequence[float]) -> npt.NDArray[np.float32]:
    """In single precision, never above the double: what was right of a threshold stays there."""
    double = np.array(thresholds, dtype=np.float64)
    single = double.astype(np.float32)
    return np.where(single > double, np.nextafter(single, np.float32(-np.inf)), single)
