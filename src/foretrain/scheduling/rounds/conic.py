"""Solves cone programmes by the interior-point method that ECOS publishes, to the same last digit.

Domahidi, Chu and Boyd, ECC 2013, after Vandenberghe's coneprog: a homogeneous embedding, Nesterov-Todd
scaling, Mehrotra's predictor and corrector. Many optima are often as good; which of them a solver ends at
hangs on its path, down to its rounding. So the path is followed: scaling of the data, start, elimination,
step lengths and tolerances are those of ECOS, and so is the order of every sum, which is left to no library.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from foretrain.scheduling.rounds.cones import (
    GAMMA,
    IN_CONE,
    STRETCHED,
    Column,
    Cones,
    Matrix,
    Scaling,
    Stretched,
    dot,
    norm,
    rest_squared,
)
from foretrain.scheduling.rounds.elimination import Elimination

_MOST_STEPS = 100
_SCALINGS = 3
_SMALL = 1e-6
"""Norms of rows and columns below which they are left alone."""
_TOLERANCE, _INACCURATE = 1e-8, 5e-5
_FEASIBLY_INACCURATE = 1e-4
_LEAST_STEP, _MOST_STEP = 1e-6, 0.999
_LEAST_SIGMA = 1e-4
_ASTRAY = 500.0
"""By how much the primal residual may grow in a step."""
_REGULAR = 7e-8
"""Added to the diagonal of the system."""
_REFINEMENTS, _ACCURACY = 9, 1e-14
_WORTH_IT = 6.0
"""By how much a refinement must lessen the error for another one."""


class _System:
    """[0 G'; G -W^2], solved for several right-hand sides with refinement for every W.

    What is added to the diagonal is refined towards, not away: so does ECOS, with the other sign in the last
    row of each cone.
    """

    def __init__(self, limits: Matrix, cones: Cones) -> None:
        size = limits.shape[1]
        self._limits, self._cones, self._size = limits, cones, size
        below: list[list[tuple[int, float]]] = [[] for _ in range(limits.shape[0])]
        for row, column, value in zip(
            limits.rows.tolist(), limits.columns.tolist(), limits.values.tolist(), strict=True
        ):
            below[row].append((column, value))
        columns: list[list[int]] = [[number] for number in range(size)]
        values: list[float] = [_REGULAR] * size
        signs = [1] * size
        changing: list[int] = []
        """Which of the values are those of W, in its order."""

        def add(entries: list[tuple[int, float]], own: list[int], sign: int) -> None:
            columns.append([*(number for number, _ in entries), *own])
            values.extend(value for _, value in entries)
            changing.extend(range(len(values), len(values) + len(own)))
            values.extend(0.0 for _ in own)
            signs.append(sign)

        for row in range(cones.linear):
            add(below[row], [size + row], -1)
        for cone in range(cones.threes):
            first = size + cones.linear + STRETCHED * cone
            for row in range(IN_CONE):
                add(below[cones.linear + IN_CONE * cone + row], [first + row], -1)
            add([], [first + 1, first + 2, first + 3], -1)
            add([], [first, first + 1, first + 2, first + 4], 1)
        self._values, self._changing = np.array(values), np.array(changing, dtype=np.int64)
        self._elimination = Elimination(columns, signs)
        self._stretched: Stretched | None = None
        self._kept = np.full(cones.rows, _REGULAR)
        self._kept[cones.linear + IN_CONE - 1 :: IN_CONE] = -_REGULAR

    def factor(self, stretched: Stretched | None) -> None:
        """For a W; None for the unit, to which nothing is added."""
        self._stretched = stretched
        linear, cones = (stretched or Stretched.unit(self._cones)).entries()
        if stretched is not None:
            linear = linear - _REGULAR
            cones = cones + _ADDED
        self._values[self._changing] = np.concatenate([linear, cones.ravel()])
        self._elimination.factor(self._values.tolist())

    def solve(self, first: Column, second: Column) -> tuple[Column, Column]:
        wanted = self._spread(first, second)
        solution = self._eliminated(wanted)
        accurate = _ACCURACY * (1.0 + float(np.abs(wanted).max()))
        change, size_before = np.zeros_like(wanted), math.inf
        for count in range(_REFINEMENTS + 1):
            off = self._off(first, second, solution)
            size = float(np.abs(off).max())
            if count and size > size_before:
                solution = solution - change
                break
            if count == _REFINEMENTS or size < accurate or (count and size_before < _WORTH_IT * size):
                break
            size_before, change = size, self._eliminated(off)
            solution = solution + change
        return self._parts(solution)

    def _eliminated(self, wanted: Column) -> Column:
        return np.array(self._elimination.solve(wanted.tolist()))

    def _parts(self, solution: Column) -> tuple[Column, Column]:
        """The unknowns, and the rows of the cones without those that stretch them."""
        linear, cones = self._rows(solution)
        return solution[: self._size], self._cones.joined(linear, cones[:, :IN_CONE])

    def _rows(self, solution: Column) -> tuple[Column, Column]:
        end = self._size + self._cones.linear
        return solution[self._size : end], solution[end:].reshape(self._cones.threes, STRETCHED)

    def _spread(self, first: Column, second: Column) -> Column:
        """One column of the stretched system."""
        linear, threes = self._cones.parts(second)
        cones = np.zeros((self._cones.threes, STRETCHED))
        cones[:, :IN_CONE] = threes
        return np.concatenate([first, linear, cones.ravel()])

    def _off(self, first: Column, second: Column, solution: Column) -> Column:
        """What the solution leaves."""
        x, z = self._parts(solution)
        off = self._spread(
            self._limits.transposed_from(first - _REGULAR * x, z),
            second - self._limits.times(x) + self._kept * z,
        )
        linear, cones = self._rows(solution)
        if self._stretched is not None:
            linear, cones = self._stretched.times(linear, cones)
        off_linear, off_cones = self._rows(off)
        off_linear += linear
        off_cones += cones
        return off


_ADDED = np.array([-_REGULAR] * IN_CONE + [0.0] * 6 + [_REGULAR])
"""To the entries of a cone: the diagonal of its own rows and of that of u."""


def solve(cost: Column, limits: Matrix, bounds: Column, *, linear: int, threes: int = 0) -> Column | None:
    """The x of least ``cost @ x`` with ``bounds - limits @ x`` in the cones; None where there is none.

    >>> square = Matrix(np.arange(4), np.array([0, 0, 1, 1]), np.array([1.0, -1, 1, -1]), (4, 2))
    >>> solve(np.array([1.0, 1.0]), square, np.array([1.0, 0, 1, 0]), linear=4).round(6) + 0.0
    array([0., 0.])
    """
    cones = Cones(linear, threes)
    limits, columns, rows = _equilibrated(limits, cones)
    cost, bounds = cost / columns, bounds / rows
    state = _start(cost, limits, bounds, cones)
    best = now = state.seen()
    with np.errstate(invalid="raise", divide="raise", over="raise"):
        for _ in range(_MOST_STEPS):
            verdict = state.verdict()
            if verdict is not None:
                return state.x / (columns * state.tau) if verdict else None
            try:
                goes_on = state.step()
            except (FloatingPointError, ZeroDivisionError, OverflowError):
                break
            last, now = now, state.seen()
            if now.primal > _ASTRAY * last.primal or now.gap < 0:
                break
            if now.better_than(best):
                best = now
            if not goes_on and state.verdict() is None:
                break
    return best.x / (columns * best.tau) if best.nearly else None


def _equilibrated(limits: Matrix, cones: Cones) -> tuple[Matrix, Column, Column]:
    """Rows and columns divided by the roots of their largest entries, a few times (Ruiz)."""
    height, width = limits.shape
    columns, rows, values = np.ones(width), np.ones(height), limits.values
    for _ in range(_SCALINGS):
        of_columns, of_rows = np.zeros(width), np.zeros(height)
        np.maximum.at(of_columns, limits.columns, np.abs(values))
        np.maximum.at(of_rows, limits.rows, np.abs(values))
        _, in_cones = cones.parts(of_rows)
        in_cones[:] = (in_cones[:, 0] + in_cones[:, 1] + in_cones[:, 2])[:, None]
        of_columns, of_rows = (np.where(each < _SMALL, 1.0, np.sqrt(each)) for each in (of_columns, of_rows))
        values = values / of_rows[limits.rows] / of_columns[limits.columns]
        columns, rows = columns * of_columns, rows * of_rows
    return Matrix(limits.rows, limits.columns, values, limits.shape), columns, rows


def _start(cost: Column, limits: Matrix, bounds: Column, cones: Cones) -> _State:
    system = _System(limits, cones)
    system.factor(None)
    x, away = system.solve(np.zeros(len(cost)), bounds)
    _, price = system.solve(-cost, np.zeros(cones.rows))
    return _State(cost, limits, bounds, cones, system, x, cones.into(-away), cones.into(price))


class _Seen(NamedTuple):
    """A point that was passed, for the case that nothing better comes."""

    x: Column
    tau: float
    gap: float
    primal: float
    dual: float
    kappa_over_tau: float
    mu: float
    nearly: bool
    """Whether it will do where no optimum is reached."""

    def better_than(self, other: _Seen) -> bool:
        """In everything that should go to nothing."""
        return all(0 < mine < theirs for mine, theirs in zip(self[2:7], other[2:7], strict=True))


class _State:
    """A point of the homogeneous embedding."""

    def __init__(
        self, cost: Column, limits: Matrix, bounds: Column, cones: Cones, system: _System,
        x: Column, s: Column, z: Column,
    ) -> None:  # fmt: skip
        self.cost, self.limits, self.bounds, self.cones = cost, limits, bounds, cones
        self._system = system
        self.x, self.s, self.z, self.tau, self.kappa = x, s, z, 1.0, 1.0
        self._sizes = [max(1.0, norm(each)) for each in (cost, bounds)]
        self._look()

    def _look(self) -> None:
        """Residuals, and what they say of the point."""
        pull = self.limits.transposed_from(np.zeros(len(self.x)), self.z)
        reach = self.limits.times(self.x) + self.s
        self._pull = norm(pull)
        self._rx, self._rz = pull - self.tau * self.cost, reach - self.tau * self.bounds
        self._cx, self._hz = dot(self.cost, self.x), dot(self.bounds, self.z)
        self._rt = self.kappa + self._cx + self._hz
        self._gap = dot(self.s, self.z)
        self._mu = (self._gap + self.kappa * self.tau) / (self.cones.degree + 1)
        sizes = [norm(each) for each in (self.x, self.z, self.s)]
        self._primal = norm(self._rz) / max(self._sizes[1] + sizes[0] + sizes[2], 1.0) / self.tau
        self._dual = norm(self._rx) / max(self._sizes[0] + sizes[1], 1.0) / self.tau
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

    def seen(self) -> _Seen:
        nearly = self._done(_FEASIBLY_INACCURATE, _INACCURATE)
        kappa_over_tau = self.kappa / self.tau
        return _Seen(self.x, self.tau, self._gap, self._primal, self._dual, kappa_over_tau, self._mu, nearly)

    def _done(self, feasible: float, close: float) -> bool:
        signs = -self._cx > 0 or -self._hz >= -close
        exact = self._primal < feasible and self._dual < feasible
        return signs and exact and (self._gap < close or self._relative < close)

    def step(self) -> bool:
        """One predictor and corrector; whether it led anywhere."""
        cones, scaling, system = self.cones, Scaling(self.cones, self.s, self.z), self._system
        lam = scaling.times(self.z)
        system.factor(scaling.stretched())
        x1, z1 = system.solve(-self.cost, self.bounds)
        denominator = self.kappa / self.tau - dot(self.cost, x1) - dot(self.bounds, z1)
        x2, z2 = system.solve(self._rx, self.s - self._rz)
        tau = (self._rt - self.kappa + dot(self.cost, x2) + dot(self.bounds, z2)) / denominator
        scaled_z = scaling.times(z2 + tau * z1)
        scaled_s = -scaled_z - lam
        kappa = -self.kappa - self.kappa / self.tau * tau
        short = 1.0 - self._reach(lam, scaled_s, scaled_z, tau, kappa)
        sigma = min(max(short * short * short, _LEAST_SIGMA), 1.0)
        part, sigma_mu = 1.0 - sigma, sigma * self._mu
        both = cones.product(scaled_s, scaled_z)
        direction = cones.quotient(lam, cones.plus_less_unit(cones.product(lam, lam), both, sigma_mu))
        x2, z2 = system.solve(part * self._rx, -part * self._rz + scaling.times(direction))
        of_kappa = self.kappa * self.tau + kappa * tau - sigma_mu
        gain = part * self._rt - of_kappa / self.tau + dot(self.cost, x2) + dot(self.bounds, z2)
        tau = gain / denominator
        x2, z2 = x2 + tau * x1, z2 + tau * z1
        scaled_z = scaling.times(z2)
        scaled_s = -(direction + scaled_z)
        kappa = -(of_kappa + self.kappa * tau) / self.tau
        reach = self._reach(lam, scaled_s, scaled_z, tau, kappa) * GAMMA
        self.x, self.z = self.x + reach * x2, self.z + reach * z2
        self.s = self.s + reach * scaling.times(scaled_s)
        self.kappa, self.tau = self.kappa + reach * kappa, self.tau + reach * tau
        self._look()
        return reach > _LEAST_STEP * GAMMA and bool(np.isfinite(self.x).all()) and self.tau > 0

    def _reach(self, lam: Column, s: Column, z: Column, tau: float, kappa: float) -> float:
        """How far a step may go, in the scaled variables, until it leaves the cones."""
        at, at_cones = self.cones.parts(lam)
        bounds: list[float] = []
        for change in (s, z):
            linear, threes = self.cones.parts(change)
            if linear.size and (most := float((-linear / at).max())) > 0:
                bounds.append(1.0 / most)
            if threes.size and (most := float(_outward(at_cones, threes).max())) > 0:
                bounds.append(1.0 / most)
        for value, by in ((self.tau, tau), (self.kappa, kappa)):
            if by < 0:
                bounds.append(-value / by)
        return min(max(min([_MOST_STEP, *bounds]), _LEAST_STEP), _MOST_STEP)


def _outward(at: Column, change: Column) -> Column:
    """How fast a change leads out of second-order cones, by the point it starts at."""
    size = np.sqrt(at[:, 0] * at[:, 0] - rest_squared(at))
    bar, per_size = at / size[:, None], 1.0 / size
    along = bar[:, 0] * change[:, 0] - bar[:, 1] * change[:, 1] - bar[:, 2] * change[:, 2]
    factor = (along + change[:, 0]) / (bar[:, 0] + 1)
    rest = per_size[:, None] * (change[:, 1:] - factor[:, None] * bar[:, 1:])
    out = np.sqrt(rest[:, 0] * rest[:, 0] + rest[:, 1] * rest[:, 1]) - per_size * along
    return np.asarray(out, dtype=np.float64)
