"""The MCP server: a client of the SDK talks to the command as a process; what is refused never runs."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="the MCP SDK is not installed (foretrain[mcp])")

from anyio.from_thread import start_blocking_portal
from mcp import Client, StdioServerParameters, stdio_client

from commands import PATIENCE_S, begin, fails
from foretrain.agents.tools import TOOLS

pytestmark = pytest.mark.xdist_group("mcp")

MODEL = """
import pathlib
import torch

pathlib.Path("ran").touch()
print("a model that prints")

def net(batch):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
"""
TINY = {"model": "net.py:net", "image": 8, "batch": 8, "device": "a100", "predictor": "roofline"}
NAMED = TINY | {"model": "resnet18", "image": 64}

Call = Callable[..., Any]


@contextmanager
def served(*options: str) -> Iterator[Call]:
    """Calls of tools on a server that was started with these options."""
    words = ["-m", "foretrain.cli", "mcp", *options]
    transport = stdio_client(StdioServerParameters(command=sys.executable, args=words, env=dict(os.environ)))
    with ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal())
        client = stack.enter_context(portal.wrap_async_context_manager(Client(transport)))

        def call(name: str, /, **arguments: Any) -> Any:
            return portal.call(client.call_tool, name, arguments)

        call.tools = portal.call(client.list_tools).tools  # type: ignore[attr-defined]
        call.instructions = client.instructions  # type: ignore[attr-defined]
        yield call
        with warnings.catch_warnings():
            # On a busy machine the client's library does not wait for the end of the process.
            warnings.simplefilter("ignore", ResourceWarning)
            stack.close()
            gc.collect()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("open")
    (made / "net.py").write_text(MODEL)
    document = {
        "model": {"source": "python", "name": "net.py:net"},
        "training": {"global_batch": 8, "image": 8},
        "cluster": {"device": "a100"},
    }
    (made / "job.json").write_text(json.dumps(document))
    document["model"]["name"] = "../outside.py:net"  # type: ignore[index]
    (made / "leads_out.json").write_text(json.dumps(document))
    (made.parent / "outside.py").write_text(MODEL)
    return made


@pytest.fixture(scope="module")
def call(folder: Path, shared_cache: Path) -> Iterator[Call]:
    """A server that may read a folder."""
    with served("--allow", str(folder)) as made:
        yield made


@pytest.fixture(scope="module")
def closed(shared_cache: Path) -> Iterator[Call]:
    """A server as it is without options: no file may be named."""
    with served() as made:
        yield made


def answered(result: Any) -> tuple[str, dict[str, Any]]:
    """The text and the data, which come twice: as JSON for people's clients, and as they are."""
    assert not result.is_error, result.content[0].text
    text, data = (block.text for block in result.content)
    assert json.loads(data) == result.structured_content
    return str(text), dict(result.structured_content)


def refused(result: Any) -> str:
    """The one line of an error."""
    assert result.is_error
    (block,) = result.content
    assert "\n" not in block.text
    assert "Traceback" not in block.text
    return str(block.text)


def test_tools_tell_a_language_model_when_to_use_them(call: Call) -> None:
    tools = {tool.name: tool for tool in call.tools}  # type: ignore[attr-defined]
    assert set(tools) == set(TOOLS) == {"predict", "plan", "check", "explain", "catalog"}
    for name, tool in tools.items():
        assert len(tool.description) > 80
        assert tool.input_schema["type"] == "object"
        assert all(one["description"] for one in tool.input_schema["properties"].values())
        assert tool.annotations.read_only_hint
        assert name in call.instructions  # type: ignore[attr-defined]


def test_predict(call: Call) -> None:
    text, data = answered(call("predict", **NAMED, steps=1000))
    assert text.startswith("resnet18 (torchvision), training, batch 8")
    for words in ("time per step:", "whole training:", "cost:", "fits: yes"):
        assert words in text
    assert data["step_time_s"]["low"] <= data["step_time_s"]["median"] <= data["step_time_s"]["high"]
    assert data["fits"] is True
    assert data["job"]["training"]["image"] == 64
    assert len(json.dumps(data)) < 4000


def test_a_job_that_was_answered_can_be_asked_again(call: Call) -> None:
    _, first = answered(call("predict", **TINY))
    _, again = answered(call("predict", job=first["job"], predictor="roofline"))
    assert again["step_time_s"] == first["step_time_s"]


def test_predict_of_what_does_not_fit_names_changes(call: Call) -> None:
    text, data = answered(call("predict", **NAMED | {"batch": 1_000_000}))
    assert data["fits"] is False
    assert data["fits_with"]
    assert "It would fit with" in text


def test_plan(call: Call) -> None:
    asked = TINY | {
        "batch": 512,
        "steps": 1000,
        "kinds": ["a100", "h100"],
        "max_devices": 2,
        "deadline": "1d",
        "budget": "$50",
    }
    text, data = answered(call("plan", **asked))
    assert text.startswith("plans for fsdp2: least cost, within 1 d")
    assert data["plans"][0]["cost_usd"]["median"] <= data["plans"][1]["cost_usd"]["median"]
    assert data["best_job"]["model"]["name"] == "net.py:net"


def test_check(call: Call) -> None:
    asked = TINY | {"steps": 1000, "max_time": "1h", "max_cost": 0.0001, "fits": 0.95}
    text, data = answered(call("check", **asked, base=TINY | {"steps": 1000, "batch": 4, "predictor": None}))
    assert data["holds"] is False
    assert {one["name"]: one["holds"] for one in data["limits"]} == {
        "time": True,
        "cost": False,
        "fits": True,
    }
    assert "missed  cost" in text
    assert data["against_base"]["fields"]["training.global_batch"] == {"a": 4, "b": 8}


def test_explain(call: Call) -> None:
    first = {name: TINY[name] for name in ("model", "image", "batch", "device")}
    text, data = answered(call("explain", a=first, b={"batch": 1_000_000}, predictor="roofline"))
    assert text.startswith("B is ")
    assert data["fields"] == {"training.global_batch": {"a": 8, "b": 1_000_000}}
    assert data["step_s"]["time per step"]["difference"] > 0


def test_catalog(closed: Call) -> None:
    _, data = answered(closed("catalog", kind="models", search="llama-3.1"))
    assert "meta-llama/Llama-3.1-8B" in data["models"]
    _, data = answered(closed("catalog", kind="devices", name="h100"))
    assert data["name"] == "h100-sxm-80gb"
    assert data["source"]


def job(**model: Any) -> dict[str, Any]:
    return {
        "job": {"model": model, "training": {"global_batch": 8, "image": 8}, "cluster": {"device": "a100"}}
    }


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("nothing", {}, "tool: 'nothing' is not one of catalog, check, explain, plan, predict"),
    ("predict", {}, "model: give model or job"),
    ("predict", {"model": "resnet18", "job": {}}, "model: give model or job, and only one of them"),
    ("predict", {"model": 18}, "model: 18 is not a text"),
    ("predict", {"model": "nosuchmodel"}, "model: 'nosuchmodel'"),
    ("predict", {"model": "resnet18", "batch_size": 8}, "batch_size: unknown; did you mean batch?"),
    ("predict", {"model": "resnet18", "batch": "many"}, "training.global_batch: 'many' is not a whole number"),
    ("predict", {"model": "resnet18", "device": "h1000"}, "cluster.device: 'h1000'"),
    ("predict", {"model": "resnet18", "catalog": "mine.toml"}, "catalog: unknown"),
    ("predict", {"model": "resnet18", "predictor": "mine.py:Mine"}, "predictor: 'mine.py:Mine' is not one of"),
    ("predict", {"model": "resnet18", "host": "/etc/hosts"}, "cluster.host: '/etc/hosts' is a file"),
    ("predict", {"job": {"job": {"cluster": {"host": "/etc/hosts"}}}}, "cluster.host: '/etc/hosts' is a file"),
    ("predict", {"model": "net.py:net"}, "model: 'net.py:net' is a file, and this server takes names"),
    ("predict", {"model": "net", "source": "Python"}, "model: 'net' is a file"),
    ("predict", {"model": "onnx:net"}, "model: 'net' is a file"),
    ("predict", {"model": "job.toml"}, "model: 'job.toml' is a file"),
    ("predict", {"model": "run.sh"}, "model: 'run.sh' is a file"),
    ("predict", {"model": "../weights"}, "model: '../weights' is a file"),
    ("predict", {"model": "/root"}, "model: '/root' is a file"),
    ("predict", {"model": "~/weights"}, "model: '~/weights' is a file"),
    ("predict", job(source="python", name="net.py:net"), "model.name: 'net.py:net' is a file"),
    ("predict", job(source="graph", name="/tmp/graph"), "model.name: '/tmp/graph' is a file"),
    ("predict", job(source="timm", name="resnet18", args={"checkpoint_path": "/tmp/w.pth"}), "model.args.checkpoint_path:"),
    ("predict", job(source="transformers", config={"model_type": "llama", "trust_remote_code": True}), "code of a checkpoint is never run"),
    ("predict", job(source="transformers", config={"model_type": "llama", "attn_implementation": "some/kernels"}), "model.config.attn_implementation:"),
    ("plan", {"model": "resnet18", "max_devices": "all"}, "max_devices: 'all' is not a whole number"),
    ("plan", {"model": "resnet18", "objective": "fun"}, "objective: 'fun' is not"),
    ("plan", {"model": "resnet18", "deadline": "soon", "steps": 9}, "deadline: 'soon' is not a time"),
    ("plan", {"model": "resnet18", "top": 0}, "top: 0 is not a whole number of at least 1"),
    ("check", {"model": "resnet18", "max_time": "1h"}, "max-time: of a whole training"),
    ("check", {"model": "resnet18", "fits": 95}, "fits: 95.0 is not a probability"),
    ("check", {"model": "resnet18", "base": {"model": "net.py:net"}}, "base: model: 'net.py:net' is a file"),
    ("explain", {"a": {"model": "resnet18"}}, "b: missing; give two jobs, a and b"),
    ("explain", {"a": {"model": "resnet18"}, "b": {"bach": 4}}, "b: bach: unknown; did you mean batch?"),
    ("explain", {"a": {}, "b": {}, "c": {}}, "c: unknown; arguments are a, b, predictor"),
    ("catalog", {}, "kind: missing"),
    ("catalog", {"kind": "gpus"}, "kind: 'gpus' is not"),
    ("catalog", {"kind": "devices", "name": "h1000"}, "devices: 'h1000'"),
    ("catalog", {"kind": "devices", "search": "x" * 1_000_000}, "arguments: 1,000,0"),
]  # fmt: skip


@pytest.mark.parametrize(("tool", "arguments", "said"), BAD)
def test_bad_input_is_one_line_that_names_the_field(
    closed: Call, tool: str, arguments: dict[str, Any], said: str
) -> None:
    assert said in refused(closed(tool, **arguments))


def test_files_of_a_folder_that_is_open(call: Call, folder: Path) -> None:
    """What the model prints is no part of the protocol."""
    _, by_name = answered(call("predict", **TINY))
    assert (folder / "ran").exists()
    _, by_file = answered(call("predict", model="job.json", predictor="roofline"))
    assert by_name["step_time_s"] == by_file["step_time_s"]


@pytest.mark.parametrize("model", ["../outside.py:net", "{outside}:net", "leads_out.json"])
def test_files_beside_a_folder_that_is_open(call: Call, folder: Path, model: str) -> None:
    path = model.format(outside=folder.parent / "outside.py")
    said = refused(call("predict", model=path, image=8))
    assert "is not in the folder that this server may read" in said
    assert not (folder.parent / "ran").exists()


def test_links_lead_no_further_than_the_folder(call: Call, folder: Path) -> None:
    (folder / "link.py").symlink_to(folder.parent / "outside.py")
    assert "is not in the folder" in refused(call("predict", model="link.py:net", image=8))


def test_an_answer_that_takes_too_long_is_ended_and_the_server_goes_on(shared_cache: Path) -> None:
    with served("--seconds", "0.05") as call:
        for _ in range(2):
            said = refused(call("catalog", kind="devices"))
            assert said == "catalog: took longer than 0.05 s and was ended; foretrain mcp --seconds"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--allow", "nowhere"), "allow: 'nowhere' is not a folder"),
        (("--seconds", "0"), "seconds: 0.0 is not a number above 0"),
        (("--seconds", "long"), "--seconds: 'long' is not a valid"),
    ],
)
def test_what_the_command_refuses(words: tuple[str, ...], said: str) -> None:
    assert said in fails("mcp", *words)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_while_it_waits(number: signal.Signals) -> None:
    process = begin("mcp", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        about = {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "test", "version": "1"},
        }
        process.stdin.write(
            json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": about}) + "\n"
        )
        process.stdin.flush()
        assert "foretrain" in process.stdout.readline()
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 128 + number
