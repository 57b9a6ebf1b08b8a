"""Traces with real values beside the shapes, where the way of a model depends on data."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from foretrain.capture.tracing.failures import DEPENDS_ON_DATA
from foretrain.errors import CaptureError

T = TypeVar("T")


def with_values_if_needed(trace: Callable[[bool], T]) -> T:
    """``trace(False)``; where that stops at a question to data, ``trace(True)``, which computes the forward
    pass for real."""
    try:
        return trace(False)
    except CaptureError as error:
        if DEPENDS_ON_DATA not in str(error):
            raise
        try:
            return trace(True)
        except CaptureError:
            raise error from None
