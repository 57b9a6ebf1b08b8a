"""Defines the errors that a user can mend, each one line naming the field, the value and what is allowed."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
from collections.abc import Iterable, Iterator


class ForetrainError(Exception):
    """The base of every error that the command line prints as one line, with exit code 2."""


class InputError(ForetrainError):
    """A value in a job, a catalogue or a command line that is not allowed."""


class UnsupportedJob(ForetrainError):
    """A valid job that this predictor cannot forecast. Never answered by a silent fallback."""


class CaptureError(ForetrainError):
    """A model that could not be traced: names the module and the line where it stopped."""


class MissingLibrary(ForetrainError, ImportError):
    """A library that the base install does without, and the extra that brings it."""


EXTRAS = {
    "torch": "capture", "timm": "zoo", "torchvision": "zoo", "transformers": "zoo", "onnx": "onnx",
    "plotly": "report", "torch_geometric": "learn", "lightgbm": "learn", "networkx": "learn",
    "optuna": "learn", "pyarrow": "learn", "scipy": "learn", "sklearn": "learn", "ray": "ray",
    "accelerate": "huggingface", "lightning": "lightning", "pytorch_lightning": "lightning",
    "ecos": "gavel", "yaml": "launch", "sqlalchemy": "store", "psycopg": "store",
    "mcp": "mcp", "anyio": "mcp", "fastapi": "serve", "uvicorn": "serve",
}  # fmt: skip
"""The extra of pyproject.toml that each library comes with."""


@contextlib.contextmanager
def libraries_named(what: str = "", extra: str = "") -> Iterator[None]:
    """Say in one line what to install, where the block imports a library that is not there.

    ``what`` needs it; ``extra`` is the one that brings all that it needs, where that is not the library's.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        library = str(error.name).partition(".")[0]
        if library not in EXTRAS or importlib.util.find_spec(library) is not None:
            raise
        raise missing(library, what, extra) from error


def missing(library: str, what: str = "", extra: str = "") -> MissingLibrary:
    """The standard message: ``fit: scipy is not installed; install foretrain[learn]``."""
    whose = f"{what}: " if what else ""
    return MissingLibrary(
        f"{whose}{library} is not installed; install foretrain[{extra or EXTRAS[library]}]", name=library
    )


def first_line(error: BaseException) -> str:
    """Put what an exception of another library says into one line.

    >>> first_line(ValueError("field 'a':\\n    too small\\n  more"))
    "field 'a': too small"
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def invalid(field: str, value: object, allowed: str) -> InputError:
    """The standard message: ``training.precision: 'fp31' is not one of fp16, fp32``."""
    return InputError(f"{field}: {value!r} is not {allowed}")


_LISTED = 32
"""Names that are listed at most, where no other number is given."""


def unknown(
    field: str, value: object, names: Iterable[str], what: str = "one of", most: int = _LISTED
) -> InputError:
    """A name that is not in a closed set, with the nearest one as a suggestion when there is a near one."""
    known = sorted(names)
    whatever_case = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(value).lower(), whatever_case, n=3, cutoff=0.55)
    hint = f" (did you mean {' or '.join(whatever_case[name] for name in near)}?)" if near else ""
    listed = (", ".join(known) or "none") if len(known) <= most else f"{len(known)} known names"
    return InputError(f"{field}: {value!r} is not {what} {listed}{hint}")
