"""Refuses options of ``schedule`` that would change nothing beside the others that were given."""

from __future__ import annotations

from collections.abc import Mapping

from foretrain.errors import InputError

_FAILURES = ("job_mtbf", "node_mtbf", "outages", "spot", "cluster with node_mtbf")
NEEDS: Mapping[str, tuple[str, ...]] = {
    "draws": ("when",),
    "repair": ("node_mtbf", "cluster with node_mtbf"),
    "rack": ("placement topology",),
    "migrate": ("cluster of several kinds of devices", "buy"),
    "uses": ("pairs", "cluster with slices"),
    "memory_risk": ("predictor",),
    "checkpoint_every": (*_FAILURES, "checkpoint_write"),
    "correlation": ("errors", "residuals"),
}
"""Options that mean something only beside one of these."""
_SIMULATIONS = ("html", "log", "trace", "by_group", "compare_predictors")
NOT_BESIDE: Mapping[str, tuple[str, ...]] = {
    "slowdown_per_node": ("throughputs",),
    "generate": ("format",),
    "when": ("buy", "search", "estimates", "truth", "seeds", *_SIMULATIONS),
    "buy": ("search", *_SIMULATIONS),
    "search": ("seeds", *_SIMULATIONS),
}
"""Options that cannot both be honoured: an answer takes the place of the reports on simulations."""


def refuse_what_changes_nothing(given: Mapping[str, object]) -> None:
    """An error for the first option, of those that were given, which the others make meaningless."""
    there = {name for name, value in given.items() if value is not None and value is not False}
    for option, needed in NEEDS.items():
        if option in there and not there & {*needed}:
            raise InputError(f"{_flag(option)}: changes nothing without {' or '.join(map(_flag, needed))}")
    for option, others in NOT_BESIDE.items():
        both = [other for other in others if other in there]
        if option in there and both:
            raise InputError(f"{_flag(both[0])}: cannot be honoured together with {_flag(option)}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
