"""Sound and time series as transformers' models take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foretrain.capture.sources.transformers.shapes import Shapes

SIGNALS: dict[str, Callable[[Shapes], Any]] = {
    "input_values": lambda shapes: shapes.audio(),
    "input_features": lambda shapes: shapes.audio(),
}
