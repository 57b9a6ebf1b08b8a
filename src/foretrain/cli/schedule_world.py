"""Reads the options of ``schedule`` that describe the operator's world: rules, sharing, spot nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrain.errors import InputError, invalid, unknown

if TYPE_CHECKING:
    from foretrain.scheduling.jobs import Trace
    from foretrain.scheduling.machines import Machine
    from foretrain.scheduling.sharing import Interference
    from foretrain.scheduling.sharing.use import Use
    from foretrain.scheduling.spot import Spot
    from foretrain.scheduling.study import SpeedSource

DRIPLE = "driple"
"""In the place of a table of uses: the figures of that predictor."""
_SPOT = 'such as "nodes=4,mean=6h,away=30min,price=0.35"'


def uses_of(text: str | None, source: SpeedSource, machines: Sequence[Machine]) -> dict[str, Use]:
    """How kinds of jobs use a device: by a table, else by the templates' forecasts on the first device, with
    ``driple`` by its figures."""
    from foretrain.scheduling.sharing.uses import driple_uses, forecast_uses, read_uses
    from foretrain.scheduling.speeds import ThroughputTable

    if text is not None and text != DRIPLE:
        return read_uses(Path(text))
    if source.predictor is None:
        if text == DRIPLE:
            raise InputError(
                f"--uses: {DRIPLE} needs --predictor and --templates, whose jobs it is asked about"
            )
        return {}
    device = machines[0].device.partition("@")[0]
    if text == DRIPLE:
        return driple_uses(*source.predicted(), device)
    table = None if source.throughputs is None else ThroughputTable.load(source.throughputs)
    return forecast_uses(*source.predicted(), device, table)


def written_by_kind(source: SpeedSource, machines: Sequence[Machine]) -> dict[str, float]:
    """Seconds that a checkpoint of each template takes, by the forecast of its memory."""
    from foretrain.scheduling.checkpointing import write_time_s
    from foretrain.scheduling.speeds import placed

    if source.predictor is None:
        raise InputError("--checkpoint-write: forecast needs --predictor and --templates")
    predictor, templates = source.predicted()
    device = machines[0].device.partition("@")[0]
    forecasts = {kind: predictor.predict(placed(job, device, (1,))) for kind, job in templates.items()}
    times = {kind: write_time_s(forecast) for kind, forecast in forecasts.items()}
    unknown = next((kind for kind, time_s in times.items() if time_s is None), None)
    if unknown is not None:
        raise InputError(
            f"--checkpoint-write: {source.predictor} does not tell the memory of {unknown}; give a time"
        )
    return {kind: time_s for kind, time_s in times.items() if time_s is not None}


def pairs_of(text: str | None, uses: Mapping[str, Use]) -> Interference | None:
    """What two jobs on a GPU cost each other: a way to share, or a file of measured pairs."""
    if text is None:
        return None
    from foretrain.scheduling.sharing import MeasuredPairs
    from foretrain.scheduling.sharing.use import WAYS, ByUse, way

    if text in WAYS:
        if not uses:
            raise InputError(
                f"--pairs: {text} needs to know how kinds of jobs use a device; give --uses, a table, or "
                "--predictor and --templates"
            )
        return ByUse(uses, way(text))
    if Path(text).suffix not in (".json", ".gz"):
        raise invalid("--pairs", text, f"{', '.join(WAYS)}, or a table with pairs (.json)")
    return MeasuredPairs.load(Path(text), ByUse(uses, way("turns")) if uses else None)


def spot_of(text: str | None) -> Spot | None:
    """Spot nodes in words."""
    if text is None:
        return None
    from foretrain.scheduling.spot import Spot
    from foretrain.units import parse_seconds

    values: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in ("nodes", "mean", "away", "price"):
            raise invalid("--spot", part, _SPOT)
        try:
            if key in ("mean", "away"):
                values[f"{key}_s"] = parse_seconds(value, f"--spot {key}")
            else:
                values[key] = int(value) if key == "nodes" else float(value)
        except ValueError as error:
            raise invalid(f"--spot {key}", value, "a number") from error
    for needed in ("nodes", "mean_s"):
        if needed not in values:
            raise InputError(f"--spot: has no {needed.removesuffix('_s')}; {_SPOT}")
    return Spot(**values)


def mtbf_of(
    option: str, text: str | None, machines: Sequence[Machine]
) -> tuple[float | None, dict[str, float]]:
    """Of all kinds of devices, None where nothing is said of them, and of those that are named: "30d",
    "30d,k80=5d" or "k80=5d"."""
    from foretrain.scheduling.machines import device_named
    from foretrain.units import parse_seconds

    everywhere: float | None = None
    named: dict[str, float] = {}
    devices = list(dict.fromkeys(machine.device for machine in machines))
    for part in () if text is None else text.split(","):
        name, equals, time = (piece.strip() for piece in part.rpartition("="))
        seconds = 0.0 if time == "0" else parse_seconds(time, option)
        if not equals:
            if everywhere is not None:
                raise invalid(option, text, f"one time of all devices, and others as {devices[0]}=5d")
            everywhere = seconds
            continue
        device = device_named(name, devices)
        if device is None:
            raise unknown(f"{option}: device", name, devices)
        if device in named:
            raise invalid(option, text, f"one time for {device}")
        if not seconds > 0:
            raise invalid(f"{option}: {name}", time, "a time above 0")
        named[device] = seconds
    return everywhere, named


def failing_as(
    machines: Sequence[Machine], everywhere: float | None, named: Mapping[str, float]
) -> list[Machine]:
    """The nodes with what --node-mtbf says of them, in place of what the cluster's file says."""
    said = machines if everywhere is None else [dataclasses.replace(each, mtbf_s=None) for each in machines]
    return [
        dataclasses.replace(each, mtbf_s=named[each.device]) if each.device in named else each
        for each in said
    ]


def with_devices_of(trace: Trace, machines: Sequence[Machine]) -> Trace:
    """The trace with the cluster's names of devices: "a100" of a log is its "a100-sxm-80gb"."""
    from foretrain.scheduling.machines import device_named

    names = list(dict.fromkeys(machine.device for machine in machines))
    asked = {job.device for job in trace.jobs if job.device is not None and job.device not in names}
    found = {name: device for name in asked if (device := device_named(name, names)) is not None}
    if not found:
        return trace
    jobs = [
        dataclasses.replace(job, device=found[job.device]) if job.device in found else job
        for job in trace.jobs
    ]
    return dataclasses.replace(trace, jobs=jobs)
