"""Embeds architectures with a graph hypernetwork in the manner of GHN-2.

Nodes are operators with a shape encoding. A gated graph network visits them in topological order, forward and
then backward; beside its neighbours a node hears those further up its paths, the more softly the further
(virtual edges, weight 1 / shortest path). The mean over the nodes is the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch_geometric.nn import global_mean_pool

from foretrain.errors import InputError
from foretrain.predictors.neural import one_thread, read_weights, write_weights
from foretrain.predictors.predictddl.primitives import KINDS, SHAPES, Primitives

FORMAT = "foretrain-predictddl-embedding/3"
ANY = "any"
"""Stands for a network that embeds graphs of every dataset type."""
SIZE = 32
FAR = 10
"""Shortest path up to which nodes hear one another by virtual edges (GHN-2: 50; beyond 10 the weight is below
a tenth)."""

Array = npt.NDArray[np.float64]


# Graphs


@dataclass(frozen=True, eq=False)
class Wave:
    """The nodes of one topological level of all graphs of a batch, and the messages that they get from
    earlier levels."""

    nodes: Tensor
    sources: Tensor
    targets: Tensor
    """Positions in ``nodes``."""
    weights: Tensor
    virtual: Tensor
    """1 where a message comes by a virtual edge."""


@dataclass(frozen=True, eq=False)
class GraphBatch:
    """Several graphs side by side, with the waves in which messages pass through them."""

    features: Tensor
    graph_of: Tensor
    forward: tuple[Wave, ...]
    backward: tuple[Wave, ...]
    count: int


def batch_of(graphs: Sequence[Primitives]) -> GraphBatch:
    """Graphs side by side."""
    sizes = [len(graph.kinds) for graph in graphs]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    features = np.concatenate([np.hstack([np.log1p(graph.kinds), graph.shapes]) for graph in graphs])
    pieces = [paths(graph) for graph in graphs]
    sources, targets = (
        np.concatenate([piece[i] + start for piece, start in zip(pieces, starts, strict=False)])
        for i in (0, 1)
    )
    lengths = np.concatenate([piece[2] for piece in pieces])
    return GraphBatch(
        features=torch.from_numpy(features.astype(np.float32)),
        graph_of=torch.from_numpy(np.repeat(np.arange(len(graphs)), sizes)),
        forward=_waves(int(starts[-1]), sources, targets, lengths),
        backward=_waves(int(starts[-1]), targets, sources, lengths),
        count=len(graphs),
    )


def paths(graph: Primitives) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Pairs of nodes that a path of at most ``FAR`` edges joins, and the length of the shortest one."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import dijkstra

    count = len(graph.kinds)
    if not graph.edges.shape[1]:
        return (np.zeros(0, dtype=np.int64),) * 3
    joined = csr_array(
        (np.ones(graph.edges.shape[1]), (graph.edges[0], graph.edges[1])), shape=(count, count)
    )
    distance = dijkstra(joined, unweighted=True, limit=FAR)
    sources, targets = np.nonzero(np.isfinite(distance) & (distance > 0))
    return sources.astype(np.int64), targets.astype(np.int64), distance[sources, targets].astype(np.int64)


def _waves(count: int, sources: Any, targets: Any, lengths: Any) -> tuple[Wave, ...]:
    """Levels by the longest path, so that all that a node hears is final."""
    level = np.zeros(count, dtype=np.int64)
    near_sources, near_targets = sources[lengths == 1], targets[lengths == 1]
    order = np.argsort(near_targets, kind="stable")
    pairs = list(zip(near_sources[order].tolist(), near_targets[order].tolist(), strict=True))
    if len(pairs) and pairs[0][0] > pairs[0][1]:
        pairs.sort(key=lambda pair: -pair[1])
    for source, target in pairs:
        level[target] = max(level[target], level[source] + 1)
    waves = []
    place = np.zeros(count, dtype=np.int64)
    of_edge = level[targets]
    by_level = np.argsort(of_edge, kind="stable")
    bounds = np.searchsorted(of_edge[by_level], np.arange(level.max(initial=0) + 2))
    for one in range(int(level.max(initial=0)) + 1):
        nodes = np.flatnonzero(level == one)
        place[nodes] = np.arange(len(nodes))
        edges = by_level[bounds[one] : bounds[one + 1]]
        inverse = 1.0 / lengths[edges]
        heard = np.bincount(place[targets[edges]], weights=inverse, minlength=len(nodes))
        weights = inverse / np.sqrt(np.maximum(heard, 1.0))[place[targets[edges]]] if len(edges) else inverse
        waves.append(Wave(
            torch.from_numpy(nodes), torch.from_numpy(sources[edges]),
            torch.from_numpy(place[targets[edges]]),
            torch.from_numpy(weights.astype(np.float32)),
            torch.from_numpy((lengths[edges] > 1).astype(np.float32)),
        ))  # fmt: skip
    return tuple(waves)


# The network


class HyperNetwork(nn.Module):
    """Node embedding, gated graph network and mean readout; whoever trains it has a decoder of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(len(KINDS) + len(SHAPES), SIZE)
        self.near = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE))
        self.far = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE))
        self.cell = nn.GRUCell(SIZE, SIZE)
        self.norm = nn.LayerNorm(SIZE)

    def nodes(self, batch: GraphBatch) -> Tensor:
        """The embedding of every node after one forward and one backward traversal."""
        hidden = self.enter(batch.features)
        for waves in (batch.forward, batch.backward):
            hidden = self._traverse(hidden, waves)
        normed: Tensor = self.norm(hidden)
        return normed

    def forward(self, batch: GraphBatch) -> Tensor:
        """The embedding of every graph: the mean over its nodes."""
        mean: Tensor = global_mean_pool(self.nodes(batch), batch.graph_of, batch.count)
        return mean

    def _traverse(self, hidden: Tensor, waves: Sequence[Wave]) -> Tensor:
        near, far = torch.zeros_like(hidden), torch.zeros_like(hidden)
        for wave in waves:
            virtual = wave.virtual[:, None]
            heard = (near[wave.sources] * (1 - virtual) + far[wave.sources] * virtual) * wave.weights[:, None]
            message = torch.zeros(len(wave.nodes), SIZE).index_add(0, wave.targets, heard)
            new = self.cell(message, hidden[wave.nodes])
            hidden = hidden.index_copy(0, wave.nodes, new)
            near, far = (
                near.index_copy(0, wave.nodes, self.near(new)),
                far.index_copy(0, wave.nodes, self.far(new)),
            )
        return hidden


@dataclass(frozen=True, eq=False)
class Embedding:
    """Trained networks by the dataset type that each is for (or ``ANY``), and what is known of their
    training."""

    networks: Mapping[str, HyperNetwork]
    facts: Mapping[str, Any]
    size: ClassVar[int] = SIZE

    def __call__(self, graphs: Sequence[Primitives], kind: str = ANY) -> Array:
        """A row of ``SIZE`` numbers for each graph; zeros of a dataset type that there is no network for."""
        network = self.networks.get(kind, self.networks.get(ANY))
        if network is None:
            return np.zeros((len(graphs), SIZE))
        rows = []
        with torch.no_grad(), one_thread():
            for first in range(0, len(graphs), 32):
                rows.append(network.eval()(batch_of(graphs[first : first + 32])).numpy())
        return np.concatenate(rows).astype(np.float64) if rows else np.zeros((0, SIZE))

    @property
    def shared(self) -> bool:
        """Whether rows of all dataset types mean the same."""
        return list(self.networks) == [ANY]

    def save(self, path: Path) -> None:
        """Write one safetensors file; the facts are JSON in its header."""
        tensors = {
            f"{kind}/{name}": tensor
            for kind, network in self.networks.items()
            for name, tensor in network.state_dict().items()
        }
        header = {
            **self.facts,
            "format": FORMAT,
            "kinds": KINDS,
            "shapes": SHAPES,
            "types": list(self.networks),
        }
        write_weights(path, tensors, header)


def load(path: Path) -> Embedding:
    """Read what ``Embedding.save`` wrote."""
    header, tensors = read_weights(path, "an embedding")
    if (header.get("format"), tuple(header.get("kinds", ())), tuple(header.get("shapes", ()))) != (
        FORMAT,
        KINDS,
        SHAPES,
    ):
        raise InputError(
            f"{path}: format {header.get('format')!r} is not {FORMAT!r} "
            "of this version's primitives; train it again"
        )
    networks = {}
    for kind in header["types"]:
        networks[kind] = HyperNetwork().eval()
        start = f"{kind}/"
        own = {name.removeprefix(start): one for name, one in tensors.items() if name.startswith(start)}
        networks[kind].load_state_dict(own)
    return Embedding(networks, header)


def untrained(seed: int = 0) -> Embedding:
    """The control: random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Embedding({ANY: HyperNetwork()}, {"objective": "none", "seed": seed})
