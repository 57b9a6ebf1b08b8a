"""Reads the predictor of one's own that the documentation shows."""

from __future__ import annotations

from doc_commands import ROOT

_PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
PLUGIN = _PAGE.partition("```python\n")[2].partition("```")[0]
