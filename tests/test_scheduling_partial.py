"""Gavel's strategy-proof division, and Gandiva's pairs at random in rounds."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.scheduling import Machine, Result, TraceJob
from foretrain.scheduling.rounds.policies import round_policy
from foretrain.scheduling.rounds.proportional import proportional
from foretrain.scheduling.rounds.simulation import Rounds
from foretrain.scheduling.rounds.strategy_proof import partial_allocation
from foretrain.scheduling.sharing.interference import Interference, Manners, MannersOfKinds
from foretrain.scheduling.speeds import ThroughputTable

speeds = st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.0])
jobs_rows = st.lists(
    st.tuples(st.lists(speeds, min_size=2, max_size=2), st.integers(1, 2), st.sampled_from([1.0, 3.0])),
    min_size=2,
    max_size=6,
)
every_job = settings(max_examples=40, deadline=None, derandomize=True)


def divided(rows: list[tuple[list[float], int, float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rates = np.array([[0.1 + row[0][0], row[0][1]] for row in rows])
    return rates, np.array([row[2] for row in rows]), np.array([float(row[1]) for row in rows])


COUNTS = np.array([2.0, 3.0])


@every_job
@given(rows=jobs_rows)
def test_no_division_has_a_greater_product_of_throughputs(rows: list[tuple[list[float], int, float]]) -> None:
    rates, weights, gpus = divided(rows)
    shares = proportional(rates[None], weights[None], gpus[None], COUNTS)[0]
    assert (shares >= 0).all()
    assert (shares.sum(axis=1) <= 1 + 1e-9).all()
    assert (gpus @ shares <= COUNTS + 1e-9).all()
    optimize = pytest.importorskip("scipy.optimize")
    gains = weights[:, None] * rates / (rates * shares).sum(axis=1)[:, None]
    jobs = len(rates)
    whole = np.kron(np.eye(jobs), np.ones(2))
    kinds = np.kron(gpus[None, :], np.eye(2))
    best = optimize.linprog(
        -gains.ravel(),
        A_ub=np.vstack([whole, kinds]),
        b_ub=np.concatenate([np.ones(jobs), COUNTS]),
        bounds=(0, 1),
    )
    assert -best.fun <= weights.sum() * (1 + 1e-3), "no way leads up from it"


@every_job
@given(rows=jobs_rows, liar=st.integers(0, 5), says=st.lists(speeds, min_size=2, max_size=2))
def test_no_job_gains_by_saying_other_speeds(
    rows: list[tuple[list[float], int, float]], liar: int, says: list[float]
) -> None:
    rates, weights, gpus = divided(rows)
    job = liar % len(rates)
    honest = partial_allocation(rates, weights, gpus, COUNTS)[job] @ rates[job]
    said = rates.copy()
    said[job] = [0.1 + says[0], says[1]]
    lied = partial_allocation(said, weights, gpus, COUNTS)[job] @ rates[job]
    assert lied <= honest * (1 + 1e-3)


@every_job
@given(rows=jobs_rows)
def test_a_job_keeps_at_least_one_part_in_e_of_the_fair_division(
    rows: list[tuple[list[float], int, float]],
) -> None:
    rates, _, gpus = divided(rows)
    ones = np.ones(len(rates))
    fair = (proportional(rates[None], ones[None], gpus[None], COUNTS)[0] * rates).sum(axis=1)
    kept = (partial_allocation(rates, ones, gpus, COUNTS) * rates).sum(axis=1)
    assert (kept >= fair * (math.exp(-1) - 1e-4)).all()
    assert (kept <= fair * (1 + 1e-9)).all()


def test_like_jobs_on_one_kind_keep_what_the_theorem_says() -> None:
    jobs, devices = 5, 2.0
    shares = partial_allocation(np.ones((jobs, 1)), np.ones(jobs), np.ones(jobs), np.array([devices]))
    assert shares[:, 0] == pytest.approx(devices / jobs * (1 - 1 / jobs) ** (jobs - 1), rel=1e-4)
    alone = partial_allocation(np.ones((1, 1)), np.ones(1), np.ones(1), np.array([devices]))
    assert alone[0, 0] == pytest.approx(1.0, rel=1e-4)


def played(jobs: list[TraceJob], gpus: int, pairs: Interference, seed: int = 0) -> Result:
    table = ThroughputTable({("v100", kind, gang): 1.0 for kind in ("light", "hungry") for gang in (1, 2)})
    machines = [Machine(device="v100", gpus=gpus)]
    return Rounds(jobs, machines, round_policy("gavel_gandiva", seed), table, seed=seed, pairs=pairs).run()


LIGHT = MannersOfKinds({"light": Manners(needs=0.5, bears=0.5, pressure=0.2)})


def long_jobs(count: int, kind: str = "light", steps: float = 7200.0) -> list[TraceJob]:
    return [
        TraceJob(name=str(number), arrival_s=0.0, steps=steps, gpus=1, kind=kind) for number in range(count)
    ]


def test_nobody_shares_where_all_have_room() -> None:
    result = played(long_jobs(4), 4, LIGHT)
    assert {each.allocation.share for each in result.segments} == {1000}
    assert result.finish_s.tolist() == [7200.0] * 4


def test_as_many_pairs_are_made_as_there_are_too_few_gpus() -> None:
    result = played(long_jobs(6), 4, LIGHT)
    first = [each for each in result.segments if each.start_s == 0]
    assert sorted(each.allocation.share for each in first) == [500] * 4 + [1000] * 2


def test_a_pair_that_gains_nothing_is_tried_once() -> None:
    result = played(long_jobs(2, "hungry"), 1, LIGHT)
    shared = sorted({each.start_s for each in result.segments if each.allocation.share < 1000})
    assert shared[0] == 0.0, "it is tried"
    jobs = [
        *long_jobs(2, "hungry", 72000.0),
        TraceJob(name="c", arrival_s=2000.0, steps=360.0, gpus=2, kind="light"),
    ]
    result = played(jobs, 2, LIGHT)
    later = [each for each in result.segments if each.allocation.share < 1000 and each.start_s > 4000.0]
    assert not later, "and never again after the next division"


def test_pairs_hang_on_the_seed_alone() -> None:
    jobs = long_jobs(12)
    first, again, other = (played(jobs, 7, LIGHT, seed) for seed in (1, 1, 2))
    assert first.finish_s.tobytes() == again.finish_s.tobytes()
    mates = [
        frozenset(
            (each.job, each.allocation.parts)
            for each in result.segments
            if each.start_s == 0 and each.allocation.share < 1000
        )
        for result in (first, other)
    ]
    assert mates[0] != mates[1]
