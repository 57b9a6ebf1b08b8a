"""What holds for all tests."""

import os

from hypothesis import settings

# Tests that run in parallel share the cores; numpy and torch, which read it, are not loaded yet.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile(
    "foretrain", deadline=None
)  # machines that run tests in parallel are slow now and then
settings.load_profile("foretrain")
