"""Reads launch files as a Launch: the job that they describe, and what became of each setting."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretrain.cluster import Catalog
from foretrain.errors import InputError
from foretrain.job import Job
from foretrain.launchers.settings import Reading, Setting, Understood
from foretrain.options import plain

SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch", ".sub", ".yaml", ".yml")
"""Endings of files that are launch files and nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A job that was read from launch files, and what became of each of their settings."""

    job: Job
    framework: str
    """Whose files they are."""
    files: tuple[str, ...]
    """With those that they name."""
    understood: tuple[Understood, ...]
    unknown: tuple[Setting, ...]
    """No reader knows them, or their value is only known when a script runs."""
    unmodelled: tuple[Setting, ...]
    """They would change a forecast, and no job can say it."""
    ignored: tuple[Setting, ...]
    """They change no forecast."""
    assumed: tuple[str, ...]
    """What was missing, and taken all the same."""

    def to_dict(self) -> dict[str, Any]:
        def table(settings: Iterable[Setting]) -> list[dict[str, Any]]:
            return [{"key": one.key, "value": one.value, "where": one.where} for one in settings]

        return {
            "framework": self.framework,
            "files": list(self.files),
            "understood": [
                {
                    "key": one.setting.key,
                    "value": one.setting.value,
                    "where": one.setting.where,
                    "field": one.field,
                }
                for one in self.understood
            ],
            "unknown": table(self.unknown),
            "unmodelled": table(self.unmodelled),
            "ignored": table(self.ignored),
            "assumed": list(self.assumed),
            "job": self.job.to_dict(),
        }


def read_launch(
    *files: str | os.PathLike[str],
    model: str | None = None,
    catalog: Catalog | None = None,
    **options: Any,
) -> Launch:
    """Read the job that launch files describe together; ``options``, the fields of a job by name, go over it.

    ``model`` names what is trained where no file does. A Python file may name its function behind a colon:
    ``runs.py:my_plan``.
    """
    from foretrain.launchers.resolve import resolve
    from foretrain.launchers.session import Session

    if not files:
        raise InputError("no launch file is given")
    session = Session(Reading())
    for file in files:
        session.add(os.fspath(file))
    session.read()
    reading = session.reading
    base = Path(os.fspath(files[0]).partition(".py:")[0]).parent
    job = resolve(
        reading, plain(options), catalog or Catalog.load(), model=model, base=base, named=session.files[0]
    )
    return Launch(
        job=job,
        framework=session.framework,
        files=tuple(session.files),
        understood=tuple(reading.understood),
        unknown=tuple(reading.unknown),
        unmodelled=tuple(reading.unmodelled),
        ignored=tuple(reading.ignored),
        assumed=tuple(dict.fromkeys(reading.assumed)),
    )
