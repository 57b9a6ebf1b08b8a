"""What the documentation says to write for a device, an operator and a policy of one's own works as it is
written."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from commands import ok

ROOT = Path(__file__).parent.parent
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


def test_what_a_framework_is_written_into_is_there() -> None:
    text = PAGE.split("\n## A framework\n")[1]
    for path, names in {
        "workload.py": ("Framework", "OWN_MODELS"),
        "step/frameworks.py": ("_PROFILES",),
        "spellings.py": ("FRAMEWORKS",),
        "planner/abilities.py": ("_BY_FRAMEWORK", "TARGETS"),
    }.items():
        code = (ROOT / "src" / "foretrain" / path).read_text(encoding="utf-8")
        assert path in text
        assert all(name in text and re.search(rf"^{name}\b", code, re.MULTILINE) for name in names)
