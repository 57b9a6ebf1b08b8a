"""Sums up simulations: means over seeds, what errors of estimates cost, and all of it as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretrain.scheduling.answers.worth import share_more, worth
from foretrain.scheduling.jobs import Trace
from foretrain.scheduling.metrics import Metrics
from foretrain.scheduling.study import EXACT, Outcome, Quality, mean_metrics

Key = tuple[str, Quality]
"""A policy and how good its estimates are."""


def mean_outcomes(outcomes: Sequence[Outcome]) -> dict[Key, Metrics]:
    """Over seeds, by policy and quality of the estimates."""
    several: dict[Key, list[Metrics]] = {}
    for outcome in outcomes:
        key = (outcome.scenario.policy, outcome.scenario.quality)
        several.setdefault(key, []).append(outcome.metrics)
    return {key: mean_metrics(each) for key, each in several.items()}


def cost_of_errors(means: Mapping[Key, Metrics], policy: str, found: Metrics) -> float | None:
    """What errors of the estimates cost in average completion time, as a fraction; None where no exact
    estimates were tried."""
    exact = means.get((policy, EXACT))
    return None if exact is None else share_more(found.average_jct_s, exact.average_jct_s)


def document(jobs: Trace, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """All figures of all simulations, as JSON values."""
    means = mean_outcomes(outcomes)
    return {
        "trace": {
            "name": jobs.name,
            "format": jobs.format,
            "jobs": len(jobs.jobs),
            "malformed": jobs.malformed.counts,
            "refused": jobs.refused.counts,
        },
        "results": [
            {
                "policy": outcome.scenario.policy,
                "estimates": outcome.scenario.estimates_are,
                "error": outcome.scenario.error,
                "seed": outcome.scenario.seed,
                "rounds_s": outcome.scenario.rounds_s if outcome.scenario.in_rounds else None,
                **outcome.metrics.to_dict(),
                "groups": {name: each.to_dict() for name, each in outcome.groups.items()},
            }
            for outcome in outcomes
        ],
        "worth": [each.to_dict() for each in worth(outcomes)],
        "means": [
            {
                "policy": policy,
                "estimates": quality.text,
                "error": quality.error,
                "average_jct_s": found.average_jct_s,
                "cost_of_errors": cost_of_errors(means, policy, found),
            }
            for (policy, quality), found in means.items()
        ],
    }
