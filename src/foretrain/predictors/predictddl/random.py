"""Sketches random networks for images and for text as layers and as graphs of primitives, without torch."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from foretrain.predictors.predictddl.primitives import KINDS, Primitives, shape_row

_BATCH = 32
"""Samples over which the reading of weights is spread."""
_VOCABULARY = 32_768
"""Tokens that a sketched language model knows."""
_VALUE_BYTES = 4
"""Of a value in fp32."""
_NORMALISED_PASSES = 3
"""How often a tensor passes the memory in a normalisation with an activation."""
_LEARNED = ("product", "recurrence")
"""Kinds with weights, beside convolutions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One node: its kind (of ``KINDS``), the nodes it reads (none: the image), and its sizes."""

    kind: str
    sources: tuple[int, ...]
    channels_in: int
    channels: int
    side: int
    """Of the output, which is square; of text, whose positions are in a row, 1."""
    tokens: int = 1
    """Positions of text."""
    kernel: int = 1
    stride: int = 1
    groups: int = 1
    active: bool = False
    """An activation follows."""

    @property
    def positions(self) -> int:
        return self.side**2 * self.tokens


@dataclass(slots=True)
class Sketch:
    """A network as it is drawn, from the image to the logits."""

    side: int
    channels: int = 3
    tokens: int = 1
    layers: list[Layer] = field(default_factory=list)

    def convolve(
        self,
        source: int | None,
        channels: int,
        kernel: int = 3,
        stride: int = 1,
        groups: int = 1,
        normalised: bool = True,
    ) -> int:
        inward, side = self._of(source)
        depthwise = groups == inward == channels
        many = "grouped " if groups > 1 else "pointwise " if kernel == 1 else ""
        last = self._add(
            Layer(
                kind=f"{'depthwise ' if depthwise else many}convolution",
                sources=() if source is None else (source,),
                channels_in=inward,
                channels=channels,
                side=-(-side // stride),
                kernel=kernel,
                stride=stride,
                groups=groups,
            )
        )
        return self.normalise(last, "batch normalisation", active=True) if normalised else last

    def normalise(self, source: int, kind: str, *, active: bool = False) -> int:
        return self._like(source, kind, active=active)

    def multiply(self, source: int, channels: int, *, active: bool = False) -> int:
        """A product with weights, at every position."""
        return self._like(source, "product", channels=channels, active=active)

    def attend(self, source: int) -> int:
        """Attention over queries, keys and values that lie side by side in a node's channels."""
        return self._like(source, "attention", channels=self.layers[source].channels // 3)

    def recur(self, source: int, channels: int) -> int:
        return self._like(source, "recurrence", channels=channels)

    def embed(self, channels: int) -> int:
        """The tokens of a text as vectors."""
        return self._add(
            Layer(kind="embedding", sources=(), channels_in=1, channels=channels, side=1, tokens=self.tokens)
        )

    def join(self, kind: str, sources: Sequence[int]) -> int:
        """A sum, a concatenation or a scaling of nodes."""
        channels = [self.layers[source].channels for source in sources]
        total = sum(channels) if kind == "concat" else channels[0]
        first = self.layers[sources[0]]
        return self._add(
            Layer(
                kind=kind,
                sources=tuple(sources),
                channels_in=total,
                channels=total,
                side=first.side,
                tokens=first.tokens,
            )
        )

    def pool(self, source: int, *, whole: bool = False) -> int:
        channels, side = self._of(source)
        kind, side, stride = ("global average", 1, 1) if whole else ("pooling", side // 2, 2)
        layer = Layer(kind=kind, sources=(source,), channels_in=channels, channels=channels, side=side)
        return self._add(dataclasses.replace(layer, stride=stride))

    def classify(self, source: int, classes: int) -> int:
        channels, _ = self._of(source)
        return self._add(
            Layer(kind="product", sources=(source,), channels_in=channels, channels=classes, side=1)
        )

    def primitives(self) -> Primitives:
        """The graph that capturing the network would give, up to constants in the traffic."""
        kinds = np.zeros((len(self.layers), len(KINDS)))
        for number, layer in enumerate(self.layers):
            kinds[number, KINDS.index(layer.kind)] = 1
            if layer.active:
                kinds[number, KINDS.index("activation")] = 1
        edges = sorted(
            (source, number) for number, layer in enumerate(self.layers) for source in set(layer.sources)
        )
        return Primitives(
            kinds=kinds,
            shapes=np.array([self._shape(layer) for layer in self.layers]),
            edges=np.ascontiguousarray(np.array(edges, dtype=np.int64).reshape(-1, 2).T),
        )

    def _shape(self, layer: Layer) -> list[float]:
        positions, learns = layer.positions, layer.kind in _LEARNED or "convolution" in layer.kind
        parameters = layer.channels * layer.channels_in // layer.groups * layer.kernel**2 if learns else 0
        flops = 2 * parameters * positions
        if layer.kind == "recurrence":
            parameters += layer.channels**2
            flops += 2 * layer.channels**2 * positions
        if layer.kind == "attention":
            flops = 4 * layer.tokens**2 * layer.channels
        if layer.kind == "embedding":
            parameters = _VOCABULARY * layer.channels
        sources = [self.layers[source] for source in layer.sources]
        read = sum(source.channels * source.positions for source in sources)
        if not sources:
            read = 3 * self.side**2 if layer.kind != "embedding" else layer.channels * positions
        passes = _NORMALISED_PASSES if "normalisation" in layer.kind else 1
        weights = parameters / _BATCH if learns else 0.0
        moved = _VALUE_BYTES * ((read + layer.channels * positions) * passes + weights)
        inward, kernel = layer.channels_in // layer.groups, layer.kernel if learns else 0
        return shape_row(layer.channels, inward, positions, kernel, parameters, flops, moved)

    def _like(self, source: int, kind: str, *, channels: int | None = None, active: bool = False) -> int:
        """A node with as many positions as the one that it reads."""
        first = self.layers[source]
        return self._add(
            Layer(
                kind=kind,
                sources=(source,),
                channels_in=first.channels,
                channels=channels or first.channels,
                side=first.side,
                tokens=first.tokens,
                active=active,
            )
        )

    def _of(self, source: int | None) -> tuple[int, int]:
        """Channels and side of a node, or of the image."""
        node = self if source is None else self.layers[source]
        return node.channels, node.side

    def _add(self, layer: Layer) -> int:
        self.layers.append(layer)
        return len(self.layers) - 1


# Blocks: a sketch, a node, the channels to end with and a stride in; the last node out


def _plain(net: Sketch, source: int, channels: int, stride: int, draw: random.Random) -> int:
    return net.convolve(source, channels, 3, stride)


def _residual(net: Sketch, source: int, channels: int, stride: int, draw: random.Random) -> int:
    inner = net.convolve(net.convolve(source, channels, 3, stride), channels, 3)
    return net.join("sum", (inner, _shortcut(net, source, channels, stride)))


def _bottleneck(net: Sketch, source: int, channels: int, stride: int, draw: random.Random) -> int:
    inner = max(8, channels // 4)
    groups = draw.choice([1, 1, 4, 8])
    groups = groups if inner % groups == 0 else 1
    wide = net.convolve(net.convolve(source, inner, 1), inner, 3, stride, groups)
    return net.join("sum", (net.convolve(wide, channels, 1), _shortcut(net, source, channels, stride)))


def _inverted(net: Sketch, source: int, channels: int, stride: int, draw: random.Random) -> int:
    wide = net.layers[source].channels * draw.choice([2, 4, 6])
    deep = net.convolve(net.convolve(source, wide, 1), wide, 3, stride, wide)
    if draw.random() < 0.5:
        squeezed = net.convolve(net.pool(deep, whole=True), max(4, wide // 16), 1)
        deep = net.join("scale", (deep, net.convolve(squeezed, wide, 1, normalised=False)))
    out = net.convolve(deep, channels, 1)
    same = stride == 1 and net.layers[source].channels == channels
    return net.join("sum", (out, source)) if same else out


def _dense(net: Sketch, source: int, channels: int, stride: int, draw: random.Random) -> int:
    growth, parts = max(8, channels // 4), [source]
    for _ in range(draw.randint(2, 4)):
        joined = net.join("concat", parts) if len(parts) > 1 else source
        parts.append(net.convolve(net.convolve(joined, 2 * growth, 1), growth, 3))
    out = net.convolve(net.join("concat", parts), channels, 1)
    return net.pool(out) if stride > 1 and net.layers[out].side > 1 else out


def _shortcut(net: Sketch, source: int, channels: int, stride: int) -> int:
    if stride == 1 and net.layers[source].channels == channels:
        return source
    return net.convolve(source, channels, 1, stride)


_Block = Callable[[Sketch, int, int, int, random.Random], int]
_BLOCKS: tuple[_Block, ...] = (_plain, _residual, _bottleneck, _inverted, _dense)


_CLASSES = 10
"""Of a classifier of images."""


def sketch(seed: int, *, side: int | None = None, widest: int = 512, deepest: int = 16) -> Sketch:
    """Draw a network for images: stages of like blocks, each half as large and wider than the one before."""
    draw = random.Random(seed)
    net = Sketch(side or draw.choice([32, 64, 128, 224]))
    channels = min(draw.choice([8, 16, 24, 32, 48, 64]), widest)
    last = net.convolve(None, channels, 3, draw.choice([1, 2]) if net.side > 8 else 1)
    block = draw.choice(_BLOCKS)
    stages = draw.randint(2, 5) if net.side > 8 else draw.randint(1, 3)
    for _ in range(stages):
        channels = min(widest, int(channels * draw.choice([1, 1.5, 2])) // 8 * 8)
        block = block if draw.random() < 0.7 else draw.choice(_BLOCKS)
        for number in range(draw.randint(1, max(1, deepest // stages))):
            stride = 2 if number == 0 and net.layers[last].side > 2 else 1
            last = block(net, last, channels, stride, draw)
    net.classify(net.pool(last, whole=True), _CLASSES)
    return net


# Language models


def _transformer(net: Sketch, source: int, width: int, draw: random.Random) -> int:
    mixed = net.attend(net.multiply(net.normalise(source, "layer normalisation"), 3 * width))
    last = net.join("sum", (net.multiply(mixed, width), source))
    wide = net.multiply(
        net.normalise(last, "layer normalisation"), draw.choice([2, 3, 4]) * width, active=True
    )
    if draw.random() < 0.3:  # gated, as in Llama
        wide = net.join("scale", (wide, net.multiply(net.layers[wide].sources[0], net.layers[wide].channels)))
    return net.join("sum", (net.multiply(wide, width), last))


def _recurrent(net: Sketch, source: int, width: int, draw: random.Random) -> int:
    last = net.recur(source, width)
    return net.join("sum", (last, source)) if draw.random() < 0.5 else last


def text_sketch(
    seed: int, *, tokens: int | None = None, widest: int = 2048, deepest: int = 16, classes: int = _VOCABULARY
) -> Sketch:
    """Draw a language model: an embedding, layers of attention and products or recurrences, and logits."""
    draw = random.Random(seed)
    net = Sketch(side=1, channels=1, tokens=tokens or draw.choice([64, 128, 256, 512, 1024, 2048]))
    width = min(draw.choice([64, 128, 256, 512, 768, 1024, 2048]), widest)
    last, block = net.embed(width), _recurrent if draw.random() < 0.3 else _transformer
    for _ in range(draw.randint(1, deepest)):
        last = block(net, last, width, draw)
    net.multiply(net.normalise(last, "layer normalisation"), classes)
    return net
