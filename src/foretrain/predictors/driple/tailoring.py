"""Tailors Driple's networks to the runs of a new setting: a transfer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from foretrain.predictors.driple.features import Array
from foretrain.predictors.driple.network import (
    BEND,
    ENOUGH,
    Member,
    Network,
    Samples,
    batched,
    borne_out,
    parts_apart,
)
from foretrain.predictors.neural import one_thread

_CHECKS = 5
"""Parts in which the runs of a transfer are left out in turn."""
_FEWEST = ENOUGH // 2
"""Left-out runs from which on they choose where a transfer starts."""
_RIDGE = 3.0
"""How strongly a transfer is held to where it started, in runs; columns have length one."""
_REWEIGHTINGS = 8
"""Rounds in which odd runs lose weight; the weights settle within them."""


def transfer(network: Network, samples: Samples, groups: Sequence[str]) -> tuple[Network, Array]:
    """Tailored to a new setting, and for each run the figures of one that was tailored without its group.

    What the body and the head's inner layers make of a run stays; how figures follow from it is a ridge
    regression of what the start is off by, so the fewer the samples, the closer it stays to the start. That
    is the network or the white box, and how much of a correction counts is chosen for each figure, as in
    learning from scratch; runs that were left out choose both.
    """
    with one_thread(), torch.no_grad():
        members = [_Reading.of(copy.deepcopy(member).eval(), samples) for member in network.members]
        if len(set(groups)) < 2:
            _write(members, [one.tailored(samples.targets) for one in members])
            return Network(tuple(one.member for one in members)), network.figures(samples)
        starts = [members]
        if network.kind == "improved" and len(samples) >= _FEWEST:
            starts.append([one.from_schedule(samples.targets) for one in members])
        left_out = [_left_out(start, samples.targets, groups) for start in starts]
        best = int(np.argmin([_error(forecasts, samples.targets) for forecasts in left_out]))
        chosen, held_out = starts[best], left_out[best]
        gain = (
            borne_out(held_out, samples.targets)
            if network.kind == "improved"
            else np.ones(samples.targets.shape[1])
        )
        _write(chosen, [one.tailored(samples.targets) * gain for one in chosen])
        return Network(tuple(one.member for one in chosen)), held_out * gain


def silenced(network: Network) -> Network:
    """Keep what a network makes of a run, but nothing that it says of figures: for a device that it does not
    know, on which its corrections do not hold."""
    members = [copy.deepcopy(known).eval() for known in network.members]
    for member in members:
        _say(member, np.zeros((_columns_of(member), member.sizes[-1])))
    return Network(tuple(members))


@dataclass(frozen=True, eq=False)
class _Reading:
    """Holds what a member reads of runs before its last layers, and the weights of these in the units of the
    figures: first the offset, then a row for each column."""

    member: Member
    columns: tuple[Array, ...]
    weights: Array
    known: Array
    """Whether each figure differed between the runs that the member learned from."""

    @classmethod
    def of(cls, member: Member, samples: Samples) -> _Reading:
        inner, beside = member.inner(*batched(samples)[:3])
        leave = _last(member)
        rows = [leave.bias[None], leave.weight.T]
        columns = [inner]
        if member.direct is not None:
            rows = [rows[0] + member.direct.bias, rows[1], member.direct.weight.T]
            columns.append(beside)
        scale = member.target_scale * member.known
        weights = (torch.cat(rows) * scale).numpy().astype(np.float64)
        weights[0] += member.target_mean.numpy()
        return cls(
            member, tuple(one.numpy().astype(np.float64) for one in columns), weights, member.known.numpy()
        )

    def from_schedule(self, targets: Array) -> _Reading:
        """Say nothing of figures that the runs have."""
        measured = np.isfinite(targets).any(axis=0)
        return _Reading(
            self.member, self.columns, np.where(measured, 0.0, self.weights), np.ones_like(self.known)
        )

    def part(self, rows: Sequence[int]) -> _Reading:
        return _Reading(self.member, tuple(one[rows] for one in self.columns), self.weights, self.known)

    def figures(self, weights: Array) -> Array:
        return np.asarray(weights[0] + np.concatenate(self.columns, axis=1) @ weights[1:])

    def tailored(self, targets: Array) -> Array:
        """The weights that these runs change; a figure that the member has not seen differ starts at their
        mean."""
        weights = self.weights.copy()
        for figure in np.flatnonzero(np.isfinite(targets).any(axis=0) & (self.known == 0)).tolist():
            weights[:, figure] = 0.0
            weights[0, figure] = np.nanmean(targets[:, figure])
        sizes = [max(float(np.sqrt((one**2).sum(axis=1).mean())), 1e-6) for one in self.columns]
        scaled = [one / size for one, size in zip(self.columns, sizes, strict=True)]
        columns = np.concatenate([np.ones((len(targets), 1)), *scaled], axis=1)
        size_of = np.repeat([1.0, *sizes], [1, *(one.shape[1] for one in self.columns)])
        off = targets - self.figures(weights)
        for figure in range(targets.shape[1]):
            measured = np.isfinite(off[:, figure])
            if measured.any():
                weights[:, figure] += _regression(columns[measured], off[measured, figure]) / size_of
        return weights


def _regression(columns: Array, off: Array) -> Array:
    """Weights of a ridge regression whose loss grows linearly for odd runs, as that of the networks does."""
    alike, bend = columns @ columns.T, max(BEND * float(np.sqrt((off**2).mean())), 1e-9)
    count = np.ones(len(off))
    for _ in range(_REWEIGHTINGS):
        solution = np.linalg.solve(alike + _RIDGE * np.diag(1 / count), off)
        count = np.minimum(1.0, bend / np.maximum(np.abs(off - alike @ solution), 1e-12))
    return np.asarray(columns.T @ solution)


def _left_out(members: Sequence[_Reading], targets: Array, groups: Sequence[str]) -> Array:
    """The figures of each run by a network that was tailored to the runs of other groups."""
    figures = np.zeros(targets.shape)
    for part in parts_apart(groups, _CHECKS, 0):
        others = sorted(set(range(len(targets))) - set(part))
        for one in members:
            weights = one.part(others).tailored(targets[others])
            figures[part] += one.part(part).figures(weights) / len(members)
    return figures


def _error(figures: Array, targets: Array) -> float:
    """The mean over figures, each in its own deviation."""
    measured = np.isfinite(targets).any(axis=0)
    figures, targets = figures[:, measured], targets[:, measured]
    scale = np.nanstd(targets, axis=0)
    off = np.nanmean(np.abs(figures - targets), axis=0)[scale > 1e-6] / scale[scale > 1e-6]
    return float(off.mean()) if len(off) else 0.0


# Weights of the last layers


def _last(member: Member) -> nn.Linear:
    leave = member.head[-1]
    assert isinstance(leave, nn.Linear)
    return leave


def _columns_of(member: Member) -> int:
    direct = 0 if member.direct is None else member.direct.in_features
    return 1 + _last(member).in_features + direct


def _write(members: Sequence[_Reading], weights: Sequence[Array]) -> None:
    for one, new in zip(members, weights, strict=True):
        _say(one.member, new)


def _say(member: Member, weights: Array) -> None:
    """Answer with these weights, in the units of the figures."""
    values, leave = torch.from_numpy(weights.astype(np.float32)), _last(member)
    inside = 1 + leave.in_features
    with torch.no_grad():
        leave.bias.copy_(values[0])
        leave.weight.copy_(values[1:inside].T)
        if member.direct is not None:
            member.direct.bias.zero_()
            member.direct.weight.copy_(values[inside:].T)
    member.target_mean.zero_()
    member.target_scale.fill_(1.0)
    member.known.fill_(1.0)
