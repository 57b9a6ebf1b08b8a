"""Defines the REST interface of a server: its routes, and one way to say what is wrong with a request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException

from foretrain import __version__
from foretrain.catalog_entries import KINDS, entries
from foretrain.errors import ForetrainError, InputError, invalid, unknown
from foretrain.files import parse_json
from foretrain.measure.store import NoSuchRun, StoreError
from foretrain.schema import read
from foretrain.serve.errands import Errand
from foretrain.serve.guard import App, Guard
from foretrain.serve.models import matching_models
from foretrain.serve.pages import add_page
from foretrain.serve.pool import Busy, TaskRefused
from foretrain.serve.requests import (
    ExplainRequest,
    LeaderboardRequest,
    LearnRequest,
    ModelsQuery,
    PlanRequest,
    PredictRequest,
    RunsQuery,
    ScheduleRequest,
)
from foretrain.serve.safety import shows_token
from foretrain.serve.service import Service
from foretrain.serve.worker import status_of

log = logging.getLogger("foretrain.serve")

Query = TypeVar("Query", RunsQuery, ModelsQuery)
_RETRY_S = 1
_JSON = "application/json"
_LINES = ("application/x-ndjson", "application/jsonl", "application/json")
_NUMBERS = ("after", "limit")
"""Of a query, where everything is text."""


_ERROR = {
    "type": "object",
    "properties": {"error": {"type": "string", "description": "What is wrong, in one line."}},
    "required": ["error"],
}
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"description": words, "content": {_JSON: {"schema": _ERROR}}}
    for status, words in {
        400: "It cannot be read.",
        401: "The token of the server is missing.",
        403: "It comes from a page of another site.",
        404: "There is no such thing.",
        405: "Not with this method.",
        408: "The body did not come in time.",
        413: "The body is too large.",
        415: "The body is of another kind.",
        422: "It cannot be forecast, or went beyond a limit.",
        501: "A library that it needs is not installed on the server.",
        503: "The server is busy, or its database does not answer.",
    }.items()
}
"""What any request may be answered with."""


def make_app(service: Service) -> App:
    """The application that an ASGI server runs."""
    return Guard(
        _routes(service),
        metrics=service.metrics,
        only_loopback=service.settings.is_loopback and service.settings.token is None,
    )


def _routes(service: Service) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="foretrain",
        version=__version__,
        summary="Forecasts time, memory and cost of deep-learning training before it runs.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses=_REFUSALS,
    )
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ForetrainError, _error)
    _add_forecasts(app, service)
    _add_errands(app, service)
    _add_runs(app, service)
    _add_knowledge(app, service)
    if service.settings.page:
        add_page(app)
    return app


def _add_forecasts(app: FastAPI, service: Service) -> None:
    @app.post("/v1/predict", openapi_extra=_takes(PredictRequest))
    async def predict(request: Request) -> Response:
        """One forecast, as ``foretrain predict --json`` prints it."""
        return Response(await service.predict(await _json_of(request, service)), media_type=_JSON)

    @app.post("/v1/record", openapi_extra=_takes(PredictRequest))
    async def record(request: Request) -> Response:
        """One forecast as pages show it: with the parts and the timeline of its step, its memory over time,
        and how its time comes about."""
        return Response(await service.record(await _json_of(request, service)), media_type=_JSON)

    @app.post("/v1/explain", openapi_extra=_takes(ExplainRequest))
    async def explain(request: Request) -> Response:
        """Two forecasts and why they differ: time by cause, memory by category, in a few sentences."""
        return Response(await service.explain(await _json_of(request, service)), media_type=_JSON)


def _add_errands(app: FastAPI, service: Service) -> None:
    @app.post("/v1/plan", status_code=202, openapi_extra=_takes(PlanRequest))
    async def plan(request: Request) -> Response:
        """Begin a search for the best plans."""
        _check_token(request, service)
        return _begun(await service.plan(await _json_of(request, service)))

    @app.post("/v1/schedule", status_code=202, openapi_extra=_takes(ScheduleRequest))
    async def schedule(request: Request) -> Response:
        """Begin simulations of a cluster."""
        _check_token(request, service)
        with service.uploading():
            return _begun(await service.schedule(await _json_of(request, service, upload=True)))

    @app.post("/v1/learn", status_code=202, openapi_extra=_takes(LearnRequest))
    async def learn(request: Request) -> Response:
        """Begin to calibrate a predictor to the runs that are kept."""
        _check_token(request, service)
        return _begun(await service.learn(await _json_of(request, service)))

    @app.post("/v1/leaderboard", status_code=202, openapi_extra=_takes(LeaderboardRequest))
    async def leaderboard(request: Request) -> Response:
        """Begin to compare predictors with the runs that are kept."""
        _check_token(request, service)
        return _begun(await service.leaderboard(await _json_of(request, service)))

    @app.get("/v1/jobs")
    async def jobs() -> Response:
        """All that were begun and are remembered, without their results."""
        return _answer({"jobs": [errand.to_dict(with_result=False) for errand in service.errands]})

    @app.get("/v1/jobs/{id}")
    async def job(id: str) -> Response:
        """How far one is, and its result once it is done."""
        return _answer(_errand_of(service, id).to_dict())

    @app.delete("/v1/jobs/{id}")
    async def cancel(request: Request, id: str) -> Response:
        """End one, with the process that works on it."""
        _check_token(request, service)
        errand = _errand_of(service, id)
        await service.errands.cancel(errand)
        return _answer(errand.to_dict(with_result=False))


def _add_runs(app: FastAPI, service: Service) -> None:
    @app.post("/v1/runs", status_code=201, openapi_extra=_takes_lines())
    async def add_runs(request: Request) -> Response:
        """Keep measured runs, one JSON object a line: all of them or none; they are on disk when this is
        answered."""
        _check_token(request, service)
        _check_kind(request, _LINES)
        with service.uploading():
            body = await _body(request, service, service.settings.limits.upload_bytes)
            added = await service.add_runs(body)
        return _answer({"new": added.new, "known": added.known}, status=201)

    @app.get("/v1/runs", openapi_extra=_asks(RunsQuery))
    async def runs(request: Request) -> Response:
        """Runs by page, in the order in which they came."""
        return _answer(await service.runs(_query(request, RunsQuery)))

    @app.get("/v1/runs/{id}")
    async def run(id: str) -> Response:
        """The one run whose id starts like this."""
        try:
            return _answer(await service.run(id))
        except NoSuchRun as error:
            raise TaskRefused(f"id: {id[:80]!r} is the start of no run's id", 404) from error


def _add_knowledge(app: FastAPI, service: Service) -> None:
    @app.get("/v1/catalog")
    async def catalog() -> Response:
        """The names of all that is known."""
        return _answer({kind: list(entries(kind, None, service.catalog)) for kind in KINDS})

    @app.get("/v1/catalog/{kind}")
    async def catalog_of(kind: str) -> Response:
        """Everything of a kind: devices, nodes, hosts, models or prices."""
        return _answer(_known(service, kind))

    @app.get("/v1/catalog/{kind}/{name:path}")
    async def catalog_entry(kind: str, name: str) -> Response:
        """One device, node, host, model or price."""
        return _answer(next(iter(_known(service, kind, name).values())))

    @app.get("/v1/models", openapi_extra=_asks(ModelsQuery))
    async def models(request: Request) -> Response:
        """Models by a part of their names: presets, and those of torchvision and timm."""
        return _answer(matching_models(_query(request, ModelsQuery)))

    @app.get("/v1/predictors")
    async def predictors() -> Response:
        """What can forecast, those that learned from the runs that are kept among them."""
        return _answer({"predictors": await service.predictors.listed()})

    @app.get("/health")
    async def health() -> Response:
        """The server runs."""
        return _answer({"status": "ok", "version": __version__})

    @app.get("/ready")
    async def ready() -> Response:
        """The server can answer: its store does."""
        if await service.is_ready():
            return _answer({"status": "ready"})
        return _refusal(503, "db: the store does not answer")

    @app.get("/metrics")
    async def metrics() -> Response:
        """Requests, latencies and forecasts against measured runs, for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


# Requests


async def _body(request: Request, service: Service, most: int) -> bytes:
    """Read what was sent, up to a size and within a time."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > most:
        raise TaskRefused(f"body: {int(declared):,} bytes; at most {most:,} are taken", 413)
    parts, size = [], 0
    try:
        async with asyncio.timeout(service.settings.limits.body_s):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise TaskRefused(f"body: more than the {most:,} bytes that are taken", 413)
                parts.append(part)
    except TimeoutError as error:
        raise TaskRefused(f"body: not here within {service.settings.limits.body_s:g} s", 408) from error
    return b"".join(parts)


async def _json_of(request: Request, service: Service, *, upload: bool = False) -> Any:
    _check_kind(request, (_JSON,))
    limits = service.settings.limits
    body = await _body(request, service, limits.upload_bytes if upload else limits.body_bytes)
    try:
        value = parse_json(body)
        json.dumps(value, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise InputError(f"body: not JSON ({' '.join(str(error).split())[:200]})") from error
    if not isinstance(value, Mapping):
        raise InputError(f"body: a JSON object is needed, not {type(value).__name__}")
    return value


def _check_kind(request: Request, kinds: tuple[str, ...]) -> None:
    """Pages of other sites cannot send these kinds without asking first."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in kinds:
        raise TaskRefused(f"content-type: {kind[:80]!r} is not {' or '.join(kinds)}", 415)


def _check_token(request: Request, service: Service) -> None:
    token = service.settings.token
    if token is not None and not shows_token(request.headers.get("authorization"), token):
        raise TaskRefused(
            "authorization: this needs the token of the server (Authorization: Bearer TOKEN)", 401
        )


def _query(request: Request, kind: type[Query]) -> Query:
    given: dict[str, Any] = dict(request.query_params)
    for name in _NUMBERS:
        if name in given:
            if not (given[name].isascii() and given[name].isdigit() and len(given[name]) < 20):
                raise invalid(name, given[name][:80], "a whole number")
            given[name] = int(given[name])
    return read(kind, given, "")


def _known(service: Service, kind: str, name: str | None = None) -> dict[str, dict[str, Any]]:
    """Look up what the catalogue has at a path."""
    try:
        if kind not in KINDS:
            raise unknown("kind", kind, KINDS)
        return entries(kind, name, service.catalog)
    except InputError as error:
        raise TaskRefused(str(error), 404) from error


def _errand_of(service: Service, id: str) -> Errand:
    errand = service.errands.get(id)
    if errand is None:
        raise TaskRefused(f"id: {id[:80]!r} is no job that is remembered", 404)
    return errand


# Answers


def _answer(document: Mapping[str, Any], *, status: int = 200) -> Response:
    return Response(json.dumps(document, allow_nan=False), status_code=status, media_type=_JSON)


def _begun(errand: Errand) -> Response:
    answer = _answer(errand.to_dict(with_result=False), status=202)
    answer.headers["location"] = f"/v1/jobs/{errand.id}"
    return answer


def _refusal(status: int, error: str) -> Response:
    answer = _answer({"error": " ".join(error.split())}, status=status)
    if status in (429, 503):
        answer.headers["retry-after"] = str(_RETRY_S)
    if status == 401:
        answer.headers["www-authenticate"] = "Bearer"
    return answer


async def _error(_: Request, error: Exception) -> Response:
    if isinstance(error, TaskRefused):
        return _refusal(error.status, str(error))
    if isinstance(error, Busy):
        return _refusal(503, str(error))
    if isinstance(error, StoreError):
        log.error("%s", error)
        return _refusal(503, "db: the store does not answer, or refuses this; the log of the server has it")
    return _refusal(status_of(error), str(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: "no such path", 405: f"not for {request.method}"}.get(error.status_code, str(error.detail))
    return _refusal(error.status_code, f"path: {request.url.path[:200]!r}: {words}")


# The description of the interface


def _takes(kind: type[Any]) -> dict[str, Any]:
    content = {_JSON: {"schema": TypeAdapter(kind).json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


def _takes_lines() -> dict[str, Any]:
    schema = {"type": "string", "description": "One run as a JSON object a line."}
    return {"requestBody": {"required": True, "content": {_LINES[0]: {"schema": schema}}}}


def _asks(kind: type[Any]) -> dict[str, Any]:
    fields = TypeAdapter(kind).json_schema()["properties"]
    return {
        "parameters": [
            {"name": name, "in": "query", "required": False, "schema": schema}
            for name, schema in fields.items()
        ]
    }
