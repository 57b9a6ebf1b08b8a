"""Tests the client, and what uses it: predict --server, and the recorder that posts its runs."""

from __future__ import annotations

import http.server
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import foretrain
from commands import fails, ok
from foretrain.callbacks import Recorder
from foretrain.client import Client, ServerError
from foretrain.errors import InputError
from foretrain.job import Job
from foretrain.run import Run, read_runs
from made_up import one_product
from servers import Server, run_of, serving

TOKEN = "a-token-of-the-tests"
AWAY = "http://127.0.0.1:9"
"""Where nobody listens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    one_product().save(folder / "product.json.zst")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Server]:
    db = str(tmp_path_factory.mktemp("db") / "runs.db")
    words = ("--processes", "1", "--allow", str(folder), "--token", TOKEN)
    with serving(db, *words) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Client:
    return Client(server.url, token=TOKEN)


@pytest.fixture
def job(folder: Path) -> Job:
    tables = {
        "model": {"source": "graph", "name": str(folder / "product.json.zst")},
        "training": {"global_batch": 4},
        "cluster": {"device": "a100-sxm-80gb"},
    }
    return Job.read(tables)


def test_a_forecast_is_that_of_this_machine(client: Client, job: Job) -> None:
    served, own = client.predict(job), foretrain.predict(job)
    assert served.step_time_s == own.step_time_s
    assert served.quantities.keys() == own.quantities.keys()
    assert served.fits == own.fits
    assert client.predict(job.to_dict(), device="h100").job["cluster"]["device"] == "h100-sxm-80gb"


def test_a_job_file_is_read_here(client: Client, job: Job, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps(job.to_dict()))
    assert client.predict(tmp_path / "job.json").step_time_s == client.predict(job).step_time_s


def test_what_takes_long_is_waited_for(client: Client) -> None:
    states = []
    begun = client.schedule("1x8xv100", generate="jobs=5", policies=["fifo"])
    result = client.wait(begun, timeout_s=120, listener=lambda job: states.append(job.state))
    assert result["results"][0]["policy"] == "fifo"
    assert states[-1] == "done"
    assert begun.id in [one.id for one in client.jobs()]
    with pytest.raises(ServerError, match="trace: give the text of a trace, or generate"):
        client.schedule("1x4xv100")


def test_runs_go_there_and_come_back(client: Client) -> None:
    runs = [Run.read(run_of(i)) for i in range(3)]
    added = client.add_runs(runs)
    assert (added.new, added.known) == (3, 0)
    assert client.add_runs([run_of(2)]).known == 1
    assert [run.measured for run in client.runs(model="resnet18", quantity="step_time_s")] == [
        run.measured for run in runs
    ]
    assert list(client.runs(device="h100")) == []


def test_what_a_server_refuses_is_one_line_with_its_status(client: Client, server: Server) -> None:
    with pytest.raises(ServerError, match=r"model: '/etc/x\.py' is a file") as refused:
        client.predict("/etc/x.py")
    assert refused.value.status == 400
    with pytest.raises(ServerError, match="authorization: this needs the token") as refused:
        Client(server.url, token="wrong").add_runs([run_of(0)])
    assert refused.value.status == 401


def test_a_server_that_is_away_is_one_line() -> None:
    with pytest.raises(ServerError, match=r"^http://127.0.0.1:9: does not answer \(.*refused\)$") as refused:
        Client(AWAY).health()
    assert refused.value.status is None
    with pytest.raises(InputError, match="server: 'ftp://x' is not a URL such as"):
        Client("ftp://x")


def test_a_redirect_is_not_followed() -> None:
    class Elsewhere(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("location", AWAY)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Elsewhere) as other:
        thread = threading.Thread(target=other.handle_request)
        thread.start()
        with pytest.raises(ServerError, match="answered 302"):
            Client(f"http://127.0.0.1:{other.server_port}", token=TOKEN).health()
        thread.join()


def test_predict_asks_a_server(server: Server, job: Job, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps(job.to_dict()))
    words = ("predict", str(tmp_path / "job.json"), "--server", server.url)
    document = json.loads(ok(*words, "--json"))
    assert document["quantities"]["step_time_s"]["median"] == foretrain.predict(job).step_time_s.median
    shown = ok(*words)
    assert "step time" in shown
    assert "80 % interval" in shown
    assert "does not answer" in fails("predict", str(tmp_path / "job.json"), "--server", AWAY)


def recorded(job: Job, folder: Path, server: str | None = None) -> Run | None:
    recorder = Recorder(
        folder / "runs.jsonl", job=job, predictor=None, warm_up=0, show=lambda _: None, server=server
    )
    recorder.begin()
    recorder.steps(1, time_s=0.5)
    return recorder.end()


def test_a_recorded_run_is_posted(
    client: Client, server: Server, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETRAIN_TOKEN", TOKEN)
    monkeypatch.setenv("FORETRAIN_SERVER", server.url)
    run = recorded(job, tmp_path)
    assert run is not None
    assert [one.measured for one in client.runs(source="foretrain callback")] == [run.measured]
    [(_, kept)] = read_runs(tmp_path / "runs.jsonl")
    assert kept.measured == run.measured


def test_a_run_is_kept_here_when_the_server_is_away(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="foretrain.callbacks"):
        run = recorded(job, tmp_path, AWAY)
    assert run is not None
    [(_, kept)] = read_runs(tmp_path / "runs.jsonl")
    assert kept.measured == run.measured
    [line] = [one for one in caplog.messages if "was not posted" in one]
    assert line.endswith(f"it is kept in {tmp_path / 'runs.jsonl'}")
