"""Forecasts a job by DeletePop: every operator of the captured step costed from an operator dataset, and
summed up to the whole job."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, final

import numpy as np

from foretrain.catalog import Catalog
from foretrain.cluster import Device
from foretrain.costs.host import DispatchHost
from foretrain.costs.learned import LearnedCosts, load_costs, save_costs
from foretrain.costs.measured import MeasuredOperator
from foretrain.errors import InputError
from foretrain.estimate import WIDTH_80
from foretrain.forecast import Factors, RankMemory
from foretrain.graph import OpGraph
from foretrain.job import Job
from foretrain.predictors import conformal
from foretrain.predictors.base import OperatorPredictor, nothing_to_learn, take_runs
from foretrain.predictors.deletepop.calibration import (
    NO_RUNS,
    TIMES,
    Calibration,
    Case,
    calibration_key,
    on_one_gpu,
    without_memory,
)
from foretrain.predictors.deletepop.datasets import datasets_of, forgetting, learned_without, operators_of
from foretrain.predictors.deletepop.spread import (
    COMPUTING,
    MeasuredGenerations,
    Tier,
    bounds,
    computing_parts,
    memory_bounds,
    shares,
    shipped_evidence,
    shipped_widths,
)
from foretrain.predictors.whitebox import RatingPredictor
from foretrain.run import Run
from foretrain.step.assembly import MEMORY_QUANTITIES, Spread, is_host_bound, logged
from foretrain.step.graph import step_graph
from foretrain.step.play import Step
from foretrain.step.tuning import Tuning

OPERATORS = "operators.safetensors"
SHIPPED = Path(__file__).parent / "fitted" / OPERATORS
_MOST_RUNS = 80
KERNEL_GAP_S = 1.3e-6
"""Between two kernels in a full queue, as the device-bound runs of ``data/h200_steps.jsonl`` have it."""
_COUNTS = Factors(0.6, 0.8, 1.25, 1.6)
_NAMED_SHARE = 0.02
"""Of the device time, from which on operators that were never measured are named."""
_COMPILED_MEMORY = {
    "peak_memory_bytes": Factors(0.84, 0.95, 1.04, 1.10),
    "reserved_memory_bytes": Factors(0.85, 0.93, 1.18, 1.35),
}
"""What a compiler keeps and computes again is not traced; of 30 compiled trainings 80 % lie so."""
_ENOUGH_OPERATORS = 1000
"""Fewer measured operators make forecasts less sure, in proportion, down to those of the roofline."""

Operators = Callable[[], Iterable[MeasuredOperator]]


@final
class DeletePopPredictor(RatingPredictor, OperatorPredictor):
    """Computation and memory access by operator, start-up and iterations by job, after DeletePop (ICA3PP
    2023).

    ``fit`` calibrates to runs: a handful is enough for a new device or other software. What the operator
    models themselves learn from is an operator dataset, ours or the user's own (``relearn``).
    """

    name: ClassVar[str] = "deletepop"
    home: ClassVar[frozenset[str]] = frozenset({"h200_steps", "h200_repeat_steps"})
    learns: ClassVar[bool] = True
    gap_s: ClassVar[float] = KERNEL_GAP_S

    def __init__(
        self,
        costs: LearnedCosts | None = None,
        host: DispatchHost | None = None,
        *,
        sources: Sequence[Mapping[str, Any]] = (),
        calibrations: Mapping[str, Calibration] | None = None,
        operators: Operators | None = None,
    ) -> None:
        if costs is not None and host is not None:
            self.costs, self.host, self.sources = costs, host, tuple(sources)
        self.calibrations_: dict[str, Calibration] = dict(calibrations or {})
        self._operators: Operators = operators or (lambda: operators_of(datasets_of(self.sources)))
        self._of_sources = operators is None

    @functools.cached_property
    def costs(self) -> LearnedCosts:
        return _shipped()[0]

    @functools.cached_property
    def host(self) -> DispatchHost:
        return _shipped()[1]

    @functools.cached_property
    def sources(self) -> tuple[Mapping[str, Any], ...]:
        """The files that the operator models come from."""
        return tuple(_shipped()[2].get("sources", ()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The learned state is never changed in place, so a copy shares it."""
        return type(self)(
            self.costs,
            self.host,
            sources=self.sources,
            calibrations=self.calibrations_,
            operators=None if self._of_sources else self._operators,
        )

    # Forecasts

    def costs_for(self, job: Job) -> LearnedCosts:
        costs = self.costs
        for device in dict.fromkeys(group.device for group in job.cluster.groups):
            name = device.name
            costs.check(device)
            if (calibration := self.calibrations_.get(name)) is not None:
                costs = _scaled(costs, name, tuple(sorted(calibration.groups.items())))
        return costs

    def host_for(self, job: Job) -> DispatchHost:
        calibration = self.calibrations_.get(job.cluster.groups[0].device.name)
        speed = 1.0 if calibration is None else calibration.host_speed
        overhead_s = self.host.step_overhead_s / speed
        return dataclasses.replace(self.host, speed=self.host.speed * speed, step_overhead_s=overhead_s)

    def tuning_for(self, job: Job) -> Tuning:
        return self._calibration(job).tuning

    def correction(self, step: Step) -> tuple[float, tuple[str, ...]]:
        """Correct by what calibrated runs near the job leave over; and say which calibrations apply."""
        job = step.layout.job
        notes = (
            *self._calibration_notes(job),
            *self._tier_notes(job),
            *_unmeasured_note(self._unmeasured(step)),
        )
        return self.time_factor(job), notes

    def time_factor(self, job: Job) -> float:
        residuals = self._calibration(job).residuals
        return 1.0 if residuals is None else residuals.factor(job)

    def memory_factors(self, job: Job, rank: RankMemory) -> Factors:
        known = conformal.shipped()
        if on_one_gpu(job):
            return known["device-bound"]["reserved_memory_bytes"]
        if calibration_key(job) in self.calibrations_:
            return known["many devices, calibrated"]["reserved_memory_bytes"]
        return memory_bounds(rank)["reserved_memory_bytes"]

    def _calibration_notes(self, job: Job) -> Iterator[str]:
        """Say which calibrations apply to a job, and from how many runs; or that none does."""
        devices = dict.fromkeys(group.device.name for group in job.cluster.groups)
        keys = [key for key in dict.fromkeys([*devices, calibration_key(job)]) if key in self.calibrations_]
        for key in keys:
            yield f"calibrated to {self.calibrations_[key].origin(key)}"
        if self.calibrations_ and not keys:
            yield (
                f"no calibration applies: the predictor's are of {', '.join(sorted(self.calibrations_))}, "
                f"the job is of {calibration_key(job)}"
            )

    def _unmeasured(self, step: Step) -> dict[str, float]:
        """Shares of the device time in operators of families that were never measured."""
        layout = step.of_busiest
        device, precision = layout.site.groups[0].device, layout.job.workload.training.precision
        members_of = _never_measured(self.costs, layout.graph, device, precision)
        if not members_of:
            return {}
        seconds = np.bincount(
            layout.graph.operator_index, layout.calls.device_s, minlength=len(layout.graph.operators)
        )
        whole = float(seconds.sum()) or 1.0
        return {family: float(seconds[members].sum()) / whole for family, members in members_of.items()}

    def errors_by_part(self, step: Step) -> Mapping[str, float]:
        if calibration_key(step.layout.job) in self.calibrations_:
            return super().errors_by_part(step)
        widths = shipped_widths()
        return {
            part: share * (widths[part].high - widths[part].low) / WIDTH_80
            for part, share in self._shares(step).items()
            if share
        }

    def spread_of(self, step: Step) -> Spread:
        """Say how far held-out runs lay from their forecasts, in the case that this one belongs to;
        calibrated, no narrower than the runs at hand bear out."""
        job, known = step.layout.job, conformal.shipped()
        times = dict(known[self._case(step)])
        if calibration_key(job) not in self.calibrations_:
            times |= self._by_parts(step, times)
        else:
            times["step_time_s"] = times["step_time_s"].widest(self._calibration(job).borne_out)
        if not on_one_gpu(job):
            memory = {name: times[name] for name in sorted(MEMORY_QUANTITIES)}
            if calibration_key(job) not in self.calibrations_:
                memory = memory_bounds(logged(step))
            return Spread(
                time=times["step_time_s"],
                memory=memory["reserved_memory_bytes"],
                count=_COUNTS,
                quantities=memory,
            )
        memory = {name: times.get(name, known["device-bound"][name]) for name in sorted(MEMORY_QUANTITIES)}
        estimated = job.plan.recompute != "none" and not step.layout.graph.recomputes
        if estimated or job.plan.offload:
            memory = dict.fromkeys(memory, known["many devices"]["reserved_memory_bytes"])
        if job.workload.training.compile:
            memory = {name: _COMPILED_MEMORY.get(name, factors) for name, factors in memory.items()}
        return Spread(
            time=times["step_time_s"],
            memory=memory["peak_memory_bytes"],
            count=_COUNTS,
            quantities={**times, **memory},
        )

    def _by_parts(self, step: Step, table: Mapping[str, Factors]) -> dict[str, Factors]:
        """Compute the interval of the step by its parts; of the time that the device is busy what is wider,
        its table or its computing alone."""
        widths = shipped_widths()
        intervals = {"step_time_s": bounds(self._shares(step), widths)}
        if "device_busy_s" in table:
            parts = computing_parts(step, self.costs, self.tier(step.layout.job), self._by_roofline(step))
            intervals["device_busy_s"] = table["device_busy_s"].widest(bounds(parts, widths))
        return intervals

    def _shares(self, step: Step) -> dict[str, float]:
        """The parts of a step that err each in their own way."""
        return shares(step, self.costs, self.tier(step.layout.job), self._by_roofline(step))

    def _by_roofline(self, step: Step) -> float:
        """The share of computing that nothing was measured of."""
        unmeasured = sum(self._unmeasured(step).values())
        return max(unmeasured, 1.0 - self._measured_operators() / _ENOUGH_OPERATORS)

    def tier(self, job: Job) -> Tier:
        """Say what was measured of the job's devices; of several kinds, the one that is known least."""
        precision = job.workload.training.precision
        if self.sources == tuple(_shipped()[2].get("sources", ())):
            evidence = shipped_evidence()
        else:  # what the shipped models were scored on says nothing of others
            catalog = Catalog.load()
            evidence = MeasuredGenerations.of(catalog.device(name) for name in self.costs.lookups)
        order = tuple(COMPUTING)
        devices = [group.device for group in job.cluster.groups]
        tiers: list[Tier] = [
            "measured" if self.costs.knows(device) else evidence.tier(device, precision) for device in devices
        ]
        return max(tiers, key=order.index)

    def _measured_operators(self) -> int:
        return sum(len(lookup.kernels) for lookup in self.costs.lookups.values())

    def _tier_notes(self, job: Job) -> Iterator[str]:
        """Say in words what was never measured of a device."""
        device, tier = job.cluster.groups[0].device, self.tier(job)
        if not device.is_cpu and (count := self._measured_operators()) < _ENOUGH_OPERATORS:
            yield f"only {count:,} operators were learned from: the interval is wider for it"
        if device.is_cpu or calibration_key(job) in self.calibrations_ or tier in ("measured", "scored"):
            return
        precision, whose = job.workload.training.precision, f"{device.vendor} {device.architecture}"
        known = f"other generations of {device.vendor} were" if tier == "vendor" else "no device like it was"
        yield f"nothing was measured of {whose} in {precision}, {known}: the interval is wider for it"

    def _case(self, step: Step) -> str:
        job = step.layout.job
        calibrated = calibration_key(job) in self.calibrations_
        if not on_one_gpu(job):
            return "many devices, calibrated" if calibrated else "many devices"
        if self.costs.knows(job.cluster.device):
            return "host-bound" if is_host_bound(step) else "device-bound"
        return "calibrated" if calibrated else "data sheet"

    def _calibration(self, job: Job) -> Calibration:
        return self.calibrations_.get(calibration_key(job), Calibration())

    # Learning

    def fit(self, runs: Iterable[Run]) -> Self:
        """Calibrate to runs: those on one GPU by device, then all others by devices and framework."""
        self.benefits_, self.left_out_ = {}, ()
        calibrated = False
        for key, alike in sorted(_spaced(runs).items(), key=lambda item: (" " in item[0], item[0])):
            cases, left_out = take_runs(alike, self._case_of)
            self.left_out_ = (*self.left_out_, *left_out)
            if cases:
                self._calibrate(key, cases)
                calibrated = True
        if not calibrated:
            raise nothing_to_learn(NO_RUNS, self.left_out_)
        return self

    def _case_of(self, run: Run) -> Case:
        _check_measured(run)
        return Case(run=run, layout=self.layout(run.job))

    def _calibrate(self, key: str, cases: Sequence[Case]) -> None:
        """Put a calibration in place of an earlier one, and of those that were found on top of it."""
        calibration = self._calibrated(key, cases)
        above = f"{without_memory(key)} "
        kept = {name: other for name, other in self.calibrations_.items() if not name.startswith(above)}
        self.calibrations_ = {**kept, key: calibration}
        if calibration.benefit is not None:
            self.benefits_ = {**self.benefits_, key: calibration.benefit}

    def _calibrated(self, key: str, cases: Sequence[Case]) -> Calibration:
        from foretrain.predictors.deletepop.calibration import calibrate_device
        from foretrain.predictors.deletepop.rank_calibration import calibrate_parts

        if on_one_gpu(cases[0].run.job):
            return calibrate_device(cases).after(self.calibrations_.get(key, Calibration()))
        return calibrate_parts(cases)

    def relearn(
        self,
        operators: Sequence[MeasuredOperator],
        runs: Iterable[Run] = (),
        *,
        sources: Sequence[Mapping[str, Any]] = (),
        tell: Callable[[str], None] = lambda _: None,
    ) -> Self:
        """New operator models, without earlier calibrations.

        With runs the host's constants are found anew, else they stay.
        """
        from foretrain.costs.fitting import dispatch_costs, fit_costs
        from foretrain.predictors.deletepop.host_fit import check_enough, fit_host

        kept, self.left_out_ = take_runs(runs, _checked_for_host)
        if self.left_out_ and not kept:
            raise InputError(f"runs: the host model can learn from none of them ({self.left_out_[0]})")
        if kept:
            check_enough(kept)
        self.costs = fit_costs(operators, tell)
        names = dispatch_costs(operators) or self.host.names
        self.host = (
            fit_host(DispatchHost(names=names), self.costs, kept, KERNEL_GAP_S)
            if kept
            else dataclasses.replace(self.host, names=names)
        )
        self.sources, self.calibrations_ = tuple(sources), {}
        self._operators, self._of_sources = lambda: operators, False
        return self

    def without(self, families: frozenset[str] = frozenset(), devices: frozenset[str] = frozenset()) -> Self:
        if not families and not devices:
            self.calibrations_ = {}
            return self
        if self._of_sources:
            self.costs, names = learned_without(datasets_of(self.sources), families, devices)
        else:
            self.costs, names = forgetting(self._operators(), families, devices)
        self.host = dataclasses.replace(self.host, names=names or self.host.names)
        self.calibrations_ = {}  # they are relative to the operator models that are gone
        return self

    # On disk

    def _write(self, folder: Path) -> Mapping[str, Any]:
        calibrations = {key: calibration.to_dict() for key, calibration in self.calibrations_.items()}
        about = {"sources": list(self.sources), **({"calibrations": calibrations} if calibrations else {})}
        save_costs(folder / OPERATORS, self.costs, self.host, about)
        return {}

    @classmethod
    def _read(cls, folder: Path, document: Mapping[str, Any]) -> Self:
        costs, host, about = load_costs(folder / OPERATORS)
        if costs.scales or "tunings" in about:
            raise InputError(f"{folder}: was calibrated by an earlier version; fit it again")
        calibrations = about.get("calibrations", {}).items()
        return cls(
            costs,
            host,
            sources=about.get("sources", ()),
            calibrations={key: Calibration.from_dict(calibration) for key, calibration in calibrations},
        )


def _unmeasured_note(shares: Mapping[str, float]) -> Iterator[str]:
    if (together := sum(shares.values())) >= _NAMED_SHARE:
        families = ", ".join(sorted(shares, key=lambda family: -shares[family])).replace("_", " ")
        part = f"{together:.0%} of the device time"
        yield f"{part} is by the roofline alone: no {families} operator was measured"


@functools.lru_cache(maxsize=64)
def _scaled(costs: LearnedCosts, device: str, groups: tuple[tuple[str, float], ...]) -> LearnedCosts:
    """Once for a calibration: what is costed is remembered by the costs themselves."""
    return costs.scaled(device, dict(groups))


@functools.lru_cache(maxsize=256)
def _never_measured(
    costs: LearnedCosts, graph: OpGraph, device: Device, precision: str
) -> dict[str, list[int]]:
    return costs.unmeasured(graph.operators, device, precision)


@functools.lru_cache(maxsize=1)
def _shipped() -> tuple[LearnedCosts, DispatchHost, dict[str, Any]]:
    return load_costs(SHIPPED)


def _spaced(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """At most ``_MOST_RUNS`` of each calibration, evenly from first to last: a few factors need no more."""
    by_key: dict[str, list[Run]] = {}
    for run in runs:
        by_key.setdefault(calibration_key(run.job), []).append(run)
    for key, alike in by_key.items():
        step = max(1.0, len(alike) / _MOST_RUNS)
        by_key[key] = [alike[int(i * step)] for i in range(min(len(alike), _MOST_RUNS))]
    return by_key


def _checked_for_host(run: Run) -> Run:
    """The run, where the host model can learn from it."""
    if not on_one_gpu(run.job):
        raise InputError("not of one GPU alone")
    if not run.measured.get("device_busy_s", 0) > 0:
        raise InputError("no device_busy_s")
    step_graph(run.job)
    return run


def _check_measured(run: Run) -> None:
    """Refuse a run that has nothing that a calibration can use, in one line."""
    plan = run.job.plan
    if on_one_gpu(run.job) and (
        plan.offload or (plan.recompute != "none" and not step_graph(run.job).recomputes)
    ):
        raise InputError("recomputation and offload are estimated, so operators are not calibrated to them")
    usable = tuple(TIMES) if on_one_gpu(run.job) else ("step_time_s", *sorted(MEMORY_QUANTITIES))
    if not any(run.measured.get(name, 0) > 0 for name in usable):
        raise InputError(f"no {' or '.join(usable)}")
