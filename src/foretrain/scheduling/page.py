"""Results of policies on one trace in; one HTML page that needs no network out: figures, utilisation, a Gantt view and CDFs."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foretrain.errors import ForetrainError
from foretrain.files import write_atomically
from foretrain.scheduling.metrics import Metrics, metrics, utilization_over_time
from foretrain.scheduling.result import Column, Result
from foretrain.units import format_dollars, format_seconds

_COLORS = ("#3b7dd8", "#d9822b", "#4c9f70", "#b3261e", "#b07aa1", "#c9a227", "#1f4e8c", "#8a8f98")
_REASONS = {
    "finished": "#4c9f70",
    "lease": "#6fa8dc",
    "preempted": "#d9822b",
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
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; background: #fff; margin: 0 }
main { max-width: 1100px; margin: 2rem auto; padding: 0 1.5rem }
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
table { border-collapse: collapse; font-size: .85rem } td, th { padding: .25rem 1rem .25rem 0; text-align: right; white-space: nowrap } td:first-child, th:first-child { text-align: left }
tr { border-bottom: 1px solid #e6e9ee } .dim { color: #69727f }
"""


def write_page(results: Sequence[Result], title: str, path: Path) -> None:
    """The page as one file, plotly.js included."""
    write_atomically(path, page(results, title))


def page(results: Sequence[Result], title: str) -> str:
    """The page as text."""
    offline, _ = _plotly()
    # Only maps fetch anything, and none is drawn: without their addresses the page names no other host to load from.
    script = offline.get_plotlyjs().replace("https://cdn.", "https://offline.invalid/")
    first = results[0]
    about = f"{len(first.jobs):,} jobs on {first.size:,} GPUs of {len(first.machines):,} nodes"
    body = "\n".join(
        f"<section><h2>{heading}</h2>\n{content}</section>" for heading, content in _sections(results)
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>foretrain: {html.escape(title)}</title><style>{_STYLE}</style><script>{script}</script></head>\n<body><main>\n"
        f"<h1>{html.escape(title)}</h1><p>{html.escape(about)}</p>\n{body}\n</main></body></html>\n"
    )


def _sections(results: Sequence[Result]) -> Iterator[tuple[str, str]]:
    yield "Policies", _table(results)
    yield "Utilisation", _drawn(_utilization(results))
    yield "Completion times", _drawn(_distribution(results, "completion_s", "job completion time"))
    yield "Queueing", _drawn(_waits(results))
    for result in results:
        yield f"GPUs under {html.escape(result.policy)}", _drawn(_gantt(result)) + _note(result)


def figures(found: Metrics) -> dict[str, str]:
    """The figures of a policy for people."""
    return {
        "average JCT": format_seconds(found.average_jct_s),
        "median": format_seconds(found.median_jct_s),
        "p95": format_seconds(found.p95_jct_s),
        "p99": format_seconds(found.p99_jct_s),
        "queueing": format_seconds(found.average_queueing_s),
        "makespan": format_seconds(found.makespan_s),
        "utilisation": f"{found.utilization:.1%}",
        "fairness": f"{found.fairness:.2f}",
        "preemptions": f"{found.preemptions:,}",
        "lost GPU h": f"{(found.lost_gpu_s + found.overhead_gpu_s) / 3600:,.0f}",
        **({} if found.cost is None else {"cost": format_dollars(found.cost)}),
    }


def _table(results: Sequence[Result]) -> str:
    rows = {result.policy: figures(metrics(result)) for result in results}
    heads = next(iter(rows.values()))
    heading = "".join(f"<th>{html.escape(name)}</th>" for name in ("policy", *heads))
    cells = "\n".join(
        f"<tr><td>{html.escape(policy)}</td>"
        + "".join(f"<td>{html.escape(value)}</td>" for value in row.values())
        + "</tr>"
        for policy, row in rows.items()
    )
    return f"<table><tr>{heading}</tr>\n{cells}</table>"


def _utilization(results: Sequence[Result]) -> Any:
    figure = _figure("time in h", "GPUs held, %")
    figure.update_yaxes(range=[0, 103])
    for place, result in enumerate(results):
        times, held = utilization_over_time(result, _MAX_POINTS)
        figure.add_scatter(
            x=(times / 3600).round(3),
            y=(held * 100).round(2),
            name=result.policy,
            mode="lines",
            line=_line(place, "hv"),
        )
    return figure


def _distribution(results: Sequence[Result], column: str, title: str) -> Any:
    figure = _figure(title, "share of jobs, %")
    figure.update_xaxes(type="log", tickvals=list(_TICKS.values()), ticktext=list(_TICKS))
    for place, result in enumerate(results):
        _cdf(figure, getattr(result, column), result.policy, place)
    return figure


def _waits(results: Sequence[Result]) -> Any:
    figure = _figure("time from arrival to the first start (1 s and less at the left)", "share of jobs, %")
    figure.update_xaxes(type="log", tickvals=list(_TICKS.values()), ticktext=list(_TICKS))
    for place, result in enumerate(results):
        _cdf(figure, np.maximum(result.start_s - result.arrival_s, 1.0), result.policy, place)
    return figure


def _cdf(figure: Any, values: Column, name: str, place: int) -> None:
    shares = np.linspace(0.0, 100.0, min(_MAX_POINTS, len(values)) + 1)
    figure.add_scatter(
        x=np.percentile(values, shares).round(3),
        y=shares.round(2),
        name=name,
        mode="lines",
        line=_line(place, "linear"),
    )


def _gantt(result: Result) -> Any:
    """The longest stretches, a row per GPU."""
    figure = _figure("time in h", "")
    longest = sorted(result.segments, key=lambda segment: segment.start_s - segment.end_s)
    bars = [(segment, place) for segment in longest[:_MAX_BARS] for place in segment.allocation.places()][
        :_MAX_BARS
    ]
    for reason, color in _REASONS.items():
        mine = [(segment, place) for segment, place in bars if segment.reason == reason]
        if mine:
            figure.add_bar(
                orientation="h", name=reason, marker_color=color, marker_line_width=0.3, marker_line_color="#fff",
                base=[round(segment.start_s / 3600, 4) for segment, _ in mine],
                x=[round((segment.end_s - segment.start_s) / 3600, 4) for segment, _ in mine],
                y=[f"{node}:{gpu}" for _, (node, gpu) in mine],
                hovertext=[result.jobs[segment.job].name for segment, _ in mine], hoverinfo="text+name",
            )  # fmt: skip
    rows = sorted({place for _, place in bars}, reverse=True)
    figure.update_layout(
        barmode="overlay",
        height=min(1400, 160 + 14 * len(rows)),
        bargap=0.1,
        legend_title_text="how a stretch ended:",
    )
    names = [f"{node}:{gpu}" for node, gpu in rows]
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=names, title="node:GPU")
    return figure


def _note(result: Result) -> str:
    count = sum(segment.allocation.gpus for segment in result.segments)
    return (
        f'<p class="dim">The {_MAX_BARS:,} longest of {count:,} stretches.</p>' if count > _MAX_BARS else ""
    )


def _line(place: int, shape: str) -> dict[str, Any]:
    return {"width": 1.5, "shape": shape, "color": _COLORS[place % len(_COLORS)]}


def _figure(x: str, y: str) -> Any:
    _, objects = _plotly()
    figure = objects.Figure()
    figure.update_layout(
        template="plotly_white",
        height=360,
        margin={"l": 60, "r": 20, "t": 20, "b": 50},
        legend={"orientation": "h", "y": 1.1},
    )
    figure.update_xaxes(title=x)
    figure.update_yaxes(title=y)
    return figure


def _drawn(figure: Any) -> str:
    text: str = figure.to_html(
        full_html=False, include_plotlyjs=False, config={"displaylogo": False, "responsive": True}
    )
    return text


def _plotly() -> tuple[Any, Any]:
    try:
        import plotly.graph_objects as objects
        import plotly.offline as offline
    except ImportError as error:
        raise ForetrainError("html: plotly is not installed; install foretrain[report]") from error
    return offline, objects
