"""Groups neighbouring items that a worker gets at once, and tells what becomes of them."""

from __future__ import annotations

import math
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

from foretrain.errors import InputError, first_line

Result = TypeVar("Result")
Load = Callable[[], tuple[Callable[..., Any], Any]]
"""The function and what is shared, where a worker has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Neighbouring items that a worker gets at once."""

    start: int
    items: Sequence[Any]
    tries: int = 1

    def again(self) -> list[Chunk]:
        """Take the chunk apart, so that an item that kills its worker does not cost its neighbours."""
        return [
            Chunk(start=self.start + i, items=[item], tries=self.tries + 1)
            for i, item in enumerate(self.items)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOutcome:
    """Holds what the items of a chunk gave, up to the first that raised an error; or why their worker was
    lost."""

    results: Sequence[Any] = ()
    error: Exception | None = None
    seconds: float = math.nan
    lost: str | None = None


def pack(value: Any) -> bytes:
    """Pack a value for another process of this program, as multiprocessing sends it; nothing of it is
    kept."""
    return bytes(ForkingPickler.dumps(value))


def unpack(packed: bytes) -> Any:
    return ForkingPickler.loads(packed)


def call(function: Callable[..., Result], shared: Any, item: Any) -> Result:
    return function(item) if shared is None else function(shared, item)


def work(load: Load, packed: bytes) -> bytes:
    """Work in a worker: on all items of a chunk.

    What cannot be loaded, or packed for the way back, is an error like any other.
    """
    results: list[Any] = []
    try:
        function, shared = _loaded(load)
        items = unpack(packed)
        begun = time.perf_counter()
        for item in items:
            results.append(call(function, shared, item))
        return pack(ChunkOutcome(results=results, seconds=time.perf_counter() - begun))
    except Exception as error:
        return _with_error(results, _portable(error))


def _loaded(load: Load) -> tuple[Callable[..., Any], Any]:
    try:
        return load()
    except Exception as error:
        raise InputError(
            f"a worker cannot load what it is to run ({type(error).__name__}: {first_line(error)})"
        ) from error


def _with_error(results: Sequence[Any], error: Exception) -> bytes:
    try:
        return pack(ChunkOutcome(results=results, error=error))
    except Exception:
        return pack(ChunkOutcome(error=error))


def _portable(error: Exception) -> Exception:
    """The error, with its traceback as a note, if it survives the way to another process; else its like."""
    error.add_note("".join(traceback.format_exception(error)).rstrip())
    try:
        same = unpack(pack(error))
    except Exception:
        same = None
    if type(same) is type(error):
        return error
    stand_in = RuntimeError(f"{type(error).__name__}: {first_line(error)}")
    stand_in.add_note(error.__notes__[-1])
    return stand_in


class Workers(ABC):
    """Runs chunks; nothing that it starts outlives ``close``."""

    @property
    @abstractmethod
    def slots(self) -> int:
        """Chunks that it takes at once."""

    @abstractmethod
    def begin(self, chunk: Chunk) -> None: ...

    @abstractmethod
    def ended(self, timeout_s: float | None) -> Sequence[tuple[Chunk, ChunkOutcome]]:
        """Chunks that have ended; waits for the first of them, at most so long."""

    @abstractmethod
    def drop(self) -> None:
        """End what still runs; nobody asks for it any more."""

    @abstractmethod
    def close(self) -> None: ...
