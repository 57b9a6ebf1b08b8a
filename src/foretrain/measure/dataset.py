"""Packs lines of measured operators into one Parquet file, which models learn from."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from foretrain.catalog import Catalog, Device
from foretrain.costs.measured import parquet_library
from foretrain.errors import InputError, first_line
from foretrain.files import parse_json, write_atomically
from foretrain.measure.kinds import kind_of
from foretrain.measure.nvml import same_gpu

_NAME_LENGTH = 48
"""Characters of a kernel's name that are kept."""
_JSON_COLUMNS = ("inputs", "args", "kernel_names")
_COLUMNS = (
    *("key", "name", "overload", "phase", "precision", "inputs", "args", "flops", "bytes", "uses"),
    *("cold_s", "warm_s", "host_s", "kernels", "kernel_names"),
)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


_ALLOWED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("key", "name", "overload", "phase", "precision"), (_is_text, "a text")),
    **dict.fromkeys(
        ("flops", "bytes", "uses", "cold_s", "warm_s", "host_s", "kernels"),
        (_is_amount, "a finite number of at least 0"),
    ),
    "inputs": (lambda value: isinstance(value, list), "a list of [shape, dtype, strides]"),
    "args": (lambda value: isinstance(value, dict), "a table of keys and values"),
    "kernel_names": (
        lambda value: isinstance(value, list) and all(map(_is_text, value)),
        "a list of texts",
    ),
    "device": (lambda value: value is None or _is_text(value), "a text"),
}
"""What the columns of a measured operator hold."""


def read_measured(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """The measured operators of files of ``measure ops`` (plain or gzip), each once, without failures; each
    names its device where its line or the file beside it does."""
    seen = set()
    for path in paths:
        for row in _rows(path, _info(path)):
            if row["key"] not in seen:
                seen.add(row["key"])
                yield row


def _rows(path: Path, about: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            for number, text in enumerate(file, start=1):
                row = parse_json(text)
                if (kind := kind_of(row)) == "failures":
                    continue
                if kind != "measured operators" or (lacks := [name for name in _COLUMNS if name not in row]):
                    what = f"without {lacks[0]}" if kind == "measured operators" else f"one of {kind}"
                    raise InputError(f"{path}:{number}: not a measured operator but {what}")
                row = {"device": about.get("device"), **row}
                for name, (fits, allowed) in _ALLOWED.items():
                    if not fits(row[name]):
                        raise InputError(f"{path}:{number}: {name}: {row[name]!r} is not {allowed}")
                yield row
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read as measured operators ({first_line(error)})") from error


def info_file(lines: Path) -> Path:
    """Name the file beside the lines of ``measure ops`` that says on which machine they were measured
    last."""
    return lines.with_name(f"{lines.name.removesuffix('.gz').removesuffix('.jsonl')}.info.json")


def _info(path: Path) -> dict[str, Any]:
    try:
        info = json.loads(info_file(path).read_text())
    except (OSError, ValueError):
        return {}
    return {"device": "cpu", **info} if isinstance(info, dict) else {}


def device_of(paths: Iterable[Path], given: str | None, catalog: Catalog) -> tuple[str, str | None]:
    """The catalogue's name of the device that all operators were measured on, and what their machine calls
    it (None where the files do not say); ``given`` decides where that leaves a choice, and must fit."""
    said = sorted({row["device"] for row in read_measured(paths) if row["device"] is not None})
    wanted = None if given is None else catalog.device(given, "--device")
    if len(said) > 1:
        raise InputError(f"operators: measured on several devices ({'; '.join(said)}); pack each on its own")
    if not said:
        if wanted is None:
            raise InputError("--device: missing; the files do not say what they were measured on")
        return wanted.name, None
    if wanted is not None and not _fits(wanted, said[0]):
        raise InputError(f"--device: {wanted.name!r}, but the operators were measured on {said[0]!r}")
    devices = [wanted] if wanted is not None else map(catalog.device, catalog.names("devices"))
    names = [device.name for device in devices if _fits(device, said[0])]
    if len(names) != 1:
        several = " or ".join(names) or "no device of the catalogue"
        raise InputError(f"--device: missing; {said[0]!r} can be {several}")
    return names[0], said[0]


def _fits(device: Device, said: str) -> bool:
    on_cpu = said.partition(",")[0] == "cpu"
    return device.is_cpu if on_cpu else not device.is_cpu and same_gpu(device.name, said)


def pack(paths: Iterable[Path], out: Path, info: Mapping[str, str] | None = None) -> int:
    """Write measured operators as Parquet, their machine in its metadata; return their number."""
    arrow, parquet = parquet_library()
    rows = sorted(read_measured(paths), key=lambda row: (row["name"], row["key"]))
    if not rows:
        raise InputError("operators: the files hold no measured operator")
    columns = {name: [_cell(name, row[name]) for row in rows] for name in _COLUMNS}
    about = {"source": "foretrain measure pack", **(info or {})}
    metadata = {key: str(value) for key, value in about.items()}
    table = arrow.table(columns).replace_schema_metadata(metadata)
    sink = arrow.BufferOutputStream()
    parquet.write_table(table, sink, compression="zstd", compression_level=19, use_dictionary=True)
    write_atomically(out, sink.getvalue().to_pybytes())
    return len(rows)


def _cell(name: str, value: Any) -> Any:
    if name == "kernel_names":
        return json.dumps([kernel.removeprefix("void ")[:_NAME_LENGTH] for kernel in value])
    if name in _JSON_COLUMNS:
        return json.dumps(value, separators=(",", ":"))
    return float(f"{value:.4g}") if name.endswith("_s") else value
