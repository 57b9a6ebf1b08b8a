"""Keeps what was used last, up to a size in all."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Values by key; the ones not asked for longest go when all together are larger than ``most``.

    >>> recent = Recent[str](most=10)
    >>> [recent.get(key, lambda: "made", lambda value: 4) for key in (1, 2, 3)]
    ['made', 'made', 'made']
    >>> 1 in recent, 3 in recent
    (False, True)
    """

    def __init__(self, most: float) -> None:
        self._most, self._size = most, 0.0
        self._kept: OrderedDict[Hashable, tuple[T, float]] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def get(self, key: Hashable, make: Callable[[], T], size: Callable[[T], float]) -> T:
        """What is kept under a key, or what ``make`` gives, which is kept then."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]
        made = make()
        with self._lock:
            if key not in self._kept:
                self._kept[key] = made, size(made)
                self._size += self._kept[key][1]
            while self._size > self._most and len(self._kept) > 1:
                _, (_, gone) = self._kept.popitem(last=False)
                self._size -= gone
        return made
