"""Keeps the names of what a model reads when it is traced (files, environment variables, packages) and tells
the state of those now."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretrain.errors import InputError
from foretrain.files import read_text, write_atomically

_LARGE = 4 << 20
"""Bytes from which on a file is known by its size and time of change, not by its content."""

LIBRARY_VARIABLES = {"timm": ("TIMM_FUSED_ATTN", "TIMM_USE_NAFLEX", "TIMM_USE_NAFLEXVIT")}
"""Variables that decide what a library's models are; it reads them once, when it is imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Names of what a model reads. Files are named as seen from the model's folder."""

    files: frozenset[str] = frozenset()
    variables: frozenset[str] = frozenset()
    packages: frozenset[str] = frozenset()

    def __or__(self, other: Reads) -> Reads:
        return Reads(
            files=self.files | other.files,
            variables=self.variables | other.variables,
            packages=self.packages | other.packages,
        )

    def state(self, folder: Path) -> dict[str, Any]:
        """What stands there now: contents, values and versions; what is absent or not set is left out."""
        parts: dict[str, dict[str, Any]] = {
            "files": {name: digest(folder / name) for name in self.files},
            "variables": {name: os.environ.get(name) for name in self.variables},
            "packages": {name: version(name) for name in self.packages},
        }
        held = {part: {k: v for k, v in values.items() if v is not None} for part, values in parts.items()}
        return {part: values for part, values in held.items() if values}

    @classmethod
    def load(cls, path: Path) -> Reads:
        """Those that were written; none where there are no such file, or a damaged one."""
        with contextlib.suppress(InputError, ValueError, KeyError, TypeError):
            held = json.loads(read_text(path))
            return cls(**{part: frozenset(map(str, held[part])) for part in _PARTS})
        return cls()

    def save(self, path: Path) -> None:
        write_atomically(path, json.dumps({part: sorted(getattr(self, part)) for part in _PARTS}))


_PARTS = ("files", "variables", "packages")


def library_reads(source: str) -> Reads:
    """What decides of the models of a library beside its version."""
    return Reads(variables=frozenset(LIBRARY_VARIABLES.get(source, ())))


def digest(path: Path) -> str | None:
    """What tells a file from others that stood in its place."""
    try:
        about = path.stat()
        if not path.is_file() or about.st_size > _LARGE:
            return f"{about.st_size} {about.st_mtime_ns}"
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return None if isinstance(error, FileNotFoundError | NotADirectoryError) else str(error.strerror)


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
