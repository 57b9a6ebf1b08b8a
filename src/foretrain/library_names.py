"""Reads the names of models that torchvision, timm and transformers have, without importing them."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

LIBRARIES = ("torchvision", "timm", "transformers")
"""In the order in which a name is looked for; of transformers it is the types of models."""

_FOLDERS = {"torchvision": "models/**/*.py", "timm": "models/*.py", "transformers": "models/auto/*auto*.py"}
_REGISTERED = re.compile(
    r"^@register_model(?:\(\s*(?:name=)?[\"']?(\w*)[\"']?\s*\))?\s*\n(?:.*\n)*?def (\w+)\(", re.M
)
_RENAMED = re.compile(r"^register_model_deprecations\(__name__,\s*\{(.*?)\}\)", re.M | re.S)
_KEYS = re.compile(r"^\s*[\"']([\w.]+)[\"']\s*:", re.M)
_CONFIGURED = re.compile(r"[(\s{]\"([\w.-]+)\"[,:] \"\w+Config\"")


def _registered(text: str) -> Iterable[str]:
    """Names that functions are registered by, and former ones."""
    yield from (name or function for name, function in _REGISTERED.findall(text))
    for table in _RENAMED.findall(text):
        yield from _KEYS.findall(table)


def _configured(text: str) -> Iterable[str]:
    """Types of models that have a configuration."""
    return _CONFIGURED.findall(text)


def installed_names(library: str) -> frozenset[str]:
    """Read the names from the source text of the installed library; none where it is not installed or cannot
    be read."""
    return _read(library, _folder(library))


def _folder(library: str) -> Path | None:
    module = sys.modules.get(library)
    try:
        spec = importlib.util.find_spec(library) if module is None else module.__spec__
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


@functools.cache
def _read(library: str, folder: Path | None) -> frozenset[str]:
    if folder is None:
        return frozenset()
    names = _configured if library == "transformers" else _registered
    all_names: set[str] = set()
    for path in folder.glob(_FOLDERS[library]):
        try:
            all_names.update(names(path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError):
            continue
    return frozenset(all_names)


@functools.cache
def shipped_names() -> Mapping[str, frozenset[str]]:
    """Read the names, by library, of the versions that ``catalog/library_names.toml`` was written for."""
    text = (Path(__file__).parent / "catalog" / "library_names.toml").read_text(encoding="utf-8")
    return {name: frozenset(tomllib.loads(text)[name]["names"].split()) for name in LIBRARIES}


def library_of(name: str) -> str | None:
    """The first library that has a model of this very name: as shipped, else as installed.

    >>> library_of("resnet50"), library_of("resnetv2_50x1_bit"), library_of("resnet5O")
    ('torchvision', 'timm', None)
    """
    for names in (shipped_names().__getitem__, installed_names):
        for library in LIBRARIES:
            if name in names(library):
                return library
    return None


def all_names(library: str) -> frozenset[str]:
    """Names of the installed library, or shipped ones where it is not installed."""
    return installed_names(library) or shipped_names()[library]
