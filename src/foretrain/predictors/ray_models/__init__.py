"""Forecasts jobs on Ray by performance models: regressions over data size, workers and resources."""

from foretrain.predictors.ray_models.predictor import RayModelsPredictor

__all__ = ["RayModelsPredictor"]
