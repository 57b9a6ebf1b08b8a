"""DeletePop: operators costed from a measured dataset, calibrated to runs."""

from foretrain.predictors.deletepop.predictor import DeletePopPredictor

__all__ = ["DeletePopPredictor"]
