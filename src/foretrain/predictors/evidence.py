"""Finds the measured runs nearest to a job, and says how far off a predictor was on them and whether the job
is far from all.

Runs and their forecasts are kept as figures in a small file, so nothing is captured or forecast for it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from foretrain.architectures import family
from foretrain.catalog import Catalog
from foretrain.errors import ForetrainError, InputError
from foretrain.files import read_text, write_atomically
from foretrain.job import Job, Run
from foretrain.recent import Recent
from foretrain.units import format_count

if TYPE_CHECKING:
    from foretrain.forecast import Forecast
    from foretrain.predictors.base import Predictor
    from foretrain.step.layout import Layout

SHIPPED = Path(__file__).parent / "evidence.json.zst"
FORMAT = "foretrain-evidence/1"

FIELDS = (
    "device", "family", "mode", "precision", "optimizer", "compile", "channels_last", "recompute",
    "framework", "plan", "link",
)  # fmt: skip
"""Settings that runs share or do not."""
SIZES = (
    "devices", "nodes", "bandwidth", "cores", "micro_batch", "accumulation", "length", "parameters", "flops",
)  # fmt: skip
"""Settings that runs have more or less of; their distance is the logarithm of the ratio."""
MEMORY = ("reserved_memory_bytes", "peak_memory_bytes")
_MOST_FOUND = 512
"""Answers that are kept to be given again."""
_MOST_ALIKE = 20
"""Rows that speak for a job at most, so that the nearest are not outvoted."""
_SHOWN_FAR = 3
"""Rows that are named where none is near."""
_HALF = 0.5
_MOST_LEARNED = 200
"""Runs that a saved predictor keeps, evenly from first to last."""
_IN_JSON = 5
"""Neighbours that go into a forecast's JSON, which may be one of many."""
_NAMED = 3
"""Differences that are named, the weightiest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What of a job its distance to another is told by."""

    fields: Mapping[str, str]
    sizes: Mapping[str, float]
    """Those that are known and apply."""

    @classmethod
    def of(cls, job: Job, layout: Layout | None = None) -> Key:
        """``layout`` tells parameters and FLOPs of a rank; without it they are not compared. A device alone
        exchanges at the rate of its memory."""
        training, plan, groups = job.workload.training, job.plan, job.cluster.groups
        away, nodes = job.over_network, job.cluster.nodes
        several = away or job.cluster.world_size > 1
        links = [group.inter_node if away else group.intra_node for group in groups] if several else []
        rates = [link.bandwidth_bytes_per_s for link in links]
        fields = {
            "device": "+".join(sorted({group.device.name for group in groups})),
            "family": family(job.workload.model),
            "mode": training.mode + (f" with {training.adapter.kind}" if training.adapter else ""),
            "precision": training.precision,
            "optimizer": training.optimizer if training.mode == "train" else "none",
            "compile": str(training.compile).lower(),
            "channels_last": str(training.channels_last).lower(),
            "recompute": plan.recompute,
            "framework": training.framework,
            "plan": plan_words(job),
            "link": "+".join(sorted({link.kind for link in links})) or "none",
        }
        image = training.image_shape
        length = training.sequence or (max(image[1:]) if image else None)
        device = groups[0].device
        sizes = {
            "devices": job.cluster.world_size,
            "nodes": nodes,
            "bandwidth": min(rates or [group.device.memory_bytes_per_s for group in groups]),
            "cores": device.cores if device.is_cpu else None,
            "micro_batch": job.micro_batch,
            "accumulation": job.accumulation,
            "length": length,
        }
        if layout is not None:
            flops = layout.graph.column("flops")
            work = sum(float(flops[stage.calls].sum()) for stage in layout.stages) / len(layout.stages)
            sizes |= {"parameters": layout.graph.parameters, "flops": work * job.accumulation}
        return cls(fields=fields, sizes={name: float(value) for name, value in sizes.items() if value})


def plan_words(job: Job) -> str:
    """The ways in which a plan splits the work: ``data``, ``data+tensor+zero1``, ``none`` on one device."""
    plan = job.plan
    words = [name for name in ("data", "tensor", "pipeline", "context", "expert") if getattr(plan, name) > 1]
    words += [plan.shard] if plan.shard != "none" else []
    words += ["servers"] if plan.servers else []
    words += ["asynchronous"] if plan.asynchronous else []
    words += ["offload"] if plan.offload else []
    return "+".join(words) or "none"


def describe(job: Job) -> str:
    """A run in a few words: ``resnet50 batch 64 fp32 on h200-sxm-141gb``."""
    training, key = job.workload.training, Key.of(job)
    config = job.workload.model.config or {}
    width = next((config[name] for name in ("hidden_size", "n_embd", "d_model") if name in config), None)
    words = [job.workload.model.label + (f" (width {width})" if width else "")]
    words += ["inference"] if training.mode == "infer" else []
    words += [f"batch {training.global_batch:,}"]
    words += [f"sequence {training.sequence:,}"] if training.sequence else []
    words += [f"image {training.image_shape[1]}"] if training.image_shape else []
    words += [training.precision]
    words += ["compiled"] if training.compile else []
    words += ["channels last"] if training.channels_last else []
    words += [training.adapter.words] if training.adapter else []
    words += [f"recompute {job.plan.recompute}"] if job.plan.recompute != "none" else []
    words += [training.framework] if training.framework != "pytorch" else []
    cluster, world = key.fields["device"], job.cluster.world_size
    words += [f"on {world} x {cluster}, {key.fields['plan']}" if world > 1 else f"on {cluster}"]
    return " ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a forecast compares with what was measured: of one run, or of several alike."""

    error: float
    """(predicted - measured) / measured; of several, the median of its absolute value."""
    inside: float
    """Share of the measured values inside the 80 % interval."""
    memory_error: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A measured run, or several of one kind, and how each predictor forecast it."""

    source: str
    about: str
    low: Key
    high: Key
    """As ``low``, with the largest sizes of the runs; the same key for a single run."""
    outcomes: Mapping[str, Outcome]
    runs: int = 1
    measured: Mapping[str, float] = field(default_factory=dict)
    """Empty where only scores are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A record as one job and one predictor see it."""

    source: str
    about: str
    distance: float
    differs: tuple[str, ...]
    """The weightiest differences to the job, in words."""
    runs: int
    outcome: Outcome
    measured: float | None
    """Of the predictor's main quantity."""
    left_out: bool = False
    """Whether it was forecast without having learned from the architecture's family, where it would have."""

    @property
    def predicted(self) -> float | None:
        return None if self.measured is None else self.measured * (1 + self.outcome.error)

    def to_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "run": self.about,
            "distance": round(self.distance, 3),
            "differs": list(self.differs),
            "runs": self.runs,
            "measured": self.measured,
            "predicted": self.predicted,
            "error": self.outcome.error,
            "coverage": self.outcome.inside,
            "left_out": self.left_out,
            "memory_error": self.outcome.memory_error,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What measured runs say of a predictor's forecast of a job."""

    quantity: str
    nearest: tuple[Neighbour, ...]
    """The nearest first: those like the job, or the nearest few where none is."""
    far_from: float
    """The distance from which on intervals hold less than they say."""
    holds_beyond: float
    """The share of 80 % intervals that held, of runs farther than that from all others."""
    learned_from: bool = False
    """Whether the predictor learned from these very runs, so that the errors are too small."""

    @property
    def is_far(self) -> bool:
        return self.nearest[0].distance > self.far_from

    @property
    def runs(self) -> int:
        """How many runs are like the job."""
        return 0 if self.is_far else sum(one.runs for one in self.nearest)

    @property
    def median_error(self) -> float:
        """Of the runs shown, by its absolute value."""
        return _median([abs(one.outcome.error) for one in self.nearest], [one.runs for one in self.nearest])

    @property
    def coverage(self) -> float:
        """Share of them inside the predictor's 80 % intervals."""
        runs = sum(one.runs for one in self.nearest)
        return sum(one.outcome.inside * one.runs for one in self.nearest) / runs

    @property
    def is_known(self) -> bool:
        """Whether runs like the job were measured, and at least half of them lay in the predictor's 80 %
        intervals."""
        return not self.is_far and self.coverage >= _HALF

    @property
    def line(self) -> str:
        """One line for the screen."""
        first = self.nearest[0]
        of = "" if self.quantity == "step_time_s" else f" in {self.quantity}"
        median = "median " if first.measured is None and first.runs > 1 else ""
        start = f"nearest measured: {first.about}: {median}{abs(first.outcome.error):.0%} off{of}"
        known = " (it learned from them)" if self.learned_from else ""
        if self.is_far:
            return f"{start}, but far from this job: {'; '.join(first.differs)}{known}"
        runs = f"{self.runs:,} run{'s' if self.runs > 1 else ''} like it"
        return f"{start} ({runs}, median error {self.median_error:.0%}){known}"

    @property
    def flag(self) -> str | None:
        """What to assume of a job far from everything measured."""
        if not self.is_far:
            return None
        first = self.nearest[0]
        return (
            f"no measured run is like this job (distance {first.distance:.2f}, far is {self.far_from:.2f}: "
            f"{'; '.join(first.differs)}); of runs as far from others, {self.holds_beyond:.0%} lay in their "
            "80 % intervals"
        )

    def to_dict(self, most: int | None = _IN_JSON) -> dict[str, Any]:
        return {
            "quantity": self.quantity,
            "far": self.is_far,
            "far_from": self.far_from,
            "runs": self.runs,
            "median_error": self.median_error,
            "coverage": self.coverage,
            "learned_from": self.learned_from,
            "nearest": [one.to_dict() for one in self.nearest[:most]],
        }


class Records:
    """A table of records, read from a file and asked for those nearest to a job."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document
        self.weights: Mapping[str, float] = document["weights"]
        self._sizes = {name: self._ends(name) for name in SIZES}
        fields = document["fields"].items()
        self._codes = {name: np.array(columns["of"], dtype=np.int64) for name, columns in fields}
        self._known: dict[str, npt.NDArray[np.bool_]] = {}
        self._found = Recent[Evidence | None](most=_MOST_FOUND)

    def _ends(self, name: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Logarithms of the least and the most of a size in each record; not a number where it has none."""
        low = np.log(np.array(self.document["sizes"][name], dtype=np.float64))
        high = low.copy()
        for i, value in self.document["highest"][name].items():
            high[int(i)] = math.log(value)
        return low, high

    @classmethod
    def read(cls, path: Path) -> Records:
        document = json.loads(read_text(path))
        if document.get("format") != FORMAT:
            raise InputError(f"{path}: format {document.get('format')!r} is not {FORMAT!r}; make it again")
        return cls(document)

    @classmethod
    def of(cls, records: Sequence[Record], like: Mapping[str, Any], **facts: Any) -> Records:
        """From records, with ``weights``, ``far_from`` and ``holds_beyond`` of ``like``."""
        document: dict[str, Any] = {
            "format": FORMAT,
            **{name: like[name] for name in ("weights", "far_from", "holds_beyond")},
            **facts,
            "source": _coded(one.source for one in records),
            "about": [one.about for one in records],
            "runs": [one.runs for one in records],
            "fields": {name: _coded(one.low.fields[name] for one in records) for name in FIELDS},
            "sizes": {name: [_short(one.low.sizes.get(name)) for one in records] for name in SIZES},
            "highest": {
                name: {
                    str(i): _short(one.high.sizes[name])
                    for i, one in enumerate(records)
                    if one.high.sizes.get(name) != one.low.sizes.get(name)
                }
                for name in SIZES
            },
            "measured": {
                name: [_short(one.measured.get(name)) for one in records]
                for name in sorted({name for one in records for name in one.measured})
            },
            "outcomes": {
                name: [_outcome_row(one.outcomes.get(name)) for one in records]
                for name in sorted({name for one in records for name in one.outcomes})
            },
        }  # fmt: skip
        return cls(document)

    def save(self, path: Path) -> None:
        import zstandard

        plain = json.dumps(self.document, separators=(",", ":"), allow_nan=False).encode()
        write_atomically(path, zstandard.ZstdCompressor(level=19).compress(plain))

    def nearest(self, key: Key, predictor: str) -> Evidence | None:
        """What the records say of a predictor's forecast of a job; None where they have none by it."""
        asked = (predictor, *key.fields.values(), *key.sizes.items())
        return self._found.get(asked, lambda: self._nearest(key, predictor), lambda _: 1.0)

    def _nearest(self, key: Key, predictor: str) -> Evidence | None:
        outcomes = self.document["outcomes"].get(predictor)
        if outcomes is None or not any(outcomes):
            return None
        if predictor not in self._known:
            self._known[predictor] = np.array([row is not None for row in outcomes])
        known, terms = self._known[predictor], self._terms(key)
        distance = np.where(known, sum(terms.values()), np.inf)
        order = np.argsort(distance, kind="stable")
        alike = order[: int((distance <= self.document["far_from"]).sum())][:_MOST_ALIKE]
        shown = alike if len(alike) else order[: min(_SHOWN_FAR, int(known.sum()))]
        columns = np.stack(list(terms.values()))[:, shown]
        return Evidence(
            quantity=self._quantity(predictor),
            nearest=tuple(
                self._neighbour(i, key, dict(zip(terms, column, strict=True)), predictor)
                for i, column in zip(shown.tolist(), columns.T.tolist(), strict=True)
            ),
            far_from=self.document["far_from"],
            holds_beyond=self.document["holds_beyond"],
            learned_from=self.document.get("learned_from", False),
        )

    def _terms(self, key: Key) -> dict[str, npt.NDArray[np.float64]]:
        """What each setting adds to the distance of each record; a size that either lacks adds nothing, as
        another setting tells why. A device of another kind is far, whatever else is alike."""
        terms = {}
        for name, columns in self.document["fields"].items():
            values, codes = columns["values"], self._codes[name]
            code = values.index(key.fields[name]) if key.fields[name] in values else -1
            terms[name] = self.weights[name] * (codes != code)
        catalog, devices = Catalog.load(), self.document["fields"]["device"]["values"]
        kind = _kind(key.fields["device"], catalog)
        other = np.array([_kind(device, catalog) != kind for device in devices])[self._codes["device"]]
        terms["device"] = terms["device"] + self.document["far_from"] * other
        for name, (low, high) in self._sizes.items():
            if name in key.sizes:
                here = math.log(key.sizes[name])
                terms[name] = self.weights[name] * np.nan_to_num(
                    np.maximum(np.maximum(low - here, here - high), 0)
                )
        return terms

    def _quantity(self, predictor: str) -> str:
        return str(self.document.get("quantities", {}).get(predictor, "step_time_s"))

    def _neighbour(self, i: int, key: Key, terms: Mapping[str, float], predictor: str) -> Neighbour:
        document, measured = self.document, self.document["measured"].get(self._quantity(predictor))
        source = document["source"]["values"][document["source"]["of"][i]]
        error, inside, memory_error = document["outcomes"][predictor][i]
        apart = sorted((name for name, term in terms.items() if term > 0), key=lambda name: -terms[name])
        return Neighbour(
            source=source,
            about=document["about"][i],
            distance=sum(terms.values()),
            differs=tuple(self._difference(name, i, key) for name in apart[:_NAMED]),
            runs=document["runs"][i],
            outcome=Outcome(error=error, inside=inside, memory_error=memory_error),
            measured=None if measured is None else measured[i],
            left_out=source in document.get("left_out", {}).get(predictor, ()),
        )

    def _difference(self, name: str, i: int, key: Key) -> str:
        """``device a100-sxm-80gb, measured h200-sxm-141gb``."""
        words = name.replace("_", " ")
        if name in FIELDS:
            column = self.document["fields"][name]
            return f"{words} {key.fields[name]}, measured {column['values'][column['of'][i]]}"
        low = self.document["sizes"][name][i]
        high = self.document["highest"][name].get(str(i), low)
        ends = dict.fromkeys(format_count(end, "") for end in (low, high))
        return f"{words} {format_count(key.sizes[name], '')}, measured {' to '.join(ends)}"


@functools.lru_cache(maxsize=1024)
def _kind(devices: str, catalog: Catalog) -> frozenset[str]:
    """``cpu`` or who makes the GPU, of each kind of device in a cluster; of one that the catalogue does not
    have, its name."""
    kinds = set()
    for name in devices.split("+"):
        try:
            device = catalog.device(name)
            kinds.add("cpu" if device.is_cpu else device.vendor)
        except ForetrainError:
            kinds.add(name)
    return frozenset(kinds)


@functools.lru_cache(maxsize=1)
def shipped() -> Records:
    """What comes with the package."""
    return Records.read(SHIPPED)


def of_learned(predictor: Predictor, runs: Sequence[Run]) -> Records | None:
    """The runs that a predictor has just learned from, at most so many, with its forecasts of them as it is
    now; None where it forecasts none of them."""
    main = "step_time_s" if "step_time_s" in predictor.quantities else "device_utilization"
    every = max(1, math.ceil(len(runs) / _MOST_LEARNED))
    records = []
    for run in runs[::every]:
        try:
            forecast = predictor.predict(run.job)
        except ForetrainError:
            continue
        outcome = _outcome(run, forecast, main)
        if outcome is not None:
            layout = None if forecast.step is None else forecast.step.layout
            key = Key.of(run.job, layout)
            records.append(
                Record(
                    source="learned from",
                    about=describe(run.job),
                    low=key,
                    high=key,
                    outcomes={predictor.name: outcome},
                    measured={main: run.measured[main]},
                )
            )
    if not records:
        return None
    facts = {"quantities": {predictor.name: main}, "learned_from": True}
    return Records.of(records, shipped().document, **facts)


def _outcome(run: Run, forecast: Forecast, quantity: str) -> Outcome | None:
    measured, estimate = run.measured.get(quantity, 0.0), forecast.quantities.get(quantity)
    if estimate is None or not 0 < measured < math.inf:
        return None
    memory = next(
        (name for name in MEMORY if run.measured.get(name, 0) > 0 and name in forecast.quantities), None
    )
    return Outcome(
        error=estimate.median / measured - 1,
        inside=float(estimate.low <= measured <= estimate.high),
        memory_error=None if memory is None else forecast[memory].median / run.measured[memory] - 1,
    )


def with_evidence(forecast: Forecast, evidence: Evidence | None) -> Forecast:
    """The forecast with what measured runs say of it, and a flag among its assumptions where they are far."""
    flag = None if evidence is None else evidence.flag
    notes = forecast.assumptions if flag is None else (*forecast.assumptions, flag)
    return dataclasses.replace(forecast, evidence=evidence, assumptions=notes)


def _median(values: Sequence[float], weights: Sequence[int]) -> float:
    """The value that half of the weight lies below."""
    order = np.argsort(values)
    below = np.cumsum(np.array(weights)[order])
    return float(values[order[int(np.searchsorted(below, below[-1] / 2))]])


def _coded(values: Iterable[str]) -> dict[str, Any]:
    found = list(values)
    names = sorted(set(found))
    codes = {name: code for code, name in enumerate(names)}
    return {"values": names, "of": [codes[name] for name in found]}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _outcome_row(outcome: Outcome | None) -> list[float | None] | None:
    if outcome is None:
        return None
    memory = outcome.memory_error
    return [round(outcome.error, 4), round(outcome.inside, 3), None if memory is None else round(memory, 4)]
