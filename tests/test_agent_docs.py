"""What agents are told to run: commands and options that there are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from commands import ok
from foretrain.agents.tools import TOOLS
from foretrain.cli.app import COMMANDS

ROOT = Path(__file__).parent.parent
TEXTS = ("skills/foretrain/SKILL.md", "AGENTS.md", "docs/agents.md")


def commands(text: str) -> set[str]:
    """Lines of code that begin with the command, and words in a line that do, without their comments."""
    inline = re.findall(r"`(foretrain [a-z][^`]*)`", text)
    lines = [line.strip("$ -").removeprefix("run: ") for line in text.splitlines()]
    found = [line.partition(" #")[0].partition(" > ")[0] for line in lines if line.startswith("foretrain ")]
    return {one.strip() for one in (*inline, *found) if "[" not in one}


ALL = sorted({command for name in TEXTS for command in commands((ROOT / name).read_text(encoding="utf-8"))})


@pytest.mark.parametrize("command", ALL)
def test_commands_and_options_that_agents_are_told_of_exist(command: str) -> None:
    _, name, *words = shlex.split(command.replace("|", " "))
    assert name in COMMANDS
    known = ok(name, "--help")
    for option in (word for word in words if word.startswith("--")):
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", known), option


def test_enough_commands_are_found() -> None:
    assert {shlex.split(command)[1] for command in ALL} >= {
        "check",
        "predict",
        "plan",
        "explain",
        "catalog",
        "mcp",
    }


def test_the_skill_says_when_to_use_it_and_names_every_tool() -> None:
    text = (ROOT / TEXTS[0]).read_text(encoding="utf-8")
    _, head, body = text.split("---\n", 2)
    assert re.search(r"^name: foretrain$", head, re.MULTILINE)
    assert re.search(r"^description: .{80,1024}$", head, re.MULTILINE)
    assert all(f"`{name}`" in body for name in TOOLS)
