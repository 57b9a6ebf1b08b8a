"""Shows renderables and progress: coloured and as wide as the terminal, or 100 columns of plain text."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console, RenderableType


def show(*parts: RenderableType) -> None:
    """Print to stdout."""
    console = _console()
    for part in parts:
        console.print(part)


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar with the time left, on stderr, moved by calls with how many are done of how many; nothing without
    a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _console(*, stderr: bool = False) -> Console:
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, width=None if terminal else 100, highlight=False, markup=False, emoji=False)
