"""Elimination and the cone solver that rounds go by where ECOS is not installed."""

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.scheduling.rounds import conic
from foretrain.scheduling.rounds.cones import Matrix
from foretrain.scheduling.rounds.elimination import Elimination
from foretrain.scheduling.rounds.ordering import minimum_degree

graphs = st.integers(1, 25).flatmap(
    lambda size: st.lists(st.sets(st.integers(0, size - 1), max_size=6), min_size=size, max_size=size)
)
every_graph = settings(max_examples=60, deadline=None, derandomize=True)


def upper(graph: list[set[int]]) -> list[list[int]]:
    """The rows of every column on and above the diagonal."""
    return [[*sorted(row for row in rows if row < number), number] for number, rows in enumerate(graph)]


@every_graph
@given(graphs)
def test_every_unknown_is_eliminated_once(graph: list[set[int]]) -> None:
    order = minimum_degree([rows[:-1] for rows in upper(graph)])
    assert sorted(order) == list(range(len(graph)))


def test_alike_unknowns_follow_one_another_and_the_dense_one_comes_last() -> None:
    """The orders are those of AMD."""
    arrow = [[], *[[0]] * 30]
    assert minimum_degree(arrow) == [*range(30, 0, -1), 0]
    assert minimum_degree([[], [0], [1], [2], [0, 3]]) == [4, 3, 0, 1, 2]
    assert minimum_degree([[], [], [0, 1], [0, 1], [2, 3], [4]]) == [5, 4, 0, 1, 3, 2]


@every_graph
@given(graphs, st.randoms(use_true_random=False))
def test_elimination_solves_what_it_is_given(graph: list[set[int]], draw: Random) -> None:
    columns = upper(graph)
    size = len(columns)
    signs = [1 if number % 2 else -1 for number in range(size)]
    dense, values = np.zeros((size, size)), []
    for column, rows in enumerate(columns):
        for row in rows:
            value = signs[row] * 30.0 if row == column else draw.uniform(-1, 1)
            dense[row, column] = dense[column, row] = value
            values.append(value)
    elimination = Elimination(columns, signs)
    elimination.factor(values)
    wanted = np.arange(1.0, size + 1)
    assert np.allclose(dense @ elimination.solve(wanted.tolist()), wanted)


def test_the_digits_are_those_of_ecos() -> None:
    """Of ECOS 2.0 on x86-64, for a linear programme and one with a cone."""
    linear = [[-1, -3, 0], [-1, 0, -2], [0, -1, 0], [0, 0, -1], [0, 1, 1], [0, 1, 0], [0, 0, 1]]
    cone = [[0, -1], [-2, -1], [-2, 1], [0, 0]]
    ends = [
        digits([1, 0, 0], linear, [0, 0, 0, 0, 1, 1, 1], threes=0),
        digits([1, 1], cone, [0, 0, 0, 2], threes=1),
    ]
    assert ends == [
        ["-0x1.3333333394ac4p+0", "0x1.99999999c6a3ep-2", "0x1.3333333367e8cp-1"],
        ["0x1.6a09e5ce286a2p-1", "0x1.6a09e7012fe00p-1"],
    ]


def digits(cost: list[int], limits: list[list[int]], bounds: list[int], *, threes: int) -> list[str]:
    entries = np.array(limits, dtype=float)
    rows, columns = np.nonzero(entries)
    matrix = Matrix(rows, columns, entries[rows, columns], entries.shape)
    linear = len(bounds) - 3 * threes
    ends = conic.solve(np.array(cost, float), matrix, np.array(bounds, float), linear=linear, threes=threes)
    assert ends is not None
    return [float.hex(each) for each in ends.tolist()]
