"""Ends work on SIGTERM as on Ctrl-C: by a KeyboardInterrupt, so that what was begun is put in order."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator

_SAME_S = 1.0
"""A signal so soon after another is the same request: GNU timeout, for one, sends two."""


class _Sigterm:
    """Keeps when it was last heard; Ray, for one, makes exceptions of its own of those that handlers
    raise."""

    heard_s = -math.inf


def exit_code() -> int:
    """Give what a program that a KeyboardInterrupt ends returns to the shell: 128 and the number of the
    signal."""
    return 128 + (signal.SIGTERM if _Sigterm.heard_s > -math.inf else signal.SIGINT)


@contextlib.contextmanager
def ended_as_interrupted() -> Iterator[None]:
    """SIGTERM raises ``KeyboardInterrupt`` in the block, unless it is ignored or somebody else answers it.

    SIGINT stays as it is: a background job of a shell, which ignores it, goes on when others are interrupted.
    """
    on_main = threading.current_thread() is threading.main_thread()
    if not on_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    _Sigterm.heard_s = -math.inf

    def interrupt(*_: object) -> None:
        before, _Sigterm.heard_s = _Sigterm.heard_s, time.monotonic()
        if _Sigterm.heard_s - before > _SAME_S:
            raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:  # of a program that is ending
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def is_interrupt(error: BaseException | None) -> bool:
    """Whether an exception stands for Ctrl-C: Python 3.11, for one, makes another of what is raised while a
    class is made, as when it comes while torch is imported."""
    seen: set[int] = set()  # causes may go round in a circle
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def sigterm_kept() -> Iterator[None]:
    """Let who answers SIGTERM before the block answer it after, whatever a library sets meanwhile."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and callable(before):
            signal.signal(signal.SIGTERM, before)
