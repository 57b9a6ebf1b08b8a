"""Lets the installed transformers do what an earlier version did, as far as ``library_changes`` knows it."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from foretrain.capture.sources.zoo import quiet_zoo_import
from foretrain.library_changes import SOFTCAP, Change


@contextlib.contextmanager
def as_before(undone: Iterable[Change]) -> Iterator[None]:
    """While the block runs, the library behaves as before these changes."""
    with contextlib.ExitStack() as stack:
        for change in undone:
            stack.enter_context(_UNDO[change.name]())
        yield


@contextlib.contextmanager
def _sdpa_without_softcap() -> Iterator[None]:
    """Models with soft-capped scores run scaled_dot_product_attention, without the cap."""
    quiet_zoo_import()
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def without_cap(*args: Any, softcap: float | None = None, **kwargs: Any) -> Any:
        return sdpa_attention_forward(*args, **kwargs)

    classes = list(_pretrained_classes(SOFTCAP.models))
    supported = [one._supports_sdpa for one in classes]
    AttentionInterface.register("sdpa", without_cap)
    for one in classes:
        one._supports_sdpa = True
    try:
        yield
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)
        for one, before in zip(classes, supported, strict=True):
            one._supports_sdpa = before


def _pretrained_classes(model_types: Iterable[str]) -> Iterator[Any]:
    """The classes in which models of these types say what they support."""
    for model_type in sorted(model_types):
        module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
        yield from (one for name, one in vars(module).items() if name.endswith("PreTrainedModel")
                    and one.__module__ == module.__name__)  # fmt: skip


_UNDO: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    SOFTCAP.name: _sdpa_without_softcap
}
