"""foretrain: know how long a training run takes, how much memory it needs and what it costs, before you run it.

>>> import foretrain
>>> forecast = foretrain.predict("resnet50", device="h100", batch=64)  # doctest: +SKIP
>>> forecast["step_time_s"].median  # doctest: +SKIP
"""

from foretrain.api import make_job, predict
from foretrain.capture import capture
from foretrain.errors import CaptureError, ForetrainError, InputError, UnsupportedJob
from foretrain.forecast import Estimate, Forecast
from foretrain.graph import OpGraph
from foretrain.job import Job, Plan, Run, Workload

__all__ = [
    "CaptureError",
    "Estimate",
    "Forecast",
    "ForetrainError",
    "InputError",
    "Job",
    "OpGraph",
    "Plan",
    "Run",
    "UnsupportedJob",
    "Workload",
    "capture",
    "make_job",
    "predict",
]
