"""DeletePop: every operator of the captured step costed from an operator dataset, laid on host and device, summed up to the whole job."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, final

from foretrain.capture import capture_job
from foretrain.cluster import Device
from foretrain.costs.host import DispatchHost
from foretrain.costs.learned import LearnedCosts, load_costs, save_costs
from foretrain.costs.measured import OWN_OPERATORS, MeasuredOperator, load_measured
from foretrain.errors import ForetrainError, InputError
from foretrain.forecast import Forecast
from foretrain.job import Job, Run
from foretrain.predictors import conformal
from foretrain.predictors.base import Benefit, OperatorPredictor, is_source
from foretrain.predictors.conformal import Factors
from foretrain.predictors.whitebox import (
    MEMORY_QUANTITIES,
    QUANTITIES,
    Spread,
    forecast_one_device,
    host_beside,
    needs_ranks,
)
from foretrain.step.timeline import Timeline

OPERATORS = "operators.safetensors"
SHIPPED = Path(__file__).parent / "fitted" / OPERATORS
_MOST_RUNS = 80
HOST_BOUND = 0.8
"""Share of the step that the device is busy, below which the host bounds it."""
KERNEL_GAP_S = 1.3e-6
"""Between two kernels in a full queue, as the device-bound runs of ``data/h200_steps.jsonl`` have it."""
_HOST = "host"
"""The host's speed among the factors that a calibration finds for a device."""

Operators = Callable[[], Iterable[MeasuredOperator]]


@final
class DeletePopPredictor(OperatorPredictor):
    """Computation and memory access by operator, start-up and iterations by job, after DeletePop (ICA3PP 2023).

    ``fit`` calibrates to runs: a handful is enough for a new device or other software. What the operator models
    themselves learn from is an operator dataset, ours or the user's own (``relearn``).
    """

    name: ClassVar[str] = "deletepop"
    quantities: ClassVar[frozenset[str]] = QUANTITIES
    learns: ClassVar[bool] = True

    def __init__(
        self, costs: LearnedCosts | None = None, host: DispatchHost | None = None, about: Mapping[str, Any] | None = None,
        operators: Operators | None = None,
    ) -> None:  # fmt: skip
        if costs is not None and host is not None:
            self.costs, self.host, self.about = costs, host, dict(about or {})
        self._operators: Operators = operators or (lambda: load_measured(OWN_OPERATORS))

    @functools.cached_property
    def costs(self) -> LearnedCosts:
        return _shipped()[0]

    @functools.cached_property
    def host(self) -> DispatchHost:
        return _shipped()[1]

    @functools.cached_property
    def about(self) -> dict[str, Any]:
        return _shipped()[2]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The learned state is never changed in place, so a copy shares it."""
        return type(self)(self.costs, self.host, self.about, self._operators)

    def predict(self, job: Job) -> Forecast:
        if _in_ranks(job):
            return self._predict_ranks(job)
        device = job.cluster.device
        spread = functools.partial(self._spread, device)
        return forecast_one_device(
            job,
            self.costs,
            host_beside(job, self.host_of(device.name)),
            spread,
            predictor=self.name,
            gap_s=KERNEL_GAP_S,
        )

    def _predict_ranks(self, job: Job) -> Forecast:
        from foretrain.predictors.deletepop.rank_calibration import Calibration
        from foretrain.predictors.many_devices import forecast_ranks
        from foretrain.step.layout import tuning_key

        known = self.about.get("tunings", {}).get(tuning_key(job))
        found = None if known is None else Calibration.from_dict(known)
        return forecast_ranks(
            job, self.costs, self.host_of(job.cluster.groups[0].device.name), functools.partial(self._ranks_spread, known is not None),
            predictor=self.name, gap_s=KERNEL_GAP_S, calibration=found,
        )  # fmt: skip

    def fit(self, runs: Iterable[Run]) -> Self:
        """Calibrate to runs: those of one GPU by device, those of many by device and framework. They are traced as they come."""
        from foretrain.predictors.deletepop.calibration import NO_RUNS, TIMES, calibrate

        kept = self._keep(
            _spaced(list(runs)),
            lambda run: _why_not_ranks(run) if _in_ranks(run.job) else _why_not(run, TIMES),
        )
        if not kept:
            raise InputError(NO_RUNS)
        reports: dict[str, dict[str, Any]] = {}
        for device, mine in sorted(
            _by(kept, lambda run: "" if _in_ranks(run.job) else run.job.cluster.device.name).items()
        ):
            if device:
                factors, speed, reports[device] = calibrate(
                    self.costs, self.host_of(device), mine, KERNEL_GAP_S
                )
                self.costs = self.costs.scaled(device, {**factors, _HOST: speed})
            else:
                reports.update(self._fit_ranks(mine))
        self.about = {**self.about, "calibrations": {**self.about.get("calibrations", {}), **reports}}
        self.benefits_ = {device: Benefit(**figures) for device, figures in reports.items()}
        return self

    def _fit_ranks(self, runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
        from foretrain.predictors.deletepop.rank_calibration import Case, calibrate_ranks
        from foretrain.predictors.many_devices import layout_of, logged
        from foretrain.step.layout import tuning_key

        reports, tunings = {}, dict(self.about.get("tunings", {}))
        for key, mine in sorted(_by(runs, lambda run: tuning_key(run.job)).items()):
            cases, left_out = [], list(self.left_out_)
            for run in mine:
                try:
                    layout, overhead_s = layout_of(
                        run.job,
                        self.costs,
                        self.host_of(run.job.cluster.groups[0].device.name),
                        gap_s=KERNEL_GAP_S,
                    )
                    cases.append(Case(run=run, layout=layout, overhead_s=overhead_s))
                except ForetrainError as error:
                    left_out.append(f"{run.job.workload.model.label}: {' '.join(str(error).splitlines())}")
            self.left_out_ = tuple(left_out)
            if cases:
                found, reports[key] = calibrate_ranks(cases, logged)
                tunings[key] = found.to_dict()
        self.about = {**self.about, "tunings": tunings}
        return reports

    def relearn(
        self,
        operators: Sequence[MeasuredOperator],
        runs: Iterable[Run] = (),
        *,
        sources: Sequence[Mapping[str, Any]] = (),
        tell: Callable[[str], None] = lambda _: None,
    ) -> Self:
        """New operator models, without earlier calibrations. With runs the host's constants are found anew, else they stay."""
        from foretrain.costs.fitting import dispatch_costs, fit_costs
        from foretrain.predictors.deletepop.host_fit import check_enough, fit_host

        kept = self._keep(runs, lambda run: _why_not(run, ("device_busy_s",)))
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
        self.about = {"sources": list(sources)}
        self._operators = lambda: operators
        return self

    def without(self, families: frozenset[str] = frozenset(), devices: frozenset[str] = frozenset()) -> Self:
        from foretrain.costs.fitting import dispatch_costs, fit_costs

        kept = [one for one in self._operators() if one.known_without(families) and one.device not in devices]
        if not kept:
            raise InputError(
                f"operators: none is left without {', '.join(sorted(families | devices))}; learn from more of them"
            )
        self.costs = fit_costs(kept)
        self.host = dataclasses.replace(self.host, names=dispatch_costs(kept) or self.host.names)
        self.about = {key: value for key, value in self.about.items() if key != "calibrations"}
        return self

    def _keep(self, runs: Iterable[Run], why_not: Callable[[Run], str]) -> list[Run]:
        """The runs that can be learned from and traced; the others are told of in ``left_out_``."""
        kept, left_out = [], []
        for run in runs:
            reason = why_not(run)
            if reason:
                left_out.append(f"{run.job.workload.model.label}: {reason}")
            else:
                kept.append(run)
        self.left_out_ = tuple(left_out)
        return kept

    def _write(self, folder: Path) -> Mapping[str, Any]:
        save_costs(folder / OPERATORS, self.costs, self.host, self.about)
        return {}

    @classmethod
    def _read(cls, folder: Path, document: Mapping[str, Any]) -> Self:
        costs, host, about = load_costs(folder / OPERATORS)
        datasets = [source for source in about.get("sources", ()) if "device" in source]
        return cls(costs, host, about, functools.partial(_operators_of, datasets) if datasets else None)

    def host_of(self, device: str) -> DispatchHost:
        """The host as a calibration found it beside this device."""
        speed = self.costs.scales.get(device, {}).get(_HOST, 1.0)
        return dataclasses.replace(
            self.host, speed=self.host.speed * speed, step_overhead_s=self.host.step_overhead_s / speed
        )

    def _ranks_spread(self, calibrated: bool, job: Job) -> Spread:
        known = conformal.shipped()["many devices, calibrated" if calibrated else "many devices"]
        return Spread(
            time=known["step_time_s"],
            memory=known["reserved_memory_bytes"],
            count=Factors(0.6, 0.8, 1.25, 1.6),
        )

    def _spread(self, device: Device, timeline: Timeline) -> Spread:
        """How far held-out runs lay from their forecasts, in the case that this one belongs to."""
        if self.costs.knows(device):
            case = (
                "host-bound" if timeline.device_busy_s < HOST_BOUND * timeline.step_time_s else "device-bound"
            )
        else:
            case = "calibrated" if device.name in self.costs.scales else "data sheet"
        known, memory = conformal.shipped()[case], conformal.shipped()["device-bound"]
        return Spread(
            time=known["step_time_s"],
            memory=memory["peak_memory_bytes"],
            count=Factors(0.6, 0.8, 1.25, 1.6),
            quantities={
                **{name: value for name, value in memory.items() if name in MEMORY_QUANTITIES},
                **known,
            },
        )


@functools.lru_cache(maxsize=1)
def _shipped() -> tuple[LearnedCosts, DispatchHost, dict[str, Any]]:
    return load_costs(SHIPPED)


def _operators_of(datasets: Sequence[Mapping[str, Any]]) -> Iterator[MeasuredOperator]:
    """The operator datasets that models were learned from, where they are still to be found."""
    for source in datasets:
        places = [path for path in (Path(source["file"]), OWN_OPERATORS) if is_source(path, source)]
        if not places:
            raise InputError(
                f"{source['file']}: gone or changed since the predictor learned from it, so no part of it can be left out"
            )
        yield from load_measured(places[0], source["device"])


def _spaced(runs: Sequence[Run]) -> list[Run]:
    """At most ``_MOST_RUNS`` of each device and framework, evenly from first to last: a few factors need no more."""
    from foretrain.step.layout import tuning_key

    chosen = []
    for mine in _by(runs, lambda run: tuning_key(run.job)).values():
        step = max(1.0, len(mine) / _MOST_RUNS)
        chosen += [mine[int(i * step)] for i in range(min(len(mine), _MOST_RUNS))]
    return chosen


def _in_ranks(job: Job) -> bool:
    """CPUs too, as one calibration serves one worker and many."""
    return needs_ranks(job) or (job.cluster.device.is_cpu and job.workload.training.mode == "train")


def _by(runs: Iterable[Run], key: Callable[[Run], str]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(key(run), []).append(run)
    return found


def _why_not_ranks(run: Run) -> str:
    usable = ("step_time_s", *sorted(MEMORY_QUANTITIES))
    return "" if any(run.measured.get(name, 0) > 0 for name in usable) else f"no {' or '.join(usable)}"


def _why_not(run: Run, times: Iterable[str]) -> str:
    """Why nothing is learned from a run; empty when something is."""
    cluster = run.job.cluster
    if cluster.world_size > 1 or cluster.device.is_cpu:
        return f"{cluster.world_size} devices" if cluster.world_size > 1 else "a CPU"
    if not any(run.measured.get(time, 0) > 0 for time in times):
        return f"no {' or '.join(times)}"
    try:
        capture_job(run.job)
    except ForetrainError as error:
        return " ".join(str(error).splitlines())
    return ""
