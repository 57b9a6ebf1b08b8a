"""Tests the server: what it answers, whom it refuses, and that nothing ends it."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import fails
from foretrain.api import predict
from malformed import GRAPH_JOB, malformed
from servers import LINEAR, Server, models_in, run_of, serving
from workloads import runs as ernest_runs

TOKEN = "a-token-of-the-tests"
AUTHORISED = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models_in(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", autouse=True)
def _no_token(cache: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FORETRAIN_TOKEN", raising=False)
        yield


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, folder: Path, cache: Path) -> Iterator[Server]:
    """A server with a token, a folder of models, and tight limits; only time is ample, for busy machines."""
    limits = "--processes 1 --capture-seconds 120 --memory 2GiB --body 64KiB --upload 1MiB".split()
    db = str(tmp_path_factory.mktemp("db") / "runs.db")
    with serving(db, "--allow", str(folder), *limits, environment={"FORETRAIN_TOKEN": TOKEN}) as server:
        yield server


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Server]:
    """A server as it is by default."""
    with serving(str(tmp_path_factory.mktemp("db") / "runs.db"), "--processes", "1") as server:
        yield server


# What it answers


def test_it_is_alive_and_ready_and_counts(guarded: Server) -> None:
    assert guarded.ask("GET", "/health").json["status"] == "ok"
    assert guarded.ask("GET", "/ready").json == {"status": "ready"}
    text = guarded.ask("GET", "/metrics").body.decode()
    assert 'foretrain_requests_total{method="GET",path="/health",status="200"}' in text
    assert all(re.fullmatch(r"(#.*|\w+(\{.*\})? [-+.e\dInf]+)", line) for line in text.splitlines())


def test_a_forecast_is_that_of_the_library_and_is_remembered(guarded: Server, folder: Path) -> None:
    model = {**GRAPH_JOB["model"], "name": str(folder / "product.json.zst")}
    answer = guarded.predict(job={**GRAPH_JOB, "model": model})
    assert answer.status == 200
    assert answer.json == json.loads(json.dumps(predict({**GRAPH_JOB, "model": model}).to_dict()))
    assert guarded.predict(job=GRAPH_JOB).json == answer.json


def test_options_go_over_a_job(guarded: Server) -> None:
    answer = guarded.predict(job=GRAPH_JOB, options={"device": "h100"}, predictor="roofline")
    assert answer.json["job"]["cluster"]["device"] == "h100-sxm-80gb"
    assert answer.json["predictor"] == "roofline"


def test_a_job_without_a_cluster_gets_that_of_the_server(guarded: Server) -> None:
    job = {"model": LINEAR, "training": {"global_batch": 64}}
    answer = guarded.predict(job=job)
    assert answer.status == 200, answer.body
    assert answer.json["job"]["cluster"]["device"] == "cpu"


def test_a_model_is_traced_by_a_worker(guarded: Server) -> None:
    answer = guarded.predict(model="nets.py:linear", options={"batch": 8, "device": "a100"})
    assert answer.status == 200
    assert answer.json["quantities"]["step_time_s"]["median"] > 0


def test_the_catalogue_is_told(guarded: Server) -> None:
    assert "h100-sxm-80gb" in guarded.ask("GET", "/v1/catalog").json["devices"]
    assert guarded.ask("GET", "/v1/catalog/devices/h100").json["name"] == "h100-sxm-80gb"
    assert guarded.ask("GET", "/v1/catalog/nodes").json["dgx-h100"]["name"] == "dgx-h100"
    answer = guarded.ask("GET", "/v1/catalog/planets")
    assert answer.status == 404
    assert answer.json["error"].startswith("kind: 'planets' is not one of devices, hosts")


def test_the_interface_describes_itself(guarded: Server) -> None:
    document = guarded.ask("GET", "/openapi.json").json
    assert {"/v1/predict", "/v1/plan", "/v1/schedule", "/v1/learn", "/v1/runs", "/v1/jobs/{id}"} <= set(
        document["paths"]
    )
    schema = document["paths"]["/v1/predict"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(schema["properties"]) == {"model", "job", "config", "options", "predictor"}
    assert guarded.ask("GET", "/docs").status == 404


# What takes long


def test_a_simulation_is_a_job_with_a_result(plain: Server) -> None:
    question = {
        "cluster": "2x4xv100",
        "generate": "jobs=20,gap=10s,median=1min",
        "policies": ["fifo", "srtf"],
    }
    begun = plain.ask("POST", "/v1/schedule", question)
    assert begun.status == 202
    assert begun.headers["location"] == f"/v1/jobs/{begun.json['id']}"
    ended = plain.ended_job(begun.json["id"])
    assert ended["state"] == "done", ended
    assert [one["policy"] for one in ended["result"]["results"]] == ["fifo", "srtf"]
    assert begun.json["id"] in [one["id"] for one in plain.ask("GET", "/v1/jobs").json["jobs"]]


def test_a_plan_is_found_and_another_cancelled(guarded: Server) -> None:
    options = {"device": "a100", "batch": 8}
    question = {"model": "nets.py:linear", "options": options, "predictor": "roofline"}
    begun = guarded.ask("POST", "/v1/plan", question, headers=AUTHORISED).json
    endless = {"model": "nets.py:endless", "options": {"device": "a100"}}
    other = guarded.ask("POST", "/v1/plan", endless, headers=AUTHORISED).json
    ended = guarded.ended_job(begun["id"])
    assert ended["state"] == "done", ended
    assert ended["result"]["plans"][0]["devices"] == 1
    wrong = guarded.ask("POST", "/v1/plan", {"job": {**GRAPH_JOB, "plan": {"data": 3}}}, headers=AUTHORISED)
    assert wrong.json["error"].startswith("plan: data 3 x")
    assert guarded.ask("DELETE", f"/v1/jobs/{other['id']}").status == 401
    answer = guarded.ask("DELETE", f"/v1/jobs/{other['id']}", headers=AUTHORISED)
    assert answer.json["state"] == "cancelled"
    assert guarded.ask("GET", "/v1/jobs/abc").status == 404


def test_a_predictor_learns_from_the_runs_and_goes_by_its_name(plain: Server) -> None:
    runs = [run.to_dict() for run in ernest_runs((1.0, 0.1, 0.1, 0.1), "resnet34")]
    assert plain.add(*runs).json == {"new": len(runs), "known": 0}
    question = {"name": "ours", "predictor": "ernest", "model": "resnet34"}
    ended = plain.ended_job(plain.ask("POST", "/v1/learn", question).json["id"])
    assert ended["state"] == "done", ended
    assert ended["result"]["runs"] == len(runs)
    assert "ours" in [one["name"] for one in plain.ask("GET", "/v1/predictors").json["predictors"]]
    answer = plain.predict(job=runs[0]["job"], predictor="ours")
    assert answer.json["predictor"] == "ernest"
    measured = runs[0]["measured"]["step_time_s"]
    assert answer.json["quantities"]["step_time_s"]["median"] == pytest.approx(measured, rel=0.2)
    refused = plain.ask("POST", "/v1/learn", {"name": "deletepop"}).json["error"]
    assert refused == "name: 'deletepop' is taken by a predictor that comes with foretrain"


# Runs


def test_runs_are_kept_once_and_found_by_pages(guarded: Server) -> None:
    assert guarded.add(run_of(1), run_of(2), run_of(3), **AUTHORISED).json == {"new": 3, "known": 0}
    assert guarded.add(run_of(3), run_of(4), **AUTHORISED).json == {"new": 1, "known": 1}
    page = guarded.ask("GET", "/v1/runs?limit=3&model=resnet*&device=a100-sxm-80gb").json
    assert [one["run"]["provenance"]["line"] for one in page["runs"]] == [1, 2, 3]
    assert page["total"] == 4
    rest = guarded.ask("GET", f"/v1/runs?limit=3&after={page['next']}").json
    assert [one["run"]["provenance"]["line"] for one in rest["runs"]] == [4]
    assert rest["next"] is None
    one = page["runs"][0]
    assert guarded.ask("GET", f"/v1/runs/{one['id'][:12]}").json["run"] == one["run"]
    assert guarded.ask("GET", "/v1/runs/abcdef").status == 404
    assert guarded.ask("GET", "/v1/runs?limit=x").json["error"] == "limit: 'x' is not a whole number"


def test_of_runs_that_are_wrong_none_is_kept(guarded: Server) -> None:
    before = guarded.ask("GET", "/v1/runs").json["total"]
    wrong = {**run_of(10), "measured": {"step_time_s": -1}}
    answer = guarded.add(run_of(9), wrong, **AUTHORISED)
    assert answer.status == 400
    assert answer.json["error"].startswith("line 2: measured.step_time_s: -1")
    assert guarded.ask("GET", "/v1/runs").json["total"] == before


def test_forecasts_are_compared_with_uploaded_runs(guarded: Server, folder: Path) -> None:
    model = {**GRAPH_JOB["model"], "name": str(folder / "product.json.zst")}
    run = {"job": {**GRAPH_JOB, "model": model}, "measured": {"step_time_s": 0.001}, "provenance": {}}
    assert guarded.add(run, **AUTHORISED).status == 201
    line = 'foretrain_forecast_ratio_count{quantity="step_time_s",predictor="deletepop"}'
    until_s = time.monotonic() + 300
    while line not in (text := guarded.ask("GET", "/metrics").body.decode()):
        assert time.monotonic() < until_s, text
        time.sleep(0.1)


# Whom it refuses


def test_writes_need_the_token(guarded: Server) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}):
        answer = guarded.add(run_of(99), **headers)
        assert answer.status == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json["error"].startswith("authorization: ")
    for path in ("/v1/plan", "/v1/schedule", "/v1/learn"):
        assert guarded.ask("POST", path, {}).status == 401


def test_files_of_the_server_are_refused(plain: Server, folder: Path) -> None:
    for model in (f"{folder}/nets.py:linear", "/etc/passwd", "../x.onnx", "~/net.py", "run.yaml", "job.toml"):
        answer = plain.predict(model=model)
        assert answer.status == 400
        assert answer.json["error"].startswith("model: ")
        assert "--allow" in answer.json["error"]
    job = {**GRAPH_JOB, "model": {"source": "python", "name": "net.py:f"}}
    assert plain.predict(job=job).json["error"].startswith("model.name: 'net.py:f' is a file")
    job = {**GRAPH_JOB, "cluster": {"device": "h100", "host": "/etc/hosts.json"}}
    assert plain.predict(job=job).status == 400


def test_files_outside_of_the_folder_are_refused(guarded: Server, tmp_path: Path, folder: Path) -> None:
    (tmp_path / "net.py").write_text("")
    (folder / "link.py").symlink_to(tmp_path / "net.py")
    for name in (str(tmp_path / "net.py"), "../net.py", "link.py", f"{folder}/../net.py:f"):
        answer = guarded.predict(model=f"{name}:f" if ":" not in name else name)
        assert answer.status == 400
        assert "lies in no folder that is allowed" in answer.json["error"]


def test_code_of_others_is_never_run(plain: Server) -> None:
    config = {"model_type": "llama", "trust_remote_code": True}
    job = {**GRAPH_JOB, "model": {"source": "transformers", "config": config}}
    assert plain.predict(job=job).json["error"].startswith("model.config.trust_remote_code: True is never")
    job["model"] = {"source": "timm", "name": "resnet18", "args": {"checkpoint_path": "weights"}}
    assert (
        plain.predict(job=job).json["error"].startswith("model.args.checkpoint_path: not allowed over HTTP")
    )


def test_pages_of_other_sites_are_refused(plain: Server, guarded: Server) -> None:
    assert plain.ask("GET", "/health", headers={"host": "evil.example"}).status == 403
    assert plain.ask("GET", "/health", headers={"host": f"localhost:{plain.port}"}).status == 200
    assert plain.ask("GET", "/health", headers={"origin": "http://evil.example"}).status == 403
    assert (
        guarded.ask("POST", "/v1/runs", b"{}", headers={**AUTHORISED, "content-type": "text/plain"}).status
        == 415
    )
    for path in ("/health", "/nothing", "/v1/jobs/x"):
        headers = plain.ask("GET", path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert headers["x-content-type-options"] == "nosniff"


def test_what_is_too_large_is_refused(guarded: Server) -> None:
    answer = guarded.predict(model="x" * 2**17)
    assert (answer.status, answer.json["error"][:5]) == (413, "body:")
    lines = [run_of(i, note="x" * 2000) for i in range(600)]
    assert guarded.add(*lines, **AUTHORISED).status == 413


def test_it_does_not_start_as_it_should_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORETRAIN_TOKEN", raising=False)
    db = str(tmp_path / "runs.db")
    assert "host: '0.0.0.0' can be reached from other machines" in fails(
        "serve", "--host", "0.0.0.0", "--db", db
    )
    assert "token: 3 characters" in fails("serve", "--token", "abc", "--db", db)
    assert "db: 'runs.txt' is not a database" in fails("serve", "--db", "runs.txt")
    assert "allow: '/nowhere' is not a folder" in fails("serve", "--allow", "/nowhere", "--db", db)


# What does not end it


def test_a_capture_that_does_not_end_is_ended(tmp_path: Path, folder: Path, cache: Path) -> None:
    limits = ("--allow", str(folder), "--processes", "1", "--capture-seconds", "4")
    with serving(str(tmp_path / "runs.db"), *limits) as server:
        answer = server.predict(model="nets.py:endless", options={"device": "a100"})
        assert answer.status == 422
        assert answer.json["error"] == "model: took longer than 4 s, and was ended"
        assert server.predict(job=GRAPH_JOB).status == 200


def test_a_capture_that_eats_memory_is_ended(guarded: Server) -> None:
    answer = guarded.predict(model="nets.py:greedy", options={"device": "a100"})
    assert answer.status == 422
    assert answer.json["error"] == "model: needed more than 2 GiB of memory, and was ended"
    assert guarded.predict(model="nets.py:linear", options={"batch": 8, "device": "a100"}).status == 200


def test_a_model_that_fails_is_told_in_one_line(guarded: Server) -> None:
    answer = guarded.predict(model="nets.py:failing", options={"device": "a100"})
    assert answer.status == 422
    assert "Traceback" not in answer.json["error"]
    assert "\n" not in answer.json["error"]


def test_no_malformed_body_is_an_error_of_the_server(guarded: Server) -> None:
    draw = random.Random(19)
    for _ in range(250):
        body, path = (
            malformed(draw),
            draw.choice(["/v1/predict"] * 3 + ["/v1/learn", "/v1/schedule", "/v1/runs"]),
        )
        answer = guarded.ask("POST", path, body, headers=AUTHORISED)
        assert answer.status < 500, (path, body, answer.body)
        if answer.status >= 400:
            assert set(answer.json) == {"error"}
            assert "\n" not in answer.json["error"]
