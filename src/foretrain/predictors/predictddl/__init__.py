"""Forecasts step times by an embedding of the graph and features of the cluster: PredictDDL."""

from foretrain.predictors.predictddl.predictor import PredictDDLPredictor

__all__ = ["PredictDDLPredictor"]
