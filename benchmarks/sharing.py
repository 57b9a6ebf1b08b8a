"""Scores forecasts of how fast jobs run that share a GPU, on pairs that were measured.

    python benchmarks/sharing.py gavel --data DIR [--devices k80,p100,v100]
    python benchmarks/sharing.py h200 [--file FILE] [--forecast deletepop [--paced]]

``gavel`` reads tables/gavel_colocation.csv.gz and traces/gavel_simulation_throughputs.json.gz of the data.
Every job is left out in turn; pairs with it are forecast from manners fitted to pairs of the others, its own
being those of other batch sizes of its model, or of probes: a few pairs with it that were measured.
``h200`` fits the coefficients of a way to share to all pairs without a job, and forecasts those with it from
its busy share and kernels alone: as measured, or (``--forecast``) as a predictor forecasts them, with
``--paced`` at the speed alone that was measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from foretrain import predictors
from foretrain.job import Job
from foretrain.predictors.driple.resources import resource_figures
from foretrain.scheduling.sharing.fitting import PairSpeed, fit_manners
from foretrain.scheduling.sharing.interference import Manners, MannersOfKinds, MeasuredPairs, speed_beside
from foretrain.scheduling.sharing.use import WAYS, Sharing, Use

FIELDS = ("needs", "bears", "pressure")


def family(job: str) -> str:
    return job.partition(" (")[0]


def batch(job: str) -> float:
    match = re.search(r"size (\d+)", job)
    return float(match[1]) if match else 1.0


def by_other_batches(job: str, fitted: dict[str, Manners]) -> Manners:
    """Of a job that was never run: lines over the logarithm of the batch, of other batches of its model; the
    means of all jobs where there are fewer than two."""
    alike = [name for name in fitted if family(name) == family(job)]
    several = alike if len(alike) > 1 else list(fitted)
    sizes = np.log2([batch(name) for name in several])
    figures = {}
    for field in FIELDS:
        logs = np.log([max(getattr(fitted[name], field), 1e-3) for name in several])
        if len(alike) > 1 and np.ptp(sizes) > 0:
            size = float(np.clip(np.log2(batch(job)), sizes.min() - 1, sizes.max() + 1))
            figures[field] = float(np.exp(np.polyval(np.polyfit(sizes, logs, 1), size)))
        else:
            figures[field] = float(np.exp(logs.mean()))
    return Manners(**{**figures, "needs": min(figures["needs"], 1.0)})


def errors(pairs: list[PairSpeed], manners: dict[str, Manners]) -> list[float]:
    return [abs(speed_beside(manners[pair.job], [manners[pair.beside]]) / pair.speed - 1) for pair in pairs]


def left_out(pairs: list[PairSpeed], probes: int, group: Callable[[str], str], seed: int = 0) -> list[float]:
    """Errors on pairs with jobs that no fit has seen, but for ``probes`` of their pairs (both directions)."""
    found: list[float] = []
    names = sorted({pair.job for pair in pairs})
    draw = random.Random(seed)
    fits: dict[str, dict[str, Manners]] = {}
    for job in names:
        out = {name for name in names if group(name) == group(job)}
        key = group(job)
        if key not in fits:
            fits[key] = fit_manners([pair for pair in pairs if not out & {pair.job, pair.beside}])
        fitted = {name: one for name, one in fits[key].items() if name not in out}
        known_pairs = [pair for pair in pairs if job in pair[:2] and {*pair[:2]} <= {*fitted, job}]
        partners = sorted({name for pair in known_pairs for name in pair[:2]} - {job})
        tried = set(draw.sample(partners, min(probes, len(partners))))
        prior = by_other_batches(job, fitted)
        seen = [pair for pair in known_pairs if tried & {pair.job, pair.beside}]
        own = fit_manners(seen, known=fitted, prior={job: prior})[job] if seen else prior
        rest = [pair for pair in known_pairs if not tried & {pair.job, pair.beside}]
        found += errors(rest, {**fitted, job: own})
    return found


def left_out_by_batches(pairs: list[PairSpeed]) -> tuple[list[float], list[float]]:
    """The same by the product's own table of pairs, which has none with the job: from other batch sizes of
    its model beside the same job; and errors on those pairs alone whose model has other sizes."""
    every: list[float] = []
    with_sizes: list[float] = []
    names = sorted({pair.job for pair in pairs})
    for job in names:
        rest = [pair for pair in pairs if job not in pair[:2]]
        fitted = fit_manners(rest)
        manners = MannersOfKinds({**fitted, job: by_other_batches(job, fitted)})
        table = MeasuredPairs({("", pair.job, pair.beside): pair.speed for pair in rest}, manners)
        found = [
            abs(table.speed("", pair.job, [pair.beside]) / pair.speed - 1)
            for pair in pairs
            if job in pair[:2]
        ]
        every += found
        if sum(family(name) == family(job) for name in names) > 1:
            with_sizes += found
    return every, with_sizes


def shown(what: str, found: list[float]) -> None:
    within = np.mean(np.array(found) <= 0.15)
    print(
        f"{what}: n {len(found)}, MAPE {np.mean(found):.1%}, median {np.median(found):.1%}, "
        f"within 15 % {within:.0%}", flush=True,
    )  # fmt: skip


SERIAL = 0.9
"""Sum of two speeds below which the device cannot be what two jobs wait for: taking turns gives 1, less what
changing turns costs (0.9 on an H200)."""


def gavel(data: Path, devices: list[str], without_worse: bool) -> None:
    table = MeasuredPairs.load(data / "traces" / "gavel_simulation_throughputs.json.gz").pairs
    for device in devices:
        pairs = [PairSpeed(a, b, speed) for (on, a, b), speed in table.items() if on == device and speed > 0]
        speeds = {(pair.job, pair.beside): pair.speed for pair in pairs}
        worse = [pair for pair in pairs if pair.speed + speeds.get((pair.beside, pair.job), 1.0) < SERIAL]
        print(f"{device}: {len(worse)} of {len(pairs)} are slower together than one after the other")
        if without_worse:
            pairs = [pair for pair in pairs if pair not in worse]
        half = [abs(0.5 / pair.speed - 1) for pair in pairs]
        shown(f"{device}: half of its speed for each", half)
        fitted = fit_manners(pairs)
        shown(f"{device}: fitted to these pairs", errors(pairs, fitted))
        every, with_sizes = left_out_by_batches(pairs)
        shown(f"{device}: job left out, by other batches beside the same job", every)
        shown(f"{device}: the same, models of several batch sizes", with_sizes)
        for probes in (0, 1, 3):
            shown(f"{device}: job left out, {probes} probes", left_out(pairs, probes, lambda job: job))
        for probes in (0, 1, 3):
            shown(f"{device}: model left out, {probes} probes", left_out(pairs, probes, family))


# Our own pairs: by how jobs use the device


def measured_uses(rows: list[dict[str, Any]], mode: str) -> dict[str, Use]:
    """Busy share and kernels of every job alone: the profile's kernels, at the pace of the mode."""
    profiles = {row["name"]: row for row in rows if row["what"] == "profile"}
    alone = {row["name"]: row for row in rows if row["what"] == "alone" and row["mode"] == mode}
    return {
        name: Use(
            busy=min(one["device_busy_s"] * alone[name]["steps_per_s"], 1.0),
            kernel_s=one["device_busy_s"] / one["kernels"],
        )
        for name, one in profiles.items()
    }


def forecast_uses(rows: list[dict[str, Any]], mode: str, predictor: str, paced: bool) -> dict[str, Use]:
    """The same as forecast; a job that waits for its data does so in the step's time too. ``paced``: the
    device's time as forecast, over the step as measured alone."""
    found = {}
    for row in rows:
        if row["what"] == "alone" and row["mode"] == mode:
            job = Job.read(row["job"], base=Path("data"))
            usual = None if predictor == "driple" else predictor
            forecast = predictors.get(usual).predict(job)
            use, step_s = Use.of(forecast), forecast.quantities["step_time_s"].median
            if predictor == "driple":
                use = dataclasses.replace(use, busy=resource_figures(job)["device_utilization"])
            if paced:
                found[row["name"]] = Use.of(forecast, row["steps_per_s"])
                continue
            waits = step_s / (step_s + row.get("wait_s", 0.0))
            found[row["name"]] = dataclasses.replace(use, busy=use.busy * waits)
    return found


def pairs_of(rows: list[dict[str, Any]], mode: str) -> list[PairSpeed]:
    alone = {
        row["name"]: row["steps_per_s"] for row in rows if row["what"] == "alone" and row["mode"] == mode
    }
    return [
        PairSpeed(job, beside, row[side]["steps_per_s"] / alone[job])
        for row in rows
        if row["what"] == "pair" and row["mode"] == mode
        for job, beside, side in ((row["a"], row["b"], "of_a"), (row["b"], row["a"], "of_b"))
    ]


def fit_sharing(pairs: list[PairSpeed], uses: dict[str, Use], mode: str) -> Sharing:
    """Coefficients that fit pairs best; processes that take turns do not see each other's kernels."""
    from scipy.optimize import least_squares

    measured = np.log([pair.speed for pair in pairs])

    def sharing(x: np.ndarray) -> Sharing:
        by_kernel = float(x[3]) if mode == "mps" else 0.0
        return Sharing(waits=math.exp(x[0]), by_busy=float(x[1]), by_kernel=by_kernel, hides=math.exp(x[2]))

    def residuals(x: np.ndarray) -> np.ndarray:
        one = sharing(x)
        found = [one.speed(uses[pair.job], [uses[pair.beside]]) for pair in pairs]
        return np.concatenate([np.log(found) - measured, 0.02 * (x - start)])

    start = np.array([0.0, 0.5, 1.5, 0.5])
    return sharing(least_squares(residuals, start, loss="soft_l1", f_scale=0.1).x)


def h200(file: Path, predictor: str | None, paced: bool) -> None:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for mode in ("turns", "mps"):
        pairs, uses = pairs_of(rows, mode), measured_uses(rows, mode)
        asked = uses if predictor is None else forecast_uses(rows, mode, predictor, paced)
        shown(f"{mode}: half of its speed for each", [abs(0.5 / pair.speed - 1) for pair in pairs])
        fitted = fit_sharing(pairs, uses, mode)
        print(f"{mode}: {fitted}")
        every: list[float] = []
        for job in uses:
            sharing = fit_sharing([pair for pair in pairs if job not in pair[:2]], uses, mode)
            with_it = [pair for pair in pairs if job in pair[:2]]
            found = [
                abs(sharing.speed(asked[pair.job], [asked[pair.beside]]) / pair.speed - 1) for pair in with_it
            ]
            shown(f"{mode}: {job} left out (busy {asked[job].busy:.0%})", found)
            every += found
        shown(f"{mode}: every job left out", every)
        known = WAYS[mode]
        found = [abs(known.speed(asked[pair.job], [asked[pair.beside]]) / pair.speed - 1) for pair in pairs]
        shown(f"{mode}: with the coefficients of the product", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("which", choices=("gavel", "h200"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--file", type=Path, default=Path("data/studies/h200_sharing.jsonl"))
    parser.add_argument("--forecast", help="a predictor whose figures take the place of measured ones")
    parser.add_argument("--paced", action="store_true", help="with the speed alone as measured")
    parser.add_argument(
        "--without-worse", action="store_true", help="leave pairs out that are slower than one by one"
    )
    parser.add_argument("--devices", default="k80,p100,v100")
    options = parser.parse_args()
    if options.which == "gavel":
        gavel(options.data, options.devices.split(","), options.without_worse)
    else:
        h200(options.file, options.forecast, options.paced)


if __name__ == "__main__":
    main()
