"""Keeps what was worked out: the last of it up to a size in all, or of one object until it is copied."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Fresh(dict[Any, Any]):
    """A dictionary that begins empty in every copy: what it holds is known by objects that are not copied.

    >>> import copy
    >>> copy.deepcopy(Fresh(one=1)), Fresh(one=1)
    ({}, {'one': 1})
    """

    def __reduce__(self) -> tuple[type[Fresh], tuple[()]]:
        return Fresh, ()


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
        """Give what is kept under a key, or what ``make`` gives, which is kept then."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]
        value = make()
        with self._lock:
            if key not in self._kept:
                self._kept[key] = value, size(value)
                self._size += self._kept[key][1]
            while self._size > self._most and len(self._kept) > 1:
                _, (_, gone) = self._kept.popitem(last=False)
                self._size -= gone
        return value
