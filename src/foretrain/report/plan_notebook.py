"""Draws plans where they are objects in Python: the ranking as a table of notebooks, the Pareto front as a
figure."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Any

from foretrain.forecast import Estimate
from foretrain.pages import graph_objects
from foretrain.planner.outcome import Option, Plans
from foretrain.report.plans import (
    cluster_words,
    nothing_lines,
    plan_words,
    verdicts,
)
from foretrain.units import format_dollars, format_seconds

_STYLE = """
td, th { padding: .25rem 1.2rem .25rem 0; text-align: left; vertical-align: top }
td.number, th.number { text-align: right } tr.first { background: #eef4fd }
"""
_FRONT, _OTHERS = "#1f4e8c", "#b8c0cc"
_HOURS = 3600.0
_KWH = 3.6e6


def to_html(plans: Plans) -> str:
    """Write what notebooks show: the ranking, and how sure it is."""
    return ranking(plans) + _list([*verdicts(plans), *nothing_lines(plans)])


def ranking(plans: Plans) -> str:
    """The options as a table."""
    length = len(plans) > 0 and plans[0].has_length
    names = ["", "cluster", "plan", "step", "80 % interval", *(["training"] if length else []), "cost"]
    names += ["memory", "late", "over budget"]
    rows = []
    for number, option in enumerate(plans, start=1):
        step, need = option.step_time_s, option.forecast.fullest
        cells = [
            str(number),
            cluster_words(option.job),
            plan_words(option.job),
            format_seconds(step.median),
            f"{format_seconds(step.low)} to {format_seconds(step.high)}",
            *([format_seconds(option.time_s.median)] if length else []),
            "unknown" if option.cost is None else format_dollars(option.cost.median),
            "" if need is None else f"{need.median / option.forecast.memory_capacity_bytes:.0%}",
            "" if option.late is None else f"{option.late:.0%}",
            "" if option.over_budget is None else f"{option.over_budget:.0%}",
        ]
        rows.append((cells, number == 1))
    return _table(names, rows, numbers_from=3)


def front_figure(plans: Plans) -> Any:
    """Time against cost, or against energy where no price is known, with intervals."""
    go = graph_objects()
    front = plans.front
    priced = all(option.cost is not None for option in front)
    others = [one for one in plans.by_cluster if isinstance(one, Option) and one not in front]
    figure = go.Figure()
    for name, options, color in (("others", others, _OTHERS), ("front", front, _FRONT)):
        shown = [option for option in options if _other(option, priced) is not None]
        if not shown:
            continue
        times = [option.time_s for option in shown]
        against = [one for option in shown if (one := _other(option, priced)) is not None]
        scale = 1.0 if priced else 1.0 / _KWH
        figure.add_trace(
            go.Scatter(
                x=[time.median / _HOURS for time in times],
                y=[one.median * scale for one in against],
                error_x=_errors([time * (1.0 / _HOURS) for time in times]),
                mode="lines+markers+text" if name == "front" else "markers",
                line={"dash": "dot", "color": color},
                marker={"size": 11, "color": color},
                text=[f"{option.devices}" for option in shown],
                textposition="top center",
                hovertext=[f"{cluster_words(one.job)}<br>{plan_words(one.job)}" for one in shown],
                name=name,
            )
        )
    figure.update_layout(
        xaxis={"title": "hours", "type": "log"},
        yaxis={"title": "dollars" if priced else "kWh", "type": "log"},
        height=420,
        margin={"t": 20},
    )
    return figure


def _other(option: Option, priced: bool) -> Estimate | None:
    return option.cost if priced else option.energy_j


def _errors(estimates: Sequence[Estimate]) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [one.high - one.median for one in estimates],
        "arrayminus": [one.median - one.low for one in estimates],
        "thickness": 1,
    }


def _table(names: Sequence[str], rows: Sequence[tuple[Sequence[str], bool]], *, numbers_from: int) -> str:
    def cell(tag: str, i: int, text: str) -> str:
        number = ' class="number"' if i >= numbers_from else ""
        return f"<{tag}{number}>{html.escape(text)}</{tag}>"

    def row(tag: str, texts: Sequence[str], first: bool = False) -> str:
        cells = "".join(cell(tag, i, text) for i, text in enumerate(texts))
        return f"<tr{' class=first' if first else ''}>{cells}</tr>"

    body = "".join(row("td", texts, first) for texts, first in rows)
    return f"<table>{row('th', names)}{body}</table>"


def _list(lines: Iterator[str] | Sequence[str]) -> str:
    return f'<ul class="dim">{"".join(f"<li>{html.escape(line)}</li>" for line in lines)}</ul>'
