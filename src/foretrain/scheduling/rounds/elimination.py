"""Solves sparse symmetric systems by elimination, with the same digits on every machine.

L D L', row by row (Davis, "Algorithm 849: a concise sparse Cholesky factorization package", ACM TOMS 2005),
in the order of least degree. No library of linear algebra is asked, whose sums depend on the processor.
"""

from __future__ import annotations

from collections.abc import Sequence

from foretrain.scheduling.rounds.ordering import minimum_degree

_LEAST_PIVOT, _INSTEAD = 1e-13, 2e-7
"""A pivot of the wrong sign, or hardly any, is replaced."""


class Elimination:
    """Of matrices with entries in the same places; ``columns`` has the rows of the entries on and above the
    diagonal, rising, and ``signs`` what pivots should be.

    >>> elimination = Elimination([[0], [1], [0, 1, 2]], [1, 1, -1])
    >>> elimination.factor([2.0, 4.0, 1.0, 1.0, -1.0])
    >>> [round(each, 9) for each in elimination.solve([5.0, 9.0, 3.0])]
    [2.0, 2.0, 1.0]
    """

    def __init__(self, columns: Sequence[Sequence[int]], signs: Sequence[int]) -> None:
        size = len(columns)
        self._order = minimum_degree([[row for row in rows if row < k] for k, rows in enumerate(columns)])
        self._signs = [signs[number] for number in self._order]
        place = [0] * size
        for position, number in enumerate(self._order):
            place[number] = position
        self._entries: list[list[tuple[int, int]]] = [[] for _ in columns]
        """Of each column in the order of elimination: the row, and where in a list of values the entry is."""
        count = 0
        for column, rows in enumerate(columns):
            for row in rows:
                first, last = sorted((place[row], place[column]))
                self._entries[last].append((first, count))
                count += 1
        self._rows: list[list[int]] = [[] for _ in columns]
        """Of L, by column."""
        self._steps = [self._row_of(k) for k in range(size)]
        """The columns of which each row of L has an entry, in the order of elimination."""
        self._columns: list[tuple[list[int], list[float]]] = []
        self._pivots: list[float] = []

    def _row_of(self, k: int) -> list[int]:
        """Up the tree of elimination, in which a column's parent is the first row below its diagonal."""
        steps: list[int] = []
        seen = {k}
        for row, _ in self._entries[k]:
            path = []
            while row not in seen:
                seen.add(row)
                path.append(row)
                row = self._rows[row][0] if self._rows[row] else k
            steps[:0] = path
        for column in steps:
            self._rows[column].append(k)
        return steps

    def factor(self, values: Sequence[float]) -> None:
        """Of the matrix with these entries, in the order of ``columns``."""
        rest = [0.0] * len(self._order)
        factors: list[list[float]] = [[] for _ in self._order]
        pivots: list[float] = []
        for k, steps in enumerate(self._steps):
            for row, where in self._entries[k]:
                rest[row] += values[where]
            pivot, rest[k] = rest[k], 0.0
            for column in steps:
                value, rest[column] = rest[column], 0.0
                below = factors[column]
                for row, factor in zip(self._rows[column], below, strict=False):
                    rest[row] -= factor * value
                factor = value / pivots[column]
                pivot -= factor * value
                below.append(factor)
            sign = self._signs[k]
            pivots.append(pivot if sign * pivot > _LEAST_PIVOT else sign * _INSTEAD)
        self._pivots = pivots
        self._columns = list(zip(self._rows, factors, strict=True))

    def solve(self, wanted: Sequence[float]) -> list[float]:
        """By the last factors, forward and back."""
        solution = [wanted[number] for number in self._order]
        for value_at, (rows, factors) in enumerate(self._columns):
            value = solution[value_at]
            for row, factor in zip(rows, factors, strict=True):
                solution[row] -= factor * value
        solution = [value / pivot for value, pivot in zip(solution, self._pivots, strict=True)]
        for value_at in range(len(solution) - 1, -1, -1):
            value = solution[value_at]
            for row, factor in zip(*self._columns[value_at], strict=True):
                value -= factor * solution[row]
            solution[value_at] = value
        back = [0.0] * len(solution)
        for number, value in zip(self._order, solution, strict=True):
            back[number] = value
        return back
