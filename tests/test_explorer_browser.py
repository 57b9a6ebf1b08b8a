"""The page in a real browser: what is moved changes what is shown, at once; links restore views; nothing is
loaded, and nothing is said on the console."""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from browsing import Browser
from exploring import predictor, small_forecast
from foretrain.catalog import Catalog
from foretrain.job import Job
from foretrain.units import format_seconds
from foretrain.web.page import page, write_page
from foretrain.web.table import ForecastTable
from foretrain.web.views import View, around

MOST_MS = 50.0
"""From a slider to what follows it."""
BATCHES = (16, 64, 256)
SERIES = (
    ("a100-sxm-80gb", 1, "data-parallel"), ("h100-sxm-80gb", 1, "data-parallel"),
    ("a100-sxm-80gb", 4, "data-parallel"), ("a100-sxm-80gb", 4, "zero-3-fsdp"), ("a100-sxm-80gb", 1, "zero-1"),
)  # fmt: skip
"""What the page of these tests carries."""


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> ForecastTable:
    forecast = small_forecast(tmp_path_factory.mktemp("browsed"))
    choices = around(forecast.job, Catalog.load())
    made = ForecastTable(choices=choices, predictor="deletepop")
    made.add(choices.start, forecast, predictor(), fine=True)
    for device, count, plan in SERIES:
        for batch in BATCHES:
            view = View(batch=batch, device=device, count=count, precision="fp32", plan=plan)
            if made.has(view):
                continue
            if plan == "zero-1":
                made.refuse(view, "plan.shard: 'zero1' has no other device to share with")
            else:
                found = predictor().predict(choices.job_at(view))
                made.add(view, found, predictor())
    return made


@pytest.fixture(scope="module")
def path(table: ForecastTable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = tmp_path_factory.mktemp("page") / "page.html"
    write_page("tiny", table.to_dict(), written)
    return written


@pytest.fixture
def opened(browser: Browser, path: Path) -> Iterator[Browser]:
    """The page as it is when it is opened; whatever a test does, nothing was loaded or complained about."""
    browser.resize(1280)
    show(browser, path)
    yield browser
    assert browser.complaints() == []
    assert browser.requests() == []


def show(browser: Browser, path: Path, fragment: str = "") -> None:
    browser.open(path.as_uri() + fragment)
    drawn(browser)


def drawn(browser: Browser) -> None:
    browser.wait("return document.querySelector('#explorer').dataset.drawn === 'all'")


def cards(browser: Browser) -> dict[str, str]:
    found: dict[str, str] = browser.run(
        "return Object.fromEntries(Array.from(document.querySelectorAll('.card')).map(card =>"
        " [card.querySelector('h2').innerText, card.querySelector('.value').innerText]))"
    )
    return found


def fragment(browser: Browser) -> dict[str, str]:
    address = browser.run("return location.hash.slice(1)")
    return dict(pair.split("=") for pair in address.split("&"))


def test_a_page_opens_with_the_job_itself(opened: Browser, table: ForecastTable) -> None:
    forecast = predictor().predict(table.choices.job)
    shown = cards(opened)
    assert shown["Training time"] == format_seconds(forecast["total_time_s"].median)
    assert shown["Cost"] == f"${forecast.cost.median:,.2f}"  # type: ignore[union-attr]
    assert opened.text("h1") == "tiny.py:net"
    headings = opened.run(
        "return Array.from(document.querySelectorAll('section:not([hidden]) h2')).map(h => h.innerText)"
    )
    for words in (
        "What the time of a step goes to", "Memory by category", "One change away", "Where the device time of a step goes",
        "Timeline of a step", "How the number comes about", "Nearest measured runs", "Launch configuration", "Assumptions",
    ):  # fmt: skip
        assert any(words in heading for heading in headings), words


def test_a_slider_changes_time_and_memory_at_once(opened: Browser) -> None:
    before, last = cards(opened), int(opened.run("return document.querySelector('#batch-slider').max"))
    spent_s = sorted(
        opened.cpu_s(functools.partial(opened.choose, "#batch-slider", str(at)))
        for at in range(0, last + 1, 3)
    )
    after = cards(opened)
    assert after["Training time"] != before["Training time"]
    assert after["Memory"] != before["Memory"]
    assert fragment(opened)["batch"] == "256"
    assert 1e3 * spent_s[len(spent_s) // 2] <= MOST_MS
    drawn(opened)


def test_between_batches_figures_are_interpolated_and_say_so(opened: Browser, table: ForecastTable) -> None:
    opened.run(
        "var n = document.querySelector('#batch'); n.value = 128; n.dispatchEvent(new Event('change'))"
    )
    assert "Interpolated between the forecasts of batch 64 and 256" in opened.text(".notice")
    drawn(opened)
    view = View(**{**table.choices.start.to_dict(), "batch": 128})  # type: ignore[arg-type]
    expected = predictor().predict(table.choices.job_at(view))
    shown = opened.run(
        "var source = foretrain.tableSource(JSON.parse(document.querySelector('#foretrain-data').textContent));"
        "return source.ask(Object.assign({}, source.start, {batch: 128})).record"
    )
    for name in ("step_time_s", "total_time_s", "samples_per_s", "peak_memory_bytes"):
        assert shown["quantities"][name]["median"] == pytest.approx(expected[name].median, rel=0.06), name
    assert shown["job"]["training"]["global_batch"] == 128
    assert sum(shown["step_breakdown_s"].values()) == pytest.approx(
        shown["quantities"]["step_time_s"]["median"], rel=1e-4
    )
    chance = shown["out_of_memory_chance"]
    assert chance == pytest.approx(expected.out_of_memory_chance or 0.0, abs=0.02)


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest(opened: Browser) -> None:
    opened.choose("#choose-count", "4")
    opened.run("var n = document.querySelector('#batch'); n.value = 30; n.dispatchEvent(new Event('change'))")
    assert "30 does not divide" in opened.text(".notice")
    opened.click(".notice button")
    drawn(opened)
    assert fragment(opened)["batch"] == "16"


def test_another_device_plan_and_count(opened: Browser) -> None:
    before = cards(opened)
    opened.choose("#choose-device", "h100-sxm-80gb")
    assert cards(opened)["Cost"] != before["Cost"]
    assert "h100-sxm-80gb" in opened.text(".subtitle")
    opened.click("#reset")
    assert cards(opened) == before
    opened.choose("#choose-count", "4")
    opened.choose("#choose-plan", "zero-3-fsdp")
    drawn(opened)
    assert "ZeRO-3" in opened.text(".subtitle")
    assert "Each rank sends" in opened.text("#derivation")


def test_what_is_refused_or_not_carried_is_told_with_the_nearest(opened: Browser) -> None:
    opened.choose("#choose-plan", "zero-1")
    assert "plan.shard: 'zero1' has no other device" in opened.text(".notice")
    assert opened.run("return document.querySelector('.cards').hidden")
    opened.click("#reset")
    opened.choose("#choose-device", "b200")
    assert "does not carry this combination" in opened.text(".notice")
    opened.click(".notice button.link")
    drawn(opened)
    assert fragment(opened)["device"] == "a100-sxm-80gb"
    assert cards(opened)


def test_a_link_restores_a_view(browser: Browser, path: Path) -> None:
    browser.resize(1280)
    show(browser, path)
    browser.choose("#choose-device", "h100-sxm-80gb")
    browser.choose("#batch-slider", "3")
    browser.click('[data-by="operator"]')
    drawn(browser)
    browser.click('[aria-label="Zoom in"]')
    address, shown = browser.run("return location.href"), cards(browser)
    zoomed = browser.text("#timeline .status")
    browser.open(address)
    drawn(browser)
    assert cards(browser) == shown
    assert (
        browser.run("return document.querySelector('[data-by=operator]').getAttribute('aria-pressed')")
        == "true"
    )
    assert browser.text("#timeline .status") == zoomed
    browser.run("location.hash = '#device=a100-sxm-80gb&batch=256&plan=%E0%A4%A&nonsense=1'")
    browser.wait("return document.querySelector('.subtitle').innerText.includes('a100')")
    assert fragment(browser)["batch"] == "256"


def test_the_timeline_zooms_by_buttons_keys_and_wheel(opened: Browser) -> None:
    def shown() -> str:
        return opened.text("#timeline .status").partition(".")[0] + opened.text("#timeline .status")

    seen = [shown()]
    opened.click('[aria-label="Zoom in"]')
    seen.append(shown())
    for key in ("+", "ArrowRight"):
        opened.run(
            "document.querySelector('.timeline').dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0]}))",
            key,
        )
        seen.append(shown())
    wheel = "document.querySelector('.timeline').dispatchEvent(new WheelEvent('wheel', {deltaY: -100, clientX: 900, bubbles: true, cancelable: true}))"
    opened.run(wheel)
    assert shown() == seen[-1], "a page that is scrolled is not zoomed"
    opened.run("document.querySelector('.timeline').focus();" + wheel)
    seen.append(shown())
    assert len(set(seen)) == len(seen)
    opened.run(
        "document.querySelector('.timeline').dispatchEvent(new KeyboardEvent('keydown', {key: 'Home'}))"
    )
    assert shown() == seen[0]


def test_the_launch_configuration_is_the_job_that_is_shown(opened: Browser, table: ForecastTable) -> None:
    assert 'exec torchrun "${PROCESSES[@]}" train.py' in opened.run(
        "return document.querySelector('textarea.launch').value"
    )
    opened.choose("#choose-count", "4")
    opened.choose("#choose-plan", "zero-3-fsdp")
    drawn(opened)
    text = opened.run("return document.querySelector('textarea.launch').value")
    assert "foretrain predict job.toml" in text
    assert "torchrun --standalone --nproc-per-node 4" in text
    toml = text.partition("# its forecast")[0]
    base = table.choices.job.workload.base
    job = Job.read(tomllib.loads(toml), base=base)
    assert (job.cluster.world_size, job.plan.shard) == (4, "zero3")
    view = View(batch=64, device="a100-sxm-80gb", count=4, precision="fp32", plan="zero-3-fsdp")
    expected = table.choices.job_at(view)
    assert (job.plan, job.cluster, job.workload.training) == (
        expected.plan,
        expected.cluster,
        expected.workload.training,
    )


@pytest.mark.parametrize("allowed", [True, False])
def test_copying_works_without_permission(opened: Browser, allowed: bool) -> None:
    opened.run(
        "Object.defineProperty(navigator, 'clipboard', {configurable: true, value: {writeText: text => {"
        "window.copied = text; return arguments[0] ? Promise.resolve() : Promise.reject(new Error('no'))}}});"
        if allowed
        else "Object.defineProperty(navigator, 'clipboard', {configurable: true, value: undefined}); document.execCommand = () => false",
        allowed,
    )
    opened.click("#copy-launch")
    opened.wait("return document.querySelector('#copy-launch').innerText !== 'Copy'")
    if allowed:
        assert opened.text("#copy-launch") == "Copied"
        assert "[training]" in opened.run("return window.copied")
        return
    assert opened.text("#copy-launch") == "Selected: press Ctrl+C"
    assert "[training]" in opened.run("return document.getSelection().toString() || document.activeElement.value.slice("
                                      "document.activeElement.selectionStart, document.activeElement.selectionEnd)")  # fmt: skip


def test_every_control_is_reached_by_keyboard(opened: Browser) -> None:
    unreachable = opened.run(
        "return Array.from(document.querySelectorAll('button, select, input, textarea, .timeline')).filter("
        "node => node.offsetParent && node.tabIndex < 0).length"
    )
    assert unreachable == 0
    names = opened.run(
        "return Array.from(document.querySelectorAll('select, input')).map(node => node.labels.length || node.ariaLabel)"
    )
    assert all(names)


@pytest.mark.parametrize(
    ("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]
)
def test_an_accessibility_checker_finds_nothing_serious(
    browser: Browser, path: Path, width: int, scheme: str
) -> None:
    browser.resize(width)
    browser.scheme(scheme)
    show(browser, path)
    assert browser.violations() == []
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth"), "wider than the screen"
    browser.scheme("light")


def test_the_theme_is_chosen_by_hand_too(opened: Browser) -> None:
    back = "return getComputedStyle(document.body).backgroundColor"
    first = opened.run(back)
    for _ in range(2):
        opened.click(".theme")
    assert opened.text(".theme") == "Theme: dark"
    assert opened.run(back) != first
    opened.click(".theme")
    assert opened.run(back) == first


def test_without_a_length_of_the_training_devices_are_compared_by_their_price(
    browser: Browser, shared_cache: Path, tmp_path: Path
) -> None:
    forecast = small_forecast(tmp_path, samples=None, epochs=None)
    choices = around(forecast.job, Catalog.load())
    made = ForecastTable(choices=choices, predictor="deletepop")
    made.add(choices.start, forecast, predictor(), fine=True)
    other = View(batch=64, device="h100-sxm-80gb", count=1, precision="fp32", plan="data-parallel")
    made.add(other, predictor().predict(choices.job_at(other)), predictor())
    write_page("tiny", made.to_dict(), tmp_path / "page.html")
    show(browser, tmp_path / "page.html")
    assert len(re.findall(r"\$[\d.]+/h\b", browser.text("main"))) >= 2


def test_names_that_look_like_html_are_text(browser: Browser, table: ForecastTable, tmp_path: Path) -> None:
    document = json.loads(json.dumps(table.to_dict()))
    document["model_label"] = "<img src=x onerror=document.title='gotcha'>"
    (tmp_path / "page.html").write_text(page("page", document))
    show(browser, tmp_path / "page.html")
    assert browser.text("h1") == document["model_label"]
    assert "gotcha" not in browser.run("return document.title")
    assert browser.requests() == []


def test_times_are_written_as_on_the_terminal(opened: Browser) -> None:
    for time_s in (0.0, 3e-9, 4.2e-6, 0.00123, 0.99, 59.4, 61.0, 3599.0, 11520.0, 90000.0, 1e7):
        assert opened.run("return foretrain.format.seconds(arguments[0])", time_s) == format_seconds(time_s)
    assert re.fullmatch(r"1\.5 GiB", opened.run("return foretrain.format.bytes(1.5 * 2 ** 30)"))
