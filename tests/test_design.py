"""Tests experiment design: a budget that holds, answers that repeat, more information than chance."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.errors import InputError
from foretrain.measure.candidates import (
    Array,
    Candidates,
    cluster_candidates,
    operator_candidates,
    table_candidates,
)
from foretrain.measure.design import METHODS, Design, design, gain
from foretrain.measure.design.a_optimal import a_weights
from foretrain.measure.design.controls import random_design
from foretrain.measure.design.criteria import RIDGE, information, log_det
from foretrain.measure.design.d_optimal import exchange, greedy


def made(rows: int, columns: int, seed: int, *, spread: float = 1.0) -> Candidates:
    """Random candidates with a constant, some of them twice, whose costs differ by ``spread`` powers of e."""
    random = np.random.default_rng(seed)
    features = random.normal(size=(rows, columns))
    features[:, 0] = 1
    features[-rows // 5 :] = features[: len(features[-rows // 5 :])]
    return bare(features, np.exp(spread * random.normal(size=rows)))


def bare(features: Array, cost_s: Array) -> Candidates:
    rows, columns = features.shape
    return Candidates(
        names=tuple(f"x{place}" for place in range(columns)),
        features=features,
        cost_s=cost_s,
        labels=[{"row": place} for place in range(rows)],
    )


POOLS = st.builds(
    made,
    st.integers(5, 60),
    st.integers(1, 5),
    st.integers(0, 10**6),
    spread=st.sampled_from([0.0, 0.5, 2.0]),
)
SHARES = st.floats(0.05, 1.2)


def budget_of(pool: Candidates, share: float) -> float:
    return max(share * float(pool.cost_s.sum()), float(pool.cost_s.min()))


# Every method


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=25, deadline=None)
@given(pool=POOLS, share=SHARES)
def test_a_budget_holds_and_nothing_is_chosen_twice(method: str, pool: Candidates, share: float) -> None:
    budget = budget_of(pool, share)
    found = design(method, pool, budget_s=budget)
    assert 0 < found.cost_s <= budget * (1 + 1e-9)
    assert found.cost_s == pytest.approx(pool.cost_s[found.chosen].sum())
    assert len(set(found.chosen.tolist())) == len(found.chosen)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=10, deadline=None)
@given(pool=POOLS, share=SHARES, seed=st.integers(0, 5))
def test_the_same_seed_gives_the_same_answer(method: str, pool: Candidates, share: float, seed: int) -> None:
    first, second = (design(method, pool, budget_s=budget_of(pool, share), seed=seed) for _ in range(2))
    assert first.chosen.tolist() == second.chosen.tolist()


@pytest.mark.parametrize("method", ["d-optimal", "grid", "random"])
@settings(max_examples=10, deadline=None)
@given(pool=POOLS, data=st.data())
def test_a_count_is_met(method: str, pool: Candidates, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(pool.cost_s)))
    assert len(design(method, pool, count=count).chosen) == count


@pytest.mark.parametrize("method", ["d-optimal", "grid", "random"])
def test_money_for_everything_buys_everything(method: str) -> None:
    pool = made(30, 3, 0)
    assert sorted(design(method, pool, budget_s=1e9).chosen) == list(range(30))


# D-optimal


@settings(max_examples=40, deadline=None)
@given(pool=POOLS, share=SHARES, seed=st.integers(0, 3))
def test_d_optimal_tells_at_least_as_much_as_random_and_as_greedy_alone(
    pool: Candidates, share: float, seed: int
) -> None:
    budget = budget_of(pool, share)
    found = design("d-optimal", pool, budget_s=budget, seed=seed).log_det
    assert found >= design("random", pool, budget_s=budget, seed=seed).log_det - 1e-6
    assert found >= log_det(pool.features[greedy(pool.features, pool.cost_s, budget)]) - 1e-6


@settings(max_examples=25, deadline=None)
@given(pool=POOLS, seed=st.integers(0, 10**6))
def test_the_order_of_the_candidates_hardly_matters(pool: Candidates, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(pool.cost_s))
    shuffled = bare(pool.features[order], pool.cost_s[order])
    count = max(1, len(order) // 3)
    one, other = (design("d-optimal", candidates, count=count) for candidates in (pool, shuffled))
    assert other.log_det == pytest.approx(one.log_det, abs=0.05 * pool.features.shape[1])


def test_for_a_line_two_points_are_its_ends() -> None:
    pool = table_candidates({"x": np.linspace(0, 1, 21)}, np.ones(21), [{}] * 21)
    assert set(design("d-optimal", pool, count=2).chosen.tolist()) == {0, 20}
    four = design("d-optimal", pool, count=4).chosen
    assert set(four.tolist()) == {0, 1, 19, 20}


def test_for_a_parabola_three_points_are_the_ends_and_the_middle() -> None:
    pool = table_candidates({"x": np.linspace(-1, 1, 21)}, np.ones(21), [{}] * 21, quadratic=True)
    assert set(design("d-optimal", pool, count=3).chosen.tolist()) == {0, 10, 20}


def test_exchange_finds_the_best_of_all_small_designs() -> None:
    pool = made(12, 3, 4)
    best = max(log_det(pool.features[list(rows)]) for rows in itertools.combinations(range(12), 4))
    assert design("d-optimal", pool, count=4).log_det == pytest.approx(best, abs=1e-6)


def test_exchange_mends_a_bad_start() -> None:
    pool = made(200, 4, 1, spread=0.0)
    start = random_design(pool.features, np.ones(200), 20.0, seed=3)
    better = exchange(pool.features, np.ones(200), 20.0, start)
    assert log_det(pool.features[better]) > log_det(pool.features[start]) + 1
    assert log_det(pool.features[better]) == pytest.approx(
        design("d-optimal", pool, count=20).log_det, abs=0.1
    )


def test_rows_that_cost_less_are_preferred_at_equal_worth() -> None:
    features = np.repeat([[1.0, -1.0], [1.0, 1.0]], 10, axis=0)
    cost = np.tile([1.0, 50.0], 10)
    found = design("d-optimal", bare(features, cost), budget_s=10.0)
    assert len(found.chosen) == 10
    assert (cost[found.chosen] == 1).all()


def test_an_expensive_row_is_not_blocked_by_cheap_ones() -> None:
    features = np.array([[0.001], [10.0]])
    assert design("d-optimal", bare(features, np.array([1e-9, 1.0])), budget_s=1.0).chosen.tolist() == [1]


def test_cheap_random_measures_more_for_the_same_budget() -> None:
    pool = made(500, 3, 0, spread=2.0)
    counts = [len(design(method, pool, budget_s=100.0).chosen) for method in ("cheap-random", "random")]
    assert counts[0] > 2 * counts[1]


def test_the_order_of_a_design_is_that_of_worth() -> None:
    pool = made(500, 4, 2, spread=0.0)
    chosen = design("d-optimal", pool, count=60).chosen
    backwards = chosen[::-1]
    assert log_det(pool.features[chosen[:10]]) > log_det(pool.features[backwards[:10]])


def test_twenty_thousand_candidates_are_no_trouble() -> None:
    pool = made(20_000, 20, 0)
    budget = float(pool.cost_s.sum()) / 100
    found = design("d-optimal", pool, budget_s=budget)
    assert len(found.chosen) > 200
    assert gain(found, pool, budget_s=budget, seeds=3).d_efficiency > 1.5


def test_lazy_greedy_is_greedy() -> None:
    pool = made(3000, 5, 7)
    budget = float(pool.cost_s.sum()) / 50
    chosen: list[int] = []
    left = budget
    while True:
        inverse = np.linalg.inv(information(pool.features[chosen]))
        gains = np.log1p(np.einsum("ij,jk,ik->i", pool.features, inverse, pool.features)) / pool.cost_s
        gains[chosen] = -1
        gains[pool.cost_s > left] = -1
        best = int(gains.argmax())
        if gains[best] < 0:
            break
        chosen.append(best)
        left -= pool.cost_s[best]
    lazy = greedy(pool.features, pool.cost_s, budget)
    assert log_det(pool.features[lazy]) == pytest.approx(log_det(pool.features[chosen]), abs=1e-4)


# A-optimal


def ernest() -> Candidates:
    return cluster_candidates([1, 2, 4, 8, 16, 32, 64], np.linspace(0.05, 0.5, 10))


def test_ernest_spreads_over_machines_and_stays_with_small_data() -> None:
    pool = ernest()
    found = design("a-optimal", pool, budget_s=900.0)
    machines = {pool.labels[row]["machines"] for row in found.chosen}
    assert min(machines) <= 2
    assert max(machines) == 64
    assert len(machines) >= 3
    alone = [row for row in found.chosen if pool.labels[row]["machines"] == 1]
    assert all(pool.labels[row]["scale"] < 0.3 for row in alone)


def test_ernest_beats_random_by_its_own_measure() -> None:
    found = design("a-optimal", ernest(), budget_s=900.0)
    assert gain(found, ernest(), budget_s=900.0).a_efficiency > 1


def test_the_convex_problem_is_solved() -> None:
    minimize = pytest.importorskip("scipy.optimize").minimize
    pool = made(15, 3, 5)
    budget = float(pool.cost_s.sum()) / 3
    x = pool.features / np.abs(pool.features).mean(axis=0)

    def trace(weights: Array) -> float:
        return float(np.trace(np.linalg.inv(x.T @ (weights[:, None] * x) + RIDGE * np.eye(3))))

    start = np.full(15, budget / pool.cost_s.sum())
    room: dict[str, Any] = {"type": "ineq", "fun": lambda weights: budget - pool.cost_s @ weights}
    known = minimize(
        trace,
        start,
        method="SLSQP",
        bounds=[(0, 1)] * 15,
        constraints=[room],
        options={"maxiter": 500, "ftol": 1e-10},
    )
    weights = a_weights(pool.features, pool.cost_s, budget, tolerance=1e-6, iterations=2000)
    assert trace(weights) == pytest.approx(known.fun, rel=1e-4)
    assert pool.cost_s @ weights <= budget * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(pool=POOLS, share=st.floats(0.05, 0.9))
def test_weights_are_shares_within_the_budget(pool: Candidates, share: float) -> None:
    budget = budget_of(pool, share)
    weights = a_weights(pool.features, pool.cost_s, budget)
    assert weights.min() >= 0
    assert weights.max() <= 1
    assert pool.cost_s @ weights <= budget * (1 + 1e-6)


# Grid


def test_a_grid_covers_every_region() -> None:
    random = np.random.default_rng(0)
    crowded = np.concatenate(
        [random.uniform(0, 0.1, size=(960, 2)), random.uniform(0, 1, size=(40, 2))]
    ).round(2)
    pool = bare(crowded, np.ones(1000))
    far = [
        int((crowded[design(method, pool, count=40).chosen] > 0.5).any(axis=1).sum())
        for method in ("grid", "random")
    ]
    assert far[0] > 2 * far[1]


# Candidates


def test_operators_of_one_family_share_coefficients() -> None:
    rows = [
        {
            "op": op,
            "family": "rows" if op != "mm" else "mm",
            "flops": 2 * n * m,
            "bytes": 4 * (n + m),
            "dims": [n, m],
            "cost_s": 1.0,
        }
        for op in ("mm", "add", "mul")
        for n in (1, 8, 64, 512)
        for m in (2, 32, 256)
    ]
    shared = operator_candidates(rows)
    apart = operator_candidates(rows, per_family=True, quadratic=True)
    assert "op=mm" in shared.names
    assert np.linalg.matrix_rank(shared.features) == len(shared.names)
    assert np.linalg.matrix_rank(apart.features) == len(apart.names)
    own = [place for place, name in enumerate(apart.names) if name.startswith("mm:")]
    assert own
    assert not apart.features[12:, own].any()
    assert len(design("d-optimal", apart, count=len(apart.names)).chosen) == len(apart.names)


def test_columns_that_tell_nothing_are_left_out() -> None:
    x = np.arange(6.0)
    pool = table_candidates({"x": x, "again": 3 - 2 * x, "same": np.ones(6)}, np.ones(6), [{}] * 6)
    assert pool.names == ("1", "x")


def test_cluster_features_are_those_of_ernest() -> None:
    pool = cluster_candidates([4], [0.5])
    assert pool.features.tolist() == [[1.0, 0.125, float(np.log(4)), 4.0]]
    assert pool.cost_s.tolist() == [450.0]


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "a budget or a count"),
        ({"budget_s": 1.0, "count": 2}, "a budget or a count"),
        ({"budget_s": 0.5}, "budget: 500 ms is below the cheapest candidate, which takes 1 s"),
        ({"count": 0}, "between 1 and the 6 candidates"),
        ({"count": 7}, "between 1 and the 6 candidates"),
    ],
)
def test_a_budget_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        design("random", bare(np.ones((6, 1)), np.ones(6)), **options)


def test_an_unknown_method_is_told_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="did you mean d-optimal"):
        design("d-optimale", bare(np.ones((2, 1)), np.ones(2)), count=1)


@pytest.mark.parametrize(
    ("features", "cost", "message"),
    [
        ([[1.0], [np.nan]], [1.0, 1.0], "x0 of row 2 is nan"),
        ([[1.0], [1.0]], [1.0, np.inf], "cost_s of row 2 is inf"),
        ([[1.0], [1.0]], [1.0, 0.0], "cost_s of row 2 is 0, not a positive"),
        (np.empty((0, 1)), [], "there are none"),
    ],
)
def test_candidates_check_themselves(features: Any, cost: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        bare(np.asarray(features), np.asarray(cost, dtype=float))


def test_machines_and_scales_are_checked() -> None:
    with pytest.raises(InputError, match="0 machines"):
        cluster_candidates([0], [1.0])
    with pytest.raises(InputError, match="scales above 0"):
        cluster_candidates([1], [2.0])


def test_an_operator_without_a_field_is_told() -> None:
    with pytest.raises(InputError, match="no 'flops'"):
        operator_candidates([{"op": "mm", "bytes": 1, "dims": [1], "cost_s": 1.0}])


def test_a_design_says_how_it_was_made() -> None:
    found = design("random", made(10, 2, 0), count=3)
    assert isinstance(found, Design)
    assert found.method == "random"


# What is known before


def test_what_is_known_is_not_asked_again() -> None:
    """Two directions, of which one was measured often: the other one tells more, though it is shorter."""
    features = np.array([[2.0, 0.0], [0.0, 1.0]])
    candidates = Candidates(names=("a", "b"), features=features, cost_s=np.ones(2), labels=[{}, {}])
    known = np.array([[2.0, 0.0]] * 3)
    assert design("d-optimal", candidates, count=1).chosen.tolist() == [0]
    chosen = design("d-optimal", candidates, count=1, known=known)
    assert chosen.chosen.tolist() == [1]
    assert chosen.determined == 2
    assert chosen.log_det == pytest.approx(log_det(np.vstack([known, features[1:]])))
    with pytest.raises(InputError, match="a-optimal knows nothing of what was measured before"):
        design("a-optimal", candidates, count=1, known=known)


def test_half_d_optimal_takes_turns_with_random() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(200, 4))
    candidates = Candidates(names=tuple("abcd"), features=features, cost_s=np.ones(200), labels=[{}] * 200)
    corners = set(design("d-optimal", candidates, count=10).chosen.tolist())
    both = design("half-d-optimal", candidates, count=20).chosen.tolist()
    assert len(set(both)) == 20
    assert set(both[::2]) == corners
    assert set(design("half-d-optimal", candidates, count=1).chosen.tolist()) != set()
