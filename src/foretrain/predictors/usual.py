"""Remembers which predictor a user has learned, so that forecasts are by it unless another is named."""

from __future__ import annotations

import os
import re
from pathlib import Path

from foretrain.errors import InputError, invalid
from foretrain.files import data_folder, write_atomically
from foretrain.predictors import DEFAULT
from foretrain.predictors.base import FILE

VARIABLE = "FORETRAIN_PREDICTOR"
"""In the environment: the predictor that forecasts are by, such as deletepop, whatever was learned."""
_MARK = "usual"
_NAME = re.compile(r"[a-z][a-z0-9_.-]*")


def folder() -> Path:
    """Name the folder that keeps what was learned by name: in the user's data folder, beside the store of
    runs."""
    return data_folder() / "predictors"


def place(name: str) -> Path:
    """The folder of a predictor of this name."""
    if not _NAME.fullmatch(name) or name == _MARK:
        raise invalid("name", name, "a name of small letters, digits, _, . and -, a letter first")
    return folder() / name


def use(name: str) -> None:
    """Forecast by this one from now on."""
    if not (place(name) / FILE).is_file():
        raise InputError(f"name: nothing was learned as {name!r}; foretrain learn RUNS --name {name} does")
    write_atomically(folder() / _MARK, f"{name}\n")


def stop() -> str | None:
    """Forecast by what comes with foretrain again; returns the name that was in use."""
    name = learned()
    (folder() / _MARK).unlink(missing_ok=True)
    return name


def learned() -> str | None:
    """The name of what was learned and is in use."""
    try:
        name = (folder() / _MARK).read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return name if _NAME.fullmatch(name) and (folder() / name / FILE).is_file() else None


def usual() -> str:
    """Name what ``predictors.get`` finds the usual predictor by: as the environment says, else what was
    learned and is in use, else what comes with foretrain."""
    if given := os.environ.get(VARIABLE):
        return given
    name = learned()
    return DEFAULT if name is None else str(folder() / name)
