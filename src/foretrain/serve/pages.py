"""Serves the page and its scripts out of the package, and no other file of the machine."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from foretrain.serve.pool import TaskRefused
from foretrain.web.page import SCRIPTS, STYLES, static

PAGE = "served.html"
_OWN = (
    "served.css", "served_api.js", "served_source.js", "served_model.js", "served_compare.js",
    "served_plan.js", "served_schedule.js", "served_leaderboard.js", "served_runs.js", "served.js",
)  # fmt: skip
_FILES = frozenset((*STYLES, *SCRIPTS, *_OWN))
_KINDS = {"css": "text/css", "js": "text/javascript"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Of the page: it runs its own scripts, and talks to its own server alone."""


def add_page(app: FastAPI) -> None:
    """The page at ``/``, for people: no part of the interface that programs use."""

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return _text(static(PAGE), "text/html")

    @app.get("/static/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in _FILES:
            raise TaskRefused(f"path: '/static/{name[:80]}': no such path", 404)
        return _text(static(name), _KINDS[name.rpartition(".")[2]])

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        return Response(status_code=204)


def _text(content: str, kind: str) -> Response:
    headers = {"content-security-policy": POLICY, "cache-control": "no-cache"}
    return Response(content, media_type=kind, headers=headers)
