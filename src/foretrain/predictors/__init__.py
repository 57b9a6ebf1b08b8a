"""The predictors by name, and those that were saved by their folder; each module is imported when its predictor is asked for."""

from __future__ import annotations

import importlib
from pathlib import Path

from foretrain.errors import InputError, unknown
from foretrain.predictors.base import FILE, Predictor, read_saved

_WHERE = {
    "cherrypick": "foretrain.predictors.cherrypick:CherryPickPredictor",
    "deletepop": "foretrain.predictors.deletepop:DeletePopPredictor",
    "driple": "foretrain.predictors.driple:DriplePredictor",
    "ernest": "foretrain.predictors.ernest:ErnestPredictor",
    "flops": "foretrain.predictors.flops_regression:FlopsPredictor",
    "predictddl": "foretrain.predictors.predictddl:PredictDDLPredictor",
    "ray_models": "foretrain.predictors.ray_models:RayModelsPredictor",
    "roofline": "foretrain.predictors.roofline:RooflinePredictor",
    "scaledl": "foretrain.predictors.scaledl:ScaleDLPredictor",
}

DEFAULT = "deletepop"
"""The predictor that ``foretrain predict`` uses."""


def names() -> tuple[str, ...]:
    return tuple(_WHERE)


def get(name: str | Path = DEFAULT) -> Predictor:
    """A new predictor with its default settings, or the one that ``save`` left in a folder."""
    if name in _WHERE:
        return _class(str(name))()
    folder = Path(name)
    if not folder.is_dir():
        raise unknown("predictor", str(name), _WHERE)
    if not (folder / FILE).exists():
        raise InputError(f"predictor: the folder {folder} has no {FILE}; foretrain fit makes one")
    return _class(read_saved(folder)["predictor"]).load(folder)


def _class(name: str) -> type[Predictor]:
    if name not in _WHERE:
        raise unknown("predictor", name, _WHERE)
    module, _, attribute = _WHERE[name].partition(":")
    found: type[Predictor] = getattr(importlib.import_module(module), attribute)
    return found
