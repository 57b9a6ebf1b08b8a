"""Solves cone programmes by the interior-point method that ECOS publishes, step by step the same.

Domahidi, Chu and Boyd, ECC 2013, after Vandenberghe's coneprog: a homogeneous embedding, Nesterov-Todd
scaling, Mehrotra's predictor and corrector. Many optima are often as good; which of them a solver ends at
hangs on its path, so the path is followed: scaling of the data, start, step lengths and tolerances are those
of ECOS.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy.sparse import bmat, csc_matrix
from scipy.sparse import diags as diagonal
from scipy.sparse.linalg import splu

Column = npt.NDArray[np.float64]

_MOST_STEPS = 100
_SCALINGS = 3
_SMALL = 1e-6
"""Norms of rows and columns below which they are left alone."""
_TOLERANCE, _INACCURATE = 1e-8, 5e-5
_FEASIBLY_INACCURATE = 1e-4
_GAMMA = 0.99
"""Share of the way to the boundary that a step goes."""
_LEAST_STEP, _MOST_STEP = 1e-6, 0.999
_LEAST_SIGMA = 1e-4
_REGULAR = 7e-8
"""Added to the diagonal of the system, and refined away."""
_REFINEMENTS, _ACCURACY = 9, 1e-14
_WORTH_IT = 6.0
"""By how much a refinement must lessen the error for another one."""


class Cones:
    """Linear inequalities first, then second-order cones of three rows each."""

    def __init__(self, linear: int, threes: int) -> None:
        self.linear, self.threes = linear, threes
        self.rows = linear + 3 * threes
        self.degree = linear + threes

    def parts(self, column: Column) -> tuple[Column, Column]:
        """The linear part, and the cones one below the other."""
        return column[: self.linear], column[self.linear :].reshape(self.threes, 3)

    def joined(self, linear: Column, threes: Column) -> Column:
        return np.concatenate([linear, threes.ravel()])

    def into(self, column: Column) -> Column:
        """Moved along the unit until it lies inside."""
        linear, threes = self.parts(column)
        short = [-linear, np.linalg.norm(threes[:, 1:], axis=1) - threes[:, 0]]
        shift = 1.0 + max([-_GAMMA, *(float(each.max()) for each in short if each.size and each.max() >= 0)])
        moved = column.copy()
        moved_linear, moved_threes = self.parts(moved)
        moved_linear += shift
        moved_threes[:, 0] += shift
        return moved

    def product(self, left: Column, right: Column) -> Column:
        (a, u), (b, v) = self.parts(left), self.parts(right)
        cones = u[:, :1] * v + v[:, :1] * u
        cones[:, 0] = (u * v).sum(axis=1)
        return self.joined(a * b, cones)

    def quotient(self, by: Column, column: Column) -> Column:
        """What ``by`` must be multiplied with to give a column."""
        (a, u), (b, w) = self.parts(by), self.parts(column)
        rho = u[:, 0] ** 2 - (u[:, 1:] ** 2).sum(axis=1)
        zeta = (u[:, 1:] * w[:, 1:]).sum(axis=1)
        cones = np.empty_like(u)
        cones[:, 0] = (u[:, 0] * w[:, 0] - zeta) / rho
        cones[:, 1:] = ((zeta / u[:, 0] - w[:, 0]) / rho)[:, None] * u[:, 1:] + w[:, 1:] / u[:, :1]
        return self.joined(b / a, cones)

    def less_unit(self, column: Column, amount: float) -> Column:
        less = column.copy()
        linear, threes = self.parts(less)
        linear -= amount
        threes[:, 0] -= amount
        return less


class _Scaling:
    """Nesterov and Todd's: W z = W^-1 s."""

    def __init__(self, cones: Cones, slack: Column, price: Column) -> None:
        self.cones = cones
        (s, u), (z, v) = cones.parts(slack), cones.parts(price)
        self.linear = np.sqrt(s / z)
        u_size, v_size = (np.sqrt(each[:, 0] ** 2 - (each[:, 1:] ** 2).sum(axis=1)) for each in (u, v))
        u_bar, v_bar = u / u_size[:, None], v / v_size[:, None]
        self.eta = np.sqrt(u_size / v_size)
        gamma = np.sqrt(0.5 * (1 + (u_bar * v_bar).sum(axis=1)))
        self.a = 0.5 / gamma * (u_bar[:, 0] + v_bar[:, 0])
        self.q = (0.5 / gamma)[:, None] * (u_bar[:, 1:] - v_bar[:, 1:])

    def times(self, column: Column) -> Column:
        linear, threes = self.cones.parts(column)
        zeta = (self.q * threes[:, 1:]).sum(axis=1)
        scaled = np.empty_like(threes)
        scaled[:, 0] = self.a * threes[:, 0] + zeta
        scaled[:, 1:] = threes[:, 1:] + (threes[:, 0] + zeta / (1 + self.a))[:, None] * self.q
        return self.cones.joined(self.linear * linear, self.eta[:, None] * scaled)

    def stretched(self) -> csc_matrix:
        """-W^2 with two further rows for each cone, so that it stays sparse: eta^2 (D + uu' - vv')."""
        ones = (self.q**2).sum(axis=1)
        c = 1 + self.a + ones / (1 + self.a)
        d = 1 + 2 / (1 + self.a) + ones / (1 + self.a) ** 2
        d_first = np.maximum(0.5 * (self.a**2 + ones * (1 - c**2 / (1 + ones * d))), 0.0)
        u_first = np.sqrt(self.a**2 + ones - d_first)
        u_rest = c / u_first
        v_rest = np.sqrt(np.maximum(u_rest**2 - d, 0.0))
        return _stretched(
            self.linear**2, self.eta**2, d_first, u_first, u_rest[:, None] * self.q, v_rest[:, None] * self.q
        )


def _stretched(
    linear: Column, eta: Column, d_first: Column, u_first: Column, u: Column, v: Column
) -> csc_matrix:
    """The matrix of ``stretched``; the rows of a cone are its three, that of v and that of u."""
    cones = len(eta)
    blocks = np.zeros((cones, 5, 5))
    blocks[:, 0, 0] = -d_first
    blocks[:, 1, 1] = blocks[:, 2, 2] = blocks[:, 3, 3] = -1.0
    blocks[:, 4, 4] = 1.0
    blocks[:, 1:3, 3] = blocks[:, 3, 1:3] = -v
    blocks[:, 0, 4] = blocks[:, 4, 0] = -u_first
    blocks[:, 1:3, 4] = blocks[:, 4, 1:3] = -u
    blocks *= eta[:, None, None]
    first = len(linear) + 5 * np.arange(cones)[:, None, None]
    rows, columns = np.broadcast_arrays(
        first + np.arange(5)[None, :, None], first + np.arange(5)[None, None, :]
    )
    used = _PATTERN[None].repeat(cones, axis=0)
    ahead = np.arange(len(linear))
    places = (np.concatenate([ahead, rows[used]]), np.concatenate([ahead, columns[used]]))
    size = len(linear) + 5 * cones
    return csc_matrix((np.concatenate([-linear, blocks[used]]), places), shape=(size, size))


_PATTERN = np.array(
    [[1, 0, 0, 0, 1], [0, 1, 0, 1, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 0], [1, 1, 1, 0, 1]], dtype=bool
)
"""Where the block of a cone has entries."""


class _System:
    """[0 G'; G -W^2], factored once, solved for several right-hand sides with refinement.

    Unknowns are eliminated by least degree, as in ECOS: rounding decides between optima that are alike.
    """

    def __init__(self, limits: csc_matrix, cones: Cones, stretched: csc_matrix) -> None:
        self._size, self._cones = limits.shape[1], cones
        of_cones = cones.linear + (5 * np.arange(cones.threes)[:, None] + np.arange(3)).ravel()
        self._places = self._size + np.concatenate([np.arange(cones.linear), of_cones]).astype(int)
        rows = stretched.shape[0]
        spread = csc_matrix(
            (np.ones(cones.rows), (self._places - self._size, np.arange(cones.rows))),
            shape=(rows, cones.rows),
        )
        stretched_limits = csc_matrix(spread @ limits)
        exact = bmat([[None, stretched_limits.T], [stretched_limits, stretched]], format="csc")
        signs = np.concatenate([np.ones(self._size), -np.ones(rows)])
        first = self._size + cones.linear
        signs[first + 3 :: 5], signs[first + 4 :: 5] = 0.0, 1.0
        self._exact = exact
        self._factored = splu(
            csc_matrix(exact + diagonal(_REGULAR * signs)),
            permc_spec="MMD_AT_PLUS_A",
            diag_pivot_thresh=0.0,
            options={"SymmetricMode": True},
        )

    def solve(self, first: Column, second: Column) -> tuple[Column, Column]:
        wanted = np.zeros(self._exact.shape[0])
        wanted[: self._size], wanted[self._places] = first, second
        solution = self._factored.solve(wanted)
        accurate = _ACCURACY * (1 + float(np.abs(wanted).max()))
        before, size_before = solution, math.inf
        for _ in range(_REFINEMENTS + 1):
            off = wanted - self._exact @ solution
            size = float(np.abs(off).max())
            if size > size_before:
                solution = before
                break
            if size < accurate or size_before < _WORTH_IT * size:
                break
            before, size_before = solution, size
            solution = solution + self._factored.solve(off)
        return solution[: self._size], solution[self._places]


def solve(cost: Column, limits: csc_matrix, bounds: Column, *, linear: int, threes: int = 0) -> Column | None:
    """The x of least ``cost @ x`` with ``bounds - limits @ x`` in the cones; None where there is none.

    >>> square = csc_matrix(np.array([[1.0, 0], [-1, 0], [0, 1], [0, -1]]))
    >>> solve(np.array([1.0, 1.0]), square, np.array([1.0, 0, 1, 0]), linear=4).round(6) + 0.0
    array([0., 0.])
    """
    cones = Cones(linear, threes)
    limits, columns, rows = _equilibrated(limits, cones)
    cost, bounds = cost / columns, bounds / rows
    state = _start(cost, limits, bounds, cones)
    best: Column | None = None
    with np.errstate(invalid="raise", divide="raise", over="raise"):
        for _ in range(_MOST_STEPS):
            verdict = state.verdict()
            if verdict is not None:
                return state.x / (columns * state.tau) if verdict else None
            if state.nearly():
                best = state.x / (columns * state.tau)
            try:
                if not state.step():
                    break
            except (RuntimeError, FloatingPointError, ZeroDivisionError):
                break
    return best


def _equilibrated(limits: csc_matrix, cones: Cones) -> tuple[csc_matrix, Column, Column]:
    """Rows and columns divided by the roots of their largest entries, a few times (Ruiz)."""
    columns, rows = np.ones(limits.shape[1]), np.ones(limits.shape[0])
    limits = limits.tocsc().copy()
    for _ in range(_SCALINGS):
        sizes = abs(limits)
        of_columns = np.asarray(sizes.max(axis=0).todense()).ravel()
        of_rows = np.asarray(sizes.max(axis=1).todense()).ravel()
        _, in_cones = cones.parts(of_rows)
        in_cones[:] = in_cones.sum(axis=1, keepdims=True)
        of_columns, of_rows = (
            np.where(each < _SMALL, 1.0, np.sqrt(np.maximum(each, _SMALL))) for each in (of_columns, of_rows)
        )
        limits = csc_matrix(diagonal(1 / of_rows) @ limits @ diagonal(1 / of_columns))
        columns, rows = columns * of_columns, rows * of_rows
    return limits, columns, rows


def _start(cost: Column, limits: csc_matrix, bounds: Column, cones: Cones) -> _State:
    ones, none = np.ones(cones.threes), np.zeros((cones.threes, 2))
    unit = _stretched(np.ones(cones.linear), ones, ones, np.zeros(cones.threes), none, none)
    system = _System(limits, cones, unit)
    zeros = np.zeros(len(cost))
    x, away = system.solve(zeros, bounds)
    _, price = system.solve(-cost, np.zeros(cones.rows))
    return _State(cost, limits, bounds, cones, x, cones.into(-away), cones.into(price))


class _State:
    """A point of the homogeneous embedding."""

    def __init__(
        self, cost: Column, limits: csc_matrix, bounds: Column, cones: Cones, x: Column, s: Column, z: Column
    ) -> None:
        self.cost, self.limits, self.bounds, self.cones = cost, limits, bounds, cones
        self._transposed = limits.T.tocsr()
        self.x, self.s, self.z, self.tau, self.kappa = x, s, z, 1.0, 1.0
        self._sizes = [max(1.0, float(np.linalg.norm(each))) for each in (cost, bounds)]
        self._look()

    def _look(self) -> None:
        """Residuals, and what they say of the point."""
        pull, reach = -(self._transposed @ self.z), self.s + self.limits @ self.x
        self._pull = float(np.linalg.norm(pull))
        self._rx, self._rz = pull - self.cost * self.tau, reach - self.bounds * self.tau
        self._cx, self._hz = float(self.cost @ self.x), float(self.bounds @ self.z)
        self._rt = self.kappa + self._cx + self._hz
        self._gap = float(self.s @ self.z)
        self._mu = (self._gap + self.kappa * self.tau) / (self.cones.degree + 1)
        sizes = [float(np.linalg.norm(each)) for each in (self.x, self.z, self.s)]
        self._primal = (
            float(np.linalg.norm(self._rz)) / max(self._sizes[1] + sizes[0] + sizes[2], 1.0) / self.tau
        )
        self._dual = float(np.linalg.norm(self._rx)) / max(self._sizes[0] + sizes[1], 1.0) / self.tau
        self._of_price = max(sizes[1], 1.0)
        primal, dual = self._cx / self.tau, -self._hz / self.tau
        self._relative = self._gap / -primal if primal < 0 else self._gap / dual if dual > 0 else math.inf

    def verdict(self) -> bool | None:
        """True at an optimum, False where there is no solution, None before."""
        if self._done(_TOLERANCE, _TOLERANCE):
            return True
        if self._hz / self._of_price < -_TOLERANCE and self.tau < self.kappa:
            return False if self._pull / self._of_price < _TOLERANCE else None
        return None

    def nearly(self) -> bool:
        return self._done(_FEASIBLY_INACCURATE, _INACCURATE)

    def _done(self, feasible: float, close: float) -> bool:
        signs = -self._cx > 0 or -self._hz >= -close
        exact = self._primal < feasible and self._dual < feasible
        return signs and exact and (self._gap < close or self._relative < close)

    def step(self) -> bool:
        """One predictor and corrector; whether it led anywhere."""
        cones, scaling = self.cones, _Scaling(self.cones, self.s, self.z)
        lam = scaling.times(self.z)
        system = _System(self.limits, cones, scaling.stretched())
        x1, z1 = system.solve(-self.cost, self.bounds)
        denominator = self.kappa / self.tau - float(self.cost @ x1) - float(self.bounds @ z1)
        x2, z2 = system.solve(self._rx, self.s - self._rz)
        tau = (self._rt - self.kappa + float(self.cost @ x2) + float(self.bounds @ z2)) / denominator
        scaled_z = scaling.times(z2 + tau * z1)
        scaled_s = -scaled_z - lam
        kappa = -self.kappa - self.kappa / self.tau * tau
        sigma = min(max((1 - self._reach(lam, scaled_s, scaled_z, tau, kappa)) ** 3, _LEAST_SIGMA), 1.0)
        aim = cones.product(lam, lam) + cones.product(scaled_s, scaled_z)
        direction = cones.quotient(lam, cones.less_unit(aim, sigma * self._mu))
        x2, z2 = system.solve((1 - sigma) * self._rx, scaling.times(direction) - (1 - sigma) * self._rz)
        of_kappa = self.kappa * self.tau + kappa * tau - sigma * self._mu
        gain = float(self.cost @ x2) + float(self.bounds @ z2)
        tau = ((1 - sigma) * self._rt - of_kappa / self.tau + gain) / denominator
        x2, z2 = x2 + tau * x1, z2 + tau * z1
        scaled_z = scaling.times(z2)
        scaled_s = -(direction + scaled_z)
        kappa = -(of_kappa + self.kappa * tau) / self.tau
        reach = _GAMMA * self._reach(lam, scaled_s, scaled_z, tau, kappa)
        self.x, self.z = self.x + reach * x2, self.z + reach * z2
        self.s = self.s + reach * scaling.times(scaled_s)
        self.kappa, self.tau = self.kappa + reach * kappa, self.tau + reach * tau
        self._look()
        return reach > _LEAST_STEP and bool(np.isfinite(self.x).all()) and self.tau > 0

    def _reach(self, lam: Column, s: Column, z: Column, tau: float, kappa: float) -> float:
        """How far a step may go, in the scaled variables, until it leaves the cones."""
        at, at_cones = self.cones.parts(lam)
        bounds: list[float] = []
        for change in (s, z):
            linear, threes = self.cones.parts(change)
            if linear.size and (most := float((-linear / at).max())) > 0:
                bounds.append(1 / most)
            if threes.size and (most := float(_outward(at_cones, threes).max())) > 0:
                bounds.append(1 / most)
        for value, by in ((self.tau, tau), (self.kappa, kappa)):
            if by < 0:
                bounds.append(-value / by)
        return min(max(min([_MOST_STEP, *bounds]), _LEAST_STEP), _MOST_STEP)


def _outward(at: Column, change: Column) -> Column:
    """How fast a change leads out of second-order cones, by the point it starts at."""
    size = np.sqrt(at[:, 0] ** 2 - (at[:, 1:] ** 2).sum(axis=1))
    bar = at / size[:, None]
    along = bar[:, 0] * change[:, 0] - (bar[:, 1:] * change[:, 1:]).sum(axis=1)
    factor = (along + change[:, 0]) / (bar[:, 0] + 1)
    rest: Column = np.linalg.norm(change[:, 1:] - factor[:, None] * bar[:, 1:], axis=1)
    return np.asarray((rest - along) / size, dtype=np.float64)
