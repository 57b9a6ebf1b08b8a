"""Reports: the summary says the figures, breakdowns merge repeated layers, and the trace is whole."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from foretrain.api import make_job
from foretrain.errors import InputError
from foretrain.forecast import Estimate, Forecast
from foretrain.graph import Buffer, Op, Operator, OpGraph, Phase, TensorSpec
from foretrain.predictors import get
from foretrain.predictors.fitting_changes import Remedy
from foretrain.report import figures, to_json, write_trace
from foretrain.report.breakdown import breakdown, merge_layers
from foretrain.report.lines import JsonLines
from foretrain.report.text import _Layout, breakdown_table, summary
from foretrain.units import format_seconds
from foretrain.web.records import record

X = TensorSpec((1024, 1024), "float32")
MM = Operator(
    "mm",
    "default",
    (X, X),
    (X,),
    {"self": "%0", "mat2": "%1"},
    2 * 1024**3,
    2 * X.size_bytes,
    X.size_bytes,
    True,
)
ADD = Operator(
    "add_",
    "Tensor",
    (X, X),
    (X,),
    {"self": "%0", "other": "%1"},
    1024**2,
    2 * X.size_bytes,
    X.size_bytes,
    True,
)


def graph(layers: int = 3) -> OpGraph:
    """A step of ``layers`` blocks: a product forward and two backward each, then the optimizer."""

    def op(operator: Operator, phase: Phase, layer: str) -> Op:
        return Op(operator, phase, layer, (), ())

    forward = [
        op(MM, "forward", f"model.layers.{i}.{part}")
        for i in range(layers)
        for part in ("attn.q", "attn.v", "mlp.up")
    ]
    backward = [
        op(MM, "backward", f"model.layers.{i}.mlp.up") for i in reversed(range(layers)) for _ in range(2)
    ]
    ops = (*forward, *backward, op(ADD, "optimizer", ""))
    end = len(ops)
    weights = [Buffer(2**24, "weights", -1, end), Buffer(2**24, "inputs", -1, end)]
    activations = [Buffer(2**26, "activations", i, end - 2 - i // 2) for i in range(len(forward))]
    return OpGraph(
        ops=ops, buffers=(*weights, *activations), samples=8, parameters=2**22, info={"model": "toy"}
    )


@pytest.fixture
def forecast(tmp_path: Path) -> Forecast:
    path = tmp_path / "toy.json.zst"
    graph().save(path)
    return get("roofline").predict(make_job(str(path), device="a100", batch=8, samples=8000, epochs=2))


def text(part: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=100, highlight=False, markup=False)
    console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_summary_has_every_figure_and_the_assumptions(forecast: Forecast) -> None:
    shown = text(summary(forecast))
    for words in ("toy", "a100", "time per step", "samples/s", "bound by", "activations", "reserved", "fits",
    "one epoch", "whole training",
                  "cost", "energy", "80 % interval"):  # fmt: skip
        assert words in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert "\x1b" not in shown


def test_summary_shows_each_assumption(forecast: Forecast) -> None:
    assert "- the moon is full" in text(summary(replace(forecast, assumptions=("the moon is full",))))


@pytest.mark.parametrize(
    ("share", "verdict", "words"),
    [
        (2.0, "yes", "under 1% chance of running out of memory (50% of "),
        (1.08, "yes", "10% chance of running out of memory (93% of "),
        (1.05, "perhaps", "21% chance"),
        (0.97, "no", "does not fit, 90% sure: needs "),
        (0.5, "no", "does not fit, over 99% sure: needs "),
    ],
)
def test_summary_says_how_likely_memory_runs_out(
    forecast: Forecast, share: float, verdict: str, words: str
) -> None:
    capacity = forecast["reserved_memory_bytes"].median * share * (1 + 1e-9)
    group = forecast.job.cluster.groups[0]
    small = replace(group, device=replace(group.device, memory_bytes=capacity))
    job = replace(forecast.job, cluster=replace(forecast.job.cluster, groups=(small,)))
    tight = replace(forecast, job=job)
    assert words in text(summary(tight))
    assert words in tight._repr_html_()
    assert record(tight)["out_of_memory_chance"] == tight.out_of_memory_chance
    found = figures.fits(tight)
    assert found is not None
    assert found[0] == verdict


def test_a_peak_is_told_with_its_moment_on_every_screen(forecast: Forecast) -> None:
    moment = forecast.peak_moment
    assert moment is not None
    assert (moment.phase, moment.operator) == ("forward", "mm")
    words = "in the forward pass, in mm of model.layers.2.mlp.up"
    assert words in " ".join(text(summary(forecast)).split())
    assert words in forecast._repr_html_()
    assert record(forecast)["peak_moment"] == moment.to_dict()
    assert json.loads(to_json(forecast))["peak_moment"] == moment.to_dict()


@pytest.mark.parametrize(
    ("changes", "short", "words"),
    [
        ({"cached_bytes": 0.0}, "tensors", "its tensors alone are 10 GiB"),
        ({"cached_bytes": 2.0**33}, "fragmentation", "its tensors would fit (10 GiB), not what lies unused"),
        (
            {"cached_bytes": 2.0**33, "returnable_bytes": 1.8 * 2**32, "returns": 3},
            "cache",
            "torch would hold 18 GiB, so it returns memory to the device 3x in each step",
        ),
        ({"cached_bytes": 2.0**30}, None, ""),
    ],
)
def test_what_of_the_memory_does_not_fit_is_told(
    forecast: Forecast, changes: dict[str, Any], short: str | None, words: str
) -> None:
    gib = 2.0**30
    rank = replace(forecast.ranks[0], by_category={"activations": 10 * gib}, **changes)
    sizes = {"peak_memory_bytes": rank.allocated_bytes, "reserved_memory_bytes": rank.reserved_bytes}
    quantities = {**forecast.quantities, **{name: Estimate(size, size, size) for name, size in sizes.items()}}
    group = forecast.job.cluster.groups[0]
    room = 9 * gib if short == "tensors" else 12 * gib
    group = replace(group, device=replace(group.device, memory_bytes=room))
    job = replace(forecast.job, cluster=replace(forecast.job.cluster, groups=(group,)))
    tight = replace(forecast, job=job, ranks=(rank,), quantities=quantities)
    assert tight.memory_short_of == json.loads(to_json(tight))["memory_short_of"] == short
    assert words in " ".join(text(summary(tight)).split())
    assert tight.fits is (short in ("cache", None))


def remedy(change: str, **more: Any) -> Remedy:
    facts = {
        "fields": {}, "memory": Estimate(2**30, 2**30, 2**30), "capacity_bytes": 2**31, "chance": 0.0,
        "step_time": None, "slower": 0.031, "price_per_hour": None,
    }  # fmt: skip
    return Remedy(change=change, **{**facts, **more})


def test_what_makes_a_job_fit_is_told_with_its_cost_on_every_screen(forecast: Forecast) -> None:
    capacity = forecast.memory_capacity_bytes
    remedies = (
        remedy("micro_batch 4", capacity_bytes=capacity),
        remedy("device b200", slower=-0.75, price_per_hour=4.99),
    )
    remedied = replace(forecast, remedies=remedies)
    shown = " ".join(text(summary(remedied)).split())
    changes = "micro_batch 4 (1 GiB, +3% time) device b200 (1 GiB of 2 GiB, 4x as fast, $4.99/h)"
    assert f"would fit with {changes} one epoch" in shown
    page = remedied._repr_html_()
    assert [one["change"] for one in record(remedied)["fits_with"]] == ["micro_batch 4", "device b200"]
    assert all(words in page for words in ("would fit with", "micro_batch 4", "1 GiB of 2 GiB, 4x as fast"))
    assert [one["change"] for one in json.loads(to_json(remedied))["fits_with"]] == [
        "micro_batch 4",
        "device b200",
    ]
    assert "none of the changes that were tried" in text(summary(replace(forecast, remedies=())))
    assert "would fit" not in text(summary(forecast))


def test_ten_assumptions_are_shown_and_the_others_counted(forecast: Forecast) -> None:
    many = replace(forecast, assumptions=("traced with old", *(f"note {i}" for i in range(20))))
    shown = [line for line in text(summary(many)).splitlines() if line.startswith("- ")]
    total = len(figures.notes(many))
    assert len(shown) == 10
    assert shown[-1].startswith(f"- {total - 9} more assumptions: --assumptions shows them")
    everything = text(summary(many, all_notes=True))
    assert all(f"- {note}" in everything for note in figures.notes(many))
    assert figures.notes(many)[-1] == "traced with old"  # what matters least


def test_the_price_comes_with_its_source_and_date(forecast: Forecast) -> None:
    source = "$1.79/GPU: Lambda on-demand price list, us, 2025-06"
    assert source in text(summary(forecast))
    assert source in forecast._repr_html_()
    assert record(forecast)["price_source"] == source
    assert json.loads(to_json(forecast))["price_source"] == source


def test_json_has_the_chance_and_both_intervals(forecast: Forecast) -> None:
    data = json.loads(to_json(forecast))
    assert 0 <= data["out_of_memory_chance"] < 0.01
    step = data["quantities"]["forward_time_s"]
    assert step["low_95"] <= step["low"] <= step["median"] < step["high"] < step["high_95"]


def test_summary_of_a_forecast_that_has_only_a_step_time(forecast: Forecast) -> None:
    bare = Forecast(job=forecast.job, predictor="ernest", quantities={"step_time_s": forecast["step_time_s"]})
    assert "time per step" in text(summary(bare))
    assert "memory" not in text(summary(bare))


def test_names_with_brackets_are_not_markup(forecast: Forecast) -> None:
    assert "[bold]x[/bold]" in text(summary(replace(forecast, bound="[bold]x[/bold]")))


@pytest.mark.parametrize("what", ["layer", "operator", "phase"])
def test_breakdown_shares_add_up(forecast: Forecast, what: Any) -> None:
    rows = breakdown(forecast, what)
    assert sum(row.share for row in rows) == pytest.approx(1.0)
    assert rows[-1].cumulated == pytest.approx(1.0)
    assert sum(row.time_s for row in rows) == pytest.approx(forecast["device_busy_s"].median)
    assert [row.time_s for row in rows] == sorted((row.time_s for row in rows), reverse=True)
    assert rows[0].name in text(breakdown_table(forecast, what))


def test_layers_are_merged_over_their_numbers(forecast: Forecast) -> None:
    assert {row.name for row in breakdown(forecast, "layer", depth=3)} == {
        "model.layers.*.mlp",
        "model.layers.*.attn",
        "(optimizer)",
    }


def test_layers_go_as_deep_as_it_takes() -> None:
    seconds = {f"model.layers.{i}.mlp.{part}": 1.0 for i in range(40) for part in ("gate", "up", "down")} | {
        "head": 1.0
    }
    assert set(merge_layers(seconds)) == {
        "model.layers.*.mlp.gate",
        "model.layers.*.mlp.up",
        "model.layers.*.mlp.down",
        "head",
    }
    assert set(merge_layers(seconds, depth=1)) == {"model", "head"}
    assert set(merge_layers(seconds, depth=2)) == {"model.layers.*", "head"}


def test_numbers_that_name_single_layers_are_kept() -> None:
    assert set(merge_layers({"0": 1.0, "1": 1.0, "2": 1.0})) == {"0", "1", "2"}
    assert set(merge_layers({"features.0": 1.0, "features.3": 1.0, "fc": 3.0}, depth=2)) == {
        "features.0",
        "features.3",
        "fc",
    }


def test_rows_beyond_the_table_are_added_up(forecast: Forecast) -> None:
    rows = breakdown(forecast, "layer", rows=1, depth=3)
    assert [row.name for row in rows][1:] == ["(2 more)"]
    assert rows[-1].cumulated == pytest.approx(1.0)


@given(
    st.dictionaries(st.from_regex(r"[a-c0-2](\.[a-c0-2]){0,4}", fullmatch=True), st.floats(1e-6, 1.0)),
    st.none() | st.integers(1, 5),
)
def test_merging_layers_loses_no_time(seconds: dict[str, float], depth: int | None) -> None:
    assert sum(merge_layers(seconds, depth=depth).values()) == pytest.approx(sum(seconds.values()))


def test_no_breakdown_without_a_look_inside_the_step(forecast: Forecast) -> None:
    bare = replace(forecast, step=None)
    with pytest.raises(InputError, match="'roofline' does not look inside the step"):
        breakdown(bare, "phase")
    with pytest.raises(InputError, match="so there is no trace"):
        write_trace(bare, Path("never.json"))


def test_json_is_strict_and_holds_the_breakdown(forecast: Forecast) -> None:
    document = json.loads(to_json(forecast, "layer"))
    assert document["quantities"]["step_time_s"]["low"] <= document["quantities"]["step_time_s"]["median"]
    assert set(document["breakdown_s"]) == {"phase", "operator", "layer"}


def test_trace_has_host_and_device_calls(forecast: Forecast, tmp_path: Path) -> None:
    count = write_trace(forecast, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(events) == count
    assert {event["tid"] for event in events if event["ph"] == "X"} == {0, 1}
    assert {event["cat"] for event in events if event["ph"] == "X"} == {"forward", "backward", "optimizer"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["toy.json.zst", "trace.json"]


def test_a_path_that_cannot_be_written_is_one_line(forecast: Forecast, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_trace(forecast, tmp_path / "file" / "trace.json")
    with (
        pytest.raises(InputError, match="cannot be written"),
        JsonLines(tmp_path / "nowhere" / "lines.jsonl"),
    ):
        pass


def test_json_lines_are_there_as_soon_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    with JsonLines(path) as lines:
        for number in range(3):
            lines.write({"line": number})
            assert [json.loads(line)["line"] for line in path.read_text().splitlines()] == list(
                range(number + 1)
            )
        assert lines.count == 3


def test_a_long_duration_does_not_touch_its_share(forecast: Forecast) -> None:
    parts = {"computation": 35 * 60 + 26.0, "gaps": 0.0007}
    shown = text(_Layout(forecast).bars(parts, format_seconds))
    assert "35 min 26 s 100%" in shown
    assert "700 us       0%" in shown
