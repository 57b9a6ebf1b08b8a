"""The documentation's site has every page in its navigation, and its reference every command and name."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import foretrain
from foretrain import predictors
from foretrain.catalog import Catalog
from foretrain.cli.app import COMMANDS
from foretrain.quantities import QUANTITIES

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return tool("reference")


def tool(name: str) -> ModuleType:
    """A module of the folder that makes the documentation."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs_tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    return read


def pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from pages(part)


def written() -> set[str]:
    """The pages that are kept, without those that are made from the code."""
    return {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if path.parent.name != "reference"}


def test_every_page_is_in_the_navigation_once(reference: ModuleType) -> None:
    listed = list(pages(settings()["nav"]))
    assert sorted(listed) == sorted(written() | {f"reference/{name}" for name in reference.PAGES})


def test_the_groups_are_four_behind_the_start_page() -> None:
    groups = [next(iter(part)) for part in settings()["nav"]]
    assert groups == ["Start", "Guide", "Reference", "Explanation", "Results"]


def test_nothing_is_loaded_from_elsewhere() -> None:
    read = settings()
    assert read["theme"]["font"] is False
    assert read["plugins"] == ["search"]
    assert "extra_javascript" not in read
    for name in read["extra_css"]:
        style = (DOCS / name).read_text(encoding="utf-8")
        assert not any(word in style for word in ("url(", "@import", "//"))


@pytest.mark.parametrize("page", sorted(written()))
def test_links_between_pages_lead_somewhere(reference: ModuleType, page: str) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not target.startswith(("http:", "https:")):
            name = str(((DOCS / page).parent / target).resolve().relative_to(DOCS.resolve()))
            assert (DOCS / name).exists() or name.removeprefix("reference/") in reference.PAGES, target


@pytest.mark.parametrize("page", ["architecture.md", "capture.md", "figures.md"])
def test_modules_that_a_page_names_are_there(page: str) -> None:
    there = [f"/{path.relative_to(ROOT)}" for path in ROOT.glob("[sbt]*/**/*.py")]
    for name in re.findall(r"`([\w/]+\.py)`", (DOCS / page).read_text(encoding="utf-8")):
        assert any(path.endswith(f"/{name}") for path in there), name


def test_every_command_has_its_section_with_its_options(reference: ModuleType) -> None:
    text = reference.commands_page()
    sections = set(re.findall(r"^## foretrain (.+)$", text, re.MULTILINE))
    assert set(COMMANDS) <= sections
    assert {"measure ops", "measure steps", "measure campaign", "runs import", "embed train"} <= sections
    predict = text.split("## foretrain predict\n")[1].split("\n## ")[0]
    assert all(f"`{option} " in predict for option in ("--breakdown", "--html", "--predictor"))
    assert "[options of a job](#options-of-a-job)" in predict
    assert COMMANDS["predict"] in " ".join(predict.split())
    assert "foretrain predict train.py" in predict
    of_a_job = text.split("## Options of a job\n")[1]
    assert all(f"`{option} " in of_a_job for option in ("--device", "--batch", "--precision", "--set"))
    assert "\\|" not in "".join(re.findall(r"`[^`]+`", text))


def test_every_public_name_has_its_section(reference: ModuleType) -> None:
    text = reference.python_page()
    assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == foretrain.__all__
    assert " at 0x" not in text


def test_every_device_and_node_is_listed_with_its_source(reference: ModuleType) -> None:
    text, catalog = reference.catalogue_page(), Catalog()
    for kind, entry in (("devices", catalog.device), ("nodes", catalog.node)):
        for name in catalog.names(kind):  # type: ignore[arg-type]
            row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
            assert " ".join(entry(name).source.split()).split("<")[0] in row


def test_every_field_of_a_job_and_every_quantity_is_listed(reference: ModuleType) -> None:
    text = reference.jobs_page()
    assert all(f"| `{name}` |" in text for name in QUANTITIES)
    for path in sorted((ROOT / "examples" / "jobs").glob("*.toml")):
        for section, fields in tomllib.loads(path.read_text(encoding="utf-8")).items():
            told = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
            assert all(f"| `{field}` |" in told for field in fields)


def test_the_pages_are_written_into_a_folder(reference: ModuleType, tmp_path: Path) -> None:
    reference.write(tmp_path / "reference")
    assert {path.name for path in (tmp_path / "reference").iterdir()} == set(reference.PAGES)


def test_the_version_is_the_same_everywhere() -> None:
    changes = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    released = [heading for heading in changes if heading != "Unreleased"]
    version, day = re.fullmatch(r"([\d.]+) \((\d{4}-\d\d-\d\d)\)", released[0]).groups()  # type: ignore[union-attr]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert "Unreleased" not in changes[1:]
    assert version == foretrain.__version__ == citation["version"]
    assert day == str(citation["date-released"])


def test_the_page_on_choosing_has_every_predictor() -> None:
    text = (DOCS / "choose.md").read_text(encoding="utf-8").split("## All of them")[1]
    rows = re.findall(r"^\| \[?`(\w+)`", text, re.MULTILINE)
    assert sorted(rows) == sorted(predictors.names())


def test_paths_become_links_and_lists_begin_after_an_empty_line() -> None:
    as_site = tool("site_hooks").as_site
    assert as_site("see `docs/formats.md`", "a.md") == "see [`docs/formats.md`](formats.md)"
    assert as_site("see `docs/formats.md`", "b/a.md") == "see [`docs/formats.md`](../formats.md)"
    assert as_site("[`docs/formats.md`](formats.md)", "a.md") == "[`docs/formats.md`](formats.md)"
    assert as_site("one of\n- a\n- b", "a.md") == "one of\n\n- a\n- b"
    assert as_site("1. a\n   more\n   - b\n2. c", "a.md") == "1. a\n   more\n    - b\n2. c"
    code = "```\ntext `docs/formats.md`\n- a\n```\n\n    text `docs/formats.md`"
    assert as_site(code, "a.md") == code


def test_every_page_that_is_named_is_there(reference: ModuleType) -> None:
    for page in written():
        for name in re.findall(r"`docs/([\w/]+\.md)`", (DOCS / page).read_text(encoding="utf-8")):
            assert (DOCS / name).exists() or name.removeprefix("reference/") in reference.PAGES, (page, name)
