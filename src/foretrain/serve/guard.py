"""Stands before the routes of a server: refuses requests from elsewhere, counts and times answers, adds
headers, and lets no traceback out."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from foretrain.serve.metrics import ServerMetrics
from foretrain.serve.safety import HEADERS, is_from_elsewhere, names_loopback

log = logging.getLogger("foretrain.serve")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_METHODS = ("GET", "POST", "DELETE")
"""That are counted by name: others are what anybody likes to send."""
_HEADERS = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]


class Guard:
    """An ASGI application around another."""

    def __init__(self, app: App, *, metrics: ServerMetrics, only_loopback: bool) -> None:
        self._app, self._metrics, self._only_loopback = app, metrics, only_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start_s, status = time.perf_counter(), 0

        async def sends(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = list(message.get("headers", ()))
                named = {name for name, _ in own}
                message["headers"] = [*own, *(one for one in _HEADERS if one[0] not in named)]
            await send(message)

        if (refusal := self._refusal(scope)) is not None:
            await _say(sends, 403, refusal)
        else:
            try:
                await self._app(scope, receive, sends)
            except Exception:
                log.exception("%s %s", scope["method"], scope["path"])
                if not status:
                    await _say(sends, 500, "internal error; the log of the server has it")
        path = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.requests.add(method, path, str(status))
        self._metrics.latencies.observe(time.perf_counter() - start_s, method, path)

    def _refusal(self, scope: Scope) -> str | None:
        """Why a browser's page of another site may not ask."""
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        host = headers.get("host")
        if self._only_loopback and not names_loopback(host):
            return f"host: {host!r} is not a name of this machine, which alone is answered"
        if is_from_elsewhere(headers.get("origin"), host):
            return f"origin: {headers['origin']!r} is another site"
        return None


async def _say(send: Send, status: int, error: str) -> None:
    content = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
