"""Keeps a program off the disk: what it writes lands in a folder of its own, what it deletes stays."""

# Here os itself is what is caught:
# ruff: noqa: PTH100, PTH109, PTH110, PTH113, PTH120

from __future__ import annotations

import builtins
import contextlib
import io
import os
import shutil
import tempfile
import threading
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_ASKING = ("stat", "lstat", "listdir", "scandir", "access")
_IN_PLACE = ("mkdir", "chmod", "utime")
_TAKING_AWAY = ("remove", "unlink", "rmdir")
_MOVING = ("rename", "replace", "link", "symlink")
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Scratch:
    """The files that a program has written, by the places where it believes them to be."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._thread = threading.get_ident()
        self._own = tuple(f"{os.path.abspath(name)}{os.sep}" for name in ("/dev", "/proc", folder))

    @contextlib.contextmanager
    def catching(self) -> Iterator[None]:
        """Inside of this block nothing of the user's is written, moved or deleted by this thread."""
        patches: list[Any] = [
            unittest.mock.patch.object(builtins, "open", self._open(builtins.open)),
            unittest.mock.patch.object(io, "open", self._open(io.open)),
            unittest.mock.patch.object(os, "open", self._open_flags(os.open)),
            unittest.mock.patch.object(shutil, "rmtree", self._taking_away(shutil.rmtree)),
            *(unittest.mock.patch.object(os, name, self._asking(getattr(os, name))) for name in _ASKING),
            *(unittest.mock.patch.object(os, name, self._in_place(getattr(os, name))) for name in _IN_PLACE),
            *(
                unittest.mock.patch.object(os, name, self._taking_away(getattr(os, name)))
                for name in _TAKING_AWAY
            ),
            *(unittest.mock.patch.object(os, name, self._moving(getattr(os, name))) for name in _MOVING),
        ]
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            yield

    def _twin(self, path: Any) -> str | None:
        """Where a file of the program is kept; none for what is not a path, or is not to be caught."""
        if threading.get_ident() != self._thread or not isinstance(path, str | bytes | os.PathLike):
            return None
        name = os.path.abspath(os.fsdecode(path))
        return None if f"{name}{os.sep}".startswith(self._own) else f"{self._folder}{name}"

    def _written(self, path: Any) -> Any:
        """The path, or its twin where the program has written there."""
        twin = self._twin(path)
        return path if twin is None or not _is_there(twin) else twin

    def _prepared(self, path: Any, *, keeps: bool) -> Any:
        """The twin of a file that is to be written, with what it holds already."""
        twin = self._twin(path)
        if twin is None:
            return path
        if _is_there(twin):
            return twin
        folder = Path(os.path.abspath(os.fsdecode(path))).parent
        if not (_is_there(str(folder)) or _is_there(f"{self._folder}{folder}")):
            return path  # which fails as it would
        self._make(f"{self._folder}{folder}")
        if keeps and os.path.isfile(path):
            shutil.copyfile(path, twin)
        return twin

    def _make(self, folder: str) -> None:
        """A folder below that of the program, with all above it."""
        missing = []
        while not _is_there(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for one in reversed(missing):
            _MKDIR(one)

    def _open(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def opening(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            if isinstance(mode, str) and any(sign in mode for sign in "wax+"):
                if "x" in mode and os.path.exists(file):
                    return original(file, mode, *args, **kwargs)
                return original(self._prepared(file, keeps="w" not in mode), mode, *args, **kwargs)
            return original(self._written(file), mode, *args, **kwargs)

        return opening

    def _open_flags(self, original: Callable[..., int]) -> Callable[..., int]:
        def opening(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & _WRITE_FLAGS:
                return original(self._prepared(path, keeps=not flags & os.O_TRUNC), flags, *args, **kwargs)
            return original(self._written(path), flags, *args, **kwargs)

        return opening

    def _asking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda path=".", *args, **kwargs: original(self._written(path), *args, **kwargs)

    def _in_place(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def change(path: Any, *args: Any, **kwargs: Any) -> Any:
            if original is _MKDIR and os.path.exists(path):
                return original(path, *args, **kwargs)  # which fails as it would
            return original(self._prepared(path, keeps=True), *args, **kwargs)

        return change

    def _taking_away(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def take(path: Any, *args: Any, **kwargs: Any) -> Any:
            twin = self._twin(path)
            if twin is None:
                return original(path, *args, **kwargs)
            if _is_there(twin):
                return original(twin, *args, **kwargs)
            if not os.path.lexists(path):
                return original(path, *args, **kwargs)  # which fails as it would
            return None

        return take

    def _moving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def move(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            held = self._written(source)
            if held is source and self._twin(source) is not None:
                return None  # the user's own stays where it is
            return original(held, self._prepared(target, keeps=False), *args, **kwargs)

        return move


@contextlib.contextmanager
def nothing_written() -> Iterator[None]:
    """Inside of this block a program's writing and deleting of files does nothing that lasts."""
    place = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="foretrain_") as folder:
        try:
            with Scratch(folder).catching():
                yield
        finally:
            os.chdir(place)


def _is_there(path: str) -> bool:
    try:
        _LSTAT(path)
    except (OSError, ValueError):
        return False
    return True


_LSTAT, _MKDIR = os.lstat, os.mkdir
