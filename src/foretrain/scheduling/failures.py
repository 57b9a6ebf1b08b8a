"""Draws when jobs and nodes fail, at exponential times or by outages from a file."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from foretrain.errors import InputError, invalid
from foretrain.files import read_text

if TYPE_CHECKING:
    from foretrain.scheduling.machines import Machine
    from foretrain.scheduling.spot import Spot


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A node that is away for a while."""

    time_s: float
    node: int
    repair_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.time_s < math.inf and 0 < self.repair_s < math.inf and self.node >= 0):
            values = (self.time_s, self.node, self.repair_s)
            allowed = "time_s and node must be at least 0 and repair_s above 0, all of them finite"
            raise InputError(f"outage: {values} is not one: {allowed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureModel:
    """Mean times between failures of a job, per GPU, and of a node; mean time to repair; known outages; spot
    nodes."""

    job_mtbf_gpu_s: float = math.inf
    job_mtbf_of: Mapping[str, float] = field(default_factory=dict)
    """The same on kinds of devices that fail more or less often than the others."""
    node_mtbf_s: float = math.inf
    """Of nodes that have none of their own."""
    repair_s: float = 3600.0
    outages: Sequence[Outage] = ()
    spot: Spot | None = None
    """How the nodes of the cluster that are spot nodes go away."""

    def __post_init__(self) -> None:
        for name in ("job_mtbf_gpu_s", "node_mtbf_s", "repair_s"):
            value = getattr(self, name)
            if not value > 0:
                raise invalid(f"failures.{name}", value, "a number greater than zero")
        for device, value in self.job_mtbf_of.items():
            if not value > 0:
                raise invalid(f"failures.job_mtbf_of.{device}", value, "a number greater than zero")

    @property
    def jobs_fail(self) -> bool:
        return min([self.job_mtbf_gpu_s, *self.job_mtbf_of.values()]) < math.inf

    def mtbf_of(self, machine: Machine) -> float:
        """Mean time between failures of a node."""
        return self.node_mtbf_s if machine.mtbf_s is None else machine.mtbf_s

    def nodes_fail(self, machines: Iterable[Machine]) -> bool:
        return any(self.mtbf_of(machine) < math.inf for machine in machines)

    def starts(self, seed: int) -> Failures:
        """The failures of one simulation."""
        return Failures(self, seed)


class Failures:
    """Draws from a failure model.

    Every job and node has its own random numbers, so a policy does not change what breaks when.
    """

    def __init__(self, model: FailureModel, seed: int) -> None:
        self.model = model
        self._seed = seed
        self._nodes: dict[int, random.Random] = {}

    def of_job(self, number: int, start: int, gpus: Mapping[str, int]) -> float:
        """Seconds until a start of a job fails on so many GPUs of each kind."""
        model = self.model
        rate = sum(count / model.job_mtbf_of.get(kind, model.job_mtbf_gpu_s) for kind, count in gpus.items())
        if not rate:
            return math.inf
        return random.Random(f"{self._seed}/job/{number}/{start}").expovariate(rate)

    def of_node(self, node: int, machine: Machine) -> float:
        """Seconds from now until a node fails."""
        mtbf_s = self.model.mtbf_of(machine)
        return math.inf if math.isinf(mtbf_s) else self._node(node).expovariate(1.0 / mtbf_s)

    def repair_of(self, node: int) -> float:
        return self._node(node).expovariate(1.0 / self.model.repair_s)

    def of_spot(self, node: int) -> Iterator[Outage]:
        """When a spot node is away."""
        return iter(()) if self.model.spot is None else self.model.spot.outages(node, self._seed)

    def _node(self, node: int) -> random.Random:
        return self._nodes.setdefault(node, random.Random(f"{self._seed}/node/{node}"))


def read_outages(path: Path) -> list[Outage]:
    """From a CSV file with the columns time_s, node (its number) and repair_s."""
    outages = []
    rows = csv.DictReader(read_text(path).splitlines())
    missing = [name for name in ("time_s", "node", "repair_s") if name not in (rows.fieldnames or ())]
    if missing:
        raise InputError(f"{path}: has no column {missing[0]}; an outage has time_s, node and repair_s")
    for number, row in enumerate(rows, start=2):
        try:
            outage = Outage(
                time_s=float(row["time_s"]), node=int(row["node"]), repair_s=float(row["repair_s"])
            )
        except InputError as error:
            raise InputError(f"{path}:{number}: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{path}:{number}: not an outage with time_s, node and repair_s ({error})"
            ) from error
        outages.append(outage)
    return sorted(outages, key=lambda outage: (outage.time_s, outage.node))
