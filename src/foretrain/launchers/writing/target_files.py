"""Holds what a target contributes to a folder: its files, its command, and what it cannot say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Launcher = Literal["torchrun", "accelerate", "deepspeed"]

_PROGRAMS = Path(__file__).parent / "programs"
_PACKAGE = "foretrain.launchers.writing.programs"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFiles:
    """The part of a folder that depends on the framework."""

    launcher: Launcher
    command: str
    """The program behind the launcher, with its arguments, as a shell reads it."""
    files: Mapping[str, str]
    """Texts by name."""
    about: Mapping[str, str]
    """What each file is, for README.md."""
    stamps: tuple[str, ...]
    """Names of the versions that launch.sh is written for."""
    setup: tuple[str, ...] = ()
    """Lines of launch.sh before the command."""
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What of the job the files cannot say."""


def program_text(name: str, stamped: str) -> str:
    """Read a program of ``programs/`` as it lies in a folder, with its neighbours beside it."""
    text = (_PROGRAMS / f"{name}.py").read_text(encoding="utf-8")
    return f"# {stamped}\n{text.replace(f'from {_PACKAGE}.', 'from ')}"
