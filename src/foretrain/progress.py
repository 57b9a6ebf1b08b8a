"""Lets work deep inside say what it does, to whoever listens: a command that shows it on a terminal.

Nobody listens by default, and then a call costs next to nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

Listener = Callable[[str, int | None, int | None], None]
"""Hears what is done now and, where it is known, how many of how many parts are done."""

_listeners: list[tuple[Listener | None]] = []


def tell(words: str, done: int | None = None, total: int | None = None) -> None:
    """Say what is done now: ``tell("trials of xgboost", 12, 50)``; nothing any more: ``tell("")``."""
    if is_heard():
        (listener,) = _listeners[-1]
        assert listener is not None
        listener(words, done, total)


def is_heard() -> bool:
    """Whether it is worth while to find the words."""
    return bool(_listeners) and _listeners[-1][0] is not None


@contextlib.contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Hear what the block does, in the place of whoever listened before; None mutes it."""
    entry = (listener,)
    _listeners.append(entry)
    try:
        yield
    finally:  # blocks of generators may end in another order than they began
        del _listeners[next(i for i, one in enumerate(_listeners) if one is entry)]
