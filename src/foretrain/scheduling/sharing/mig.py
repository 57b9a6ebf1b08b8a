"""Cuts GPUs into slices by NVIDIA's MIG, and tells how fast jobs run on them."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from foretrain.errors import InputError, unknown
from foretrain.scheduling.jobs import TraceJob
from foretrain.scheduling.machines import Machine
from foretrain.scheduling.sharing.use import Use
from foretrain.scheduling.speeds import Shape, Speeds

_GB = 1e9
_MEMORY_SLICES = 8
"""Of a GPU of seven compute slices; one of four has as many memory slices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigProfile:
    """A slice: ``3g.40gb`` of a device."""

    device: str
    name: str
    compute: int
    of: int
    memory_bytes: float

    @property
    def share(self) -> float:
        """Of the device's processors."""
        return self.compute / self.of


@functools.cache
def _catalogue() -> Mapping[str, Mapping[str, MigProfile]]:
    text = resources.files("foretrain.catalog").joinpath("mig.toml").read_text(encoding="utf-8")
    found = {}
    for device, entry in tomllib.loads(text)["mig"].items():
        if isinstance(entry, dict):
            found[device] = {name: _profile(device, name, entry["slices"]) for name in entry["profiles"]}
    return found


def _profile(device: str, name: str, slices: int) -> MigProfile:
    match = re.fullmatch(r"(\d+)g\.(\d+)gb", name)
    assert match is not None
    return MigProfile(
        device=device, name=name, compute=int(match[1]), of=slices, memory_bytes=int(match[2]) * _GB
    )


def profile(device: str) -> MigProfile | None:
    """Of a device that is named with its slice, ``h100-sxm-80gb@3g.40gb``; None for a whole one.

    >>> one = profile("h100-sxm-80gb@3g.40gb")
    >>> one.compute, one.of
    (3, 7)
    """
    whole, at, name = device.partition("@")
    return _catalogue()[whole][name] if at else None


def cut(machine: Machine, names: Sequence[str]) -> list[Machine]:
    """A node whose GPUs are all cut in the same way, as a node for each kind of slice."""
    profiles = _catalogue().get(machine.device)
    if profiles is None:
        raise unknown("cluster: a device that MIG cuts", machine.device, _catalogue())
    for name in names:
        if name not in profiles:
            raise unknown(f"cluster: slice of {machine.device}", name, profiles)
    chosen = [profiles[name] for name in names]
    compute, of = sum(each.compute for each in chosen), chosen[0].of
    whole_bytes = max(each.memory_bytes for each in profiles.values())
    memory = sum(each.memory_bytes for each in chosen)
    if compute > of or memory > whole_bytes * (1 + 1 / _MEMORY_SLICES):
        raise InputError(
            f"cluster: slices {'+'.join(names)} are {compute} of {of} of a {machine.device} "
            f"and {memory / _GB:.0f} of {whole_bytes / _GB:.0f} GB"
        )
    price = machine.price_per_hour
    return [
        Machine(
            device=f"{machine.device}@{name}",
            gpus=machine.gpus * names.count(name),
            rack=machine.rack,
            price_per_hour=None
            if price is None
            else price * profiles[name].compute * names.count(name) / compute,
            partition=machine.partition,
        )
        for name in dict.fromkeys(names)
    ]


class SlicedSpeeds(Speeds):
    """Speeds on slices: those of the whole device, as far as the slice has the processors that a job keeps
    busy. Memory bandwidth is cut alike. A slice holds one job of one GPU, whose memory must go into it."""

    def __init__(self, whole: Speeds, uses: Mapping[str, Use]) -> None:
        self._whole, self._uses = whole, dict(uses)

    def work(self, job: TraceJob) -> float:
        return self._whole.work(job)

    def rate(self, job: TraceJob, device: str, shape: Shape) -> float:
        piece = profile(device)
        if piece is None:
            return self._whole.rate(job, device, shape)
        use = self._uses.get(job.kind, Use())
        memory = max(use.memory_bytes, job.memory_bytes or 0.0)
        if sum(shape) > 1 or memory > piece.memory_bytes:
            return 0.0
        return self._whole.rate(job, piece.device, shape) / max(1.0, use.busy / piece.share)

    def why_not(self, job: TraceJob, devices: Iterable[str]) -> str:
        kinds = list(devices)
        if any("@" in device for device in kinds):
            why = "; a slice takes one job of one GPU" if job.gpus > 1 else ""
            return f"goes into no slice or device of the cluster ({', '.join(kinds)}){why}"
        return self._whole.why_not(job, kinds)
