"""Compares what the callbacks record on a GPU with what ``measure steps`` measures of the same jobs.

    python benchmarks/callbacks_gpu.py --out DIR [--seconds 70] [--steps 40]  # where there is a GPU
    python benchmarks/callbacks_gpu.py --table DIR/callbacks.jsonl            # the table of docs/callbacks.md

Each job runs in processes of its own: measured, in a plain loop with a ``Recorder``, and with the Trainers of
Hugging Face and Lightning. A line for each: the run, with ``way`` in its provenance.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from memory_gpu import child, collect, import_libraries

_BERT: dict[str, Any] = {"source": "transformers", "task": "masked-lm", "config": {"model_type": "bert"}}
_GPT2 = {"source": "transformers", "task": "causal-lm", "config": {"model_type": "gpt2"}}
_NARROW = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
JOBS: dict[str, dict[str, Any]] = {
    "resnet50": {
        "model": {"source": "timm", "name": "resnet50"},
        "training": {"global_batch": 64, "precision": "amp-bf16", "image": 224, "optimizer": "sgd"},
    },
    "vit_base": {
        "model": {"source": "timm", "name": "vit_base_patch16_224"},
        "training": {"global_batch": 64, "precision": "amp-bf16", "image": 224, "optimizer": "adamw"},
    },
    "bert": {
        "model": _BERT,
        "training": {"global_batch": 16, "precision": "amp-bf16", "sequence": 512, "optimizer": "adamw"},
    },
    "gpt2": {
        "model": _GPT2,
        "training": {"global_batch": 4, "precision": "bf16", "sequence": 1024, "optimizer": "adamw-fused"},
    },
}
SMALL: dict[str, dict[str, Any]] = {
    "resnet10t": {
        "model": {"source": "timm", "name": "resnet10t"},
        "training": {"global_batch": 2, "precision": "fp32", "image": 32, "optimizer": "sgd"},
    },
    "bert": {
        "model": {**_BERT, "config": {**_BERT["config"], **_NARROW}},
        "training": {"global_batch": 2, "precision": "fp32", "sequence": 16, "optimizer": "adamw"},
    },
}
"""For a machine without a GPU."""
WAYS = ("measure steps", "recorder", "huggingface", "lightning", "huggingface, clipping",
        "recorder, step() alone")  # fmt: skip
_NOT = {"lightning": ("vit_base", "gpt2"), "recorder, step() alone": ("vit_base", "gpt2")}
"""Jobs that are not worth their time on the device in some ways."""


def run(way: str, tables: dict[str, Any], device: str, steps: int, seconds: float) -> dict[str, Any]:
    """The run that one way gives of a job."""
    from foretrain.job import Job

    cluster = {"device": "h200"} if device == "cuda" else {"device": "cpu", "cores_per_device": 1}
    job = Job.read({**tables, "cluster": cluster})
    begun = time.perf_counter()
    if way == "measure steps":
        from foretrain.measure.steps import measure_step

        found = measure_step(job, device=device, seconds=seconds).to_dict()
    else:
        with tempfile.TemporaryDirectory() as folder:
            runs = Path(folder) / "runs.jsonl"
            if way.startswith("recorder"):
                _plain(job, device, steps, runs, alone="alone" in way)
            elif way == "lightning":
                _lightning(job, device, steps, runs)
            else:
                _huggingface(job, device, steps, runs, clip=1.0 if "clipping" in way else 0.0)
            found = json.loads(runs.read_text().splitlines()[-1])
    found["provenance"] |= {"way": way, "whole_s": time.perf_counter() - begun}
    return dict(found)


def _plain(job: Any, device: str, steps: int, runs: Path, *, alone: bool) -> None:
    from foretrain.callbacks import Recorder
    from foretrain.measure.steps import Stepper

    stepper = Stepper(job, device)
    with Recorder(runs, job=job, predictor=None, show=_quiet) as recorder:
        for _ in range(steps):
            if not alone:
                recorder.step_begin()
            stepper()
            if alone:
                recorder.step()
            else:
                recorder.step_end()


def _quiet(line: str) -> None:
    pass


def _huggingface(job: Any, device: str, steps: int, runs: Path, *, clip: float) -> None:
    import torch
    import transformers

    from foretrain.callbacks.huggingface import ForetrainCallback
    from foretrain.measure.models import real_model

    training = job.workload.training
    model: Any = real_model(job.workload, training.global_batch, device).module
    vocabulary = model.config.vocab_size
    tokens = torch.randint(0, vocabulary, (steps * training.global_batch, training.sequence))
    mask = {"attention_mask": torch.ones_like(tokens[0])} if job.workload.model.task == "masked-lm" else {}
    data = [{"input_ids": one, **mask, "labels": one} for one in tokens]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=training.global_batch,
            num_train_epochs=1,
            bf16=training.precision == "amp-bf16",
            optim="adamw_torch_fused" if training.optimizer == "adamw-fused" else "adamw_torch",
            max_grad_norm=clip,
            report_to=[],
            save_strategy="no",
            logging_steps=10,
            disable_tqdm=True,
            use_cpu=device == "cpu",
        )
        callback = ForetrainCallback(runs, predictor=None, show=_quiet)
        transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()


def _lightning(job: Any, device: str, steps: int, runs: Path) -> None:
    import pytorch_lightning
    import torch

    from foretrain.callbacks.lightning import ForetrainCallback
    from foretrain.measure.models import real_model, real_optimizer

    training = job.workload.training
    real = real_model(job.workload, training.global_batch, "cpu")
    names = list(real.inputs) if isinstance(real.inputs, dict) else None
    first = list(real.inputs.values() if isinstance(real.inputs, dict) else real.inputs)

    class Module(pytorch_lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = real.module

        def training_step(self, batch: Any, index: int) -> Any:
            *inputs, targets = batch
            if names:
                return self.net(**dict(zip(names, inputs, strict=True))).loss
            return torch.nn.functional.cross_entropy(self.net(*inputs), targets)

        def configure_optimizers(self) -> Any:
            return real_optimizer(training.optimizer, list(self.net.parameters()))

    samples = [(*(one[0] for one in first), torch.tensor(0))] * (steps * training.global_batch)
    loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
        samples,  # type: ignore[arg-type]  # a list serves as a data set
        batch_size=training.global_batch,
    )
    precision = {"amp-bf16": "bf16-mixed", "bf16": "bf16-true"}.get(training.precision, "32-true")
    tables = job.to_dict()
    kept = ("image", "sequence", "classes")
    size = {name: value for name, value in tables["training"].items() if name in kept}
    pytorch_lightning.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        max_epochs=1,
        precision=precision,
        callbacks=[
            ForetrainCallback(runs, {"model": tables["model"], "training": size}, predictor=None, show=_quiet)
        ],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), loader)


def tasks(jobs: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Jobs and ways, the ways that say most first; Hugging Face trains models of transformers alone."""
    for way in WAYS:
        for name, tables in jobs.items():
            if way.startswith("huggingface") and tables["model"]["source"] != "transformers":
                continue
            if name not in _NOT.get(way, ()):
                yield name, way


def table(runs: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Each run against the one of ``measure steps``, as rows of a Markdown table."""
    known = [run for run in runs if "measured" in run]
    own = {run["name"]: run["measured"] for run in known if run["provenance"]["way"] == "measure steps"}
    yield "| job | recorded by | step | against | peak memory | against | reserved | against |"
    yield "|---|---|---|---|---|---|---|---|"
    for run in sorted(known, key=lambda one: (list(own).index(one["name"]), WAYS.index(_way(one)))):
        found, base = run["measured"], own[run["name"]]
        cells = [run["name"], _way(run)]
        for key, unit, digits in (
            ("step_time_s", 1e-3, 2), ("peak_memory_bytes", 2**20, 0), ("reserved_memory_bytes", 2**20, 0),
        ):  # fmt: skip
            if key not in found or key not in base:
                cells += ["", ""]
                continue
            label = "ms" if unit < 1 else "MiB"
            cells += [f"{found[key] / unit:,.{digits}f} {label}", f"{found[key] / base[key] - 1:+.1%}"]
        yield f"| {' | '.join(cells)} |"
    others = [run for run in known if _way(run) != "measure steps"]
    ratios = [run["measured"]["step_time_s"] / own[run["name"]]["step_time_s"] for run in others]
    yield f"\nmedian ratio of step times {statistics.median(ratios):.3f}"


def _way(run: dict[str, Any]) -> str:
    return str(run["provenance"]["way"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--seconds", type=float, default=70.0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.table is not None:
        runs = [json.loads(line) for line in options.table.read_text().splitlines()]
        print("\n".join(table(runs)))
        return
    ends = time.monotonic() + options.seconds
    import_libraries()

    options.out.mkdir(parents=True, exist_ok=True)
    jobs = JOBS if options.device == "cuda" else SMALL
    with (options.out / "callbacks.jsonl").open("a") as out:
        for name, way in tasks(jobs):
            if time.monotonic() > ends - 4:
                break
            process, pipe = child(run, way, jobs[name], options.device, options.steps, 1.0)
            result = collect(process, pipe, min(40.0, ends - time.monotonic()))
            if result is None:
                process.kill()
                result = {"error": "no time left"}
            out.write(json.dumps({"name": name, "way": way, **result}) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
