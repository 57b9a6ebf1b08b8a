"""Defines the errors that a user can mend, each one line naming the field, the value and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ForetrainError(Exception):
    """The base of every error that the command line prints as one line, with exit code 2."""


class InputError(ForetrainError):
    """A value in a job, a catalogue or a command line that is not allowed."""


class UnsupportedJob(ForetrainError):
    """A valid job that this predictor cannot forecast. Never answered by a silent fallback."""


class CaptureError(ForetrainError):
    """A model that could not be traced: names the module and the line where it stopped."""


def first_line(error: BaseException) -> str:
    """What an exception of another library says, in one line.

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


def unknown(field: str, value: object, names: Iterable[str], what: str = "one of") -> InputError:
    """A name that is not in a closed set, with the nearest one as a suggestion when there is a near one."""
    known = sorted(names)
    whatever_case = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(value).lower(), whatever_case, n=3, cutoff=0.55)
    hint = f" (did you mean {' or '.join(whatever_case[name] for name in near)}?)" if near else ""
    listed = ", ".join(known) if len(known) <= 16 else f"{len(known)} known names"
    return InputError(f"{field}: {value!r} is not {what} {listed}{hint}")
