"""Whether a trace hangs on the garbage collector: models captured with it on, off, and called at random.

    python benchmarks/capture_determinism.py --data data/h200_steps.jsonl

Prints each model whose graphs differ, and each of which the collector alone frees tensors; exits 1 when
graphs differ.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import sys
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reading
from foretrain.capture.sources.models import load_model
from foretrain.capture.sources.zoo import import_zoo
from foretrain.capture.tracing.recorder import OperatorRecorder
from foretrain.capture.tracing.tracer import trace_step
from foretrain.files import read_lines
from foretrain.graph import OpGraph
from foretrain.schema import read
from foretrain.workload import Model, Training, Workload

BATCH = 4
CHANCE = 0.02
"""Of a collection at an operator."""
TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 256,
}  # fmt: skip
TYPES = (
    "llama gemma gemma2 gemma3_text mistral mixtral qwen2 qwen3 qwen2_moe qwen3_moe phi olmo olmo2 "
    "starcoder2 stablelm granite granitemoe cohere cohere2 nemotron persimmon gpt_neox bert roberta electra"
).split()


def from_runs(path: Path) -> Iterator[tuple[str, Workload]]:
    """Each model of the runs once, at a small batch."""
    seen = set()
    for _, run in read_lines(path):
        model, training = run["job"]["model"], run["job"]["training"]
        key = json.dumps(model, sort_keys=True)
        if key not in seen:
            seen.add(key)
            yield model.get("name") or model["config"]["model_type"], workload(model, training, path.parent)


def from_transformers() -> Iterator[tuple[str, Workload]]:
    """Small models of many types."""
    import_zoo("torchvision")
    for kind in TYPES:
        task = "masked-lm" if kind in ("bert", "roberta", "electra") else "causal-lm"
        model = {"source": "transformers", "task": task, "config": {"model_type": kind, **TEXT}}
        yield kind, workload(model, {"global_batch": BATCH, "sequence": 64, "precision": "bf16"}, Path())


def workload(model: dict[str, Any], training: dict[str, Any], base: Path) -> Workload:
    return Workload(
        model=read(Model, model, "model"), training=read(Training, training, "training"), base=base
    )


def trace(work: Workload) -> OpGraph:
    loaded, training = load_model(work, BATCH), work.training
    return trace_step(
        loaded.module, loaded.inputs, loaded.loss, samples=BATCH, tokens=loaded.tokens, mode=training.mode,
        precision=training.precision, optimizer=training.optimizer, master_weights=training.master_weights,
        channels_last=training.channels_last,
    )  # fmt: skip


@contextlib.contextmanager
def collections_at_random(seed: int) -> Iterator[list[int]]:
    """Calls the collector at random operators; gives the buffers that it freed."""
    chance, dispatch, released, freed = (
        random.Random(seed),
        OperatorRecorder.__torch_dispatch__,
        OperatorRecorder._released,
        list[int](),
    )

    def collecting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if chance.random() < CHANCE:
            gc.collect(chance.randrange(3))
        return dispatch(self, *args, **kwargs)

    def watching(self: Any, address: int, number: int, storage: object) -> None:
        if self._collecting:
            freed.append(number)
        released(self, address, number, storage)

    gc.collect()
    gc.freeze()  # or each collection looks through all of torch
    with (
        unittest.mock.patch.object(OperatorRecorder, "__torch_dispatch__", collecting),
        unittest.mock.patch.object(OperatorRecorder, "_released", watching),
    ):
        yield freed
    gc.unfreeze()


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=reading.existing, default=Path("data/h200_steps.jsonl"), help="file with runs"
    )
    options = parser.parse_args()
    models = differ = 0
    for label, work in (*from_transformers(), *from_runs(options.data)):
        try:
            digests = {trace(work).digest()}
        except Exception as error:
            print(f"  {label}: not captured: {error}", flush=True)
            continue
        models += 1
        digests.add(trace(work).digest())
        with collector_off():
            digests.add(trace(work).digest())
        with collections_at_random(models) as freed:
            digests.add(trace(work).digest())
        if freed:
            print(f"  {label}: {len(freed)} tensors that only the collector frees", flush=True)
        if len(digests) > 1:
            differ += 1
            print(f"  {label}: {len(digests)} different graphs", flush=True)
    print(f"{models} models, 4 traces of each: {differ} with graphs that differ")
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    reading.run(main)
