"""Lets transformers make its masks as it does while a model is compiled."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def unread_masks() -> Iterator[None]:
    """Inside of this block masks are always written out: a compiler cannot look whether they hide anything,
    so causal attention is not left to the kernel."""
    from transformers import masking_utils

    with contextlib.ExitStack() as stack:
        for name in ("is_tracing", "is_torchdynamo_exporting"):
            if hasattr(masking_utils, name):
                stack.enter_context(unittest.mock.patch.object(masking_utils, name, _yes))
        yield


def _yes(*_: Any) -> bool:
    return True
