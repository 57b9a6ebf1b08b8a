"""Names the line of a user's own code that an error came out of, and the code that asks torch something."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(__file__).parent) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_WRAPPERS = tuple(str(Path("torch", *part)) for part in (("_compile.py",), ("_dynamo", "eval_frame.py")))
"""What torch wraps each ``__torch_dispatch__`` in."""
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def raised_at(error: BaseException) -> str:
    """``my.py:31 in forward``: the innermost line that is neither of a library nor ours; empty where there is
    none."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own_code(frame.filename)]
    return place(own[-1]) if own else ""


def place(frame: traceback.FrameSummary) -> str:
    """The file, as it is seen from the current folder where it lies below it, with line and function (where
    it has a name)."""
    path = Path(frame.filename)
    if path.is_absolute() and path.is_relative_to(here := Path.cwd()):
        path = path.relative_to(here)
    return f"{path}:{frame.lineno}" + ("" if frame.name.startswith("<") else f" in {frame.name}")


def asking_file() -> str:
    """The file of the code that called torch, as seen from a mode of ours that torch tells of the call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _passes_on(frame):
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_filename


def _passes_on(frame: FrameType) -> bool:
    """Whether it is code between a call and a mode that is told of it."""
    file = frame.f_code.co_filename
    return (
        frame.f_code.co_name == "__torch_function__" or file.startswith(_PACKAGE) or file.endswith(_WRAPPERS)
    )


@functools.lru_cache(maxsize=4096)
def is_own_code(filename: str) -> bool:
    """Whether a file is of nobody's library: not of Python, of an installed package, or of foretrain."""
    if filename.startswith(("<", _PACKAGE)) or any(part in filename for part in _INSTALLED):
        return False
    return not any(filename.startswith(folder + os.sep) for folder in _LIBRARIES)
