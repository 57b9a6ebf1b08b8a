"""The served page in a real browser: every tab answers, says what is wrong, and can be reached by keyboard."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browsing import Browser
from servers import PATIENCE_S, Server, models_in, run_of, serving

TOKEN = "a-token-of-the-page"
TABS = ("explore", "compare", "plan", "schedule", "leaderboard", "runs")
CONFIG = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models_in(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, browser: Browser, folder: Path, shared_cache: Path
) -> Iterator[Server]:
    db = str(tmp_path_factory.mktemp("db") / "runs.db")
    words = ("--processes", "1", "--allow", str(folder))
    with serving(db, *words, environment={"FORETRAIN_TOKEN": TOKEN}) as started:
        yield started


def until(browser: Browser, script: str) -> Any:
    """What a script returns once it is true; answers may take long on a busy machine."""
    end_s = time.monotonic() + PATIENCE_S
    while not (found := browser.run(script)):
        assert time.monotonic() < end_s, f"still not: {script}"
        time.sleep(0.05)
    return found


def given(browser: Browser, selector: str, value: str) -> None:
    """A field filled as people fill it."""
    browser.run(
        "var node = document.querySelector(arguments[0]); node.value = arguments[1];"
        "node.dispatchEvent(new Event('input', {bubbles: true}));"
        "node.dispatchEvent(new Event('change', {bubbles: true}));",
        selector,
        value,
    )


def answered(browser: Browser) -> str:
    """The time of a step, once nothing is under way."""
    return str(
        until(
            browser,
            "var place = document.querySelector('#explorer'), value = place && place.querySelector('#answer .value');"
            "return value && !place.hasAttribute('aria-busy') && value.innerText",
        )
    )


@pytest.fixture
def page(browser: Browser, server: Server) -> Browser:
    """The page on a model of a file, which one device runs."""
    browser.resize(1280)
    browser.scheme("light")
    view = "model=nets.py:linear&batch=64&device=a100-sxm-80gb&count=1&precision=fp32&plan=data-parallel"
    browser.open(f"{server.url}/#{view}")
    answered(browser)
    return browser


def tab(browser: Browser, name: str) -> None:
    browser.click(f"#tab-{name}")
    assert browser.run(f"return !document.querySelector('#panel-{name}').hidden")


def with_token(browser: Browser) -> None:
    given(browser, "#token", TOKEN)


def test_it_talks_to_its_own_server_alone_and_breaks_no_policy(page: Browser, server: Server) -> None:
    assert {address.split("/")[2] for address in page.requests()} == {f"127.0.0.1:{server.port}"}
    assert not [one for one in page.complaints() if one.startswith(("SEVERE", "WARNING"))]
    policy = server.ask("GET", "/").headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy


def test_what_is_moved_is_asked_and_the_address_keeps_it(page: Browser) -> None:
    page.choose("#choose-device", "h200-sxm-141gb")
    until(page, "return document.querySelector('.subtitle').innerText.includes('h200')")
    stop = int(page.run("return Number(document.querySelector('#batch-slider').value)"))
    for further in range(1, 6):
        page.choose("#batch-slider", str(stop + further))
    answered(page)
    batch = page.run("return foretrain.page.view().batch")
    assert batch > 64
    address = page.run("return window.location.hash")
    assert f"batch={batch}" in address
    assert "device=h200-sxm-141gb" in address
    page.run("window.location.reload()")
    answered(page)
    until(page, f"return foretrain.page.view().batch === {batch}")
    assert page.run("return document.querySelector('#timeline canvas') !== null")


def test_what_is_wrong_is_said_in_one_line(page: Browser) -> None:
    given(page, "#model", "no-such-model-at-all")
    until(
        page, "return document.querySelector('#explorer .notice').innerText.includes('no-such-model-at-all')"
    )
    given(page, "#model-config", "{not json")
    until(
        page,
        "return document.querySelector('#panel-explore .pasted .warning').textContent.includes('not JSON')",
    )


def test_tabs_are_reached_by_keyboard(page: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    page.run("document.querySelector('#tab-explore').focus()")
    for name in (*TABS[1:], TABS[0]):
        page.driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
        assert page.run("return document.activeElement.id") == f"tab-{name}"
        assert page.run("return document.activeElement.getAttribute('aria-selected')") == "true"
    assert page.run("return document.querySelectorAll('[role=tab][tabindex=\"0\"]').length") == 1


def test_two_configurations_are_explained(page: Browser) -> None:
    tab(page, "compare")
    for side, batch in (("a", "64"), ("b", "128")):
        given(page, f"#compare-{side}-model", "nets.py:linear")
        given(page, f"#compare-{side}-batch", batch)
        given(page, f"#compare-{side}-count", "1")
        given(page, f"#compare-{side}-precision", "fp32")
    page.click("#panel-compare button[type=submit]")
    # the tab compares what it starts with by itself: that answer is replaced
    until(page, "return document.querySelector('#panel-compare').innerText.includes('training.global_batch')")
    assert page.run("return document.querySelectorAll('#panel-compare .lead-list li').length")


def test_a_search_needs_the_token_and_can_be_cancelled(page: Browser) -> None:
    tab(page, "plan")
    given(page, "#plan-model", "nets.py:linear")
    given(page, "#plan-batch", "64")
    given(page, "#plan-most", "1")
    page.run("sessionStorage.clear()")
    page.click("#panel-plan button[type=submit]")
    until(page, "return document.querySelector('#panel-plan .errand').innerText.includes('token')")
    with_token(page)
    page.click("#panel-plan button[type=submit]")
    until(page, "return !document.querySelector('#panel-plan .errand button').hidden")
    end_s = time.monotonic() + PATIENCE_S
    said = "return document.querySelector('#panel-plan .errand p').innerText"
    while "Cancelled" not in page.run(said) and not page.run("return document.querySelector('#found-plans')"):
        page.click("#panel-plan .errand button")
        assert time.monotonic() < end_s
        time.sleep(0.2)
    page.click("#panel-plan button[type=submit]")
    until(page, "return document.querySelector('#found-plans table')")
    assert page.run("return document.querySelector('#found-plans svg') !== null")


def test_policies_are_simulated(page: Browser) -> None:
    tab(page, "schedule")
    with_token(page)
    given(page, "#schedule-made", "jobs=20,gap=30s,median=20min")
    given(page, "#schedule-policies", "fifo, srtf")
    page.click("#panel-schedule button[type=submit]")
    until(page, "return document.querySelectorAll('#panel-schedule tbody tr').length === 4")
    given(page, "#schedule-policies", "nonsense")
    page.click("#panel-schedule button[type=submit]")
    until(page, "return document.querySelector('#panel-schedule .errand').innerText.includes('nonsense')")


def test_uploaded_runs_are_scored_and_learned_from(page: Browser, folder: Path) -> None:
    job = {
        "model": {"source": "graph", "name": str(folder / "product.json.zst")},
        "training": {"global_batch": 4},
        "cluster": {"device": "a100-sxm-80gb", "devices_per_node": 1, "nodes": 1},
    }
    runs = [{**run_of(n), "job": job, "measured": {"step_time_s": 1e-4 * (1 + n / 100)}} for n in range(4)]
    tab(page, "runs")
    with_token(page)
    given(page, "#runs-text", "\n".join(map(json.dumps, runs)))
    page.click("#panel-runs button[type=submit]")
    until(page, "return /new runs|were there/.test(document.querySelector('#panel-runs').innerText)")
    page.run("document.querySelectorAll('#panel-runs form')[1].requestSubmit()")
    until(page, "return document.querySelector('#changed table')")
    assert "before" in page.text("#changed")
    tab(page, "leaderboard")
    page.click("#panel-leaderboard button[type=submit]")
    until(page, "return document.querySelector('#panel-leaderboard table')")
    assert {"deletepop", "roofline", "ours"} <= set(page.text("#panel-leaderboard table").split())


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_every_tab_is_accessible_and_as_wide_as_the_screen(page: Browser, width: int, scheme: str) -> None:
    page.resize(width)
    page.scheme(scheme)
    for name in TABS:
        tab(page, name)
        if name != "explore" or scheme == "light":  # the explorer itself is looked at in its own tests
            assert page.violations() == []
        assert page.run("return document.documentElement.scrollWidth") <= width
    page.resize(1280)
    page.scheme("light")
