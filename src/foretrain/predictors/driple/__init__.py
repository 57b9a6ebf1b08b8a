"""Forecasts how busy device, memory and network are by a graph network: Driple."""

from foretrain.predictors.driple.predictor import DriplePredictor
from foretrain.predictors.driple.resources import resource_figures

__all__ = ["DriplePredictor", "resource_figures"]
