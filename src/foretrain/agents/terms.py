"""Says what an agent may ask for: names and tables of jobs, files of one folder at most, and for how long."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretrain.errors import InputError, invalid
from foretrain.job import SPELLED, Job
from foretrain.serve.safety import is_path, values_in
from foretrain.workload import FILE_SOURCES

_HARMLESS = "._name_or_path"
"""What a configuration says of where its weights came from, which are not loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Says what the operator of a server lets agents do."""

    folder: Path | None = None
    """Whose files may be named: job files, launch files and models. Models in Python files are run."""
    seconds: float = 120.0
    """That one answer may take."""

    def __post_init__(self) -> None:
        if self.folder is not None and not self.folder.is_dir():
            raise invalid("allow", str(self.folder), "a folder")
        if not 0 < self.seconds <= 86_400:
            raise invalid("seconds", self.seconds, "a number above 0 and up to 86400")

    def check_names(self, model: object, options: Mapping[str, Any]) -> None:
        """Refuse a model or a host that names a file which may not be read, before anything looks for it."""
        source = options.get("source")
        if isinstance(model, str):
            prefix, _, name = model.partition(":")
            if prefix.lower() in FILE_SOURCES and name:
                source, model = prefix, name
            of_file = isinstance(source, str) and SPELLED["source"](source, "model.source") in FILE_SOURCES
            if of_file or self._is_file(model):
                self._check_file("model", model)
        for host in (options.get("host"), _host(model)):
            if isinstance(host, str) and self._is_file(host):
                self._check_file("cluster.host", host)

    def check_job(self, job: Job) -> None:
        """Refuse a job whose model comes from a file that may not be read, or brings code of its own."""
        model = job.workload.model
        if model.source in FILE_SOURCES:
            self._check_file("model.name", str(job.workload.base / str(model.name)))
        for field, table in (("model.args", model.args), ("model.config", model.config or {})):
            for name, key, value in values_in(table, field):
                if key == "trust_remote_code":
                    raise InputError(f"{name}: {value!r} is not allowed; code of a checkpoint is never run")
                if isinstance(value, str) and re.search(r"[/\\]", value) and not name.endswith(_HARMLESS):
                    raise InputError(f"{name}: {value!r} is not allowed; it names a place outside of the job")

    def _is_file(self, text: str) -> bool:
        """Whether a text can be the path of a file, or of a folder with a checkpoint."""
        return is_path(text) or (self.folder is not None and (self.folder / text).exists())

    def _check_file(self, field: str, text: str) -> None:
        if self.folder is None:
            raise InputError(
                f"{field}: {text!r} is a file, and this server takes names of models and tables of jobs; "
                "foretrain mcp --allow FOLDER opens a folder to it"
            )
        path = re.sub(r"(?<=\.py):.*", "", text)
        if not (self.folder / path).resolve().is_relative_to(self.folder.resolve()):
            raise InputError(f"{field}: {text!r} is not in the folder that this server may read")


def _host(target: object) -> object:
    """Find the host in the tables of a job, or of a run."""
    job = target.get("job", target) if isinstance(target, Mapping) else None
    cluster = job.get("cluster") if isinstance(job, Mapping) else None
    return cluster.get("host") if isinstance(cluster, Mapping) else None
