"""Counts which models can be captured: the one-device jobs of a folder, all of timm and
torchvision, types of transformers.

    python benchmarks/capture_coverage.py runs --data DIR
    python benchmarks/capture_coverage.py timm
    python benchmarks/capture_coverage.py torchvision
    python benchmarks/capture_coverage.py transformers [--layers 2] [--only REGEX] [--json OUT.jsonl]

A type of transformers is built from its default configuration, for the task that is taken where a job names
none, with default shapes; stacks of layers are cut to ``--layers`` (0: as they are). Prints the share that
captures and each failure with its reason; exits 1 when the share is below what docs/results.md states.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import reading
from foretrain.capture.sources.models import load_model
from foretrain.capture.tracing.tracer import trace_step
from foretrain.files import read_lines
from foretrain.schema import read
from foretrain.workload import Model, Training, Workload

_DEPTHS = (
    "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers depth layers"
).split()
"""Keys of configurations that say how many layers are alike."""

_SEQUENCE = 64
"""Tokens of a sample where the model is one of language."""

_LIMIT_S = 300
"""Seconds that one model may take."""


def from_runs(data: Path) -> Iterator[tuple[str, dict[str, Any], Path]]:
    """One job per distinct model, image size, mode and precision among the single-device jobs."""
    seen = set()
    for path in sorted(data.rglob("*.jsonl")):
        for number, run in read_lines(path):
            job = run["job"]
            cluster = job["cluster"]
            model = {**job["model"], "args": {**job["model"].get("args", {}), "num_classes": 0}}
            key = json.dumps(
                [
                    model,
                    *(job["training"].get(field) for field in ("image", "sequence", "mode", "precision")),
                ],
                sort_keys=True,
            )
            if cluster.get("devices_per_node", 1) * cluster.get("nodes", 1) == 1 and key not in seen:
                seen.add(key)
                yield (
                    f"{path.name}:{number} "
                    f"{job['model'].get('name') or job['model']['config']['model_type']}",
                    job,
                    path.parent,
                )


def from_timm() -> Iterator[tuple[str, dict[str, Any], Path]]:
    from foretrain.capture.sources.zoo import import_zoo

    for name in import_zoo("timm").list_models():
        yield (
            name,
            {
                "model": {"source": "timm", "name": name},
                "training": {"global_batch": 2, "precision": "amp-bf16"},
            },
            Path(),
        )


def from_torchvision() -> Iterator[tuple[str, dict[str, Any], Path]]:
    """Every model, to train it and to run it."""
    from foretrain.capture.sources.zoo import import_zoo

    for name in import_zoo("torchvision").models.list_models():
        for mode in ("train", "infer"):
            yield (
                f"{name} {mode}",
                {
                    "model": {"source": "torchvision", "name": name},
                    "training": {"global_batch": 2, "precision": "amp-bf16", "mode": mode},
                },
                Path(),
            )


def from_transformers(layers: int) -> Iterator[tuple[str, dict[str, Any], Path]]:
    from foretrain.capture.sources.zoo import import_zoo

    import_zoo("torchvision")
    import transformers
    from transformers.models.auto import configuration_auto

    transformers.logging.set_verbosity_error()
    for model_type in configuration_auto.CONFIG_MAPPING_NAMES:
        yield (
            model_type,
            {
                "model": {
                    "source": "transformers",
                    "config": {"model_type": model_type, **shallow(transformers, model_type, layers)},
                },
                "training": {"global_batch": 2},
            },
            Path(),
        )


def shallow(transformers: Any, model_type: str, layers: int) -> dict[str, Any]:
    """Keys that cut the stacks of a default configuration; none where it is then no longer valid."""
    try:
        cuts = _cuts(transformers.AutoConfig.for_model(model_type), layers) if layers else {}
        config = transformers.AutoConfig.for_model(model_type, **copy.deepcopy(cuts))
        return cuts if _cuts(config, layers) == {} else {}
    except Exception:
        return {}


def _cuts(config: Any, layers: int) -> dict[str, Any]:
    cuts: dict[str, Any] = {
        name: layers for name in _DEPTHS if type(value := vars(config).get(name)) is int and value > layers
    }
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None and (inner := _cuts(part, layers)):
            cuts[name] = {**({"model_type": part.model_type} if part.model_type else {}), **inner}
    return cuts


def attempt(item: tuple[str, dict[str, Any], Path]) -> tuple[str, str | None]:
    """None when the job captures, else the reason; a language model of transformers is given a sequence, as
    long as it needs one."""
    label, job, base = item
    reason = _attempt(job, base)
    config = job["model"].get("config") or {}
    if reason is not None and len(config) > 1:  # cut to what does not hold together: as it is, then
        model = {**job["model"], "config": {"model_type": config["model_type"]}}
        reason = _attempt({**job, "model": model}, base)
    return label, reason


def _attempt(job: dict[str, Any], base: Path) -> str | None:
    training = job["training"]
    for _ in range(3):
        reason = trace(job["model"], training, base)
        if reason is None or job["model"]["source"] != "transformers":
            break
        if "training.sequence: missing" in reason:
            training = {**training, "sequence": _SEQUENCE}
        elif needed := re.search(r"training.sequence: .*; give (\d+) or more", reason):
            training = {**training, "sequence": int(needed[1]) + _SEQUENCE}
        elif limit := re.search(r"training.sequence: .* is beyond the (\d+) positions", reason):
            training = {**training, "sequence": int(limit[1])}
        elif exact := re.search(r"training.sequence: .*; give (\d+), or", reason):
            training = {**training, "sequence": int(exact[1])}
        else:
            break
    return reason


def trace(model: dict[str, Any], training: dict[str, Any], base: Path) -> str | None:
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(_LIMIT_S)
    try:
        workload = Workload(
            model=read(Model, model, "model"), training=read(Training, training, "training"), base=base
        )
        batch = min(workload.training.global_batch, 4)
        loaded = load_model(workload, batch)
        trace_step(
            loaded.module,
            loaded.inputs,
            loaded.loss,
            samples=batch,
            mode=workload.training.mode,
            precision=workload.training.precision,
            optimizer=workload.training.optimizer,
            channels_last=workload.training.channels_last,
            constants=loaded.constants,
        )
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        signal.alarm(0)
    return None


def _out_of_time(*_: Any) -> None:
    raise TimeoutError(f"not traced within {_LIMIT_S} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("runs", "timm", "torchvision", "transformers"))
    parser.add_argument("--data", type=reading.existing, help="folder with runs (*.jsonl)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2, help="layers of each stack of a transformers model")
    parser.add_argument("--only", default="", help="models whose name this regular expression is in")
    parser.add_argument("--json", type=Path, help="a line for each model is written here")
    options = parser.parse_args()
    if options.what == "runs" and options.data is None:
        parser.error("--data: missing; runs are read from a folder")
    sources: dict[str, Callable[[], Iterator[tuple[str, dict[str, Any], Path]]]] = {
        "runs": lambda: from_runs(options.data),
        "timm": from_timm,
        "torchvision": from_torchvision,
        "transformers": lambda: from_transformers(options.layers),
    }
    items = [item for item in sources[options.what]() if re.search(options.only, item[0])]
    failures = []
    lines = options.json.open("w") if options.json else None
    with multiprocessing.get_context("spawn").Pool(options.workers, maxtasksperchild=100) as pool:
        for done, (label, reason) in enumerate(pool.imap_unordered(attempt, items, chunksize=4), start=1):
            if lines is not None:
                print(json.dumps({"model": label, "reason": reason}), file=lines, flush=True)
            if reason is not None:
                failures.append((label, reason))
                print(f"  {label}: {reason}", flush=True)
            if done % 50 == 0:
                print(f"{done} of {len(items)}, {len(failures)} failed", file=sys.stderr, flush=True)
    captured = len(items) - len(failures)
    print(f"{captured} of {len(items)} captured ({captured / len(items):.1%})")
    needed = 650 if options.what == "transformers" and not options.only else len(items)
    sys.exit(0 if captured >= needed else 1)


if __name__ == "__main__":
    reading.run(main)
