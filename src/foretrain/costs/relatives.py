"""Finds a measured device of the same kind, and between which shares of its times another one must lie."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from foretrain.catalog import Catalog
from foretrain.cluster import Device


def relative(device: Device, measured: Iterable[str]) -> Device | None:
    """The first of the measured devices that runs the same kernels: of the same vendor and capability. None
    for a device that is among them itself."""
    names = tuple(measured)
    if device.name in names or device.capability is None:
        return None
    own = [one for name in names if (one := _device(name)) is not None]
    return next((one for one in own if _kind(one) == _kind(device)), None)


def slowdowns(device: Device, than: Device) -> tuple[float, float]:
    """The least and the largest ratio of two devices' figures: a kernel is as much slower as the figure that
    it is bound by, whichever that is."""
    ratios = [theirs / own for own, theirs in zip(_figures(device), _figures(than), strict=True)]
    return min(ratios), max(ratios)


def _kind(device: Device) -> tuple[str, str | None]:
    return device.vendor, device.capability


def _figures(device: Device) -> tuple[float, ...]:
    """List the rates that can bound a kernel: memory, arithmetic, and how many blocks run how fast."""
    return (
        device.memory_bytes_per_s,
        device.fp32 or 1.0,
        device.bf16 or device.fp16 or 1.0,
        float(device.sms or 1) * (device.clock_hz or 1.0),
    )


@functools.cache
def _device(name: str) -> Device | None:
    """A device as it comes with foretrain; None of one that a user's own catalogue has."""
    built_in = Catalog()
    return built_in.device(name) if name in built_in.names("devices") else None
