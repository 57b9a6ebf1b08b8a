"""Draws a forecast where it is an object in Python: as text, and as the table that notebooks show."""

from __future__ import annotations

import html
import io

from rich.console import Console, RenderableType

from foretrain.forecast import Forecast
from foretrain.report import figures
from foretrain.report.html import summary_table
from foretrain.report.text import summary

_WIDTH = 100
_STYLE = ".foretrain td { text-align: left } .foretrain .dim { opacity: .6 } .part { padding-left: 1em }"


def to_text(forecast: Forecast) -> str:
    """The summary that the command line prints, without colours."""
    return printed(summary(forecast))


def printed(what: RenderableType) -> str:
    """Text as on a terminal, without colours."""
    written = io.StringIO()
    console = Console(
        file=written, width=_WIDTH, color_system=None, highlight=False, markup=False, emoji=False
    )
    console.print(what)
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
