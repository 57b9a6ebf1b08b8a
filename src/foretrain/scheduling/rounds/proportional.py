"""Divides the time of kinds of devices so that the product of throughputs is as great as can be.

Many such programmes of one size are solved at once by a primal-dual interior-point method: what couples jobs
is only the room on each kind of device, so a step solves a small system for each job and one for the kinds.
"""

from __future__ import annotations

import numpy as np

from foretrain.scheduling.result import Column

_MOST_STEPS = 100
_CENTRED = (0.1, 0.9)
"""Of the mean complementarity, what a step aims at: where marginal worth and prices agree, and where not."""
_INSIDE = 0.95
"""Share of the way to the boundary that a step goes."""
_AGREE = 0.03
"""Difference of marginal worth and prices, over the mean weight, up to which they agree."""
_CLOSE = 1e-8
"""Mean complementarity and difference, over the mean weight, at which a programme is left as it is."""
_WORSE = 1e3
"""By how much a step may be worse than the best before it; beyond that rounding has taken over."""
_EVEN = 1e-6
"""What the square of a share costs, over the weight: of divisions that are as good, the most even one."""


def proportional(rates: Column, weights: Column, gpus: Column, counts: Column) -> Column:
    """Shares x of greatest ``sum(weights * log(sum(rates * x)))`` for several programmes at once.

    ``rates`` has a row for each programme, job and kind of device, weights and GPUs for each programme and
    job. A job gets the whole time at most, a kind of device gives what it has, and every job has a speed on
    some kind.

    >>> one = proportional(np.array([[[1.0, 2.0], [1.0, 1.0]]]), np.ones((1, 2)), np.ones((1, 2)), np.ones(2))
    >>> one.round(6)[0] + 0.0
    array([[0., 1.],
           [1., 0.]])
    """
    scaled = rates / rates.max(axis=2, keepdims=True)
    x = _start(scaled, gpus, counts)
    each = gpus[:, :, None]
    own, room = 1 - x.sum(axis=2), counts - (each * x).sum(axis=1)
    price, of_own, of_room = 1 / x, 1 / own, 1 / room
    size = x[0].size + own[0].size + len(counts)
    scale, best, least = weights.mean(axis=1), x.copy(), np.full(len(rates), np.inf)
    for _ in range(_MOST_STEPS):
        gap = (x * price).sum(axis=(1, 2)) + (own * of_own).sum(axis=1) + (room * of_room).sum(axis=1)
        level = gap / size
        throughput = (scaled * x).sum(axis=2)
        pull = (weights / throughput)[:, :, None] * scaled - _EVEN * weights[:, :, None] * x
        off = np.abs(pull + price - of_own[:, :, None] - each * of_room[:, None, :]).max(axis=(1, 2)) / scale
        score = np.maximum(level / scale, off)
        best = np.where((score < least)[:, None, None], x, best)
        least = np.minimum(least, score)
        done = (score <= _CLOSE) | (score > _WORSE * least)
        if done.all():
            break
        aim = (np.where(off <= _AGREE, *_CENTRED) * level)[:, None]
        wanted = pull + aim[:, :, None] / x - (aim / own)[:, :, None] - each * (aim / room)[:, None, :]
        even = price / x + _EVEN * weights[:, :, None]
        inverse = _inverse(even, weights / throughput**2, scaled, of_own / own)
        move = _coupled(inverse, wanted, gpus, room / of_room)
        own_move, room_move = -move.sum(axis=2), -(each * move).sum(axis=1)
        moves = [
            *((x, move), (own, own_move), (room, room_move)),
            (price, (aim[:, :, None] - price * move) / x - price),
            (of_own, (aim - of_own * own_move) / own - of_own),
            (of_room, (aim - of_room * room_move) / room - of_room),
        ]
        length = np.where(done, 0.0, _length(moves))
        for value, by in moves:
            value += length.reshape(-1, *[1] * (value.ndim - 1)) * by
    return np.where(rates > 0, best, 0.0)


def _start(rates: Column, gpus: Column, counts: Column) -> Column:
    """Well inside: half of an equal part of everything."""
    part = counts[None, None, :] / gpus.sum(axis=1)[:, None, None]
    return np.broadcast_to(0.5 * np.minimum(part, 1 / len(counts)), rates.shape).copy()


def _inverse(diagonal: Column, bend: Column, rates: Column, own: Column) -> Column:
    """Of each job's ``diag + bend * rates rates' + own * 1 1'``, by two updates of rank one."""
    kinds = rates.shape[2]
    inverse = np.eye(kinds) * (1 / diagonal)[..., None]
    for weight, vector in ((bend, rates), (own, np.ones_like(rates))):
        turned = (inverse * vector[..., None, :]).sum(axis=3)
        size = 1 / weight + (vector * turned).sum(axis=2)
        inverse = inverse - turned[..., :, None] * turned[..., None, :] / size[..., None, None]
    return inverse


def _coupled(inverse: Column, wanted: Column, gpus: Column, slack: Column) -> Column:
    """The step of all jobs, whose GPUs of a kind come out of the same room."""
    alone = (inverse * wanted[..., None, :]).sum(axis=3)
    each = gpus[:, :, None]
    between = ((gpus**2)[..., None, None] * inverse).sum(axis=1) + np.eye(slack.shape[1]) * slack[:, None, :]
    shared = np.linalg.solve(between, (each * alone).sum(axis=1)[..., None])[..., 0]
    move: Column = alone - (inverse * (each * shared[:, None, :])[..., None, :]).sum(axis=3)
    return move


def _length(moves: list[tuple[Column, Column]]) -> Column:
    """How far each programme may go until something would be negative, and at most all the way."""
    lengths = np.ones(len(moves[0][0]))
    for value, by in moves:
        reach = np.where(by < 0, value / np.where(by < 0, -by, 1.0), np.inf)
        lengths = np.minimum(lengths, _INSIDE * reach.reshape(len(reach), -1).min(axis=1))
    return lengths
