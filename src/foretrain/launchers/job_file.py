"""Reads what a training program that foretrain wrote takes from a job file: all of it, or the model alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from foretrain.launchers.settings import Key, Keys, Reading, Setting, Understood, count, dashed, take

READER = "foretrain"

KEYS: Keys = {"steps": Key("training.steps", count)}
IGNORED = "runs print_every learning_rate max_norm keep_whole_gradients"
_OF_MODEL = ("sequence", "image", "classes", "attention", "adapter")
"""Fields of the training that the Trainer's program reads in a job; others it has from its own files."""


def read(reading: Reading, settings: Iterable[Setting]) -> None:
    """The arguments of the program, beside the job."""
    take(reading, settings, KEYS, READER, ignored=IGNORED, name=dashed)


def take_job(reading: Reading, tables: Mapping[str, Any], settings: Iterable[Setting]) -> None:
    """Model, training and plan, as a program of plain PyTorch runs them."""
    for section in ("model", "training", "plan"):
        reading.tables[section] = {**reading.tables.get(section, {}), **tables.get(section, {})}
    _cluster(reading, tables.get("cluster", {}))
    run = reading.tables.setdefault("run", {})
    run["batch"] = tables["training"]["global_batch"]
    if (micro := tables.get("plan", {}).get("micro_batch")) is not None:
        run["micro"] = micro
    reading.understood += [Understood(one, one.key) for one in settings if one.key.split(".")[0] != "cluster"]


def take_model(reading: Reading, tables: Mapping[str, Any], settings: Iterable[Setting]) -> None:
    """The model, what its inputs are and how its weights are kept, as the Trainer's program reads them."""
    training = tables["training"]
    reading.tables["model"] = dict(tables["model"])
    _cluster(reading, tables.get("cluster", {}))
    for name in _OF_MODEL:
        if name in training:
            reading.set(f"training.{name}", training[name])
    if training.get("precision") in ("bf16", "fp16") and training.get("framework") != "deepspeed":
        reading.set("own.loaded", training["precision"])
    wanted = tuple(f"training.{name}" for name in _OF_MODEL)
    reading.understood += [
        Understood(one, one.key) for one in settings if one.key.startswith(("model.", *wanted))
    ]


def _cluster(reading: Reading, cluster: Mapping[str, Any]) -> None:
    """Take over what devices there are, which no launcher says."""
    for name in ("device", "node", "cores_per_device"):
        if name in cluster:
            reading.set(f"run.{name}", cluster[name])
