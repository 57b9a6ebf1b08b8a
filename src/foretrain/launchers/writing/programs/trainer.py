"""Trains the model of a job with transformers' Trainer, under accelerate or DeepSpeed.

accelerate launch --config_file accelerate.yaml train.py training_arguments.json --model job.toml

The model, its input size and its adapters come from the job; all else from training_arguments.json and the
files of the launcher. Your data goes into ``your_dataset``, your weights into ``--checkpoint``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from foretrain.launchers.writing.programs.models import DTYPES, Job, transformers_inputs, transformers_model
from foretrain.launchers.writing.programs.step_times import StepTimes


def your_dataset(example: dict[str, Tensor], samples: int) -> Any:
    """YOUR DATA: a dataset whose samples have the names and shapes of ``example`` (a batch of one). Without a
    change it is one random sample, as often as the training needs it."""

    class Repeated(torch.utils.data.Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return samples

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {name: value[0] for name, value in example.items()}

    return Repeated()


def model_of(job: Job, checkpoint: str | None) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model with the weights of a checkpoint, or random ones, and a batch of one for it."""
    task, config, build = transformers_model(job)
    tensor, adapter = job.plan.get("tensor", 1), job.training.get("adapter") or {}
    dtype = DTYPES[job.precision] if job.precision in ("bf16", "fp16") else torch.float32
    dtype = DTYPES[adapter["base"]] if adapter.get("base") else dtype
    by_deepspeed = job.training.get("framework") == "deepspeed"  # which casts and cuts models itself
    if checkpoint is not None:
        options: dict[str, Any] = {"dtype": dtype}
        if tensor > 1 and not by_deepspeed:
            distributed = importlib.import_module("transformers.distributed")
            shards = int(os.environ["WORLD_SIZE"]) // tensor
            options["distributed_config"] = distributed.DistributedConfig(tp_size=tensor, fsdp_size=shards)
        if adapter.get("kind") == "qlora":
            options["quantization_config"] = transformers.BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=dtype,
            )
        kind: Any = build.func.__self__  # type: ignore[attr-defined]
        model = kind.from_pretrained(checkpoint, config=config, **options)
    elif (tensor > 1 and not by_deepspeed) or adapter.get("kind") == "qlora":
        why = "plan.tensor" if tensor > 1 else "training.adapter: qlora"
        raise SystemExit(f"{why}: transformers does this as it loads weights; give --checkpoint FOLDER")
    else:
        model = build()
        if dtype != torch.float32 and not by_deepspeed:
            model.to(dtype)
    if adapter:
        model = adapted(model, adapter)
    return model, transformers_inputs(task, config, job, 1, torch.device("cpu"))


def adapted(model: nn.Module, adapter: dict[str, Any]) -> nn.Module:
    """Put the job's adapters beside frozen weights (peft)."""
    peft = importlib.import_module("peft")
    config = peft.LoraConfig(
        r=adapter.get("rank", 8),
        target_modules=adapter.get("targets", "all-linear"),
        lora_dropout=adapter.get("dropout", 0.0),
        modules_to_save=adapter.get("modules_to_save"),
    )
    made: nn.Module = peft.get_peft_model(model, config)
    return made


class PrintedSteps(transformers.TrainerCallback):  # type: ignore[misc]
    """Prints how long steps take."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        on_gpu = args.device.type == "cuda"
        self.times = StepTimes(on_gpu=on_gpu, steps=state.max_steps, every=self.every)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = self.times.mark()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self.times.end(self.began)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self.times.print_memory()


def callbacks_of(runs: Path | None, job: Path, every: int) -> list[Any]:
    """List what prints steps, and what records them as a run of foretrain where that is installed."""
    made: list[Any] = [PrintedSteps(every)]
    if runs is not None:
        try:
            recording = importlib.import_module("foretrain.callbacks.huggingface")
        except ImportError:
            return made
        made.append(recording.ForetrainCallback(runs, str(job), predictor=None, show=lambda line: None))
    return made


def train(
    settings: Path,
    job_file: Path,
    *,
    checkpoint: str | None = None,
    steps: int | None = None,
    runs: Path | None = None,
    print_every: int = 10,
) -> None:
    job, given = Job.load(job_file), json.loads(settings.read_text(encoding="utf-8"))
    if steps is not None:
        given["max_steps"] = steps
    arguments = transformers.TrainingArguments(**given)
    model, example = model_of(job, checkpoint)
    samples = job.training["global_batch"] * arguments.max_steps
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=your_dataset(example, samples),
        callbacks=callbacks_of(runs, job_file, print_every),
    )
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the model of a job file with transformers' Trainer.")
    parser.add_argument("settings", type=Path, metavar="training_arguments.json")
    parser.add_argument("--model", type=Path, required=True, metavar="job.toml")
    parser.add_argument("--checkpoint", help="weights of this folder or name, instead of random ones")
    parser.add_argument("--steps", type=int, help="instead of max_steps")
    parser.add_argument("--runs", type=Path, help="record the steps here, where foretrain is installed")
    parser.add_argument("--print-every", type=int, default=10)
    parser.add_argument("--local_rank", type=int, help="given by launchers, and not used")
    given = parser.parse_args()
    train(
        given.settings,
        given.model,
        checkpoint=given.checkpoint,
        steps=given.steps,
        runs=given.runs,
        print_every=given.print_every,
    )
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
