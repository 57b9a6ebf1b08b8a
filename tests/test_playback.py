"""Spans, ranks and pipelines: what is known in closed form, and what must never happen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.step import pipeline
from foretrain.step.pipeline import StageWork, play_pipeline
from foretrain.step.playback import StepTime, Work, play_rank, shares
from foretrain.step.spans import Span, span, total
from foretrain.step.timeline import run, slot_events

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


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [1, 4, 8, 40])
def test_equal_stages_take_micro_batches_plus_bubble(name: str, micro_batches: int) -> None:
    played = play_pipeline(_stages(4), micro_batches, 0.0, name)
    assert played.time_s == pytest.approx((micro_batches + 3) * 3.0)
    assert played.busiest_s == pytest.approx(micro_batches * 3.0)


@pytest.mark.parametrize("chunks", [2, 4])
def test_interleaving_divides_the_bubble(chunks: int) -> None:
    played = play_pipeline(_stages(4, chunks), 16, 0.0, "interleaved")
    assert played.time_s == pytest.approx((16 + 3 / chunks) * 3.0)


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
    slots = [one for one in play_pipeline(stages, micro_batches, 0.0, "interleaved").slots if one.name != TAIL]
    assert (
        len(slots) == len({(slot.stage, slot.name) for slot in slots}) == 2 * count * chunks * micro_batches
    )
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
    hidden = play_rank(_work(gathers_s=(0.5,) * 4, reduces_s=(0.5,) * 4), 1)
    exposed = play_rank(_work(gathers_s=(3.0,) * 4, reduces_s=(3.0,) * 4), 1)
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


def test_a_trace_has_a_process_for_each_stage() -> None:
    slots = play_pipeline(_stages(3), 4, 0.0, "1f1b").slots
    events = list(slot_events(slots, "job"))
    assert {event["pid"] for event in events} == {0, 1, 2}
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
