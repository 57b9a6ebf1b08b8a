"""Connects to a Ray cluster by its address, or says in one line why that fails."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import socket
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foretrain.errors import InputError, first_line
from foretrain.interrupts import sigterm_kept

AUTO = "auto"
"""The cluster that $RAY_ADDRESS names, or else the last one that was started on this machine."""
LOCAL = "local"
"""A cluster of our own, started on this machine."""
ANY = "any"
"""AUTO where there is one that answers, else LOCAL."""

_REACH_S = 5.0
_TOKENS = "; a cluster with token authentication needs RAY_AUTH_MODE=token"
_PASSED_ON = ("FORETRAIN_CACHE", "FORETRAIN_CATALOG")
"""Variables of the environment that workers get from here."""


def is_address(text: str) -> bool:
    """Whether this can be the address of a cluster.

    >>> texts = ("auto", "10.0.0.1:6379", "ray://head:10001", "jobs.jsonl", "tiny.py:net")
    >>> [is_address(text) for text in texts]
    [True, True, True, False, False]
    """
    return text in (AUTO, LOCAL, ANY) or re.fullmatch(r"ray://\S+|[\w.\-\[\]:]+:\d+", text) is not None


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect while the block lasts; a connection that was there before is used, and left alone."""
    check_installed()
    import ray

    if ray.is_initialized():
        yield
        return
    connect(address)
    try:
        yield
    finally:
        ray.shutdown()


def connect(address: str, *, cpus: int | None = None, field: str = "ray") -> None:
    """Join the cluster at ``address``, or start one on this machine with so many (logical) CPUs.

    Nodes need the dependencies of this package but not the package: its source goes with the connection.
    """
    check_installed()
    cluster_address = found_at(address, field)
    if cluster_address == LOCAL:
        _init(address=LOCAL, num_cpus=cpus, include_dashboard=False)
        return
    try:
        _reach(cluster_address)
        source = {"py_modules": [str(Path(__file__).parents[1])], "excludes": ["**/__pycache__/**"]}
        _init(address=cluster_address, runtime_env={**source, **_variables()})
    except (RuntimeError, ValueError, OSError, ImportError) as error:
        why = getattr(error, "strerror", None) or f"{first_line(error)}{_TOKENS}"
        raise InputError(f"{field}: no Ray cluster answers at {address!r} ({why})") from error


def found_at(address: str, field: str = "ray") -> str:
    """The address with "auto" and "any" replaced by what they mean here and now."""
    if address == ANY:
        return _answering() or LOCAL
    known_address = _known() if address == AUTO else address
    if known_address is None:
        raise InputError(
            f"{field}: no Ray cluster answers at {address!r} (none "
            "was started here by ray start, and RAY_ADDRESS is not set)"
        )
    return known_address


def check_installed(who: str = "ray:") -> None:
    """Say what to install, where Ray is not."""
    if importlib.util.find_spec("ray") is None:
        raise InputError(f"{who} needs Ray, which is not installed; install foretrain[ray]")


def losses() -> tuple[type[Exception], ...]:
    """List what Ray raises when a worker, a node or what it held is gone, through no fault of what ran
    there."""
    from ray import exceptions as of

    return (
        of.WorkerCrashedError,
        of.NodeDiedError,
        of.OutOfMemoryError,
        of.ObjectLostError,
        of.LocalRayletDiedError,
        of.RayActorError,
    )


def _init(**options: Any) -> None:
    import ray

    with sigterm_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # what Ray will do with GPUs that nobody asks for
        ray.init(log_to_driver=False, logging_level="ERROR", **options)


def _known() -> str | None:
    """The address that Ray itself would take, from the environment or the file that the last cluster left."""
    if given := os.environ.get("RAY_ADDRESS"):
        return given
    folder = (
        os.environ.get("RAY_TMPDIR")
        or os.environ.get("TMPDIR")
        or ("/tmp" if os.name == "posix" else tempfile.gettempdir())
    )
    with contextlib.suppress(OSError):
        return (Path(folder) / "ray" / "ray_current_cluster").read_text().strip() or None
    return None


def _answering() -> str | None:
    """The known address, if there is one; what a cluster left that has ended is no reason to fail."""
    known = _known()
    if known is None or os.environ.get("RAY_ADDRESS"):
        return known
    with contextlib.suppress(OSError, ValueError):
        _reach(known)
        return known
    return None


def _reach(address: str) -> None:
    """Whether anybody listens there, which Ray itself takes minutes to find."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()


def _variables() -> dict[str, Any]:
    given = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return {"env_vars": given} if given else {}
