"""Writes a job as a file that reads as the same job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretrain.errors import InputError
from foretrain.files import write_atomically
from foretrain.job import Job


def write_job_file(job: Job, path: Path, *, stamp: str = "") -> None:
    """As TOML, with a comment in front of it, or as JSON where the file is called so."""
    tables = job.seen_from(path.parent).to_dict()
    if path.suffix == ".json":
        write_atomically(path, json.dumps(tables, indent=2) + "\n")
    elif path.suffix == ".toml":
        write_atomically(path, (f"# {stamp}\n" if stamp else "") + toml_tables(tables))
    else:
        raise InputError(f"{path}: a job is written to a .toml or a .json file")


def toml_tables(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Sections in TOML, tables in them on one line each."""
    sections = []
    for name, section in tables.items():
        lines = [f"{_key(key)} = {_value(value, f'{name}.{key}')}" for key, value in section.items()]
        sections.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(sections) + "\n"


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)


def _value(value: Any, where: str) -> str:
    if value is None:
        raise InputError(f"{where}: TOML has no word for nothing; write the job to a .json file")
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {_value(one, f'{where}.{key}')}" for key, one in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(one, where) for one in value) + "]"
    return json.dumps(value)
