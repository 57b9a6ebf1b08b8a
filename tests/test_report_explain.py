"""Why two forecasts differ: parts that add up to the difference, sentences that name the largest, and what
the jobs have different."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import ranks
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.report import dump
from foretrain.report.explain import explain
from foretrain.report.text import explanation
from foretrain.step.playback import StepTime


def forecast(
    of: Job | None = None,
    computing: float = 1.0,
    exposed: float = 0.0,
    bubble: float = 0.0,
    host: float = 0.0,
) -> Forecast:
    step = StepTime(
        time_s=computing + exposed + bubble + host,
        computing_s=computing,
        exposed_s=exposed,
        bubble_s=bubble,
        host_s=host,
    )
    return ranks.forecast(of, step)


def text(a: Forecast, b: Forecast, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    console.print(explanation(explain(a, b)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_sentence_names_the_largest_cause() -> None:
    found = explain(forecast(), forecast(exposed=0.7, host=0.1))
    assert found.sentences == ["B is 1.8x slower, mostly because of exposed communication (+700 ms)"]


def test_the_sentence_of_a_faster_job() -> None:
    found = explain(forecast(bubble=1.0), forecast())
    assert found.sentences == ["B is 2x faster, mostly because of pipeline bubble (-1 s)"]


def test_the_sentence_names_two_causes_where_neither_is_most_of_it() -> None:
    found = explain(forecast(), forecast(computing=1.2, exposed=0.4, bubble=0.3, host=0.1))
    assert found.sentences == [
        "B is 2x slower, because of exposed communication (+400 ms) and pipeline bubble (+300 ms)"
    ]


def test_the_sentence_names_what_goes_the_other_way() -> None:
    found = explain(forecast(exposed=0.5), forecast(bubble=1.0))
    assert found.sentences == [
        "B is 1.33x slower, mostly because of pipeline bubble "
        "(+1 s), in spite of exposed communication (-500 ms)"
    ]


def test_the_same_job_twice() -> None:
    found = explain(forecast(), forecast())
    assert found.sentences == ["A and B take the same time per step (1 s)"]
    assert not found.fields
    assert found.time.share(found.time.parts[0]) is None
    assert "same time" in text(forecast(), forecast())


def test_steps_of_another_size_are_compared_by_the_second_too() -> None:
    found = explain(forecast(), forecast(ranks.job(batch=128), computing=1.6))
    assert found.sentences[1] == "A step of B is of another size: B trains 1.25x as many tokens per second"


def test_memory_is_explained_by_category() -> None:
    a, b = forecast(), forecast()
    first, *others = b.ranks
    more = {**first.by_category, "activations": 9 * ranks.GIB, "inputs": ranks.GIB}
    b = replace(b, ranks=(replace(first, by_category=more), *others))
    found = explain(a, b)
    assert (
        found.sentences[1]
        == "B takes 6 GiB more memory on its fullest rank, mostly because of activations (+5 GiB)"
    )
    assert {part.name: part.difference for part in found.memory.parts if part.difference} == {
        "activations": 5 * ranks.GIB,
        "inputs": ranks.GIB,
    }
    assert "optimizer state" in text(a, b)


def test_one_device_beside_many() -> None:
    alone = ranks.forecast(ranks.job(1))
    found = explain(alone, forecast(exposed=1.0))
    assert sum(part.difference for part in found.time.parts) == pytest.approx(found.time.whole.difference)


parts = st.fixed_dictionaries(
    {name: st.floats(0, 5) for name in ("exposed", "bubble", "host")} | {"computing": st.floats(0.1, 5)}
)


@given(parts, parts)
def test_parts_add_up_to_the_difference(a: dict[str, Any], b: dict[str, Any]) -> None:
    found = explain(forecast(**a), forecast(**b))
    assert sum(part.difference for part in found.time.parts) == pytest.approx(
        found.time.whole.difference, abs=1e-6
    )
    if not found.time.is_same:
        assert sum(found.time.share(part) or 0.0 for part in found.time.parts) == pytest.approx(1.0, abs=1e-3)
    assert found.sentences[0].startswith(("B is ", "A and B "))


def test_the_fields_that_differ_are_listed() -> None:
    a, b = forecast(), forecast(ranks.job(8, tensor=1))
    found = explain(a, b)
    assert found.fields["plan.pipeline"] == (4, 8)
    assert found.fields["plan.tensor"] == (2, None)
    shown = text(a, b)
    assert "plan.pipeline: 4 -> 8" in shown
    assert "plan.tensor: 2 -> (not given)" in shown
    assert "training" not in str(list(found.fields))


@pytest.mark.parametrize("width", [80, 120])
def test_the_tables_fit_the_screen(width: int) -> None:
    shown = text(forecast(exposed=0.5), forecast(ranks.job(8), bubble=1.0), width)
    assert max(map(len, shown.splitlines())) <= width
    row = next(line for line in shown.splitlines() if line.strip().startswith("pipeline bubble"))
    assert row.split() == ["pipeline", "bubble", "0", "s", "1", "s", "+1", "s", "200%"]


def test_json_has_both_forecasts_and_the_difference() -> None:
    document = json.loads(dump(explain(forecast(), forecast(exposed=1.0)).to_dict()))
    assert document["summary"][0].startswith("B is 2x slower")
    assert document["step_s"]["exposed communication"] == {
        "a": 0.0,
        "b": 1.0,
        "difference": 1.0,
        "share": 1.0,
    }
    assert document["step_s"]["time per step"]["share"] is None
    assert document["memory_bytes"]["weights"]["difference"] == 0
    assert document["a"]["quantities"]["step_time_s"]["median"] == 1.0
