"""Cuts a forecast down to what a page shows of it."""

from __future__ import annotations

from typing import Any

from foretrain.forecast import Forecast
from foretrain.predictors.base import Predictor
from foretrain.report import figures
from foretrain.web.details import details

QUANTITIES = (
    "step_time_s", "samples_per_s", "tokens_per_s", "epoch_time_s", "total_time_s", "peak_memory_bytes",
    "reserved_memory_bytes", "device_utilization", "device_busy_s", "forward_time_s", "backward_time_s",
    "optimizer_time_s", "network_tx_bytes_per_s",
)  # fmt: skip
"""Those that a page shows."""
_SECTIONS = (
    "bound", "fits", "out_of_memory_chance", "fits_with", "recomputation", "memory_capacity_bytes",
    "memory_short_of", "peak_moment", "memory_by_category_bytes", "memory_by_stage_bytes",
    "total_time_parts", "cost_usd", "energy_j", "price_usd_per_hour", "price_source", "assumptions",
    "evidence", "step_breakdown_s", "predictor",
)  # fmt: skip
"""Of the forecast's JSON, as they are."""


def record(forecast: Forecast, predictor: Predictor | None = None, *, fine: bool = False) -> dict[str, Any]:
    """The forecast as its JSON has it, without what no page shows, and ``details`` of the step; ``fine``
    draws single calls."""
    document = forecast.to_dict(breakdown=False)
    sections = {name: document[name] for name in _SECTIONS if name in document}
    kept = {name: one for name in QUANTITIES if (one := document["quantities"].get(name)) is not None}
    need = forecast.fullest
    return {
        "job": {name: section for name, section in document["job"].items() if name != "model"},
        "quantities": kept,
        **sections,
        "flops": _work(document["flops"]),
        "needed_memory_bytes": None if need is None else need.to_dict(),
        "usable_memory_bytes": forecast.usable_memory_bytes,
        "words": {
            "model": figures.describe_model(forecast.job),
            "cluster": figures.describe_cluster(forecast.job),
            "work": figures.describe_work(forecast),
            "fits": "" if (verdict := figures.fits(forecast)) is None else verdict[1].value,
            "peak": "" if (moment := figures.peak_moment(forecast)) is None else moment.value,
        },
        **{f"details.{name}": one for name, one in details(forecast, predictor, fine=fine).items()},
    }


def _work(flops: dict[str, Any] | None) -> dict[str, Any] | None:
    """Keep what is shown of a model's size and arithmetic."""
    if flops is None:
        return None
    return {name: flops[name] for name in ("parameters", "flops_per_step", "mfu", "hfu") if flops.get(name)}
