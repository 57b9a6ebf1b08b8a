"""What holds for all tests."""

from hypothesis import settings

settings.register_profile(
    "foretrain", deadline=None
)  # machines that run tests in parallel are slow now and then
settings.load_profile("foretrain")
