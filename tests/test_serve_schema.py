"""Random requests that the server's own OpenAPI document describes, and some that it does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from servers import Server, serving

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

_EXAMPLES = 12
"""Of each operation; enough for the odd values that strategies begin with."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("schema")
    words = ("--processes", "1", "--forecast-seconds", "5", "--capture-seconds", "5", "--job-seconds", "5")
    with serving(str(folder / "runs.db"), *words) as started:
        yield started


@schemathesis.serializer("application/x-ndjson")  # type: ignore[untyped-decorator]
def _lines(_: Any, value: Any) -> bytes:
    return str(value).encode(errors="surrogatepass")


def _operations(schema: Any) -> list[Any]:
    return [found.ok() for found in schema.get_all_operations()]


def test_the_document_has_every_route(server: Server) -> None:
    paths = set(server.ask("GET", "/openapi.json").json["paths"])
    assert {"/v1/predict", "/v1/record", "/v1/explain", "/v1/leaderboard", "/v1/models", "/v1/runs"} <= paths
    assert not {"/", "/static/{name}"} & paths


def test_answers_are_those_that_the_document_names(server: Server) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for operation in _operations(schema):
        _ask(operation)
    assert server.ask("GET", "/health").status == 200


def _ask(operation: Any) -> None:
    documented = operation.definition.raw["responses"]

    @given(case=operation.as_strategy())
    @settings(
        max_examples=_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def asked(case: Any) -> None:
        answer = case.call()
        assert answer.status_code < 500 or answer.status_code in (501, 503), answer.text
        assert str(answer.status_code) in documented, (case.path, answer.status_code, answer.text)
        if answer.status_code >= 400:
            error = answer.json()["error"]
            assert error
            assert "\n" not in error
            assert "Traceback" not in error

    asked()
