"""Forecasts by PredictDDL: regresses the step time on an embedding of the graph and features of the
cluster."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, final, get_args

import numpy as np
import numpy.typing as npt

from foretrain.architectures import family
from foretrain.capture import capture_job
from foretrain.errors import InputError, UnsupportedJob, unknown
from foretrain.files import write_atomically
from foretrain.forecast import Forecast
from foretrain.graph import OpGraph
from foretrain.job import Job
from foretrain.predictors.base import Benefit, nothing_to_learn, option, take_runs
from foretrain.predictors.blackbox import QUANTITIES, check_data_parallel, forecast_around, step_times, usable
from foretrain.predictors.machines import machine_of
from foretrain.predictors.neural import NeuralPredictor, neural_module
from foretrain.predictors.predictddl.baseline import CPU, GPU, baseline, least, physics
from foretrain.predictors.predictddl.features import (
    CLUSTER_COLUMNS,
    FAMILY_COLUMNS,
    IN_LAW,
    OperatorWork,
    cluster_columns,
    dataset_type,
    work_of,
)
from foretrain.predictors.predictddl.gpu import GPU_COLUMNS
from foretrain.predictors.predictddl.primitives import primitives
from foretrain.predictors.predictddl.regressors import CANDIDATES, Choice, Problem, Scaled, choose
from foretrain.predictors.predictddl.trained import Trained, settings, starting_with
from foretrain.predictors.seen import step_of
from foretrain.run import Run

if TYPE_CHECKING:
    from foretrain.predictors.predictddl.embedding import Embedding

Array = npt.NDArray[np.float64]
Form = Literal["ratio", "paper"]

SHIPPED = Path(__file__).parent / "fitted"
_ARRAYS, _EMBEDDING = "arrays.safetensors", "embedding.safetensors"
"""The files beside ``predictor.json``."""
_TRAIN = "train one: foretrain fit predictddl RUNS.jsonl --out DIR, and use it with --predictor DIR"
OTHERS = "any other"
"""What stands for dataset types without a predictor of their own: it learned from all types of a device, and
was tried on each with the others alone."""
FORMS: tuple[Form, ...] = get_args(Form)
_REMEMBERED = 4096
"""Embeddings that are kept, by graph content."""


class GraphEmbedder:
    """A trained network that remembers what it has embedded, by the content of the graph; safe for many
    threads."""

    def __init__(self, network: Embedding) -> None:
        self.network = network
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Array] = OrderedDict()

    def __call__(self, graph: OpGraph, kind: str) -> Array:
        key = _digest(graph) if self.network.shared else f"{kind}: {_digest(graph)}"
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
            embedded: Array = self.network([primitives(graph)], kind)[0]
            self._known[key] = embedded
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
            return embedded


def _form(text: str, name: str) -> Form:
    if text not in FORMS:
        raise unknown(name, text, FORMS)
    return text


def _embedding(text: str, name: str) -> Path | None:
    if text == "none":
        return None
    if not Path(text).is_file():
        raise InputError(f"{name}: {text!r}; neither a file of foretrain embed train nor none")
    return Path(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictDDLSettings:
    """Says what can be chosen for ``fit``."""

    form: Form = option(  # noqa: RUF009
        "ratio",
        "ratio (to a physical baseline) or paper (the step time itself).",
        parse=_form,
        metavar="FORM",
    )
    embedding: Path | None = option(  # noqa: RUF009
        None, "A file of foretrain embed train, or none.", parse=_embedding, metavar="FILE"
    )


@final
class PredictDDLPredictor(NeuralPredictor[dict[str, Trained]]):
    """Forecasts as PredictDDL does (Assogba, Lima, Rafique, Kwon; CLUSTER 2023).

    ``form = "paper"``: ``log step = regressor(embedding, cluster)``. ``form = "ratio"``: the regressor, which
    then also sees the work by families of operators, gives the logarithm of the step time over that of a
    physical baseline with fitted parameters. ``embedding``: a file of ``foretrain embed train``, or None.
    """

    name: ClassVar[str] = "predictddl"
    home: ClassVar[frozenset[str]] = frozenset(
        "cpu16_campaign cpu16_ddp links_campaign links_idle ray_campaign h200_steps timm_rtx3090 ets_t4 "
        "pollux_t4 nvidia_deeplearningexamples".split()
    )
    quantities: ClassVar[frozenset[str]] = QUANTITIES
    shipped: ClassVar[Path] = SHIPPED
    settings: ClassVar[type[Any] | None] = PredictDDLSettings

    def __init__(
        self, *, form: Form = "ratio", embedding: Path | GraphEmbedder | None = None,
        candidates: Sequence[str] = tuple(CANDIDATES)
    ) -> None:  # fmt: skip
        self.form, self.embedding, self.candidates = form, embedding, tuple(candidates)
        self.fresh = form == "ratio" and embedding is None

    def configure(self, settings: PredictDDLSettings) -> None:
        """Take the settings of a new one; what was learned already has a form and an embedding."""
        if self.learned_ is not None:
            raise InputError("--form, --embedding: an earlier fit that is started from has its own")
        self.form, self.embedding, self.fresh = settings.form, settings.embedding, False

    def predict(self, job: Job) -> Forecast:
        trained = self._trained_for(job)
        graph = capture_job(job)
        work = work_of(job, graph)
        row = self._row(job, graph, work)
        if _key(job.cluster.device.name, dataset_type(job)) not in self.state():
            row = self._comparable(row[None])[0]
        log = float(trained.model.predict(row[None])[0])
        if trained.baseline is not None:
            terms = physics([work], [job], trained.machines)
            log = max(log + float(baseline(trained.baseline, terms)[0]), float(least(terms)[0]))
        spread, notes = trained.judge(job, row)
        return forecast_around(job, self.name, float(np.exp(np.clip(log, -20, 20))), spread, notes)

    def check(self, job: Job) -> None:
        """The task checker: ``UnsupportedJob`` with what would have to be done, where nothing is trained for
        a job."""
        self._trained_for(job)

    def design_row(self, job: Job) -> Mapping[str, float]:
        """Describe a job as the regressor of its dataset type sees it."""
        check_data_parallel(job, self.name)
        graph = capture_job(job)
        row, kind = self._row(job, graph, work_of(job, graph)), dataset_type(job)
        return {f"{kind}: 1": 1.0} | {f"{kind}: {place}": float(value) for place, value in enumerate(row)}

    def _trained_for(self, job: Job) -> Trained:
        check_data_parallel(job, self.name)
        state, device = self.state(), job.cluster.device.name
        trained = state.get(_key(device, dataset_type(job)), state.get(_key(device, OTHERS)))
        if trained is None:
            learned = ", ".join(dict.fromkeys(key.partition(": ")[0] for key in state))
            raise UnsupportedJob(f"cluster.device: {device!r}; {self.name} learned from {learned}; {_TRAIN}")
        refused = trained.refuses(job)
        if refused is not None:
            learned = ", ".join(trained.settings.get(refused, ["runs without"]))
            raise UnsupportedJob(
                f"{refused}: {settings(job)[refused]!r}; the predictor "
                f"of {', '.join(trained.types)} on {device} learned from {learned}; {_TRAIN}"
            )
        return trained

    def _learnable(self, run: Run) -> tuple[Run, OperatorWork, Array]:
        graph = capture_job(run.job)
        work = work_of(run.job, graph)
        return run, work, self._row(run.job, graph, work)

    def fit(self, runs: Iterable[Run]) -> Self:
        """Learn for each device one regressor for each dataset type, chosen by cross-validation over
        architectures, and one for all other types, chosen by leaving out types; the embedding stays as it is.

        Devices and types that were learned earlier, and of which there is no run now, stay; so does what
        answers for other types, where it learned from more runs.
        """
        if self.embedding is not None:
            self._embedder()
        kept, left_out = usable(runs, self.name)
        known, failed = take_runs(kept, self._learnable)
        self.left_out_ = (*left_out, *failed)
        if not known:
            needs = "none has a step time under data parallelism; predictddl needs at least one"
            raise nothing_to_learn(needs, self.left_out_)
        earlier = {} if self.fresh or self.learned_ is None else self.learned_
        learned: dict[str, Trained] = {}
        self.benefits_ = {}
        for device in sorted({run.job.cluster.device.name for run, _, _ in known}):
            own = [one for one in known if one[0].job.cluster.device.name == device]
            learned |= self._learn(
                device, [run for run, _, _ in own], [work for _, work, _ in own],
                np.array([row for _, _, row in own]),
            )  # fmt: skip
            others = _key(device, OTHERS)
            if others in earlier and earlier[others].runs > len(own):
                del learned[others]
        self.learned_ = {**earlier, **learned}
        return self

    def without(self, families: frozenset[str] = frozenset(), devices: frozenset[str] = frozenset()) -> Self:
        """Forget all runs; the embedding has seen none."""
        self.forget()
        return self

    def embed(self, graph: OpGraph, kind: str) -> Array:
        """The embedding of a graph of a dataset type, remembered by its content."""
        return self._embedder()(graph, kind)

    def _row(self, job: Job, graph: OpGraph, work: OperatorWork) -> Array:
        parts = [] if self.embedding is None else [self.embed(graph, dataset_type(job))]
        of_cluster = cluster_columns(job, work.parameters)
        if self.form == "ratio":
            parts.append(work.columns)
            of_cluster = np.delete(of_cluster, IN_LAW)
        return np.concatenate([*parts, of_cluster])

    def _comparable(self, rows: Array) -> Array:
        """Rows of several dataset types: without embeddings where each type has a network of its own."""
        if self.embedding is None or (network := self._embedder().network).shared:
            return rows
        rows = rows.copy()
        rows[:, : network.size] = 0.0
        return rows

    def _learn(
        self, device: str, runs: Sequence[Run], works: Sequence[OperatorWork], rows: Array
    ) -> dict[str, Trained]:
        """Learn what runs on one device tell, by device and dataset type."""
        jobs = [run.job for run in runs]
        types, groups = [dataset_type(job) for job in jobs], [family(job.workload.model) for job in jobs]
        machines = sorted({machine_of(job) for job in jobs} - {""})
        terms = physics(works, jobs, machines) if self.form == "ratio" else None
        problem = Problem(
            rows=rows, terms=terms, targets=np.log(step_times(runs)), groups=groups, types=types,
            steps=[step_of(job) for job in jobs], machines=len(machines), busy=_busy(runs),
        )  # fmt: skip
        choices = choose(problem, self.candidates)
        learned = self._trained(problem, choices, jobs, machines)
        if (kinds := len(set(types))) > 1:
            whole = dataclasses.replace(
                problem, rows=self._comparable(rows), types=[OTHERS] * len(runs), groups=types
            )
            learned |= self._trained(whole, choose(whole, self.candidates, folds=kinds), jobs, machines)
        else:
            learned[OTHERS] = learned[types[0]]
        self.benefits_ = {**self.benefits_, device: _benefit(choices, types)}
        return {_key(device, kind): trained for kind, trained in learned.items()}

    def _trained(
        self, problem: Problem, choices: Mapping[str, Choice], jobs: Sequence[Job], machines: Sequence[str]
    ) -> dict[str, Trained]:
        """Learn for each dataset type, by the regressor that was chosen for it."""
        baselines = problem.baselines(np.ones(len(jobs), dtype=np.bool_))
        rest = problem.targets - problem.based(baselines)
        labels, learned = np.array(problem.groups), {}
        for kind, choice in choices.items():
            of_kind = np.array(problem.types) == kind
            model = Scaled.learn(CANDIDATES[choice.name](), problem.rows[of_kind], rest[of_kind])
            learned[kind] = Trained.of(
                model, problem.rows[of_kind], problem.targets[of_kind] - choice.held_out, labels[of_kind],
                [job for job, is_mine in zip(jobs, of_kind, strict=True) if is_mine],
                baseline=baselines.get(kind), chosen=choice.name, errors=choice.errors, machines=machines,
            )  # fmt: skip
        return learned

    def _embedder(self) -> GraphEmbedder:
        if self.embedding is None:
            raise InputError("embedding: this predictor was made without one")
        if isinstance(self.embedding, GraphEmbedder):
            return self.embedding
        return load_embedding(self.embedding)

    def _write(self, folder: Path) -> Mapping[str, Any]:
        from safetensors.numpy import save

        state = self.state()
        tensors: dict[str, npt.NDArray[Any]] = {}
        for number, trained in enumerate(state.values()):
            tensors.update(
                {
                    f"{number}/{name}": np.ascontiguousarray(array)
                    for name, array in trained.to_arrays().items()
                }
            )
        write_atomically(folder / _ARRAYS, save(tensors))
        if self.embedding is not None:
            self._embedder().network.save(folder / _EMBEDDING)
        return {
            "form": self.form, "embedding": self.embedding is not None, "columns": _columns(),
            "baseline": _parameters(),
            "types": [{"type": key, **trained.to_facts()} for key, trained in state.items()],
        }  # fmt: skip

    @classmethod
    def _read(cls, folder: Path, document: Mapping[str, Any]) -> Self:
        from safetensors import SafetensorError
        from safetensors.numpy import load

        if document.get("columns") != _columns() or document.get("baseline") != _parameters():
            raise InputError(f"{folder}: the features are others than this version computes; fit it again")
        try:
            tensors = load((folder / _ARRAYS).read_bytes())
        except (OSError, ValueError, SafetensorError) as error:
            raise InputError(f"{folder / _ARRAYS}: cannot be read ({error})") from error
        loaded = cls(form=document["form"], embedding=folder / _EMBEDDING if document["embedding"] else None)
        loaded.fresh = False
        try:
            loaded.learned_ = {
                facts["type"]: Trained.read(facts, starting_with(tensors, f"{number}/"))
                for number, facts in enumerate(document["types"])
            }
        except KeyError as error:
            raise InputError(f"{folder}: lacks {error.args[0]!r}; fit it again") from error
        return loaded


# What is kept


def _key(device: str, kind: str) -> str:
    """The name of what was learned for a device and a dataset type."""
    return f"{device}: {kind}"


def _busy(runs: Sequence[Run]) -> Array:
    """The logarithm of the time that the device was busy, where it was measured."""
    seconds = [run.measured.get("device_busy_s") or math.nan for run in runs]
    return np.log(np.array(seconds, dtype=np.float64))


def _columns() -> list[str]:
    return [*FAMILY_COLUMNS, *GPU_COLUMNS, *CLUSTER_COLUMNS]


def _parameters() -> dict[str, list[str]]:
    return {"cpu": list(CPU.names), "gpu": list(GPU.names)}


@functools.lru_cache(maxsize=8)
def load_embedding(path: Path) -> GraphEmbedder:
    """The embedding of a file, read once."""
    return GraphEmbedder(embedding_module().load(path))


_digests: weakref.WeakKeyDictionary[OpGraph, str] = weakref.WeakKeyDictionary()


def _digest(graph: OpGraph) -> str:
    """Computed once for as long as the graph is in memory."""
    digest = _digests.get(graph)
    if digest is None:
        digest = _digests[graph] = graph.digest()
    return digest


def embedding_module() -> ModuleType:
    return training_module("embedding")


def training_module(name: str) -> ModuleType:
    """A module of this package that needs torch: ``embedding``, ``training`` or ``hypernetwork``."""
    return neural_module(f"foretrain.predictors.predictddl.{name}", "predictddl")


def _benefit(choices: Mapping[str, Choice], types: Sequence[str]) -> Benefit:
    """The error of the constant (in ratio form: of the baseline alone) and of what was chosen, on left-out
    families of architectures; of dataset types of which none could be left out, nothing."""
    own = [choices[kind] for kind in types if choices[kind].errors]
    before = [choice.errors.get("constant", max(choice.errors.values())) for choice in own]
    return Benefit(
        runs=len(types),
        error_before=float(np.mean(before)) if own else None,
        error_after=float(np.mean([choice.errors[choice.name] for choice in own])) if own else None,
    )
