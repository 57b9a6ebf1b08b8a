"""A real browser for tests of pages: Debian's chromium, driven by selenium; skipped with a reason where it is not
there."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--disable-dev-shm-usage", "--disable-extensions", "--hide-scrollbars",
)  # fmt: skip
WAIT_S = 20.0
"""For a page to come to what a test waits for, on a busy machine."""


class Browser:
    """A window of chromium."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str | Path) -> None:
        """A page, from a file or a server; what was said and asked for before is forgotten."""
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(address.as_uri() if isinstance(address, Path) else address)

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a script's ``return``."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, script: str, *arguments: Any) -> Any:
        """What a script returns as soon as it is true."""
        end_s = time.monotonic() + WAIT_S
        while True:
            found = self.run(script, *arguments)
            if found:
                return found
            assert time.monotonic() < end_s, f"still not: {script}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def click(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)

    def choose(self, selector: str, value: str) -> None:
        """An option of a select, or where a slider stands."""
        self.run(
            "var node = document.querySelector(arguments[0]); node.value = arguments[1];"
            "node.dispatchEvent(new Event('input', {bubbles: true}));"
            "if (node.tagName === 'SELECT') node.dispatchEvent(new Event('change', {bubbles: true}));",
            selector,
            value,
        )

    def resize(self, width: int, height: int = 900) -> None:
        phone = width < 600
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )

    def scheme(self, name: str) -> None:
        """What the system prefers: light or dark."""
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def command(self, name: str, **settings: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, settings)

    def complaints(self) -> list[str]:
        """What the console has: errors and warnings."""
        return [f"{one['level']}: {one['message']}" for one in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses that were asked for, but the page's own."""
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        own = self.driver.current_url.partition("#")[0]
        return [address for address in found if address.partition("#")[0] != own]

    def cpu_s(self, action: Callable[[], object]) -> float:
        """Time of the page's thread in scripts, styles and layout while something is done, however busy the
        machine is."""
        self.command("Performance.enable", timeDomain="threadTicks")
        before = self._worked_s()
        action()
        self.run("return document.body.offsetHeight")
        return self._worked_s() - before

    def _worked_s(self) -> float:
        metrics = {one["name"]: one["value"] for one in self.command("Performance.getMetrics")["metrics"]}
        return float(
            sum(metrics[name] for name in ("ScriptDuration", "LayoutDuration", "RecalcStyleDuration"))
        )

    def violations(self, *, least: tuple[str, ...] = ("serious", "critical")) -> list[str]:
        """What the accessibility checker axe finds on the page as it is, of these impacts."""
        axe = pytest.importorskip("axe_core_python", reason="axe-core-python is not installed")
        script = (Path(axe.__file__).parent / "axe.min.js").read_text()
        self.command("Page.setBypassCSP", enabled=True)
        self.run(script + "; window.axe = axe;")
        found = self.driver.execute_async_script("var done = arguments[0]; axe.run().then(done);")
        return [
            f"{one['impact']} {one['id']}: {node['html'][:160]} ({node['failureSummary'][:200]})"
            for one in found["violations"]
            if one["impact"] in least
            for node in one["nodes"][:3]
        ]


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own."""
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("no chromium with its driver (Debian: apt-get install chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = program
    for flag in (*FLAGS, f"--user-data-dir={profile}", "--window-size=1280,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    opened = webdriver.Chrome(options=options, service=Service(driver))
    opened.set_script_timeout(60)
    try:
        yield Browser(opened)
    finally:
        opened.quit()


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests of a worker."""
    with chromium(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened
