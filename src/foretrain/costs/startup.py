"""Estimates what a training takes before its steps run at their usual pace: processes, libraries, the first
steps."""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from foretrain.errors import InputError
from foretrain.estimate import CERTAIN, SHARES, Estimate, Factors
from foretrain.files import read_text, write_atomically
from foretrain.workload import FILE_SOURCES

FORMAT = "foretrain-startup/1"
FILE = Path(__file__).with_name("startup.json")
"""What comes with foretrain; ``benchmarks/startup.py`` makes it."""

UNMEASURED = Factors(0.2, 0.4, 2.5, 5.0)
"""Of a start of which a part was not measured: on another device, of several processes, of an unknown
model."""
GROUP_S, GROUP_S_PER_RANK = 2.0, 0.05
"""Of processes that meet, and of each of their communicators (assumed: NCCL takes some seconds on a node and
about a minute over a thousand ranks)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A start that was measured, in seconds."""

    library: str
    """Where the model comes from: the source in its job."""
    operators: int
    """Distinct ones of the step's graph."""
    compiled: bool
    process_s: float | None
    """Until torch is imported and the device has its context; None in a process that had them before."""
    build_s: float | None
    """Until the model's library is imported, and model and optimizer are on the device."""
    first_steps_s: float
    """Of the first steps, beyond as many usual ones."""
    calls: int = 0
    """That launch kernels, in the forward and the backward pass."""

    @classmethod
    def of(
        cls,
        provenance: Mapping[str, Any],
        *,
        library: str,
        operators: int,
        compiled: bool,
        step_s: float,
        calls: int = 0,
    ) -> Self:
        """Read a start as ``measure steps`` writes it into the provenance of a run."""
        first, fresh = provenance["first_steps_s"], "import_s" in provenance
        return cls(
            library=library,
            operators=operators,
            compiled=compiled,
            process_s=provenance["import_s"] + provenance["context_s"] if fresh else None,
            build_s=provenance["build_s"] if fresh else None,
            first_steps_s=max(0.0, sum(first) - len(first) * step_s),
            calls=calls,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUp:
    """Says how long starts take, in seconds."""

    process_s: float
    build_s: Mapping[str, float]
    """By the library of the model, most of it for its import."""
    first_steps_s: float
    """Of a model that is not compiled: libraries, kernels and memory are fetched."""
    compile_s: float
    """Of a compiled one."""
    compile_s_per_operator: float
    """For each distinct operator, as kernels that are alike are compiled once."""
    operators: float
    """Distinct ones of a usual model."""
    compile_s_per_call: float = 0.0
    """For each call: a deeper model is traced and scheduled for longer."""
    calls: float = 0.0
    """Of a usual model."""
    spread: Factors = UNMEASURED
    compiled_spread: Factors = UNMEASURED
    devices: tuple[str, ...] = ()
    """Where this was measured."""
    starts: int = 0
    """That it was learned from."""
    sources: tuple[Mapping[str, Any], ...] = field(default=())

    @classmethod
    def load(cls, path: Path = FILE) -> Self:
        document = json.loads(read_text(path))
        if document.pop("format", None) != FORMAT:
            raise InputError(f"{path}: not {FORMAT}; benchmarks/startup.py makes it")
        spreads = {name: Factors(*document[name]) for name in ("spread", "compiled_spread")}
        lists = {name: tuple(document[name]) for name in ("devices", "sources")}
        return cls(**{**document, **spreads, **lists})

    def save(self, path: Path) -> None:
        document = {"format": FORMAT, **dataclasses.asdict(self)}
        write_atomically(path, json.dumps(document, indent=2) + "\n")

    @classmethod
    def fit(cls, starts: Sequence[Started], devices: Iterable[str] = ()) -> Self:
        """Medians and a line through measured starts, and how far each lies from those without it."""
        fresh = [start for start in starts if start.process_s is not None]
        counts = {kind: sum(start.compiled == kind for start in fresh) for kind in (False, True)}
        if min(counts.values()) < 3:
            given = f"{counts[False]} eager and {counts[True]} compiled starts of fresh processes"
            raise InputError(f"starts: {given}; at least 3 of each are needed")
        fitted = cls(**_constants(starts), devices=tuple(sorted(set(devices))), starts=len(starts))
        ratios: dict[bool, list[float]] = {False: [], True: []}
        for one in starts:
            others = cls(**_constants([start for start in starts if start is not one]))
            median_s = others.median_s(one.library, one.operators, compiled=one.compiled, calls=one.calls)
            before_s = others.before_s(one.library)
            if one.process_s is not None and one.build_s is not None:
                before_s = one.process_s + one.build_s
            ratios[one.compiled].append((before_s + one.first_steps_s) / median_s)
        return dataclasses.replace(
            fitted, spread=_spread(ratios[False]), compiled_spread=_spread(ratios[True])
        )

    def median_s(
        self, library: str, operators: float | None, *, compiled: bool, calls: float | None = None
    ) -> float:
        """Give the median of a start on one device."""
        first_s = self.first_steps_s
        if compiled:
            first_s = self.compile_s + self.compile_s_per_operator * (operators or self.operators)
            first_s += self.compile_s_per_call * (self.calls if calls is None else calls)
        return self.before_s(library) + first_s

    def before_s(self, library: str) -> float:
        """Time the start until the first step; a file needs no library, and one that was not measured is as
        the quickest."""
        none = 0.0 if library in FILE_SOURCES else min(self.build_s.values())
        return self.process_s + self.build_s.get(library, none)

    def estimate(
        self,
        library: str,
        operators: int | None,
        *,
        compiled: bool,
        device: str,
        ranks: int = 1,
        calls: int | None = None,
    ) -> Estimate:
        """Estimate the start of a job; what is not known of it is taken as usual, with a wider interval."""
        median_s = self.median_s(library, operators, compiled=compiled, calls=calls)
        median_s += GROUP_S + GROUP_S_PER_RANK * ranks if ranks > 1 else 0.0
        measured = self.compiled_spread if compiled else self.spread
        known = library in self.build_s and (operators is not None or not compiled)
        as_measured = known and ranks == 1 and device in self.devices
        return Estimate.around(median_s, measured if as_measured else measured.widest(UNMEASURED))


@functools.cache
def shipped() -> StartUp:
    """Load the times that come with foretrain."""
    return StartUp.load()


def _constants(starts: Sequence[Started]) -> dict[str, Any]:
    processes, builds = [start.process_s for start in starts], dict[str, list[float]]()
    for start in starts:
        if start.build_s is not None:
            builds.setdefault(start.library, []).append(start.build_s)
    compiled = [start for start in starts if start.compiled]
    constant, slope, per_call = _plane(compiled)
    return {
        "process_s": statistics.median(time_s for time_s in processes if time_s is not None),
        "build_s": {library: statistics.median(times_s) for library, times_s in sorted(builds.items())},
        "first_steps_s": statistics.median(
            start.first_steps_s for start in starts if not start.compiled and start.process_s is not None
        ),
        "compile_s": constant,
        "compile_s_per_operator": slope,
        "compile_s_per_call": per_call,
        "calls": statistics.median(start.calls for start in compiled),
        "operators": statistics.median(start.operators for start in starts),
    }


def _plane(compiled: Sequence[Started]) -> tuple[float, float, float]:
    """Constant and slopes over operators and calls of the nearest plane, by relative errors; without calls
    where it would fall along one of them."""
    rows = np.array([[1.0, start.operators, start.calls] for start in compiled])
    times_s = np.array([max(start.first_steps_s, 1e-3) for start in compiled])
    if len(rows) > 3 and np.linalg.matrix_rank(rows) == 3:
        solution, *_ = np.linalg.lstsq(rows / times_s[:, None], np.ones(len(rows)), rcond=None)
        if solution.min() >= 0:
            constant, slope, per_call = (float(number) for number in solution)
            return constant, slope, per_call
    return *_line(rows[:, 1].tolist(), times_s.tolist()), 0.0


def _line(sizes: Sequence[float], times_s: Sequence[float]) -> tuple[float, float]:
    """Constant and slope of the nearest line; a flat one where it would fall or start below zero."""
    if len(set(sizes)) > 1:
        slope, constant = (float(number) for number in np.polyfit(sizes, times_s, 1))
        if slope >= 0 and constant >= 0:
            return constant, slope
    return statistics.median(times_s), 0.0


def _spread(ratios: Sequence[float]) -> Factors:
    """Give the factors that hold 80 % and 95 % of the ratios, and always the forecast itself."""
    return Factors(*np.quantile(ratios, SHARES).tolist()).widest(CERTAIN)
