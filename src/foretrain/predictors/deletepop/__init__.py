"""Forecasts steps by operators costed from a measured dataset and calibrated to runs: DeletePop."""

from foretrain.predictors.deletepop.predictor import DeletePopPredictor

__all__ = ["DeletePopPredictor"]
