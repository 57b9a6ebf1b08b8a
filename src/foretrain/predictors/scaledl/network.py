"""Trains the graph neural networks that correct a step from its layers and collectives, and learns from runs
that each had not seen how far they are to be trusted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import DirGNNConv, SAGEConv, global_add_pool, global_mean_pool

from foretrain.estimate import Factors
from foretrain.predictors.neural import one_thread, write_weights
from foretrain.predictors.scaledl.correction import (
    BOUND,
    FORMAT,
    TRUSTS,
    Correction,
    Place,
    Region,
    Trust,
    Weights,
    intervals,
)
from foretrain.predictors.scaledl.graph import LayerGraph
from foretrain.progress import tell

HIDDEN = 32
_PARTS = 3
"""Networks that leave out a part of the architectures each, and as many a part of the places."""
_EPOCHS, _STEPS, _BATCH = 20, 160, 16
"""Times that all runs are shown, and steps of learning at the least, of so many runs each."""
_RATE, _DECAY, _DROPOUT = 4e-3, 3e-2, 0.15
_BEND = 0.1
"""Error of the logarithm from which the loss grows linearly: a few odd runs do not decide."""
_FREE = 6.0
"""Bound of the logarithm where there is no step time to correct."""
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of a correction, those that may count."""
_WORTH = 0.98
"""Of the error with a smaller share, what a larger one must come below."""
_LEAST = 8
"""Left-out runs that it takes to trust a correction at all."""
_UNKNOWN = Factors(0.6, 0.78, 1.28, 1.7)
"""Of steps so far from any run that nothing tells."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Known:
    """A run to learn from."""

    graph: LayerGraph
    place: Place
    family: str
    measured_s: float

    @property
    def target(self) -> float:
        """The logarithm of measured over forecast."""
        return float(np.log(self.measured_s / self.graph.base_s))


class CorrectionMember(nn.Module):
    """Directed graph convolutions (with and against the flow of data), a readout over all nodes, and the
    run's own features; ``correction.apply`` computes the same without torch."""

    def __init__(self, node_columns: int, run_columns: int, bound: float = BOUND) -> None:
        super().__init__()
        self.register_buffer("bound", torch.tensor(float(bound)))
        for name, size in (("node", node_columns), ("run", run_columns)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_scale", torch.ones(size))
        self.enter = nn.Linear(node_columns, HIDDEN)
        self.convolutions = nn.ModuleList(
            DirGNNConv(SAGEConv(HIDDEN, HIDDEN, root_weight=False)) for _ in range(2)
        )
        self.drop = nn.Dropout(_DROPOUT)
        leave = nn.Linear(HIDDEN, 1)
        nn.init.zeros_(leave.weight)
        nn.init.zeros_(leave.bias)
        self.readout = nn.Sequential(
            nn.Linear(2 * HIDDEN + run_columns, HIDDEN), nn.ReLU(), nn.Dropout(_DROPOUT), leave
        )

    def standardise(self, graphs: Sequence[LayerGraph], weights: Array) -> None:
        """Features of mean 0 and variance 1 over these graphs; of few, nearly equal ones nothing is blown
        up."""
        sizes = [len(graph.nodes) for graph in graphs]
        shares = weights / weights.sum()
        for name, rows, counted in (
            ("node", np.concatenate([graph.nodes for graph in graphs]), np.repeat(shares / sizes, sizes)),
            ("run", np.stack([graph.run for graph in graphs]), shares),
        ):
            mean = counted @ rows
            scale = np.maximum(np.sqrt(counted @ (rows - mean) ** 2), 0.1)
            getattr(self, f"{name}_mean").copy_(torch.from_numpy(mean))
            getattr(self, f"{name}_scale").copy_(torch.from_numpy(scale))

    def forward(self, batch: Any) -> Tensor:
        hidden = torch.relu(self.enter((batch.x - self.node_mean) / self.node_scale))
        for convolution in self.convolutions:
            hidden = hidden + self.drop(torch.relu(convolution(hidden, batch.edge_index)))
        pooled = [
            global_mean_pool(hidden, batch.batch),
            global_add_pool(hidden * batch.share[:, None], batch.batch),
        ]
        run = ((batch.run - self.run_mean) / self.run_scale).clamp(-3, 3)
        raw: Tensor = self.readout(torch.cat([*pooled, run], dim=1)).squeeze(1)
        return self.bound * torch.tanh(raw / self.bound)  # type: ignore[operator]

    def weights(self) -> Weights:
        return {name: tensor.numpy().astype(np.float64) for name, tensor in self.state_dict().items()}


def save(path: Path, correction: Correction) -> None:
    tensors = {
        f"{i}/{name}": torch.from_numpy(np.array(value, dtype=np.float32))
        for i, member in enumerate(correction.members)
        for name, value in member.items()
    }
    write_weights(
        path,
        tensors,
        {
            "format": FORMAT,
            "members": len(correction.members),
            "region": correction.region.to_list(),
            "gates": correction.gates,
            "factors": {trust: list(one) for trust, one in correction.factors.items()},
        },
    )


# Learning


def train(known: Sequence[Known], *, seed: int = 0) -> tuple[Correction, Array]:
    """The correction, and for each run the logarithm that it adds to a step of a family that it has not
    seen."""
    counted = _weights([run.place for run in known])
    folds = _folds(known, seed)
    data = [_data(run) for run in known]
    members, held_out = [], _HeldOut(known)
    with one_thread(), torch.random.fork_rng(devices=[]):
        for number, outside in enumerate(folds):
            torch.manual_seed(1000 * seed + number)
            inside = [i for i in range(len(known)) if i not in outside] or list(range(len(known)))
            tell("networks", number, len(folds))
            member = _trained([known[i] for i in inside], [data[i] for i in inside], counted[inside], seed)
            members.append(member.weights())
            if outside and len(inside) < len(known):
                region = Region.around([known[i].place for i in inside])
                scored = sorted(outside)
                held_out.add(scored, region, _apply(member, [data[i] for i in scored]))
    gates = held_out.gates(counted)
    return (
        Correction(
            members=tuple(members),
            region=Region.around([run.place for run in known]),
            gates=gates,
            factors=held_out.factors(gates, counted),
        ),
        held_out.of_families(gates),
    )


def _weights(places: Sequence[Place]) -> Array:
    """Places count with the root of their number of runs, so that none decides alone."""
    keys = [(place.mode, place.device, place.framework) for place in places]
    counts = Counter(keys)
    weights = np.array([1.0 / np.sqrt(counts[key]) for key in keys])
    return np.asarray(weights / weights.mean())


def _folds(known: Sequence[Known], seed: int) -> list[set[int]]:
    """List what each network is not shown: a part of the families, a part of the places, or, of each place,
    the largest numbers of devices."""
    by_family = _dealt([run.family for run in known], seed)
    by_place = _dealt([f"{run.place.device} {run.place.framework}" for run in known], seed)
    largest = _largest([run.place for run in known])
    folds = [*by_family, *by_place, *([largest] if largest else [])]
    return folds or [set()]


def _dealt(labels: Sequence[str], seed: int) -> list[set[int]]:
    """Runs by their labels, dealt out to parts, large groups first; nothing where all are of one."""
    groups: dict[str, list[int]] = {}
    for i, label in enumerate(labels):
        groups.setdefault(label, []).append(i)
    if len(groups) < 2:
        return []
    dealt = list(groups.values())
    random.Random(seed).shuffle(dealt)
    parts: list[set[int]] = [set() for _ in range(min(_PARTS, len(dealt)))]
    for group in sorted(dealt, key=len, reverse=True):
        min(parts, key=len).update(group)
    return parts


def _largest(places: Sequence[Place]) -> set[int]:
    """List, of each place, the runs on the largest third of the numbers of devices."""
    largest: set[int] = set()
    groups: dict[tuple[str, str], list[int]] = {}
    for i, place in enumerate(places):
        groups.setdefault((place.device, place.framework), []).append(i)
    for group in groups.values():
        sizes = sorted({places[i].devices for i in group})
        if len(sizes) > 1:
            limit = sizes[-1 - max(1, len(sizes) // 3)]
            largest |= {i for i in group if places[i].devices > limit}
    return largest


def _trained(
    known: Sequence[Known], data: Sequence[Data], weights: Array, seed: int, bound: float = BOUND
) -> CorrectionMember:
    graphs = [run.graph for run in known]
    member = CorrectionMember(graphs[0].nodes.shape[1], len(graphs[0].run), bound)
    member.standardise(graphs, weights)
    order = list(range(len(data)))
    random.Random(seed).shuffle(order)
    for i, one in enumerate(data):
        one.weight = torch.tensor([weights[i]], dtype=torch.float32)
    batches = _batches([data[i] for i in order], _BATCH)
    optimizer = torch.optim.AdamW(member.parameters(), lr=_RATE, weight_decay=_DECAY)
    epochs = max(_EPOCHS, -(-_STEPS // len(batches)))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=epochs * len(batches))
    loss, shuffled = nn.SmoothL1Loss(beta=_BEND, reduction="none"), random.Random(seed)
    member.train()
    for _ in range(epochs):
        shuffled.shuffle(batches)
        for batch in batches:
            optimizer.zero_grad()
            (loss(member(batch), batch.y) * batch.weight).mean().backward()
            optimizer.step()
            schedule.step()
    return member.eval()


def _apply(member: CorrectionMember, data: Sequence[Data]) -> Array:
    with torch.no_grad():
        answers = [member(batch) for batch in _batches(data, 64)]
    return torch.cat(answers).numpy().astype(np.float64)


def _batches(data: Sequence[Data], size: int) -> list[Batch]:
    """Graphs joined once: joining them takes as long as learning from them."""
    return [
        Batch.from_data_list(list(data[first : first + size])) for first in range(0, len(data), max(size, 1))
    ]


def _data(run: Known) -> Data:
    graph = run.graph
    return Data(
        x=torch.from_numpy(graph.nodes), edge_index=torch.from_numpy(graph.edges),
        share=torch.from_numpy(graph.share),
        run=torch.from_numpy(graph.run)[None], y=torch.tensor([run.target], dtype=torch.float32),
        num_nodes=len(graph.nodes),
    )  # fmt: skip


# What left-out runs say


class _HeldOut:
    """Answers of networks about runs that they had not seen, and how near the others lay."""

    def __init__(self, known: Sequence[Known]) -> None:
        self.known = known
        self.rows: list[tuple[int, Trust, float]] = []

    def add(self, places: Sequence[int], region: Region, answers: Array) -> None:
        for i, answer in zip(places, answers.tolist(), strict=True):
            place = self.known[i].place
            if place.mode in region.modes:
                self.rows.append((i, region.trust(place), answer))

    def gates(self, counted: Array) -> dict[Trust, float]:
        """Choose, by how near runs lay, the share of the correction with the least error; none where neither
        devices nor framework were seen, as the few places that tell of it are like no others."""
        return {trust: 0.0 if trust == "neither" else self._gate(trust, counted) for trust in TRUSTS}

    def _gate(self, trust: Trust, counted: Array) -> float:
        rows = [(self.known[i].target, answer, counted[i]) for i, own, answer in self.rows if own == trust]
        if len(rows) < _LEAST:
            return 0.0
        target, answer, weight = np.array(rows).T
        best, least = _SHARES[0], _error(target, weight)
        for share in _SHARES[1:]:
            error = _error(target - share * answer, weight)
            if error < _WORTH * least:
                best, least = share, error
        return best

    def factors(self, gates: Mapping[Trust, float], counted: Array) -> dict[Trust, Factors]:
        """Intervals by how near runs lay; the widest of all where few lay so."""
        left = [
            (trust, self.known[i].target - gates[trust] * answer, counted[i])
            for i, trust, answer in self.rows
        ]
        factors_of: dict[Trust, Factors] = {}
        for trust in TRUSTS:
            of_trust = [row for row in left if row[0] == trust]
            if len(of_trust) >= _LEAST and trust != "neither":
                logs, weights = (np.array([row[i] for row in of_trust]) for i in (1, 2))
                factors_of[trust] = intervals(np.exp(logs), weights)
        widest = _UNKNOWN
        for one in factors_of.values():
            widest = widest.widest(one)
        return {trust: factors_of.get(trust, widest) for trust in TRUSTS}

    def of_families(self, gates: Mapping[Trust, float]) -> Array:
        """Give the first answer about each run."""
        answers = np.zeros(len(self.known))
        for i, trust, answer in reversed(self.rows):
            answers[i] = gates[trust] * answer
        return answers


def _error(logs: Array, weights: Array) -> float:
    """The mean relative error of forecasts that are off by these logarithms."""
    return float((weights * np.abs(np.expm1(-logs))).sum() / weights.sum())


def free_network(known: Sequence[Known], asked: Sequence[Known], *, seed: int = 0) -> Array:
    """Answer about other runs by one network without a bound: the control that knows no engine."""
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        weights, data = _weights([run.place for run in known]), [_data(run) for run in known]
        member = _trained(known, data, weights, seed, bound=_FREE)
        return _apply(member, [_data(run) for run in asked])
