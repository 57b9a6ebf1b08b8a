"""Writes the reference pages of the documentation from the code: commands, Python API, catalogue, jobs and
runs.

    python docs_tools/reference.py [FOLDER]    # docs/reference by default, as make docs runs it
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

import foretrain
from foretrain.adapter import Adapter
from foretrain.catalog import Catalog, LinkSpec
from foretrain.cli import app, helping
from foretrain.cluster import ClusterSpec, GroupSpec, ServerNodes
from foretrain.plan import Plan
from foretrain.quantities import QUANTITIES
from foretrain.units import format_bytes
from foretrain.workload import Model, Training

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"
MADE = "*Made from the code by `docs_tools/reference.py`.*"

TABLES: dict[str, tuple[type, ...]] = {
    "model": (Model,),
    "training": (Training,),
    "training.adapter": (Adapter,),
    "cluster": (GroupSpec, ClusterSpec),
    "cluster.intra_node and cluster.inter_node": (LinkSpec,),
    "cluster.servers": (ServerNodes,),
    "plan": (Plan,),
}
"""The tables of a job file, and the classes that read them; a field of two of them is told of once."""


def cell(text: object) -> str:
    """Text as it stands in a cell of a table."""
    parts = (
        " ".join(str(text).split()).replace("``", "`").split("`")
    )  # what is between backticks stands as it is
    return "`".join(
        part if i % 2 else part.replace("<", "&lt;").replace("|", "\\|") for i, part in enumerate(parts)
    )


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table of Markdown."""
    names = list(head)
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


# Commands


def commands(group: Any = None, path: tuple[str, ...] = ("foretrain",)) -> Iterator[tuple[str, Any]]:
    """Every command with its full name, those of groups too."""
    group = get_command(app) if group is None else group
    context = typer.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        yield " ".join((*path, name)), command
        if hasattr(command, "list_commands"):
            yield from commands(command, (*path, name))


def commands_page() -> str:
    """Every command with its help, options and examples, in the order of ``foretrain --help``."""
    of_a_job: dict[str, dict[str, str]] = {}
    parts = ["# Commands", MADE, "`foretrain COMMAND --help` shows the same on your terminal."]
    order = [name for names in helping.COMMAND_GROUPS.values() for name in names]
    for name, command in sorted(commands(), key=lambda found: order.index(found[0].split()[1])):
        parts.append(f"## {name}")
        parts.append(inspect.cleandoc(command.help or "").replace("\f", ""))
        context = typer.Context(command)
        rows, takes_a_job = [], False
        for one in command.params:
            if "--help" in one.opts or (record := one.get_help_record(context)) is None:
                continue
            if section := one.rich_help_panel:
                of_a_job.setdefault(section, {}).update([record])
                takes_a_job = True
            else:
                rows.append((f"`{record[0]}`", record[1]))
        if rows:
            parts.append(table(("argument or option", ""), rows))
        if takes_a_job:
            parts.append("And the [options of a job](#options-of-a-job).")
        if lines := helping.EXAMPLES.get(name.partition(" ")[2]):
            parts.append("\n".join(["```", *lines, "```"]))
    parts += [
        "## Options of a job",
        "`predict`, `plan`, `check` and `capture` take them; each goes over the field of a job file. `plan` "
        "searches how a model is spread, so it takes none that say it.",
    ]
    for section, found in of_a_job.items():
        rows = [(f"`{words}`", text) for words, text in found.items()]
        parts += [f"### {section}", table(("option", ""), rows)]
    return _page(parts)


# Python


class _Written:
    """An annotation or a default as it stands in a signature."""

    def __init__(self, value: Any) -> None:
        self.text = value if isinstance(value, str) else inspect.formatannotation(value)

    def __repr__(self) -> str:
        return self.text


def _parameter(parameter: inspect.Parameter) -> inspect.Parameter:
    changes: dict[str, Any] = {}
    if parameter.annotation is not parameter.empty:
        changes["annotation"] = _Written(parameter.annotation)
    if inspect.isroutine(parameter.default):
        changes["default"] = _Written("...")
    return parameter.replace(**changes)


def _signature(value: Any) -> str:
    signature = inspect.signature(value)
    parameters = [_parameter(one) for one in signature.parameters.values() if one.name not in ("self", "cls")]
    returned = signature.return_annotation
    if inspect.isclass(value) or returned is signature.empty:
        return str(inspect.Signature(parameters))
    return str(inspect.Signature(parameters, return_annotation=_Written(returned)))


def _doc(value: Any) -> str:
    return inspect.cleandoc(value.__doc__ or "").replace("``", "`")


def _code(value: str) -> str:
    """A docstring with its examples as blocks of code."""
    lines: list[str] = []
    inside = False
    for line in value.splitlines():
        if line.startswith(">>>") and not inside:
            lines += ["", "```pycon"]
            inside = True
        if inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line)
    return "\n".join([*lines, "```"] if inside else lines)


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that a class of foretrain defines, or inherits from one."""
    if issubclass(cls, Exception):
        return
    for name, value in inspect.getmembers_static(cls):
        plain = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        plain = plain.fget if isinstance(plain, property) else plain
        if not name.startswith("_") and inspect.isfunction(plain):
            yield name, value


def _method(name: str, value: Any) -> tuple[str, str]:
    if isinstance(value, property):
        return f"`.{name}`", _doc(value.fget).split("\n\n")[0]
    plain = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    return f"`.{name}{_signature(plain)}`", _doc(plain).split("\n\n")[0]


def python_page() -> str:
    """The public names of the package, with signatures and docstrings."""
    parts = [
        "# Python API",
        MADE,
        "Names of `import foretrain`; [In Python](../python.md) tells how to use them.",
    ]
    for name in foretrain.__all__:
        value = getattr(foretrain, name)
        kind = "class " if inspect.isclass(value) else ""
        parts.append(f"## {name}")
        signature = "" if kind and issubclass(value, Exception) else _signature(value)
        parts.append(f"```python\n{_wrapped(f'{kind}foretrain.{name}{signature}')}\n```")
        parts.append(_code(_doc(value)))
        if kind:
            if dataclasses.is_dataclass(value):
                parts.append(_fields_table((value,)))
            members = [_method(*member) for member in _members(value)]
            if members:
                parts.append(table(("method or property", ""), members))
    return _page(parts)


def _wrapped(signature: str) -> str:
    """A long signature with an argument per line."""
    if len(signature) <= 100:
        return signature
    return textwrap.fill(signature, 100, subsequent_indent="    ", break_long_words=False)


# Fields


def _told_fields(cls: type) -> dict[str, str]:
    """What the texts under the fields of a class say of them."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    documented: dict[str, str] = {}
    for first, second in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(first, ast.AnnAssign)
            and isinstance(first.target, ast.Name)
            and isinstance(second, ast.Expr)
            and isinstance(second.value, ast.Constant)
        ):
            documented[first.target.id] = str(second.value.value)
    return documented


def _kind(hint: Any) -> str:
    """The type of a field in words: of a choice, what may stand there."""
    if isinstance(hint, str):
        return f"`{hint}`"
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(hint))
    if hint is type(None):
        return ""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return f"list of {_kind(arguments[0])}"
    if arguments and typing.get_origin(hint) not in (dict, Mapping) and "Mapping" not in str(hint)[:30]:
        return " or ".join(filter(None, (_kind(one) for one in arguments)))
    plain = {int: "whole number", float: "number", str: "text", bool: "true or false"}
    return plain.get(hint) or ("table" if "Mapping" in str(hint) else str(getattr(hint, "__name__", hint)))


def _hints(cls: type) -> Mapping[str, Any]:
    """The types of its fields; as they are written where a name is only known to type checkers."""
    try:
        return typing.get_type_hints(cls)
    except NameError:
        return {field.name: field.type for field in dataclasses.fields(cls)}


def _fields(classes: tuple[type, ...]) -> Iterator[tuple[str, str, str, str]]:
    seen: set[str] = set()
    for cls in classes:
        hints, documented = _hints(cls), _told_fields(cls)
        for field in dataclasses.fields(cls):
            if field.name in seen or field.name.startswith("_"):
                continue
            seen.add(field.name)
            default = "" if field.default in (dataclasses.MISSING, None, "", ()) else f"`{field.default}`"
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                default = "required"
            yield (
                f"`{field.name}`",
                _kind(hints[field.name]),
                default if len(default) < 40 else "",
                documented.get(field.name, ""),
            )


def _fields_table(classes: tuple[Any, ...]) -> str:
    return table(("field", "is", "default", ""), _fields(classes))


def jobs_page() -> str:
    """The fields of jobs and runs."""
    parts = [
        "# Fields of jobs and runs",
        MADE,
        "What each field means, with examples, is in [Formats](../formats.md). A quantity with a unit may be "
        'text with one: `"80 GiB"`, `"400 Gb/s"`, `"24h"`.',
    ]
    for name, classes in TABLES.items():
        parts += [f"## {name}", _fields_table(classes)]
    parts += [
        "## run",
        "A line of a runs file has `job` (the tables above), `measured` (a number for each quantity that was "
        "measured, of those below) and `provenance` (a table: where the figures come from).",
        "## Quantities",
        table(("quantity", "unit"), ((f"`{name}`", unit) for name, unit in QUANTITIES.items())),
    ]
    return _page(parts)


# Catalogue


def _figure(value: float | None, scale: float, form: str = "{:g}") -> str:
    return "" if value is None else form.format(round(value / scale, 3))


def catalogue_page() -> str:
    """Devices and nodes, each with its source."""
    catalog = Catalog()  # the built-in entries alone
    devices = [catalog.device(name) for name in catalog.names("devices")]
    nodes = [catalog.node(name) for name in catalog.names("nodes")]
    device_rows = [
        (
            f"`{one.name}`",
            ", ".join(one.aliases),
            one.architecture,
            format_bytes(one.memory_bytes),
            _figure(one.memory_bytes_per_s, 1e9),
            _figure(one.fp32, 1e12),
            _figure(one.bf16 or one.fp16, 1e12),
            _figure(one.fp8, 1e12),
            _figure(one.tdp_w, 1),
            one.source,
        )
        for one in devices
    ]
    node_rows = [
        (
            f"`{one.name}`",
            ", ".join(one.aliases),
            f"{one.devices} x {one.device}",
            _link(one.intra_node),
            _link(one.inter_node),
            one.cpu or "",
            one.source,
        )
        for one in nodes
    ]
    head = (
        "device", "also", "architecture", "memory", "GB/s", "fp32 TFLOP/s", "bf16 or fp16", "fp8", "W",
        "source",
    )  # fmt: skip
    return _page(
        [
            "# Catalogue",
            MADE,
            "Figures per device, of dense matrix products. `foretrain catalog NAME` shows an entry in full; "
            "[Extending](../extending.md) tells how to add your own.",
            "## Devices",
            table(head, device_rows),
            "## Nodes",
            table(("node", "also", "devices", "inside", "between nodes", "CPU", "source"), node_rows),
        ]
    )


def _link(link: LinkSpec) -> str:
    rate = "" if link.bandwidth is None else f" {link.bandwidth * 8 / 1e9:g} Gb/s"
    return f"{link.kind or ''}{rate}".strip()


def _page(parts: Iterable[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands_page,
    "python.md": python_page,
    "jobs.md": jobs_page,
    "catalogue.md": catalogue_page,
}
"""The pages, and what makes each."""


def write(folder: Path = FOLDER) -> None:
    """Every page, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
