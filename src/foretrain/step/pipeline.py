"""Plays the stages of a pipeline: passes in the order of its schedule, messages between stages, and what
follows the last pass."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from foretrain.costs.collectives import Team
from foretrain.dispatching import overlaps_exchange
from foretrain.step.held_states import tied_elements
from foretrain.step.layout import Layout
from foretrain.step.messages import on_efa
from foretrain.step.partition import Stage, handed_on_bytes
from foretrain.step.passes import weight_gradients_s
from foretrain.step.playback import Slot, Slots, StepTime, Work
from foretrain.step.schedules import BIDIRECTIONAL, FORWARD_ONLY, SPLIT, place
from foretrain.step.sharding import wire_bytes
from foretrain.step.spans import Column, Span, total
from foretrain.step.turns import TURNS, named, program

_ROUNDS = 3
"""Micro-batches of a pipeline that are laid out, in units of its stages; further ones follow at the pace of
the last."""
TAIL = "gradients, optimizer"
"""What follows the last backward pass of a stage."""
_STALL_BETWEEN_NODES = 1.23
"""On the stalls of tensor teams that span nodes."""
_FAR_NODES, _FAR_TEAM_NODES = 64, 4
"""Nodes of a cluster, and of a tensor team, from which on messages are held up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """Says what a rank of a pipeline does: the passes of each of its chunks, and what follows the last
    one."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    """Empty in inference."""
    tail_s: float
    """From the end of its last backward pass to the end of its step."""
    weights_s: tuple[float, ...] = ()
    """The part of the backward passes that gradients of weights take, where it runs apart."""
    beside_s: tuple[float, ...] = ()
    """A forward pass of each chunk together with a backward pass of the other one."""

    @property
    def hidden_s(self) -> float:
        """Give the time by which passes of a micro-batch that run together are shorter."""
        apart = sum(self.forward_s) + sum(self.backward_s)
        return apart - sum(self.beside_s) if self.beside_s else 0.0

    def lasting_s(self, chunks: int) -> Iterator[float]:
        """Seconds of each kind of turn (``TURNS``), by the chunk of its first task."""
        inputs_s = (whole - part for whole, part in zip(self.backward_s, self.weights_s, strict=False))
        kinds = {
            "F": self.forward_s,
            "B": self.backward_s,
            "I": tuple(inputs_s),
            "W": self.weights_s,
            "FB": self.beside_s,
        }
        for kind in TURNS:
            yield from kinds[kind] or (0.0,) * chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedPipeline:
    """A pipeline as it was played."""

    time_s: float
    """From the first pass to the end of the last stage."""
    busiest_s: float
    """Of the busiest stage's own passes."""
    slots: Sequence[Slot]


def laid_out(stages: int, micro_batches: int) -> int:
    """Micro-batches of a pipeline that are played task by task."""
    return min(micro_batches, _ROUNDS * stages)


def play_pipeline(
    stages: Sequence[StageWork],
    micro_batches: int,
    message_s: float | Sequence[float],
    schedule: str,
    *,
    blocks: bool = False,
) -> PlayedPipeline:
    """Play all passes of a step; messages take as long everywhere, or as each chunk's in the order of the
    model.

    A pass waits for its input ``message_s`` after the pass that makes it has ended; where sending
    ``blocks``, the sender waits as long before its next pass.
    """
    chunks, shown = len(stages[0].forward_s), laid_out(len(stages), micro_batches)
    time_s, ends, times = _timed(stages, micro_batches, message_s, schedule, blocks=blocks)
    tails_s = tuple(stage.tail_s for stage in stages)
    own = max(sum(stage.forward_s) + sum(stage.backward_s) for stage in stages)
    return PlayedPipeline(
        time_s=time_s,
        busiest_s=own * micro_batches / (2 if schedule == BIDIRECTIONAL else 1),
        slots=Slots(functools.partial(_slots, schedule, chunks, shown, times, ends, tails_s)),
    )


def _slots(
    schedule: str,
    chunks: int,
    micro_batches: int,
    times: Times,
    ends: Sequence[float],
    tails_s: Sequence[float],
) -> Iterator[Slot]:
    """The passes of all stages, and what follows the last of each."""
    starts, ended = times
    for number, stage, name in named(schedule, len(ends), chunks, micro_batches):
        yield Slot(stage, "compute", name, starts[number], ended[number])
    for i, (end, tail_s) in enumerate(zip(ends, tails_s, strict=True)):
        yield Slot(i, "compute", TAIL, end, end + tail_s)


def _timed(
    stages: Sequence[StageWork],
    micro_batches: int,
    message_s: float | Sequence[float],
    schedule: str,
    *,
    blocks: bool = False,
) -> tuple[float, Sequence[float], Times]:
    """The time of all passes and what follows them; of those that are laid out, when each stage ends and when
    each turn runs."""
    count = len(stages)
    shown = laid_out(count, micro_batches)
    if isinstance(message_s, float):
        message_s = (message_s,) * (count * len(stages[0].forward_s))
    ends, times = _lay_out(stages, shown, message_s, schedule, blocks=blocks)
    per_round = 0.0
    if micro_batches > shown:
        before, _ = _lay_out(stages, shown - count, message_s, schedule, blocks=blocks)
        per_round = (max(ends) - max(before)) / count
    last = max(end + stage.tail_s for end, stage in zip(ends, stages, strict=True))
    return last + per_round * (micro_batches - shown), ends, times


Times = tuple[Sequence[float], Sequence[float]]
"""When each turn of a program begins, and when it ends."""


def _lay_out(
    stages: Sequence[StageWork],
    micro_batches: int,
    message_s: Sequence[float],
    schedule: str,
    *,
    blocks: bool = False,
) -> tuple[list[float], Times]:
    """Play the stages' tasks, each in its stage's order and after what it depends on; when each stage ends.
    What a turn has none of is the last of its list."""
    chunks = len(stages[0].forward_s)
    free, starts, ended = [0.0] * len(stages), list[float](), [0.0]
    travels_s = [*message_s, 0.0]
    holds_up_s = travels_s if blocks else [0.0] * len(travels_s)
    lasting_s = [seconds for stage in stages for seconds in stage.lasting_s(chunks)] + [0.0]
    turns = program(schedule, len(stages), chunks, micro_batches)
    columns = (turns.stage, turns.lasting, turns.behind, turns.brought, turns.sent)
    for stage, lasting, behind, brought, sent in zip(*columns, strict=True):
        start = free[stage]
        ready = ended[behind] + travels_s[brought]
        if ready > start:
            start = ready
        end = start + lasting_s[lasting]
        free[stage] = end + holds_up_s[sent]
        starts.append(start)
        ended.append(end)
    return free, (starts, ended[1:])


# Stages as they are laid out


def pipeline_step(layout: Layout, works: Sequence[Work]) -> StepTime:
    """The step of a job with a pipeline."""
    job, own, messages = layout.job, _stage_works(layout, works), _messages_s(layout)
    schedule = job.plan.schedule if job.trains else FORWARD_ONLY
    played = play_pipeline(own, job.accumulation, messages, schedule, blocks=_blocks(layout))
    slowest = max(works, key=lambda work: work.passes.device_s)
    passes, times = slowest.passes, job.accumulation / layout.stages[0].copies
    computing = (passes.device_s - passes.communication_s) * times + slowest.optimizer.device_s
    waiting = max(0.0, played.time_s - _timed(own, job.accumulation, 0.0, schedule)[0])
    exchange = _tail_exchange_s(max(works, key=_tail_s)) + _tied_s(layout)
    inside = passes.communication_s - own[works.index(slowest)].hidden_s  # nearly all passes are in pairs
    exposed = max(0.0, inside) * times + exchange + waiting
    longest_tail = max(stage.tail_s for stage in own)
    bubble = max(0.0, played.time_s - waiting - played.busiest_s - longest_tail)
    time_s = played.time_s + layout.step_overhead_s
    return StepTime(
        time_s=time_s,
        exposed_s=exposed,
        bubble_s=bubble,
        computing_s=computing,
        host_s=max(0.0, time_s - exposed - bubble - computing),
        slots=played.slots,
        repeated=job.accumulation / laid_out(len(works), job.accumulation),
    )


def pipeline_time_s(layout: Layout, works: Sequence[Work]) -> float:
    """The time of that step alone."""
    job = layout.job
    schedule = job.plan.schedule if job.trains else FORWARD_ONLY
    time_s, _, _ = _timed(
        _stage_works(layout, works),
        job.accumulation,
        _messages_s(layout),
        schedule,
        blocks=_blocks(layout),
    )
    return time_s + layout.step_overhead_s


def _blocks(layout: Layout) -> bool:
    """Whether senders wait until their message has arrived."""
    return layout.job.trains and not overlaps_messages(layout)


def _stage_works(layout: Layout, works: Sequence[Work]) -> list[StageWork]:
    """Make the work of each stage; those alike share it, but for both ends of the pipeline."""
    waits = layout.profile.waits_at_messages and not overlaps_messages(layout)
    work_of: dict[tuple[int, bool], StageWork] = {}
    keys = [(id(work), _is_end(layout, stage)) for stage, work in zip(layout.stages, works, strict=True)]
    for key, stage, work in zip(keys, layout.stages, works, strict=True):
        if key not in work_of:
            work_of[key] = _stage_work(layout, stage, work, waits=waits)
    return [work_of[key] for key in keys]


def _is_end(layout: Layout, stage: Stage) -> bool:
    return stage.index in (0, len(layout.stages) - 1)


def overlaps_messages(layout: Layout) -> bool:
    """Whether stages compute while their messages travel. Megatron and torch wait for them in plain
    schedules and do not where chunks are interleaved or gradients of weights are left to fill the time."""
    plan = layout.job.plan
    return (plan.overlap or {}).get("messages", plan.schedule not in ("gpipe", "1f1b"))


def _stage_work(layout: Layout, stage: Stage, work: Work, *, waits: bool) -> StageWork:
    plan, slowdown, own = layout.job.plan, layout.slowdown, layout.at(stage)
    forward: list[Span] = []
    backward: list[Span] = []
    forward_s, backward_s, weights_s, first = [], [], [], 0
    for chunk in stage.chunks:
        part = slice(first, first + len(chunk))
        first += len(chunk)
        least = stall_s(own) * sum(block.is_layer for block in chunk)
        fetched, again, handed = (
            sum(seconds[part]) for seconds in (work.gathers_s, work.again_s, work.reduces_s)
        )
        forward.append(total(work.forward[part]))
        forward_s.append(
            max(_lasting(forward[-1], waits=waits) + layout.tuning.message_s, least / 3, fetched)
        )
        if not layout.job.trains:
            continue
        backward.append(total(work.backward[part][::-1]))
        backward_s.append(
            max(
                _lasting(backward[-1], waits=waits) + layout.tuning.message_s,
                least * 2 / 3,
                again + handed,
            )
        )
        if plan.schedule in SPLIT:
            apart = sum(weight_gradients_s(own, block) for block in chunk)
            weights_s.append(min(apart, 0.5 * backward_s[-1]))
    beside = []
    if plan.schedule == BIDIRECTIONAL:
        for chunk_number, passes in enumerate(forward):
            hidden = _hidden_s(passes, backward[1 - chunk_number]) if overlaps_exchange(plan) else 0.0
            beside.append(forward_s[chunk_number] + backward_s[1 - chunk_number] - hidden * (1.0 - slowdown))
    return StageWork(
        forward_s=tuple(forward_s),
        backward_s=tuple(backward_s),
        tail_s=_tail_s(work) + (_tied_s(layout) if _is_end(layout, stage) else 0.0),
        weights_s=tuple(weights_s),
        beside_s=tuple(beside),
    )


def _hidden_s(one: Span, other: Span) -> float:
    """Communication of two passes that run together which the computation of the other one hides."""
    computing = [passes.device_s - passes.communication_s for passes in (one, other)]
    return min(one.communication_s, computing[1]) + min(other.communication_s, computing[0])


def _lasting(passes: Span, *, waits: bool) -> float:
    """The time of a pass; from a standstill where the host waits for the device at each message."""
    return passes.alone_s if waits else passes.steady_s


def stall_s(layout: Layout) -> float:
    """The framework's own stall of a layer and micro-batch, forward and backward."""
    tensor, stages = layout.teams.tensor.size, layout.teams.stages
    once, each = layout.profile.stalls_s if on_efa(layout.site) else (0.0, 0.0)
    across = _STALL_BETWEEN_NODES if layout.teams.tensor.nodes > 1 else 1.0
    return (
        (once + each * tensor) * across * layout.tuning.stalls
        if tensor > 1 and layout.job.cluster.nodes > 1 and stages.size > 1
        else 0.0
    )


def _messages_s(layout: Layout) -> tuple[float, ...]:
    """The message of each chunk in the order of the model: what the next one reads of its results."""
    count = len(layout.stages)
    placed = {
        place(layout.job.plan.schedule, stage.index, number, count).number: (stage, chunk)
        for stage in layout.stages
        for number, chunk in enumerate(stage.chunks)
    }
    sizes = np.array(
        [handed_on_bytes(placed[number][1], layout.stages) for number in sorted(placed)], dtype=np.float64
    )
    groups = [placed[number][0].group for number in sorted(placed)]
    pairs = list(zip(groups, [*groups[1:], groups[-1]], strict=True))
    times_s = np.zeros(len(sizes))
    for pair in set(pairs):
        own = [number for number, one in enumerate(pairs) if one == pair]
        seen = [_sending_s(view, sizes[own], members) for view, members in _ends(layout, pair)]
        times_s[own] = np.max(seen, axis=0)
    return tuple(times_s.tolist())


def _ends(layout: Layout, groups: tuple[int, int], *, far: bool = False) -> list[tuple[Layout, Team]]:
    """Two ranks of a pipeline as each of them sees the other, by the groups that they are of: neighbours, or
    its first and its last one (``far``). Between groups the slower network counts."""
    one, other = (layout.by_group[group] if layout.by_group else layout for group in groups)
    if one is not other:
        return [(one, one.teams.beyond), (other, other.teams.beyond)]
    return [(one, one.teams.ends if far else one.teams.stages)]


def _sending_s(layout: Layout, sizes: Column, members: Team) -> Column:
    """Messages of these sizes, with those that frameworks send ahead of them."""
    times_s = layout.network.time_s("send", sizes, members)
    meta = layout.profile.metadata_messages * layout.network.time_s("send", 1024.0, members)
    return times_s * layout.tuning.team(members) + meta + _held_up_s(layout)


def _held_up_s(layout: Layout) -> float:
    """The framework's own stall of a message."""
    far = layout.job.cluster.nodes >= _FAR_NODES or layout.teams.tensor.nodes >= _FAR_TEAM_NODES
    return layout.profile.far_message_s * layout.tuning.stalls if far and on_efa(layout.site) else 0.0


def _tied_s(layout: Layout) -> float:
    """Summing up the gradients of what both ends of the pipeline hold: an embedding that is the head too."""
    tied = tied_elements(layout.graph) if layout.job.trains else 0
    if not tied:
        return 0.0
    size = wire_bytes(layout, tied, gradients=True)
    groups = layout.stages[0].group, layout.stages[-1].group
    return max(
        view.network.time_s("all_reduce", size, ends) * view.tuning.team(ends)
        for view, ends in _ends(layout, groups, far=True)
    )


def _tail_s(work: Work) -> float:
    """Time what follows the last backward pass: what of the gradients is still to be summed up, the
    optimizer, and handing out parameters."""
    return _tail_exchange_s(work) + work.optimizer.alone_s


def _tail_exchange_s(work: Work) -> float:
    """The communication in it."""
    reduce_s = sum(seconds for _, seconds in work.buckets)
    last = total(work.backward).device_s
    exposed = max(work.buckets[-1][1], reduce_s - last) if work.buckets else 0.0
    return exposed + work.after_backward_s + work.after_optimizer_s
