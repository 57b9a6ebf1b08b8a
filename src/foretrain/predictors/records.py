"""Keeps measured runs and how predictors forecast them, and finds those nearest to a job.

They are kept as figures in a small file, so nothing is captured or forecast for it.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from foretrain.catalog import Catalog
from foretrain.errors import ForetrainError, InputError
from foretrain.files import read_text, write_atomically
from foretrain.predictors.evidence import Evidence, Neighbour, Outcome
from foretrain.predictors.likeness import FIELDS, SIZES, Key, describe
from foretrain.recent import Recent
from foretrain.run import Run
from foretrain.units import format_count

if TYPE_CHECKING:
    from foretrain.forecast import Forecast
    from foretrain.predictors.base import Predictor

SHIPPED = Path(__file__).parent / "evidence.json.zst"
FORMAT = "foretrain-evidence/1"

MEMORY = ("reserved_memory_bytes", "peak_memory_bytes")
_MOST_FOUND = 512
"""Answers that are kept to be given again."""
_MOST_ALIKE = 20
"""Rows that speak for a job at most, so that the nearest are not outvoted."""
_SHOWN_FAR = 3
"""Rows that are named where none is near."""
_MOST_LEARNED = 200
"""Runs that a saved predictor keeps, evenly from first to last."""
_NAMED = 3
"""Differences that are named, the weightiest first."""


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
        """Make a table of records, with ``weights``, ``far_from`` and ``holds_beyond`` of ``like``."""
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
        """Find what the records say of a predictor's forecast of a job; None where they have none by it."""
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
        """Compute what each setting adds to the distance of each record; a size that either lacks adds
        nothing, as another setting tells why. A device of another kind is far, whatever else is alike."""
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
                log_size = math.log(key.sizes[name])
                terms[name] = self.weights[name] * np.nan_to_num(
                    np.maximum(np.maximum(low - log_size, log_size - high), 0)
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
    """Read the records that come with the package."""
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


def _coded(values: Iterable[str]) -> dict[str, Any]:
    listed = list(values)
    names = sorted(set(listed))
    codes = {name: code for code, name in enumerate(names)}
    return {"values": names, "of": [codes[name] for name in listed]}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _outcome_row(outcome: Outcome | None) -> list[float | None] | None:
    if outcome is None:
        return None
    memory = outcome.memory_error
    return [round(outcome.error, 4), round(outcome.inside, 3), None if memory is None else round(memory, 4)]
