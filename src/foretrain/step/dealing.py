"""Deals the layers of a model out to the chunks of a pipeline."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from foretrain.errors import InputError
from foretrain.plan import Plan
from foretrain.step.schedules import chunks_of

_MOST_CHUNKS = 8
_ENDS = 2
"""Embedding and loss, where they count as layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """Says how many layers each chunk of a pipeline has, in the order of the model."""

    counts: tuple[int, ...]
    because: str = ""
    """What was assumed, where the plan does not say it and the layers do not divide."""


def virtual_stages(plan: Plan, layers: int, usual: int | None = None) -> int:
    """Chunks on each rank: as the plan says, else what is ``usual``, else the most (up to eight) that the
    layers of a stage divide into."""
    known = chunks_of(plan)
    if known is not None:
        return known
    if plan.virtual_stages is not None:
        return plan.virtual_stages
    if plan.stages is not None and len(plan.stages) % plan.pipeline == 0:
        return len(plan.stages) // plan.pipeline
    if plan.schedule != "interleaved":
        return 1
    own = math.ceil(layers / plan.pipeline)
    if usual is not None and usual <= own:
        return usual
    return max(
        divisor
        for divisor in range(1, min(own, _MOST_CHUNKS) + 1)
        if own % divisor == 0 and (divisor == 1 or divisor * plan.pipeline <= layers)
    )


def deal(plan: Plan, layers: int, parts: int, *, counts_ends: bool = False, further: int = 0) -> Dealt:
    """Layers of each of ``parts`` chunks: as the plan says; else alike, where embedding and loss count as a
    layer each if that alone divides, or always (``counts_ends``); else as evenly as it goes. Each ``further``
    layer that predicts tokens is on the last one and counts twice, with its own logits.

    >>> deal(Plan(pipeline=4), 6, 4).counts, deal(Plan(pipeline=4), 61, 4).counts
    ((1, 2, 2, 1), (15, 16, 16, 14))
    >>> deal(Plan(pipeline=8), 61, 8, further=1).counts  # as Megatron-Bridge has DeepSeek-V3
    (8, 8, 8, 8, 8, 8, 8, 5)
    """
    if plan.stages is not None:
        if len(plan.stages) != parts or sum(plan.stages) != layers:
            given = counts_words(plan.stages)
            raise InputError(
                f"plan.stages: {given} are {len(plan.stages)} counts of {sum(plan.stages)} layers; "
                f"the plan has {parts} chunks and the model {layers} layers"
            )
        return Dealt(counts=plan.stages)
    if parts > layers + _ENDS:
        virtual = f" x {parts // plan.pipeline} chunks" if parts > plan.pipeline else ""
        raise InputError(
            f"plan.pipeline: {plan.pipeline} stages{virtual} are more than the {layers} layers of the model "
            "with its embedding and its loss"
        )
    if layers % parts == 0 and not counts_ends and not further:
        return Dealt(counts=(layers // parts,) * parts)
    with_ends, with_loss = (layers + _ENDS) % parts == 0, (layers + 1) % parts == 0
    before, after = (0, 1) if with_loss and not (with_ends or counts_ends or further) else (1, 1)
    after += 2 * further
    if (layers + before + after) // parts < after:  # the last chunk has what predicts tokens, and no layer
        counts = [*_evenly(layers + before, parts - 1), after]
    else:
        counts = _evenly(layers + before + after, parts)
    counts[0] -= before
    counts[-1] -= after
    if counts_ends and not further:
        return Dealt(counts=tuple(counts))
    if further:
        words = "plan.stages is not given: each of training.mtp_layers counts as two layers of the last stage"
        return Dealt(counts=tuple(counts), because=f"{words} ({counts_words(counts)})")
    if with_ends or with_loss:
        why = f"{'embedding and loss count' if before else 'the loss counts'} as a layer{' each' * before}"
    else:
        why = "they are dealt out as evenly as embedding and loss allow"
    words = f"plan.stages is not given and {layers} layers do not divide into {parts}: {why}"
    return Dealt(counts=tuple(counts), because=f"{words} ({counts_words(counts)})")


def _evenly(layers: int, parts: int) -> list[int]:
    each, more = divmod(layers, parts)
    return [each + (part < more) for part in range(parts)]


def counts_words(counts: Sequence[int]) -> str:
    """Numbers one after another, those alike together.

    >>> counts_words([1, 2, 2, 2, 1])
    '1, 3 x 2, 1'
    """
    groups = ((count, len(list(same))) for count, same in itertools.groupby(counts))
    return ", ".join(f"{times} x {count}" if times > 1 else str(count) for count, times in groups)


def fill(work: Sequence[float], parts: int) -> list[int]:
    """The part of each block: the one that the blocks before it have not filled to its share of the work,
    and at most one further than the block before.

    >>> fill([1.0] * 8, 4), fill([1.0, 1.0, 4.0], 4)
    ([0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 1])
    """
    share = sum(work) / parts
    dealt: list[int] = []
    part, done = 0, 0.0
    for own in work:
        dealt.append(part)
        done += own
        if done >= share * (part + 1) * (1 - 1e-9) and part < parts - 1:
            part += 1
    return dealt
