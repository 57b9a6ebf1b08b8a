"""Makes pages that read well as files read well as a site: links of the paths they name, lists as lists.

mkdocs calls ``on_page_markdown`` for every page (``hooks`` in mkdocs.yml).
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

_PATH = re.compile(r"(?<!\[)`docs/(?P<name>[\w/]+\.md)`(?!\])")
_ITEM = re.compile(r"(?P<indent> {0,3})(?:[-*]|\d+\.) ")


def linked(line: str, page: str) -> str:
    """With a link wherever it names another page.

    >>> linked("see `docs/formats.md`", "index.md")
    'see [`docs/formats.md`](formats.md)'
    """
    up = "../" * (len(PurePosixPath(page).parts) - 1)
    return _PATH.sub(
        lambda match: match[0] if match["name"] == page else f"[{match[0]}]({up}{match['name']})", line
    )


def as_site(text: str, page: str) -> str:
    """A page as Python-Markdown reads it: a list begins after an empty line, and one inside of another by
    four columns. Code stays as it is.

    >>> as_site("It is one of\\n- this,\\n- that.", "index.md")
    'It is one of\\n\\n- this,\\n- that.'
    """
    lines: list[str] = []
    fenced = in_list = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not (line.startswith("    ") and not in_list):
            item = _ITEM.match(line)
            if item and not item["indent"] and not in_list and lines and lines[-1].strip():
                lines.append("")
            if item and item["indent"] and in_list:
                line = "    " + line.lstrip()
            in_list = bool(item) or (in_list and (not line.strip() or line.startswith("  ")))
            line = linked(line, page)
        lines.append(line)
    return "\n".join(lines)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The text of a page, before it becomes HTML."""
    return as_site(markdown, page.file.src_uri)
