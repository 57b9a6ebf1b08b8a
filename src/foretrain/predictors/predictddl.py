"""PredictDDL: an embedding of the computational graph and the cluster's features in; the step time by a regressor, trained once per dataset type, out."""

from __future__ import annotations

import functools
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, final

import numpy as np
import numpy.typing as npt

from foretrain.capture import capture_job
from foretrain.errors import ForetrainError, InputError, UnsupportedJob, unknown
from foretrain.files import write_atomically
from foretrain.forecast import Forecast
from foretrain.graph import OpGraph
from foretrain.job import Job, Run
from foretrain.predictors.base import Benefit, Predictor
from foretrain.predictors.blackbox import QUANTITIES, check_data_parallel, forecast_around, spread_of, step_times, usable, widened
from foretrain.predictors.conformal import Factors
from foretrain.predictors.predictddl_baseline import BASELINE, baseline, physics
from foretrain.predictors.predictddl_features import (
    CLUSTER_COLUMNS,
    FAMILY_COLUMNS,
    Work,
    cluster_columns,
    dataset_type,
    primitives,
    work_of,
)
from foretrain.predictors.predictddl_regressors import CANDIDATES, REGRESSORS, Choice, Problem, Scaled, choose

if TYPE_CHECKING:
    from foretrain.predictors.predictddl_embedding import Embedding

Array = npt.NDArray[np.float64]
Form = Literal["ratio", "paper"]

SHIPPED = Path(__file__).parent / "fitted" / "predictddl"
_ARRAYS, _EMBEDDING = "arrays.safetensors", "embedding.safetensors"
"""The files beside ``predictor.json``."""
_REMEMBERED = 512
"""Embeddings that are kept, by graph content."""
_FAR_AT_MOST = 3.0
"""How many times as wide an interval gets, at most, for what lies far from everything seen."""


class Embedder:
    """A trained network that remembers what it has embedded, by the content of the graph; safe for many threads."""

    def __init__(self, network: Embedding) -> None:
        self.network = network
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Array] = OrderedDict()

    def __call__(self, graph: OpGraph) -> Array:
        key = _digest(graph)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
            found: Array = self.network([primitives(graph)])[0]
            self._known[key] = found
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
            return found


@dataclass(frozen=True, eq=False, kw_only=True)
class Trained:
    """What was learned for one dataset type."""

    baseline: Array | None
    """As ``BASELINE`` names it; None in the paper's form."""
    model: Scaled
    chosen: str
    errors: Mapping[str, float]
    """Of the candidates, on architectures that were left out."""
    spread: Factors
    devices: frozenset[str]
    seen: npt.NDArray[np.float32]
    """The rows that were learned from, for telling what lies far from them."""
    reach: float
    """How far a row lies from those of other architectures, in 95 % of the runs."""
    runs: int

    def distance(self, row: Array) -> float:
        """Of a row from the nearest that was learned from, in units of ``reach``."""
        return float(_nearest(self.model, row[None], self.seen)[0]) / max(self.reach, 1e-9)


@final
class PredictDDLPredictor(Predictor):
    """After PredictDDL (Assogba, Lima, Rafique, Kwon; CLUSTER 2023).

    ``form = "paper"``: ``log step = regressor(embedding, cluster)``. ``form = "ratio"``: the regressor, which then also sees the work by
    families of operators, gives the logarithm of the step time over that of a physical baseline with fitted parameters.
    ``embedding``: a file, "shipped" for that of the package, or None for none.
    """

    name: ClassVar[str] = "predictddl"
    quantities: ClassVar[frozenset[str]] = QUANTITIES
    learns: ClassVar[bool] = True

    def __init__(
        self, *, form: Form = "ratio", embedding: Path | Embedder | Literal["shipped"] | None = "shipped", candidates: Sequence[str] = tuple(CANDIDATES)
    ) -> None:  # fmt: skip
        self.form, self.embedding, self.candidates = form, embedding, tuple(candidates)
        self.trained_: dict[str, Trained] | None = None
        self._fresh = form == "ratio" and embedding == "shipped"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """What was learned is never changed in place, so a copy shares it."""
        other = type(self)(form=self.form, embedding=self.embedding, candidates=self.candidates)
        other.trained_, other._fresh = self.trained_, self._fresh
        return other

    def predict(self, job: Job) -> Forecast:
        trained = self.check(job)
        graph = capture_job(job)
        work = work_of(job, graph)
        row = self._row(job, graph, work)
        log = float(trained.model.predict(row[None])[0])
        if trained.baseline is not None:
            log += float(baseline(trained.baseline, physics([work], [job]))[0])
        spread, notes = self._judge(trained, job, row)
        return forecast_around(job, self.name, float(np.exp(np.clip(log, -20, 20))), spread, notes)

    def check(self, job: Job) -> Trained:
        """The task checker: what is trained for a job, or ``UnsupportedJob`` with what would have to be done."""
        check_data_parallel(job, self.name)
        state, kind = self._state(), dataset_type(job)
        trained = state.get(kind)
        if trained is None:
            known = ", ".join(sorted(state)) or "none"
            raise UnsupportedJob(
                f"training: dataset type {kind!r} has no trained predictor (there is: {known}); train one: foretrain fit predictddl RUNS --out DIR"
            )
        device = job.cluster.device
        kinds = {"cpu" if name.startswith("cpu") else "gpu" for name in trained.devices}
        if ("cpu" if device.is_cpu else "gpu") not in kinds:
            learned_on = ", ".join(sorted(trained.devices))
            raise UnsupportedJob(f"cluster.device: {device.name!r}; the predictor of {kind!r} learned on {learned_on}; train one: foretrain fit predictddl RUNS --out DIR")  # fmt: skip
        return trained

    def fit(self, runs: Iterable[Run]) -> Self:
        """One regressor for each dataset type, chosen by cross-validation over architectures; the embedding stays as it is."""
        kept, left_out = usable(runs, self.name)
        known: list[tuple[Run, Work, Array]] = []
        failures = list(left_out)
        for run in kept:
            try:
                graph = capture_job(run.job)
                work = work_of(run.job, graph)
                known.append((run, work, self._row(run.job, graph, work)))
            except ForetrainError as error:
                failures.append(f"{run.job.workload.model.label}: {' '.join(str(error).splitlines())}")
        self.left_out_ = tuple(failures)
        if not known:
            raise InputError("runs: none has a step time under data parallelism; predictddl needs at least one")
        self._learn([run for run, _, _ in known], [work for _, work, _ in known], np.array([row for _, _, row in known]))
        return self

    def without(self, families: frozenset[str] = frozenset(), devices: frozenset[str] = frozenset()) -> Self:
        """All runs are forgotten; the embedding has seen none."""
        self.trained_, self._fresh = None, False
        return self

    def embed(self, graph: OpGraph) -> Array:
        """The embedding of a graph, remembered by its content."""
        return self._embedder()(graph)

    def _row(self, job: Job, graph: OpGraph, work: Work) -> Array:
        parts = [] if self.embedding is None else [self.embed(graph)]
        if self.form == "ratio":
            parts.append(work.columns)
        return np.concatenate([*parts, cluster_columns(job, work.parameters)])

    def _learn(self, runs: Sequence[Run], works: Sequence[Work], rows: Array) -> None:
        types = [dataset_type(run.job) for run in runs]
        measured, groups = step_times(runs), [run.job.workload.model.label for run in runs]
        terms = physics(works, [run.job for run in runs]) if self.form == "ratio" else None
        problem = Problem(rows=rows, terms=terms, targets=np.log(measured), groups=groups, types=types)
        choices = choose(problem, self.candidates)
        baselines = problem.baselines(np.ones(len(runs), dtype=np.bool_))
        rest = problem.targets - problem.based(baselines)
        self.trained_, devices = {}, np.array([run.job.cluster.device.name for run in runs])
        for kind, choice in choices.items():
            mine = np.array(types) == kind
            model = Scaled.learn(CANDIDATES[choice.name](), rows[mine], rest[mine])
            self.trained_[kind] = Trained(
                baseline=baselines.get(kind), model=model, chosen=choice.name, errors=choice.errors, runs=int(mine.sum()),
                spread=spread_of(measured[mine], np.exp(choice.held_out)), devices=frozenset(devices[mine].tolist()), seen=rows[mine].astype(np.float32),
                reach=_reach(model, rows[mine], [group for group, is_mine in zip(groups, mine, strict=True) if is_mine]),
            )  # fmt: skip
        self.benefits_ = _benefits(choices, types, devices)

    def _judge(self, trained: Trained, job: Job, row: Array) -> tuple[Factors, list[str]]:
        """The interval, wider for what lies far from everything seen, and what to say of it."""
        notes, power = [], trained.distance(row)
        if power > 1:
            notes.append(
                f"{job.workload.model.label} at this scale is {power:.1f} times as far from everything learned as usual: the interval is widened"
            )
        device = job.cluster.device.name
        if device not in trained.devices:
            power = max(power, 2.0)
            notes.append(f"{device} was not learned from, only {', '.join(sorted(trained.devices))}: the interval is widened")
        return widened(trained.spread, min(max(power, 1.0), _FAR_AT_MOST)), notes

    def _embedder(self) -> Embedder:
        if self.embedding is None:
            raise InputError("embedding: this predictor was made without one")
        if isinstance(self.embedding, Embedder):
            return self.embedding
        return load_embedding(SHIPPED / _EMBEDDING if isinstance(self.embedding, str) else self.embedding)

    def _state(self) -> dict[str, Trained]:
        if self.trained_ is None and self._fresh:
            self.trained_ = _shipped()
        if self.trained_ is None:
            raise UnsupportedJob("predictddl: has learned from no runs yet; fit it first")
        return self.trained_

    def _write(self, folder: Path) -> Mapping[str, Any]:
        from safetensors.numpy import save

        state = self._state()
        tensors: dict[str, npt.NDArray[Any]] = {}
        for number, trained in enumerate(state.values()):
            tensors.update({f"{number}/{name}": np.ascontiguousarray(array) for name, array in _arrays(trained).items()})
        write_atomically(folder / _ARRAYS, save(tensors))
        if self.embedding is not None:
            self._embedder().network.save(folder / _EMBEDDING)
        return {
            "form": self.form, "embedding": self.embedding is not None, "columns": _columns(), "baseline": list(BASELINE),
            "types": [{"type": kind, **_facts(trained)} for kind, trained in state.items()],
        }  # fmt: skip

    @classmethod
    def _read(cls, folder: Path, document: Mapping[str, Any]) -> Self:
        from safetensors.numpy import load

        if document["columns"] != _columns() or document["baseline"] != list(BASELINE):
            raise InputError(f"{folder}: the features are others than this version computes; fit it again")
        try:
            tensors = load((folder / _ARRAYS).read_bytes())
        except (OSError, ValueError) as error:
            raise InputError(f"{folder / _ARRAYS}: cannot be read ({error})") from error
        made = cls(form=document["form"], embedding=folder / _EMBEDDING if document["embedding"] else None)
        made._fresh = False
        made.trained_ = {facts["type"]: _trained(facts, _some(tensors, f"{number}/")) for number, facts in enumerate(document["types"])}
        return made


# What is kept


def _columns() -> list[str]:
    return [*FAMILY_COLUMNS, *CLUSTER_COLUMNS]


def _arrays(trained: Trained) -> dict[str, npt.NDArray[Any]]:
    own = {f"regressor/{name}": array for name, array in trained.model.regressor.to_arrays().items()}
    more = {} if trained.baseline is None else {"baseline": trained.baseline}
    return {
        **own,
        **more,
        "mean": trained.model.mean,
        "deviation": trained.model.deviation,
        "bounds": trained.model.bounds,
        "seen": trained.seen,
    }


def _facts(trained: Trained) -> dict[str, Any]:
    return {
        "regressor": trained.model.regressor.kind, "chosen": trained.chosen, "errors": dict(trained.errors), "factors": list(trained.spread),
        "devices": sorted(trained.devices), "reach": trained.reach, "runs": trained.runs,
    }  # fmt: skip


def _some(tensors: Mapping[str, npt.NDArray[Any]], start: str) -> dict[str, npt.NDArray[Any]]:
    return {name.removeprefix(start): array for name, array in tensors.items() if name.startswith(start)}


def _trained(facts: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Trained:
    if facts["regressor"] not in REGRESSORS:
        raise unknown("regressor", facts["regressor"], REGRESSORS)
    regressor = REGRESSORS[facts["regressor"]].from_arrays(_some(arrays, "regressor/"))
    return Trained(
        baseline=arrays.get("baseline"), model=Scaled(mean=arrays["mean"], deviation=arrays["deviation"], bounds=arrays["bounds"], regressor=regressor),
        chosen=facts["chosen"], errors=facts["errors"], spread=Factors(*facts["factors"]), devices=frozenset(facts["devices"]),
        seen=arrays["seen"], reach=facts["reach"], runs=facts["runs"],
    )  # fmt: skip


@functools.lru_cache(maxsize=1)
def _shipped() -> dict[str, Trained]:
    if not SHIPPED.is_dir():
        return {}
    return PredictDDLPredictor.load(SHIPPED)._state()


@functools.lru_cache(maxsize=8)
def load_embedding(path: Path) -> Embedder:
    """The embedding of a file, read once."""
    return Embedder(embedding_module().load(path))


@functools.lru_cache(maxsize=_REMEMBERED)
def _digest(graph: OpGraph) -> str:
    return graph.digest()


def embedding_module() -> ModuleType:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch_geometric scripts its own functions as it is imported
            from foretrain.predictors import predictddl_embedding
    except ModuleNotFoundError as error:
        library = str(error.name).partition(".")[0]
        raise ForetrainError(f"{library} is not installed; predictddl needs foretrain[learn]") from error
    return predictddl_embedding


# What lies far


def _nearest(model: Scaled, rows: npt.NDArray[np.floating[Any]], others: npt.NDArray[np.floating[Any]]) -> Array:
    """The root mean square distance of each row to the nearest of others, in standard deviations of the columns that vary."""
    varies = np.isfinite(model.deviation)
    here, there = (((some - model.mean) / model.deviation)[:, varies] for some in (rows, others))
    squares = (here**2).sum(axis=1)[:, None] + (there**2).sum(axis=1)[None] - 2 * here @ there.T
    return np.asarray(np.sqrt(np.maximum(squares.min(axis=1), 0.0) / max(int(varies.sum()), 1)))


def _reach(model: Scaled, rows: Array, groups: Sequence[str]) -> float:
    """How far 95 % of the runs lie from those of other architectures; of one architecture, from one another."""
    labels = np.array(groups)
    if len(set(groups)) < 2:
        return max(1.0, float(_nearest(model, rows, rows[:1]).max()))
    distances = [_nearest(model, rows[labels == one], rows[labels != one]) for one in dict.fromkeys(groups)]
    return float(np.quantile(np.concatenate(distances), 0.95))


def _benefits(choices: Mapping[str, Choice], types: Sequence[str], devices: npt.NDArray[np.str_]) -> dict[str, Benefit]:
    """By device: the error of the constant (in ratio form: of the baseline alone) and of what was chosen, on left-out architectures."""
    found = {}
    for device in sorted(set(devices.tolist())):
        mine = [choices[kind] for kind, name in zip(types, devices, strict=True) if name == device]
        before = float(np.mean([choice.errors.get("constant", max(choice.errors.values())) for choice in mine]))
        found[device] = Benefit(
            runs=len(mine), error_before=before, error_after=float(np.mean([choice.errors[choice.name] for choice in mine]))
        )
    return found
