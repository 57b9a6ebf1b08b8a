"""Describes a job with what was measured: Run, from lines of JSON and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretrain.catalog import Catalog
from foretrain.errors import InputError, invalid, unknown
from foretrain.files import read_lines
from foretrain.job import Job
from foretrain.provenance import as_measured
from foretrain.quantities import QUANTITIES, RESOURCE_FIGURES
from foretrain.schema import convert


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A job with what was measured and where the figures come from.

    The only input of ``fit`` and ``evaluate``.
    """

    job: Job
    measured: Mapping[str, float]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, data: object, *, catalog: Catalog | None = None, base: Path = Path()) -> Run:
        if not isinstance(data, Mapping) or "job" not in data or "measured" not in data:
            raise InputError("run: a run is a table with job and measured (and provenance)")
        for key in data:
            if key not in ("job", "measured", "provenance"):
                raise unknown(str(key), key, ("job", "measured", "provenance"), "a known key; allowed are")
        measured = convert(data["measured"], Mapping[str, float], "measured")
        for name in measured:
            if name not in QUANTITIES:
                raise unknown(f"measured.{name}", name, QUANTITIES, "a known quantity; allowed are")
        _check_measured(measured, "measured")
        provenance = convert(data.get("provenance") or {}, Mapping[str, Any], "provenance")
        measured = {**sampled_figures(provenance), **measured}
        job = Job.read(_with_possible_experts(data["job"]), catalog=catalog, base=base)
        work = job.workload
        job = dataclasses.replace(
            job,
            workload=dataclasses.replace(work, model=work.model.measured_with(provenance)),
            cluster=job.cluster.measured_on(provenance, catalog),
        )
        return cls(job=as_measured(job, provenance), measured=measured, provenance=provenance)

    def to_dict(self) -> dict[str, Any]:
        return {
            "job": self.job.to_dict(),
            "measured": dict(self.measured),
            "provenance": dict(self.provenance),
        }


def _with_possible_experts(tables: Any) -> Any:
    """A job that was measured did run: where its table names more expert ranks than a pipeline stage has
    devices (as published ones do), the whole stage shares the experts."""
    plan = tables.get("plan") if isinstance(tables, Mapping) else None
    if not isinstance(plan, Mapping) or "data" not in plan or "expert_tensor" in plan:
        return tables
    *sizes, expert = (plan.get(name, 1) for name in ("data", "tensor", "context", "expert"))
    if not all(isinstance(one, int) for one in (*sizes, expert)) or expert <= math.prod(sizes):
        return tables
    return {**tables, "plan": {**plan, "expert": math.prod(sizes)}}


def sampled_figures(provenance: Mapping[str, Any]) -> dict[str, float]:
    """The figures of the resources, which campaigns keep beside the series that they are of."""
    resources = provenance.get("resources")
    figures = resources.get("figures") if isinstance(resources, Mapping) else None
    if not isinstance(figures, Mapping):
        return {}
    sampled = {
        name: float(figures[name]) for name in RESOURCE_FIGURES if isinstance(figures.get(name), int | float)
    }
    _check_measured(sampled, "provenance.resources.figures")
    return sampled


_ABOVE_ZERO = ("_time_s", "samples_per_s", "tokens_per_s")
"""How the names of times and rates end, which no run can have at zero."""


def _check_measured(figures: Mapping[str, float], where: str) -> None:
    """Refuse what nothing can be learned from or compared with."""
    for name, value in figures.items():
        if name.endswith(_ABOVE_ZERO) and not 0 < value < math.inf:
            raise invalid(f"{where}.{name}", value, "a finite number above zero")
        if not 0 <= value < math.inf:
            raise invalid(f"{where}.{name}", value, "a finite number, zero or above")


def read_runs(path: Path, *, catalog: Catalog | None = None) -> Iterator[tuple[int, Run]]:
    """Runs of a ``.jsonl`` file with their line numbers."""
    catalog = catalog or Catalog.load()
    for number, data in read_lines(path):
        try:
            yield number, Run.read(data, catalog=catalog, base=path.parent)
        except InputError as error:
            raise InputError(f"{path}:{number}: {error}") from error


def runs_of_file(path: Path) -> list[Run]:
    """The runs of a ``.jsonl`` file, which has some."""
    runs = [run for _, run in read_runs(path)]
    if not runs:
        raise InputError(f"{path}: empty; a runs file has one run per line")
    return runs
