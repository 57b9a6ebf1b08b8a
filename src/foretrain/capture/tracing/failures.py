"""Says in one line where a trace failed, and why: the module, and the line of its code."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator

from foretrain.capture.tracing.recorder import OperatorRecorder
from foretrain.errors import CaptureError, ForetrainError, first_line
from foretrain.tracebacks import place, raised_at

FOLLOWED = "control flow depends on data: it was followed for one set of weights and inputs"
DEPENDS_ON_DATA = "control flow that depends on data cannot be traced"


@contextlib.contextmanager
def error_context(recorder: OperatorRecorder) -> Iterator[None]:
    """Turn whatever a model raises while it is traced into one line that names the module and the line of its
    code."""
    try:
        yield
    except ForetrainError:
        raise
    except Exception as error:
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if "/torch/" not in frame.filename and "foretrain/capture" not in frame.filename
        ]
        where = raised_at(error) or (place(frames[-1]) if frames else "torch")
        layer = recorder.failed or recorder.layer or "(the model itself)"
        raise CaptureError(f"module {layer}: {_reason(error)} (at {where})") from error
    except SystemExit as stop:
        layer, code = recorder.failed or recorder.layer, "" if stop.code is None else repr(stop.code)
        at = f" (at {where})" if (where := raised_at(stop)) else ""
        raise CaptureError(f"module {layer or '(the model itself)'}: it calls sys.exit({code}){at}") from stop


def _reason(error: Exception) -> str:
    first = first_line(error)
    if "NestedInt" in first or "NestedTensor" in first:
        return f"nested tensors cannot be traced; pad them ({type(error).__name__})"
    if unknown := re.match(r"(?:aten::)?([\w:.]+): attempted to run this operator with Meta tensors", first):
        what = f"operator {unknown[1]} cannot be traced"
        return f"{what}: nothing says what it gives without data (torch.library.register_fake does)"
    if any(
        sign in first.lower()
        for sign in (
            "meta tensor",
            "meta device type tensor",
            "_local_scalar_dense",
            "data-dependent",
            "data-independent",
        )
    ):
        return f"{DEPENDS_ON_DATA} ({first[:120]})"
    return f"{type(error).__name__}: {first}"
