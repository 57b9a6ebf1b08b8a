"""Searches plans and clusters for a deadline, a budget or the least time, cost or energy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrain.api import job_of
from foretrain.catalog import Catalog
from foretrain.errors import invalid
from foretrain.job import Job
from foretrain.launchers import Launch
from foretrain.options import check_names, lists_options
from foretrain.planner.clusters import Wanted
from foretrain.planner.goal import Goal, Objective
from foretrain.planner.outcome import AxisStep, Nothing, Option, Plans
from foretrain.planner.planning import Effort, make_plans
from foretrain.planner.space import HELD
from foretrain.run import Run
from foretrain.units import parse_seconds

if TYPE_CHECKING:
    from foretrain.planner.search import SearchState
    from foretrain.predictors.base import Predictor

__all__ = ["AxisStep", "Goal", "Nothing", "Option", "Plans", "plan"]

_OWN = (
    "kinds", "max_devices", "counts", "deadline", "budget", "objective", "framework", "fits", "risk", "top",
    "seconds", "exhaustive", "processes", "ray", "cached", "predictor", "catalog", "listener",
)  # fmt: skip


@lists_options
def plan(
    model: str | os.PathLike[str] | Job | Run | Launch | Mapping[str, Any],
    *,
    kinds: str | Sequence[str] = (),
    max_devices: int | None = None,
    counts: Sequence[int] = (),
    deadline: str | float | None = None,
    budget: float | None = None,
    objective: Objective | None = None,
    framework: str | None = None,
    fits: float = 0.9,
    risk: float = 0.1,
    top: int = 10,
    seconds: float | None = None,
    exhaustive: bool = False,
    processes: int = 1,
    ray: str | None = None,
    cached: bool = True,
    predictor: str | Path | Predictor | None = None,
    catalog: Catalog | str | Path | None = None,
    listener: Callable[[SearchState], None] = lambda state: None,
    **options: Any,
) -> Plans:
    """The best plans of a training: which devices, how many of them, and how the model is spread over them.

    ``model`` and ``options`` are those of ``foretrain.predict``, but for a module in hand; the job's own
    degrees of parallelism are where nothing is held to: an axis of a plan that is given as an option
    (``tensor=4``, or several values, ``tensor=[2, 4]``) is held to it. Without ``kinds`` (devices or nodes of
    the catalogue; as on the command line, ``devices="h100,a100"`` is the same), ``max_devices`` and
    ``counts`` the cluster is the job's own.

    With a ``deadline`` (seconds, or a text such as "24h") the cheapest plan in time comes first, with a
    ``budget`` (dollars) the fastest within it; ``objective`` says otherwise. No plan that is ranked runs out
    of memory with a greater chance than ``1 - fits``; ``risk`` is the chance with which deadline and budget
    may be missed.

    >>> plans = plan("resnet18", device="h100", batch=1024, image=64, precision="amp-bf16", max_devices=4)
    >>> plans.best.devices, plans.best.plan.shard, plans[0] is plans.best
    (2, 'none', True)
    """
    from foretrain import predictors

    kinds, options = _kinds(kinds, options)
    check_names(options, beside=_OWN)
    known = (
        catalog if isinstance(catalog, Catalog) else Catalog.load(None if catalog is None else Path(catalog))
    )
    allowed = {name: _values(options.pop(name)) for name in HELD if options.get(name) is not None}
    job = job_of(model, options, known)
    deadline_s = parse_seconds(deadline, "deadline") if isinstance(deadline, str) else deadline
    goal = Goal(
        objective=objective or ("cost" if deadline_s is not None else "time"),
        deadline_s=deadline_s,
        budget=budget,
        fits=fits,
        risk=risk,
    )
    chosen = (
        predictors.get(predictor or predictors.DEFAULT)
        if predictor is None or isinstance(predictor, str | Path)
        else predictor
    )
    return make_plans(
        job,
        chosen,
        goal=goal,
        wanted=Wanted(kinds=kinds, most=max_devices, counts=tuple(counts)),
        target=framework,
        allowed=allowed,
        top=top,
        effort=Effort(seconds=seconds, exhaustive=exhaustive, processes=processes, ray=ray, cached=cached),
        catalog=known,
        listener=listener,
    )


def _kinds(kinds: str | Sequence[str], options: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Names of devices to choose from, and the other options; ``devices`` may be a number or such names."""
    devices = options.get("devices")
    if isinstance(devices, str | list | tuple):
        if kinds:
            raise invalid("devices", devices, "a whole number where kinds says which devices to choose from")
        kinds, options = devices, {name: value for name, value in options.items() if name != "devices"}
    return tuple(_split(kinds)), options


def _split(names: str | Sequence[str]) -> list[str]:
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def _values(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple | range) else (value,)
