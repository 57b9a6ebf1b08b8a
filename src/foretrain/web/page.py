"""Makes one HTML file of the scripts, their style and a page's data, which needs nothing else."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
from importlib import resources
from pathlib import Path
from typing import Any

from foretrain.files import write_atomically

STYLES = ("base.css",)
SCRIPTS = (
    "format.js", "dom.js", "view.js", "charts.js", "timeline.js", "launch.js", "table_source.js",
    "sections.js", "planner.js", "explorer.js",
)  # fmt: skip
"""Classic scripts, in the order in which they are read; each adds to the one object ``foretrain``."""
_START = "foretrain.start(document);"


@functools.cache
def static(name: str) -> str:
    """A script or style sheet of the package, as text."""
    return (resources.files("foretrain.web") / "static" / name).read_text(encoding="utf-8")


def page(title: str, data: dict[str, Any]) -> str:
    """The page as text: it may run its own script and style, and load nothing."""
    style = "\n".join(map(static, STYLES))
    script = "\n".join([*map(static, SCRIPTS), _START])
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>foretrain: {html.escape(title)}</title>\n<style>{style}</style></head>\n"
        '<body><div id="explorer"><p class="loading">This page needs JavaScript.</p></div>\n'
        f'<script type="application/json" id="foretrain-data">{_embedded(data)}</script>\n'
        f"<script>{script}</script></body></html>\n"
    )


def write_page(title: str, data: dict[str, Any], path: Path) -> int:
    """Write the page; returns its size in bytes."""
    text = page(title, data)
    write_atomically(path, text)
    return len(text.encode())


def _embedded(data: dict[str, Any]) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
