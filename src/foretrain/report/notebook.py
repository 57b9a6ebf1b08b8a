"""Draws a forecast where it is an object in Python: as text, and as the table that notebooks show."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console, RenderableType

from foretrain.forecast import Forecast
from foretrain.report import figures
from foretrain.report.text import summary
from foretrain.units import format_bytes, format_seconds

_WIDTH = 100
_STYLE = ".foretrain td { text-align: left } .foretrain .dim { opacity: .6 } .part { padding-left: 1em }"


def to_text(forecast: Forecast) -> str:
    """The summary that the command line prints, without colours."""
    return printed(summary(forecast))


def printed(content: RenderableType) -> str:
    """Text as on a terminal, without colours."""
    written = io.StringIO()
    console = Console(
        file=written, width=_WIDTH, color_system=None, highlight=False, markup=False, emoji=False
    )
    console.print(content)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def to_html(forecast: Forecast) -> str:
    """The figures of the summary; the assumptions can be opened below them."""
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in figures.notes(forecast))
    return (
        f"<style>{_STYLE}</style><div class='foretrain'>"
        f"<b>{html.escape(figures.describe_model(forecast.job))}</b><br>"
        f"{html.escape(figures.describe_cluster(forecast.job))}\n"
        f"{summary_table(forecast)}"
        f"<details><summary>assumptions</summary><ul>{notes}</ul></details></div>"
    )


def summary_table(forecast: Forecast) -> str:
    """The figures of a forecast, a row each."""
    time = figures.step_figure(forecast)
    rows = [time] if time else []
    rows += _share_rows(figures.step_parts(forecast), format_seconds)
    rows += figures.rate_figures(forecast)
    rows += [figures.Figure("bound by", forecast.bound)] if forecast.bound else []
    memory = list(figures.memory_figures(forecast))
    rows += memory[:1]
    rows += _share_rows(figures.category_sizes(forecast), format_bytes)
    moment = figures.peak_moment(forecast)
    rows += [moment] if moment else []
    rows += memory[1:]
    stages = figures.stage_sizes(forecast)
    rows += [figures.Figure("peak by stage", ", ".join(stages))] if stages else []
    verdict = figures.fits(forecast)
    rows += [verdict[1]] if verdict else []
    rows += figures.recomputation(forecast)
    rows += figures.remedies(forecast)
    rows += figures.training_figures(forecast)
    return f"<table>{''.join(_table_row(row) for row in rows)}</table>"


def _share_rows(parts: Mapping[str, float], form: Callable[[float], str]) -> Iterator[figures.Figure]:
    total = sum(parts.values())
    return (figures.Figure(f"  {name}", form(size), f"{size / total:.0%}") for name, size in parts.items())


def _table_row(row: figures.Figure) -> str:
    label = html.escape(row.label.strip())
    indent = ' class="part"' if row.label.startswith(" ") else ""
    value, detail = html.escape(row.value), html.escape(row.detail)
    return f'<tr><td{indent}>{label}</td><td><b>{value}</b></td><td class="dim">{detail}</td></tr>\n'
