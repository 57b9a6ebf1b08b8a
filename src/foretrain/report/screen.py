"""Shows renderables and progress: coloured and as wide as the terminal, or 100 columns of plain text."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from foretrain.progress import listening, tell
from foretrain.units import format_seconds

_LEAST_WIDTH = 60
"""Of tables: below it cells would be cut, so that a narrower terminal wraps them itself."""
_BAR = 50
"""Characters of a bar with its figures, but for what it is of."""


def show(*parts: RenderableType) -> None:
    """Print to stdout."""
    tell("")
    console = _console()
    for part in parts:
        console.print(part)


def width() -> int:
    """Characters that fit in a line of stdout."""
    return _console().width


@contextlib.contextmanager
def progress(noun: str) -> Iterator[Callable[[int, int], None]]:
    """A bar with the time left and what the block says that it does, on stderr, moved by calls with how many
    are done of how many; nothing without a terminal."""
    tell("")
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    words = TextColumn("{task.fields[now]}", "dim")
    columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn())
    console = _console(stderr=True)
    room = max(console.width - _BAR - len(noun), 0)
    with Progress(*columns, words, console=console, transient=True) as bar:
        task = bar.add_task(noun, total=None, now="")
        with listening(lambda now, done, total: bar.update(task, now=_counted(now, done, total)[:room])):
            yield lambda done, total: bar.update(task, completed=done, total=total)


def _counted(words: str, done: int | None, total: int | None) -> str:
    return f"{words}: {done or 0:,} of {total:,}" if total else words


@contextlib.contextmanager
def doing() -> Iterator[None]:
    """Show what the block says that it does (``progress.tell``), in a line on stderr that goes when it ends,
    with the time since it began and, where parts are counted, the time left; nothing without a terminal, nor
    where another program reads stdout: a pager would share the terminal."""
    if not (sys.stderr.isatty() and (sys.stdout.isatty() or _is_file(sys.stdout))):
        yield
        return
    line = _Doing()
    try:
        with listening(line.hear):
            yield
    finally:
        line.end()


class _Doing:
    """The line that says what is done; it appears when there is something to say."""

    def __init__(self) -> None:
        self._live: Any = None
        self._what, self._done, self._total = "", 0, 0
        self._began_s = self._counted_s = 0.0

    def hear(self, words: str, done: int | None, total: int | None) -> None:
        if not words:
            self.end()
            return
        now_s = time.monotonic()
        if done is not None and words != self._what:
            self._counted_s = now_s
        self._what, self._done, self._total = words, done or 0, total or 0
        if self._live is None:
            from rich.live import Live

            self._began_s = now_s
            self._live = Live(
                console=_console(stderr=True), transient=True, get_renderable=self.line, refresh_per_second=8
            )
            self._live.start()

    def line(self) -> Text:
        """``tracing: 1,240 operators, layer model.layers.12 (4 s)``."""
        now_s = time.monotonic()
        words = _counted(self._what, self._done, self._total)
        spent = [f"{now_s - self._began_s:.0f} s"]
        if self._done and self._total:
            left_s = (now_s - self._counted_s) / self._done * (self._total - self._done)
            spent.append(f"about {format_seconds(round(left_s))} left")
        text = Text(f"{words} ({', '.join(spent)})", style="dim", no_wrap=True, overflow="ellipsis")
        return text

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _is_file(stream: TextIO) -> bool:
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):  # a stream of no file
        return False


def _console(*, stderr: bool = False) -> Console:
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    console = Console(
        stderr=stderr, width=None if terminal else 100, highlight=False, markup=False, emoji=False
    )
    if console.width < _LEAST_WIDTH and not stderr:
        console.width = _LEAST_WIDTH
    return console
