"""Lays out the help of commands: options by what they are about, and lines to try at its end."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

WIDTH = 110
"""Columns that help takes at most, on a terminal that has them."""
COMMAND_GROUPS: Mapping[str, tuple[str, ...]] = {
    "Before a training": ("predict", "plan", "check", "explain"),
    "A cluster and its queue": ("schedule",),
    "With measured runs": ("measure", "runs", "design", "learn", "fit", "advise", "embed"),
    "How far off forecasts are": ("evaluate", "leaderboard", "validate"),
    "For others": ("serve", "mcp"),
    "To look up and to hand on": ("catalog", "capture"),
}
"""All commands, by what a reader is after, what is asked most often first."""

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "": (
        "foretrain predict resnet50 --device h100 --batch 256 --precision amp-bf16",
        "foretrain plan Llama-3.1-8B --devices h100 --max-devices 16 --batch 64 --steps 5000",
        "foretrain predict --help",
    ),
    "predict": (
        "foretrain predict resnet50 --device h100 --batch 256 --samples 1281167 --epochs 90",
        "foretrain predict train.py --device a100",
        "foretrain predict job.toml --batch 512 --breakdown layer --html page.html",
        "foretrain predict --from run.sh",
    ),
    "plan": (
        "foretrain plan job.toml --devices h100,a100 --max-devices 16 --deadline 7d",
        "foretrain plan Llama-3.1-8B --devices h100 --max-devices 16 --batch 64 --steps 5000 --out launch",
    ),
    "check": ("foretrain check job.toml --max-cost 500 --max-time 24h --fits 0.95",),
    "explain": (
        "foretrain explain a.toml b.toml",
        "foretrain explain resnet50 resnet101 --device a100 --batch 64",
    ),
    "schedule": (
        "foretrain schedule --generate jobs=150,gap=60s,median=20min --cluster 2x8xv100",
        "foretrain schedule trace.csv --cluster 2x8xv100 --policy fifo,srtf --html page.html",
    ),
    "measure ops": (
        "foretrain measure ops jobs.jsonl -o ops.jsonl",
        "foretrain measure ops jobs.jsonl --collect-only -o operators.jsonl",
    ),
    "measure pack": ("foretrain measure pack ops.jsonl -o ops.parquet",),
    "measure steps": ("foretrain measure steps jobs.jsonl -o runs.jsonl",),
    "measure host": ("foretrain measure host -o host.json",),
    "measure campaign": (
        "foretrain measure campaign --models resnet18 --workers 1,2 --batch 32 -o runs.jsonl",
    ),
    "runs list": ("foretrain runs list --store runs.jsonl",),
    "runs import": ("foretrain runs import runs.jsonl",),
    "design": (
        "foretrain design operators.jsonl --operators --count 500 -o chosen.jsonl",
        "foretrain design job.toml --cluster 1,2,4 --count 6 -o cells.jsonl",
    ),
    "learn": ("foretrain learn runs.jsonl --name mine",),
    "fit": ("foretrain fit deletepop runs.jsonl -o mine",),
    "advise": ("foretrain advise runs.jsonl --deadline 6h --epochs 3",),
    "evaluate": (
        "foretrain evaluate runs.jsonl",
        "foretrain evaluate runs.jsonl --predictor flops --split leave-model-out",
    ),
    "leaderboard": ("foretrain leaderboard runs.jsonl --most 40 --out board",),
    "validate": ("foretrain validate megatron_2021",),
    "serve": ("foretrain serve --port 8760",),
    "mcp": ("foretrain mcp --allow jobs",),
    "catalog": ("foretrain catalog devices", "foretrain catalog h100"),
    "capture": ("foretrain capture resnet50 --batch 256 -o resnet50.json.zst",),
}
"""Lines to try, by the words of a command; those of "" stand in the help of ``foretrain`` itself."""


def lay_out(command: Any) -> None:
    """Let the help of a command, and of those of a group, have its sections and its examples."""
    command.format_options = functools.partial(_write_options, command)
    command.help = str(command.help or "").replace("``", "`")
    for subcommand in getattr(command, "commands", {}).values():
        lay_out(subcommand)


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    """Arguments, options in their sections (``rich_help_panel``), commands, examples."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        if (record := parameter.get_help_record(ctx)) is not None:
            is_argument = parameter.param_type_name == "argument"
            section = "Arguments" if is_argument else parameter.rich_help_panel or "Options"
            name, text = record
            name = _TYPE.sub("" if is_argument else _plain_type, name)
            sections.setdefault(section, []).append((name, text))
    for name, records in sections.items():
        with formatter.section(name):
            formatter.write_dl(records)
    if hasattr(command, "list_commands"):
        names = command.list_commands(ctx)
        with formatter.section("Commands"):
            formatter.write_dl([(name, _first_line(command.get_command(ctx, name))) for name in names])
    write_examples(str(ctx.command_path).partition(" ")[2], formatter)


_TYPE = re.compile(r" <(?:list\[)?(str|int|float|path)(?: range)?\]?>$", re.IGNORECASE)
"""What the parser calls the type of a value; the name of an argument says it already."""


def _plain_type(found: re.Match[str]) -> str:
    """
    >>> [_TYPE.sub(_plain_type, name) for name in ("--top <int range>", "--split <list[str]>", "--from FILE")]
    ['--top <int>', '--split <text>', '--from FILE']
    """
    kind = found[1].lower()
    return f" <{'text' if kind == 'str' else kind}>"


def _first_line(command: Any) -> str:
    return str(command.help or "").strip().split("\n\n")[0].replace("\n", " ")


def write_examples(words: str, formatter: Any) -> None:
    """The lines to try of a command, each on a line of its own, however long."""
    if lines := EXAMPLES.get(words):
        formatter.write("\nExamples:\n")
        for line in lines:
            formatter.write(f"  {line}\n")
