"""Scales columns in cones, and multiplies sparse matrices, with every sum in the same order everywhere."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]

GAMMA = 0.99
"""Share of the way to the boundary of the cones that a step goes."""
IN_CONE, STRETCHED = 3, 5
"""Rows of a second-order cone, and of its part of a stretched system."""
_LEAST_DIVISOR = 1e-13


class Matrix:
    """Entries column by column, with rows rising; products sum in this order."""

    def __init__(self, rows: Places, columns: Places, values: Column, shape: tuple[int, int]) -> None:
        order = np.lexsort((rows, columns))
        self.rows, self.columns, self.values = rows[order], columns[order], values[order]
        self.shape = shape

    def times(self, column: Column) -> Column:
        sums = np.bincount(self.rows, self.values * column[self.columns], self.shape[0])
        return sums.astype(np.float64, copy=False)

    def transposed_from(self, start: Column, column: Column) -> Column:
        """What is left of ``start`` when the transposed matrix times a column is taken away."""
        left = start.copy()
        np.subtract.at(left, self.columns, self.values * column[self.rows])
        return left


def _sum(values: Column) -> float:
    """One after the other, from the first on."""
    return float(np.add.accumulate(values)[-1]) if values.size else 0.0


def dot(left: Column, right: Column) -> float:
    return _sum(left * right)


def norm(column: Column) -> float:
    return math.sqrt(dot(column, column))


def _over(value: Column, by: Column) -> Column:
    """A quotient by what should be positive."""
    return np.asarray(value / np.where(by < _LEAST_DIVISOR, _LEAST_DIVISOR, by), dtype=np.float64)


class Cones:
    """Linear inequalities first, then second-order cones of three rows each."""

    def __init__(self, linear: int, threes: int) -> None:
        self.linear, self.threes = linear, threes
        self.rows = linear + IN_CONE * threes
        self.degree = linear + threes

    def parts(self, column: Column) -> tuple[Column, Column]:
        """The linear part, and the cones one below the other."""
        return column[: self.linear], column[self.linear :].reshape(self.threes, IN_CONE)

    def joined(self, linear: Column, threes: Column) -> Column:
        return np.concatenate([linear, threes.ravel()])

    def into(self, column: Column) -> Column:
        """Moved along the unit until it lies inside."""
        linear, threes = self.parts(column)
        short = [-linear, np.sqrt(rest_squared(threes)) - threes[:, 0]]
        shift = 1.0 + max([-GAMMA, *(float(each.max()) for each in short if each.size and each.max() >= 0)])
        moved = column.copy()
        moved_linear, moved_threes = self.parts(moved)
        moved_linear += shift
        moved_threes[:, 0] += shift
        return moved

    def product(self, left: Column, right: Column) -> Column:
        (a, u), (b, v) = self.parts(left), self.parts(right)
        cones = u[:, :1] * v + v[:, :1] * u
        cones[:, 0] = u[:, 0] * v[:, 0] + u[:, 1] * v[:, 1] + u[:, 2] * v[:, 2]
        return self.joined(a * b, cones)

    def quotient(self, by: Column, column: Column) -> Column:
        """What ``by`` must be multiplied with to give a column."""
        (a, u), (b, w) = self.parts(by), self.parts(column)
        rho = _residual(u)
        zeta = u[:, 1] * w[:, 1] + u[:, 2] * w[:, 2]
        cones = np.empty_like(u)
        cones[:, 0] = (u[:, 0] * w[:, 0] - zeta) / rho
        factor = (_over(zeta, u[:, 0]) - w[:, 0]) / rho
        cones[:, 1:] = factor[:, None] * u[:, 1:] + _over(w[:, 1:], u[:, :1])
        return self.joined(_over(b, a), cones)

    def plus_less_unit(self, column: Column, other: Column, amount: float) -> Column:
        """``column + (other - amount e)``, e being the unit."""
        less = other.copy()
        linear, threes = self.parts(less)
        linear -= amount
        threes[:, 0] -= amount
        return column + less


def rest_squared(threes: Column) -> Column:
    return np.asarray(threes[:, 1] * threes[:, 1] + threes[:, 2] * threes[:, 2], dtype=np.float64)


def _residual(threes: Column) -> Column:
    """How far within their cones columns are."""
    first = threes[:, 0] * threes[:, 0] - threes[:, 1] * threes[:, 1]
    return np.asarray(first - threes[:, 2] * threes[:, 2], dtype=np.float64)


class Scaling:
    """Nesterov and Todd's: W z = W^-1 s."""

    def __init__(self, cones: Cones, slack: Column, price: Column) -> None:
        self.cones = cones
        (s, u), (z, v) = cones.parts(slack), cones.parts(price)
        self.squared = _over(s, z)
        self.linear = np.sqrt(self.squared)
        u_size, v_size = np.sqrt(_residual(u)), np.sqrt(_residual(v))
        u_bar, v_bar = _over(u, u_size[:, None]), _over(v, v_size[:, None])
        self.eta_squared = _over(u_size, v_size)
        self.eta = np.sqrt(self.eta_squared)
        both = u_bar * v_bar
        gamma = np.sqrt(0.5 * (1.0 + both[:, 0] + both[:, 1] + both[:, 2]))
        half = _over(np.full_like(gamma, 0.5), gamma)
        self.a = half * (u_bar[:, 0] + v_bar[:, 0])
        self.q = half[:, None] * (u_bar[:, 1:] - v_bar[:, 1:])

    def times(self, column: Column) -> Column:
        linear, threes = self.cones.parts(column)
        zeta = self.q[:, 0] * threes[:, 1] + self.q[:, 1] * threes[:, 2]
        scaled = np.empty_like(threes)
        scaled[:, 0] = self.a * threes[:, 0] + zeta
        factor = threes[:, 0] + _over(zeta, 1 + self.a)
        scaled[:, 1:] = threes[:, 1:] + factor[:, None] * self.q
        return self.cones.joined(self.linear * linear, self.eta[:, None] * scaled)

    def stretched(self) -> Stretched:
        a, size = self.a, self.q[:, 0] * self.q[:, 0] + self.q[:, 1] * self.q[:, 1]
        more = 1.0 + a
        c = more + _over(size, more)
        d = 1 + _over(np.full_like(a, 2.0), more) + _over(size, more * more)
        first = np.maximum(0.5 * (a * a + size * (1.0 - _over(c * c, 1.0 + size * d))), 0.0)
        u_squared = a * a + size - first
        ratio = _over(c * c, u_squared)
        return Stretched(
            self.squared,
            self.eta_squared,
            first,
            np.sqrt(u_squared),
            np.sqrt(ratio),
            np.sqrt(ratio - d),
            self.q,
        )


class Stretched:
    """W^2 with two further rows for each cone, so that it stays sparse: eta^2 (D + uu' - vv').

    The rows of a cone are its three, that of v and that of u; ``u_rest`` and ``v_rest`` times q are the last
    two of u and v.
    """

    def __init__(
        self,
        linear: Column,
        eta: Column,
        first: Column,
        u_first: Column,
        u_rest: Column,
        v_rest: Column,
        q: Column,
    ) -> None:
        self.linear, self.eta, self.first, self.q = linear, eta, first, q
        self.u_first, self.u_rest, self.v_rest = u_first, u_rest, v_rest

    @classmethod
    def unit(cls, cones: Cones) -> Stretched:
        ones, none = np.ones(cones.threes), np.zeros(cones.threes)
        return cls(np.ones(cones.linear), ones, ones, none, none, none, np.zeros((cones.threes, 2)))

    def entries(self) -> tuple[Column, Column]:
        """Of -W^2: the diagonal of the linear part, and what stands on and above that of each cone."""
        eta = self.eta
        v, u = (-eta * self.v_rest)[:, None] * self.q, (-eta * self.u_rest)[:, None] * self.q
        columns = [-eta * self.first, -eta, -eta, *v.T, -eta, -eta * self.u_first, *u.T, eta]
        return -self.linear, np.stack(columns, axis=1)

    def times(self, linear: Column, x: Column) -> tuple[Column, Column]:
        """W^2 times a column whose cones have five rows."""
        eta, q = self.eta, self.q
        both = self.v_rest * x[:, 3] + self.u_rest * x[:, 4]
        along = q[:, 0] * x[:, 1] + q[:, 1] * x[:, 2]
        y = np.empty_like(x)
        y[:, 0] = eta * (self.first * x[:, 0] + self.u_first * x[:, 4])
        y[:, 1:3] = eta[:, None] * (x[:, 1:3] + both[:, None] * q)
        y[:, 3] = eta * (self.v_rest * along + x[:, 3])
        y[:, 4] = eta * (self.u_first * x[:, 0] + self.u_rest * along - x[:, 4])
        return self.linear * linear, y
