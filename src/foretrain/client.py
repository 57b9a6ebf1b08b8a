"""Asks a server of foretrain, with the standard library alone."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final
from urllib.parse import quote, urlencode, urlsplit

from foretrain.errors import ForetrainError, InputError, invalid
from foretrain.estimate import Estimate
from foretrain.job import Job
from foretrain.options import plain
from foretrain.run import Run

TOKEN = "FORETRAIN_TOKEN"
"""The variable of the environment with the token of a server."""
_PAGE = 500
_POLL_S = 0.2
_LONGEST_POLL_S = 2.0
_AT_ONCE_BYTES = 4 * 2**20
"""Of runs in one request."""
Asked = str | os.PathLike[str] | Job | Run | Mapping[str, Any]
"""A model's name, a job file, a job, a run's job, the tables of a job, or the contents of a config.json."""
Question = Asked | tuple[Asked, Mapping[str, Any]]
State = Literal["waiting", "running", "done", "failed", "cancelled"]


class ServerError(ForetrainError):
    """A server that cannot be reached, or refuses; ``status`` is that of HTTP, None where there is no
    answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedForecast:
    """A forecast as a server gave it."""

    job: Mapping[str, Any]
    """The tables of the job that was forecast."""
    quantities: Mapping[str, Estimate]
    fits: bool | None
    assumptions: tuple[str, ...]
    document: Mapping[str, Any]
    """All of the answer: what ``foretrain predict --json`` prints."""

    def __getitem__(self, quantity: str) -> Estimate:
        return self.quantities[quantity]

    @property
    def step_time_s(self) -> Estimate:
        return self.quantities["step_time_s"]

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> ServedForecast:
        return cls(
            job=document["job"],
            quantities={name: Estimate(**one) for name, one in document["quantities"].items()},
            fits=document["fits"],
            assumptions=tuple(document["assumptions"]),
            document=document,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedExplanation:
    """Why two forecasts differ, as a server gave it."""

    summary: tuple[str, ...]
    """In sentences, the first for those who read one."""
    fields: Mapping[str, Any]
    """Of the jobs, those that differ."""
    a: ServedForecast
    b: ServedForecast
    document: Mapping[str, Any]

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> ServedExplanation:
        a, b = (ServedForecast.read(document[name]) for name in ("a", "b"))
        return cls(summary=tuple(document["summary"]), fields=document["fields"], a=a, b=b, document=document)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedJob:
    """A plan, a simulation or a calibration on a server, as it stood when it was asked for."""

    id: str
    kind: str
    state: State
    progress: Mapping[str, Any]
    error: str | None
    result: Mapping[str, Any] | None

    @property
    def is_over(self) -> bool:
        return self.state in ("done", "failed", "cancelled")

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> ServedJob:
        names = ("id", "kind", "state", "progress", "error")
        return cls(**{name: document[name] for name in names}, result=document.get("result"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploaded:
    """Says how many runs were new to a server, and how many it had."""

    new: int
    known: int


@final
class Client:
    """A server by its URL; ``token`` (or $FORETRAIN_TOKEN) is what it asks of those who write.

    >>> client = Client("http://127.0.0.1:8760")  # doctest: +SKIP
    >>> client.predict("resnet50", device="h100", batch=256).step_time_s.median  # doctest: +SKIP
    0.0898
    """

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = 300.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise invalid("server", url, "a URL such as http://127.0.0.1:8760")
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self._token = token or os.environ.get(TOKEN) or None
        handlers: list[urllib.request.BaseHandler] = [_NoRedirects()]
        if parts.hostname == "localhost" or parts.hostname.startswith("127."):
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    def __repr__(self) -> str:
        return f"<Client of {self.url}>"

    # Forecasts

    def predict(
        self,
        model: str | os.PathLike[str] | Job | Run | Mapping[str, Any],
        *,
        predictor: str | None = None,
        **options: Any,
    ) -> ServedForecast:
        """Forecast a model by its name, a job, a run's job, the tables of a job or a job file, with fields
        over it."""
        asked = {**_target(model, options), **({} if predictor is None else {"predictor": predictor})}
        return ServedForecast.read(self._post("/v1/predict", asked))

    def record(
        self,
        model: str | os.PathLike[str] | Job | Run | Mapping[str, Any],
        *,
        predictor: str | None = None,
        **options: Any,
    ) -> Mapping[str, Any]:
        """Ask for a forecast with what a page draws of it: parts and timeline of the step, and how its time
        comes about."""
        asked = {**_target(model, options), **({} if predictor is None else {"predictor": predictor})}
        return self._post("/v1/record", asked)

    def explain(
        self, a: Question, b: Question, *, names: tuple[str, str] = ("A", "B"), predictor: str | None = None
    ) -> ServedExplanation:
        """Why two forecasts differ; each is what ``predict`` takes, with options as a pair of both.

        >>> client.explain("resnet50", ("resnet50", {"device": "a100"})).summary  # doctest: +SKIP
        """
        asked = {"a": _question(a), "b": _question(b), "names": list(names)}
        given = {} if predictor is None else {"predictor": predictor}
        return ServedExplanation.read(self._post("/v1/explain", {**asked, **given}))

    # What takes long

    def leaderboard(self, **question: Any) -> ServedJob:
        """Begin to compare ``predictors`` with the runs that the server keeps (of a ``model``, a ``device``,
        ...)."""
        return ServedJob.read(self._post("/v1/leaderboard", question))

    def plan(
        self, model: str | os.PathLike[str] | Job | Run | Mapping[str, Any], *,
        options: Mapping[str, Any] | None = None, **question: Any,
    ) -> ServedJob:  # fmt: skip
        """Begin a search for plans: ``kinds``, ``max_devices``, ``deadline``, ... as ``foretrain.plan`` takes
        them, with fields of the job in ``options``."""
        return ServedJob.read(self._post("/v1/plan", {**_target(model, options or {}), **question}))

    def schedule(self, cluster: str, **question: Any) -> ServedJob:
        """Begin simulations: ``policies``, and ``generate`` or the text of a ``trace``."""
        return ServedJob.read(self._post("/v1/schedule", {"cluster": cluster, **question}))

    def learn(self, name: str, **question: Any) -> ServedJob:
        """Begin to calibrate a ``predictor`` to the runs that the server keeps (of a ``model``, a ``device``,
        ...); it goes by ``name`` then."""
        return ServedJob.read(self._post("/v1/learn", {"name": name, **question}))

    def job(self, id: str) -> ServedJob:
        return ServedJob.read(self._ask("GET", f"/v1/jobs/{quote(id, safe='')}"))

    def jobs(self) -> list[ServedJob]:
        return [ServedJob.read(one) for one in self._ask("GET", "/v1/jobs")["jobs"]]

    def cancel(self, id: str) -> ServedJob:
        return ServedJob.read(self._ask("DELETE", f"/v1/jobs/{quote(id, safe='')}"))

    def wait(
        self,
        job: ServedJob,
        *,
        timeout_s: float | None = None,
        listener: Callable[[ServedJob], None] = lambda job: None,
    ) -> Mapping[str, Any]:
        """The result, once it is there; ``listener`` hears how far it is."""
        began_s, pause_s = time.monotonic(), _POLL_S
        while not job.is_over:
            if timeout_s is not None and time.monotonic() - began_s > timeout_s:
                raise ServerError(f"{self.url}: job {job.id} is not over after {timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(_LONGEST_POLL_S, 1.2 * pause_s)
            job = self.job(job.id)
            listener(job)
        if job.state == "done" and job.result is None:
            job = self.job(job.id)
        if job.result is None:
            raise ServerError(job.error or f"{self.url}: job {job.id} was {job.state}")
        return job.result

    # Runs

    def add_runs(self, runs: Iterable[Run | Mapping[str, Any]]) -> Uploaded:
        """Give runs to the server; those that are counted are on its disk."""
        new = known = 0
        for part in _parts(runs):
            added = self._send("POST", "/v1/runs", part, "application/x-ndjson")
            new, known = new + added["new"], known + added["known"]
        return Uploaded(new=new, known=known)

    def runs(
        self, *, model: str | None = None, device: str | None = None, source: str | None = None,
        label: str | None = None, quantity: str | None = None,
    ) -> Iterator[Run]:  # fmt: skip
        """The runs that the server keeps, page by page."""
        given = {"model": model, "device": device, "source": source, "label": label, "quantity": quantity}
        query = {name: value for name, value in given.items() if value is not None}
        after: int | None = 0
        while after is not None:
            page = self._ask("GET", f"/v1/runs?{urlencode({**query, 'after': after, 'limit': _PAGE})}")
            yield from (Run.read(one["run"]) for one in page["runs"])
            after = page["next"]

    # What is known

    def catalog(self, kind: str | None = None, name: str | None = None) -> Mapping[str, Any]:
        path = "/".join(["/v1/catalog", *(quote(one, safe="") for one in (kind, name) if one is not None)])
        return self._ask("GET", path)

    def models(self, like: str = "", *, limit: int = 50) -> list[str]:
        """Names of models that have this part."""
        answer = self._ask("GET", f"/v1/models?{urlencode({'like': like, 'limit': limit})}")
        return [one["name"] for one in answer["models"]]

    def predictors(self) -> list[Mapping[str, Any]]:
        return list(self._ask("GET", "/v1/predictors")["predictors"])

    def health(self) -> Mapping[str, Any]:
        return self._ask("GET", "/health")

    # HTTP

    def _post(self, path: str, document: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            content = json.dumps(document, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise InputError(f"request: cannot be written as JSON ({error})") from error
        return self._send("POST", path, content, "application/json")

    def _ask(self, method: str, path: str) -> Mapping[str, Any]:
        return self._send(method, path, None, "application/json")

    def _send(self, method: str, path: str, content: bytes | None, kind: str) -> Mapping[str, Any]:
        headers = {"Accept": "application/json", **({} if content is None else {"Content-Type": kind})}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(self.url + path, data=content, headers=headers, method=method)
        try:
            with self._opener.open(request, timeout=self.timeout_s) as answer:
                return _document(answer.read(), self.url)
        except urllib.error.HTTPError as error:
            with error:
                raise ServerError(f"{self.url}: {_reason(error)}", error.code) from error
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise ServerError(f"{self.url}: does not answer ({why})") from error


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: nothing, and no token, goes to another place than it was meant for."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _document(content: bytes, url: str) -> Mapping[str, Any]:
    try:
        document = json.loads(content)
    except ValueError as error:
        raise ServerError(f"{url}: its answer is not JSON; is it a server of foretrain?") from error
    if not isinstance(document, dict):
        raise ServerError(f"{url}: its answer is not an object; is it a server of foretrain?")
    return document


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read(65536))["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"answered {error.code} {error.reason}"


def _question(asked: Any) -> dict[str, Any]:
    """Write one of two that are compared."""
    model, options = asked if isinstance(asked, tuple) else (asked, {})
    return _target(model, options)


def _target(model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """A request's job or model, and the options that go over it."""
    given = {"options": plain(options)} if options else {}
    if isinstance(model, Run):
        model = model.job
    if isinstance(model, Job):
        return {"job": model.to_dict(), **given}
    if isinstance(model, Mapping) and "model_type" in model and "model" not in model:
        return {"config": dict(model), **given}
    if isinstance(model, Mapping):
        return {"job": dict(model.get("job", model)), **given}
    path = Path(model)
    if path.suffix in (".toml", ".json"):
        return {"job": Job.load(path).to_dict(), **given}
    return {"model": os.fspath(model), **given}


def _parts(runs: Iterable[Run | Mapping[str, Any]]) -> Iterator[bytes]:
    """Lines of runs, in pieces that a server takes at once."""
    lines: list[bytes] = []
    size = 0
    for run in runs:
        try:
            document = run.to_dict() if isinstance(run, Run) else run
            line = json.dumps(document, allow_nan=False).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise InputError(f"run: cannot be written as JSON ({error})") from error
        if lines and size + len(line) > _AT_ONCE_BYTES:
            yield b"".join(lines)
            lines, size = [], 0
        lines.append(line)
        size += len(line)
    if lines:
        yield b"".join(lines)
