"""Finds the commands that the texts tell people to run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_COMMENT = re.compile(r"\s+#\s.*")


@dataclass(frozen=True, slots=True, kw_only=True)
class DocCommand:
    """A command of a text, without its comment."""

    page: str
    line: int
    words: str
    """As it stands there, the name of the program included."""

    @property
    def is_usage(self) -> bool:
        """Whether it is a form with parts to choose from, and not a line to type."""
        return "[" in self.words or "..." in self.words or re.search(r"\w\|\w", self.words) is not None


def block_commands(path: Path) -> list[DocCommand]:
    """Those in blocks of code, fenced or indented, with what they go on with on further lines."""
    found = list[DocCommand]()
    fenced = False
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if text.startswith("```"):
            fenced = not fenced
        if not fenced and not text.startswith("    "):
            continue
        line = _COMMENT.sub("", text.strip().removeprefix("$ "))
        if line.startswith("[") and found and found[-1].line == number - 1:
            before = found.pop()
            found.append(DocCommand(page=path.name, line=number, words=f"{before.words} {line}"))
        elif line.startswith("foretrain "):
            found += (
                DocCommand(page=path.name, line=number, words=words.removesuffix(" &").strip())
                for words in line.split(" && ")
            )
    return found


def inline_commands(path: Path) -> Iterator[DocCommand]:
    """Those within sentences."""
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        for words in re.findall(r"`(foretrain [^`]+)`", text):
            yield DocCommand(page=path.name, line=number, words=words)


def usage_forms(words: str) -> Iterator[str]:
    """What can be typed by a form: every part that may be left out is there, and of parts to choose from the
    first, then the second, and so on."""
    words = words.replace("[options of a job]", "").replace(" ...", "")
    choices = [*re.findall(r"\[([^\[\]]* \| [^\[\]]*)\]", words), *re.findall(r"\S+\|\S+", words)]
    for i in range(max((choice.count("|") + 1 for choice in choices), default=1)):

        def chosen(match: re.Match[str], i: int = i) -> str:
            parts = [part.strip(" []") for part in match[0].split("|")]
            return parts[min(i, len(parts) - 1)]

        either = re.sub(r"\[[^\[\]]* \| [^\[\]]*\]", chosen, words)
        yield re.sub(r"[^\s\[\]]+\|[^\s\[\]]+", chosen, either).replace("[", "").replace("]", "")
