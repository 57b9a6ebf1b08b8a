"""ScaleDL: costs the layers of a step by learned operator models, and corrects their sum by a graph
network."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Self, final

import numpy as np
import numpy.typing as npt

from foretrain.architectures import family
from foretrain.costs.host import DispatchHost
from foretrain.costs.learned import LearnedCosts
from foretrain.errors import InputError, UnsupportedJob
from foretrain.estimate import SHARES, Factors
from foretrain.forecast import Forecast
from foretrain.graph import PHASES
from foretrain.job import Job, Run
from foretrain.predictors.base import Benefit, take_runs
from foretrain.predictors.deletepop.predictor import KERNEL_GAP_S, DeletePopPredictor
from foretrain.predictors.neural import NeuralPredictor, neural_module
from foretrain.predictors.whitebox import WhiteBoxPredictor
from foretrain.step.assembly import Spread
from foretrain.step.layout import Tuning
from foretrain.step.play import Step

if TYPE_CHECKING:
    from foretrain.predictors.scaledl.network import CorrectionNetwork

NODES_AT_MOST = 192
"""A step with more layers than this has its innermost layers joined to those that hold them, as far as they
are nested."""

NODE_COLUMNS = (
    "operator_time", "host_time", "flops", "bytes", "kernels", "launches", "device_share", "host_share",
    *PHASES,
)  # fmt: skip
RUN_COLUMNS = ("device_time", "host_time", "host_over_device")

_NETWORK, _OPERATORS = "network.safetensors", "operators"
"""The file and the folder beside ``predictor.json``."""
_KEPT = frozenset({"device_busy_s", "peak_memory_bytes", "reserved_memory_bytes"})
"""What the correction does not change."""
_NARROWEST = Factors(0.95, 0.97, 1.03, 1.05)
"""Intervals are never narrower, however near the runs lie."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerGraph:
    """A step as the network sees it: one node per layer and phase, an edge wherever the data of one flow into
    another."""

    nodes: npt.NDArray[np.float32]
    """A row per node, as ``NODE_COLUMNS`` names it; sizes as logarithms."""
    edges: npt.NDArray[np.int64]
    """Two rows: from, to."""
    share: npt.NDArray[np.float32]
    """How much each node counts when the nodes are summed up."""
    run: npt.NDArray[np.float32]
    """As ``RUN_COLUMNS`` names it."""
    base_s: float
    """The step time that is corrected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedCorrection:
    """The network and what it learned from."""

    network: CorrectionNetwork
    modes: frozenset[str]
    devices: frozenset[str]
    factors: Factors
    """Intervals: how far runs lay from the forecasts of networks that had not seen their architecture."""
    shipped: bool = False
    """Whether it comes with the package, and so from other machines than the user's."""


@final
class ScaleDLPredictor(WhiteBoxPredictor, NeuralPredictor[LearnedCorrection]):
    """``step = layer-wise step * exp(correction)``, after ScaleDL (Wang et al., arXiv 2511.04162).

    The layer-wise step adds up learned operator costs on host and device, as DeletePop does. The correction
    comes from a graph neural network over the layers, is bounded, and holds what sums miss: overlap, gaps and
    caches across layers.
    """

    name: ClassVar[str] = "scaledl"
    home: ClassVar[frozenset[str]] = frozenset({"h200_steps"})
    quantities: ClassVar[frozenset[str]] = _KEPT | {
        "step_time_s", "samples_per_s", "tokens_per_s", "epoch_time_s", "total_time_s", "device_utilization",
    }  # fmt: skip
    shipped: ClassVar[Path] = Path(__file__).parent / "fitted"
    gap_s: ClassVar[float] = KERNEL_GAP_S

    def __init__(
        self,
        operators: DeletePopPredictor | None = None,
        learned: LearnedCorrection | None = None,
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
        """That of left-out runs where the network learned from a user's runs of this device; the shipped one
        learned on one machine, and a step of any other is as sure as the sum over its layers."""
        layers, learned, job = self._operators().spread_of(step), self.learned_, step.layout.job
        if learned is None or learned.shipped or job.cluster.device.name not in learned.devices:
            return layers
        quantities = {**layers.quantities, "step_time_s": learned.factors}
        return dataclasses.replace(layers, time=learned.factors, quantities=quantities)

    def predict(self, job: Job) -> Forecast:
        _check_learnable(job)
        self.state()
        forecast = super().predict(job)
        quantities = {name: forecast[name] for name in self.quantities if name in forecast.quantities}
        return dataclasses.replace(forecast, quantities=quantities)

    def correction(self, step: Step) -> tuple[float, tuple[str, ...]]:
        """The factor on the layer-wise step time, and what to say of it."""
        learned, job = self.state(), step.layout.job
        mode, device = job.workload.training.mode, job.cluster.device.name
        if mode not in learned.modes:
            return 1.0, (f"no run of mode {mode} was learned from: the sum over layers is not corrected",)
        factor = learned.network.factor(layer_graph(step))
        learned_on = "" if device in learned.devices else f", learned on {', '.join(sorted(learned.devices))}"
        return factor, (f"the sum over layers is corrected by a factor of {factor:.3f}{learned_on}",)

    def fit(self, runs: Iterable[Run]) -> Self:
        """Train the network on runs of one device each; the operator models stay as they are."""
        network = _networks()
        known, self.left_out_ = take_runs(runs, lambda run: (run, self.layer_graph(run)))
        if not known:
            raise InputError(
                "runs: none is of one device and has a step time; the network needs at least one"
            )
        measured = np.array([run.measured["step_time_s"] for run, _ in known])
        kin = [family(run.job.workload.model) for run, _ in known]
        trained, held_out = network.train([graph for _, graph in known], measured, kin, seed=self.seed)
        devices = np.array([run.job.cluster.device.name for run, _ in known])
        base = np.array([graph.base_s for _, graph in known])
        self.benefits_ = {
            name: _benefit(measured[devices == name], base[devices == name], held_out[devices == name])
            for name in sorted(set(devices.tolist()))
        }
        self.learned_ = LearnedCorrection(
            network=trained,
            modes=frozenset(run.job.workload.training.mode for run, _ in known),
            devices=frozenset(devices.tolist()),
            factors=intervals(measured / held_out),
        )
        return self

    def without(self, families: frozenset[str] = frozenset(), devices: frozenset[str] = frozenset()) -> Self:
        """The operator models are learned without them; the network is forgotten until ``fit``."""
        self.operators = copy.deepcopy(self._operators()).without(families, devices)
        self.forget()
        return self

    def layer_graph(self, run: Run) -> LayerGraph:
        """What ``fit`` learns from a run; ``UnsupportedJob`` when it cannot."""
        _check_learnable(run.job)
        if not run.measured.get("step_time_s", 0.0) > 0:
            raise UnsupportedJob("no step_time_s")
        return layer_graph(self.step(run.job))

    def _write(self, folder: Path) -> Mapping[str, Any]:
        """The network; and the operator models, when they are not those of the package."""
        learned, operators = self.state(), self._operators()
        learned.network.save(folder / _NETWORK)
        own = operators.costs is not DeletePopPredictor().costs or bool(operators.calibrations_)
        if own:
            operators.save(folder / _OPERATORS)
        return {
            "own_operators": own, "modes": sorted(learned.modes), "devices": sorted(learned.devices),
            "factors": list(learned.factors),
            "node_columns": NODE_COLUMNS, "run_columns": RUN_COLUMNS,
        }  # fmt: skip

    @classmethod
    def _read(cls, folder: Path, document: Mapping[str, Any]) -> Self:
        if (tuple(document["node_columns"]), tuple(document["run_columns"])) != (NODE_COLUMNS, RUN_COLUMNS):
            raise InputError(f"{folder}: the features are others than this version computes; fit it again")
        network = _networks().load(folder / _NETWORK)
        learned = LearnedCorrection(
            network=network,
            modes=frozenset(document["modes"]),
            devices=frozenset(document["devices"]),
            factors=Factors(*document["factors"]),
            shipped=folder == cls.shipped,
        )
        return cls(
            DeletePopPredictor.load(folder / _OPERATORS) if document["own_operators"] else None, learned
        )

    def _operators(self) -> DeletePopPredictor:
        if self.operators is None:
            self.operators = DeletePopPredictor()
        return self.operators


# Layers


def layer_graph(step: Step) -> LayerGraph:
    """Operator costs summed up by layer and phase, and the flow of data between them."""
    graph, calls = step.layout.graph, step.layout.calls
    node = _node_of_op([op.layer for op in graph.ops], [op.phase for op in graph.ops])
    count = int(node.max(initial=-1)) + 1
    repeats = np.where(
        graph.phase_index == PHASES.index("optimizer"), 1.0, float(step.layout.job.accumulation)
    )

    def by_node(column: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.bincount(node, weights=column * repeats, minlength=count).astype(np.float64)

    device_s, host_s, kernels = by_node(calls.device_s), by_node(calls.host_s), by_node(calls.kernels)
    flops, size, launches = (by_node(graph.column(name)) for name in ("flops", "bytes", "launches"))
    phases = np.zeros((count, len(PHASES)))
    phases[node, graph.phase_index] = 1.0
    share, host_share = device_s / max(device_s.sum(), 1e-12), host_s / max(host_s.sum(), 1e-12)
    sizes = (device_s / 1e-6, host_s / 1e-6, flops / 1e6, size / 1e3, kernels, launches)
    pairs = {
        (int(node[source]), int(node[i])) for i in range(len(graph.ops)) for source in graph.producers(i)
    }
    edges = np.array(sorted((a, b) for a, b in pairs if a != b), dtype=np.int64).reshape(-1, 2).T
    device_total, host_total = step.device_busy_s, step.host_issue_s
    run = np.log(np.maximum([device_total, host_total, host_total / max(device_total, 1e-9)], 1e-9))
    return LayerGraph(
        nodes=np.column_stack([*(np.log1p(column) for column in sizes), share, host_share, phases]).astype(
            np.float32
        ),
        edges=np.ascontiguousarray(edges),
        share=share.astype(np.float32),
        run=run.astype(np.float32),
        base_s=max(step.time_s, 1e-9),
    )


def _node_of_op(layers: Sequence[str], phases: Sequence[str]) -> npt.NDArray[np.int64]:
    """Numbers of nodes in order of first use, at the deepest level of nesting that has few enough of them."""
    deepest = max((layer.count(".") + 1 for layer in set(layers)), default=1)
    for depth in range(deepest, 0, -1):
        numbers: dict[tuple[str, str], int] = {}
        cut = {layer: ".".join(layer.split(".")[:depth]) for layer in set(layers)}
        found = [
            numbers.setdefault((cut[layer], phase), len(numbers))
            for layer, phase in zip(layers, phases, strict=True)
        ]
        if len(numbers) <= NODES_AT_MOST or depth == 1:
            return np.array(found, dtype=np.int64)
    return np.zeros(0, dtype=np.int64)


# What is learned


def intervals(ratios: npt.NDArray[np.float64]) -> Factors:
    """Measured over forecast, as bounds of the 95 % and the 80 % interval; few runs leave them wide."""
    widen = 1.0 + 2.0 / np.sqrt(len(ratios))
    ends = np.exp(widen * np.quantile(np.log(ratios), SHARES))
    return Factors(*ends.tolist()).widest(_NARROWEST)


def _check_learnable(job: Job) -> None:
    """The correction is of a host that issues and a device that runs all layers; a CPU is both, a rank runs
    some."""
    if job.cluster.device.is_cpu:
        raise UnsupportedJob("cluster.device: cpu; scaledl forecasts steps on GPUs")
    if not job.runs_alone or job.plan.recompute != "none":
        what = (
            f"plan.recompute: {job.plan.recompute!r}"
            if job.runs_alone
            else f"cluster: {job.cluster.world_size} devices"
        )
        raise UnsupportedJob(f"{what}; scaledl forecasts steps of one GPU that keeps its activations")


def _benefit(
    measured: npt.NDArray[np.float64], base: npt.NDArray[np.float64], held_out: npt.NDArray[np.float64]
) -> Benefit:
    before, after = (float(np.abs(forecast / measured - 1).mean()) for forecast in (base, held_out))
    return Benefit(runs=len(measured), error_before=before, error_after=after)


def _networks() -> ModuleType:
    return neural_module("foretrain.predictors.scaledl.network", ScaleDLPredictor.name)
