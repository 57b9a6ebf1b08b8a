"""foretrain: know how long a training run takes, how much memory it needs and what it costs, before you run
it.

>>> import foretrain, torch
>>> module, inputs = torch.nn.Linear(64, 10), torch.zeros(8, 64)
>>> forecast = foretrain.predict(module, inputs, device="h100", devices=4, batch=64)
>>> forecast.fits, forecast.step_time_s.median < forecast.step_time_s.high
(True, True)

``docs/python.md`` has what it takes and what it gives.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretrain.api import make_job, predict
    from foretrain.capture import capture
    from foretrain.catalog import Catalog
    from foretrain.client import Client
    from foretrain.errors import CaptureError, ForetrainError, InputError, UnsupportedJob
    from foretrain.forecast import Estimate, Forecast
    from foretrain.graph import OpGraph
    from foretrain.job import Job, read_jobs
    from foretrain.launchers import Launch, read_launch
    from foretrain.plan import Plan
    from foretrain.planner import Plans, plan
    from foretrain.run import Run, read_runs
    from foretrain.workload import Workload

__version__ = "0.3.0"

__all__ = [
    "CaptureError",
    "Catalog",
    "Client",
    "Estimate",
    "Forecast",
    "ForetrainError",
    "InputError",
    "Job",
    "Launch",
    "OpGraph",
    "Plan",
    "Plans",
    "Run",
    "UnsupportedJob",
    "Workload",
    "capture",
    "make_job",
    "plan",
    "predict",
    "read_jobs",
    "read_launch",
    "read_runs",
]

_FROM = {
    "api": ("make_job", "predict"),
    "catalog": ("Catalog",),
    "client": ("Client",),
    "errors": ("CaptureError", "ForetrainError", "InputError", "UnsupportedJob"),
    "forecast": ("Estimate", "Forecast"),
    "graph": ("OpGraph",),
    "launchers": ("Launch", "read_launch"),
    "job": ("Job", "Plan", "Workload", "read_jobs"),
    "planner": ("Plans",),
    "run": ("Run", "read_runs"),
}
_MODULE_OF = {name: module for module, names in _FROM.items() for name in names}


def __getattr__(name: str) -> Any:
    """Names are imported when they are first used, so that ``import foretrain`` costs nothing."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """A package whose ``capture`` and ``plan`` are functions, also once what else has these names in it is
    imported."""

    @property
    def capture(self) -> Any:
        return importlib.import_module(f"{__name__}.capture").capture

    @capture.setter
    def capture(self, subpackage: ModuleType) -> None:
        """Ignore the import system, which puts every subpackage here."""

    @property
    def plan(self) -> Any:
        return importlib.import_module(f"{__name__}.planner").plan

    @plan.setter
    def plan(self, module: ModuleType) -> None:
        """Ignore the import system, which puts the module with the noun here."""


sys.modules[__name__].__class__ = _Package
