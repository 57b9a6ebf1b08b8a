"""Finds how each kind of job uses a device: in a table, by forecasts of templates, or by Driple's figures."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretrain.errors import InputError
from foretrain.files import read_text
from foretrain.job import Job
from foretrain.predictors.base import Predictor
from foretrain.scheduling.sharing.link import Bursts
from foretrain.scheduling.sharing.use import LEAST_BUSY, Use
from foretrain.scheduling.speeds import ThroughputTable, placed

_COLUMNS = ("kind", "busy", "kernel_s", "memory_bytes")


def read_uses(path: Path) -> dict[str, Use]:
    """From a CSV file with the columns kind, busy (a share), kernel_s and memory_bytes; the last two may be
    left out."""
    rows = csv.DictReader(read_text(path).splitlines())
    missing = [name for name in _COLUMNS[:2] if name not in (rows.fieldnames or ())]
    if missing:
        raise InputError(f"{path}: has no column {missing[0]}; needed are kind and busy")
    uses: dict[str, Use] = {}
    for number, row in enumerate(rows, start=2):
        try:
            figures: dict[str, Any] = {
                name: float(row[name]) for name in _COLUMNS[1:] if (row.get(name) or "").strip()
            }
            uses[row["kind"]] = Use(**figures)
        except (InputError, ValueError, TypeError) as error:
            raise InputError(f"{path}:{number}: not a use of a device ({error})") from error
    return uses


def forecast_uses(
    predictor: Predictor, templates: Mapping[str, Job], device: str, table: ThroughputTable | None = None
) -> dict[str, Use]:
    """Of every template on one GPU of a kind, at the pace that a table of throughputs has for it alone."""
    return {
        kind: Use.of(
            predictor.predict(placed(job, device, (1,))), None if table is None else table.alone(kind, device)
        )
        for kind, job in templates.items()
    }


def driple_uses(predictor: Predictor, templates: Mapping[str, Job], device: str) -> dict[str, Use]:
    """By Driple's figures: the busy share, which counts waiting for data, the share of the device's memory
    that is held at its peak, and bursts over the link to the host; kernels are those of the forecasts."""
    from foretrain.predictors.driple.resources import resource_figures
    from foretrain.predictors.driple.whitebox import rank_link_bytes_per_s

    uses = {}
    for kind, job in templates.items():
        alone = placed(job, device, (1,))
        figures, link = resource_figures(alone), rank_link_bytes_per_s(alone)
        memory = figures["memory_utilization_peak"] * alone.cluster.device.memory_bytes
        uses[kind] = dataclasses.replace(
            Use.of(predictor.predict(alone)),
            busy=min(max(figures["device_utilization"], LEAST_BUSY), 1.0),
            memory_bytes=memory,
            received=_bursts(figures, "network_rx", link),
            sent=_bursts(figures, "network_tx", link),
        )
    return uses


def _bursts(figures: Mapping[str, float], resource: str, link_bytes_per_s: float) -> Bursts:
    idle_s, active_s = figures[f"{resource}_idle_s"], figures[f"{resource}_active_s"]
    return Bursts(
        active=active_s / (active_s + idle_s) if active_s > 0 else 0.0,
        peak=min(figures[f"{resource}_peak"] / link_bytes_per_s, 1.0),
    )
