"""What the documentation says to write for a device, an operator, a policy and a framework of one's own works
as it is written."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commands import PATIENCE_S, ok
from doc_files import MODELS

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


def block(section: str, language: str) -> str:
    """The code of a section."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    match = re.search(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert match is not None
    return match[1]


def test_a_device_of_ones_own_has_a_node_and_a_price(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(block("A device of your own", "toml"))
    device = json.loads(ok("catalog", "devices", "example-1", "--catalog", str(path), "--json"))
    assert device["fp8"] == 960e12
    options = ("--node", "example-box", "--devices", "8", "--batch", "64", "--image", "64", "--json")
    forecast = json.loads(ok("predict", "resnet18", *options, "--catalog", str(path)))
    assert forecast["job"]["cluster"]["node"] == "example-box"
    assert forecast["price_usd_per_hour"] == 18.0
    assert any("nothing was measured of example first" in note for note in forecast["assumptions"])


def test_a_formula_in_the_file_of_a_model_counts_its_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    flops = importlib.import_module("foretrain.graph.flops")
    monkeypatch.setattr(flops, "FORMULAS", dict(flops.FORMULAS))  # what the file registers ends with the test
    (tmp_path / "model.py").write_text(block("A formula for an operator", "python"))
    options = ("--device", "h100", "--batch", "64", "--precision", "bf16", "--json")
    forecast = json.loads(ok("predict", f"{tmp_path / 'model.py'}:build", *options))
    products = 3 * 2 * 64 * 4096 * 1024
    head = 3 * 2 * 64 * 4096 * 10
    assert forecast["flops"]["flops_per_step"] == products + head


def test_a_policy_of_ones_own_is_simulated_beside_others(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(block("A scheduling policy", "python"))
    words = ("--generate", "jobs=40,gap=60s,seed=1", "--cluster", "1x8xv100", "--policy")
    simulated = json.loads(ok("schedule", *words, f"{path}:SmallestFirst,fifo", "--json"))
    jct_s = {result["policy"]: result["average_jct_s"] for result in simulated["results"]}
    assert jct_s[f"{path}:SmallestFirst"] < jct_s["fifo"]


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the edits of the section on frameworks, where a command of it begins."""
    folder = tmp_path_factory.mktemp("edited")
    package = shutil.copytree(
        SOURCE / "foretrain", folder / "src" / "foretrain", ignore=shutil.ignore_patterns("__pycache__")
    )
    section = PAGE.split("\n## A framework\n")[1]
    name, alias, target = (
        re.search(pattern, section)[1]  # type: ignore[index]
        for pattern in (
            r"in `Framework`, `([^`]+)`",
            r"`([^`]+)` in `FRAMEWORKS`",
            r"of FSDP2, `([^`]+)`",
        )
    )
    profile = re.search(r"^ {8}_PROFILES\[.*?^ {8}\)$", section, re.MULTILINE | re.DOTALL)
    assert profile is not None
    known = name.rpartition(" ")[0]
    edits: dict[str, Callable[[str], str]] = {
        "workload.py": lambda text: text.replace(f"{known}\n]", f"{name}\n]", 1),
        "step/frameworks.py": lambda text: text + textwrap.dedent(profile[0]) + "\n",
        "spellings.py": lambda text: text.replace("FRAMEWORKS = {", f"FRAMEWORKS = {{{alias}", 1),
        "planner/abilities.py": lambda text: text.replace(
            "from dataclasses", "import dataclasses\nfrom dataclasses", 1
        ).replace("        _FSDP2,\n", f"        _FSDP2,\n        {target}\n", 1),
    }
    for path, edit in edits.items():
        assert f"`{path}`" in section
        before = (package / path).read_text(encoding="utf-8")
        after = edit(before)
        assert after != before, path
        (package / path).write_text(after, encoding="utf-8")
    return folder


def in_the_copy(folder: Path, *words: str) -> Any:
    """What a command of the edited package answers, as JSON."""
    env = {**os.environ, "PYTHONPATH": str(folder / "src"), "FORETRAIN_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "foretrain", *words, "--json"],
        cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


JOB = """
[model]
source = "python"
name = "model.py:make"
[training]
global_batch = 64
framework = "{framework}"
[cluster]
device = "h100"
devices_per_node = 4
"""


def test_a_framework_of_ones_own_is_forecast_with_its_habits(edited: Path) -> None:
    pytest.importorskip("torch")
    words = ("predict", "job.toml", "--framework")
    (edited / "job.toml").write_text(JOB.format(framework="pytorch"))
    (edited / "model.py").write_text(MODELS)
    ours, plain = (in_the_copy(edited, *words, framework) for framework in ("our-trainer", "pytorch"))
    assert ours["job"]["training"]["framework"] == "ours"
    step_s, plain_s = (one["quantities"]["step_time_s"]["median"] for one in (ours, plain))
    assert step_s > plain_s + 2e-3  # its 5 ms of Python, on this host


def test_plans_are_found_for_a_framework_of_ones_own(edited: Path) -> None:
    pytest.importorskip("torch")
    (edited / "job.toml").write_text(JOB.format(framework="ours"))
    (edited / "model.py").write_text(MODELS)
    found = in_the_copy(edited, "plan", "job.toml", "--max-devices", "8", "--seconds", "2")
    assert {plan["job"]["training"]["framework"] for plan in found["plans"]} == {"ours"}
