"""Divides runs into those to learn from and those to forecast, so that nothing that is held out is learned
from."""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from foretrain import splits
from foretrain.architectures import family
from foretrain.errors import InputError, invalid, unknown
from foretrain.job import Job
from foretrain.run import Run

SPLITS = ("random", "leave-model-out", "leave-device-out", "interpolate", "extrapolate")
DIMENSIONS: Mapping[str, Callable[[Job], float | None]] = {
    "workers": lambda job: job.cluster.world_size,
    "nodes": lambda job: job.cluster.nodes,
    "batch": lambda job: job.workload.training.global_batch / (job.plan.data or 1),
    "samples": lambda job: job.workload.training.samples,
    "cores": lambda job: job.cluster.device.cores if job.cluster.device.is_cpu else None,
    "links": lambda job: job.cluster.groups[0].inter_node.bandwidth_bytes_per_s if job.over_network else None,
}
"""What ``interpolate`` and ``extrapolate`` go along, as in ``extrapolate:workers``; the batch is that of a
worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Positions of the runs to learn from (None: nothing is learned) and of the runs to forecast.

    A predictor that comes with knowledge forgets ``families`` and ``devices`` before it learns.
    """

    train: tuple[int, ...] | None
    test: tuple[int, ...]
    families: frozenset[str] = frozenset()
    devices: frozenset[str] = frozenset()


def job_key(job: Job) -> str:
    """A text that two jobs share when they are the same: the canonical form and the folder that model paths
    start from."""
    return json.dumps([str(job.workload.base), job.to_dict()], sort_keys=True)


def split_runs(runs: Sequence[Run], split: str, *, seed: int = 0, folds: int = 5) -> list[Fold]:
    """The folds of a split.

    ``random`` keeps runs of one job together, ``leave-model-out`` those of one architecture family: both fill
    ``folds`` folds as evenly as they can. ``leave-device-out`` has one fold per device.
    ``interpolate:workers`` has one fold per inner number of workers, which is forecast from fewer and more;
    ``extrapolate:workers`` one fold, the largest third of the numbers (others: see ``DIMENSIONS``).
    ``interpolate`` alone goes along workers, or along the batch where all have as many. ``extrapolate`` alone
    has a single fold: learn up to the median world size (global batch, when all world sizes are equal),
    forecast what is above.
    """
    kind, _, dimension = split.partition(":")
    if kind not in SPLITS or (dimension and kind not in _ALONG):
        raise unknown(
            "split", split, [*SPLITS, *(f"{kind}:{name}" for kind in _ALONG for name in DIMENSIONS)]
        )
    if folds < 2:
        raise invalid("folds", folds, "2 or more")
    if split == "extrapolate":
        return [_extrapolation(runs)]
    if kind in _ALONG:
        return _along(runs, kind, dimension)
    labelled, labels_of = _LABELS[split]
    labels = [labels_of(run) for run in runs]
    by_label: dict[frozenset[str], list[int]] = {}
    for i, label in enumerate(labels):
        by_label.setdefault(label, []).append(i)
    groups = list(by_label.values())
    if len(groups) < 2:
        raise InputError(f"split: {split} needs runs of at least two {labelled}; all {len(runs)} are of one")
    tests = groups if split == "leave-device-out" else _even(groups, min(folds, len(groups)), seed)
    return [_fold(test, labels, split) for test in tests]


_ALONG: Mapping[str, Callable[[Sequence[float]], list[splits.Part]]] = {
    "interpolate": splits.interpolation,
    "extrapolate": splits.extrapolation,
}


def _along(runs: Sequence[Run], kind: str, dimension: str) -> list[Fold]:
    """Folds along a dimension; runs without a value of it are only learned from."""
    if dimension and dimension not in DIMENSIONS:
        raise unknown("split", f"{kind}:{dimension}", [f"{kind}:{name}" for name in DIMENSIONS])
    parts = []
    for name in [dimension] if dimension else ["workers", "batch"]:
        values = {i: value for i, run in enumerate(runs) if (value := DIMENSIONS[name](run.job)) is not None}
        parts = _ALONG[kind](list(values.values()))
        if parts:
            break
    if not parts:
        raise InputError(
            f"split: {kind} needs runs with {'three' if kind == 'interpolate' else 'two'} "
            f"values of {dimension or 'workers'} or more"
        )
    places = list(values)
    tests = [tuple(places[i] for i in test) for _, test in parts]
    return [Fold(train=tuple(i for i in range(len(runs)) if i not in set(test)), test=test) for test in tests]


def thinned(fold: Fold, runs: Sequence[Run], most: int, seed: int) -> Fold:
    """At most so many runs of each model to learn from."""
    if most < 1:
        raise invalid("train_runs", most, "1 or more")
    by_model: dict[str, list[int]] = {}
    for i in fold.train or ():
        by_model.setdefault(runs[i].job.workload.model.key, []).append(i)
    drawn = [
        one
        for of_model in by_model.values()
        for one in random.Random(seed).sample(of_model, min(most, len(of_model)))
    ]
    return fold if fold.train is None else dataclasses.replace(fold, train=tuple(sorted(drawn)))


def _fold(test: Sequence[int], labels: Sequence[frozenset[str]], split: str) -> Fold:
    """Learn from the runs that share no label with a test run: a mixed cluster has several devices."""
    seen = frozenset().union(*(labels[i] for i in test))
    return Fold(
        train=tuple(i for i, own_labels in enumerate(labels) if seen.isdisjoint(own_labels)),
        test=tuple(sorted(test)),
        families=seen if split == "leave-model-out" else frozenset(),
        devices=seen if split == "leave-device-out" else frozenset(),
    )


def _even(groups: list[list[int]], count: int, seed: int) -> list[list[int]]:
    """Groups dealt out, large ones first and equal ones in random order, each to the fold that has the fewest
    runs so far."""
    random.Random(seed).shuffle(groups)
    parts: list[list[int]] = [[] for _ in range(count)]
    for group in sorted(groups, key=len, reverse=True):
        min(parts, key=len).extend(group)
    return parts


_LABELS: dict[str, tuple[str, Callable[[Run], frozenset[str]]]] = {
    "random": ("distinct jobs", lambda run: frozenset({job_key(run.job)})),
    "leave-model-out": ("architecture families", lambda run: frozenset({family(run.job.workload.model)})),
    "leave-device-out": (
        "devices",
        lambda run: frozenset(group.device.name for group in run.job.cluster.groups),
    ),
}
"""What is held out: the labels of a run, which no other fold may share."""


def _extrapolation(runs: Sequence[Run]) -> Fold:
    scales = [run.job.cluster.world_size for run in runs]
    if len(set(scales)) < 2:
        scales = [run.job.workload.training.global_batch for run in runs]
    if len(set(scales)) < 2:
        raise InputError(
            "split: extrapolate needs runs of at least two world sizes or global batches; all are equal"
        )
    limit = statistics.median_low(scales)
    if limit == max(scales):
        limit = max(scale for scale in scales if scale < limit)
    train, test = (
        tuple(i for i, scale in enumerate(scales) if (scale > limit) == above) for above in (False, True)
    )
    return Fold(train=train, test=test)
