"""A predictor's name or folder in; a small value out, from which other processes and machines make the same predictor."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from foretrain import predictors
from foretrain.predictors.base import Predictor


@dataclass(frozen=True, slots=True, kw_only=True)
class Portable:
    """The name of a predictor, with the files of its folder if it was saved in one."""

    name: str
    files: tuple[tuple[str, bytes], ...] = ()

    @classmethod
    def of(cls, name: str) -> Self:
        """The one that ``predictors.get`` finds by this name here."""
        if name in predictors.names():
            return cls(name=name)
        predictors.get(name)
        paths = sorted(path for path in Path(name).rglob("*") if path.is_file())
        return cls(
            name=name, files=tuple((path.relative_to(name).as_posix(), path.read_bytes()) for path in paths)
        )

    @property
    def predictor(self) -> Predictor:
        """The predictor; one for each process, which keeps what it has loaded."""
        return _made(self)


@functools.lru_cache(maxsize=4)
def _made(portable: Portable) -> Predictor:
    if not portable.files:
        return predictors.get(portable.name)
    folder = tempfile.TemporaryDirectory(prefix="foretrain-predictor-")
    _folders.append(folder)
    for name, content in portable.files:
        path = Path(folder.name) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return predictors.get(folder.name)


_folders: list[tempfile.TemporaryDirectory[str]] = []
"""Kept until the process ends, as a predictor may read its files only when it needs them."""
