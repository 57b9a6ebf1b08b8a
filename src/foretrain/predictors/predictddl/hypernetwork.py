"""Trains an embedding as a graph hypernetwork: a decoder predicts the weights of small networks, which are
judged by what they then do on a small dataset of their type."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretrain.predictors.predictddl.embedding import SIZE, HyperNetwork, batch_of
from foretrain.predictors.predictddl.random import Layer, Sketch, sketch, text_sketch
from foretrain.predictors.predictddl.training import Objective

TILE = 16
"""Channels either way of the block of weights that the decoder predicts; wider layers repeat it."""
_AT_ONCE, _SAMPLES = 4, 64
"""Networks and samples of a step."""
_SKETCHES, _UNSEEN, _JUDGED = 300, 38, 300
"""Networks that are drawn, those of them that are left out of training, and samples that judge."""
_TOKENS, _CHARACTERS = 16, TILE
"""Characters that a language model sees before the one it is to tell, and how many kinds there are: the most
frequent ones and all others, no more than the rows of a tile, which is repeated beyond."""
_SIDES = {"cifar10": 8, "tiny-imagenet": 8, "imagenet": 16}
"""Of the digits that stand for a type's images: small ones keep training to minutes."""
TYPES = (*_SIDES, "text")
_DEEPEST, _DEEPEST_TEXT = 4, 3
"""Blocks of an image network and layers of a language model at most, where nothing else is asked for."""


class _Task:
    """Small networks of a dataset type, and the data that they are judged by."""

    def __init__(self, kind: str, deepest: int | None) -> None:
        self.inputs, self.labels = _text() if kind == "text" else _digits(_SIDES[kind])
        self.test = torch.arange(len(self.labels)) % 5 == 0
        self.inside = torch.nonzero(~self.test)[:, 0]
        if kind == "text":
            layers = deepest or _DEEPEST_TEXT
            drawn = [
                text_sketch(one, tokens=_TOKENS, widest=64, deepest=layers, classes=_CHARACTERS)
                for one in range(_SKETCHES)
            ]
        else:
            blocks = deepest or _DEEPEST
            drawn = [sketch(one, side=_SIDES[kind], widest=32, deepest=blocks) for one in range(_SKETCHES)]
        self.known, self.unseen = drawn[:-_UNSEEN], drawn[-_UNSEEN:]


@final
class Weights(Objective):
    """The hypernetwork objective for dataset types: digits for images, the text of Python's manual for
    text."""

    name: ClassVar[str] = "hypernetwork"
    rate: float = 2e-3

    def __init__(self, kinds: Sequence[str], *, deepest: int | None = None, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.decoder = nn.Sequential(nn.Linear(SIZE, 64), nn.ReLU(), nn.Linear(64, TILE * TILE * 9))
        self.tasks = {kind: _Task(kind, deepest) for kind in kinds}
        self.data = " and ".join(kinds) + ("" if deepest is None else f", up to {deepest} blocks")

    def loss(self, network: HyperNetwork, draw: random.Random) -> Tensor:
        task = self.tasks[draw.choice(list(self.tasks))]
        places = task.inside[torch.randint(len(task.inside), (_SAMPLES,))]
        chosen = draw.sample(task.known, _AT_ONCE)
        losses = [
            F.cross_entropy(self.run(network, one, task.inputs[places]), task.labels[places])
            for one in chosen
        ]
        return torch.stack(losses).mean()

    def judged(self, network: HyperNetwork) -> dict[str, float]:
        return {f"accuracy on {kind}": self._accuracy(network, task) for kind, task in self.tasks.items()}

    def _accuracy(self, network: HyperNetwork, task: _Task) -> float:
        inputs, labels = task.inputs[task.test][:_JUDGED], task.labels[task.test][:_JUDGED]
        right = [
            (self.run(network, one, inputs).argmax(dim=1) == labels).float().mean()
            for one in task.unseen[:20]
        ]
        return float(torch.stack(right).mean())

    def run(self, network: HyperNetwork, drawn: Sketch, inputs: Tensor) -> Tensor:
        """The logits of a sketched network whose weights are predicted."""
        nodes = network.nodes(batch_of([drawn.primitives()]))
        values: list[Tensor] = []
        for layer, node in zip(drawn.layers, nodes, strict=True):
            read = [values[source] for source in layer.sources] or [inputs]
            values.append(self._apply(layer, self.decoder(node).view(TILE, TILE, 3, 3), read))
        last = values[-1]
        return last[:, -1] if drawn.tokens > 1 else last

    def _apply(self, layer: Layer, tile: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        out = _computed(layer, tile, inputs)
        return torch.relu(out) if layer.active else out


def _computed(layer: Layer, tile: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    first = inputs[0]
    if "convolution" in layer.kind:
        weights = _wide(tile if layer.kernel == 3 else tile[:, :, 1:2, 1:2], layer)
        return F.conv2d(first, weights, stride=layer.stride, padding=layer.kernel // 2, groups=layer.groups)
    if layer.kind == "product":
        rows = first if layer.tokens > 1 else first.flatten(1)
        return rows @ _wide(tile[:, :, :1, :1], layer)[:, :, 0, 0].T
    if layer.kind == "embedding":
        return _characters(first) @ _wide(tile[:, :, :1, :1], layer, inward=TILE)[:, :, 0, 0].T
    if layer.kind == "attention":
        query, key, value = first.chunk(3, dim=-1)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    if layer.kind == "recurrence":
        return _recurred(layer, tile, first)
    if layer.kind == "batch normalisation":
        return F.batch_norm(first, None, None, training=True)
    if layer.kind == "layer normalisation":
        return F.layer_norm(first, first.shape[-1:])
    if layer.kind == "pooling":
        return F.max_pool2d(first, 2)
    if layer.kind == "global average":
        return first.mean(dim=(2, 3), keepdim=True)
    if layer.kind == "scale":
        return first * torch.sigmoid(inputs[1])
    return torch.cat(list(inputs), dim=1) if layer.kind == "concat" else torch.stack(list(inputs)).sum(dim=0)


def _wide(tile: Tensor, layer: Layer, inward: int | None = None) -> Tensor:
    """The tile repeated to the layer's width and scaled to keep the signal's size."""
    inward = layer.channels_in // layer.groups if inward is None else inward
    kernel = tile.shape[-1]
    wide = tile.repeat(-(-layer.channels // TILE), -(-inward // TILE), 1, 1)[: layer.channels, :inward]
    scale: Tensor = (2.0 / (inward * kernel * kernel)) ** 0.5 / (wide.std() + 1e-3)
    return wide * scale


def _recurred(layer: Layer, tile: Tensor, inputs: Tensor) -> Tensor:
    enter = inputs @ _wide(tile[:, :, :1, :1], layer)[:, :, 0, 0].T
    again = _wide(tile[:, :, 1:2, 1:2], layer, inward=layer.channels)[:, :, 0, 0].T
    hidden, out = torch.zeros(len(inputs), layer.channels), []
    for step in range(inputs.shape[1]):
        hidden = torch.tanh(enter[:, step] + hidden @ again)
        out.append(hidden)
    return torch.stack(out, dim=1)


def _characters(places: Tensor) -> Tensor:
    """A fixed vector for each kind of character."""
    table = torch.randn(_CHARACTERS, TILE, generator=torch.Generator().manual_seed(0))
    return table[places]


def _digits(side: int) -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images.astype(np.float32) / 8 - 1)[:, None].repeat(1, 3, 1, 1)
    if side != images.shape[-1]:
        images = F.interpolate(images, size=(side, side), mode="bilinear", align_corners=False)
    return images, torch.from_numpy(digits.target.astype(np.int64))


def _text() -> tuple[Tensor, Tensor]:
    """Windows of the topics of Python's manual, as it comes with Python, and the character after each."""
    from pydoc_data.topics import topics

    words = "".join(topics[name] for name in sorted(topics)).lower()[:200_000]
    frequent = {one: place for place, (one, _) in enumerate(Counter(words).most_common(_CHARACTERS - 1))}
    letters = torch.tensor([frequent.get(one, _CHARACTERS - 1) for one in words])
    starts = torch.arange(0, len(letters) - _TOKENS - 1, 7)
    windows = letters[starts[:, None] + torch.arange(_TOKENS)]
    return windows, letters[starts + _TOKENS]
