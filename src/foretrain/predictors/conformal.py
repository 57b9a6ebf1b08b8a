"""Computes intervals that hold a stated share of values not seen yet (split conformal prediction)."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from foretrain.estimate import CERTAIN, SHARES, Factors

__all__ = ["Factors", "factors", "shipped"]

SHIPPED = Path(__file__).parent / "deletepop" / "fitted" / "intervals.json"
_LEAST = 20
"""Comparisons below which a case gets no intervals of its own."""


def factors(ratios: Sequence[float]) -> Factors | None:
    """Compute intervals from measured values as multiples of forecasts by a predictor that had not seen them
    or their like.

    Each side leaves out its half of the rest; with n values the ranks are those of n + 1, so the share holds
    for the next one too.
    """
    if len(ratios) < _LEAST:
        return None
    ordered = np.sort(np.asarray(ratios, dtype=np.float64))
    return Factors(*(_quantile(ordered, share) for share in SHARES)).widest(CERTAIN)


def _quantile(ordered: np.ndarray[tuple[int], np.dtype[np.float64]], share: float) -> float:
    rank = share * (len(ordered) + 1)
    position = math.floor(rank) if share < 0.5 else math.ceil(rank)
    return float(ordered[min(max(position, 1), len(ordered)) - 1])


@functools.lru_cache(maxsize=1)
def shipped() -> Mapping[str, Mapping[str, Factors]]:
    """Read the intervals that come with foretrain, by case, then by quantity.

    The cases are a device that was measured, when device or host bounds the step, one that runs were
    calibrated to, and one known by its data sheet alone. Step times that no runs were calibrated to go by the
    parts of the step instead (``deletepop/spread.py``).
    """
    document = json.loads(SHIPPED.read_text())
    return {
        case: {name: Factors(*values) for name, values in table.items()}
        for case, table in document["cases"].items()
    }
