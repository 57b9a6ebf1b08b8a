"""Reads JSON, TOML and YAML into settings with the lines that they stand on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from foretrain.errors import InputError, first_line, libraries_named
from foretrain.files import parse_json, parse_toml, read_text
from foretrain.launchers.settings import Setting

Lines = Mapping[tuple[str, ...], int]
"""The line of each key by its path."""


def read_document(path: Path) -> tuple[Any, list[Setting]]:
    """The value of a file, and its keys, each with the path of tables that it is in; lists are values."""
    text = read_text(path)
    if path.suffix in (".yaml", ".yml"):
        value, lines = _yaml(path, text)
    elif path.suffix == ".toml":
        value, lines = _toml(path, text)
    else:
        value, lines = _json(path, text)
    if not isinstance(value, Mapping):
        raise InputError(f"{path}: {type(value).__name__} is not a table of keys and values")
    return value, settings_of(value, path.name, lines)


def settings_of(table: Mapping[Any, Any], file: str, lines: Lines | None = None) -> list[Setting]:
    """The keys of nested tables, joined by dots."""
    known = lines or {}
    return [
        Setting(".".join(keys), value, f"{file}:{known[keys]}" if keys in known else file)
        for keys, value in _flat(table)
    ]


def _flat(table: Mapping[Any, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in table.items():
        keys = (*above, str(name))
        if isinstance(value, Mapping) and value:
            yield from _flat(value, keys)
        else:
            yield keys, value


def _yaml(path: Path, text: str) -> tuple[Any, Lines]:
    with libraries_named(str(path)):
        import yaml
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = path.name if mark is None else f"{path}:{mark.line + 1}"
        raise InputError(
            f"{where}: not YAML ({getattr(error, 'problem', None) or first_line(error)})"
        ) from error
    lines: dict[tuple[str, ...], int] = {}

    def walk(node: Any, above: tuple[str, ...]) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, held in node.value:
                keys = (*above, str(key.value))
                lines[keys] = key.start_mark.line + 1
                walk(held, keys)

    walk(root, ())
    return value, lines


def _json(path: Path, text: str) -> tuple[Any, Lines]:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error})") from error
    lines: dict[tuple[str, ...], int] = {}
    at = 0

    def walk(held: Any, above: tuple[str, ...]) -> None:
        nonlocal at
        for name, inner in held.items() if isinstance(held, Mapping) else ():
            match = re.compile(rf'"{re.escape(str(name))}"\s*:').search(text, at)
            if match is not None:
                at = match.end()
                lines[(*above, str(name))] = text.count("\n", 0, match.start()) + 1
            walk(inner, (*above, str(name)))

    walk(value, ())
    return value, lines


def _toml(path: Path, text: str) -> tuple[Any, Lines]:
    try:
        value = parse_toml(text)
    except ValueError as error:
        raise InputError(f"{path}: not TOML ({error})") from error
    lines: dict[tuple[str, ...], int] = {}
    section: tuple[str, ...] = ()
    for number, line in enumerate(text.split("\n"), start=1):
        if header := re.match(r"\s*\[+\s*([^\]]+?)\s*\]+", line):
            section = tuple(part.strip().strip("\"'") for part in header[1].split("."))
        elif key := re.match(r"\s*([\w.\"'-]+)\s*=", line):
            parts = tuple(part.strip("\"'") for part in key[1].split("."))
            lines.setdefault((*section, *parts), number)
    return value, lines
