"""Reads the settings of torch's CUDA allocator, in the notation of ``PYTORCH_CUDA_ALLOC_CONF``."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from foretrain.errors import invalid, unknown

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The environment variables that torch reads; of the newer name first."""
_MIB = 1 << 20
_SMALLEST_SPLIT_MB = 20
"""torch takes no limit on splitting up to the size of a usual segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """Holds what may be set of torch's caching allocator; the defaults are torch's.

    >>> AllocatorSettings.read("expandable_segments:True,max_split_size_mb:512")
    AllocatorSettings(expandable_segments=True, max_split_bytes=536870912, power2_divisions=0)
    """

    expandable_segments: bool = False
    """One segment for each pool, which grows at its end, instead of one for each large request."""
    max_split_bytes: float = math.inf
    """Larger blocks are not split, and serve only requests of nearly their size."""
    power2_divisions: int = 0
    """Sizes are rounded up to so many steps between powers of two; 0 for multiples of 512 bytes."""

    @classmethod
    def read(cls, text: str, field: str = "training.allocator") -> AllocatorSettings:
        """Read a text such as ``expandable_segments:True``; errors name the ``field``."""
        given: dict[str, float] = {}
        for part in filter(None, (one.strip() for one in text.split(","))):
            name, _, value = (one.strip() for one in part.partition(":"))
            if name not in _READERS:
                raise unknown(f"{field}.{name}", name, _READERS)
            low, high, words = _READERS[name]
            number = _number(value)
            if number is None or not low <= number <= high:
                raise invalid(f"{field}.{name}", value, words)
            given[name] = number
        divisions = int(given.get("roundup_power2_divisions", 0))
        if divisions & (divisions - 1):
            raise invalid(f"{field}.roundup_power2_divisions", divisions, "a power of two")
        split = given.get("max_split_size_mb")
        return cls(
            expandable_segments=bool(given.get("expandable_segments", False)),
            max_split_bytes=math.inf if split is None else int(split) * _MIB,
            power2_divisions=divisions,
        )


def set_in_environment(environment: Mapping[str, str] = os.environ) -> str | None:
    """Read the settings that a process is started with; None where they are torch's defaults."""
    return next((environment[name] for name in VARIABLES if environment.get(name)), None)


_READERS = {
    "expandable_segments": (0, 1, "True or False"),
    "max_split_size_mb": (_SMALLEST_SPLIT_MB + 1, math.inf, f"above {_SMALLEST_SPLIT_MB}"),
    "roundup_power2_divisions": (1, 64, "one power of two from 1 to 64"),
    "garbage_collection_threshold": (0, 1, "a share from 0 to 1"),
}
"""What is read: its least and largest value, and what is allowed in words. torch collects garbage above the
threshold only in a process that is given a share of the device, so that setting changes nothing here."""


def _number(value: str) -> float | None:
    words = {"true": 1.0, "false": 0.0}
    try:
        return words[value.lower()] if value.lower() in words else float(value)
    except ValueError:
        return None
