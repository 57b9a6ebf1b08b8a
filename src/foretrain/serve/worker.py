"""Runs one task after the other in a process of its own: frames of JSON come in by stdin and go out by
stdout.

A frame is a letter, the length of what follows in four bytes, and that: a task (``Q``) in; progress (``P``),
a result (``R``), an error (``E``) or word that torch would be needed (``T``) out.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import struct
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import Any, BinaryIO

HEAD = struct.Struct(">cI")
_PARENT_S = 1.0
"""How often a worker looks whether its server is still there."""
_PROGRESS_S = 0.1
"""Between two words of progress, at least."""


class NeedsTorch(BaseException):
    """Work that a process without torch began and cannot do; nothing on the way may take it for a failure."""


class _NoTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch, so that it counts as installed, and does not import it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name == "torch" else None

    def exec_module(self, module: ModuleType) -> None:
        raise NeedsTorch


def send(to: BinaryIO, letter: bytes, content: bytes) -> None:
    to.write(HEAD.pack(letter, len(content)) + content)
    to.flush()


def receive(source: BinaryIO) -> bytes | None:
    """The next task; None where the other side has closed."""
    head = source.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    _, length = HEAD.unpack(head)
    content = source.read(length)
    return content if len(content) == length else None


def status_of(error: BaseException) -> int:
    """The HTTP status that says whose fault an error is."""
    from foretrain.errors import ForetrainError, InputError, MissingLibrary

    if isinstance(error, InputError):
        return 400
    if isinstance(error, MissingLibrary):
        return 501
    return 422 if isinstance(error, ForetrainError) else 500


def answer(task: dict[str, Any], out: BinaryIO) -> None:
    """Do a task and send what comes of it; what users cannot mend is told to the log, not to them."""
    from foretrain.progress import listening
    from foretrain.serve.work import TASKS

    last_s = 0.0

    def listener(what: str, done: int | None, total: int | None) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= _PROGRESS_S:
            last_s = time.monotonic()
            send(out, b"P", json.dumps({"what": what, "done": done, "total": total}).encode())

    try:
        with listening(listener if task.get("progress") else None):
            result = TASKS[task["do"]](task)
        send(out, b"R", json.dumps(result, allow_nan=False).encode())
    except NeedsTorch:
        send(out, b"T", b"")
    except Exception as error:
        status = status_of(error)
        if status == 500:
            traceback.print_exc()
        message = "internal error; the log of the server has it" if status == 500 else str(error)
        send(out, b"E", json.dumps({"status": status, "error": " ".join(message.split())}).encode())


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_S)
    os._exit(1)


def main() -> None:
    """Serve until stdin closes; what a model prints goes to stderr."""
    parent, with_torch = int(sys.argv[1]), sys.argv[2] == "torch"
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    out = os.fdopen(os.dup(1), "wb")
    source = os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if not with_torch:
        sys.meta_path.insert(0, _NoTorch())
    import foretrain.serve.work  # noqa: F401

    while (content := receive(source)) is not None:
        answer(json.loads(content), out)


if __name__ == "__main__":
    main()
