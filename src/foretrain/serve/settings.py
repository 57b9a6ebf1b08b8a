"""Says how a server runs: where it listens, what it keeps, and the limits of every request."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from foretrain.errors import InputError, invalid
from foretrain.measure.store import is_database

_LEAST_TOKEN = 16
"""Characters of a token that cannot be guessed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Says what one request, and all of them together, may take."""

    body_bytes: int = 2**20
    """Of a request, but for runs."""
    upload_bytes: int = 32 * 2**20
    """Of runs in one request."""
    uploads: int = 8
    """At once."""
    body_s: float = 30.0
    """For a request to arrive."""
    forecast_s: float = 30.0
    """For a forecast from a graph that is there."""
    capture_s: float = 120.0
    """For a forecast whose model has to be traced first."""
    job_s: float = 3600.0
    """For a plan, a simulation or a calibration."""
    memory_bytes: float = 8 * 2**30
    """Of each worker process, its children included."""
    wait_s: float = 2.0
    """For a forecast from a graph that is there to get a worker; then the server is too busy."""
    waiting: int = 64
    """Forecasts that wait for a worker, at most."""
    waiting_jobs: int = 16
    """Jobs that wait, at most."""
    kept_jobs: int = 256
    """Jobs that have ended and can be asked for, at most."""
    kept_forecasts: int = 4096
    """Forecasts that are kept to be answered again."""
    kept_bytes: int = 256 * 2**20
    """Of these, all together."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise invalid(name, getattr(self, name), "above zero")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Says how a server runs."""

    host: str = "127.0.0.1"
    port: int = 8760
    """0: any that is free."""
    db: str
    token: str | None = None
    """What writes must show; without it, everybody on this machine may write."""
    processes: int = 2
    """Workers that forecast, workers that trace, and jobs, at once each."""
    ray: str | None = None
    """The Ray cluster that jobs spread over."""
    page: bool = True
    """Whether there is a page for people beside the interface for programs."""
    allow: tuple[Path, ...] = ()
    """Folders whose models may be named over HTTP; code in them is run."""
    limits: RequestLimits = RequestLimits()

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise invalid("port", self.port, "from 0 to 65535")
        if self.processes < 1:
            raise invalid("processes", self.processes, "1 or more")
        if not is_database(self.db):
            raise InputError(f"db: {self.db!r} is not a database; name a URL such as sqlite:///runs.db")
        if self.token is not None and (len(self.token) < _LEAST_TOKEN or not self.token.isascii()):
            raise InputError(f"token: {len(self.token)} characters; give at least {_LEAST_TOKEN}, in ASCII")
        if self.token is None and not self.is_loopback:
            raise InputError(
                f"host: {self.host!r} can be reached from other machines; give --token "
                "(or $FORETRAIN_TOKEN) for those who may write, or listen on 127.0.0.1"
            )
        for folder in self.allow:
            if not folder.is_dir():
                raise invalid("allow", str(folder), "a folder")

    @property
    def is_loopback(self) -> bool:
        """Whether nobody but this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def usual_processes() -> int:
    """Count the cores for this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
