"""Applies what the graph networks of ScaleDL have learned, without torch: corrections, how far they are
trusted, and intervals."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt

from foretrain.errors import InputError
from foretrain.estimate import SHARES, Factors
from foretrain.job import Job
from foretrain.predictors.deletepop.calibration import without_memory
from foretrain.predictors.machines import machine_of
from foretrain.predictors.scaledl.graph import LayerGraph

FORMAT = "foretrain-scaledl/2"
BOUND = 0.7
"""Of the logarithm of the correction: a factor of two either way."""
_MACHINE = " of "
"""Between a CPU and its machine."""
_RUN_LIMIT = 3.0
"""Standard deviations beyond which a figure of the run counts as that far."""
_NARROWEST = Factors(0.95, 0.97, 1.03, 1.05)
"""Intervals are never narrower, however near the runs lie."""

Array = npt.NDArray[np.float64]
Weights = Mapping[str, Array]

Trust = Literal["seen", "larger", "device", "framework", "neither"]
"""Where a job lies from what was learned: its devices with its framework, in numbers that were seen or in
larger ones; its devices with other frameworks; its framework on other devices; or neither."""
TRUSTS: tuple[Trust, ...] = get_args(Trust)
WORDS: Mapping[Trust, str] = {
    "seen": "runs of these devices with this framework were learned from",
    "larger": "runs of these devices with this framework were learned from, in smaller numbers",
    "device": "runs of these devices with other frameworks alone were learned from",
    "framework": "runs of this framework on other devices alone were learned from",
    "neither": "neither these devices nor this framework were learned from",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Says what the trust in a correction depends on."""

    device: str
    """Of CPU workers with the machine whose cores they have, where it is told."""
    framework: str
    mode: str
    """Training or inference, of CPU workers apart: what was learned of one tells nothing of another."""
    devices: int

    @classmethod
    def of(cls, job: Job) -> Self:
        names = dict.fromkeys(without_memory(group.device.name) for group in job.cluster.groups)
        training, device = job.workload.training, " ".join(names)
        on_cpu, machine = job.cluster.device.is_cpu, machine_of(job)
        return cls(
            device=f"{device}{_MACHINE}{machine}" if machine else device,
            framework=training.framework,
            mode=f"{training.mode} on CPU workers" if on_cpu else training.mode,
            devices=job.cluster.world_size,
        )

    def is_on(self, device: str) -> bool:
        """Whether its devices are those; one that tells no machine may be any."""
        if self.device == device:
            return True
        kind, _, machine = self.device.partition(_MACHINE)
        other, _, known = device.partition(_MACHINE)
        return kind == other and not (machine and known)


@dataclass(frozen=True, eq=False)
class Region:
    """The places that were learned from: by mode, device and framework the largest number of devices."""

    largest: Mapping[tuple[str, str, str], int]

    @classmethod
    def around(cls, places: Sequence[Place]) -> Self:
        largest: dict[tuple[str, str, str], int] = {}
        for place in places:
            key = place.mode, place.device, place.framework
            largest[key] = max(largest.get(key, 0), place.devices)
        return cls(largest)

    def trust(self, place: Place) -> Trust:
        """Say how near a job lies; within its own mode, as networks of a mode without runs are not asked."""
        of_mode = {key[1:]: most for key, most in self.largest.items() if key[0] == place.mode}
        on_device = {key: most for key, most in of_mode.items() if place.is_on(key[0])}
        known = [most for (_, framework), most in on_device.items() if framework == place.framework]
        if known:
            return "seen" if place.devices <= max(known) else "larger"
        if on_device:
            return "device"
        return "framework" if any(framework == place.framework for _, framework in of_mode) else "neither"

    @property
    def modes(self) -> frozenset[str]:
        return frozenset(mode for mode, _, _ in self.largest)

    def to_list(self) -> list[list[Any]]:
        return [[*key, most] for key, most in sorted(self.largest.items())]

    @classmethod
    def from_list(cls, rows: Sequence[Sequence[Any]]) -> Self:
        return cls({(str(mode), str(device), str(name)): int(most) for mode, device, name, most in rows})


@dataclass(frozen=True, eq=False, kw_only=True)
class Correction:
    """Networks whose mean is the logarithm of a correction, and the share of it that left-out runs bear
    out."""

    members: tuple[Weights, ...]
    region: Region
    gates: Mapping[Trust, float]
    """By how near a job lies: the share of the correction that counts."""
    factors: Mapping[Trust, Factors]
    """Intervals of the step: how far left-out runs lay from forecasts that were so corrected."""

    def log_factor(self, graph: LayerGraph, place: Place) -> float:
        """The logarithm of what the time of a step is multiplied by."""
        gate = self.gates[self.region.trust(place)] if place.mode in self.region.modes else 0.0
        return gate * float(self.raw([graph])[0]) if gate else 0.0

    def raw(self, graphs: Sequence[LayerGraph]) -> Array:
        """Give, of each graph, the mean of the networks' answers."""
        mixings = [mixed(graph) for graph in graphs]
        answers = [
            [apply(member, graph, mixing) for member in self.members]
            for graph, mixing in zip(graphs, mixings, strict=True)
        ]
        return np.asarray(np.mean(answers, axis=1), dtype=np.float64)


Mixing = tuple[Array, Array]


def mixed(graph: LayerGraph) -> Mixing:
    """Matrices that take the mean over what flows into each node, and over what flows out of it."""
    count = len(graph.nodes)
    into = np.zeros((count, count))
    into[graph.edges[1], graph.edges[0]] = 1.0
    out = into.T
    return into / np.maximum(into.sum(axis=1, keepdims=True), 1.0), out / np.maximum(
        out.sum(axis=1, keepdims=True), 1.0
    )


def apply(weights: Weights, graph: LayerGraph, mixing: Mixing) -> float:
    """Answer as one network does: as ``CorrectionMember`` in ``network.py``, without torch."""
    into, out = mixing

    def linear(name: str, values: Array) -> Array:
        product = values @ weights[f"{name}.weight"].T
        bias = weights.get(f"{name}.bias")
        return product if bias is None else product + bias

    hidden = np.maximum(linear("enter", (graph.nodes - weights["node_mean"]) / weights["node_scale"]), 0.0)
    layer = 0
    while f"convolutions.{layer}.lin.weight" in weights:
        start = f"convolutions.{layer}"
        from_before = linear(f"{start}.conv_in.lin_l", into @ hidden)
        from_after = linear(f"{start}.conv_out.lin_l", out @ hidden)
        both = linear(f"{start}.lin", hidden) + 0.5 * (from_before + from_after)
        hidden = hidden + np.maximum(both, 0.0)
        layer += 1
    run = np.clip((graph.run - weights["run_mean"]) / weights["run_scale"], -_RUN_LIMIT, _RUN_LIMIT)
    pooled = np.concatenate([hidden.mean(axis=0), graph.share @ hidden, run])
    middle = np.maximum(linear("readout.0", pooled), 0.0)
    bound = float(weights["bound"])
    return float(bound * np.tanh(linear("readout.3", middle)[0] / bound))


def intervals(ratios: Array, weights: Array | None = None) -> Factors:
    """Measured over forecast, as bounds of the 95 % and the 80 % interval; few runs leave them wide."""
    logs = np.log(ratios)
    order = np.argsort(logs)
    counted = np.ones(len(logs)) if weights is None else weights[order]
    reached = (np.cumsum(counted) - 0.5 * counted) / counted.sum()
    widen = 1.0 + 2.0 / np.sqrt(len(logs))
    ends = np.exp(widen * np.interp(SHARES, reached, logs[order]))
    return Factors(*ends.tolist()).widest(_NARROWEST)


# On disk


def read_correction(path: Path) -> Correction:
    """Read what ``network.save`` wrote."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            header = json.loads((file.metadata() or {}).get("foretrain", "{}"))
            arrays = {name: file.get_tensor(name).astype(np.float64) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as a fitted network ({error})") from error
    if header.get("format") != FORMAT:
        raise InputError(f"{path}: format {header.get('format')!r} is not {FORMAT!r}; fit it again")
    members = tuple(
        {name.partition("/")[2]: value for name, value in arrays.items() if name.startswith(f"{i}/")}
        for i in range(header["members"])
    )
    return Correction(
        members=members,
        region=Region.from_list(header["region"]),
        gates={trust: float(header["gates"][trust]) for trust in TRUSTS},
        factors={trust: Factors(*header["factors"][trust]) for trust in TRUSTS},
    )
