"""Trains networks that embed architectures, by one of several objectives, and goes on where it stopped."""

from __future__ import annotations

import hashlib
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretrain.errors import InputError
from foretrain.predictors.neural import one_thread, read_weights, write_weights
from foretrain.predictors.predictddl.embedding import SIZE, GraphBatch, HyperNetwork, batch_of
from foretrain.predictors.predictddl.primitives import (
    KINDS,
    TARGETS,
    Primitives,
    cost_targets,
    histogram,
    roofline_s,
)

_BATCH, _WARM_UP = 16, 0.1
"""Graphs of a step, and the share of the steps in which the rate rises."""
_DECAY, _LONGEST_GRADIENT = 1e-4, 1.0
_CHECKPOINT = "foretrain-predictddl-training/1"
_SAVED_EVERY = 50
"""Steps after which what was reached is written down."""
_HELD_OUT = 10
"""Every so manieth graph is left out of training and tells how well it went."""


class Objective(ABC):
    """Says what a network is trained for: a decoder of its own, the loss of a step, and how well it does."""

    name: ClassVar[str]
    rate: float = 3e-3
    decoder: nn.Module
    data: str
    """What it learns from, in a word that other data does not have."""

    @abstractmethod
    def loss(self, network: HyperNetwork, draw: random.Random) -> Tensor: ...

    @abstractmethod
    def judged(self, network: HyperNetwork) -> dict[str, float]:
        """Say how well it does on what was left out of training, by name."""


def train(
    objective: Objective,
    *,
    steps: int,
    seed: int = 0,
    checkpoint: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[HyperNetwork, dict[str, Any]]:
    """The network and what is known of its training.

    Every step draws from a generator of its own, so that a training that goes on from its ``checkpoint``
    gives what one without a pause gives.
    """
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = HyperNetwork()
        plan = f"{objective.name}, {steps} steps, seed {seed}, {objective.data}"
        both = nn.ModuleDict({"network": network, "decoder": objective.decoder})
        optimizer = torch.optim.AdamW(both.parameters(), lr=objective.rate, weight_decay=_DECAY)
        first = 0 if checkpoint is None else _resume(checkpoint, both, optimizer, plan)
        for step in range(first, steps):
            torch.manual_seed(seed * steps + step)
            for group in optimizer.param_groups:
                group["lr"] = objective.rate * _share(step, steps)
            optimizer.zero_grad()
            objective.loss(network, random.Random(seed * steps + step)).backward()
            nn.utils.clip_grad_norm_(both.parameters(), _LONGEST_GRADIENT)
            optimizer.step()
            progress(step + 1, steps)
            if checkpoint is not None and (step + 1) % _SAVED_EVERY == 0:
                _save(checkpoint, both, optimizer, plan, step + 1)
        with torch.no_grad():
            judged = objective.judged(network.eval())
    return network, {"objective": objective.name, "seed": seed, "steps": steps, **judged}


def _share(step: int, steps: int) -> float:
    """Give the share of the highest rate: rising, then falling as a cosine."""
    warm = max(1, int(_WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _save(path: Path, both: nn.Module, optimizer: torch.optim.Optimizer, plan: str, step: int) -> None:
    tensors = {f"weights/{name}": tensor for name, tensor in both.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{number}/{name}": tensor for name, tensor in state.items()}
    write_weights(path, tensors, {"format": _CHECKPOINT, "plan": plan, "step": step})


def _resume(path: Path, both: nn.Module, optimizer: torch.optim.Optimizer, plan: str) -> int:
    """The step to go on with; 0 without a checkpoint."""
    if not path.exists():
        return 0
    header, tensors = read_weights(path, "a training that was stopped")
    if (header.get("format"), header.get("plan")) != (_CHECKPOINT, plan):
        raise InputError(
            f"{path}: holds a training of {header.get('plan')!r}, not of {plan!r}; remove it or go on with it"
        )
    start = "weights/"
    both.load_state_dict(
        {name.removeprefix(start): one for name, one in tensors.items() if name.startswith(start)}
    )
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer/"):
            _, number, field = name.split("/")
            state.setdefault(int(number), {})[field] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return int(header["step"])


# Objectives over graphs


class _OverGraphs(Objective):
    """Graphs of like size in a batch: it takes as many steps as its deepest graph."""

    def __init__(self, graphs: Sequence[Primitives], *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.graphs = graphs
        self.data = f"{len(graphs)} graphs ({_digest(graphs)})"
        inside, outside = (
            [i for i in range(len(graphs)) if (i % _HELD_OUT == 0) == held] for held in (False, True)
        )
        self.batches, self.held_out = (self._grouped(part) for part in (inside, outside))

    def _grouped(self, places: Sequence[int]) -> list[tuple[Tensor, GraphBatch]]:
        ordered = sorted(places, key=lambda i: len(self.graphs[i].kinds))
        parts = [ordered[first : first + _BATCH] for first in range(0, len(ordered), _BATCH)]
        return [(torch.tensor(part), batch_of([self.graphs[i] for i in part])) for part in parts]


def _digest(graphs: Sequence[Primitives]) -> str:
    digest = hashlib.sha256()
    for graph in graphs:
        for part in (graph.kinds, graph.shapes, graph.edges):
            digest.update(repr(part.shape).encode() + np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()[:8]


class _Regression(_OverGraphs):
    """A decoder predicts figures of a graph from its embedding."""

    def __init__(self, graphs: Sequence[Primitives], *, seed: int = 0) -> None:
        super().__init__(graphs, seed=seed)
        targets = np.array([self.targets(graph) for graph in graphs])
        mean, deviation = targets.mean(axis=0), np.maximum(targets.std(axis=0), 0.1)
        self.scaled = torch.from_numpy(((targets - mean) / deviation).astype(np.float32))
        self.decoder = nn.Sequential(nn.Linear(SIZE, 64), nn.ReLU(), nn.Linear(64, targets.shape[1]))

    @abstractmethod
    def targets(self, graph: Primitives) -> Any: ...

    def loss(self, network: HyperNetwork, draw: random.Random) -> Tensor:
        places, batch = draw.choice(self.batches)
        return F.smooth_l1_loss(self.decoder(network(batch)), self.scaled[places])

    def judged(self, network: HyperNetwork) -> dict[str, float]:
        missed = [
            (self.decoder(network(batch)) - self.scaled[places]).abs() for places, batch in self.held_out
        ]
        return {"held_out_deviations": float(torch.cat(missed).mean())}


@final
class Costs(_Regression):
    """FLOPs, bytes and times by kind of operator (``TARGETS``)."""

    name: ClassVar[str] = "costs"

    def targets(self, graph: Primitives) -> Any:
        targets = cost_targets(graph)
        assert len(targets) == len(TARGETS)
        return targets


@final
class OperatorHistogram(_Regression):
    """Predicts how many operators of each kind there are, and of which sizes."""

    name: ClassVar[str] = "histogram"

    def targets(self, graph: Primitives) -> Any:
        return histogram(graph)


@final
class WhiteBox(_OverGraphs):
    """The time of a graph on hardware that is drawn anew for each step: arithmetic, traffic and calls at
    random rates for each kind of operator."""

    name: ClassVar[str] = "white-box"

    def __init__(self, graphs: Sequence[Primitives], *, seed: int = 0) -> None:
        super().__init__(graphs, seed=seed)
        self.decoder = nn.Sequential(nn.Linear(SIZE + 2 + len(KINDS), 64), nn.ReLU(), nn.Linear(64, 1))

    def _times(self, network: HyperNetwork, places: Tensor, batch: GraphBatch, draw: random.Random) -> Any:
        balance, call = draw.uniform(1.0, 6.0), draw.uniform(4.0, 12.0)
        rates = [draw.gauss(0.0, 0.7) for _ in KINDS]
        graphs = [self.graphs[i] for i in places.tolist()]
        times = [roofline_s(graph, math.exp(balance), math.exp(call), np.exp(rates)) for graph in graphs]
        wanted = torch.tensor(np.log(times), dtype=torch.float32)
        hardware = torch.tensor([[balance - 3.5, (call - 8) / 2, *rates]]).expand(len(graphs), -1)
        log_times = self.decoder(torch.cat([network(batch), hardware], dim=1))[:, 0]
        return log_times * 3 + 16, wanted

    def loss(self, network: HyperNetwork, draw: random.Random) -> Tensor:
        forecast, wanted = self._times(network, *draw.choice(self.batches), draw)
        return F.smooth_l1_loss(forecast, wanted)

    def judged(self, network: HyperNetwork) -> dict[str, float]:
        draw = random.Random(0)
        missed = [
            torch.sub(*self._times(network, places, batch, draw)).abs() for places, batch in self.held_out
        ]
        return {"held_out_log_error": float(torch.cat(missed).mean())}


@final
class Contrastive(_OverGraphs):
    """Two views of one graph, in each of which nodes are hidden and sizes are blurred, shall be more alike
    than views of others (InfoNCE)."""

    name: ClassVar[str] = "contrastive"
    _HIDDEN, _BLUR, _TEMPERATURE = 0.2, 0.05, 0.2

    def __init__(self, graphs: Sequence[Primitives], *, seed: int = 0) -> None:
        super().__init__(graphs, seed=seed)
        self.decoder = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE))

    def _view(self, network: HyperNetwork, batch: GraphBatch) -> Tensor:
        kept = (torch.rand(len(batch.features), 1) > self._HIDDEN).float()
        blurred = batch.features * kept * (1 + self._BLUR * torch.randn_like(batch.features))
        view = GraphBatch(blurred, batch.graph_of, batch.forward, batch.backward, batch.count)
        return F.normalize(self.decoder(network(view)), dim=1)

    def _alike(self, network: HyperNetwork, batch: GraphBatch) -> Tensor:
        return self._view(network, batch) @ self._view(network, batch).T / self._TEMPERATURE

    def loss(self, network: HyperNetwork, draw: random.Random) -> Tensor:
        _, batch = draw.choice(self.batches)
        return F.cross_entropy(self._alike(network, batch), torch.arange(batch.count))

    def judged(self, network: HyperNetwork) -> dict[str, float]:
        found_again = [
            (self._alike(network, batch).argmax(dim=1) == torch.arange(batch.count)).float()
            for _, batch in self.held_out
        ]
        return {"held_out_found_again": float(torch.cat(found_again).mean())}


OVER_GRAPHS: dict[str, type[_OverGraphs]] = {
    one.name: one for one in (Costs, OperatorHistogram, WhiteBox, Contrastive)
}
