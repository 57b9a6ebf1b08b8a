"""Draws the results of policies on one trace as an HTML page that needs no network."""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foretrain.files import write_atomically
from foretrain.pages import drawn, graph_objects, whole_page
from foretrain.scheduling.metrics import Metrics, metrics, utilization_over_time
from foretrain.scheduling.page_parts import (
    against,
    colourings,
    errors_table,
    menu,
    name_of,
    queue_over_time,
    settings_table,
    table,
    trouble,
)
from foretrain.scheduling.result import Column, Result, Segment
from foretrain.units import format_dollars, format_seconds

if TYPE_CHECKING:
    from foretrain.scheduling.study import Outcome

_COLORS = ("#3b7dd8", "#d9822b", "#4c9f70", "#b3261e", "#b07aa1", "#c9a227", "#1f4e8c", "#8a8f98")
_REASONS = {
    "finished": "#4c9f70",
    "lease": "#6fa8dc",
    "preempted": "#d9822b",
    "killed": "#8a8f98",
    "failed": "#b3261e",
    "node failed": "#7a1a14",
}
_MAX_BARS = 4000
_MAX_POINTS = 500
_TICKS = {
    "1 s": 1,
    "10 s": 10,
    "1 min": 60,
    "10 min": 600,
    "1 h": 3600,
    "6 h": 21600,
    "1 d": 86400,
    "7 d": 604800,
    "30 d": 2592000,
    "1 y": 31536000,
}
_STYLE = """
table { font-size: .85rem } td, th { padding: .25rem 1rem .25rem 0; text-align: right; white-space: nowrap }
td:first-child, th:first-child { text-align: left }
"""


def write_page(results: Sequence[Result], title: str, path: Path, outcomes: Sequence[Outcome] = ()) -> None:
    """The page as one file, plotly.js included; with outcomes, also of what was set and what errors cost."""
    write_atomically(path, page(results, title, outcomes))


def page(results: Sequence[Result], title: str, outcomes: Sequence[Outcome] = ()) -> str:
    """The page as text."""
    first = results[0]
    about = f"{len(first.jobs):,} jobs on {first.size:,} GPUs of {len(first.machines):,} nodes"
    return whole_page(title, [about], _sections(results, outcomes), style=_STYLE)


def _sections(results: Sequence[Result], outcomes: Sequence[Outcome]) -> Iterator[tuple[str, str]]:
    yield "Policies", _table(results)
    if outcomes:
        yield "Settings", settings_table(outcomes[0].scenario)
        if errors := errors_table(outcomes):
            yield "What errors of estimates cost", errors
    yield "Utilisation", drawn(_utilization(results))
    yield "Jobs that wait", drawn(_queue(results))
    yield "Completion times", drawn(_completions(results))
    yield "Queueing", drawn(_waits(results))
    if len(results) > 1:
        yield "Job by job", _job_by_job(results)
    if any(trouble(result) for result in results):
        yield "Failures and limits", drawn(_failures(results))
    for result in results:
        yield f"GPUs under {html.escape(result.policy)}", drawn(_gantt(result)) + _note(result)


def figures(of: Metrics) -> dict[str, str]:
    """The figures of a policy for people."""
    return {
        "average JCT": format_seconds(of.average_jct_s),
        "median": format_seconds(of.median_jct_s),
        "p95": format_seconds(of.p95_jct_s),
        "p99": format_seconds(of.p99_jct_s),
        "queueing": format_seconds(of.average_queueing_s),
        "makespan": format_seconds(of.makespan_s),
        "utilisation": f"{of.utilization:.1%}",
        "fairness": f"{of.fairness:.2f}",
        "preemptions": f"{of.preemptions:,}",
        "lost GPU h": f"{(of.lost_gpu_s + of.overhead_gpu_s) / 3600:,.0f}",
        **({} if of.cost is None else {"cost": format_dollars(of.cost)}),
        **({} if of.energy_kwh is None else {"energy": f"{of.energy_kwh:,.0f} kWh"}),
        **({} if not of.killed else {"killed": f"{of.killed:,}"}),
        **({} if of.missed_deadlines is None else {"late": f"{of.missed_deadlines:,.1f}".removesuffix(".0")}),
    }


def _table(results: Sequence[Result]) -> str:
    every = {result.policy: figures(metrics(result)) for result in results}
    heads = list(dict.fromkeys(name for row in every.values() for name in row))
    rows = [[policy, *(row.get(name, "0") for name in heads)] for policy, row in every.items()]
    return table(("policy", *heads), rows)


def _utilization(results: Sequence[Result]) -> Any:
    figure = _figure("time in h", "GPUs held, %")
    figure.update_yaxes(range=[0, 103])
    for place, result in enumerate(results):
        times, held = utilization_over_time(result, _MAX_POINTS)
        _add_line(figure, (times / 3600).round(3), (held * 100).round(2), result.policy, place, "hv")
    return figure


def _queue(results: Sequence[Result]) -> Any:
    figure = _figure("time in h", "jobs that wait")
    for place, result in enumerate(results):
        times, waiting = queue_over_time(result, _MAX_POINTS)
        _add_line(figure, (times / 3600).round(3), waiting, result.policy, place, "hv")
    return figure


def _failures(results: Sequence[Result]) -> Any:
    figure = _figure("time in h", "stretches that ended so")
    for place, result in enumerate(results):
        for reason, moments in trouble(result).items():
            shown = moments[:: max(1, len(moments) // _MAX_POINTS)]
            counts = np.searchsorted(moments, shown, side="right").astype(float)
            _add_line(figure, (shown / 3600).round(3), counts, f"{result.policy}: {reason}", place, "hv")
    return figure


def _job_by_job(results: Sequence[Result]) -> str:
    """Every policy against every other, one of them chosen by buttons; and in words, against the first."""
    figure = _figure("completion time of a job over that under the policy chosen", "share of jobs, %")
    figure.update_xaxes(type="log")
    for base in results:
        for place, result in enumerate(results):
            if result is not base:
                ratio, _ = against(result, base)
                shares = np.linspace(0.0, 100.0, min(_MAX_POINTS, len(ratio)) + 1)
                _add_line(
                    figure,
                    np.percentile(ratio, shares).round(4),
                    shares.round(2),
                    result.policy,
                    place,
                    "linear",
                )
    each = len(results) - 1
    figure.update_traces(visible=False)
    for trace in figure.data[:each]:
        trace.visible = True
    figure.update_layout(
        **menu([f"against {one.policy}" for one in results], [each] * len(results)),
    )
    words = [against(result, results[0])[1] for result in results[1:]]
    lines = "<br>".join(html.escape(line) for line in words)
    return f'<p class="dim">{lines}</p>' + drawn(figure)


def _completions(results: Sequence[Result]) -> Any:
    return _cdfs("job completion time", results, [result.completion_s for result in results])


def _waits(results: Sequence[Result]) -> Any:
    title = "time from arrival to the first start (1 s and less at the left)"
    return _cdfs(title, results, [np.maximum(result.start_s - result.arrival_s, 1.0) for result in results])


def _cdfs(title: str, results: Sequence[Result], columns: Sequence[Column]) -> Any:
    figure = _figure(title, "share of jobs, %")
    figure.update_xaxes(type="log", tickvals=list(_TICKS.values()), ticktext=list(_TICKS))
    for place, (result, values) in enumerate(zip(results, columns, strict=True)):
        shares = np.linspace(0.0, 100.0, min(_MAX_POINTS, len(values)) + 1)
        times = np.percentile(values, shares).round(3)
        _add_line(figure, times, shares.round(2), result.policy, place, "linear")
    return figure


def _add_line(figure: Any, x: Column, y: Column, name: str, place: int, shape: str) -> None:
    line = {"width": 1.5, "shape": shape, "color": _COLORS[place % len(_COLORS)]}
    figure.add_scatter(x=x, y=y, name=name, mode="lines", line=line)


def _gantt(result: Result) -> Any:
    """The longest stretches, a row per GPU."""
    figure = _figure("time in h", "")
    longest = sorted(result.segments, key=lambda segment: segment.start_s - segment.end_s)
    bars = [(segment, place) for segment in longest[:_MAX_BARS] for place in segment.allocation.places()]
    del bars[_MAX_BARS:]
    ways: dict[str, Callable[[Segment], str]] = {"how it ended": lambda segment: segment.reason}
    for field, names in colourings(result).items():
        ways[field] = functools.partial(name_of, names)
    counts: list[int] = []
    for way, name in ways.items():
        named: dict[str, list[tuple[Segment, tuple[int, int]]]] = {}
        for segment, place in bars:
            named.setdefault(name(segment), []).append((segment, place))
        order = _REASONS if way == "how it ended" else dict(zip(sorted(named), _COLORS, strict=False))
        shown = [each for each in order if each in named]
        for each in shown:
            _add_bars(figure, result, each, order[each], named[each], visible=not counts)
        counts.append(len(shown))
    if len(ways) > 1:
        figure.update_layout(**menu(list(ways), counts))
    rows = sorted({place for _, place in bars}, reverse=True)
    figure.update_layout(
        barmode="overlay",
        height=min(1400, 160 + 14 * len(rows)),
        bargap=0.1,
        legend_title_text="stretches by:",
    )
    names = [f"{node}:{gpu}" for node, gpu in rows]
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=names, title="node:GPU")
    return figure


def _add_bars(
    figure: Any,
    result: Result,
    name: str,
    color: str,
    bars: Sequence[tuple[Segment, tuple[int, int]]],
    *,
    visible: bool,
) -> None:
    figure.add_bar(
        orientation="h",
        name=name or "none",
        visible=visible,
        marker={"color": color, "line": {"width": 0.3, "color": "#fff"}},
        base=[round(segment.start_s / 3600, 4) for segment, _ in bars],
        x=[round((segment.end_s - segment.start_s) / 3600, 4) for segment, _ in bars],
        y=[f"{node}:{gpu}" for _, (node, gpu) in bars],
        hovertext=[result.jobs[segment.job].name for segment, _ in bars],
        hoverinfo="text+name",
    )


def _note(result: Result) -> str:
    count = sum(segment.allocation.gpus for segment in result.segments)
    note = f'<p class="dim">The {_MAX_BARS:,} longest of {count:,} stretches.</p>'
    return note if count > _MAX_BARS else ""


def _figure(x: str, y: str) -> Any:
    figure = graph_objects().Figure()
    figure.update_layout(
        template="plotly_white",
        height=360,
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    )
    figure.update_xaxes(title=x)
    figure.update_yaxes(title=y)
    return figure
