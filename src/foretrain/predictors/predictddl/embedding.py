"""Embeds architectures with a graph hypernetwork in the manner of GHN-2.

Nodes are operators with a shape encoding. A gated graph network visits them in topological order, forward and
then backward; beside its neighbours a node hears those further up its paths, the more softly the further
(virtual edges, weight 1 / shortest path). The mean over the nodes is the embedding. Two ways to train it:
``train_parameters`` lets a decoder predict the weights of small networks, which then classify digits (the
hypernetwork objective); ``train_costs`` lets a decoder predict what an architecture costs (``TARGETS``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import global_mean_pool

from foretrain.errors import InputError
from foretrain.predictors.neural import one_thread, read_weights, write_weights
from foretrain.predictors.predictddl.primitives import KINDS, SHAPES, TARGETS, Primitives, cost_targets
from foretrain.predictors.predictddl.random import Layer, Sketch

FORMAT = "foretrain-predictddl-embedding/2"
_DECODERS = ("costs.", "weights.")
"""Parts of the network that only training needs."""
SIZE = 32
FAR = 10
"""Shortest path up to which nodes hear one another by virtual edges (GHN-2: 50; beyond 10 the weight is below
a tenth)."""
TILE = 16
"""Channels either way of the block of weights that the decoder predicts; wider layers repeat it."""

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
    """Node embedding, gated graph network, mean readout, and a decoder for either way of training."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(len(KINDS) + len(SHAPES), SIZE)
        self.near = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE))
        self.far = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE))
        self.cell = nn.GRUCell(SIZE, SIZE)
        self.norm = nn.LayerNorm(SIZE)
        self.costs = nn.Sequential(nn.Linear(SIZE, 64), nn.ReLU(), nn.Linear(64, len(TARGETS)))
        self.weights = nn.Sequential(nn.Linear(SIZE, 64), nn.ReLU(), nn.Linear(64, TILE * TILE * 9))

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

    def tensors_of(self, node: Tensor, layer: Layer) -> Tensor:
        """The weights of a layer from its node: a tile, repeated to the layer's width and scaled to keep the
        signal's size."""
        kernel, inward = layer.kernel, layer.channels_in // layer.groups
        tile: Tensor = self.weights(node).view(TILE, TILE, 3, 3)
        tile = tile if kernel == 3 else tile[:, :, 1:2, 1:2]
        wide = tile.repeat(-(-layer.channels // TILE), -(-inward // TILE), 1, 1)[: layer.channels, :inward]
        scale: Tensor = (2.0 / (inward * kernel * kernel)) ** 0.5 / (wide.std() + 1e-3)
        return wide * scale


@dataclass(frozen=True, eq=False)
class Embedding:
    """A trained network and what is known of its training."""

    network: HyperNetwork
    facts: Mapping[str, Any]

    def __call__(self, graphs: Sequence[Primitives]) -> Array:
        """A row of ``SIZE`` numbers for each graph."""
        rows = []
        with torch.no_grad(), one_thread():
            for first in range(0, len(graphs), 32):
                rows.append(self.network.eval()(batch_of(graphs[first : first + 32])).numpy())
        return np.concatenate(rows).astype(np.float64) if rows else np.zeros((0, SIZE))

    def save(self, path: Path) -> None:
        """One safetensors file without the decoders; the facts are JSON in its header."""
        tensors = {
            name: tensor
            for name, tensor in self.network.state_dict().items()
            if not name.startswith(_DECODERS)
        }
        header = {"format": FORMAT, "kinds": KINDS, "shapes": SHAPES, **self.facts}
        write_weights(path, tensors, header)


def load(path: Path) -> Embedding:
    """What ``Embedding.save`` wrote."""
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
    network = HyperNetwork()
    network.load_state_dict(tensors, strict=False)
    return Embedding(network.eval(), header)


# Training


def untrained(seed: int = 0) -> Embedding:
    """The control: random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Embedding(HyperNetwork(), {"objective": "none", "seed": seed})


def train_costs(
    graphs: Sequence[Primitives],
    *,
    epochs: int = 20,
    size: int = 32,
    rate: float = 3e-3,
    seed: int = 0,
    tell: Callable[[str], None] = print,
) -> Embedding:
    """A decoder of the embedding predicts ``TARGETS``; every tenth graph is held out and tells how well."""
    targets = np.array([cost_targets(graph) for graph in graphs])
    mean, deviation = targets.mean(axis=0), np.maximum(targets.std(axis=0), 0.1)
    scaled = torch.from_numpy(((targets - mean) / deviation).astype(np.float32))
    inside, outside = ([i for i in range(len(graphs)) if (i % 10 == 0) == held] for held in (False, True))
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = HyperNetwork()
        batches, test = (_by_size(graphs, some, size) for some in (inside, outside))
        optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=1e-4)
        plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * len(batches))
        order, error = random.Random(seed), float("nan")
        for epoch in range(epochs):
            order.shuffle(batches)
            for places, batch in batches:
                optimizer.zero_grad()
                F.smooth_l1_loss(network.costs(network(batch)), scaled[places]).backward()
                nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
                plan.step()
            with torch.no_grad():
                found = [(network.costs(network(batch)) - scaled[places]).abs() for places, batch in test]
            error = float(torch.cat(found).mean())
            tell(f"costs: epoch {epoch + 1}: held-out error {error:.3f} standard deviations")
    return Embedding(
        network.eval(), {"objective": "costs", "seed": seed, "graphs": len(graphs), "held_out_error": error}
    )


def train_parameters(
    sketches: Sequence[Sketch],
    *,
    steps: int = 400,
    at_once: int = 4,
    rate: float = 2e-3,
    seed: int = 0,
    tell: Callable[[str], None] = print,
) -> Embedding:
    """The decoder predicts the weights of small networks, which are judged by how they classify digits
    (scikit-learn's, 8 x 8)."""
    images, labels = _digits()
    test = torch.arange(len(labels)) % 5 == 0
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = HyperNetwork()
        optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=1e-4)
        plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
        order, inside = random.Random(seed), torch.nonzero(~test)[:, 0]
        known, unseen = sketches[: -len(sketches) // 8], sketches[-len(sketches) // 8 :]
        for step in range(steps):
            chosen = order.sample(list(known), at_once)
            places = inside[torch.randint(len(inside), (64,))]
            loss = torch.stack(
                [F.cross_entropy(run(network, sketch, images[places]), labels[places]) for sketch in chosen]
            ).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            plan.step()
            if (step + 1) % 100 == 0:
                tell(f"parameters: step {step + 1}: loss {loss.item():.3f}")
        accuracy = _accuracy(network, unseen[:20], images[test], labels[test])
    tell(f"parameters: digits classified by predicted weights of unseen networks: {accuracy:.1%}")
    return Embedding(
        network.eval(),
        {"objective": "parameters", "seed": seed, "graphs": len(sketches), "accuracy": accuracy},
    )


def run(network: HyperNetwork, sketch: Sketch, images: Tensor) -> Tensor:
    """The logits of a sketched network whose weights the hypernetwork predicts."""
    nodes = network.nodes(batch_of([sketch.primitives()]))
    values: list[Tensor] = []
    for layer, node in zip(sketch.layers, nodes, strict=True):
        inputs = [values[source] for source in layer.sources] or [images]
        values.append(_apply(network, layer, node, inputs))
    return values[-1]


def _apply(network: HyperNetwork, layer: Layer, node: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    first = inputs[0]
    if layer.kind == "product":
        return first.flatten(1) @ network.tensors_of(node, layer)[:, :, 0, 0].T
    if "convolution" in layer.kind:
        out = F.conv2d(
            first,
            network.tensors_of(node, layer),
            stride=layer.stride,
            padding=layer.kernel // 2,
            groups=layer.groups,
        )
        return torch.relu(F.batch_norm(out, None, None, training=True)) if layer.normalised else out
    if layer.kind == "pooling":
        return F.max_pool2d(first, 2)
    if layer.kind == "global average":
        return first.mean(dim=(2, 3), keepdim=True)
    if layer.kind == "scale":
        return first * torch.sigmoid(inputs[1])
    return torch.cat(list(inputs), dim=1) if layer.kind == "concat" else torch.stack(list(inputs)).sum(dim=0)


def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.from_numpy(found.images.astype(np.float32) / 8 - 1)[:, None].repeat(1, 3, 1, 1)
    return images, torch.from_numpy(found.target.astype(np.int64))


def _accuracy(network: HyperNetwork, sketches: Sequence[Sketch], images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        right = [(run(network, sketch, images).argmax(dim=1) == labels).float().mean() for sketch in sketches]
    return float(torch.stack(right).mean())


def _by_size(
    graphs: Sequence[Primitives], places: Sequence[int], size: int
) -> list[tuple[Tensor, GraphBatch]]:
    """Graphs of like size together: a batch takes as many steps as its deepest graph."""
    ordered = sorted(places, key=lambda i: len(graphs[i].kinds))
    parts = [ordered[first : first + size] for first in range(0, len(ordered), size)]
    return [(torch.tensor(part), batch_of([graphs[i] for i in part])) for part in parts]
