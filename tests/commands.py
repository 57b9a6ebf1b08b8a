"""Calls the command line as tests do, and makes a job for it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from typer.testing import CliRunner, Result

from foretrain.cli import app


def run(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def ok(*words: str) -> str:
    result = run(*words)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def fails(*words: str) -> str:
    """The one line that a mistake is answered with."""
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("foretrain: ")
    assert result.stderr.count("\n") == 1
    return str(result.stderr)


def tiny_job(**sections: Any) -> dict[str, Any]:
    """The tables of a job that trains ``net`` of tiny.py beside it; ``sections`` take the place of these."""
    base: dict[str, Any] = {
        "model": {"source": "python", "name": "tiny.py:net"},
        "training": {"global_batch": 8, "image": 8},
        "cluster": {"device": "a100"},
    }
    return {**base, **sections}


PATIENCE_S = 300.0
"""How long a test waits for what must happen, on however busy a machine."""

_WITH_SIGINT = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.Handlers[sys.argv[1]]);"
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)


def begin_python(*words: str, sigint: str = "SIG_DFL", **options: Any) -> subprocess.Popen[str]:
    """A Python process to send signals to, which answers SIGINT or ignores it (SIG_IGN), however the tests
    were started."""
    command = [sys.executable, "-c", _WITH_SIGINT, sigint, *words]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)


def begin(*words: str, sigint: str = "SIG_DFL", **options: Any) -> subprocess.Popen[str]:
    """The command as a process of its own, in a group of its own."""
    return begin_python("-m", "foretrain.cli", *words, sigint=sigint, start_new_session=True, **options)
