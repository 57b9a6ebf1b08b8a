"""A Forecast in; Rich renderables for the terminal out: the summary and the breakdown tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from foretrain.forecast import Forecast
from foretrain.report import figures
from foretrain.report.breakdown import What, breakdown
from foretrain.units import format_bytes, format_seconds

_LABEL_WIDTH, _VALUE_WIDTH, _BAR_WIDTH = 17, 18, 24
_VERDICT_STYLES: dict[figures.Verdict, str] = {"yes": "bold green", "perhaps": "bold yellow", "no": "bold red"}


def summary(forecast: Forecast) -> RenderableType:
    """Time, throughput, what bounds the step, memory, the whole training, and the assumptions."""
    job = forecast.job
    parts: list[RenderableType] = [Text(figures.describe_model(job), style="bold"), Text(figures.describe_cluster(job)), Text()]
    parts.append(_grid(figures.step_figures(forecast)))
    if forecast.bound:
        parts.append(_line("bound by", Text(forecast.bound)))
    memory = _memory(forecast)
    parts += [Text(), *memory] if memory else []
    training = list(figures.training_figures(forecast))
    parts += [Text(), _grid(training)] if training else []
    parts += [Text(), *(Text(f"- {note}", style="dim") for note in figures.notes(forecast))]
    return Group(*parts)


def breakdown_table(forecast: Forecast, what: What, *, depth: int | None = None) -> RenderableType:
    """The twenty largest parts of the step's device time."""
    table = Table(box=box.SIMPLE_HEAD, title=f"device time of a step by {what}", title_justify="left", title_style="bold", pad_edge=False)
    table.add_column(what, overflow="fold")
    for heading in ("time", "share", "cumulated"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in breakdown(forecast, what, depth=depth):
        table.add_row(Text(row.name), format_seconds(row.time_s), f"{row.share:.1%}", f"{row.cumulated:.1%}")
    return table


def _memory(forecast: Forecast) -> list[RenderableType]:
    sizes = figures.category_sizes(forecast)
    total = sum(sizes.values())
    parts: list[RenderableType] = []
    for number, figure in enumerate(figures.memory_figures(forecast)):
        parts.append(_grid([figure]))
        if number == 0 and sizes:
            parts.append(_bars(sizes, total))
    verdict = figures.fits(forecast)
    if verdict is not None:
        parts.append(_line("fits", Text(verdict[1], style=_VERDICT_STYLES[verdict[0]])))
    return parts


def _grid(rows: Iterable[figures.Figure]) -> Table:
    table = _columns()
    for row in rows:
        table.add_row(Text(row.label), Text(row.value, style="bold"), Text(row.detail, style="dim"))
    return table


def _bars(sizes: dict[str, int], total: int) -> Table:
    table = _columns()
    for name, size in sizes.items():
        bar = ProgressBar(total=total, completed=size, width=_BAR_WIDTH, complete_style="cyan", finished_style="cyan")
        table.add_row(Text(f"  {name}"), Text(f"{format_bytes(size):<11}{size / total:>4.0%}"), bar)
    return table


def _columns() -> Table:
    """Label, value and detail at the same places in every block of the summary."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=_LABEL_WIDTH, no_wrap=True)
    table.add_column(min_width=_VALUE_WIDTH, no_wrap=True)
    table.add_column()
    return table


def _line(label: str, value: Text) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=_LABEL_WIDTH, no_wrap=True)
    table.add_column()
    table.add_row(Text(label), value)
    return table
