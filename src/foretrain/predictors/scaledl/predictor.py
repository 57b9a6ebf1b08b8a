"""ScaleDL: plays a step from learned operator costs on any plan, and corrects it by graph networks over its
layers and collectives."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self, final

import numpy as np
import numpy.typing as npt

from foretrain.architectures import family
from foretrain.costs.host import DispatchHost
from foretrain.costs.learned import LearnedCosts
from foretrain.errors import InputError, UnsupportedJob
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.predictors.base import Benefit, nothing_to_learn, take_runs
from foretrain.predictors.deletepop.predictor import KERNEL_GAP_S, DeletePopPredictor
from foretrain.predictors.neural import NeuralPredictor, neural_module
from foretrain.predictors.scaledl.correction import WORDS, Correction, Place, read_correction
from foretrain.predictors.scaledl.graph import (
    NODE_COLUMNS,
    RUN_COLUMNS,
    LayerGraph,
    design_figures,
    layer_graph,
)
from foretrain.predictors.whitebox import WhiteBoxPredictor
from foretrain.run import Run
from foretrain.step.assembly import QUANTITIES, Spread
from foretrain.step.play import Step
from foretrain.step.tuning import Tuning

_NETWORK, _OPERATORS = "network.safetensors", "operators"
"""The file and the folder beside ``predictor.json``."""


@final
class ScaleDLPredictor(WhiteBoxPredictor, NeuralPredictor[Correction]):
    """``step = played step * exp(share * correction)``, after ScaleDL (Wang et al., arXiv 2511.04162).

    The step is played from learned operator costs on host, device and network, as DeletePop does. The
    correction comes from graph neural networks over the layers of all stages and the collectives between
    them, is bounded, and counts as far as runs that were left out bear it out.
    """

    name: ClassVar[str] = "scaledl"
    home: ClassVar[frozenset[str]] = frozenset(
        "nanotron_h100 vtrain_a100_single_node llm_foundry_mpt_a100 megatron_ci_a100 pollux_t4 nvidia_llm "
        "dgxc_h100 nvidia_deeplearningexamples automodel_h100 sailor_gh200 neusight_transformers "
        "timm_rtx3090 ets_t4 h200_fsdp h200_inference h200_random_steps h200_modern h200_steps".split()
    )
    quantities: ClassVar[frozenset[str]] = QUANTITIES
    shipped: ClassVar[Path] = Path(__file__).parent / "fitted"
    gap_s: ClassVar[float] = KERNEL_GAP_S
    quadratic_design: ClassVar[bool] = True

    def __init__(
        self,
        operators: DeletePopPredictor | None = None,
        learned: Correction | None = None,
        seed: int = 0,
    ) -> None:
        self.operators, self.learned_, self.seed = operators, learned, seed
        self.fresh = operators is None and learned is None

    def costs_for(self, job: Job) -> LearnedCosts:
        return self._operators().costs_for(job)

    def host_for(self, job: Job) -> DispatchHost:
        return self._operators().host_for(job)

    def tuning_for(self, job: Job) -> Tuning:
        return self._operators().tuning_for(job)

    def spread_of(self, step: Step) -> Spread:
        """Say how far measured runs lie: as from the played step, but for its time: as far as left-out runs
        that were as near lay; where it is not corrected, no less than from the played step."""
        played, place = self._operators().spread_of(step), Place.of(step.layout.job)
        learned = self.state()
        if place.mode not in learned.region.modes:
            return played
        trust = learned.region.trust(place)
        own = learned.factors[trust]
        own = own if learned.gates[trust] else own.widest(played.time)
        quantities = {**played.quantities, "step_time_s": own}
        return dataclasses.replace(played, time=own, quantities=quantities)

    def predict(self, job: Job) -> Forecast:
        self.check(job)
        self.state()
        return super().predict(job)

    def check(self, job: Job) -> None:
        """Workers on CPUs beside GPUs are neither."""
        if len({group.device.is_cpu for group in job.cluster.groups}) > 1:
            raise UnsupportedJob("cluster.groups: CPUs beside GPUs; scaledl forecasts steps on either")

    def design_row(self, job: Job) -> Mapping[str, float]:
        """Describe a job by what the played step says of host, device and network, and the number of
        devices."""
        self.check(job)
        return design_figures(layer_graph(self.step(job)))

    def correction(self, step: Step) -> tuple[float, tuple[str, ...]]:
        """The factor on the played step time, and what to say of it."""
        learned, place = self.state(), Place.of(step.layout.job)
        if place.mode not in learned.region.modes:
            return 1.0, (f"no run of mode {place.mode} was learned from: the played step is not corrected",)
        trust = learned.region.trust(place)
        gate, known = learned.gates[trust], WORDS[trust]
        if not gate:
            return 1.0, (f"the played step is not corrected: {known}, and left-out runs as far did not gain",)
        factor = float(np.exp(learned.log_factor(layer_graph(step), place)))
        whole = "" if gate == 1.0 else f" ({gate:.0%} of what the networks say)"
        return factor, (f"the played step is corrected by a factor of {factor:.3f}{whole}: {known}",)

    def corrected(self, step: Step, factor: float) -> Step:
        """The time that the device is busy stays: left-out runs bear out no correction of it."""
        scaled = step.scaled(factor)
        return dataclasses.replace(scaled, device_busy_s=min(step.device_busy_s, scaled.time_s))

    def fit(self, runs: Iterable[Run], *, played: Callable[[Run], LayerGraph] | None = None) -> Self:
        """Train the networks; the operator models stay as they are.

        ``played`` gives the graph of a run, where it is to come from operator models that have not seen the
        family of the run.
        """
        network = _networks()
        of_run = played or self.layer_graph
        known, self.left_out_ = take_runs(runs, lambda run: _known(network, run, of_run(run)))
        if not known:
            needs = "none has a step time; the networks need at least one"
            raise nothing_to_learn(needs, self.left_out_)
        self.learned_, held_out = network.train(known, seed=self.seed)
        measured, base = (np.array(values) for values in zip(*map(_times, known), strict=True))
        names = np.array([one.place.device for one in known])
        self.benefits_ = {
            name: _benefit(measured[names == name], base[names == name], held_out[names == name])
            for name in sorted(set(names.tolist()))
        }
        return self

    def without(self, families: frozenset[str] = frozenset(), devices: frozenset[str] = frozenset()) -> Self:
        """The operator models are learned without them; the networks are forgotten until ``fit``."""
        self.operators = copy.deepcopy(self._operators()).without(families, devices)
        self.forget()
        return self

    def layer_graph(self, run: Run) -> LayerGraph:
        """Make the graph that ``fit`` learns from a run; ``UnsupportedJob`` when it cannot."""
        self.check(run.job)
        if not run.measured.get("step_time_s", 0.0) > 0:
            raise UnsupportedJob("no step_time_s")
        return layer_graph(self.step(run.job))

    def _write(self, folder: Path) -> Mapping[str, Any]:
        """The networks; and the operator models, when they are not those of the package."""
        learned, operators = self.state(), self._operators()
        _networks().save(folder / _NETWORK, learned)
        own = operators.costs is not DeletePopPredictor().costs or bool(operators.calibrations_)
        if own:
            operators.save(folder / _OPERATORS)
        return {"own_operators": own, "node_columns": NODE_COLUMNS, "run_columns": RUN_COLUMNS}

    @classmethod
    def _read(cls, folder: Path, document: Mapping[str, Any]) -> Self:
        if (tuple(document["node_columns"]), tuple(document["run_columns"])) != (NODE_COLUMNS, RUN_COLUMNS):
            raise InputError(f"{folder}: the features are others than this version computes; fit it again")
        learned = read_correction(folder / _NETWORK)
        return cls(
            DeletePopPredictor.load(folder / _OPERATORS) if document["own_operators"] else None, learned
        )

    def _operators(self) -> DeletePopPredictor:
        if self.operators is None:
            self.operators = DeletePopPredictor()
        return self.operators


def _known(network: ModuleType, run: Run, graph: LayerGraph) -> Any:
    return network.Known(
        graph=graph,
        place=Place.of(run.job),
        family=family(run.job.workload.model),
        measured_s=run.measured["step_time_s"],
    )


def _times(known: Any) -> tuple[float, float]:
    return known.measured_s, known.graph.base_s


def _benefit(
    measured: npt.NDArray[np.float64], base: npt.NDArray[np.float64], logs: npt.NDArray[np.float64]
) -> Benefit:
    before, after = (float(np.abs(one / measured - 1).mean()) for one in (base, base * np.exp(logs)))
    return Benefit(runs=len(measured), error_before=before, error_after=after)


def _networks() -> ModuleType:
    return neural_module("foretrain.predictors.scaledl.network", ScaleDLPredictor.name)
