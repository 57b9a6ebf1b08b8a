"""Makes HTML pages of sections and figures, each one file that needs no network."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

from foretrain.errors import missing

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; background: #fff; margin: 0 }
main { max-width: 1100px; margin: 2rem auto; padding: 0 1.5rem }
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
table { border-collapse: collapse } tr { border-bottom: 1px solid #e6e9ee } .dim { color: #69727f }
"""


def whole_page(
    title: str, about: Iterable[str], sections: Iterable[tuple[str, str]], *, style: str = ""
) -> str:
    """A page as text, plotly.js included: lines about it below its title, then sections, each a heading and
    its HTML; ``style`` is CSS beyond that of every page."""
    offline, _ = _plotly()
    # Only maps fetch anything, and none is drawn: without their addresses the page names no other host to
    # load from.
    script = offline.get_plotlyjs().replace("https://cdn.", "https://offline.invalid/")
    title, below = html.escape(title), "<br>".join(map(html.escape, about))
    body = "\n".join(f"<section><h2>{heading}</h2>\n{content}</section>" for heading, content in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>foretrain: {title}</title><style>{_STYLE}{style}</style>"
        f"<script>{script}</script></head>\n<body><main>\n"
        f"<h1>{title}</h1><p>{below}</p>\n{body}\n</main></body></html>\n"
    )


def drawn(figure: Any) -> str:
    """A figure as a part of a page."""
    config = {"displaylogo": False, "responsive": True}
    text: str = figure.to_html(full_html=False, include_plotlyjs=False, config=config)
    return text


def graph_objects() -> Any:
    """Import what figures are made of."""
    return _plotly()[1]


def _plotly() -> tuple[Any, Any]:
    try:
        import plotly.graph_objects as objects
        import plotly.offline as offline
    except ImportError as error:
        raise missing("plotly", "html") from error
    return offline, objects
