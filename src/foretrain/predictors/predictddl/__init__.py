"""PredictDDL: an embedding of the graph and features of the cluster, regressed to a time."""

from foretrain.predictors.predictddl.predictor import PredictDDLPredictor

__all__ = ["PredictDDLPredictor"]
