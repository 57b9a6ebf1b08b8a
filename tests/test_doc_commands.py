"""Every command that README and documentation tell people to run: it works as it is written, on small stand-ins
for the reader's files; what cannot run here is read by its parser, to the last option."""

from __future__ import annotations

import fnmatch
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from commands import ok, run
from doc_commands import PAGES, DocCommand, block_commands, inline_commands, usage_forms
from doc_files import write_files
from foretrain.cli import app, helping
from foretrain.cli.app import COMMANDS as ALL
from foretrain.graph import flops

NOT_RUN = {
    "needs a GPU": ("measure ops *jsonl", "measure ops * --budget 10m", "measure pack *", "measure steps *"),
    "needs what was measured on a GPU": (
        "fit deletepop ops.parquet *",
        "design operators.jsonl * --measured *",
    ),
    "measures for a minute or more": ("measure campaign *", "measure host *", "advise * --measure"),
    "runs until it is ended": ("serve", "mcp"),
    "needs a server": ("* --server *",),
    "needs a Ray cluster": ("* --ray", "* --ray *"),
    "needs the tools of others": ("* benchmarks/peers.py:*",),
    "needs public data": ("schedule gavel.trace *", "advise pollux_t4.jsonl *"),
    "learns for minutes": ("fit * src/foretrain/*", "embed train *", "* --embedding e.safetensors *"),
    "scores for minutes": ("evaluate data/*", "leaderboard FILES *"),
    "is run by tests/test_gallery.py": ("predict lit.py:LitModel", "predict finetune.py:trainer"),
    "needs the edits of its section": ("* --framework our-trainer",),
}
"""Why a command is not run here, and which; ``*`` stands for any words. The first that fits is taken, and
``--collect-only`` needs no GPU."""
SHORTER = {
    r"\bJOB\b(?!\.)": "job.toml",
    r"\bRUNS\b(?!\.)": "runs.jsonl",
    r"^foretrain plan (llama-3-8b|Llama-3.1-8B|examples\S+)": "foretrain plan job.toml",
    r"^foretrain plan": "foretrain plan --seconds 1",
    r"--max-devices (16|64|256)": "--max-devices 4",
    r"h100,h200,b200": "h100",
    r"--count \d+": "--count 3",
    r"--train-runs 20": "--train-runs 8",
    r"data/ops_h200.parquet": "ops.parquet",
    r"--store postgresql\S+": "",
    r"--processes 8": "--processes 2",
    r"--predictor deletepop --split": "--predictor roofline --split",
    r"^foretrain learn (\S+\.jsonl|--store)": r"foretrain learn --predictors flops,ernest --folds 2 \1",
    r"--predictor ray_models": "--predictor cherrypick",
    r"^foretrain fit ray_models": "foretrain fit ernest",
    r"^foretrain advise": "foretrain advise --predictor ernest",
    r"jobs=\d+": "jobs=20",
    r"--search 100": "--search 3",
}
"""What is smaller or quicker here than in the text, so that all commands together take half a minute."""
BEFORE = {
    "joined.md": ("runs import runs.jsonl",),
    "measuring.md": ("measure ops model.py:make --collect-only --device cpu -o operators.jsonl",),
    "design.md": ("measure ops model.py:make --collect-only --device cpu -o operators.jsonl",),
    "scheduling.md": ("evaluate runs.jsonl --predictor roofline --json evaluation.json",),
}
"""What a page's reader has done before."""
COMMANDS = {path.name: block_commands(path) for path in PAGES}
IN_ONE_PROCESS = ("schedule",)


def why_not(told: DocCommand) -> str | None:
    words = told.words.removeprefix("foretrain ")
    if "--collect-only" in words:
        return None
    found = [
        reason for reason, patterns in NOT_RUN.items() for one in patterns if fnmatch.fnmatch(words, one)
    ]
    return found[0] if found else None


def to_type(text: str) -> list[str]:
    """The words as they are run here, file names with ``*`` as a shell has them."""
    for pattern, shorter in SHORTER.items():
        text = re.sub(pattern, shorter, text)
    words = [
        name for word in shlex.split(text)[1:] for name in (sorted(map(str, Path().glob(word))) or [word])
    ]
    return (
        [*words, "--processes", "1"] if words[0] in IN_ONE_PROCESS and "--processes" not in words else words
    )


def command_of(words: list[str]) -> tuple[Any, Any, list[str]]:
    """The command that the parser finds, its context's parent, and the words that are its own."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("foretrain", list(words))
    while True:
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        if not hasattr(command, "resolve_command") or not rest:
            return command, context, rest
        context = command.make_context(name, rest, parent=context)


def parse(words: list[str]) -> None:
    """Let the parser of a command read its words, and run nothing."""
    command, parent, rest = command_of(words)
    command.make_context(command.name, rest, parent=parent).close()


@pytest.fixture
def folder(
    request: pytest.FixtureRequest, tmp_path: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Where a page's commands are run one after the other."""
    write_files(tmp_path, request.param)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    monkeypatch.setattr(flops, "FORMULAS", dict(flops.FORMULAS))  # what a page registers ends with it
    monkeypatch.chdir(tmp_path)
    for words in BEFORE.get(request.param, ()):
        ok(*words.split())
    return tmp_path


def test_commands_are_found() -> None:
    assert sum(map(len, COMMANDS.values())) > 120
    assert {told.words.split()[1] for page in COMMANDS.values() for told in page} >= set(ALL) - {"capture"}


@pytest.mark.parametrize(
    ("folder", "page"), [(name, name) for name, commands in COMMANDS.items() if commands], indirect=["folder"]
)
def test_commands_of_a_page_run(folder: Path, page: str) -> None:
    for command in COMMANDS[page]:
        if command.is_usage:
            for form in usage_forms(command.words):
                parse(to_type(form))
        elif why_not(command):
            parse(to_type(command.words))
        else:
            result = run(*to_type(command.words))
            assert result.exit_code == 0, f"{page}:{command.line}: {command.words}\n{result.output}"
            assert result.exception is None


@pytest.mark.parametrize("words", helping.EXAMPLES)
def test_examples_in_the_help_of_commands_can_be_typed(words: str) -> None:
    for line in helping.EXAMPLES[words]:
        assert line.startswith(f"foretrain {words}".rstrip())
        if not line.endswith("--help"):
            parse(to_type(line))


def test_every_reason_is_that_of_a_command() -> None:
    told = [told for page in COMMANDS.values() for told in page]
    assert {why_not(one) for one in told} == {None, *NOT_RUN}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands_within_sentences_have_their_options(path: Path) -> None:
    for command in inline_commands(path):
        words = [word for word in shlex.split(command.words)[1:] if word != "..."]
        if words[0].startswith("-"):
            continue  # an option of the program itself
        rest = command_of(words)[2]
        known = ok(*words[: len(words) - len(rest)], "--help")
        for option in (word for word in rest if word.startswith("-")):
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", known), (
                f"{command.page}:{command.line}: {option}"
            )
