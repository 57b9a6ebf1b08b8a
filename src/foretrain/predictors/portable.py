"""Makes a small value of a predictor, from which other processes and machines make the same predictor."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from foretrain import predictors
from foretrain.errors import InputError
from foretrain.predictors.base import Predictor
from foretrain.predictors.plugins import class_in_file, file_of

Files = tuple[tuple[str, bytes], ...]
"""Paths in a folder, and what they hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Portable:
    """A predictor's class, by its name or with the file that defines it, and the files of its folder if it
    has learned."""

    name: str
    """The name of a known predictor, or that of a class in ``source``."""
    source: tuple[str, bytes] | None = None
    """The file of the user's own that defines the class: its path here, and what it holds."""
    files: Files = ()

    @classmethod
    def of(cls, name: str) -> Self:
        """The one that ``predictors.get`` finds by this name here."""
        if name in predictors.names():
            return cls(name=name)
        folder = predictors.folder_of(name)
        predictors.get(name)  # what is wrong with it shows here
        return cls._of_class(predictors.class_of(name), () if folder is None else _files_in(folder))

    @classmethod
    def of_learned(cls, predictor: Predictor) -> Self:
        """A predictor at hand, with what it has learned."""
        if not predictor.learns:
            return cls._of_class(type(predictor), ())
        with tempfile.TemporaryDirectory(prefix="foretrain-predictor-") as folder:
            predictor.save(Path(folder))
            return cls._of_class(type(predictor), _files_in(Path(folder)))

    @classmethod
    def _of_class(cls, kind: type[Predictor], files: Files) -> Self:
        path = file_of(kind)
        if path is not None:
            return cls(name=kind.__name__, source=(str(path), path.read_bytes()), files=files)
        if kind.name not in predictors.known() or predictors.class_of(kind.name) is not kind:
            raise InputError(
                f"predictor {kind.name}: other processes cannot "
                f"find {kind.__name__}; name it as file.py:{kind.__name__}"
            )
        return cls(name=kind.name, files=files)

    @property
    def predictor(self) -> Predictor:
        """The predictor; one for each process, which keeps what it has loaded."""
        return _made(self)


@functools.lru_cache(maxsize=64)
def _made(portable: Portable) -> Predictor:
    kind = predictors.class_of(portable.name) if portable.source is None else _class_from(portable)
    return kind.load(_folder(portable.files)) if portable.files else kind()


def _class_from(portable: Portable) -> type[Predictor]:
    """Load the class from the file itself where it lies here too, as it may read what lies beside it; else
    from what was sent of it."""
    assert portable.source is not None
    path, content = Path(portable.source[0]), portable.source[1]
    if not path.is_file() or path.read_bytes() != content:
        path = _folder(((path.name, content),)) / path.name
    return class_in_file(f"{path}:{portable.name}")


def _files_in(folder: Path) -> Files:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return tuple((path.relative_to(folder).as_posix(), path.read_bytes()) for path in paths)


@functools.cache
def _folder(files: Files) -> Path:
    """A folder with these files, which stays until the process ends, as a predictor may read its files only
    when it needs them."""
    folder = tempfile.TemporaryDirectory(prefix="foretrain-predictor-")
    _folders.append(folder)
    for name, content in files:
        path = Path(folder.name) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return Path(folder.name)


_folders: list[tempfile.TemporaryDirectory[str]] = []
