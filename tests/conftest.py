"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Tests that run in parallel share the cores; numpy and torch, which read it, are not loaded yet.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray's workers give way to all others by default, so that beside other tests theirs would hardly go on.
os.environ.setdefault("RAY_worker_niceness", "0")
# Tests start hundreds of processes, and each would compile the package anew where nobody writes bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

settings.register_profile(
    "foretrain", deadline=None
)  # machines that run tests in parallel are slow now and then
settings.load_profile("foretrain")

pytest_plugins = ["browsing", "databases"]

TOGETHER = frozenset(
    """
    test_advice test_base_install test_callbacks_huggingface test_campaign test_capture_ranks test_deletepop
    test_driple test_engine test_explorer test_explorer_browser test_measure_ops test_planner_whatif
    test_operator_models test_predictddl test_predictors test_properties test_random_layers test_ray_models
    test_scaledl test_screens test_serve test_serve_client test_serve_store test_store
    """.split()
)
"""Files whose tests share what takes long to make: one worker of pytest-xdist runs them all."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in TOGETHER:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def pytest_collection_finish() -> None:
    """What is there before the first test stays to the end: the garbage collector passes it by, and so do
    traces of programs, which look through all objects for tensors."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache for several files of tests that trace the same models, on all workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETRAIN_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache of graphs of one file of tests."""
    folder = tmp_path_factory.mktemp("graphs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETRAIN_CACHE", str(folder))
        yield folder


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of graphs of one test."""
    monkeypatch.setenv("FORETRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """Two nodes with a CPU each, for all tests of the group "ray": one that ends a node adds another."""
    pytest.importorskip("ray", reason="Ray is not installed")
    from ray_clusters import ray_nodes

    with ray_nodes(2) as cluster:
        yield cluster


@pytest.fixture
def quick_ray_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers look at their workers often, and start nobody to wait for the end of a node."""
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.3")
    monkeypatch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
