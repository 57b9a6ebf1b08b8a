"""What holds for all tests."""

import signal

from hypothesis import settings

settings.register_profile(
    "foretrain", deadline=None
)  # machines that run tests in parallel are slow now and then
settings.load_profile("foretrain")

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as in a background job of a shell: children would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)
