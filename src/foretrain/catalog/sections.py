"""Reads the tables of a TOML file one by one, as they are asked for."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

_HEADING = re.compile(r'^\[\w+\."?([^"\]]+)"?\]', re.MULTILINE)
_ALIASES = re.compile(r"^aliases = (\[.*\])", re.MULTILINE)


class Sections(Mapping[str, dict[str, Any]]):
    """The entries of a file with a table for each, read one by one as they are asked for: a job needs one of
    many."""

    def __init__(self, text: str) -> None:
        starts = [*_HEADING.finditer(text)]
        ends = [*(match.start() for match in starts[1:]), len(text)]
        self._texts = {match[1]: text[match.end() : end] for match, end in zip(starts, ends, strict=True)}

    def __getitem__(self, name: str) -> dict[str, Any]:
        return tomllib.loads(self._texts[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def aliases(self) -> dict[str, str]:
        """List each alias with the name that it stands for."""
        matches = ((name, _ALIASES.search(text)) for name, text in self._texts.items())
        return {alias: name for name, match in matches if match for alias in json.loads(match[1])}

    def text(self, name: str) -> str:
        """An entry as it is written."""
        return self._texts[name]
