"""Writes YAML of tables, lists and plain values, which needs no library."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*")
_WORDS = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")


def yaml_text(value: Mapping[str, Any]) -> str:
    """A document.

    >>> print(yaml_text({"a": {"b": [1, "x y"], "c": True}, "d": "no", "e": [{"f": 1, "g": None}]}), end="")
    a:
      b: [1, "x y"]
      c: true
    d: "no"
    e:
      - f: 1
        g: null
    """
    return "\n".join(_table(value, "")) + "\n"


def _table(table: Mapping[str, Any], indent: str) -> list[str]:
    lines = []
    for key, value in table.items():
        name = f"{indent}{_scalar(key)}:"
        if isinstance(value, Mapping) and value:
            lines += [name, *_table(value, f"{indent}  ")]
        elif isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
            lines.append(name)
            for one in value:
                first, *rest = _table(one, f"{indent}    ")
                lines += [f"{indent}  - {first.lstrip()}", *rest]
        elif isinstance(value, str) and "\n" in value:
            lines += [f"{name} |", *(f"{indent}  {line}".rstrip() for line in value.rstrip("\n").split("\n"))]
        else:
            lines.append(f"{name} {_inline(value)}")
    return lines


def _inline(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_scalar(one) for one in value)}]"
    return "{}" if isinstance(value, Mapping) else _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value)
