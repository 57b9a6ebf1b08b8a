"""Deals layers out to the stages of a pipeline over groups that differ: by what their devices take for one,
and no more than fit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from foretrain.forecast import usable_memory
from foretrain.step.dealing import Dealt, counts_words
from foretrain.step.layout import Layout
from foretrain.step.partition import Block, Chunk, Stage, blocks, stages_of
from foretrain.step.passes import kind_of, passes_by_kind
from foretrain.step.play import step_time_s
from foretrain.step.schedules import place
from foretrain.step.stage_memory import stage_memory
from foretrain.units import format_seconds

_ROOM = (0.9, 1.0)
"""Shares of a device that layers may fill: with room for what estimates of memory are off by, and, where no
distribution leaves that, all of it."""


def balanced(layout: Layout) -> Layout:
    """The layout with its layers dealt out by speed where its plan says so and does not count them; as it is
    where that would take longer."""
    if not layout.by_group or layout.job.balance == "even" or layout.job.plan.stages is not None:
        return layout
    paces = _paces(layout)
    fitted = next((one for room in _ROOM if (one := _fitted(layout, paces, room)) is not None), None)
    counts, most = fitted or (_by_speed(paces, [paces.layers] * len(layout.stages)), [])
    dealt = Dealt(counts=_by_chunk(layout, counts), because=_because(layout, paces, counts, most))
    other = layout.dealt_out(stages_of(layout.job, layout.graph, dealt.counts), dealt)
    alike = _counts(layout)
    if alike == counts:
        return other
    if (not fitted or _fits(layout, layout.stages, max(_ROOM))) and step_time_s(layout) < step_time_s(other):
        words = f"layers: {group_words(layout)}; by speed ({counts_words(counts)}) they would take longer"
        return layout.dealt_out(layout.stages, Dealt(counts=_by_chunk(layout, alike), because=words))
    return other


# Speed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Paces:
    """Says how long a micro-batch takes on each stage: for one layer, and for what is beside layers."""

    layers: int
    """Of the model."""
    layer_s: tuple[float, ...]
    own_s: tuple[float, ...]
    least: int
    """Layers that each stage has: one in every chunk where there are as many."""


def _paces(layout: Layout) -> _Paces:
    everything = blocks(layout.graph)
    whole = [
        Stage(index=i, chunks=(everything,), group=i) for i in range(len(layout.by_group))
    ]  # each group with all blocks
    passes = passes_by_kind(dataclasses.replace(layout, stages=tuple(whole)))

    def seconds(stage: Stage, chosen: Sequence[Block]) -> float:
        spans = [one.span for block in chosen for one in passes[kind_of(layout, stage, block)]]
        return max(sum(span.device_s for span in spans), sum(span.host_s for span in spans))

    layers = [block for block in everything if block.is_layer]
    of_group = [seconds(stage, layers) / len(layers) for stage in whole]
    chunks = len(layout.stages[0].chunks)
    return _Paces(
        layers=len(layers),
        layer_s=tuple(of_group[stage.group] for stage in layout.stages),
        own_s=tuple(
            seconds(stage, [block for block in stage.blocks if not block.is_layer]) for stage in layout.stages
        ),
        least=chunks if len(layers) >= chunks * len(layout.stages) else 0,
    )


def _by_speed(paces: _Paces, most: Sequence[int]) -> list[int]:
    """Layers of each stage, one after the other to the stage that would have them done first, and to none
    more than its most: the slowest stage takes as short as it can. Of stages alike the later one, which has
    fewer micro-batches under way."""
    counts = [min(paces.least, limit) for limit in most]
    for _ in range(paces.layers - sum(counts)):
        _, later = min(
            (own_s + (count + 1) * layer_s, -i)
            for i, (own_s, layer_s, count) in enumerate(zip(paces.own_s, paces.layer_s, counts, strict=True))
            if count < most[i]
        )
        counts[-later] += 1
    return counts


def _by_chunk(layout: Layout, counts: Sequence[int]) -> tuple[int, ...]:
    """Layers of each chunk in the order of the model, those of a stage spread evenly over its chunks."""
    chunks, stages, schedule = len(layout.stages[0].chunks), len(layout.stages), layout.job.plan.schedule
    layers_of = {
        place(schedule, stage, chunk, stages).number: part
        for stage, count in enumerate(counts)
        for chunk, part in enumerate(_evenly(count, chunks))
    }
    return tuple(layers_of[number] for number in sorted(layers_of))


def _evenly(layers: int, parts: int) -> Iterator[int]:
    each, more = divmod(layers, parts)
    yield from (each + (part < more) for part in range(parts))


def _counts(layout: Layout) -> list[int]:
    return [sum(block.is_layer for block in stage.blocks) for stage in layout.stages]


# Memory


def _fitted(layout: Layout, paces: _Paces, room: float) -> tuple[list[int], list[int]] | None:
    """Layers of each stage by speed so that all fit in a share of their devices, and the most that fit on
    each as far as that was asked; None where there is no such distribution."""
    most = [paces.layers] * len(layout.stages)
    while sum(most) >= paces.layers:
        counts = _by_speed(paces, most)
        dealt = stages_of(layout.job, layout.graph, _by_chunk(layout, counts))
        full = [stage for stage in dealt if not _fits(layout, [stage], room)]
        if not full:
            return counts, most
        for stage in full:
            fitting = _most_layers(layout, stage, counts[stage.index] - 1, room)
            if fitting < 0:
                return None
            most[stage.index] = fitting
    return None


def _most_layers(layout: Layout, stage: Stage, most: int, room: float) -> int:
    """Count the layers that fit on a stage, up to the most; -1 where not even those parts fit that are no
    layers."""
    low, high = -1, most
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(layout, [_with_layers(layout, stage, middle)], room):
            low = middle
        else:
            high = middle - 1
    return low


def _fits(layout: Layout, dealt: Sequence[Stage], room: float) -> bool:
    ranks = (stage_memory(layout, stage, replays=False) for stage in dealt)
    return all(
        rank.needed_bytes <= room * usable_memory(layout.job, rank.capacity_bytes or 0.0) for rank in ranks
    )


def _with_layers(layout: Layout, stage: Stage, count: int) -> Stage:
    """The stage with so many layers, from about where its own are."""
    layers = [block for block in blocks(layout.graph) if block.is_layer]

    def chunk_of(chunk: Chunk, part: int) -> Chunk:
        own = [block.is_layer for block in chunk]
        first = own.index(True) if True in own else len(own)
        last = len(own) - own[::-1].index(True) if True in own else len(own)
        start = layers.index(chunk[first]) if True in own else 0
        start = max(0, min(start, len(layers) - part))
        return (*chunk[:first], *layers[start : start + part], *chunk[last:])

    parts = zip(stage.chunks, _evenly(count, len(stage.chunks)), strict=True)
    return dataclasses.replace(stage, chunks=tuple(chunk_of(chunk, part) for chunk, part in parts))


# Words


def group_words(layout: Layout) -> str:
    """Say how many layers the stages of each group have: ``a100-sxm-80gb has 2 x 21 on 2 stages``."""
    return ", ".join(f"{name} has {words}" for name, _, words in _by_group(layout, _counts(layout)))


def _by_group(layout: Layout, counts: Sequence[int]) -> Iterator[tuple[str, list[int], str]]:
    """Stages of one group that follow one another: their device, which they are, and their layers."""
    for group, alike in itertools.groupby(layout.stages, key=lambda stage: stage.group):
        own, device = [stage.index for stage in alike], layout.by_group[group].site.device
        name = f"{device.name} with {device.cores} cores" if device.is_cpu else device.name
        each = counts_words([counts[i] for i in own])
        yield name, own, f"{each} on {len(own)} stage{'s' * (len(own) > 1)}"


def _because(layout: Layout, paces: _Paces, counts: Sequence[int], most: Sequence[int]) -> str:
    """Say how layers were dealt out, by what each group takes for one, and where memory was the limit."""
    parts = []
    for name, own, words in _by_group(layout, counts):
        full = [i for i in own if most and counts[i] == most[i]]
        limit = f" (no more fit on stage {', '.join(map(str, full))})" if full else ""
        parts.append(f"{name} takes {format_seconds(paces.layer_s[own[0]])} for one and gets {words}{limit}")
    rest = "" if most else "; no distribution fits all devices"
    return f"layers are dealt out by the speed of stages: {', '.join(parts)}{rest}"
