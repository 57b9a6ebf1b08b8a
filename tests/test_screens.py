"""What one forecast says in text, JSON and on the page: its figures agree with one another on every screen."""

from __future__ import annotations

import functools
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

import golden
from browsing import Browser
from foretrain import predictors
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.predictors.driple.features import MEANS, RESOURCES, over_host_link
from foretrain.predictors.driple.predictor import DriplePredictor
from foretrain.predictors.driple.resources import Resources, resources
from foretrain.report import figures, to_json
from foretrain.report.resources import document, panels, resource_table
from foretrain.report.text import breakdown_table, summary
from foretrain.units import format_seconds
from foretrain.web import forecast_table, write_page
from foretrain.web.records import record

JOBS = {
    "one GPU": "resnet50",
    "DDP on 8": "DDP in a node",
    "tensor": "tensor",
    "tensor, many micro-batches": "tensor and sequence, Megatron",
    "pipeline": "pipeline, gpipe",
    "interleaved pipeline": "pipeline, interleaved, Megatron",
    "ZeRO 3": "ZeRO 3",
    "gradient accumulation": "accumulation",
    "bound by the host": "shufflenet_v2_x1_0",
    "bound by the network": "AdaptDL",
    "offload": "offload",
    "inference": "inference",
    "one CPU": "one CPU",
    "four CPUs": "four CPU workers",
    "parameter servers": "parameter servers",
    "experts": "experts",
    "out of memory": "",
}
"""The frozen jobs that are shown, by what they are here for."""
BREAKDOWNS: tuple[Any, ...] = ("phase", "operator", "layer")
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}
ROUNDED = 0.01
"""Three digits are shown of a time, and whole percents of a share."""


def too_large() -> Job:
    """A batch that no device holds."""
    training = {"global_batch": 256, "sequence": 1024, "precision": "bf16", "optimizer": "adamw"}
    return Job.read({"model": golden.LLAMA, "training": training, "cluster": golden.H100, "plan": {}})


@functools.cache
def forecast(name: str) -> Forecast:
    return predictors.get().predict(golden.jobs()[JOBS[name]] if JOBS[name] else too_large())


@functools.cache
def use(name: str) -> Resources:
    return resources(forecast(name))


@functools.cache
def shown(name: str) -> str:
    return text(summary(forecast(name)))


def text(part: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=160, highlight=False, markup=False)
    console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row(words: str, label: str) -> str:
    found = [line for line in words.splitlines() if line.strip().startswith(label)]
    assert len(found) == 1, (label, words)
    return found[0].strip()[len(label) :].strip()


def seconds(words: str) -> float:
    number, unit = words.split()[:2]
    return float(number) * UNITS[unit]


def percents(words: str) -> list[float]:
    return [float(number) / 100 for number in re.findall(r"([\d.]+)%", words)]


def time_label(name: str) -> str:
    return "time per step" if forecast(name).job.trains else "latency of a batch"


def parts(name: str) -> dict[str, tuple[float, float]]:
    """The indented lines below the time per step: seconds and share of each."""
    lines = shown(name).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(time_label(name))) + 1
    found = {}
    for line in lines[first:]:
        if not line.startswith("  "):
            break
        label, value, share = re.match(r"  (.+?)  +([\d.]+ \w+) +(\d+%)", line).groups()  # type: ignore[union-attr]
        found[label] = seconds(value), percents(share)[0]
    return found


each_job = pytest.mark.parametrize("name", JOBS)


@each_job
def test_the_parts_of_a_step_add_up_to_it(name: str) -> None:
    whole, found = seconds(row(shown(name), time_label(name))), parts(name)
    causes = json.loads(to_json(forecast(name)))["step_breakdown_s"]
    assert sum(causes.values()) == pytest.approx(forecast(name)["step_time_s"].median)
    if found:
        assert sum(time for time, _ in found.values()) == pytest.approx(whole, rel=ROUNDED)
        assert sum(share for _, share in found.values()) == pytest.approx(1.0, abs=ROUNDED * len(found))
    for part, (time, _) in found.items():
        assert time == pytest.approx(causes[part], rel=ROUNDED)


@each_job
def test_what_bounds_a_step_is_what_its_parts_say(name: str) -> None:
    found, bound = forecast(name).inside("parts").causes_s, forecast(name).bound
    time_s, busy = forecast(name)["step_time_s"].median, forecast(name)["device_utilization"].median
    assert bound in shown(name)
    if bound.startswith("the host"):
        waits = found["waiting for the host"] + found["gaps between kernels"]
        assert percents(bound) == pytest.approx([busy, waits / time_s], abs=ROUNDED)
    elif bound.startswith("the device's"):
        assert max(found, key=lambda part: found[part]) == "computation"
    else:
        largest = max(found, key=lambda part: found[part])
        assert bound.startswith(largest)
        assert percents(bound) == pytest.approx([found[largest] / time_s], abs=ROUNDED)


@each_job
def test_the_device_is_as_busy_everywhere(name: str) -> None:
    quantities = forecast(name).quantities
    busy = quantities["device_busy_s"].median / quantities["step_time_s"].median
    assert quantities["device_utilization"].median == pytest.approx(busy)
    assert percents(row(shown(name), "device busy"))[0] == pytest.approx(busy, abs=ROUNDED)
    assert percents(row(text(resource_table(use(name))), "device  "))[-1] == pytest.approx(busy, abs=ROUNDED)
    causes = forecast(name).inside("parts").causes_s
    assert causes["computation"] <= quantities["device_busy_s"].median * (1 + 1e-9)
    assert (
        quantities["device_busy_s"].median <= causes["computation"] + causes["exposed communication"] + 1e-12
    )


@each_job
def test_resources_have_the_averages_of_the_forecast(name: str) -> None:
    found, told = use(name), document(use(name))
    assert set(told["figures"]) == set(told["by"])
    for resource, mean in zip(RESOURCES, MEANS, strict=True):
        average, peak = found.figures[mean], found.figures[f"{resource}_peak"]
        if mean in forecast(name).quantities:
            assert average == pytest.approx(forecast(name)[mean].median)
        assert peak >= average
        assert (found.figures[f"{resource}_active_s"] > 0) == (average > 0)
        of_host = resource.startswith("network") and over_host_link(forecast(name).job)
        if not (resource.startswith("memory") or of_host):
            assert found.steps.values[resource].mean() == pytest.approx(average)
    if not over_host_link(forecast(name).job):
        sent = found.figures["network_tx_bytes_per_s"] * forecast(name)["step_time_s"].median
        assert sent == pytest.approx(forecast(name).inside("bytes").sent_bytes)
    if not forecast(name).job.cluster.device.is_cpu:
        fullest = forecast(name).fullest
        assert fullest is not None
        context = DriplePredictor().state().levels.context_bytes
        held = min(1.0, (context + fullest.median) / forecast(name).memory_capacity_bytes)
        assert found.figures["memory_utilization"] == pytest.approx(held, rel=0.05)


@each_job
def test_the_network_is_that_of_a_rank_everywhere(name: str) -> None:
    if forecast(name).inside("bytes").sent_bytes:
        rate = " ".join(row(shown(name), "network per rank, each way").split()[:2])
        assert rate in row(text(resource_table(use(name))), "sent  ")
    else:
        assert "per rank" not in shown(name)


@each_job
def test_each_resource_is_defined_where_it_is_shown(name: str) -> None:
    words = text(resource_table(use(name)))
    for resource, definition in document(use(name))["definitions"].items():
        assert resource in RESOURCES
        assert definition in words


@each_job
@pytest.mark.parametrize("what", BREAKDOWNS)
def test_a_breakdown_adds_up_to_the_time_of_the_device(name: str, what: Any) -> None:
    step = forecast(name).inside("breakdown")
    answer = json.loads(to_json(forecast(name), what))
    whole = sum(answer["breakdown_s"][what].values())
    words = text(breakdown_table(forecast(name), what))
    title = words.splitlines()[0].partition(": ")[2]
    assert seconds(title.replace(",", "")) == pytest.approx(whole, rel=ROUNDED)
    if len(step.layout.stages) == 1:
        assert whole == pytest.approx(answer["quantities"]["device_busy_s"]["median"])
        assert percents(title)[0] == pytest.approx(
            answer["quantities"]["device_utilization"]["median"], abs=ROUNDED
        )
    else:
        assert f"the {len(step.layout.stages)} stages together" in title


@each_job
def test_phases_are_not_shown_as_parts_of_the_step(name: str) -> None:
    assert not {"forward", "backward", "optimizer"} & set(parts(name))
    if "forward_time_s" in forecast(name).quantities and forecast(name).job.trains:
        forward = row(shown(name), "forward")
        assert seconds(forward) == pytest.approx(forecast(name)["forward_time_s"].median, rel=ROUNDED)
        assert "in a step that begins idle" in forward


@each_job
def test_memory_has_one_verdict(name: str) -> None:
    answer = json.loads(to_json(forecast(name)))
    words = row(shown(name), "fits").removeprefix(", stage ").lstrip("0123456789 ")
    verdict, _, rest = words.partition(": ")
    assert answer["fits"] == (verdict in ("yes", "perhaps")) == (answer["out_of_memory_chance"] <= 0.5)
    assert (verdict == "yes") == (answer["out_of_memory_chance"] <= 0.1)
    fullest, capacity = forecast(name).fullest, answer["memory_capacity_bytes"]
    assert fullest is not None
    assert percents(rest)[-1] == pytest.approx(fullest.median / capacity, rel=ROUNDED, abs=ROUNDED)
    peaks = answer["memory_by_stage_bytes"]
    assert sum(answer["memory_by_category_bytes"].values()) == pytest.approx(max(peaks), rel=1e-6)
    assert (verdict == "no") == (name == "out of memory")


@each_job
def test_flops_and_their_share_of_the_peak_are_the_same_everywhere(name: str) -> None:
    flops, job = json.loads(to_json(forecast(name)))["flops"], forecast(name).job
    step_s, devices = forecast(name)["step_time_s"].median, job.cluster.world_size
    done = flops["flops_per_s_per_device"]["median"] * devices * step_s
    assert done == pytest.approx(flops["flops_per_step"])
    batch, sequence = job.workload.training.global_batch, job.workload.training.sequence
    assert flops["flops_per_sample"] * batch == pytest.approx(flops["flops_per_step"])
    assert 0 < flops["trainable_parameters"] <= flops["parameters"]
    page = record(forecast(name))
    if job.cluster.groups[0].device.is_cpu:
        assert flops["mfu"] is None
        assert "MFU" not in shown(name)
    else:
        peak = flops["peak_flops_per_s_per_device"] * devices
        assert flops["mfu"]["median"] == pytest.approx(flops["flops_per_step"] / step_s / peak)
        assert 0 < flops["mfu"]["median"] <= flops["hfu"]["median"] < 1
        assert ("MFU" in shown(name)) == job.trains
        if job.trains:
            share = row(shown(name), "MFU")
            assert percents(share)[0] == pytest.approx(flops["mfu"]["median"], abs=0.0006)
            assert f"({flops['peak_format']}, dense)" in share
            assert page["flops"]["mfu"] == flops["mfu"]
    if sequence:
        assert flops["flops_per_token"] * sequence == pytest.approx(flops["flops_per_sample"])
        rate = flops["tokens_per_s_per_device"]["median"] * devices
        assert rate == pytest.approx(forecast(name)["tokens_per_s"].median)
    counts = figures.describe_work(forecast(name))
    assert counts in shown(name)
    assert counts == page["words"]["work"]


@each_job
def test_the_page_is_made_of_what_the_terminal_says(name: str) -> None:
    page = record(forecast(name))
    time = row(shown(name), time_label(name))
    assert time.lstrip().startswith(format_seconds(page["quantities"]["step_time_s"]["median"]))
    assert page["words"]["fits"].split(":")[0] in row(shown(name), "fits")
    assert page["bound"] == forecast(name).bound
    assert page["step_breakdown_s"] == forecast(name).inside("causes").causes_s


def test_the_page_says_what_the_terminal_says(browser: Browser, tmp_path: Path) -> None:
    """In a real browser, job by job."""
    for name in JOBS:
        extra = {"resources": panels(use(name))}
        table = forecast_table(forecast(name), predictors.get(), seconds=0.0, extra=extra)
        write_page(name, table.to_dict(), tmp_path / "page.html")
        browser.open(tmp_path / "page.html")
        browser.wait("return document.querySelector('#explorer').dataset.drawn === 'all'")
        assert browser.complaints() == []
        _agrees(name, browser.run("return document.body.innerText"))


def _agrees(name: str, screen: str) -> None:
    """What is on the page with the terminal."""
    for label in (time_label(name), "device busy", "fits"):
        value = re.split(r"  +|\[", row(shown(name), label).removeprefix(", stage ").lstrip())[0].strip()
        assert value.lstrip("0123456789 ").lower() in screen.lower() if label == "fits" else value in screen
    if forecast(name).job.trains and not forecast(name).job.cluster.groups[0].device.is_cpu:
        assert row(shown(name), "MFU").split()[0] in screen
    assert figures.describe_work(forecast(name)).split(",")[0] in screen
    assert forecast(name).bound in screen
    for definition in document(use(name))["definitions"].values():
        assert definition in screen


def test_inference_is_told_by_its_latency_and_its_price() -> None:
    screen = shown("inference")
    for words in ("latency of a batch", "tokens/s", "price of 1 M tokens", "per batch"):
        assert words in screen
    for words in ("time per step", "forward", "no epochs", "MFU"):
        assert words not in screen


@each_job
def test_throughput_is_that_of_the_step(name: str) -> None:
    given, training = forecast(name), forecast(name).job.workload.training
    step = given["step_time_s"].median
    assert given["samples_per_s"].median * step == pytest.approx(training.global_batch)
