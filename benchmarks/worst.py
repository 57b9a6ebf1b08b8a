"""Lists the runs that are farthest off in each file of runs, and what went wrong in each: ``docs/errors.md``.

    python benchmarks/worst.py data/h200_*.jsonl [--also FILE ...] [--most 40] --work DIR > page.md

Scores are those of ``foretrain evaluate`` for the usual predictor as it is shipped; files that it learned
from (its home) only say what the same jobs took there. Causes are those of ``causes.py``. ``--work`` keeps
the outcome of each file, so that a page that was stopped goes on; it is for one state of the program.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import reading
from causes import Case, Cause, case_of, counted, memory_cause, step_cause
from foretrain.errors import ForetrainError
from foretrain.evaluate import Comparison, evaluate, job_key, scores_of
from foretrain.files import write_atomically
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.leaderboard import source
from foretrain.predictors import DEFAULT, class_of, get
from foretrain.predictors.base import Predictor
from foretrain.run import Run, read_runs
from foretrain.units import format_quantity

STEP = "step_time_s"
MEMORY = ("peak_memory_bytes", "reserved_memory_bytes")
LEAST_ERROR = 0.05
"""A forecast that is nearer than this is not listed, even if few of its file are worse."""


class Watched(Predictor):
    """The usual predictor, which keeps what its forecasts are made of."""

    name: ClassVar[str] = "watched"
    quantities = class_of(DEFAULT).quantities

    def __init__(self) -> None:
        self.usual = get(DEFAULT)
        self.forecasts: dict[str, dict[str, Any]] = {}

    def fit(self, runs: Iterable[Run]) -> Self:
        return self

    def predict(self, job: Job) -> Forecast:
        forecast = self.usual.predict(job)
        step = forecast.step
        operators = {} if step is None else step.by("operator")
        self.forecasts[job_key(job)] = {
            "predicted": {name: one.median for name, one in forecast.quantities.items()},
            "causes_s": {} if step is None else dict(step.causes_s),
            "operators_s": {name: float(value) for name, value in operators.items()},
            "memory_bytes": dict(forecast.memory_by_category),
        }
        return forecast


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A run that is scored, with its case."""

    line: int
    quantity: str
    model: str
    setting: str
    error: float
    case: Case


Scored = Mapping[str, Any]
"""Of one file: ``rows`` as ``evaluate`` compares them, and ``cases`` by line."""


def scored(path: Path, most: int | None, work: Path) -> Scored:
    """The comparisons of a file and what is known of each run, kept in the work folder."""
    digest = hashlib.sha256(repr(most).encode() + path.read_bytes()).hexdigest()[:16]
    kept = work / f"{source(path)}-{digest}.json"
    if kept.exists():
        return dict(json.loads(kept.read_text()))
    watched = Watched()
    outcome = evaluate([path], predictors=[watched], most=most)
    runs = dict(read_runs(path))
    lines = dict.fromkeys(row.line for row in outcome.runs)
    document = {
        "rows": [dataclasses.asdict(row) for row in outcome.runs],
        "cases": {str(line): _case(runs[line], watched.forecasts[job_key(runs[line].job)]) for line in lines},
        "labels": {str(line): _label(runs[line].job) for line in lines},
        "refused": len(outcome.unsupported) + len(outcome.failures),
    }
    work.mkdir(parents=True, exist_ok=True)
    write_atomically(kept, json.dumps(document))
    return document


def _case(run: Run, forecast: Mapping[str, Any]) -> dict[str, Any]:
    low_s, high_s = (run.provenance.get(f"step_time_{end}_s") for end in ("min", "max"))
    case = Case(
        measured={name: float(value) for name, value in run.measured.items()},
        spread_s=(low_s, high_s) if low_s and high_s else None,
        devices=run.job.cluster.world_size,
        cpu=run.job.cluster.device.is_cpu,
        **forecast,
    )
    return dataclasses.asdict(case)


def _label(job: Job) -> tuple[str, str]:
    training, devices = job.workload.training, job.cluster.world_size
    what = f"{training.mode}, batch {training.global_batch}, {training.precision}"
    where = job.cluster.device.name if devices == 1 else f"{devices:,} x {job.cluster.device.name}"
    return job.workload.model.label, f"{what}, {where}"


def measured_elsewhere(paths: Sequence[Path]) -> dict[str, dict[str, float]]:
    """Step times of each job that was measured more than once, by file and line."""
    found: dict[str, dict[str, float]] = {}
    for path in paths:
        for line, run in read_runs(path):
            if run.measured.get(STEP):
                key = _key(run.job)
                found.setdefault(key, {})[f"{source(path)}:{line}"] = float(run.measured[STEP])
    return {key: times for key, times in found.items() if len(times) > 1}


def _key(job: Job) -> str:
    """A job without the host that a file may name beside it."""
    document = job.to_dict()
    document["cluster"].pop("host", None)
    return json.dumps([document[part] for part in ("model", "training", "cluster", "plan")], sort_keys=True)


def rows_of(path: Path, found: Scored, elsewhere: Mapping[str, Mapping[str, float]]) -> list[Row]:
    runs = dict(read_runs(path))
    rows = []
    for row in found["rows"]:
        line, label = row["line"], found["labels"][str(row["line"])]
        others = {
            where: time_s
            for where, time_s in elsewhere.get(_key(runs[line].job), {}).items()
            if where != f"{source(path)}:{line}"
        }
        case = dataclasses.replace(case_of(found["cases"][str(line)]), elsewhere_s=others)
        rows.append(Row(line=line, quantity=row["quantity"], model=label[0], setting=label[1],
                        error=row["error"], case=case))  # fmt: skip
    return rows


def cause_of(row: Row) -> Cause:
    return step_cause(row.case) if row.quantity == STEP else memory_cause(row.case, row.quantity)


def worst(rows: Sequence[Row], count: int) -> list[Row]:
    """Farthest off first, by the ratio."""
    off = [row for row in rows if abs(row.error) >= LEAST_ERROR]
    return sorted(off, key=lambda row: -abs(math.log1p(max(row.error, -0.999))))[:count]


def page(files: Mapping[str, Scored], rows: Mapping[str, Sequence[Row]], count: int) -> Iterator[str]:
    chosen = {
        name: [
            row
            for part in ((STEP,), MEMORY)
            for row in worst([one for one in own if one.quantity in part], count)
        ]
        for name, own in rows.items()
    }
    yield "| runs | quantity | n | MAPE | bias | listed | their causes |"
    yield "|---|---|---|---|---|---|---|"
    for name, own in chosen.items():
        for quantity in (STEP, *MEMORY):
            compared = [Comparison(**row) for row in files[name]["rows"] if row["quantity"] == quantity]
            if compared:
                yield _summary(name, quantity, compared, [row for row in own if row.quantity == quantity])
    for name, own in chosen.items():
        yield from ("", f"## {name}", "")
        yield "| line | quantity | model | setting | measured | forecast | error | cause | why |"
        yield "|---|---|---|---|---|---|---|---|---|"
        yield from (_line(row) for row in own)


def _summary(name: str, quantity: str, compared: Sequence[Comparison], own: Sequence[Row]) -> str:
    scores, causes = scores_of(compared), [cause_of(row) for row in own]
    kinds = ", ".join(f"{count} {kind}" for kind, count in counted(causes).items())
    figures = f"{scores.n} | {scores.mape:.1%} | {scores.bias:+.1%}"
    return f"| {name} | `{quantity}` | {figures} | {len(own)} | {kinds} |"


def _line(row: Row) -> str:
    cause = cause_of(row)
    kind = f"{cause.kind}?" if cause.by_forecast else cause.kind
    told, true = row.case.predicted[row.quantity], row.case.measured[row.quantity]
    values = f"{format_quantity(row.quantity, true)} | {format_quantity(row.quantity, told)}"
    what = f"{row.line} | `{row.quantity}` | {row.model} | {row.setting}"
    return f"| {what} | {values} | {row.error:+.1%} | {kind} | {cause.why} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=reading.existing)
    parser.add_argument("--also", nargs="*", type=reading.existing, default=[],
                        help="files that only say what the same jobs took elsewhere")  # fmt: skip
    parser.add_argument("--most", type=int, help="of each file, evenly from the first to the last")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--work", type=Path, required=True)
    options = parser.parse_args()
    home = class_of(DEFAULT).home
    paths = [path for path in options.runs if source(path) not in home]
    elsewhere = measured_elsewhere([*options.runs, *options.also])
    files: dict[str, Scored] = {}
    rows: dict[str, list[Row]] = {}
    for path in paths:
        print(source(path), file=sys.stderr, flush=True)
        try:
            found = scored(path, options.most, options.work)
        except ForetrainError as error:
            print(f"{source(path)}: left out: {error}", file=sys.stderr)
            continue
        files[source(path)], rows[source(path)] = found, rows_of(path, found, elsewhere)
    print("\n".join(page(files, rows, options.count)))


if __name__ == "__main__":
    reading.run(main)
