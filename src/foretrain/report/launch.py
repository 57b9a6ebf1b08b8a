"""Shows what was read from launch files: what it means for the job, what not, and what is assumed."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from foretrain.launchers import Launch
from foretrain.launchers.settings import Setting

_MOST = 12
"""Of settings that change nothing, how many are named."""
_WIDEST = 64


def launch_tables(launch: Launch) -> list[RenderableType]:
    """Lay out what each setting decides, file by file, and lines for the others."""
    by_file: dict[str, Table] = {}
    for understood in launch.understood:
        file, _, line = understood.setting.where.partition(":")
        if file not in by_file:
            by_file[file] = Table(title=file, title_justify="left", box=None)
            by_file[file].add_column("line", justify="right")
            by_file[file].add_column("setting", overflow="fold")
            by_file[file].add_column("field of the job", overflow="fold")
        by_file[file].add_row(line, _short(understood.setting.words), understood.field)
    lines = [
        _line("not known", launch.unknown, None),
        _line("not modelled", launch.unmodelled, None),
        _line("changes nothing", launch.ignored, _MOST),
        *(Text(f"assumed: {understood}") for understood in launch.assumed),
    ]
    return [*by_file.values(), *(line for line in lines if line is not None), Text("")]


def _short(words: str) -> str:
    return words if len(words) <= _WIDEST else f"{words[: _WIDEST - 3]}..."


def _line(title: str, settings: Iterable[Setting], most: int | None) -> Text | None:
    """The settings in one line; where they stand, unless they change nothing."""
    listed = list(settings)
    if not listed:
        return None
    words = [one.key if most else f"{one.words} ({one.where})" for one in listed]
    more = f" and {len(words) - most} more" if most is not None and len(words) > most else ""
    return Text(f"{title}: {', '.join(words[:most])}{more}")
