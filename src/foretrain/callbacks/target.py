"""Writes a recorded run to a file of JSON lines or a database, checked before the training and never lost."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import final

from foretrain.errors import InputError, first_line
from foretrain.files import write_atomically
from foretrain.measure.store import Store, append_run, hide_password, is_database
from foretrain.run import Run

log = logging.getLogger("foretrain.callbacks")


@final
class Target:
    """A ``.jsonl`` file, or the URL or file of a database; a relative path starts in the folder of now."""

    def __init__(self, where: str | os.PathLike[str]) -> None:
        text = os.fspath(where)
        self.where = text if "://" in text else str(Path(text).absolute())
        self.name = hide_password(text)

    def check(self) -> None:
        """Say now what would stand in the way of writing a run."""
        if is_database(self.where):
            Store.open(self.where).close()
            return
        path = Path(self.where)
        if path.suffix == ".zst":
            raise InputError(f"{path}: compressed files are read, not added to; name a .jsonl file")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                path.open("ab").close()
            else:
                tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror})") from error

    def write(self, run: Run) -> str | None:
        """Keep the run and say where; what fails goes to a file of its own, or else to the log."""
        try:
            self._write(run)
            return self.name
        except Exception as error:
            return _put_aside(run, f"{self.name}: the run was not added ({first_line(error)})")

    def _write(self, run: Run) -> None:
        if is_database(self.where):
            with Store.open(self.where) as store:
                store.add([run])
            return
        path = Path(self.where)
        append_run(path, dataclasses.replace(run, job=run.job.seen_from(path.parent)).to_dict())


def _put_aside(run: Run, reason: str) -> str | None:
    folder = Path(tempfile.gettempdir())
    line = json.dumps(dataclasses.replace(run, job=run.job.seen_from(folder)).to_dict())
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix="foretrain-run-", suffix=".jsonl")
        os.close(handle)
        write_atomically(Path(name), line + "\n")
    except (OSError, InputError):
        log.warning("%s; it is: %s", reason, line)
        return None
    log.warning("%s; it is in %s", reason, name)
    return name
