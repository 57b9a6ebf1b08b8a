"""Trains a small graph neural network that gives the bounded correction of a step from its layers."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import DirGNNConv, SAGEConv, global_add_pool, global_mean_pool

from foretrain.predictors.neural import one_thread, read_members, write_members
from foretrain.progress import tell

if TYPE_CHECKING:
    from foretrain.predictors.scaledl.predictor import LayerGraph

FORMAT = "foretrain-scaledl/1"
BOUND = 0.7
"""Of the logarithm of the correction: a factor of two either way."""
HIDDEN = 32
MEMBERS = 5
"""Networks, each trained without a fifth of the architectures, which tell when to stop; the correction is
their mean."""
_EPOCHS, _PATIENCE, _FEWEST_EPOCHS = 80, 15, 40
_BATCH = 32
_RATE, _DECAY, _DROPOUT = 3e-3, 1e-2, 0.1
_BEND = 0.1
"""Error of the logarithm from which the loss grows linearly: a few odd runs do not decide."""

Array = npt.NDArray[np.float64]


class CorrectionMember(nn.Module):
    """Directed graph convolutions (with and against the flow of data), a readout over all nodes, and the
    run's own features."""

    def __init__(self, node_columns: int, run_columns: int, bound: float) -> None:
        super().__init__()
        self.bound = bound
        self.node_columns, self.run_columns = node_columns, run_columns
        for name, size in (("node", node_columns), ("run", run_columns)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_scale", torch.ones(size))
        self.enter = nn.Linear(node_columns, HIDDEN)
        self.convolutions = nn.ModuleList(DirGNNConv(SAGEConv(HIDDEN, HIDDEN)) for _ in range(2))
        self.drop = nn.Dropout(_DROPOUT)
        leave = nn.Linear(HIDDEN, 1)
        nn.init.zeros_(leave.weight)
        nn.init.zeros_(leave.bias)
        self.readout = nn.Sequential(
            nn.Linear(2 * HIDDEN + run_columns, HIDDEN), nn.ReLU(), nn.Dropout(_DROPOUT), leave
        )

    def standardise(self, graphs: Sequence[LayerGraph]) -> None:
        """Features of mean 0 and variance 1 over these graphs; of few, nearly equal ones nothing is blown
        up."""
        for name, rows in (
            ("node", np.concatenate([graph.nodes for graph in graphs])),
            ("run", np.stack([graph.run for graph in graphs])),
        ):
            getattr(self, f"{name}_mean").copy_(torch.from_numpy(rows.mean(axis=0)))
            getattr(self, f"{name}_scale").copy_(torch.from_numpy(np.maximum(rows.std(axis=0), 0.1)))

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
        return self.bound * torch.tanh(raw / self.bound)


@dataclass(frozen=True, eq=False)
class CorrectionNetwork:
    """Members whose mean is the logarithm of the correction."""

    members: tuple[CorrectionMember, ...]

    def factor(self, graph: LayerGraph) -> float:
        """What the step time of the layers is multiplied by."""
        return float(np.exp(self.log_factors([graph])[0]))

    def log_factors(self, graphs: Sequence[LayerGraph]) -> Array:
        data = _batches([_data(graph) for graph in graphs], 64)
        with one_thread():
            each = np.array([_apply(member, data) for member in self.members])
        return np.asarray(each.mean(axis=0))

    def save(self, path: Path) -> None:
        first = self.members[0]
        sizes = {"node_columns": first.node_columns, "run_columns": first.run_columns, "bound": first.bound}
        write_members(path, self.members, {"format": FORMAT, **sizes})


def load(path: Path) -> CorrectionNetwork:
    """What ``CorrectionNetwork.save`` wrote."""
    header, weights = read_members(path, FORMAT)
    members = []
    for tensors in weights:
        member = CorrectionMember(header["node_columns"], header["run_columns"], header["bound"])
        member.load_state_dict(tensors)
        members.append(member.eval())
    return CorrectionNetwork(tuple(members))


def train(
    graphs: Sequence[LayerGraph],
    measured_s: Array,
    groups: Sequence[str],
    *,
    seed: int = 0,
    bound: float = BOUND,
) -> tuple[CorrectionNetwork, Array]:
    """The network, and for each run the step time that a member which had not seen its group gives (any
    member, when there are few groups)."""
    targets = np.log(measured_s / np.array([graph.base_s for graph in graphs]))
    data = [_data(graph, target) for graph, target in zip(graphs, targets, strict=True)]
    parts = _parts(groups, seed)
    members, held_out = [], np.empty(len(graphs))
    with one_thread(), torch.random.fork_rng(devices=[]):
        for number, part in enumerate(parts):
            torch.manual_seed(1000 * seed + number)
            inside = [i for i in range(len(graphs)) if i not in part] or sorted(part)
            outside = sorted(part) if len(parts) > 1 else []
            member = CorrectionMember(graphs[0].nodes.shape[1], len(graphs[0].run), bound)
            member.standardise([graphs[i] for i in inside])
            _train_member(member, [data[i] for i in inside], [data[i] for i in outside], random.Random(seed))
            members.append(member.eval())
            scored = sorted(part)
            held_out[scored] = _apply(member, _batches([data[i] for i in scored], 64))
    return CorrectionNetwork(tuple(members)), np.exp(held_out) * np.array([graph.base_s for graph in graphs])


def _parts(groups: Sequence[str], seed: int) -> list[set[int]]:
    """Groups dealt out to the members, large ones first; all in one part when there are too few to hold some
    out."""
    by_group: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        by_group.setdefault(group, []).append(i)
    if len(by_group) < MEMBERS:
        return [set(range(len(groups)))]
    dealt = list(by_group.values())
    random.Random(seed).shuffle(dealt)
    parts: list[set[int]] = [set() for _ in range(MEMBERS)]
    for group_of in sorted(dealt, key=len, reverse=True):
        min(parts, key=len).update(group_of)
    return parts


def _train_member(
    member: CorrectionMember, inside: list[Data], outside: list[Data], order: random.Random
) -> None:
    """Until the held-out runs no longer get better, and back to where they were best."""
    optimizer = torch.optim.AdamW(member.parameters(), lr=_RATE, weight_decay=_DECAY)
    loss = nn.SmoothL1Loss(beta=_BEND)
    best, state, since = np.inf, copy.deepcopy(member.state_dict()), 0
    order.shuffle(inside)
    batches, test = _batches(inside, _BATCH), _batches(outside, len(outside))
    epochs = _EPOCHS if outside else _FEWEST_EPOCHS
    for epoch in range(epochs):
        tell("epochs of a network (it may end earlier)", epoch, epochs)
        member.train()
        order.shuffle(batches)
        for batch in batches:
            optimizer.zero_grad()
            loss(member(batch), batch.y).backward()
            optimizer.step()
        if not test:
            continue
        error = float(np.abs(_apply(member, test) - test[0].y.numpy()).mean())
        if error < best:
            best, state, since = error, copy.deepcopy(member.state_dict()), epoch
        elif epoch - since >= _PATIENCE:
            break
    if test:
        member.load_state_dict(state)


def _apply(member: CorrectionMember, batches: Sequence[Batch]) -> Array:
    member.eval()
    with torch.no_grad():
        return torch.cat([member(batch) for batch in batches]).numpy().astype(np.float64)


def _batches(data: Sequence[Data], size: int) -> list[Batch]:
    """Graphs joined once: joining them takes as long as learning from them."""
    return [
        Batch.from_data_list(list(data[first : first + size])) for first in range(0, len(data), max(size, 1))
    ]


def _data(graph: LayerGraph, target: float = 0.0) -> Data:
    return Data(
        x=torch.from_numpy(graph.nodes), edge_index=torch.from_numpy(graph.edges),
        share=torch.from_numpy(graph.share),
        run=torch.from_numpy(graph.run)[None], y=torch.tensor([target], dtype=torch.float32),
        num_nodes=len(graph.nodes),
    )  # fmt: skip
