"""Reads and writes profiles of hosts: how fast a machine issues operators, as ``measure host`` found it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretrain import schema
from foretrain.errors import InputError
from foretrain.files import parse_json, write_atomically

KIND = "host profile"
PARTS: Mapping[str, tuple[str, ...]] = {
    "forward": ("convolutions.forward", "transformer.forward"),
    "backward": ("convolutions.backward", "transformer.backward"),
    "optimizer": ("convolutions.optimizer", "transformer.optimizer"),
}
"""The phases of a step, and the benchmarks that tell how fast a host issues each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProfile:
    """What benchmarks took on a machine, in seconds per call, on a GPU (``cuda``) and on the CPU alone."""

    cpu: str
    cores: int
    torch: str
    python: str
    date: str
    device: str | None = None
    seconds: Mapping[str, Mapping[str, float]]
    spread: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    """Of each part of a step: eight in ten rounds lie between these multiples of the median."""
    rounds: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> HostProfile:
        try:
            document = parse_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: not a host profile ({error})") from error
        if not isinstance(document, Mapping) or document.get("kind") != KIND:
            raise InputError(f"{path}: not a host profile; foretrain measure host -o FILE writes one")
        return schema.read(cls, {k: v for k, v in document.items() if k != "kind"}, str(path))

    def save(self, path: Path) -> None:
        write_atomically(path, json.dumps({"kind": KIND, **self.to_dict()}, indent=1) + "\n")

    def to_dict(self) -> dict[str, Any]:
        return _rounded(dataclasses.asdict(self))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
