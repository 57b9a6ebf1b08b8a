"""Makes the table of measured runs beside which every forecast is shown, predictors/evidence.json.zst.

    python benchmarks/evidence.py --runs FILE... [--public FILE...] [--work DIR] [--most 100]
                                  [--carry scaledl predictddl driple]

``--runs`` are our own files, which go into the table run by run; of ``--public`` files only scores by kind of
job do, with the name of the source. A predictor that learned from a file forecasts its runs with their
architecture family left out, as ``evaluate --split leave-model-out`` does; all others as they are shipped.
``--work`` keeps the forecasts of each file and predictor, so that what was stopped goes on. About an hour,
most of which the predictors take that learn anew for each family: ``--carry`` takes the outcomes of those
that have not changed from the table that is there.

The weights of the distance say by how much the errors of two runs differ for each setting that differs:
non-negative least squares of |difference of log errors| of the default predictor over pairs of runs that have
all but a few settings in common. A job is far where the nearest run is farther than nine in ten measured runs
are from the nearest of another file.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

import reading
from foretrain.errors import ForetrainError
from foretrain.evaluate import Scores, split_runs
from foretrain.evaluate.folds import Fold
from foretrain.evaluate.forecasts import Answer, Asked, answer_all
from foretrain.predictors import DEFAULT, class_of, get
from foretrain.predictors.evidence import Outcome
from foretrain.predictors.likeness import FIELDS, SIZES, Key, describe
from foretrain.predictors.records import MEMORY, SHIPPED, Record, Records
from foretrain.predictors.roofline import RooflinePredictor
from foretrain.run import Run, read_runs

SCORED = {
    "deletepop": ("step_time_s", *MEMORY),
    "roofline": ("step_time_s", *MEMORY),
    "scaledl": ("step_time_s",),
    "predictddl": ("step_time_s",),
    "driple": ("device_utilization",),
}
"""The predictors that ship something to forecast with, and what scores them, the main quantity first."""
LEARNED = {name: class_of(name).home for name in SCORED if class_of(name).home}
"""Files that the shipped state of a predictor was learned from."""
MOST_FIELDS, MOST_SIZES, PARTNERS = 3, 4.0, 40
"""Pairs differ in so many fields at most, in e-folds of sizes, and are so many for each run."""
LEAST_WEIGHTS = {
    **dict.fromkeys(FIELDS, 0.04),
    **dict.fromkeys(SIZES, 0.005),
    "device": 0.1,
    "mode": 0.1,
    "bandwidth": 0.06,
}
"""So that of two runs that are alike by their errors the one with more settings in common is the nearer. Few
pairs differ in the device alone, and learned predictors do not carry over as physics does. The bandwidth's is
that of pairs on several devices; runs on one, where it is the memory's, dilute it."""
CLIP = 1.5
"""Differences of log errors above this count as this: one wild run is not to decide."""
SEEN = 0.9
"""Of the runs, the share that lie within what is called far, each seen from the other files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run of a file and how each predictor forecast it."""

    source: str
    public: bool
    run: Run
    key: Key
    forecasts: Mapping[str, Mapping[str, Sequence[float]]]
    """By predictor and quantity: measured, forecast, and the ends of the 80 % interval."""

    def outcome(self, predictor: str) -> Outcome | None:
        given = self.forecasts.get(predictor)
        main = SCORED[predictor][0]
        if given is None or main not in given:
            return None
        measured, median, low, high = given[main]
        memory = next((given[name] for name in MEMORY if name in given), None)
        return Outcome(
            error=median / measured - 1,
            inside=float(low <= measured <= high),
            memory_error=None if memory is None else memory[1] / memory[0] - 1,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=reading.existing, nargs="+", required=True)
    parser.add_argument("--public", type=reading.existing, nargs="*", default=[])
    parser.add_argument("--work", type=Path, default=Path("scratch/evidence"))
    parser.add_argument("--most", type=int, default=100, help="runs of a public file, from first to last")
    parser.add_argument("--carry", nargs="*", choices=sorted(SCORED), default=[], help="from --out as it is")
    parser.add_argument("--out", type=Path, default=SHIPPED)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    carried = Carried.of(options.out, options.carry)
    asked = [name for name in SCORED if name not in options.carry]
    for predictor, files in LEARNED.items():
        if predictor in options.carry:
            continue
        forecast_home(predictor, [path for path in options.runs if label(path) in files], options.work)
    cases = []
    for path in (*options.runs, *options.public):
        public = path in options.public
        cases += list(cases_of(path, asked, options.work, options.most if public else None, public))
    weights, usual = fitted_weights(cases)
    print(f"two runs alike: log errors {usual:.3f} apart; each difference adds")
    for name, weight in sorted(weights.items(), key=lambda item: -item[1]):
        print(f"  {name:<14} {weight:.3f}" + (" per e-fold" if name in SIZES else ""))
    far_from, holds_beyond = reach(cases, weights)
    like = {"weights": weights, "far_from": far_from, "holds_beyond": holds_beyond}
    records = [record(case, carried) for case in cases if not case.public] + list(kinds(cases, carried))
    if left := carried.left():
        print(f"{left} outcomes of {', '.join(options.carry)} are of runs that are there no more")
    table = Records.of(
        records,
        like,
        quantities={name: quantities[0] for name, quantities in SCORED.items()},
        left_out={name: sorted(files) for name, files in LEARNED.items()},
    )
    table.save(options.out)
    print(f"{len(records):,} records, {options.out.stat().st_size / 1e3:.0f} kB in {options.out}")


# Forecasts


def label(path: Path) -> str:
    return path.name.partition(".")[0]


def cases_of(path: Path, asked: Sequence[str], work: Path, most: int | None, public: bool) -> Iterator[Case]:
    """The runs of a file that at least one predictor forecast."""
    runs = [run for _, run in read_runs(path)]
    by_run: dict[int, dict[str, Any]] = {}
    for predictor in asked:
        kept = work / f"{label(path)}.{predictor}.json"
        if not kept.exists():
            keep(forecast(runs, predictor, most or len(runs)), kept, len(runs))
        for row in json.loads(kept.read_text()):
            by_run.setdefault(row["run"], {})[predictor] = row["forecast"]
    keys = work / f"{label(path)}.keys.json"
    if not keys.exists():
        keys.write_text(json.dumps({str(i): _sizes(runs[i]) for i in by_run}))
    sizes = json.loads(keys.read_text())
    for i, forecasts in sorted(by_run.items()):
        known = Key.of(runs[i].job)
        key = Key(fields=known.fields, sizes={**sizes[str(i)], **known.sizes})
        yield Case(source=label(path), public=public, run=runs[i], key=key, forecasts=forecasts)


def _sizes(run: Run) -> Mapping[str, float]:
    try:
        return Key.of(run.job, RooflinePredictor().layout(run.job)).sizes
    except ForetrainError:
        return Key.of(run.job).sizes


def keep(rows: list[dict[str, Any]], kept: Path, count: int) -> None:
    kept.write_text(json.dumps(rows))
    print(f"{kept.stem}: {len(rows)} of {count} runs forecast", flush=True)


def forecast_home(predictor: str, paths: Sequence[Path], work: Path) -> None:
    """The files that a predictor learned from, together, with each run's family left out."""
    targets = [work / f"{label(path)}.{predictor}.json" for path in paths]
    if all(kept.exists() for kept in targets):
        return
    by_file = [[run for _, run in read_runs(path)] for path in paths]
    runs = [run for of_file in by_file for run in of_file]
    folds = split_runs(runs, "leave-model-out")
    rows = answered(runs, predictor, [left_out(predictor, fold) for fold in folds])
    first = 0
    for kept, of_file in zip(targets, by_file, strict=True):
        own_rows = [row for row in rows if first <= row["run"] < first + len(of_file)]
        keep([{**row, "run": row["run"] - first} for row in own_rows], kept, len(of_file))
        first += len(of_file)


def forecast(runs: Sequence[Run], predictor: str, most: int) -> list[dict[str, Any]]:
    """By the predictor as it is shipped."""
    step = max(1.0, len(runs) / most)
    some = tuple(sorted({int(i * step) for i in range(min(len(runs), most))}))
    asked = [Asked(predictor=get(predictor), name=predictor, fold=Fold(train=None, test=some))]
    return answered(runs, predictor, asked)


def answered(runs: Sequence[Run], predictor: str, asked: Sequence[Asked]) -> list[dict[str, Any]]:
    answers: dict[int, Answer] = {}
    for found in answer_all(asked, runs, progress=_silent, learning=_silent):
        answers.update(found)
    rows = []
    for i, answer in sorted(answers.items()):
        measured, given = runs[i].measured, answer.quantities or {}
        by_name = {
            name: [measured[name], given[name].median, given[name].low, given[name].high]
            for name in SCORED[predictor]
            if name in given and measured.get(name, 0) > 0
        }
        if by_name:
            rows.append({"run": i, "forecast": by_name})
    return rows


def _silent(done: int, total: int) -> None:
    pass


def left_out(predictor: str, fold: Fold) -> Asked:
    """Learned anew from the other families; DeletePop, which learns from operators, forgets theirs."""
    if predictor != "deletepop":
        return Asked(predictor=get(predictor), fold=fold)
    test = Fold(train=None, test=fold.test)
    return Asked(predictor=get(predictor).without(families=fold.families), fold=test)


# The distance


def fitted_weights(cases: Sequence[Case], seed: int = 0) -> tuple[dict[str, float], float]:
    """By setting, and how far the log errors of two runs alike are apart."""
    known = [case for case in cases if case.outcome(DEFAULT) is not None]
    errors = np.array([math.log1p(max(_outcome(case).error, -0.99)) for case in known])
    columns, random = _columns(known), np.random.default_rng(seed)
    rows, gaps = [], []
    for i in range(len(known)):
        apart = _apart(columns, i)
        fields, sizes = apart[:, : len(FIELDS)].sum(axis=1), apart[:, len(FIELDS) :].sum(axis=1)
        for count in range(MOST_FIELDS + 1):
            others = np.flatnonzero((fields == count) & (sizes <= MOST_SIZES))
            others = others[others != i]
            drawn = random.choice(others, min(PARTNERS // (MOST_FIELDS + 1), len(others)), replace=False)
            for j in drawn.tolist():
                rows.append([1.0, *apart[j]])
                gaps.append(min(abs(errors[i] - errors[j]), CLIP))
    found, _ = nnls(np.array(rows), np.array(gaps))
    weights = zip((*FIELDS, *SIZES), found[1:].tolist(), strict=True)
    return {name: round(max(weight, LEAST_WEIGHTS[name]), 4) for name, weight in weights}, float(found[0])


def _outcome(case: Case) -> Outcome:
    outcome = case.outcome(DEFAULT)
    assert outcome is not None
    return outcome


def reach(cases: Sequence[Case], weights: Mapping[str, float]) -> tuple[float, float]:
    """The distance within which nearly all runs have one of another file, and how many intervals hold beyond
    it."""
    known = [case for case in cases if case.outcome(DEFAULT) is not None]
    sources, columns = np.array([case.source for case in known]), _columns(known)
    factors = np.array([weights[name] for name in (*FIELDS, *SIZES)])
    errors = np.array([math.log1p(max(_outcome(case).error, -0.99)) for case in known])
    inside = np.array([_outcome(case).inside for case in known])
    nearest, gap = np.empty(len(known)), np.empty(len(known))
    for i, source in enumerate(sources):
        distance = np.where(sources == source, np.inf, _apart(columns, i) @ factors)
        nearest[i], gap[i] = distance.min(), abs(errors[i] - errors[distance.argmin()])
    order = np.argsort(nearest)
    for part in np.array_split(order, 10):
        print(
            f"  distance {nearest[part[0]]:.2f} to {nearest[part[-1]]:.2f}: {inside[part].mean():.0%} of the "
            f"intervals hold; log error {np.median(gap[part]):.2f} from that of the nearest run"
        )
    far = float(np.quantile(nearest, SEEN))
    within, beyond = (float(inside[mask].mean()) for mask in (nearest <= far, nearest > far))
    print(f"far from {far:.2f} on: {beyond:.0%} of the intervals hold, {within:.0%} within")
    return round(far, 3), round(beyond, 3)


def _columns(cases: Sequence[Case]) -> npt.NDArray[np.float64]:
    """A row a case: codes of the fields, logarithms of the sizes."""
    codes: dict[str, int] = {}
    return np.array([
        [float(codes.setdefault(case.key.fields[name], len(codes))) for name in FIELDS]
        + [math.log(case.key.sizes[name]) if name in case.key.sizes else math.nan for name in SIZES]
        for case in cases
    ])  # fmt: skip


def _apart(columns: npt.NDArray[np.float64], i: int) -> npt.NDArray[np.float64]:
    count = len(FIELDS)
    differs = (columns[:, :count] != columns[i, :count]).astype(np.float64)
    return np.hstack([differs, np.nan_to_num(np.abs(columns[:, count:] - columns[i, count:]))])


# The table


@dataclass(frozen=True, slots=True)
class Carried:
    """Outcomes of an earlier table, by source, what the runs have in common and what they are."""

    outcomes: dict[tuple[str, ...], list[dict[str, Outcome]]]

    @classmethod
    def of(cls, table: Path, predictors: Sequence[str]) -> Carried:
        found: dict[tuple[str, ...], list[dict[str, Outcome]]] = {}
        document = Records.read(table).document if predictors else {"about": []}
        for i, about in enumerate(document["about"]):
            source, *fields = (
                column["values"][column["of"][i]]
                for column in (document["source"], *(document["fields"][name] for name in FIELDS))
            )
            rows = {name: document["outcomes"].get(name, {i: None})[i] for name in predictors}
            known = {
                name: Outcome(error=row[0], inside=row[1], memory_error=row[2])
                for name, row in rows.items()
                if row is not None
            }
            found.setdefault((source, about, *fields), []).append(known)
        return cls(found)

    def take(self, source: str, about: str, key: Key) -> dict[str, Outcome]:
        """Of the next record that is so; runs of one job keep their order."""
        alike = self.outcomes.get((source, about, *(key.fields[name] for name in FIELDS)))
        return alike.pop(0) if alike else {}

    def left(self) -> int:
        return sum(bool(known) for alike in self.outcomes.values() for known in alike)


def record(case: Case, carried: Carried) -> Record:
    outcomes = {name: found for name in SCORED if (found := case.outcome(name)) is not None}
    outcomes |= carried.take(case.source, describe(case.run.job), case.key)
    return Record(
        source=case.source,
        about=describe(case.run.job),
        low=case.key,
        high=case.key,
        outcomes=outcomes,
        measured={
            name: case.run.measured[name]
            for name in dict.fromkeys(quantities[0] for quantities in SCORED.values())
            if name in case.run.measured
        },
    )


def kinds(cases: Sequence[Case], carried: Carried) -> Iterator[Record]:
    """Public runs by file and what they have in common, with the ends of their sizes and their scores."""
    groups: dict[tuple[str, ...], list[Case]] = {}
    for case in cases:
        if case.public:
            groups.setdefault((case.source, *case.key.fields.values()), []).append(case)
    for alike in groups.values():
        first = alike[0]
        low, high = (
            Key(
                fields=first.key.fields,
                sizes={
                    name: end(values)
                    for name in SIZES
                    if (values := [case.key.sizes[name] for case in alike if name in case.key.sizes])
                },
            )
            for end in (min, max)
        )
        outcomes = {}
        for name in SCORED:
            found = [outcome for case in alike if (outcome := case.outcome(name)) is not None]
            if found:
                memory = [one.memory_error for one in found if one.memory_error is not None]
                outcomes[name] = Outcome(
                    error=Scores.of_errors([one.error for one in found]).median_ape,
                    inside=float(np.mean([one.inside for one in found])),
                    memory_error=Scores.of_errors(memory).median_ape if memory else None,
                )
        outcomes |= carried.take(first.source, _kind(low, high), first.key)
        yield Record(
            source=first.source,
            about=_kind(low, high),
            low=low,
            high=high,
            outcomes=outcomes,
            runs=len(alike),
        )


def _kind(low: Key, high: Key) -> str:
    """``llama, megatron, bf16, on 8 to 512 x h100-sxm-80gb, data+tensor``."""
    fields = low.fields
    ends = dict.fromkeys(f"{key.sizes['devices']:,.0f}" for key in (low, high))
    many = list(ends) != ["1"]
    words = [fields["family"]]
    words += [fields["framework"]] if fields["framework"] != "pytorch" else []
    words += ["inference"] if fields["mode"] == "infer" else []
    words += [fields["precision"], f"on {' to '.join(ends)} x" if many else "on", fields["device"]]
    return " ".join(words) + (f", {fields['plan']}" if many else "")


if __name__ == "__main__":
    reading.run(main)
