"""Plays the work of one rank: its host, its device and its network."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

from foretrain.graph import Phase
from foretrain.step.spans import Span, total

_LAID_OUT = 3
"""Micro-batches of a rank that are laid out where each fetches its parameters; further ones repeat the last
of these."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Says what a rank does in a step: its blocks in forward order, and what it exchanges with its
    replicas."""

    forward: tuple[Span, ...]
    backward: tuple[Span, ...]
    """Of the same blocks, in forward order too; empty in inference."""
    optimizer: Span
    gathers_s: tuple[float, ...] = ()
    """Fetching the parameters of each block before it runs (ZeRO 3); empty for none."""
    again_s: tuple[float, ...] = ()
    """Fetching them again for the backward pass; zero for blocks that stay."""
    reduces_s: tuple[float, ...] = ()
    """Handing out the gradients of each block after each backward pass of it (ZeRO 3); empty for none."""
    copies_s: tuple[float, ...] = ()
    """Summing them up among those that hold the same shard, on links of their own; empty for none."""
    syncs_last: bool = False
    """Whether parameters stay after a backward pass, and only the last one hands out gradients."""
    prefetches: bool = True
    """Whether parameters come while the block before runs."""
    hands_out_beside: bool = True
    """Whether gradients go while the next block's backward pass runs."""
    host_waits: bool = False
    """Whether the host fetches a block only when the one before the last has been freed."""
    buckets: tuple[tuple[int, float], ...] = ()
    """Summing up gradients in the last micro-batch: the block whose backward pass completes a bucket, and the
    time."""
    after_backward_s: float = 0.0
    """Communication that waits for the last gradient."""
    after_optimizer_s: float = 0.0
    """Communication that waits for the optimizer."""
    host_call_s: float = 0.0
    """What the host needs to issue a collective."""
    step_overhead_s: float = 0.0
    waits_for_device: bool = False
    """Whether the host reads a result of the device once per step."""
    slowdown: float = 0.0
    """Share of the time of hidden communication by which computation becomes longer."""

    @functools.cached_property
    def passes(self) -> Span:
        """A micro-batch, forward and backward."""
        return total(self.forward) + total(self.backward)


@dataclass(slots=True)
class _Clock:
    """Says where host, device and network have come to, and what they have done so far."""

    host: float = 0.0
    device: float = 0.0
    network: float = 0.0
    copies: float = 0.0
    """The links on which copies of a shard sum up."""
    slots: list[tuple[Any, ...]] = field(default_factory=list)
    """The fields of each slot."""
    moved_s: float = 0.0
    """Time that the network was in use."""
    waited_s: float = 0.0
    """Time that the device waited for the network alone."""

    def run(
        self, name: str, phase: Phase | None, work: Span, ready: float = 0.0, blocks: tuple[int, ...] = ()
    ) -> None:
        """Computation, not before ``ready``."""
        began, free = self.host, max(self.device, ready)
        _, unhindered = work.after(self.host, self.device)
        self.host, self.device = work.after(self.host, free)
        self.waited_s += max(0.0, self.device - unhindered)
        if work.alone_s:
            start = self.device - work.device_s
            self.slots.append((0, "compute", name, start, self.device, phase, blocks, began, free))

    def move(self, name: str, seconds: float, ready: float) -> float:
        """Communication beside the computation; when it has ended."""
        self.network = max(self.network, ready) + seconds
        self.moved_s += seconds
        self.slots.append((0, "network", name, self.network - seconds, self.network))
        return self.network

    def sum_up(self, name: str, seconds: float, ready: float) -> float:
        """Sum gradients up among the copies of a shard."""
        self.copies = max(self.copies, ready) + seconds
        self.moved_s += seconds
        self.slots.append((0, "network", name, self.copies - seconds, self.copies))
        return self.copies

    def wait(self, until: float) -> None:
        self.waited_s += max(0.0, until - self.device)
        self.device = max(self.device, until)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The time of a step and what it goes to."""

    time_s: float
    exposed_s: float
    """The device waits for communication: of blocks, of parameters and gradients, of the pipeline's
    messages."""
    bubble_s: float = 0.0
    """The device waits for other stages."""
    host_s: float = 0.0
    """The device waits for the host."""
    computing_s: float = 0.0
    gaps_s: float = 0.0
    """Between kernels that follow at once; none of it is in ``computing_s``."""
    offloaded_s: float = 0.0
    """The host updates parameters that it holds."""
    straggler_s: float = 0.0
    """Waiting for the slowest rank."""
    slots: Sequence[Slot] = ()
    repeated: float = 1.0
    """Micro-batches of the step for each one in ``slots``."""

    def scaled(self, factor: float) -> StepTime:
        """Scale all times."""
        times = {
            one.name: getattr(self, one.name) * factor
            for one in dataclasses.fields(self)
            if one.name.endswith("_s")
        }
        return dataclasses.replace(self, **times, slots=Slots(functools.partial(_scaled, self.slots, factor)))


@dataclass(frozen=True, slots=True)
class Slot:
    """One stretch on the timeline of a stage, for people to look at."""

    stage: int
    lane: Literal["compute", "network"]
    name: str
    start_s: float
    end_s: float
    phase: Phase | None = None
    """Of computation."""
    blocks: tuple[int, ...] = ()
    """The blocks that run, in their order; empty for the optimizer."""
    issued_s: float = 0.0
    """When the host begins to issue it."""
    free_s: float = 0.0
    """When the device and what it needs are there for it."""

    def moved(self, by_s: float, factor: float = 1.0) -> Slot:
        """Move the slot to another time, and make it longer by a factor."""
        start_s, end_s = (self.start_s + by_s) * factor, (self.end_s + by_s) * factor
        issued_s, free_s = (self.issued_s + by_s) * factor, (self.free_s + by_s) * factor
        return Slot(
            self.stage, self.lane, self.name, start_s, end_s, self.phase, self.blocks, issued_s, free_s
        )


class Slots(Sequence[Slot]):
    """Slots that are made when somebody looks at them."""

    def __init__(self, make: Callable[[], Iterable[Slot]]) -> None:
        self._make = make

    @functools.cached_property
    def _made(self) -> tuple[Slot, ...]:
        return tuple(self._make())

    @overload
    def __getitem__(self, which: int) -> Slot: ...
    @overload
    def __getitem__(self, which: slice) -> Sequence[Slot]: ...
    def __getitem__(self, which: int | slice) -> Slot | Sequence[Slot]:
        return self._made[which]

    def __len__(self) -> int:
        return len(self._made)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._made == tuple(other)

    def __hash__(self) -> int:
        return hash(self._made)


def _scaled(slots: Iterable[Slot], factor: float) -> Iterator[Slot]:
    return (slot.moved(0.0, factor) for slot in slots)


@functools.lru_cache(maxsize=16)
def play_rank(work: Work, accumulation: int) -> StepTime:
    """A rank without a pipeline, steps following one another."""
    laid_out = min(accumulation, _LAID_OUT) if work.gathers_s else accumulation
    time_s, clock = _two_steps(work, laid_out)
    moved_s, waited_s = clock.moved_s, clock.waited_s
    if accumulation > laid_out:
        shorter_s, before = _two_steps(work, laid_out - 1)
        more = accumulation - laid_out
        time_s += (time_s - shorter_s) * more
        moved_s += (moved_s - before.moved_s) * more
        waited_s += (waited_s - before.waited_s) * more
    passes = total(work.forward) + total(work.backward)
    hidden = max(0.0, moved_s - waited_s)
    computing = (passes.device_s - passes.communication_s) * accumulation + work.optimizer.device_s
    time_s += work.slowdown * hidden
    exposed = passes.communication_s * accumulation + waited_s
    computing += work.slowdown * hidden
    host_s = max(0.0, time_s - exposed - computing)
    return StepTime(
        time_s=time_s,
        exposed_s=exposed,
        computing_s=computing,
        host_s=host_s,
        slots=_from_zero(clock.slots),
        repeated=accumulation / laid_out,
    )


def _from_zero(fields: Sequence[tuple[Any, ...]]) -> Slots:
    return Slots(functools.partial(_begun_at_zero, fields))


def _begun_at_zero(fields: Sequence[tuple[Any, ...]]) -> Iterator[Slot]:
    slots = [Slot(*one) for one in fields]
    start = min((slot.start_s for slot in slots), default=0.0)
    return (slot.moved(-start) for slot in slots)


def from_idle(work: Work, micro_batches: int) -> list[Slot]:
    """List what one step goes through when nothing was under way before it."""
    clock = _Clock()
    _play(work, micro_batches, clock)
    return [Slot(*one) for one in clock.slots]


def _two_steps(work: Work, micro_batches: int) -> tuple[float, _Clock]:
    """The time from the end of a first step to the end of a second one, and the clock of the second."""
    clock = _Clock()
    _play(work, micro_batches, clock)
    end = clock.device
    clock.moved_s = clock.waited_s = 0.0
    clock.slots.clear()
    _play(work, micro_batches, clock)
    return clock.device - end, clock


def _play(work: Work, micro_batches: int, clock: _Clock) -> None:
    clock.host += work.step_overhead_s
    forward, backward = total(work.forward), total(work.backward[::-1])
    many = 0 if work.gathers_s else micro_batches - _LAID_OUT
    if many > 0:
        clock.run(f"{many} micro-batches", None, (forward + backward) * many)
    for micro_batch in range(max(many, 0), micro_batches):
        _forward(work, clock, forward, fetches=not work.syncs_last or micro_batch == 0)
        _backward(work, clock, backward, last=micro_batch == micro_batches - 1)
    if work.after_backward_s:
        clock.host += work.host_call_s
        clock.wait(clock.move("gradients", work.after_backward_s, max(clock.device, clock.host)))
    clock.wait(max(clock.network, clock.copies) if work.buckets or work.reduces_s else 0.0)
    if work.waits_for_device:
        clock.host = max(clock.host, clock.device)
    clock.run("optimizer", "optimizer", work.optimizer)
    if work.after_optimizer_s:
        clock.wait(clock.move("parameters", work.after_optimizer_s, clock.device))


def _forward(work: Work, clock: _Clock, whole: Span, *, fetches: bool) -> None:
    if not work.gathers_s or not fetches:
        clock.run("forward", "forward", whole, blocks=tuple(range(len(work.forward))))
        return
    fetching = _Fetching(work, clock, work.gathers_s, range(len(work.forward)), ahead=False)
    for i, block in enumerate(work.forward):
        clock.run(f"forward {i}", "forward", block, fetching.ready(i), (i,))


def _backward(work: Work, clock: _Clock, whole: Span, *, last: bool) -> None:
    if not work.backward:
        return
    due: dict[int, list[float]] = {}
    for block, seconds in work.buckets if last else ():
        due.setdefault(block, []).append(seconds)
    order = range(len(work.backward) - 1, -1, -1)
    if not work.gathers_s and not due:
        clock.run("backward", "backward", whole, blocks=tuple(order))
        return
    fetching = _Fetching(work, clock, work.again_s, order, ahead=work.prefetches)
    hands_out = last or not work.syncs_last
    for i in order:
        clock.run(f"backward {i}", "backward", work.backward[i], fetching.ready(i), (i,))
        for seconds in (*due.get(i, ()), *(work.reduces_s[i : i + 1] if hands_out else ())):
            if seconds:
                _hand_out(work, clock, i, seconds)


def _hand_out(work: Work, clock: _Clock, block: int, seconds: float) -> None:
    """The gradients of a block: reduced among those that share it, then summed up with other copies."""
    clock.host += work.host_call_s
    ended = clock.move(f"gradients {block}", seconds, clock.device)
    if work.copies_s:
        clock.host += work.host_call_s
        ended = clock.sum_up(f"copies {block}", work.copies_s[block], ended)
    if not work.hands_out_beside:
        clock.wait(ended)


class _Fetching:
    """The parameters of blocks in the order of a pass.

    The host asks for those of a block when it comes to it, which is while the device still runs the block
    before, or (``ahead``) one block earlier. They come once the last but one before it is freed.
    """

    def __init__(
        self, work: Work, clock: _Clock, seconds: Sequence[float], order: Sequence[int], *, ahead: bool
    ) -> None:
        self._work, self._clock, self._seconds, self._ahead = work, clock, seconds, ahead
        self._left = [i for i in order if seconds and seconds[i]]
        self._ended = [clock.device]
        self._there: dict[int, float] = {}

    def ready(self, block: int) -> float:
        """Tell when the parameters of a block are there, as the host comes to it."""
        self._ended.append(self._clock.device)
        if block in self._left:
            self._fetch(before=3)
        if self._ahead and self._left:
            self._fetch(before=2)
        return self._there.get(block, 0.0)

    def _fetch(self, before: int) -> None:
        work, clock, block = self._work, self._clock, self._left.pop(0)
        freed = self._ended[-before:][0]
        if work.host_waits:
            clock.host = max(clock.host, freed)
        clock.host += work.host_call_s
        ready = max(clock.host, freed if work.prefetches else clock.device)
        self._there[block] = clock.move(f"parameters {block}", self._seconds[block], ready)


def shares(step: StepTime) -> Mapping[str, float]:
    """Seconds of a step by what the device does in them."""
    return {
        "computation": step.computing_s,
        "exposed communication": step.exposed_s,
        "gaps between kernels": step.gaps_s,
        "update on the host": step.offloaded_s,
        "pipeline bubble": step.bubble_s,
        "waiting for the host": step.host_s,
        "waiting for the slowest rank": step.straggler_s,
    }
