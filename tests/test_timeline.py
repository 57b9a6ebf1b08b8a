"""Timelines: the host issues in order, the device runs in order, and no time can be lost or won against
either."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import steps
from foretrain.graph import PHASES, Buffer, Phase
from foretrain.step.play import Step
from foretrain.step.timeline import StepUse, Stream, Timeline, run, trace_events

TIMES = st.integers(0, 1000).map(float)
CALLS = st.lists(st.tuples(TIMES, TIMES, st.booleans()), max_size=20)
"""Host seconds, device seconds, and whether the host then waits; whole numbers, so that sums are exact."""
Call = tuple[float, float, bool]


def play(calls: list[Call], start: float = 0.0) -> Stream:
    host, device, waits = ([call[i] for call in calls] for i in range(3))
    columns = (
        np.array(host, dtype=np.float64),
        np.array(device, dtype=np.float64),
        np.array(waits, dtype=np.bool_),
    )
    return run(np.arange(len(calls)), *columns, host_start_s=start)


# One stream


@given(CALLS, TIMES)
def test_a_stream_agrees_with_playing_call_by_call(calls: list[Call], start: float) -> None:
    stream = play(calls, start)
    clock, free = start, 0.0
    for i, (host, device, waits) in enumerate(calls):
        clock += host
        begin = max(clock, free)
        free = begin + device
        assert (stream.issued[i], stream.start[i], stream.end[i]) == (clock, begin, free)
        if waits:
            clock = max(clock, free)


@given(CALLS)
def test_the_makespan_is_at_least_the_host_and_the_device_and_at_most_both(calls: list[Call]) -> None:
    stream, host, device = play(calls), sum(call[0] for call in calls), sum(call[1] for call in calls)
    assert max(host, device) <= stream.makespan_s <= host + device
    assert stream.busy_s == device


@given(CALLS)
def test_kernels_start_after_they_are_issued_and_never_overlap(calls: list[Call]) -> None:
    stream = play(calls)
    assert (stream.start >= stream.issued).all()
    assert (stream.start[1:] >= stream.end[:-1]).all()
    assert (np.diff(stream.issued) >= 0).all()


@given(CALLS, st.integers(0, 19), TIMES, TIMES)
def test_more_time_in_any_call_never_shortens(
    calls: list[Call], which: int, more_host: float, more_device: float
) -> None:
    if calls:
        host, device, waits = calls[which % len(calls)]
        longer = [*calls]
        longer[which % len(calls)] = (host + more_host, device + more_device, waits)
        assert play(longer).makespan_s >= play(calls).makespan_s


@given(CALLS)
def test_waiting_never_shortens_and_the_next_call_comes_after(calls: list[Call]) -> None:
    waiting = [(host, device, True) for host, device, _ in calls]
    stream = play(waiting)
    assert stream.makespan_s >= play(calls).makespan_s
    assert stream.makespan_s == sum(host + device for host, device, _ in calls)


def test_a_fast_device_waits_for_the_host_and_a_slow_one_queues() -> None:
    assert play([(10, 1, False)] * 3).end.tolist() == [11, 21, 31]
    assert play([(1, 10, False)] * 3).end.tolist() == [11, 21, 31]
    assert play([(1, 10, True), (1, 10, False)]).issued.tolist() == [1, 12]


def test_an_empty_stream_takes_no_time() -> None:
    assert (play([]).makespan_s, play([]).busy_s) == (0, 0)


# One step


@st.composite
def played(draw: st.DrawFn, waiting: bool = True) -> Step:
    phases = sorted(draw(st.lists(st.sampled_from(PHASES), max_size=12)), key=PHASES.index)
    kinds = st.sampled_from(["mm", "relu", "_local_scalar_dense"] if waiting else ["mm", "relu"])
    names = draw(st.lists(kinds, min_size=len(phases), max_size=len(phases)))
    column = st.lists(TIMES, min_size=len(phases), max_size=len(phases))
    layers = draw(st.lists(st.sampled_from(["", "a.b.c", "a.d"]), min_size=len(phases), max_size=len(phases)))
    return steps.step(
        phases,
        draw(column),
        draw(column),
        names=names,
        layers=layers,
        accumulation=draw(st.integers(1, 3)),
        overhead_s=draw(TIMES),
        buffers=(Buffer(8, "weights", -1, len(phases)),),
    )


THREE: list[Phase] = ["forward", "backward", "optimizer"]


@given(played())
def test_a_steady_step_takes_at_least_the_host_and_the_device_and_at_most_both(step: Step) -> None:
    host, device = step.host_issue_s, step.device_busy_s
    assert max(host, device) <= step.time_s + 1e-9
    assert step.time_s <= host + device + 1e-9


@given(played(waiting=False))
def test_a_step_without_waits_takes_the_longer_of_host_and_device(step: Step) -> None:
    assert step.time_s == pytest.approx(max(step.host_issue_s, step.device_busy_s))


@given(played())
def test_the_view_by_operator_ends_when_the_step_does(step: Step) -> None:
    view = Timeline.of(step)
    ends = [slot.end_s for slot in view.slots]
    assert view.stream.end.max(initial=0.0) == pytest.approx(max(ends, default=0.0))


def test_host_and_device_bound_steps_by_hand() -> None:
    assert steps.step(THREE, [5, 5, 5], [1, 1, 1]).time_s == 15
    assert steps.step(THREE, [1, 1, 1], [5, 5, 5]).time_s == 15
    assert Timeline.of(steps.step(THREE, [1, 1, 1], [5, 5, 5])).stream.makespan_s == 16
    assert steps.step(THREE, [5, 5, 5], [1, 1, 1], overhead_s=4).time_s == 19


def test_gaps_between_kernels_take_time_in_which_the_device_is_not_busy() -> None:
    step = steps.step(THREE, [1, 1, 1], [5, 5, 5], gap_s=1.0)
    assert step.time_s == 18
    assert step.device_busy_s == 15


def test_accumulation_repeats_forward_and_backward_only() -> None:
    step = steps.step(THREE, [1, 2, 3], [10, 20, 30], accumulation=4, overhead_s=0.5)
    assert step.device_busy_s == 4 * (10 + 20) + 30
    assert step.host_issue_s == 4 * (1 + 2) + 3 + 0.5
    assert step.kernels == 9
    assert step.time_s == 150
    assert step.phases_s == {"forward": 41, "backward": 80, "optimizer": 30}


@given(st.integers(1, 100), TIMES, TIMES)
def test_many_alike_micro_batches_take_their_longer_side(
    accumulation: int, host: float, device: float
) -> None:
    step = steps.step(["forward"], [host], [device], accumulation=accumulation)
    assert step.time_s == pytest.approx(accumulation * max(host, device))


def test_many_micro_batches_behind_a_slow_optimizer_take_the_device_time_or_the_hosts() -> None:
    step = steps.step(THREE, [0.5, 0.5, 10], [1, 1, 0], accumulation=100)
    assert step.time_s == pytest.approx(max(step.host_issue_s, step.device_busy_s))


@given(played())
def test_phases_add_up_to_a_step_that_begins_idle(step: Step) -> None:
    graph, calls = step.layout.graph, step.layout.calls
    whole = sum(step.phases_s.values())
    repeats = np.where(graph.phase_index == PHASES.index("optimizer"), 1, step.layout.job.accumulation)
    host, device = (float((column * repeats).sum()) for column in (calls.host_s, calls.device_s))
    assert max(host, device) <= whole + 1e-9
    assert whole <= host + device + 1e-9
    for phase in PHASES:
        chosen = graph.phase_index == PHASES.index(phase)
        assert float((calls.device_s * repeats)[chosen].sum()) <= step.phases_s[phase] + 1e-9


@given(played())
def test_every_breakdown_adds_up_to_the_busy_time_largest_first(step: Step) -> None:
    for what in ("phase", "operator", "layer"):
        parts = step.by(what)
        assert sum(parts.values()) == pytest.approx(step.device_busy_s)
        assert list(parts.values()) == sorted(parts.values(), reverse=True)


@given(played(), st.floats(0.3, 3.0))
def test_the_use_of_every_step_adds_up_to_its_busy_time(step: Step, factor: float) -> None:
    for one in (step, step.scaled(factor)):
        if one.time_s > 0:
            use = StepUse.of(one)
            assert use.busy @ np.diff(use.ends_s, prepend=0.0) == pytest.approx(one.device_busy_s)
            assert (use.busy >= -1e-12).all()
            assert use.busy.max() <= 1 + 1e-9
            assert use.time_s == pytest.approx(one.time_s)
            assert sum(one.causes_s.values()) == pytest.approx(one.time_s)
            assert sum(one.by("phase").values()) == pytest.approx(one.device_busy_s)


@given(played(), st.floats(0.0, 2.0), st.floats(0.0, 2.0), st.integers(1, 3))
def test_steps_that_wait_are_as_busy_as_before_and_longer(
    step: Step, before_s: float, after_s: float, steps: int
) -> None:
    if step.time_s > 0:
        use = StepUse.of(step)
        waiting = use.waiting(before_s, after_s, steps)
        assert waiting.time_s == pytest.approx(steps * (before_s + step.time_s) + after_s)
        busy_s = waiting.busy @ np.diff(waiting.ends_s, prepend=0.0)
        assert busy_s == pytest.approx(steps * step.device_busy_s)


def test_an_empty_step_takes_its_overhead() -> None:
    assert steps.step([], [], [], overhead_s=2.0).time_s == 2.0


# The trace


@given(played())
def test_trace_events_are_well_formed_json(step: Step) -> None:
    events = json.loads(json.dumps(list(trace_events(step, "job")), allow_nan=False))
    assert {event["ph"] for event in events} <= {"M", "X", "C"}
    assert all({"ph", "pid", "name"} <= event.keys() for event in events)
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == [
        "foretrain forecast",
        "host",
        "device",
    ]
    assert all(event["ts"] >= -1e-3 and event["dur"] > 0 for event in events if event["ph"] == "X")
    assert all(isinstance(event["args"]["bytes"], int) for event in events if event["ph"] == "C")


@given(played())
def test_slices_of_a_trace_are_in_order_and_do_not_overlap(step: Step) -> None:
    events = list(trace_events(step, "job"))
    for thread in (0, 1):
        slices = [event for event in events if event["ph"] == "X" and event["tid"] == thread]
        for one, other in itertools.pairwise(slices):
            assert one["ts"] + one["dur"] <= other["ts"] + 0.002
    counters = [event["ts"] for event in events if event["ph"] == "C"]
    assert counters == sorted(counters)


@given(played())
def test_a_trace_shows_every_second_of_the_device(step: Step) -> None:
    kernels = [event for event in trace_events(step, "job") if event["ph"] == "X" and event["tid"] == 1]
    assert sum(event["dur"] for event in kernels) == pytest.approx(step.device_busy_s * 1e6)
    assert all(event["args"]["inputs"] == [[2, 2]] and event["args"]["flops"] == 16 for event in kernels)


def test_the_memory_of_a_trace_follows_the_buffers() -> None:
    buffers = (Buffer(100, "weights", -1, 3), Buffer(10, "activations", 0, 1), Buffer(1, "gradients", 1, 2))
    step = steps.step(THREE, [1, 1, 1], [1, 1, 1], buffers=buffers)
    events = trace_events(step, "job")
    assert [event["args"]["bytes"] for event in events if event["ph"] == "C"] == [110, 111, 101]
