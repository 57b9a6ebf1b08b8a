"""Prints what simulations of ``schedule`` came to, and writes it to files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from foretrain.cli.app import say

if TYPE_CHECKING:
    from rich.console import RenderableType

    from foretrain.scheduling.jobs import Trace
    from foretrain.scheduling.metrics import Metrics
    from foretrain.scheduling.study import Outcome
    from foretrain.scheduling.summary import Key

_WIDE = (
    ("average JCT", "median", "p95", "p99", "queueing"),
    ("makespan", "utilisation", "fairness", "preemptions", "lost GPU h", "cost", "energy"),
    ("killed", "late"),
)
_NARROW = (
    ("average JCT", "median", "p95"),
    ("p99", "queueing", "makespan"),
    ("utilisation", "fairness", "cost", "energy"),
    ("preemptions", "lost GPU h", "killed", "late"),
)
"""The figures of each table: as many as fit beside the policy, or beside the policy and the quality of its
estimates."""

_SHOWN = ("failures of a job, per GPU", "failures of a node", "outages", "spot nodes")
"""Settings below the tables: what makes them another answer; a page has them all."""


def report(jobs: Trace, outcomes: Sequence[Outcome], cluster: str, *, by_group: bool) -> list[RenderableType]:
    """Tables of all policies, what errors cost, and what was simulated."""
    from foretrain.report.screen import width
    from foretrain.report.tables import table
    from foretrain.scheduling.clusters import hardware_of
    from foretrain.scheduling.page_parts import settings_of
    from foretrain.scheduling.study import EXACT
    from foretrain.scheduling.summary import mean_outcomes
    from foretrain.units import counted

    means = mean_outcomes(outcomes)
    several = len({quality for _, quality in means}) > 1
    tables = _tables(means, _NARROW if several else _WIDE, several=several)
    if any(_letters(heads, rows) > width() for heads, rows in tables):
        tables = _tables(means, _NARROW, several=several)
    parts: list[RenderableType] = [table(heads, rows, right=heads[1:]) for heads, rows in tables]
    parts += _prices(outcomes, means)
    alike = [policy for policy in dict.fromkeys(policy for policy, _ in means) if _heeds_none(means, policy)]
    if several and alike:
        parts.append(f"{', '.join(alike)}: the same whatever the estimates")
    if by_group:
        parts.append(_groups(outcomes))
    first = outcomes[0].scenario
    seeds = len({outcome.scenario.seed for outcome in outcomes})
    mean = f", means of {seeds} workloads, the first as given, the others redrawn" if seeds > 1 else ""
    parts.append(
        f"{jobs.name} ({jobs.format}): {counted(len(jobs.jobs), 'job')} "
        f"on {hardware_of(cluster, first.machines)}{mean}"
    )
    shown_settings = {name: value for name, value in settings_of(first).items() if name in _SHOWN}
    if not several and first.quality != EXACT:
        shown_settings = {"estimates": first.quality.text, **shown_settings}
    parts += [f"{name}: {value}" for name, value in shown_settings.items()]
    if any("@" in machine.device for machine in first.machines):
        parts.append("energy: not told of slices, of which the catalogue has no power")
    return parts


def _tables(
    means: dict[Key, Metrics], groups: Sequence[Sequence[str]], *, several: bool
) -> list[tuple[list[str], list[list[str]]]]:
    """Headings and rows, a table for each group of figures of which any is known."""
    from foretrain.scheduling.page import figures

    columns = {key: figures(averages) for key, averages in means.items()}
    known = {name for averages in columns.values() for name in averages}
    tables = []
    for chosen in groups:
        shown = [name for name in chosen if name in known]
        rows, heads = [], []
        for (policy, quality), averages in means.items() if shown else ():
            cells = {name: columns[policy, quality].get(name, "0") for name in shown}
            extra = {"estimates": quality.text} if several else {}
            if several and "average JCT" in chosen:
                extra["vs exact"] = _against(means, policy, averages)
            heads = ["policy", *extra, *cells]
            rows.append([policy, *extra.values(), *cells.values()])
        if shown:
            tables.append((heads, rows))
    return tables


def _letters(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """How wide a table is: its columns stand three blanks apart, and one from either side."""
    columns = zip(heads, *rows, strict=True)
    return sum(max(len(cell) for cell in column) + 3 for column in columns) - 1


def _heeds_none(means: dict[Key, Metrics], policy: str) -> bool:
    """Whether a policy decides alike by all estimates."""
    found = [each for (name, _), each in means.items() if name == policy]
    return all(each == found[0] for each in found)


def _against(means: dict[Key, Metrics], policy: str, found: Metrics) -> str:
    from foretrain.scheduling.summary import cost_of_errors

    cost = cost_of_errors(means, policy, found)
    return "" if cost is None else f"{cost:+.1%}"


def _prices(outcomes: Sequence[Outcome], means: dict[Key, Metrics]) -> list[str]:
    """The cost of errors in words, for policies that look at estimates."""
    from foretrain.scheduling.summary import cost_of_errors

    lines = {}
    for scenario in (outcome.scenario for outcome in outcomes):
        found = means[scenario.policy, scenario.quality]
        cost = cost_of_errors(means, scenario.policy, found)
        if cost is not None and abs(cost) > 1e-12:
            whose = f" ({scenario.residuals_of})" if scenario.residuals_of else ""
            what = f"{scenario.quality.off} MAPE" if scenario.beliefs == "drawn" else scenario.beliefs
            verb, size = ("costs you", cost) if cost >= 0 else ("gains you", -cost)
            lines[scenario.policy, scenario.quality] = (
                f"{scenario.policy}: {what}{whose} {verb} {size:.1%} of average JCT"
            )
    return list(lines.values())


def _groups(outcomes: Sequence[Outcome]) -> RenderableType:
    from foretrain.report.tables import table
    from foretrain.scheduling.page import figures

    rows = []
    for outcome in outcomes:
        if outcome.scenario.seed == 0:
            for group, averages in outcome.groups.items():
                cells = figures(averages)
                rows.append(
                    [
                        outcome.scenario.policy,
                        group,
                        f"{averages.jobs:,}",
                        cells["average JCT"],
                        cells["p95"],
                        cells["queueing"],
                        cells["utilisation"],
                    ]
                )
    heads = ["policy", "group", "jobs", "average JCT", "p95", "queueing", "utilisation"]
    return table(heads, rows, right=heads[2:])


def write(
    outcomes: Sequence[Outcome], jobs: Trace, html: Path | None, log: Path | None, perfetto: Path | None
) -> None:
    """The page, and files of each policy's stretches."""
    from foretrain.scheduling.logs import write_log, write_perfetto
    from foretrain.scheduling.page import write_page

    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    if html is not None:
        title = f"{jobs.name}: {', '.join(result.policy for result in results)}"
        write_page(results, title, html, outcomes)
        say(f"page in {html}")
    for path, write in ((log, write_log), (perfetto, write_perfetto)):
        for result in results if path is not None else ():
            assert path is not None
            file = (
                path
                if len(results) == 1
                else path.with_name(f"{path.stem}-{Path(result.policy).name.replace(':', '-')}{path.suffix}")
            )
            say(f"{write(result, file):,} rows in {file}")
