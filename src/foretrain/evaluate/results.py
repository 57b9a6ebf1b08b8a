"""Holds what an evaluation comes to: scores, every run behind them, and why others have none."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from foretrain.quantities import QUANTITIES

Bound = Literal["host", "device"]
BOUNDS: tuple[Bound, ...] = get_args(Bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorScore:
    """Says how one predictor did on one quantity of one file.

    Errors are fractions of the measured value; None where ``n`` is 0.
    """

    predictor: str
    quantity: str
    runs_file: str
    split: str | None
    n: int
    """Runs with an error; with ``unsupported`` they make up every tested run that measured the quantity."""
    mape: float | None
    median_ape: float | None
    p90_ape: float | None
    bias: float | None
    """Median of the signed error: above zero when the predictor says too much."""
    coverage: float | None
    """Share of measured values inside the forecast's interval."""
    unsupported: int
    failed: int = 0
    """Of ``unsupported``, those that were not refused: their forecasts failed, as ``Evaluation.failures``
    says."""
    bound: Bound | None = None
    """Of steps that this bounds alone; None of all."""
    mre: float | None = None
    """The mean absolute error over the mean measured value: long steps count for more than short ones."""
    rmse: float | None = None
    """Root of the mean squared error, in the unit of the quantity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One measured value beside its forecast; ``error`` is (predicted - measured) / measured."""

    runs_file: str
    line: int
    predictor: str
    quantity: str
    measured: float
    predicted: float
    low: float
    high: float
    error: float
    bound: Bound | None = None
    """What bounded the step, where a GPU's busy time was measured, else by the forecast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported:
    """A run, or one quantity of it, without an error figure, and why."""

    runs_file: str
    line: int
    predictor: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A line that could not be read (then there is no predictor) or predicted, and why."""

    runs_file: str
    line: int
    predictor: str | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why runs, or quantities of them, have no error figure; reasons that differ in numbers, or in the
    quantity, are one."""

    kind: Literal["unsupported", "failed"]
    predictor: str | None
    reason: str
    """That of the first of them."""
    count: int
    runs_file: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The figures, and every run that they come from or that has none."""

    results: tuple[PredictorScore, ...]
    by_bound: tuple[PredictorScore, ...]
    """Of step times: those of steps that the host bounds, and those that the device does."""
    runs: tuple[Comparison, ...]
    unsupported: tuple[Unsupported, ...]
    failures: tuple[Failure, ...]

    @property
    def reasons(self) -> list[Reason]:
        """List what went wrong, then what is unsupported, the most frequent first."""
        return [*_reasons("failed", self.failures), *_reasons("unsupported", self.unsupported)]

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Evaluation:
        """Read what ``to_dict`` wrote."""
        kinds: dict[str, type[Any]] = {
            "results": PredictorScore,
            "by_bound": PredictorScore,
            "runs": Comparison,
            "unsupported": Unsupported,
            "failures": Failure,
        }
        rows: dict[str, Any] = {
            name: tuple(kind(**row) for row in document[name]) for name, kind in kinds.items()
        }
        return cls(**rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        rows = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            name: [dataclasses.asdict(row) for row in each]
            for name, each in {**rows, "reasons": self.reasons}.items()
        }


def _reasons(
    kind: Literal["unsupported", "failed"], rows: Sequence[Unsupported] | Sequence[Failure]
) -> list[Reason]:
    alike: dict[tuple[str, str], list[Unsupported | Failure]] = {}
    for row in rows:
        quantity, _, rest = row.reason.partition(": ")
        text = re.sub(r"\d[\d.,]*", "0", rest if quantity in QUANTITIES else row.reason)
        alike.setdefault((row.predictor or "", text), []).append(row)
    return [
        Reason(
            kind=kind,
            predictor=group[0].predictor,
            reason=group[0].reason,
            count=len(group),
            runs_file=group[0].runs_file,
            line=group[0].line,
        )
        for group in sorted(alike.values(), key=len, reverse=True)
    ]
