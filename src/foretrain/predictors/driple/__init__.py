"""Driple: a graph network that forecasts how busy device, memory and network are."""

from foretrain.predictors.driple.predictor import DriplePredictor

__all__ = ["DriplePredictor"]
