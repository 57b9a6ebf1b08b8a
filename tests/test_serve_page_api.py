"""What the served page asks for: two jobs explained, records, models, a leaderboard, and what learning changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foretrain.client import Client, ServerError
from foretrain.errors import InputError
from foretrain.recent import Recent
from foretrain.serve.requests import ExplainRequest, LeaderboardRequest, PredictRequest
from foretrain.serve.work import config_tables
from servers import Server, models_in, run_of, serving

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "max_position_embeddings": 512,
    "_name_or_path": "/somewhere/on/a/disk",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models_in(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folder: Path, shared_cache: Path) -> Iterator[Server]:
    db = str(tmp_path_factory.mktemp("db") / "runs.db")
    with serving(db, "--processes", "1", "--no-page", "--allow", str(folder)) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Server) -> Client:
    return Client(server.url)


def job(folder: Path, device: str = "a100-sxm-80gb") -> dict[str, Any]:
    return {
        "model": {"source": "graph", "name": str(folder / "product.json.zst")},
        "training": {"global_batch": 4},
        "cluster": {"device": device, "devices_per_node": 1, "nodes": 1},
    }


def test_two_jobs_are_explained(client: Client, folder: Path) -> None:
    found = client.explain(job(folder), (job(folder), {"device": "h100"}), names=("old", "new"))
    assert found.fields["cluster.device"] == {"a": "a100-sxm-80gb", "b": "h100-sxm-80gb"}
    assert found.a.job["cluster"]["device"] == "a100-sxm-80gb"
    assert any("old" in line.lower() or "new" in line.lower() for line in found.summary)
    parts = found.document["step_s"]
    whole = parts.pop("time per step")
    assert sum(part["difference"] for part in parts.values()) == pytest.approx(whole["difference"])


def test_what_is_wrong_with_one_of_two_is_named(server: Server, folder: Path) -> None:
    good = {"job": job(folder)}
    for bad, words in (
        ({"model": "a", "job": {}}, "a.model"),
        ({"nonsense": 1}, "a.nonsense"),
        ({}, "a.model"),
    ):
        answer = server.ask("POST", "/v1/explain", {"a": bad, "b": good})
        assert answer.status == 400
        assert answer.json["error"].startswith(words), answer.json
    refused = server.ask("POST", "/v1/explain", {"a": good, "b": {"model": "/etc/passwd.py:x"}})
    assert refused.status == 400
    assert "not allowed" in refused.json["error"] or "no folder" in refused.json["error"]
    with pytest.raises(InputError, match="names: "):
        ExplainRequest(a=good, b=good, names=("one",))


def test_a_record_has_what_a_page_draws(client: Client, folder: Path) -> None:
    record = client.record(job(folder))
    assert {"parts", "timeline", "derivation"} <= set(record["details"])
    assert record["quantities"] == {
        name: one for name, one in client.predict(job(folder)).document["quantities"].items()
        if name in record["quantities"]
    }  # fmt: skip
    assert record["job"]["model"]["source"] == "graph"


def test_a_configuration_is_a_model() -> None:
    tables = config_tables(CONFIG, {})
    assert tables["model"]["task"] == "causal-lm"
    assert tables["model"]["config"] == {
        "model_type": "llama",
        "hidden_size": 64,
        "max_position_embeddings": 512,
    }
    assert tables["training"]["sequence"] == 512
    assert "device" in tables["cluster"]
    assert config_tables(CONFIG, {"node": "dgx-h100"})["cluster"] == {}
    with pytest.raises(InputError, match="only one"):
        PredictRequest(model="resnet50", config=CONFIG)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hidden_size": 1}, "config: model_type is missing"),
        ({**CONFIG, "vocab_file": "/etc/passwd"}, "config.vocab_file: "),
        ({**CONFIG, "trust_remote_code": True}, "config.trust_remote_code: "),
    ],
)
def test_a_configuration_that_is_none_is_refused(server: Server, config: dict[str, Any], words: str) -> None:
    answer = server.predict(config=config)
    assert answer.status == 400
    assert answer.json["error"].startswith(words)


def test_models_are_found_by_a_part_of_their_names(client: Client) -> None:
    assert client.models("resnet50")[0] == "resnet50"
    assert all("llama" in name.lower() for name in client.models("llama", limit=5))
    with pytest.raises(ServerError, match="limit: "):
        client.models(limit=0)


def test_predictors_are_scored_and_learn(client: Client, folder: Path) -> None:
    measured = [
        {**run_of(n), "job": job(folder), "measured": {"step_time_s": 1e-3 + n * 1e-6}} for n in range(4)
    ]
    client.add_runs(measured)
    board = client.wait(client.leaderboard(predictors=["deletepop", "roofline"]))
    assert board["runs"] == 4
    assert {one["predictor"]: one["n"] for one in board["predictors"]} == {"deletepop": 4, "roofline": 4}
    assert [one["median_ape"] for one in board["predictors"]] == sorted(
        one["median_ape"] for one in board["predictors"]
    )
    row = board["rows"][0]
    assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)
    changes = client.wait(client.learn("ours"))["changes"]
    assert changes["after"]["median_ape"] < changes["before"]["median_ape"]
    assert changes["runs"][0]["measured"] == pytest.approx(1e-3)
    again = client.wait(client.leaderboard())
    assert again["learned_here"] == ["ours"]
    with pytest.raises(ServerError, match="predictor: 'nonsense'"):
        client.leaderboard(predictors=["nonsense"])
    with pytest.raises(InputError, match="quantity: "):
        LeaderboardRequest(quantity="nonsense")


def test_without_the_page_there_is_none(server: Server) -> None:
    for path in ("/", "/static/base.css"):
        assert server.ask("GET", path).status == 404


def test_what_was_used_last_is_kept() -> None:
    recent = Recent[int](most=3)
    made: list[str] = []

    def get(name: str, size: float = 1.0) -> None:
        def make() -> int:
            made.append(name)
            return len(made)

        recent.get(name, make, lambda _: size)

    for name in ("a", "b", "c", "a", "d", "a", "b"):
        get(name)
    assert made == ["a", "b", "c", "d", "b"]
    get("large", 100.0)
    assert "large" in recent
    assert "a" not in recent
