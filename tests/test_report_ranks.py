"""Reports of many devices: what a step goes to, memory by stage, the trace with stages side by side, and the
page."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

import ranks
import steps
from foretrain.errors import InputError
from foretrain.forecast import Forecast
from foretrain.report import to_json, write_trace
from foretrain.report.breakdown import breakdown
from foretrain.report.text import summary
from foretrain.step.playback import StepTime
from foretrain.web.details import timeline as timeline_of
from foretrain.web.records import record


def text(part: RenderableType, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def line(shown: str, label: str) -> str:
    return next(row for row in shown.splitlines() if row.strip().startswith(label))


# Where a step goes


def causes(forecast: Forecast) -> dict[str, float]:
    return forecast.inside("causes").causes_s


def test_causes_add_up_to_the_step() -> None:
    forecast = ranks.forecast()
    found = causes(forecast)
    assert sum(found.values()) == pytest.approx(forecast["step_time_s"].median)
    assert found["pipeline bubble"] > 0
    assert found["waiting for the host"] == 0


@given(st.lists(st.just(0.0) | st.floats(1e-6, 10), min_size=5, max_size=5).filter(any), st.floats(1e-3, 100))
def test_causes_add_up_even_when_parts_overlap(parts: list[float], time_s: float) -> None:
    computing, exposed, bubble, host, straggler = parts
    step = StepTime(
        time_s=time_s,
        exposed_s=exposed,
        bubble_s=bubble,
        host_s=host,
        computing_s=computing,
        straggler_s=straggler,
    )
    found = causes(ranks.forecast(time=step))
    assert sum(found.values()) == pytest.approx(time_s, rel=1e-6)
    assert all(seconds >= 0 for seconds in found.values())


def test_on_one_device_the_rest_of_the_step_is_the_host() -> None:
    found = steps.step(["forward"], [1.0], [0.7]).causes_s
    assert found["computation"] == pytest.approx(0.7)
    assert found["waiting for the host"] == pytest.approx(0.3)
    assert sum(found.values()) == pytest.approx(1.0)


def test_no_causes_from_a_predictor_that_gives_only_a_step_time() -> None:
    bare = Forecast(job=ranks.job(), predictor="ernest", quantities={"step_time_s": ranks.around(1.0)})
    with pytest.raises(InputError, match="'ernest' does not look inside the step"):
        causes(bare)


# The summary


@pytest.mark.parametrize("width", [80, 100, 120])
def test_summary_says_where_a_step_goes(width: int) -> None:
    shown = text(summary(ranks.forecast()), width)
    for words in (
        "computation",
        "exposed communication",
        "pipeline bubble",
        "waiting for the slowest rank",
        "network per rank, each way",
    ):
        assert line(shown, words)
    assert "waiting for the host" not in shown
    assert max(map(len, shown.splitlines())) <= width
    percents = [
        int(line(shown, name).partition("%")[0].split()[-1])
        for name in causes(ranks.forecast())
        if f"  {name}" in shown
    ]
    assert sum(percents) == pytest.approx(100, abs=2)


def test_values_are_below_one_another() -> None:
    shown = text(summary(ranks.forecast()))
    found = [
        line(shown, label)
        for label in (
            "time per step",
            "computation",
            "peak of stage 0",
            "activations",
            "reserved",
            "peak by stage",
        )
    ]
    assert len({len(row) - len(row[25:].lstrip()) for row in found}) == 1, found


def test_sent_and_received_are_told_apart_where_they_differ() -> None:
    base = ranks.forecast()
    shown = text(
        summary(replace(base, quantities={**base.quantities, "network_rx_bytes_per_s": ranks.around(5e9)}))
    )
    assert "3 GB/s" in line(shown, "sent per rank")
    assert "5 GB/s" in line(shown, "received per rank")


def test_memory_says_which_stage_it_is_of() -> None:
    shown = text(summary(ranks.forecast()))
    assert "10 GiB" in line(shown, "peak of stage 0 (fullest)")
    assert "7 GiB" in line(shown, "peak of stage 3 (logged)")
    assert "7.7 GiB" in line(shown, "reserved, stage 3")
    assert "0: 10 GiB (fullest)  1: 9 GiB  2: 8 GiB  3: 7 GiB (logged)" in line(shown, "peak by stage")
    assert "- megatron logs the memory of stage 3" in shown


def test_whether_it_fits_is_of_the_fullest_stage() -> None:
    capacity = ranks.job().cluster.groups[0].device.memory_bytes
    full = tuple(
        replace(rank, by_category={name: 7.9 * size for name, size in rank.by_category.items()})
        for rank in ranks.memory(4)
    )
    forecast = ranks.forecast(ranks=full)
    assert forecast.fullest is not None
    assert forecast.fullest.median == pytest.approx(1.1 * 79 * ranks.GIB)
    row = line(text(summary(forecast)), "fits, stage 0")
    assert f"of 79.1 GiB ({1.1 * 79 * ranks.GIB / capacity:.0%})" in row


def test_memory_where_the_fullest_stage_is_logged() -> None:
    job = ranks.job(framework="pytorch")
    base = ranks.forecast(job)
    shown = text(
        summary(
            replace(base, quantities={**base.quantities, "peak_memory_bytes": ranks.around(10.0 * ranks.GIB)})
        )
    )
    assert "10 GiB" in line(shown, "peak of stage 0 (fullest)")
    assert "(logged)" not in shown
    assert "logs the memory" not in shown


def test_memory_without_a_pipeline_is_that_of_each_rank() -> None:
    shown = text(summary(ranks.forecast(ranks.job(1), time=ranks.rank())))
    assert "7 GiB" in line(shown, "memory of each rank")
    assert "stage" not in shown


def test_many_stages_stay_within_the_screen() -> None:
    shown = text(summary(ranks.forecast(ranks.job(16, tensor=1))), 80)
    assert max(map(len, shown.splitlines())) <= 80
    for stage in range(15):
        assert f"{stage}: {22 - stage} GiB" in shown


# JSON and breakdowns


def test_json_has_the_parts_and_the_stages() -> None:
    document = json.loads(to_json(ranks.forecast()))
    assert sum(document["step_breakdown_s"].values()) == pytest.approx(
        document["quantities"]["step_time_s"]["median"]
    )
    assert document["memory_by_stage_bytes"] == [10 * ranks.GIB, 9 * ranks.GIB, 8 * ranks.GIB, 7 * ranks.GIB]


@pytest.mark.parametrize("what", ["layer", "operator", "phase"])
def test_a_breakdown_is_of_a_rank_of_every_stage(what: Any) -> None:
    forecast = ranks.forecast()
    step = forecast.inside("breakdown")
    rows = breakdown(forecast, what)
    assert sum(row.time_s for row in rows) == pytest.approx(sum(step.by(what).values()))
    assert sum(row.share for row in rows) == pytest.approx(1.0)
    assert json.loads(to_json(forecast, what))["breakdown_s"][what] == step.by(what)


# The trace


def spans(events: Sequence[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[float, float]]]:
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            lanes.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    return {lane: sorted(found) for lane, found in lanes.items()}


def traced(forecast: Forecast, path: Path) -> list[dict[str, Any]]:
    count = write_trace(forecast, path)
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    assert len(events) == count
    return events


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (4, 8), (4, 100), (8, 3)])
def test_trace_has_a_process_per_stage_and_no_overlap(
    tmp_path: Path, stages: int, micro_batches: int, schedule: str
) -> None:
    job = ranks.job(stages, batch=micro_batches * 16, tensor=1)
    time = ranks.pipeline(stages, micro_batches, schedule)
    events = traced(ranks.forecast(job, time), tmp_path / "trace.json")
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {stage: f"llama, stage {stage}" for stage in range(stages)}
    lanes = spans(events)
    assert {process for process, _ in lanes} == set(range(stages))
    for found in lanes.values():
        assert all(later[0] >= earlier[1] - 0.01 for earlier, later in pairwise(found))


# The page


def test_page_has_stages_side_by_side() -> None:
    found = ranks.forecast(time=ranks.pipeline(4, 8))
    drawn = record(found, fine=True)
    assert len([seconds for seconds in drawn["step_breakdown_s"].values() if seconds > 0]) > 1
    assert [stage["stage"] for stage in drawn["details.stages"]] == [0, 1, 2, 3]
    assert drawn["memory_by_stage_bytes"] == [rank.allocated_bytes for rank in found.ranks]
    timeline = drawn["details.timeline"]
    assert [lane for lane in timeline["lanes"] if "network" not in lane] == [f"stage {i}" for i in range(4)]
    assert len(timeline["start"]) == len(found.inside("slots").time.slots)
    assert "further micro-batches go on alike" not in timeline["note"]


def test_page_says_that_not_all_micro_batches_are_drawn() -> None:
    step = ranks.forecast(time=ranks.pipeline(4, 500)).inside("timeline")
    assert "further micro-batches go on alike" in timeline_of(step, 1000, fine=True)["note"]


def test_page_draws_the_longest_parts_of_many() -> None:
    step = ranks.forecast(time=ranks.pipeline(4, 8)).inside("timeline")
    drawn = timeline_of(step, 5, fine=True)
    assert "The 5 longest of 68 stretches are drawn" in drawn["note"]
    assert len(drawn["start"]) == 5
