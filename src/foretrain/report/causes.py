"""A Forecast in; what the time of its step goes to out, in seconds that add up to the step."""

from __future__ import annotations

from foretrain.errors import InputError
from foretrain.forecast import Forecast
from foretrain.step.playback import Step, shares

_ROUNDING = 1e-9


def causes(forecast: Forecast) -> dict[str, float]:
    """Seconds of a step by cause; what takes none, but for rounding, is 0.

    Parts that a schedule found one by one may overlap a little; they are scaled to what the step takes together. On one device
    it computes as long as it is busy, and waits for the host in the rest of the step.
    """
    parts = shares(_step(forecast))
    whole = sum(parts.values())
    scale = forecast["step_time_s"].median / whole if whole else 0.0
    return {name: seconds * scale if seconds > _ROUNDING * whole else 0.0 for name, seconds in parts.items()}


def _step(forecast: Forecast) -> Step:
    if forecast.step is not None:
        return forecast.step
    if not {"step_time_s", "device_busy_s"} <= forecast.quantities.keys():
        raise InputError(
            f"predictor: {forecast.predictor!r} does not look inside the step, so it cannot say what its time goes to"
        )
    time_s = forecast["step_time_s"].median
    busy_s = min(time_s, forecast["device_busy_s"].median)
    return Step(time_s=time_s, exposed_s=0.0, computing_s=busy_s, host_s=time_s - busy_s)
