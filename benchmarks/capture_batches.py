"""Whether the graphs of two batch sizes give those of others, for hundreds of models.

    python benchmarks/capture_batches.py runs --data data/h200_steps.jsonl
    python benchmarks/capture_batches.py timm --every 8
    python benchmarks/capture_batches.py torchvision
    python benchmarks/capture_batches.py transformers

Traces each model at two batch sizes, derives the graphs of three others and compares them with traces. Prints
each model whose traces were refused, with the reason, and each whose derived graph is wrong; exits 1 when
there is one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import reading
from foretrain.capture.sources.models import load_model
from foretrain.capture.sources.zoo import import_zoo
from foretrain.capture.tracing.tracer import trace_step
from foretrain.files import read_lines
from foretrain.graph import OpGraph
from foretrain.graph.batches import BatchFamily, NotLinear
from foretrain.schema import read
from foretrain.workload import Model, Training, Workload

TRACED = (8, 32)
CHECKED = (3, 24, 96)
TASKS = ("causal-lm", "masked-lm", "seq2seq-lm", "image-classification", "base")
SMALLER = {
    "num_hidden_layers": 3,
    "n_layer": 3,
    "num_layers": 3,
    "n_layers": 3,
    "encoder_layers": 2,
    "decoder_layers": 2,
}
"""Depths of transformers' configurations: a few layers show what many do."""

Item = tuple[str, dict[str, Any], dict[str, Any], Path]


def from_runs(path: Path) -> Iterator[Item]:
    """One job per distinct model, mode, precision and memory format."""
    seen = set()
    for _, run in read_lines(path):
        model, training = run["job"]["model"], run["job"]["training"]
        fields = ("image", "sequence", "mode", "precision", "channels_last")
        key = json.dumps([model, *(training.get(field) for field in fields)], sort_keys=True)
        if key not in seen:
            seen.add(key)
            label = model.get("name") or model["config"]["model_type"]
            yield f"{label} {training.get('precision', '')}", model, training, path.parent


def from_timm() -> Iterator[Item]:
    for name in import_zoo("timm").list_models():
        yield name, {"source": "timm", "name": name}, {"global_batch": 2, "precision": "amp-bf16"}, Path()


def from_torchvision() -> Iterator[Item]:
    models = import_zoo("torchvision").models
    for name in models.list_models(module=models):
        yield name, {"source": "torchvision", "name": name}, {"global_batch": 2}, Path()


def from_transformers() -> Iterator[Item]:
    import_zoo("torchvision")
    from transformers.models.auto import configuration_auto

    for model_type in configuration_auto.CONFIG_MAPPING_NAMES:
        model = {"source": "transformers", "config": {"model_type": model_type}}
        yield model_type, model, {"global_batch": 2, "precision": "bf16"}, Path()


def attempt(item: Item) -> tuple[str, str]:
    """What became of a model: "linear", "refused: ...", "wrong: ..." or "not captured: ..."."""
    label, model, training, base = item
    if model["source"] != "transformers" or "task" in model:
        return label, outcome(model, training, base)
    outcomes = []
    for task in TASKS:
        size = {} if task == "image-classification" else {"sequence": 64}
        outcomes.append(outcome({**model, "task": task}, {**training, **size}, base))
        if not outcomes[-1].startswith("not captured"):
            break
    return label, outcomes[-1]


def outcome(model: dict[str, Any], training: dict[str, Any], base: Path) -> str:
    try:
        workload = Workload(
            model=read(Model, model, "model"), training=read(Training, training, "training"), base=base
        )
        workload = _shallow(workload)
        first, second = (trace(workload, batch) for batch in TRACED)
    except Exception as error:
        return f"not captured: {type(error).__name__}: {str(error)[:150]}"
    try:
        family = BatchFamily.of(first, second)
    except NotLinear as reason:
        return f"refused: {reason}"
    for batch in CHECKED:
        try:
            traced = trace(workload, batch)
        except Exception as error:
            return f"wrong: batch {batch} cannot be traced: {str(error)[:150]}"
        if family.at(batch).digest() != traced.digest():
            return f"wrong: batch {batch}"
    return "linear"


def _shallow(workload: Workload) -> Workload:
    """A transformers model that is given by its type alone, with a few layers."""
    config = workload.model.config
    if workload.model.source != "transformers" or config is None or len(config) > 1:
        return workload
    from transformers import AutoConfig

    default = AutoConfig.for_model(config["model_type"])
    depths = {name: depth for name, depth in SMALLER.items() if isinstance(getattr(default, name, None), int)}
    shallow = dataclasses.replace(
        workload, model=dataclasses.replace(workload.model, config={**config, **depths})
    )
    try:
        trace(shallow, TRACED[0])
    except Exception:
        return workload
    return shallow


def trace(workload: Workload, batch: int) -> OpGraph:
    training = workload.training
    loaded = load_model(workload, batch)
    return trace_step(
        loaded.module, loaded.inputs, loaded.loss, samples=batch, tokens=loaded.tokens, mode=training.mode,
        precision=training.precision, optimizer=training.optimizer, master_weights=training.master_weights,
        channels_last=training.channels_last,
    )  # fmt: skip


def main() -> None:
    sources: dict[str, Callable[[argparse.Namespace], Iterator[Item]]] = {
        "runs": lambda options: from_runs(options.data),
        "timm": lambda _: from_timm(),
        "torchvision": lambda _: from_torchvision(),
        "transformers": lambda _: from_transformers(),
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=sources)
    parser.add_argument(
        "--data", type=reading.existing, default=Path("data/h200_steps.jsonl"), help="file with runs"
    )
    parser.add_argument("--every", type=int, default=1, help="take every n-th model only")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    items = list(sources[options.what](options))[:: options.every]
    counts: Counter[str] = Counter()
    with multiprocessing.get_context("spawn").Pool(options.workers, maxtasksperchild=100) as pool:
        for label, result in pool.imap_unordered(attempt, items):
            counts[result.partition(":")[0]] += 1
            if result != "linear":
                print(f"  {label}: {result}", flush=True)
    print(
        f"{len(items)} models of {options.what}:",
        ", ".join(f"{count} {kind}" for kind, count in counts.most_common()),
    )
    sys.exit(1 if counts["wrong"] else 0)


if __name__ == "__main__":
    reading.run(main)
