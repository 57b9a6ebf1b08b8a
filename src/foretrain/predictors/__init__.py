"""The predictors by name; each module is imported when its predictor is asked for."""

from __future__ import annotations

import importlib

from foretrain.errors import unknown
from foretrain.predictors.base import Predictor

_WHERE = {
    "deletepop": "foretrain.predictors.deletepop:DeletePopPredictor",
    "roofline": "foretrain.predictors.roofline:RooflinePredictor",
}

DEFAULT = "deletepop"
"""The predictor that ``foretrain predict`` uses."""


def names() -> tuple[str, ...]:
    return tuple(_WHERE)


def get(name: str = DEFAULT) -> Predictor:
    """A new predictor, with its default settings."""
    if name not in _WHERE:
        raise unknown("predictor", name, _WHERE)
    module, _, attribute = _WHERE[name].partition(":")
    predictor: Predictor = getattr(importlib.import_module(module), attribute)()
    return predictor
