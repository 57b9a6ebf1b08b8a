"""Writes pages and opens them in chromium: their size, how long they take, what a slider costs, how far off
interpolated figures are, and what the accessibility checker axe finds.

python benchmarks/page.py [--seconds 20] [--keep DIR]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from browsing import Browser, chromium
from foretrain import predictors
from foretrain.api import job_of
from foretrain.errors import ForetrainError
from foretrain.planner.clusters import Wanted
from foretrain.planner.goal import Goal
from foretrain.planner.planning import make_plans
from foretrain.predictors.evidence import with_evidence
from foretrain.web import ForecastTable, forecast_table, plan_table, write_page
from foretrain.web.views import View

_LLAMA: dict[str, Any] = {"sequence": 4096, "precision": "bf16", "steps": 10_000}
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet50 on an A100": (
        "resnet50",
        {"device": "a100", "batch": 256, "precision": "amp-bf16", "samples": 1_281_167, "epochs": 90},
    ),
    "Llama 3 8B on 8 H100": (
        "llama-3-8b",
        {"device": "h100", "devices": 8, "batch": 64, "shard": "zero3", "micro_batch": 2, **_LLAMA},
    ),
}
_MOVES = 20
_INTERPOLATED = ("step_time_s", "total_time_s", "peak_memory_bytes")
_SCREENS = ((1280, "light"), (1280, "dark"), (390, "light"), (390, "dark"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="for the forecasts of a page")
    parser.add_argument("--keep", type=Path, help="where pages stay")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, chromium(Path(scratch) / "profile") as browser:
        folder = asked.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for number, name in enumerate([*JOBS, "plans of Llama 3 8B"]):
            path = folder / f"page-{number}.html"
            table, spent_s = _made(name, asked.seconds)
            size = write_page(name, table.to_dict(), path)
            made = f"{table.points} forecasts in {spent_s:.1f} s, {table.left} left"
            print(f"{name}: {size / 1e6:.2f} MB, {made}")
            _look(browser, path)
            if name in JOBS:
                _interpolate(browser, table)


def _made(name: str, seconds: float) -> tuple[ForecastTable, float]:
    predictor = predictors.get()
    if name in JOBS:
        forecast = with_evidence(predictor.predict(job_of(*JOBS[name])), predictor)
        began_s = time.monotonic()
        return forecast_table(forecast, predictor, seconds=seconds), time.monotonic() - began_s
    job = job_of("llama-3-8b", {"device": "h100", "devices": 8, "batch": 256, **_LLAMA})
    wanted = Wanted(kinds=("h100", "b200"), counts=(8, 16))
    plans = make_plans(job, predictor, goal=Goal(objective="cost"), wanted=wanted, target="torchtitan")
    began_s = time.monotonic()
    table = plan_table(plans, predictor, seconds=seconds)
    assert table is not None
    return table, time.monotonic() - began_s


def _look(browser: Browser, path: Path) -> None:
    browser.resize(1280)
    browser.open(path)
    _drawn(browser)
    last = int(browser.run("return document.querySelector('#batch-slider').max"))
    cpu_ms, wall_ms = [], []
    for move in range(_MOVES):
        at = str(move * last // (_MOVES - 1))
        cpu_ms.append(1e3 * browser.cpu_s(lambda at=at: browser.choose("#batch-slider", at)))  # type: ignore[misc]
        wall_ms.append(browser.run("return foretrain.lastUpdateMs"))
        _drawn(browser)
    for what, times in (
        ("thread time of a move, all parts", cpu_ms),
        ("wall time until the answer", wall_ms),
    ):
        print(f"  slider, {what}: median {statistics.median(times):.0f} ms, most {max(times):.0f} ms")
    print(f"  console {browser.complaints()}, requests {browser.requests()}")
    for width, scheme in _SCREENS:
        browser.resize(width)
        browser.scheme(scheme)
        found = browser.violations(least=("minor", "moderate", "serious", "critical"))
        print(f"  axe at {width} pixels, {scheme}: {found or 'nothing'}")
    browser.scheme("light")


def _drawn(browser: Browser) -> None:
    browser.wait("return document.querySelector('#explorer').dataset.drawn === 'all'")


def _interpolate(browser: Browser, table: ForecastTable) -> None:
    """Batches between those of the table, by the page and by the predictor."""
    start, predictor = table.choices.start, predictors.get()
    known = sorted(map(int, table.series[start.series]["at"]))
    errors: dict[str, list[float]] = {name: [] for name in _INTERPOLATED}
    unit = table.series[start.series]["multiple"]
    for low, high in itertools.pairwise(known):
        batch = round((low * high) ** 0.5 / unit) * unit
        if batch in (low, high):
            continue
        view = View(**{**start.to_dict(), "batch": batch})
        shown = browser.run(
            "var data = JSON.parse(document.querySelector('#foretrain-data').textContent);"
            "var source = foretrain.tableSource(data);"
            "return source.ask(Object.assign({}, source.start, {batch: arguments[0]})).record.quantities",
            batch,
        )
        try:
            expected = predictor.predict(table.choices.job_at(view))
        except ForetrainError:
            continue
        for name in _INTERPOLATED:
            errors[name].append(abs(shown[name]["median"] / expected[name].median - 1.0))
    for name, found in errors.items():
        if found:
            off = f"{statistics.median(found):.1%} in the middle, {max(found):.1%} at most"
            print(f"  interpolated {name}: off by {off} ({len(found)} batches)")


if __name__ == "__main__":
    main()
