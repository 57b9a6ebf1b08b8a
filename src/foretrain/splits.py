"""Splits runs along a dimension, such as workers: what to learn from, and what lies inside or beyond it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Part = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Positions of the runs to learn from, and of those to forecast."""


def interpolation(values: Sequence[float] | npt.NDArray[np.float64]) -> list[Part]:
    """Make a part per inner value: its runs are forecast from those with other values, below and above.

    >>> [test.tolist() for _, test in interpolation([1, 2, 2, 4, 8])]
    [[1, 2], [3]]
    """
    column = np.asarray(values, dtype=np.float64)
    return [_part(column == value) for value in np.unique(column)[1:-1]]


def extrapolation(values: Sequence[float] | npt.NDArray[np.float64]) -> list[Part]:
    """Make one part: the largest third of the values is forecast from what is below; none if all are equal.

    >>> [test.tolist() for _, test in extrapolation([1, 2, 4, 8, 16, 32])]
    [[4, 5]]
    """
    column = np.asarray(values, dtype=np.float64)
    distinct = np.unique(column)
    if len(distinct) < 2:
        return []
    return [_part(column > distinct[-1 - max(1, len(distinct) // 3)])]


def _part(test: npt.NDArray[np.bool_]) -> Part:
    return np.flatnonzero(~test), np.flatnonzero(test)
