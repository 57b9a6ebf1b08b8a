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


def launch_tables(launch: Launch) -> list[RenderableType]:
    """What each setting decides, and lines for the others."""
    table = Table(title=f"{launch.framework}: {', '.join(launch.files)}", title_justify="left", box=None)
    for heading in ("setting", "value", "field of the job", "where"):
        table.add_column(heading)
    for one in launch.understood:
        table.add_row(one.setting.key, _short(one.setting.value), one.field, one.setting.where)
    lines = [
        _line("not known", launch.unknown, None),
        _line("not modelled", launch.unmodelled, None),
        _line("changes nothing", launch.ignored, _MOST),
        *(Text(f"assumed: {one}") for one in launch.assumed),
    ]
    return [table, *(line for line in lines if line is not None), Text("")]


def _short(value: object) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 48 else f"{text[:45]}..."


def _line(what: str, settings: Iterable[Setting], most: int | None) -> Text | None:
    """The settings in one line; where they stand, unless they change nothing."""
    listed = list(settings)
    if not listed:
        return None
    words = [one.key if most else f"{one.words} ({one.where})" for one in listed]
    more = f" and {len(words) - most} more" if most is not None and len(words) > most else ""
    return Text(f"{what}: {', '.join(words[:most])}{more}")
