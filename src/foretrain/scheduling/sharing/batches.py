"""Forecasts what sharing costs a job of a batch size that was not measured, from other sizes of its model.

The logarithm of the speed beside the same job is taken on the line over the logarithm of the batch through
the two nearest sizes, at most a doubling beyond them. Of two forms tried on Gavel's pairs (this one, and the
nearest size alone) it is the better one on each of K80, P100 and V100 (``docs/scheduling_operators.md``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

_NAME = re.compile(r"(?P<model>.+) \(batch size (?P<batch>\d+)\)")
_BEYOND = 1.0
"""Doublings of the batch by which a line is followed beyond the sizes that it goes through."""

SpeedOf = Callable[[str], float | None]
"""Speed of a pair when one of its kinds is put in place of another; None where it was not measured."""


def model_and_batch(kind: str) -> tuple[str, int] | None:
    """Of a kind that is named as in Gavel's tables; None for any other.

    >>> model_and_batch("ResNet-50 (batch size 64)")
    ('ResNet-50', 64)
    """
    match = _NAME.fullmatch(kind)
    return (match["model"], int(match["batch"])) if match and int(match["batch"]) else None


class BatchSizes:
    """The batch sizes of every model among kinds of jobs."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self._sizes: dict[str, list[tuple[int, str]]] = {}
        for kind in sorted(set(kinds)):
            known = model_and_batch(kind)
            if known is not None:
                self._sizes.setdefault(known[0], []).append((known[1], kind))

    def speed(self, kind: str, speed_of: SpeedOf) -> float | None:
        """Of a pair that was not measured with ``kind``: from those with other batch sizes of its model; None
        where there is no other. 0, for a pair that does not fit, where a smaller batch did not fit either."""
        known = model_and_batch(kind)
        if known is None:
            return None
        model, batch = known
        measured = {size: speed_of(other) for size, other in self._sizes.get(model, ()) if other != kind}
        speeds = {size: speed for size, speed in measured.items() if speed is not None}
        if any(speed == 0 and size <= batch for size, speed in speeds.items()):
            return 0.0
        return _on_line(batch, {size: speed for size, speed in speeds.items() if speed > 0})


def _on_line(batch: int, speeds: Mapping[int, float]) -> float | None:
    """At a batch size, by the two sizes that are nearest to it; none is faster than alone.

    >>> round(_on_line(32, {16: 0.4, 64: 0.9}), 2)
    0.6
    """
    nearest = sorted(speeds, key=lambda size: (abs(math.log2(size / batch)), size))[:2]
    if len(nearest) < 2:
        return min(speeds[nearest[0]], 1.0) if nearest else None
    (low, low_speed), (high, high_speed) = _logs(sorted(nearest), speeds)
    place = min(max(math.log2(batch), low - _BEYOND), high + _BEYOND)
    return min(math.exp(low_speed + (high_speed - low_speed) * (place - low) / (high - low)), 1.0)


def _logs(sizes: Sequence[int], speeds: Mapping[int, float]) -> list[tuple[float, float]]:
    return [(math.log2(size), math.log(speeds[size])) for size in sizes]
