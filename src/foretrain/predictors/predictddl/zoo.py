"""Draws the architectures that embeddings learn from: sketches for images and text, and captured models."""

from __future__ import annotations

from collections.abc import Iterable

from foretrain.capture import capture_job
from foretrain.errors import ForetrainError
from foretrain.predictors.predictddl.primitives import Primitives, primitives
from foretrain.predictors.predictddl.random import sketch, text_sketch
from foretrain.run import Run

_SIDES = {"cifar10": (32,), "tiny-imagenet": (64,), "imagenet": (128, 192, 224, 288)}
_DEEPEST = 32
_DEPTHS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1)
"""Blocks of a sketch at most: these parts of the deepest, in turn."""
MOST_NODES = 400
"""Captured models of more are left out: a batch takes as many steps as its deepest graph."""


def sketched(kind: str, count: int, deepest: int | None = None) -> list[Primitives]:
    """Draw so many sketches for a dataset type; for any other name of all types in turn."""
    return [_sketch(kind, seed, deepest or _DEEPEST) for seed in range(count)]


def _sketch(kind: str, seed: int, most: int) -> Primitives:
    deepest = max(1, round(most * _DEPTHS[seed % len(_DEPTHS)]))
    if kind == "text" or (kind not in _SIDES and seed % 3 == 0):
        return text_sketch(seed, deepest=deepest).primitives()
    sides = _SIDES.get(kind)
    return sketch(
        seed, side=None if sides is None else sides[seed % len(sides)], deepest=deepest
    ).primitives()


def captured(runs: Iterable[Run]) -> list[Primitives]:
    """The models of runs, each once; those that cannot be traced, or are very large, are left out."""
    graphs: dict[str, Primitives] = {}
    for run in runs:
        label = run.job.workload.model.label
        if label in graphs:
            continue
        try:
            graph = primitives(capture_job(run.job))
        except ForetrainError:
            continue
        if 0 < len(graph.kinds) <= MOST_NODES:
            graphs[label] = graph
    return list(graphs.values())
