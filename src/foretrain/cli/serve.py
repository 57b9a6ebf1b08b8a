"""The command that answers over HTTP: ``serve``."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from foretrain.cli.app import registry, say
from foretrain.cli.scale_out import RayOption, ScaleOut, hush_ray
from foretrain.errors import InputError, libraries_named

_CONNECTIONS = 512
"""At once; more are answered with 503."""
_PATIENCE_S = 10
"""For requests that are under way, when the server ends."""
_LEAST_S = 0.1
_BACKLOG = 1024
"""Connections that wait to be accepted."""


@registry.command(cls=ScaleOut)
def serve(
    *,
    host: Annotated[str, typer.Option(help="Where to listen; another than loopback needs --token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="0 for one that is free.")] = 8760,
    db: Annotated[
        str | None,
        typer.Option(
            metavar="URL|FILE",
            help="SQLite or PostgreSQL. [default: $FORETRAIN_STORE, else your data folder]",
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="FORETRAIN_TOKEN", help="What those must show who write; best by $FORETRAIN_TOKEN."
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Workers that forecast, that trace, and jobs at once. [default: cores]"),
    ] = None,
    ray: RayOption = None,
    allow: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="Models in files here may be named; their code is run."),
    ] = None,
    forecast_seconds: Annotated[
        float, typer.Option(min=_LEAST_S, help="For a forecast of a known graph.")
    ] = 30.0,
    capture_seconds: Annotated[
        float, typer.Option(min=_LEAST_S, help="For a forecast that traces its model.")
    ] = 120.0,
    job_seconds: Annotated[
        float, typer.Option(min=_LEAST_S, help="For a plan, a simulation, a calibration.")
    ] = 3600.0,
    memory: Annotated[str, typer.Option(help="Of each worker, such as 8GiB.")] = "8GiB",
    body: Annotated[str, typer.Option(help="Of a request, at most.")] = "1MiB",
    upload: Annotated[str, typer.Option(help="Of runs or a trace in a request, at most.")] = "32MiB",
    page: Annotated[bool, typer.Option("--page/--no-page", help="A page for people at /.")] = True,
    waiting: Annotated[int, typer.Option(min=1, help="Forecasts that may wait; others get 503.")] = 64,
) -> None:
    """Answer over HTTP: a page, forecasts, plans, simulations, and a store of runs."""
    hush_ray()
    from foretrain.measure.store import default_store, hide_password
    from foretrain.serve.settings import RequestLimits, ServerSettings, usual_processes
    from foretrain.units import parse_bytes

    limits = RequestLimits(
        body_bytes=int(parse_bytes(body, "--body")),
        upload_bytes=int(parse_bytes(upload, "--upload")),
        forecast_s=forecast_seconds,
        capture_s=capture_seconds,
        job_s=job_seconds,
        memory_bytes=parse_bytes(memory, "--memory"),
        waiting=waiting,
    )
    settings = ServerSettings(
        host=host,
        port=port,
        db=db or default_store(),
        token=token or None,
        processes=processes or usual_processes(),
        ray=ray,
        allow=tuple(allow or ()),
        page=page,
        limits=limits,
    )
    with libraries_named("serve", "serve"):
        import uvicorn

        from foretrain.serve.app import make_app
        from foretrain.serve.ending import run
        from foretrain.serve.service import Service
    logging.basicConfig(format="foretrain: %(message)s", level=logging.WARNING)
    config = uvicorn.Config(
        make_app(Service(settings)),
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=_CONNECTIONS,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=_PATIENCE_S,
    )
    listener = _listener(host, port)
    shown = f"[{host}]" if ":" in host else host
    say(f"serving on http://{shown}:{listener.getsockname()[1]}, runs in {hide_password(settings.db)}")
    os.environ.pop("FORETRAIN_TOKEN", None)
    run(config, listener)


def _listener(host: str, port: int) -> socket.socket:
    """Listen by TCP in so many words: without them asyncio leaves answers to wait for acknowledgements
    (Nagle)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise InputError(f"--host, --port: cannot listen on {host}:{port} ({error.strerror})") from error
    return listener
