"""Lays forecasts out for the terminal: the summary, the breakdown, and why two of them differ."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from foretrain.forecast import Forecast
from foretrain.report import figures
from foretrain.report.breakdown import What, breakdown, device_time
from foretrain.report.explain import ComparedParts, Explanation, signed
from foretrain.report.tables import table
from foretrain.units import format_bytes, format_seconds

_LABEL_WIDTH, _VALUE_WIDTH, _PART_WIDTH, _BAR_WIDTH = 17, 18, 15, 24
_MOST_FIELDS = 12
_MOST_NOTES = 10
"""Assumptions that are shown without being asked for."""
_VERDICT_STYLES: dict[figures.Verdict, str] = {
    "yes": "bold green",
    "perhaps": "bold yellow",
    "no": "bold red",
}


def summary(forecast: Forecast, *, all_notes: bool = False) -> RenderableType:
    """Time and what it goes to, throughput, what bounds the step, memory, the whole training, and the
    assumptions: all of them, or those that matter most."""
    job, layout = forecast.job, _Layout(forecast)
    parts: list[RenderableType] = [
        Text(figures.describe_model(job), style="bold"),
        *([Text(work)] if (work := figures.describe_work(forecast)) else []),
        Text(figures.describe_cluster(job)),
        Text(),
    ]
    parts += _step(forecast, layout)
    memory = list(_memory(forecast, layout))
    parts += [Text(), *memory] if memory else []
    training = list(figures.training_figures(forecast))
    parts += [Text(), layout.grid(training)] if training else []
    parts += [Text(), _notes(figures.notes(forecast), None if all_notes else _MOST_NOTES)]
    return Group(*parts)


def _notes(notes: Sequence[str], most: int | None) -> Table:
    """Lay notes out one below the other; beyond ``most`` they are counted."""
    if most is not None and len(notes) > most:
        hidden = len(notes) - most + 1
        notes = [*notes[: most - 1], f"{hidden} more assumptions: --assumptions shows them, --json has them"]
    table = Table.grid(padding=(0, 1, 0, 0))
    for note in notes:
        table.add_row(Text("-", style="dim"), Text(note, style="dim"))
    return table


def breakdown_table(forecast: Forecast, grouping: What, *, depth: int | None = None) -> RenderableType:
    """The twenty largest parts of the step's device time."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(grouping, overflow="fold")
    for heading in ("time", "share", "cumulated"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in breakdown(forecast, grouping, depth=depth):
        table.add_row(Text(row.name), format_seconds(row.time_s), f"{row.share:.1%}", f"{row.cumulated:.1%}")
    return Group(Text(f"device time of a step by {grouping}: {device_time(forecast)}", style="bold"), table)


def _step(forecast: Forecast, layout: _Layout) -> Iterator[RenderableType]:
    time = figures.step_figure(forecast)
    if time is not None:
        yield layout.grid([time])
    yield layout.bars(figures.step_parts(forecast), format_seconds)
    yield layout.grid(figures.rate_figures(forecast))
    if forecast.bound:
        yield layout.line("bound by", Text(forecast.bound))


def _memory(forecast: Forecast, layout: _Layout) -> Iterator[RenderableType]:
    for number, figure in enumerate(figures.memory_figures(forecast)):
        yield layout.grid([figure])
        if number == 0:
            yield layout.bars(figures.category_sizes(forecast), format_bytes)
            moment = figures.peak_moment(forecast)
            yield from [] if moment is None else [layout.line(moment.label, Text(moment.value))]
    stages = figures.stage_sizes(forecast)
    if stages:
        yield layout.line("peak by stage", Columns([Text(stage) for stage in stages], padding=(0, 2)))
    verdict = figures.fits(forecast)
    if verdict is not None:
        yield layout.line(verdict[1].label, Text(verdict[1].value, style=_VERDICT_STYLES[verdict[0]]))
    for one in figures.recomputation(forecast):
        yield layout.grid([one])
    for one in figures.remedies(forecast):
        cost = Text(f" ({one.detail})" if one.detail else "", style="dim")
        yield layout.line(one.label, Text(one.value, style="bold") + cost)


class _Layout:
    """Label, value and detail at the same places in every block of a summary."""

    def __init__(self, forecast: Forecast) -> None:
        labels = [
            figure.label for figure in (*figures.rate_figures(forecast), *figures.memory_figures(forecast))
        ]
        labels += [f"  {name}" for name in figures.step_parts(forecast)]
        self.label_width = max(_LABEL_WIDTH, *map(len, labels), 0)

    def grid(self, rows: Iterable[figures.Figure]) -> Table:
        table = self._columns()
        for row in rows:
            table.add_row(Text(row.label), Text(row.value, style="bold"), Text(row.detail, style="dim"))
        return table

    def bars(self, parts: Mapping[str, float], form: Callable[[float], str]) -> Table:
        table, total = self._columns(), sum(parts.values())
        for name, size in parts.items():
            bar = ProgressBar(
                total=total, completed=size, width=_BAR_WIDTH, complete_style="cyan", finished_style="cyan"
            )
            value, share = form(size), f"{size / total:.0%}"
            gap = max(1, _PART_WIDTH - len(value) - len(share))
            table.add_row(Text(f"  {name}"), Text(f"{value}{' ' * gap}{share}"), bar)
        return table

    def line(self, label: str, value: RenderableType) -> Table:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(min_width=self.label_width, no_wrap=True)
        table.add_column()
        table.add_row(Text(label), value)
        return table

    def _columns(self) -> Table:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(min_width=self.label_width, no_wrap=True)
        table.add_column(min_width=_VALUE_WIDTH, no_wrap=True)
        table.add_column()
        return table


# Two forecasts


def explanation(explained: Explanation) -> RenderableType:
    """The sentences, what the jobs have different, and the tables of time and memory."""
    parts: list[RenderableType] = [
        Text(sentence, style="" if number else "bold") for number, sentence in enumerate(explained.sentences)
    ]
    parts.append(Text())
    for name, forecast in (("A", explained.a), ("B", explained.b)):
        parts.append(
            Text(
                f"{name}  {figures.describe_model(forecast.job)}, {figures.describe_cluster(forecast.job)}",
                style="dim",
            )
        )
    parts += _fields(explained)
    parts += [Text(), _changes("where a step goes", explained.time, format_seconds)]
    if explained.memory.parts:
        ranks = any(forecast.job.cluster.world_size > 1 for forecast in (explained.a, explained.b))
        parts.append(
            _changes(
                "memory of the fullest rank" if ranks else "memory by category",
                explained.memory,
                format_bytes,
            )
        )
    return Group(*parts)


def _fields(explanation: Explanation) -> Iterator[RenderableType]:
    listed = list(explanation.fields.items())
    if listed:
        yield Text("from A to B", style="dim")
    for name, (a, b) in listed[:_MOST_FIELDS]:
        yield Text(f"   {name}: {_value(a)} -> {_value(b)}")
    if len(listed) > _MOST_FIELDS:
        yield Text(f"   ({len(listed) - _MOST_FIELDS} more fields differ)")


def _value(field: object) -> str:
    return "(not given)" if field is None else str(field)


def _changes(title: str, changes: ComparedParts, form: Callable[[float], str]) -> RenderableType:
    by = functools.partial(signed, form)
    rows = []
    for part in (*changes.parts, changes.whole):
        share = changes.share(part)
        rows.append(
            [
                part.name,
                form(part.a),
                form(part.b),
                by(part.difference),
                "" if share is None else f"{share:.0%}",
            ]
        )
    return table((title, "A", "B", "difference", "share"), rows, right=("A", "B", "difference", "share"))
