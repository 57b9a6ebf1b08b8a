"""Keeps requests away from files of the server, and tells who may write."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from foretrain.errors import InputError
from foretrain.launchers import SUFFIXES
from foretrain.workload import FILE_SOURCES

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of every answer: none of them is a page, to be framed, guessed at or kept."""

_STARTS = re.compile(r"[/~]|\.{1,2}/|[a-z]:/|file:|local-dir:", re.IGNORECASE)
_ENDINGS = re.compile(
    r"\.(py|onnx|zst|toml|json|jsonl|yaml|yml|csv|gz|db|pt|pth|bin|ckpt|safetensors)(:|$)", re.IGNORECASE
)
_LOADS = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir", "state_dict")
"""Arguments by which constructors of timm read files."""
_DEEPEST = 64
"""Tables within tables that a request may have."""


def is_path(text: str) -> bool:
    """Whether anything that reads requests could take a text for a file.

    >>> [is_path(text) for text in ("resnet50", "Qwen/Qwen3-8B", "net.py:build", "a/../b", "run.yaml")]
    [False, False, True, True, True]
    """
    return (
        _STARTS.match(text) is not None
        or "\\" in text
        or ".." in re.split(r"[/:]", text)
        or _ENDINGS.search(text) is not None
        or Path(text).suffix in SUFFIXES
    )


class Folders:
    """The folders whose models may be named in requests; none by default."""

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        self._folders = tuple(folder.resolve() for folder in folders)

    def checked_model(self, name: str) -> str:
        """The name of a model; a file in one of the folders by its whole path."""
        return self._inside(name, "model") if is_path(name) else name

    def checked_job(self, tables: Mapping[str, Any]) -> dict[str, Any]:
        """The tables of a job, with files in one of the folders by their whole paths."""
        model = tables.get("model")
        if isinstance(model, Mapping) and _is_file(model):
            model = {**model, "name": self._inside(str(model.get("name")), "model.name")}
            tables = {**tables, "model": model}
        return self.checked_tables(tables, "", but=("model.name", "model.title"))

    def checked_tables(
        self, tables: Mapping[str, Any], where: str, *, but: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Tables in which nothing names a file of the server, and nothing has code of others run."""
        for field, key, value in values_in(tables, where):
            if key == "trust_remote_code" and value:
                raise InputError(f"{field}: {value!r} is never allowed: code of a model hub is not run here")
            if key in _LOADS and value:
                raise InputError(f"{field}: not allowed over HTTP: it has files read")
            if isinstance(value, str) and is_path(value) and field not in but:
                raise InputError(f"{field}: {_shown(value)} may name a file of the server, which is refused")
        return dict(tables)

    def names_file(self, model: str | None, tables: Mapping[str, Any] | None) -> bool:
        """Whether a request that was checked is of a model in a file, which may change."""
        section = {} if tables is None else tables.get("model")
        return (model is not None and is_path(model)) or (isinstance(section, Mapping) and _is_file(section))

    def _inside(self, name: str, field: str) -> str:
        path, colon, rest = name.partition(":") if ".py:" in name else (name, "", "")
        for folder in self._folders:
            target = (folder / path).resolve()
            if target.is_relative_to(folder) and target.is_file():
                return f"{target}{colon}{rest}"
        why = "it lies in no folder that is allowed" if self._folders else "models in files are not allowed"
        raise InputError(f"{field}: {_shown(name)} is a file, and {why} (foretrain serve --allow FOLDER)")


def _is_file(model: Mapping[str, Any]) -> bool:
    return str(model.get("source")).lower() in FILE_SOURCES


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}...")


def values_in(value: Any, where: str, key: str = "", depth: int = 0) -> Iterator[tuple[str, str, Any]]:
    """Everything in tables, with the path of its field and the key that it stands under."""
    if depth > _DEEPEST:
        raise InputError(f"{where[:80]}...: nested more than {_DEEPEST} deep")
    yield where, key, value
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from values_in(inner, f"{where}.{name}" if where else str(name), str(name), depth + 1)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from values_in(inner, f"{where}[{number}]", key, depth + 1)


# Who asks


def shows_token(authorization: str | None, token: str) -> bool:
    """Whether a request shows the token, told in a time that does not depend on how much of it is right."""
    kind, _, shown = (authorization or "").partition(" ")
    return kind.lower() == "bearer" and hmac.compare_digest(shown.strip().encode(), token.encode())


def is_from_elsewhere(origin: str | None, host: str | None) -> bool:
    """Whether a browser sends this for a page of another site."""
    return origin is not None and origin.lower().partition("://")[2] != (host or "").lower()


def names_loopback(host: str | None) -> bool:
    """Whether a request was sent to this machine by one of its own names; else a page of another site may
    have had its name changed into this address."""
    name = re.sub(r":\d*$", "", (host or "").lower())
    return name in ("localhost", "[::1]") or re.fullmatch(r"127(\.\d+){3}", name) is not None
