"""The gallery of trainings is complete, and its files know nothing of foretrain."""

import ast
import tomllib
from pathlib import Path
from typing import Any

import pytest

GALLERY = Path(__file__).parent.parent / "examples" / "gallery"
ROWS = tomllib.loads((GALLERY / "gallery.toml").read_text())["training"]
PARTS = {"nano_gpt/model.py"}
"""Files that a training of the gallery imports."""


def test_table_and_readme_have_every_file() -> None:
    files = {str(path.relative_to(GALLERY)) for path in GALLERY.rglob("*.py")}
    readme = (GALLERY / "README.md").read_text()
    assert len(ROWS) == 40
    assert {row["file"] for row in ROWS} == files - PARTS
    for row in ROWS:
        for target in row["targets"]:
            what = f"{row['file']}:{target}" if target else row["file"]
            assert f"`foretrain predict {what} {row.get('options', '')}".rstrip() + "`" in readme


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["file"])
def test_file_stands_alone_and_has_its_targets(row: dict[str, Any]) -> None:
    tree = ast.parse((GALLERY / row["file"]).read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert "foretrain" not in imported
    assert "torch" in imported
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)} | {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert {target for target in row["targets"] if target} <= defined
