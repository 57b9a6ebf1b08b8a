"""What holds for all tests."""

import gc
import os

from hypothesis import settings

# Tests that run in parallel share the cores; numpy and torch, which read it, are not loaded yet.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile(
    "foretrain", deadline=None
)  # machines that run tests in parallel are slow now and then
settings.load_profile("foretrain")


def pytest_collection_finish() -> None:
    """What is there before the first test stays to the end: the garbage collector passes it by, and so do
    traces of programs, which look through all objects for tensors."""
    gc.collect()
    gc.freeze()
