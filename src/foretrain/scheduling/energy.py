"""Adds up the energy that a cluster drew in a simulation: of GPUs at work, of idle ones, of the hosts."""

from __future__ import annotations

from dataclasses import dataclass

from foretrain.cluster import Catalog
from foretrain.errors import InputError
from foretrain.scheduling.machines import FULL
from foretrain.scheduling.result import Result

BUSY_SHARE = 0.52
"""Of the board's power while a job holds a GPU, where nothing is known of the job: the median of the 90
trainings of data/h200_load; those that keep the device busy draw 0.85."""
IDLE_SHARE = 0.1
"""Of the board's power while no job holds it: assumed, as data sheets do not say."""
HOST_W_PER_GPU = 200.0
"""Of processors, memory, fans and network, for every GPU of a node: assumed; a DGX H100 is rated 10.2 kW, of
which its GPUs take 5.6 kW."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """In joules."""

    busy_j: float
    idle_j: float
    host_j: float

    @property
    def total_j(self) -> float:
        return self.busy_j + self.idle_j + self.host_j

    @property
    def total_kwh(self) -> float:
        return self.total_j / 3.6e6


def energy(result: Result, *, busy_share: float = BUSY_SHARE) -> Energy | None:
    """From the first arrival to the last end; None where the catalogue does not know a device's power."""
    catalog = Catalog.load()
    try:
        tdp = {name: catalog.device(name).tdp_w for name in {machine.device for machine in result.machines}}
    except InputError:
        return None
    if any(power is None for power in tdp.values()):
        return None
    span_s = float(result.finish_s.max() - result.arrival_s.min())
    held_s: dict[str, float] = dict.fromkeys(tdp, 0.0)
    if len(tdp) == 1:
        held_s = dict.fromkeys(tdp, float(result.segments.held_gpu_s(len(result.jobs)).sum()))
    else:
        for segment in result.segments:
            for node, mask in segment.allocation.parts:
                part = mask.bit_count() * segment.allocation.share / FULL
                held_s[result.machines[node].device] += (segment.end_s - segment.start_s) * part
    all_s: dict[str, float] = dict.fromkeys(tdp, 0.0)
    for machine in result.machines:
        all_s[machine.device] += machine.gpus * span_s
    powers = {name: float(power or 0.0) for name, power in tdp.items()}
    return Energy(
        busy_j=sum(held_s[name] * powers[name] * busy_share for name in powers),
        idle_j=sum(max(all_s[name] - held_s[name], 0.0) * powers[name] * IDLE_SHARE for name in powers),
        host_j=sum(all_s.values()) * HOST_W_PER_GPU,
    )
