"""``foretrain explain``: what it prints, its JSON, and how it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands import fails, ok

MODEL = """
import torch

def net(batch, width=16):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with jobs: one device, four devices, and a model that is not there."""
    (tmp_path / "tiny.py").write_text(MODEL)
    write(tmp_path / "one.json")
    write(tmp_path / "four.json", cluster={"device": "a100", "devices_per_node": 4})
    write(tmp_path / "large.json", training={"global_batch": 4096, "image": 8})
    write(tmp_path / "broken.json", model={"source": "python", "name": "nowhere.py:net"})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, **sections: Any) -> None:
    base = {
        "model": {"source": "python", "name": "tiny.py:net"},
        "training": {"global_batch": 8, "image": 8},
        "cluster": {"device": "a100"},
    }
    path.write_text(json.dumps({**base, **sections}))


def test_explain_says_why_and_what_differs() -> None:
    shown = ok("explain", "one.json", "four.json")
    assert "slower" in shown
    for words in (
        "from A to B",
        "cluster.devices_per_node: 1 -> 4",
        "where a step goes",
        "waiting for the host",
        "memory of the fullest rank",
    ):
        assert words in shown
    assert "\x1b" not in shown


def test_explain_one_device_beside_another() -> None:
    shown = ok("explain", "one.json", "large.json", "--predictor", "roofline")
    assert "training.global_batch: 8 -> 4096" in shown
    assert "A step of B is of another size: B trains" in shown


def test_explain_takes_models_and_options_as_predict_does() -> None:
    shown = ok("explain", "one.json", "tiny.py:net", "--device", "h100", "--batch", "16", "--image", "8")
    assert shown.startswith("A and B take the same time per step")
    assert shown.count("batch 16") == shown.count("on 1 x h100-sxm-80gb") == 2


def test_explain_in_json() -> None:
    document = json.loads(ok("explain", "one.json", "four.json", "--json"))
    parts = {name: part for name, part in document["step_s"].items() if name != "time per step"}
    whole = document["step_s"]["time per step"]
    assert sum(part["difference"] for part in parts.values()) == pytest.approx(whole["difference"])
    assert whole["b"] == document["b"]["quantities"]["step_time_s"]["median"]
    assert document["fields"]["cluster.devices_per_node"] == {"a": 1, "b": 4}
    assert document["summary"]


def test_explain_a_job_beside_itself() -> None:
    assert ok("explain", "one.json", "one.json").startswith("A and B take the same time per step")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["one.json", "nowhere.toml"], ["nowhere.toml", "cannot be read"]),
        (["one.json", "resnetfifty"], ["model: 'resnetfifty' is no preset"]),
        (["one.json", "broken.json"], ["broken.json", "nowhere.py", "cannot be read"]),
        (["one.json", "four.json", "--predictor", "oracle"], ["predictor", "'oracle'"]),
        (["one.json", "four.json", "--catalog", "none.toml"], ["none.toml", "cannot be read"]),
    ],
)
def test_mistakes_are_one_line(words: list[str], parts: list[str]) -> None:
    message = fails("explain", *words)
    for part in parts:
        assert part in message
