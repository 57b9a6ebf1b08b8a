"""Packs lines of measured operators into one Parquet file, which models learn from."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from foretrain.costs.measured import parquet_library
from foretrain.errors import InputError
from foretrain.files import write_atomically

_NAME_LENGTH = 48
"""Characters of a kernel's name that are kept."""
_JSON_COLUMNS = ("inputs", "args", "kernel_names")
_COLUMNS = (
    *("key", "name", "overload", "phase", "precision", "inputs", "args", "flops", "bytes", "uses"),
    *("cold_s", "warm_s", "host_s", "kernels", "kernel_names"),
)


def read_measured(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """The measured operators of files of ``measure ops`` (plain or gzip), each once, without failures."""
    seen = set()
    for path in paths:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            for line in file:
                row = json.loads(line)
                if "error" not in row and row["key"] not in seen:
                    seen.add(row["key"])
                    yield row


def pack(paths: Iterable[Path], out: Path, info: Mapping[str, str] | None = None) -> int:
    """Write measured operators as Parquet, their machine in its metadata; return their number."""
    arrow, parquet = parquet_library()
    rows = sorted(read_measured(paths), key=lambda row: (row["name"], row["key"]))
    if not rows:
        raise InputError("operators: the files hold no measured operator")
    columns = {name: [_cell(name, row[name]) for row in rows] for name in _COLUMNS}
    metadata = {key: str(value) for key, value in (info or {}).items()}
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
