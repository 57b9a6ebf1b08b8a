"""The commands around kept runs: ``runs list``, ``runs show``, ``runs import`` and ``runs export``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretrain.cli.app import JsonFlag, registry, say, show
from foretrain.cli.job_options import CatalogOption, Options, with_options
from foretrain.errors import ForetrainError, InputError, invalid, unknown
from foretrain.interrupts import exit_code
from foretrain.units import counted

if TYPE_CHECKING:
    from foretrain.catalog import Catalog
    from foretrain.measure.store import Entry, Filter, Runs, Store

_BATCH = 200

runs = typer.Typer(
    help="Measured runs: look at them, and move them between files and databases.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
registry.add_typer(runs, name="runs")

_DEFAULT = "[default: $FORETRAIN_STORE, else your data folder]"
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL|FILE",
        help=f"A database or a .jsonl file. {_DEFAULT}",
    ),
]


class FilterOptions:
    """The options that say which runs: the fields of a ``Filter``."""

    model: Annotated[str | None, typer.Option(help="Only this model; * stands for anything.")]
    device: Annotated[str | None, typer.Option(help="Only runs on this device.")]
    source: Annotated[str | None, typer.Option(help="Only runs that come from here.")]
    label: Annotated[str | None, typer.Option(help="Only runs with this label.")]
    quantity: Annotated[str | None, typer.Option(help="Only runs that measured this, such as step_time_s.")]


@runs.command("list")
@with_options(FilterOptions)
def list_(
    *,
    store: StoreOption = None,
    catalog: CatalogOption = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000_000, help="At most so many, the newest.")] = 50,
    as_json: JsonFlag = False,
    options: Options,
) -> None:
    """The runs that are kept, the newest last."""
    where = _filter(options)
    with _open(store) as kept:
        entries = list(kept.entries(where, last=limit))
        total = kept.count(where) if len(entries) == limit else len(entries)
    if as_json:
        from foretrain.report import dump

        typer.echo(dump([_summary(entry) for entry in entries]))
    elif entries:
        _show_table(entries)
    say(
        f"{len(entries):,} of {counted(total, 'run')} in {kept.name}"
        if total > len(entries)
        else f"{counted(total, 'run')} in {kept.name}"
    )


@runs.command("show")
def show_(
    run: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="The start of an id, as `runs list` prints it.", show_default=False
        ),
    ],
    store: StoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Everything about one run."""
    with _open(store) as kept:
        entry = kept.get(run)
    if as_json:
        from foretrain.report import dump

        typer.echo(dump(entry.document))
        return
    from foretrain.report.tables import details

    job, measured = entry.document["job"], entry.document["measured"]
    about = {
        "id": entry.id,
        "kept_since": "" if entry.created is None else f"{entry.created:%Y-%m-%d %H:%M} UTC",
    }
    figures = {name: _figure(name, value) for name, value in measured.items()}
    show(details(about), "", details(job), "", details(figures), "", details(entry.document["provenance"]))


@runs.command("import")
def import_(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="RUNS.jsonl", help="Files of measured runs.", show_default=False),
    ],
    store: Annotated[
        str | None, typer.Option("--store", metavar="URL|FILE", help=f"A database. {_DEFAULT}")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="All or nothing: a line that is not a run stops it.")
    ] = False,
    catalog: CatalogOption = None,
) -> None:
    """Put the runs of files into a database; those that it has already are left as they are."""
    from foretrain.catalog import Catalog
    from foretrain.measure.store import Store, default_store, hide_password, is_database

    target = store or default_store()
    if not is_database(target):
        raise InputError(
            f"--store: {target!r} is not a database; name a URL such as sqlite:///runs.db, or a .db file"
        )
    lines, tally = _lines(files), _Tally()
    try:
        with Store.open(target) as kept:
            _import(lines, kept, Catalog.load(catalog), tally, strict=strict)
    except KeyboardInterrupt:
        say(
            f"interrupted: {hide_password(target)} has at least "
            f"the first {tally.done:,} of {len(lines):,} lines; import again for the rest"
        )
        raise typer.Exit(exit_code()) from None
    except ForetrainError:
        if tally.done:
            say(f"stopped: {tally} of {len(lines):,} in {hide_password(target)}")
        raise
    say(f"{tally} in {hide_password(target)}")
    if tally.failed:
        raise typer.Exit(1 if tally.failed < len(lines) else 2)


@runs.command("export")
@with_options(FilterOptions)
def export(
    *,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="Where the runs go: a .jsonl or .jsonl.zst file.", show_default=False
        ),
    ],
    store: StoreOption = None,
    catalog: CatalogOption = None,
    options: Options,
) -> None:
    """Write runs to a file, one a line, in the order in which they came."""
    import zstandard

    from foretrain.files import write_atomically
    from foretrain.report import dump

    if not out.name.endswith((".jsonl", ".jsonl.zst")):
        raise invalid("--out", str(out), "a .jsonl or .jsonl.zst file")
    with _open(store) as kept:
        entries = kept.entries(_filter(options))
        lines = [dump(entry.seen_from(out.parent), indent=None) + "\n" for entry in entries]
    content = "".join(lines).encode()
    write_atomically(out, zstandard.compress(content, 19) if out.suffix == ".zst" else content)
    say(f"{counted(len(lines), 'run')} in {out}")


def _open(store: str | None) -> Runs:
    from foretrain.measure.store import default_store, open_store

    return open_store(store or default_store(), report=say)


def _filter(options: Options) -> Filter:
    from foretrain.measure.store import Filter
    from foretrain.quantities import QUANTITIES

    if "quantity" in options and options["quantity"] not in QUANTITIES:
        raise unknown("--quantity", options["quantity"], QUANTITIES)
    if "device" in options:
        options = {**options, "device": _full_name(options["device"])}
    return Filter(**options)


def _full_name(device: str) -> str:
    """The catalogue's name where it knows one: runs are kept under it."""
    from foretrain.catalog import Catalog

    try:
        return Catalog.load().device(device).name
    except InputError:
        return device


# What is printed


def _summary(entry: Entry) -> dict[str, Any]:
    created = {"created": entry.created.isoformat()} if entry.created else {}
    columns = {name: getattr(entry, name) for name in ("id", "model", "device", "source", "label")}
    training = entry.document["job"]["training"]
    return {
        **columns,
        "devices": _devices(entry.document["job"]["cluster"]),
        "global_batch": training["global_batch"],
        "precision": training.get("precision", "fp32"),
        "measured": entry.document["measured"],
        **created,
    }


def _show_table(entries: Sequence[Entry]) -> None:
    """Print one row for each run; labels only where they say more than the model's name."""
    from foretrain.report.tables import table

    labelled = any(entry.label not in ("", entry.model) for entry in entries)
    headings = (
        "id",
        "model",
        "device",
        "batch",
        "precision",
        "step",
        "source",
        *(("label",) if labelled else ()),
    )
    rows = []
    for entry in entries:
        about = _summary(entry)
        step = about["measured"].get("step_time_s")
        device = f"{about['devices']:,} x {entry.device}" if about["devices"] > 1 else entry.device
        figures = [
            f"{about['global_batch']:,}",
            about["precision"],
            "" if step is None else _figure("step_time_s", step),
        ]
        rows.append(
            [
                entry.short_id,
                entry.model,
                device,
                *figures,
                entry.source,
                *([entry.label] if labelled else []),
            ]
        )
    show(table(headings, rows, right=("batch", "step")))


def _devices(cluster: Mapping[str, Any]) -> int:
    return sum(
        int(group["devices_per_node"]) * int(group["nodes"]) for group in cluster.get("groups", [cluster])
    )


def _figure(name: str, value: float) -> str:
    from foretrain.quantities import QUANTITIES
    from foretrain.units import format_bytes, format_count, format_seconds

    unit = QUANTITIES.get(name, "")
    if unit in ("s", "B"):
        return format_seconds(value) if unit == "s" else format_bytes(value)
    return format_count(value, unit) if unit else f"{value:,g}"


# Import

Line = tuple[Path, int, bytes]


@dataclass(slots=True, kw_only=True)
class _Tally:
    done: int = 0
    new: int = 0
    known: int = 0
    failed: int = 0

    def __str__(self) -> str:
        return f"{self.new:,} new, {self.known:,} known, {self.failed:,} failed"


def _lines(files: Sequence[Path]) -> list[Line]:
    """Read all lines at the start, so that a file that cannot be read is known before anything is
    imported."""
    from foretrain.measure.store import is_database, raw_lines

    for file in files:
        if is_database(file):
            raise InputError(
                f"{file}: it is a database; `foretrain runs export "
                f"--store {file} -o runs.jsonl` makes it a file of runs"
            )
    all_lines = []
    for file in dict.fromkeys(files):
        lines = list(raw_lines(file))
        if not lines:
            raise InputError(f"{file}: empty; a runs file has one run per line")
        all_lines += [(file, number, line) for number, line in lines]
    return all_lines


def _import(lines: Sequence[Line], store: Store, catalog: Catalog, tally: _Tally, *, strict: bool) -> None:
    from foretrain.report.screen import progress

    step = max(len(lines), 1) if strict else _BATCH
    with progress("runs") as advance:
        for start in range(0, len(lines), step):
            batch = lines[start : start + step]
            added = store.add(list(_entries(batch, catalog, tally, strict)))
            tally.new += added.new
            tally.known += added.known
            tally.done += len(batch)
            advance(tally.done, len(lines))


def _entries(lines: Sequence[Line], catalog: Catalog, tally: _Tally, strict: bool) -> Iterator[Entry]:
    from foretrain.measure.store import Entry, parse_run

    for file, number, line in lines:
        try:
            yield Entry.of(parse_run(line, base=file.parent, catalog=catalog))
        except InputError as error:
            if strict:
                raise InputError(f"{file}:{number}: {error}") from error
            say(f"{file}:{number}: {' '.join(str(error).splitlines())}")
            tally.failed += 1
