"""A real Ray cluster of several nodes on this machine, for the tests of the group "ray"."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import foretrain
from foretrain.measure.ray_driver import NO_STATE_SERVER


@contextlib.contextmanager
def ray_nodes(count: int) -> Iterator[Any]:
    """A head without CPUs and so many nodes with one CPU each, without a trace for other clusters to find."""
    from ray.cluster_utils import Cluster

    environment = {**NO_STATE_SERVER, "PYTHONPATH": str(Path(foretrain.__file__).parents[1])}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        with _environment(**environment, RAY_TMPDIR=folder):
            cluster = Cluster(
                initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
            )
            for _ in range(count):
                cluster.add_node(num_cpus=1)
        try:
            yield cluster
        finally:
            with _environment(RAY_TMPDIR=folder):
                cluster.shutdown()


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


def wait_for(path: Path, seconds: float = 300.0) -> None:
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, f"no {path.name} after {seconds:.0f} s"
        time.sleep(0.05)
