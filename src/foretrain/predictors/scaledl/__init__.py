"""ScaleDL: layer-wise costs and a graph network that corrects their sum."""

from foretrain.predictors.scaledl.predictor import ScaleDLPredictor

__all__ = ["ScaleDLPredictor"]
