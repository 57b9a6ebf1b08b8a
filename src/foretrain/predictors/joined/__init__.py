"""Joins the predictors that learn from runs: the best for each kind of job, or several weighted by error."""

from foretrain.predictors.joined.predictor import JoinedPredictor

__all__ = ["JoinedPredictor"]
