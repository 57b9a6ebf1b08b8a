"""Spans, ranks and pipelines: what is known in closed form, and what must never happen."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.plan import Plan
from foretrain.step import pipeline
from foretrain.step.pipeline import TAIL, PlayedPipeline, StageWork, play_pipeline
from foretrain.step.playback import StepTime, Work, play_rank, shares
from foretrain.step.schedules import in_flight, order, place
from foretrain.step.spans import Span, span, total
from foretrain.step.timeline import run, slot_events
from foretrain.step.turns import named

times = st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=12)


@given(times, times)
def test_spans_add_up_as_the_calls_do(
    first: list[tuple[float, float]], second: list[tuple[float, float]]
) -> None:
    calls = np.array(first + second)
    together = span(calls[:, 0], calls[:, 1])
    apart = span(*np.array(first).T) + span(*np.array(second).T)
    played = run(np.arange(len(calls)), calls[:, 0], calls[:, 1], np.zeros(len(calls), dtype=bool))
    assert together.alone_s == pytest.approx(apart.alone_s)
    assert together.alone_s == pytest.approx(max(played.makespan_s, together.host_s))


waiting_calls = st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.booleans()), min_size=1, max_size=12)


@given(waiting_calls, waiting_calls, st.integers(1, 9), st.floats(0, 9), st.floats(0, 9))
def test_spans_in_which_the_host_reads_results_add_up_too(
    first: list[tuple[float, float, bool]],
    second: list[tuple[float, float, bool]],
    times: int,
    host: float,
    device: float,
) -> None:
    def made(calls: list[tuple[float, float, bool]]) -> Span:
        columns = [np.array([call[i] for call in calls]) for i in range(3)]
        return span(columns[0], columns[1], 0.0, columns[2].astype(np.bool_))

    both = made(first) + made(second)
    assert both.after(host, device) == pytest.approx(made(first + second).after(host, device))
    assert (both * times).after(host, device) == pytest.approx(total([both] * times).after(host, device))
    columns = [np.array([call[i] for call in first + second]) for i in range(3)]
    played = run(
        np.arange(len(first + second)),
        columns[0],
        columns[1],
        columns[2].astype(np.bool_),
        host_start_s=host,
        free_s=device,
    )
    assert both.after(host, device)[1] == pytest.approx(max(played.end[-1], device))


def test_many_of_a_span_take_what_bounds_them() -> None:
    one = Span(1.0, 3.0, 3.5)
    assert (one * 4).alone_s == pytest.approx(total([one] * 4).alone_s)
    assert (one * 4).device_s == 12.0
    assert one.steady_s == 3.0


def _stages(count: int, chunks: int = 1) -> list[StageWork]:
    return [
        StageWork(forward_s=(1.0 / chunks,) * chunks, backward_s=(2.0 / chunks,) * chunks, tail_s=0.0)
        for _ in range(count)
    ]


SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1, "zbv": 2, "dualpipe": 2}
"""Chunks of a rank in the tests of each schedule."""


def _played(name: str, stages: int, micro_batches: int, times: tuple[float, float, float]) -> PlayedPipeline:
    """Equal stages with these seconds of a micro-batch for forward, gradients of inputs and of weights; in
    DualPipe each half of the micro-batches goes through all of it."""
    chunks = SCHEDULES[name]
    share = 1.0 if name == "dualpipe" else 1.0 / chunks
    forward, inputs, weights = (time * share for time in times)
    work = StageWork(
        forward_s=(forward,) * chunks,
        backward_s=(inputs + weights,) * chunks,
        weights_s=(weights,) * chunks,
        beside_s=(forward + inputs + weights,) * chunks,
        tail_s=0.0,
    )
    return play_pipeline([work] * stages, micro_batches, 0.0, name)


BUBBLES: dict[str, Callable[[int, float, float, float], float]] = {
    "gpipe": lambda p, f, i, w: (p - 1) * (f + i + w),
    "1f1b": lambda p, f, i, w: (p - 1) * (f + i + w),
    "interleaved": lambda p, f, i, w: (p - 1) * (f + i + w) / SCHEDULES["interleaved"],
    "zero-bubble": lambda p, f, i, w: (p - 1) * (f + i - w),
    "zbv": lambda p, f, i, w: (p - 1) * f / 2,
    "dualpipe": lambda p, f, i, w: (p / 2 - 1) * (f + i + w + i + w - 3 * w),
}
"""As published: of equal passes for the last two, and in ZBV with the update after the slowest rank."""


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (4, 40), (8, 16)])
def test_equal_stages_take_their_work_and_the_bubble_of_the_schedule(
    name: str, stages: int, micro_batches: int
) -> None:
    times = (1.0, 1.0, 1.0) if name in ("zbv", "dualpipe") else (1.0, 1.3, 0.8)
    played = _played(name, stages, micro_batches, times)
    assert played.busiest_s == pytest.approx(micro_batches * sum(times))
    assert played.time_s - played.busiest_s == pytest.approx(BUBBLES[name](stages, *times), abs=1e-9)


@pytest.mark.parametrize("chunks", [2, 4])
def test_interleaving_divides_the_bubble(chunks: int) -> None:
    played = play_pipeline(_stages(4, chunks), 16, 0.0, "interleaved")
    assert played.time_s == pytest.approx((16 + 3 / chunks) * 3.0)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (4, 10)])
def test_no_pass_runs_before_its_input_and_none_is_left_out(
    name: str, stages: int, micro_batches: int
) -> None:
    chunks = SCHEDULES[name]
    slots = _played(name, stages, micro_batches, (chunks, chunks, chunks)).slots
    ran: dict[tuple[str, int, int, int], tuple[float, float]] = {}
    for slot in slots:
        for part in slot.name.split() if slot.name != TAIL else ():
            kind, number = part[0], part[1:].split(".")
            spot = place(name, slot.stage, int(number[1]) if chunks > 1 else 0, stages)
            ran[kind, *spot, int(number[0])] = (slot.start_s, slot.end_s)
    last = stages * chunks // (2 if name == "dualpipe" else 1) - 1
    for (kind, copy, chunk, micro_batch), (start, _) in ran.items():
        if kind == "F" and chunk:
            assert start >= ran["F", copy, chunk - 1, micro_batch][1]
        if kind in "BI":
            above = (
                ran["F", copy, chunk, micro_batch]
                if chunk == last
                else next(
                    ran[other, copy, chunk + 1, micro_batch]
                    for other in "BI"
                    if (other, copy, chunk + 1, micro_batch) in ran
                )
            )
            assert start >= above[1]
        if kind == "W":
            assert start >= ran["I", copy, chunk, micro_batch][1]
    copies = 2 if name == "dualpipe" else 1
    for kinds in ("F", "BI", "BW"):
        count = sum(kind in kinds for kind, *_ in ran)
        assert count == stages * chunks * micro_batches // copies


@pytest.mark.parametrize(
    ("name", "held"),
    [("1f1b", (8, 1)), ("gpipe", (20, 20)), ("zero-bubble", (8, 8)), ("zbv", (16, 16)), ("dualpipe", (9, 9))],
)
def test_ranks_hold_as_many_micro_batches_as_published(name: str, held: tuple[int, int]) -> None:
    """Of the first and the last of 8 ranks: p in 1F1B and ZB-H1, 2p halves in ZBV, p + 1 in DualPipe."""
    plan = Plan(pipeline=8, schedule=name)  # type: ignore[arg-type]
    found = tuple(sum(in_flight(plan, stage, SCHEDULES[name], 20)) for stage in (0, 7))
    assert found == held


@given(st.sampled_from(sorted(SCHEDULES)), st.sampled_from([2, 4, 6]), st.integers(2, 9))
def test_no_rank_holds_more_than_is_in_flight(name: str, stages: int, half: int) -> None:
    micro_batches = 2 * max(half, stages)
    plan = Plan(pipeline=stages, schedule=name)  # type: ignore[arg-type]
    for stage in range(stages):
        most, held = sum(in_flight(plan, stage, SCHEDULES[name], micro_batches)), 0
        for task in order(name, stage, stages, SCHEDULES[name], micro_batches).tasks:
            held += {"F": 1, "I": 0, "B": -1, "W": -1}[task.kind]
            assert 0 <= held <= most
        assert held == 0


def test_pairs_of_passes_hide_each_others_communication() -> None:
    plain, hidden = (
        StageWork(
            forward_s=(1.0, 1.0),
            backward_s=(2.0, 2.0),
            weights_s=(1.0, 1.0),
            beside_s=(both, both),
            tail_s=0.0,
        )
        for both in (3.0, 2.4)
    )
    slow, fast = (play_pipeline([work] * 4, 16, 0.0, "dualpipe").time_s for work in (plain, hidden))
    assert fast < 0.9 * slow


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_micro_batches_not_laid_out_follow_at_the_same_pace(
    monkeypatch: pytest.MonkeyPatch, name: str, chunks: int
) -> None:
    rng = np.random.default_rng(0)
    stages = [
        StageWork(
            forward_s=tuple(rng.uniform(1, 2, chunks)),
            backward_s=tuple(rng.uniform(2, 4, chunks)),
            tail_s=float(i),
        )
        for i in range(4)
    ]
    short = play_pipeline(stages, 48, 0.1, name).time_s
    monkeypatch.setattr(pipeline, "_ROUNDS", 12)
    assert short == pytest.approx(play_pipeline(stages, 48, 0.1, name).time_s, rel=0.01)


@pytest.mark.parametrize("micro_batches", range(1, 14))
@pytest.mark.parametrize(("count", "chunks"), [(2, 2), (4, 2), (4, 3), (4, 4)])
def test_every_task_of_an_interleaved_pipeline_is_played(count: int, chunks: int, micro_batches: int) -> None:
    stages = _stages(count, chunks)
    turns = named("interleaved", count, chunks, micro_batches)
    assert len(turns) == len({turn[1:] for turn in turns}) == 2 * count * chunks * micro_batches
    assert play_pipeline(stages, micro_batches, 0.0, "interleaved").time_s >= 3.0 * micro_batches


def test_messages_make_a_pipeline_longer() -> None:
    without, beside, blocking = (
        play_pipeline(_stages(4), 8, message_s, "1f1b", blocks=blocks).time_s
        for message_s, blocks in ((0.0, False), (0.5, False), (0.5, True))
    )
    assert without < beside < blocking


def _work(**changes: object) -> Work:
    block = Span(0.1, 1.0, 1.05)
    given: dict[str, object] = {
        "forward": (block,) * 4,
        "backward": (block + block,) * 4,
        "optimizer": Span(0.1, 0.5, 0.55),
        **changes,
    }
    return Work(**given)  # type: ignore[arg-type]


def test_a_rank_alone_takes_its_device_time() -> None:
    step = play_rank(_work(), 1)
    assert step.time_s == pytest.approx(12.5)
    assert step.exposed_s == 0.0
    assert play_rank(_work(), 10).time_s == pytest.approx(120.5)


def test_a_slow_host_bounds_the_step() -> None:
    slow = Span(2.0, 1.0, 3.0)
    step = play_rank(_work(forward=(slow,) * 4, backward=(slow,) * 4), 1)
    assert step.time_s == pytest.approx(16.1)
    assert step.host_s > 0


def test_fetching_is_hidden_while_it_is_shorter_than_the_computation() -> None:
    hidden = play_rank(_work(gathers_s=(0.5,) * 4, again_s=(0.5,) * 4, reduces_s=(0.5,) * 4), 1)
    exposed = play_rank(_work(gathers_s=(3.0,) * 4, again_s=(3.0,) * 4, reduces_s=(3.0,) * 4), 1)
    assert hidden.time_s < 12.5 + 4 * 0.5
    assert exposed.time_s > 3.0 * 12
    assert exposed.exposed_s > hidden.exposed_s


def test_buckets_overlap_the_backward_pass_and_the_last_one_shows() -> None:
    step = play_rank(_work(buckets=((3, 0.5), (2, 0.5), (1, 0.5), (0, 0.5))), 1)
    assert step.time_s == pytest.approx(13.0)
    assert play_rank(_work(after_backward_s=2.0), 1).time_s == pytest.approx(14.5)


@given(st.floats(0, 5), st.floats(0, 5))
def test_more_communication_is_never_faster(less: float, more: float) -> None:
    low, high = sorted((less, more))
    for field in ("buckets", "gathers_s"):
        made = [((0, t),) if field == "buckets" else (t,) * 4 for t in (low, high)]
        assert (
            play_rank(_work(**{field: made[0]}), 2).time_s
            <= play_rank(_work(**{field: made[1]}), 2).time_s + 1e-9
        )


def test_parts_of_a_step_add_up_and_scale() -> None:
    step = play_rank(_work(gathers_s=(1.5,) * 4), 3)
    assert sum(shares(step).values()) == pytest.approx(step.time_s)
    assert step.scaled(2.0).time_s == pytest.approx(2 * step.time_s)
    assert isinstance(step.scaled(2.0), StepTime)


@pytest.mark.parametrize(
    ("name", "stage", "tasks"),
    [
        ("gpipe", 0, "F0 F1 F2 B0 B1 B2"),
        ("1f1b", 0, "F0 F1 B0 F2 B1 B2"),
        ("1f1b", 1, "F0 B0 F1 B1 F2 B2"),
        ("zero-bubble", 1, "F0 I0 F1 I1 W0 F2 I2 W1 W2"),
        ("interleaved", 1, "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F2.1 B1.0 B2.1 B2.0"),
    ],
)
def test_ranks_take_their_tasks_in_the_order_of_the_schedule(name: str, stage: int, tasks: str) -> None:
    """Of two ranks with three micro-batches."""
    chunks = SCHEDULES[name]
    found = order(name, stage, 2, chunks, 3).tasks
    assert " ".join(task.named(chunks) for task in found) == tasks


def test_slots_are_made_when_somebody_looks_at_them(monkeypatch: pytest.MonkeyPatch) -> None:
    played = play_pipeline(_stages(2), 4, 0.0, "1f1b")
    step = StepTime(time_s=played.time_s, exposed_s=0.0, slots=played.slots)
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "named", lambda *_: pytest.fail("nobody has looked"))
        longer = play_pipeline(_stages(2), 5, 0.0, "1f1b").time_s
        twice = step.scaled(2.0)
    assert longer > played.time_s
    assert [slot.end_s for slot in twice.slots] == [2 * slot.end_s for slot in played.slots]
    assert len(twice.slots) == 2 * 2 * 4 + 2


def test_a_trace_has_a_process_for_each_stage() -> None:
    slots = play_pipeline(_stages(3), 4, 0.0, "1f1b").slots
    events = list(slot_events(slots, "job"))
    assert {event["pid"] for event in events} == {0, 1, 2}
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
