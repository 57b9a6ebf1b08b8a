"""Trains the networks that give the figures of a step from its groups of operators."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import (
    DirGNNConv,
    GATConv,
    GCNConv,
    GINConv,
    GraphConv,
    SAGEConv,
    Set2Set,
    global_add_pool,
    global_max_pool,
)

from foretrain.predictors.driple.features import Array, Groups
from foretrain.predictors.neural import one_thread, read_members, write_members
from foretrain.progress import tell

FORMAT = "foretrain-driple/1"
WIDTH = 64
ROUNDS = 3
"""Graph convolutions of the reference, all followed by the same GRU."""
LAYERS = 2
"""Graph convolutions of the improved network."""
MEMBERS = 4
"""Improved networks, each trained without a quarter of the families, which tell when to stop; the forecast is
their mean."""
_DROPOUT, BEND = 0.1, 0.5
Kind = Literal["improved", "gcn", "gin", "gat", "mpnn"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Says how long to learn and how fast."""

    epochs: int
    patience: int
    rates: tuple[float, ...]
    """Learning rates; the held-out runs choose among several, and without such runs the first is taken."""
    decay: float
    batch: int | None = None
    """Runs in a step of the optimiser; None for all of them."""


SCHEDULES = {"improved": Schedule(epochs=150, patience=40, rates=(5e-3,), decay=1e-2)}
REFERENCE_SCHEDULE = Schedule(epochs=40, patience=12, rates=(3e-3, 1e-3, 1e-2), decay=1e-6, batch=12)
_GAINS, ENOUGH = (1.0, 0.75, 0.5, 0.25, 0.1), 16
"""Shares of a correction that are tried on held-out runs, and how many of these it takes."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Samples:
    """Holds what is learned from: distinct graphs, and for each run its graph, its setting and its
    figures."""

    graphs: Sequence[Groups]
    graph_of: npt.NDArray[np.int64]
    settings: Array
    """A row per run; no columns in the reference, which has a network per setting."""
    targets: Array
    """A row per run; not a number where a figure was not measured."""

    def __len__(self) -> int:
        return len(self.graph_of)

    def part(self, rows: Sequence[int]) -> Samples:
        """Keep these runs alone, with the graphs that they need."""
        index = np.array(rows, dtype=np.int64)
        needed, graph_of = np.unique(self.graph_of[index], return_inverse=True)
        return Samples(
            graphs=[self.graphs[i] for i in needed.tolist()],
            graph_of=graph_of.astype(np.int64),
            settings=self.settings[index],
            targets=self.targets[index],
        )


# The networks


class ReferenceBody(nn.Module):
    """Driple's: convolutions that share one GRU, and Set2Set over the nodes."""

    def __init__(self, columns: int, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.enter = nn.Linear(columns, WIDTH)
        self.convolutions = nn.ModuleList(_convolution(kind) for _ in range(ROUNDS))
        self.gru = nn.GRUCell(WIDTH, WIDTH)
        self.readout = Set2Set(WIDTH, processing_steps=3)
        self.size = 2 * WIDTH

    def forward(self, nodes: Tensor, batch: Any) -> Tensor:
        hidden = torch.relu(self.enter(nodes))
        for convolution in self.convolutions:
            hidden = self.gru(torch.relu(convolution(hidden, batch.edge_index)), hidden)
        graphs: Tensor = self.readout(hidden, batch.batch)
        return graphs


def _convolution(kind: Kind) -> nn.Module:
    """The MPNN's network for an edge sees nothing but that there is one: it is a matrix, the same for all of
    them."""
    if kind == "gin":
        return GINConv(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)))  # type: ignore[no-any-return]
    if kind == "gat":
        return GATConv(WIDTH, WIDTH // 4, heads=4)  # type: ignore[no-any-return]
    if kind == "mpnn":
        return GraphConv(WIDTH, WIDTH)  # type: ignore[no-any-return]
    return GCNConv(WIDTH, WIDTH)  # type: ignore[no-any-return]


class DirectedBody(nn.Module):
    """Convolutions with and against the flow of data; a readout that weighs nodes by their traffic, and their
    maxima."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.enter = nn.Linear(columns, WIDTH)
        self.convolutions = nn.ModuleList(DirGNNConv(SAGEConv(WIDTH, WIDTH)) for _ in range(LAYERS))
        self.drop = nn.Dropout(_DROPOUT)
        self.leave = nn.Linear(2 * WIDTH, WIDTH // 4)
        self.size = WIDTH // 4

    def forward(self, nodes: Tensor, batch: Any) -> Tensor:
        hidden = torch.relu(self.enter(nodes))
        for convolution in self.convolutions:
            hidden = hidden + self.drop(torch.relu(convolution(hidden, batch.edge_index)))
        pooled = [
            global_add_pool(hidden * batch.share[:, None], batch.batch),
            global_max_pool(hidden, batch.batch),
        ]
        return torch.tanh(self.leave(torch.cat(pooled, dim=1)))


class Member(nn.Module):
    """A body that reads the graph, and a head that reads its result, the whole step's sums and the
    setting."""

    node_mean: Tensor
    node_scale: Tensor
    beside_mean: Tensor
    beside_scale: Tensor
    target_mean: Tensor
    target_scale: Tensor
    known: Tensor
    """1 for figures that differ between runs; the others are their mean."""

    def __init__(self, kind: Kind, sizes: Sequence[int]) -> None:
        super().__init__()
        self.kind, self.sizes = kind, tuple(sizes)
        columns, whole, setting, targets = self.sizes
        self.body = DirectedBody(columns) if kind == "improved" else ReferenceBody(columns, kind)
        for name, size in (("node", columns), ("beside", whole + setting), ("target", targets)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_scale", torch.ones(size))
        self.register_buffer("known", torch.ones(targets))
        width = self.body.size + whole + setting
        self.head = _improved_head(width, targets) if kind == "improved" else _reference_head(width, targets)
        self.direct = nn.Linear(whole + setting, targets) if kind == "improved" else None

    def forward(self, batch: Any, graph_of: Tensor, beside: Tensor) -> Tensor:
        """Standardised figures of each run."""
        return self.outer(*self.inner(batch, graph_of, beside))

    def inner(self, batch: Any, graph_of: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        """Compute what the last layer of the head reads, and what goes straight to the figures: a row per
        run."""
        graph = self.body((batch.x - self.node_mean) / self.node_scale, batch)[graph_of]
        beside = ((beside - self.beside_mean) / self.beside_scale).clamp(-3, 3)
        return self.head[:-1](torch.cat([graph, beside], dim=1)), beside

    def outer(self, inner: Tensor, beside: Tensor) -> Tensor:
        figures: Tensor = self.head[-1](inner)
        return figures if self.direct is None else figures + self.direct(beside)

    def standardise(self, samples: Samples) -> None:
        """Standardise by mean and deviation; the nodes of the reference by the largest value, as Driple
        does."""
        rows = {
            "node": np.concatenate([graph.nodes for graph in samples.graphs]),
            "beside": _beside(samples),
            "target": samples.targets,
        }
        for name, values in rows.items():
            if not values.shape[1]:
                continue
            present = np.isfinite(values)
            kept = np.where(present, values, 0.0)
            count = np.maximum(present.sum(axis=0), 1)
            mean = kept.sum(axis=0) / count
            scale = np.sqrt((np.where(present, values - mean, 0.0) ** 2).sum(axis=0) / count)
            if self.kind != "improved" and name == "node":
                mean, scale = np.zeros_like(mean), np.abs(kept).max(axis=0)
            if name == "target":
                self.known.copy_(torch.from_numpy((scale > 1e-6).astype(np.float32)))
            getattr(self, f"{name}_mean").copy_(torch.from_numpy(mean))
            getattr(self, f"{name}_scale").copy_(
                torch.from_numpy(np.maximum(scale, 1e-6 if name == "target" else 1e-2))
            )

    def temper(self, gain: Array) -> None:
        """Answer with so much of what was learned of each figure."""
        for values in (self.target_mean, self.target_scale):
            values.mul_(torch.from_numpy(gain.astype(np.float32)))


def _reference_head(width: int, targets: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, targets)
    )


def _improved_head(width: int, targets: int) -> nn.Sequential:
    leave = nn.Linear(WIDTH, targets)
    nn.init.zeros_(leave.weight)
    nn.init.zeros_(leave.bias)
    return nn.Sequential(
        nn.Linear(width, WIDTH), nn.SiLU(), nn.Dropout(_DROPOUT), nn.Linear(WIDTH, WIDTH), nn.SiLU(), leave
    )


@dataclass(frozen=True, eq=False)
class Network:
    """Members whose mean is the answer."""

    members: tuple[Member, ...]

    @property
    def kind(self) -> Kind:
        return self.members[0].kind

    def figures(self, samples: Samples) -> Array:
        """A row of figures per run, in the units that were learned."""
        with one_thread():
            return np.asarray(np.mean([_apply(member, batched(samples)) for member in self.members], axis=0))

    def save(self, path: Path) -> None:
        write_members(
            path, self.members, {"format": FORMAT, "kind": self.kind, "sizes": self.members[0].sizes}
        )


def load(path: Path) -> Network:
    """Read what ``Network.save`` wrote."""
    header, weights = read_members(path, FORMAT)
    members = []
    for tensors in weights:
        member = Member(header["kind"], header["sizes"])
        member.load_state_dict(tensors)
        members.append(member.eval())
    return Network(tuple(members))


# Learning


def train(
    samples: Samples,
    groups: Sequence[str],
    kind: Kind = "improved",
    *,
    seed: int = 0,
    members: int | None = None,
) -> tuple[Network, Array]:
    """The network, and for each run the figures of a member that had not seen its group (any member, when
    there are few groups)."""
    count = members or (MEMBERS if kind == "improved" else 1)
    parts = parts_apart(groups, max(count, MEMBERS), seed)[:count] if len(set(groups)) >= MEMBERS else [[]]
    held_out = np.full(samples.targets.shape, np.nan)
    trained = []
    with one_thread(), torch.random.fork_rng(devices=[]):
        for number, part in enumerate(parts):
            inside = samples.part(sorted(set(range(len(samples))) - set(part)))
            outside = samples.part(part) if part else None
            member = _trained(kind, inside, outside, 1000 * seed + number)
            trained.append(member.eval())
            if outside is not None:
                held_out[part] = _apply(member, batched(outside))
        if kind == "improved" and len(parts) > 1:
            gain = borne_out(held_out, samples.targets)
            held_out *= gain
            for member in trained:
                member.temper(gain)
    network = Network(tuple(trained))
    missing = np.isnan(held_out).all(axis=1)
    if missing.any():
        held_out[missing] = network.figures(samples.part(np.flatnonzero(missing).tolist()))
    return network, held_out


def borne_out(held_out: Array, targets: Array) -> Array:
    """Say how much of what was learned of each figure held on runs that were held out: a correction that made
    them worse is left out but for a trace."""
    trust = np.ones(targets.shape[1])
    for figure in range(targets.shape[1]):
        measured = np.isfinite(targets[:, figure]) & np.isfinite(held_out[:, figure])
        if measured.sum() >= ENOUGH:
            wanted, learned = targets[measured, figure], held_out[measured, figure]
            off = [float(np.abs(wanted - gain * learned).mean()) for gain in _GAINS]
            trust[figure] = _GAINS[int(np.argmin(off))]
    return trust


def _trained(kind: Kind, inside: Samples, outside: Samples | None, seed: int) -> Member:
    """At the learning rate that the held-out runs like best."""
    schedule, first = SCHEDULES.get(kind, REFERENCE_SCHEDULE), inside.graphs[0]
    sizes = (first.nodes.shape[1], len(first.whole), inside.settings.shape[1], inside.targets.shape[1])
    tried: list[tuple[float, int, Member]] = []
    for rate in schedule.rates[: 1 if outside is None else None]:
        torch.manual_seed(seed)
        member = Member(kind, sizes)
        member.standardise(inside)
        error = _learn(member, inside, outside, dataclasses.replace(schedule, rates=(rate,)))
        tried.append((error, len(tried), member))
    return min(tried)[-1]


def parts_apart(groups: Sequence[str], count: int, seed: int) -> list[list[int]]:
    """The runs in parts that share no group, large groups first to the smallest part."""
    by_group: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        by_group.setdefault(group, []).append(i)
    dealt = list(by_group.values())
    random.Random(seed).shuffle(dealt)
    parts: list[list[int]] = [[] for _ in range(min(count, len(dealt)))]
    for group_of in sorted(dealt, key=len, reverse=True):
        min(parts, key=len).extend(group_of)
    return [sorted(part) for part in parts]


def _learn(member: Member, inside: Samples, outside: Samples | None, schedule: Schedule) -> float:
    """Learn until the held-out runs no longer get better, and go back to where they were best; returns their
    error; the rate falls along a cosine."""
    optimizer = torch.optim.AdamW(member.parameters(), lr=schedule.rates[0], weight_decay=schedule.decay)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, schedule.epochs)
    whole, held_out = batched(inside), batched(outside) if outside is not None else None
    best, state, since = np.inf, copy.deepcopy(member.state_dict()), 0
    for epoch in range(schedule.epochs):
        tell("epochs of a network (it may end earlier)", epoch, schedule.epochs)
        member.train()
        for batch in [whole] if schedule.batch is None else _batches(inside, schedule.batch):
            optimizer.zero_grad()
            loss = _loss(member, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(member.parameters(), 5.0)
            optimizer.step()
        falling.step()
        if held_out is None or epoch % 2:
            continue
        member.eval()
        with torch.no_grad():
            error = float(_loss(member, held_out))
        if error < best:
            best, state, since = error, copy.deepcopy(member.state_dict()), epoch
        elif epoch - since >= schedule.patience:
            break
    if held_out is not None:
        member.load_state_dict(state)
    return float(best)


def _batches(samples: Samples, size: int) -> Iterator[tuple[Batch, Tensor, Tensor, Tensor]]:
    """Deal all runs out once, in a random order, in parts of equal size."""
    order = torch.randperm(len(samples)).numpy()
    for part in np.array_split(order, max(1, round(len(samples) / size))):
        yield batched(samples.part(part.tolist()))


def _loss(member: Member, inputs: tuple[Batch, Tensor, Tensor, Tensor]) -> Tensor:
    """Compute the loss, in which every figure counts alike: each in its own deviation, and the mean over
    those that were measured."""
    batch, graph_of, beside, targets = inputs
    wanted = (targets - member.target_mean) / member.target_scale
    weight = torch.isfinite(wanted).float() * member.known
    wanted = torch.nan_to_num(wanted)
    figures = member(batch, graph_of, beside)
    robust = member.kind == "improved"
    each = (
        nn.functional.smooth_l1_loss(figures, wanted, beta=BEND, reduction="none")
        if robust
        else (figures - wanted) ** 2
    )
    return (each * weight).sum() / weight.sum().clamp(min=1.0)


def _apply(member: Member, inputs: tuple[Batch, Tensor, Tensor, Tensor]) -> Array:
    member.eval()
    with torch.no_grad():
        figures: Tensor = member(*inputs[:3]) * member.known * member.target_scale + member.target_mean
    return np.asarray(figures.numpy(), dtype=np.float64)


def batched(samples: Samples) -> tuple[Batch, Tensor, Tensor, Tensor]:
    """The graphs, the graph of each run, what a network reads beside it, and the figures."""
    data = [
        Data(
            x=torch.from_numpy(g.nodes),
            edge_index=torch.from_numpy(g.edges),
            share=torch.from_numpy(g.share),
            num_nodes=len(g.nodes),
        )
        for g in samples.graphs
    ]
    beside, targets = (
        torch.from_numpy(values.astype(np.float32)) for values in (_beside(samples), samples.targets)
    )
    return Batch.from_data_list(data), torch.from_numpy(samples.graph_of), beside, targets


def _beside(samples: Samples) -> Array:
    """The sums over a run's step, and its setting."""
    whole = np.stack([graph.whole for graph in samples.graphs])[samples.graph_of]
    return np.concatenate([whole, samples.settings], axis=1).astype(np.float64)
