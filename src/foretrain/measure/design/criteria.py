"""Says how much rows tell of a linear model's coefficients: the criteria of optimal design.

A linear model ``y = X b + noise`` that is fitted on the chosen rows S has the information matrix ``M = X_S^T
X_S`` (+ ridge I), and its coefficients the covariance ``M^-1``. D-optimal designs maximise ``log det M``,
A-optimal ones minimise ``trace M^-1``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foretrain.measure.candidates import Array

Indices = npt.NDArray[np.intp]

RIDGE = 1e-6
"""Added to the diagonal of the information matrix, so that fewer rows than coefficients can be compared;
small beside unit features."""


def information(rows: Array, ridge: float = RIDGE) -> Array:
    """``X^T X + ridge I``."""
    matrix: Array = rows.T @ rows
    matrix.flat[:: len(matrix) + 1] += ridge
    return matrix


def log_det(rows: Array, ridge: float = RIDGE) -> float:
    """``log det(X^T X + ridge I)``."""
    return float(np.linalg.slogdet(information(rows, ridge))[1])


def trace_inverse(rows: Array, ridge: float = RIDGE) -> float:
    """``trace (X^T X + ridge I)^-1``."""
    return float((1 / np.maximum(np.linalg.eigvalsh(information(rows, ridge)), ridge)).sum())


def beside(features: Array, prior: Array) -> Array:
    """Coordinates in which the prior information P is I: as ``det(X^T X + P) = det(P) det(Z^T Z + I)`` for
    ``Z = X L^-T`` and ``P = L L^T``, a design beside what is known is one with a ridge of 1."""
    whitened: Array = np.linalg.solve(np.linalg.cholesky(prior), features.T).T
    return whitened


def inverse_of(matrix: Array) -> Array:
    return np.linalg.inv(matrix).astype(np.float64, copy=False)


def leverage_of(features: Array, inverse: Array) -> Array:
    """``x_i^T M^-1 x_i`` of every row: the variance of the model's prediction there."""
    leverage: Array = np.einsum("ij,ij->i", features @ inverse, features)
    return leverage


def sizes_of(features: Array) -> Array:
    """The mean absolute value of every feature, by which Ernest divides them."""
    sizes = np.abs(features).mean(axis=0)
    return np.where(sizes > 0, sizes, 1.0)
