"""The page that explores a forecast: what may be changed, the table that it carries, and the file that it is."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exploring import predictor, small_forecast, small_job
from foretrain.api import make_job
from foretrain.catalog import Catalog
from foretrain.errors import InputError
from foretrain.forecast import Forecast
from foretrain.plan import Plan
from foretrain.predictors import get
from foretrain.step.timeline import Timeline
from foretrain.web import details
from foretrain.web.packing import Packer, shortened
from foretrain.web.page import SCRIPTS, page, static
from foretrain.web.records import record
from foretrain.web.table import ForecastTable, fill, forecast_table
from foretrain.web.views import around, of_jobs, plan_key, plan_label

pytestmark = pytest.mark.usefixtures("shared_cache")  # models are traced once for all of these tests


@pytest.fixture(scope="module")
def forecast(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Forecast:
    return small_forecast(tmp_path_factory.mktemp("explored"))


@pytest.fixture(scope="module")
def table(forecast: Forecast) -> ForecastTable:
    """All changes of one thing, however long they take."""
    choices = around(forecast.job, Catalog.load())
    made = ForecastTable(
        choices=replace(choices, batches=(16, 64, 256), precisions=("fp32",)), predictor="deletepop"
    )
    made.add(choices.start, forecast, predictor(), fine=True)
    fill(made, predictor(), 1e9, clock=_Ticks(limit=60))
    return made


class _Ticks:
    """A clock that runs out after so many looks at it, whatever the machine does meanwhile."""

    def __init__(self, limit: int) -> None:
        self.left = limit

    def __call__(self) -> float:
        self.left -= 1
        return 0.0 if self.left > 0 else 2e9


def unpacked(document: dict[str, Any], number: int) -> dict[str, Any]:
    """As the page's script reads it."""

    def filled(skeleton: Any, figures: Any) -> Any:
        if isinstance(skeleton, bool) or skeleton is None or isinstance(skeleton, str):
            return skeleton
        if isinstance(skeleton, int | float):
            return next(figures)
        if isinstance(skeleton, list):
            return [filled(one, figures) for one in skeleton]
        if set(skeleton) == {"#"}:
            return [next(figures) for _ in range(skeleton["#"])]
        return {name: filled(one, figures) for name, one in skeleton.items()}

    packed = document["records"][number]
    return {
        name: filled(document["skeletons"][figures[0]], iter(figures[1:])) for name, figures in packed.items()
    }


# Choices


def test_the_job_itself_is_where_the_page_starts(forecast: Forecast) -> None:
    choices = around(forecast.job, Catalog.load())
    assert choices.start.to_dict() == {
        "batch": 64, "device": "a100-sxm-80gb", "count": 1, "precision": "fp32", "plan": "data-parallel",
    }  # fmt: skip
    assert choices.views()[0] == choices.start
    assert choices.job_at(choices.start) is forecast.job


def test_one_change_is_forecast_before_two(forecast: Forecast) -> None:
    choices = around(forecast.job, Catalog.load())
    start, names, views = choices.start, ("device", "count", "precision", "plan"), choices.views()
    changes = [sum(getattr(view, name) != getattr(start, name) for name in names) for view in views]
    assert changes.index(2) > max(i for i, n in enumerate(changes) if n == 1 and views[i].batch == 64)


def test_every_choice_is_a_job_or_one_line(forecast: Forecast) -> None:
    choices, refused = around(forecast.job, Catalog.load()), []
    for view in choices.views()[::7]:
        try:
            job = choices.job_at(view)
        except InputError as error:
            refused.append(str(error))
            continue
        assert choices.view_of(job) == view
    assert refused
    assert all(re.match(r"^[a-z_.]+: [^\n]+$", reason) for reason in refused)


def test_large_language_models_are_cut_over_devices() -> None:
    job = make_job("llama-3-8b", device="h100", devices=8, batch=16, sequence=2048)
    small, large = (around(job, Catalog.load(), parameters=size).plans for size in (1e8, 8e9))
    assert not any("tensor" in key for key in small)
    assert {"tensor-2", "tensor-4", "tensor-8"} <= set(large)


@pytest.mark.parametrize(
    ("plan", "label", "key"),
    [
        (Plan(), "data parallel", "data-parallel"),
        (Plan(data=4, shard="zero3", recompute="full"), "ZeRO-3 (FSDP), recompute full", "zero-3-fsdp-recompute-full"),
        (Plan(tensor=4, pipeline=2, micro_batch=1), "tensor 4, pipeline 2, micro-batch 1", "tensor-4-pipeline-2-micro-batch-1"),
        (Plan(tensor=2, sequence_parallel=True), "tensor 2, sequence parallel", "tensor-2-sequence-parallel"),
    ],
)  # fmt: skip
def test_plans_have_names(plan: Plan, label: str, key: str) -> None:
    assert (plan_label(plan), plan_key(plan)) == (label, key)


def test_jobs_of_a_search_are_the_choices() -> None:
    jobs = [
        make_job("llama-3-8b", device=device, devices=count, batch=64, sequence=2048, tensor=2)
        for device in ("h100", "h200")
        for count in (8, 16)
    ]
    choices = of_jobs(jobs, Catalog.load())
    assert choices.devices == ("h100-sxm-80gb", "h200-sxm-141gb")
    assert choices.counts == (8, 16)
    assert [choices.job_at(choices.view_of(job)).cluster for job in jobs] == [job.cluster for job in jobs]


# The table


def test_what_the_table_has_is_what_the_predictor_says(table: ForecastTable) -> None:
    document = json.loads(json.dumps(table.to_dict(), allow_nan=False))
    views = [view for view in table.choices.views() if table.has(view)][:12]
    known = 0
    for view in views:
        series = document["series"][view.series]
        if str(view.batch) in series["refused"]:
            assert document["reasons"][series["refused"][str(view.batch)]]
            continue
        found = unpacked(document, series["at"][str(view.batch)])
        expected = predictor().predict(table.choices.job_at(view))
        for name, estimate in found["quantities"].items():
            assert estimate == pytest.approx(expected[name].to_dict(), rel=1e-5)
        assert found["memory_by_category_bytes"] == pytest.approx(expected.memory_by_category, rel=1e-5)
        assert found["out_of_memory_chance"] == pytest.approx(
            expected.out_of_memory_chance, rel=1e-5, abs=1e-12
        )
        assert found["bound"] == expected.bound
        known += 1
    assert known >= 6


def test_the_parts_of_a_step_add_up(forecast: Forecast) -> None:
    step = forecast.inside("test")
    drawn = details.details(forecast, predictor())
    assert sum(drawn["parts"]["seconds"]) == pytest.approx(step.device_busy_s)
    by_layer_and_operator = step.by_layer_and_operator()
    for position, what in enumerate(("layer", "operator", "phase")):
        totals: dict[str, float] = {}
        for key, seconds in by_layer_and_operator.items():
            totals[key[position]] = totals.get(key[position], 0.0) + seconds
        assert totals == pytest.approx(step.by(what))
    figures = drawn["derivation"]
    assert figures["roofline_s"] > 0
    assert figures["computation_s"] == pytest.approx(step.causes_s["computation"])


def test_the_timeline_has_every_call_of_the_job_and_layers_of_others(forecast: Forecast) -> None:
    step = forecast.inside("test")
    fine, coarse = (details.timeline(step, 3000, fine=fine) for fine in (True, False))
    for drawn in (fine, coarse):
        assert drawn["lanes"] == ["host", "device"]
        assert {len(drawn[name]) for name in ("lane", "kind", "name", "start", "length")} == {
            len(drawn["start"])
        }
        assert set(drawn["kind"]) == {"forward", "backward", "optimizer"}
    busy = sum(length for lane, length in zip(fine["lane"], fine["length"], strict=True) if lane == 1)
    assert busy == pytest.approx(Timeline.of(step).busy_s.sum())
    assert len(coarse["start"]) < len(fine["start"])
    assert coarse["end_s"] == pytest.approx(fine["end_s"], rel=0.01)
    assert "The 5 longest of" in details.timeline(step, 5, fine=True)["note"]


def test_memory_over_time_peaks_where_most_is_alive(forecast: Forecast) -> None:
    times, live = details.memory_over_time(Timeline.of(forecast.inside("memory over time")))
    assert np.all(np.diff(times) >= 0)
    assert live["weights"].min() == live["weights"].max() > 0
    assert live["activations"].argmax() not in (0, len(times) - 1)


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=200), st.integers(1, 50))
def test_thinning_keeps_the_peak(sizes: list[float], points: int) -> None:
    column = np.array(sizes)
    chosen = details.thin(column, points)
    assert len(chosen) <= max(points, 1)
    assert column[chosen].max() == column.max()


def test_a_forecast_that_did_not_look_inside_the_step_has_no_details(forecast: Forecast) -> None:
    found = record(replace(forecast, step=None))
    assert not [name for name in found if name.startswith("details.")]
    assert found["quantities"]["step_time_s"]


def test_time_that_is_up_leaves_the_job_itself(forecast: Forecast) -> None:
    made = forecast_table(forecast, predictor(), seconds=0.0)
    assert made.points == 1
    assert made.left > 100


def test_a_full_page_takes_no_more(forecast: Forecast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretrain.web.table.MOST_BYTES", 1)
    assert forecast_table(forecast, predictor(), seconds=1e9).points == 1


def test_a_model_that_would_be_traced_for_too_long_is_left_out(tmp_path: Path) -> None:
    """The first other precision takes half of the time: the second would not end in it."""
    job = small_job(tmp_path)
    choices = around(job, Catalog.load())
    choices = replace(
        choices, batches=(64,), devices=choices.devices[:1], counts=(1,), plans={"data-parallel": job.plan}
    )
    made, slow = ForecastTable(choices=choices, predictor="roofline"), _Slow()
    made.add(choices.start, get("roofline").predict(job), None)
    fill(made, slow, 10.0, clock=slow.clock)
    assert made.points == 2
    assert made.left == 1


class _Slow(type(get("roofline"))):  # type: ignore[misc]
    """Takes six seconds for each forecast, by its own clock."""

    now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def predict(self, job: Any) -> Forecast:
        self.now_s += 6.0
        forecast: Forecast = super().predict(job)
        return forecast


def test_the_job_itself_comes_with_the_files_that_launch_it(table: ForecastTable) -> None:
    start, other = (unpacked(table.to_dict(), number) for number in (0, 1))
    assert "torchrun" in start["launch"]["launch.sh"]
    assert not any(name.endswith(".py") for name in start["launch"])
    assert "launch" not in other


# The file


def test_the_page_is_one_file_that_loads_nothing(table: ForecastTable) -> None:
    document = table.to_dict()
    document["title"] = "</script><script>alert(1)</script> <!-- \u2028"
    text = page("a <b> & c", document)
    assert "<title>foretrain: a &lt;b&gt; &amp; c</title>" in text
    assert text.count("</script>") == 2
    assert "alert(1)</script>" not in text
    assert not re.search(r"""(?:src|href|srcset|action)\s*=\s*["']?[a-z]+:""", text)
    assert "@import" not in text
    addresses = set(
        re.findall(
            r"https?://[^\s\"'<>)\\]+", re.sub(r'id="foretrain-data">.*?</script>', "", text, flags=re.S)
        )
    )
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "default-src 'none'" in text
    assert len(text.encode()) < 5e6
    data = json.loads(re.search(r'id="foretrain-data">(.*?)</script>', text, re.S)[1])  # type: ignore[index]
    assert data["title"] == document["title"]
    assert data["start"]["batch"] == 64


def test_scripts_have_no_handlers_in_attributes_and_evaluate_nothing() -> None:
    for name in SCRIPTS:
        script = static(name)
        assert not re.search(
            r"\b(?:eval|Function)\s*\(|innerHTML|\.on(?:click|input|change)\s*=|fetch\(|XMLHttp", script
        ), name


def test_a_page_names_no_folder_of_the_machine(forecast: Forecast, tmp_path: Path) -> None:
    made = forecast_table(forecast, predictor(), seconds=0.0)
    base = forecast.job.workload.base
    model = Path(str(forecast.job.workload.model.name)).name
    assert made.to_dict(base)["model"]["name"].endswith("tiny.py:net")
    assert model == "tiny.py:net"


# Packing


@given(st.recursive(
    st.none() | st.booleans() | st.text(max_size=5) | st.integers(-10**6 + 1, 10**6 - 1),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", min_size=1, max_size=3), inner, max_size=4),
    max_leaves=12,
))  # fmt: skip
def test_what_is_packed_comes_out_again(value: Any) -> None:
    packer = Packer()
    packed = packer.add({"one": value, "two": value})
    document = {"records": [packed], "skeletons": packer.skeletons}
    assert unpacked(document, 0) == {"one": value, "two": value}
    assert packed["one"] == packed["two"]


@given(st.floats(1e-12, 1e15))
def test_figures_keep_six_digits(value: float) -> None:
    assert shortened(value) == pytest.approx(value, rel=1e-5)
