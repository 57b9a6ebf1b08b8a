"""A trace is the same whenever the garbage collector runs."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretrain.capture import _trace, _trace_rank, capture
from foretrain.capture.tracing.recorder import OperatorRecorder
from foretrain.graph import OpGraph
from foretrain.job import Job

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
MODELS: dict[str, dict[str, Any]] = {
    "resnet18": {"source": "timm", "name": "resnet18"},
    "vit": {"source": "timm", "name": "vit_tiny_patch16_224"},
    "gemma2": {
        "source": "transformers", "task": "causal-lm", "config": {"model_type": "gemma2", "head_dim": 8,
        **TINY},
    },
    "mixtral": {"source": "transformers", "task": "causal-lm", "config": {"model_type": "mixtral", **TINY}},
}  # fmt: skip


class Knotted(nn.Module):
    """Keeps an activation in a list that holds itself: only the collector frees it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            knot: list[Any] = [x * 2]
            knot.append(knot)
            x = layer(x)
        return x


def traced(model: str) -> OpGraph:
    size = {"sequence": 32} if MODELS[model]["source"] == "transformers" else {"image": 224}
    job = Job.read({
        "model": MODELS[model], "training": {"global_batch": 2, "precision": "bf16", **size},
        "cluster": {"device": "h100"},
    })  # fmt: skip
    return _trace(job, 2) if size == {"image": 224} else _trace_rank(job, 2)


def knotted() -> OpGraph:
    return capture(Knotted(), torch.zeros(4, 8))


@contextlib.contextmanager
def collections_at_random(seed: int) -> Iterator[None]:
    chance, dispatch = random.Random(seed), OperatorRecorder.__torch_dispatch__

    def collecting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if chance.random() < 0.05:
            gc.collect(chance.randrange(3))
        return dispatch(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OperatorRecorder, "__torch_dispatch__", collecting)
        gc.collect()
        gc.freeze()  # or each collection looks through all that other tests have left
        yield


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "make",
    [pytest.param(knotted, id="knotted"), *(pytest.param(lambda m=m: traced(m), id=m) for m in MODELS)],
)
def test_a_trace_does_not_depend_on_the_garbage_collector(make: Callable[[], OpGraph]) -> None:
    expected = make().digest()
    with collector_off():
        assert make().digest() == expected
    for seed in range(2):
        with collections_at_random(seed):
            assert make().digest() == expected


def test_what_only_the_collector_would_free_lives_until_the_end_of_the_step() -> None:
    graph = knotted()
    doubled = [i for i, op in enumerate(graph.ops) if op.operator.name == "mul"]
    held = [buffer for buffer in graph.buffers if buffer.born in doubled]
    assert len(held) == 8
    assert {buffer.dies for buffer in held} == {len(graph.ops)}


def test_the_collector_is_on_again_after_a_trace() -> None:
    knotted()
    assert gc.isenabled()
    with collector_off():
        knotted()
        assert not gc.isenabled()
