"""Holds forecasts against tables that others have published, typed in row by row with their source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretrain.errors import unknown
from foretrain.evaluate import Comparison, Evaluation, evaluate
from foretrain.fanout import Progress
from foretrain.files import parse_json, text_lines
from foretrain.predictors import DEFAULT

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFigure:
    """A published figure beside its forecast."""

    table: str
    label: str
    source: str
    caveats: tuple[str, ...]
    """What the source leaves open, or what differs from it."""
    comparison: Comparison


def tables() -> tuple[str, ...]:
    """The names of the tables that come with foretrain."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.jsonl")))


def validate(
    names: Sequence[str] = (),
    *,
    predictor: str = DEFAULT,
    processes: int = 1,
    progress: Progress = lambda done, total: None,
) -> tuple[list[PublishedFigure], Evaluation]:
    """Forecast the rows of tables (all, where none is named); no predictor has learned from any."""
    for name in names:
        if name not in tables():
            raise unknown("table", name, tables())
    paths = [FOLDER / f"{name}.jsonl" for name in names or tables()]
    provenance = {
        (str(path), line): parse_json(text)["provenance"] for path in paths for line, text in text_lines(path)
    }
    scored = evaluate(paths, predictors=[predictor], processes=processes, progress=progress)
    return [_row(one, provenance[one.runs_file, one.line]) for one in scored.runs], scored


def _row(comparison: Comparison, provenance: Mapping[str, Any]) -> PublishedFigure:
    caveats = [*provenance.get("inferred", ()), *([provenance["note"]] if "note" in provenance else [])]
    return PublishedFigure(
        table=f"{Path(comparison.runs_file).stem}, {provenance['table']}",
        label=provenance["label"],
        source=provenance["source"],
        caveats=tuple(caveats),
        comparison=comparison,
    )
