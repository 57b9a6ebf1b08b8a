"""Builds the model of a job (of transformers, timm, torchvision or a file), random inputs and a loss."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Table = Mapping[str, Any]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.bfloat16}
"""What weights are kept in, by precision."""
STEPS_WHERE_NONE_ARE_GIVEN = 1000


# The job


@dataclass(frozen=True, kw_only=True)
class Job:
    """The tables of a job file, and the folder that it lies in."""

    model: Table
    training: Table
    plan: Table
    folder: Path

    @classmethod
    def load(cls, path: Path) -> Job:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            tables = json.loads(text)
        else:
            import tomllib

            tables = tomllib.loads(text)
        plan = tables.get("plan", {})
        return cls(model=tables["model"], training=tables["training"], plan=plan, folder=path.parent)

    @property
    def precision(self) -> str:
        return str(self.training.get("precision", "fp32"))

    @property
    def sharded(self) -> bool:
        return bool(self.plan.get("shard") == "zero3")

    @property
    def keeps_fp32(self) -> bool:
        """Whether weights are kept in fp32 and cast for products."""
        half = self.precision in ("bf16", "fp16", "fp8")
        return not half or bool(self.training.get("master_weights", False))

    @property
    def steps(self) -> int:
        training = self.training
        if "epochs" in training:
            of_epoch: int = math.ceil(training["samples"] / training["global_batch"])
            return math.ceil(float(training["epochs"]) * of_epoch)
        return int(training.get("steps", STEPS_WHERE_NONE_ARE_GIVEN))


# Model, inputs and loss


@dataclass(kw_only=True)
class Task:
    """A model, a batch of random inputs for it, and what makes its output a loss."""

    model: nn.Module
    example: Any
    loss: Callable[[Any], Tensor]

    def compute(self, model: nn.Module, batch: Any) -> Tensor:
        output = model(**batch) if isinstance(batch, dict) else model(*batch)
        return self.loss(output)


def build(job: Job, batch: int, device: torch.device) -> Task:
    sources = {
        "transformers": transformers_task, "timm": timm_task, "torchvision": torchvision_task,
        "python": python_task,
    }  # fmt: skip
    return sources[job.model["source"]](job, batch, device)


def transformers_task(job: Job, batch: int, device: torch.device) -> Task:
    task, config, build_model = transformers_model(job)
    with parameters_on_meta() if job.sharded else torch.device(device):
        model = build_model()
    inputs = transformers_inputs(task, config, job, batch, device)
    return Task(model=model, example=inputs, loss=lambda output: output.loss)


def transformers_model(job: Job) -> tuple[str, Any, Callable[[], nn.Module]]:
    """The task, the configuration, and what builds the model with random weights."""
    import transformers

    given = {name: value for name, value in (job.model.get("config") or {}).items() if name not in _UNUSED}
    model_type = given.pop("model_type", job.model.get("name"))
    wanted = {"eager": "eager", "sdpa": "sdpa", "flash": "flash_attention_2", "cudnn": "sdpa"}
    attention = wanted.get(job.training.get("attention", ""), given.pop("attn_implementation", None))
    if (classes := job.training.get("classes")) is not None:
        given["num_labels"] = classes
    if (shape := image_shape(job)) is not None:
        given.setdefault("image_size", shape[-1])
    config = transformers.AutoConfig.for_model(model_type, **given)
    config.use_cache = False
    asked = job.model.get("task")
    autos = {
        name: getattr(transformers, f"AutoModelFor{TASKS[name]}") for name in ([asked] if asked else TASKS)
    }
    task = next((name for name, auto in autos.items() if type(config) in auto._model_mapping), None)
    if task is None:
        raise SystemExit(f"model.task: {asked} is not one that transformers has for {model_type}")
    options = {} if attention is None else {"attn_implementation": attention}
    return task, config, functools.partial(autos[task].from_config, config, **options)


_UNUSED = ("torch_dtype", "dtype", "quantization_config", "auto_map")
TASKS = {
    "seq2seq-lm": "Seq2SeqLM", "masked-lm": "MaskedLM", "causal-lm": "CausalLM",
    "image-classification": "ImageClassification", "sequence-classification": "SequenceClassification",
    "token-classification": "TokenClassification", "question-answering": "QuestionAnswering",
}  # fmt: skip
"""Whose inputs are made below; the first that a model type has is trained where the job names none."""


def transformers_inputs(
    task: str, config: Any, job: Job, batch: int, device: torch.device
) -> dict[str, Tensor]:
    def whole(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, device=device)

    if task == "image-classification":
        channels = getattr(config, "num_channels", 3)
        side = getattr(config, "image_size", 224)
        shape = image_shape(job) or (channels, side, side)
        images = torch.randn(batch, *shape, device=device)
        return {"pixel_values": images, "labels": whole(config.num_labels, batch)}
    length = job.training["sequence"]
    ids = whole(config.get_text_config().vocab_size, batch, length)
    if task == "question-answering":
        return {
            "input_ids": ids,
            "start_positions": whole(length, batch),
            "end_positions": whole(length, batch),
        }
    if task == "sequence-classification":
        return {"input_ids": ids, "labels": whole(config.num_labels, batch)}
    if task == "token-classification":
        return {"input_ids": ids, "labels": whole(config.num_labels, batch, length)}
    return {"input_ids": ids, "labels": ids.clone()}


def image_shape(job: Job) -> tuple[int, int, int] | None:
    given = job.training.get("image")
    if given is None:
        return None
    return (3, given, given) if isinstance(given, int) else (given[0], given[1], given[2])


def timm_task(job: Job, batch: int, device: torch.device) -> Task:
    import timm

    name, args = job.model["name"], dict(job.model.get("args", {}))
    usual = timm.get_pretrained_cfg(name)
    shape = image_shape(job) or tuple(usual.input_size if usual is not None else (3, 224, 224))
    if (classes := job.training.get("classes")) is not None:
        args.setdefault("num_classes", classes)
    if usual is not None and shape != tuple(usual.input_size):
        try:
            model = timm.create_model(name, img_size=shape[1:], **args)
        except TypeError:
            model = timm.create_model(name, **args)
    else:
        model = timm.create_model(name, **args)
    return classifier(model, torch.randn(batch, *shape), device)


def torchvision_task(job: Job, batch: int, device: torch.device) -> Task:
    import torchvision

    args = dict(job.model.get("args", {}))
    shape = image_shape(job) or (3, 299 if job.model["name"] == "inception_v3" else 224, 224)
    shape = (3, 299, 299) if job.model["name"] == "inception_v3" and "image" not in job.training else shape
    if (classes := job.training.get("classes")) is not None:
        args.setdefault("num_classes", classes)
    if job.model["name"].startswith("vit_"):
        args.setdefault("image_size", shape[-1])
    model = torchvision.models.get_model(job.model["name"], **args)
    return classifier(model, torch.randn(batch, *shape), device)


def python_task(job: Job, batch: int, device: torch.device) -> Task:
    """A model of the user's file: ``file.py:function`` takes the batch and returns a module, (module, inputs)
    or (module, inputs, loss); a class is built with the job's arguments."""
    name, _, function = str(job.model["name"]).rpartition(":")
    path = (job.folder / name).resolve()
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"model.name: {path} is not a file of Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    make, args = getattr(module, function), dict(job.model.get("args", {}))
    if not inspect.isclass(make):
        free = [one for one in inspect.signature(make).parameters if one not in args]
        wanted = [one for one in free if one.strip("_") in _BATCH_NAMES]
        if wanted or free:
            args[(wanted or free)[0]] = batch
    made = make(**args)
    parts = made if isinstance(made, tuple) else (made,)
    model, inputs, loss = (*parts, None, None)[:3]
    if inputs is None:
        shape = image_shape(job)
        length = job.training.get("sequence", 1)
        inputs = torch.randn(batch, *shape) if shape else torch.zeros(batch, length, dtype=torch.long)
    if loss is None:
        return classifier(model, inputs, device)
    return Task(model=model, example=moved(inputs, device), loss=loss)


_BATCH_NAMES = ("batch", "batch_size", "bsz", "bs", "b", "n", "micro_batch", "samples")


def classifier(model: nn.Module, inputs: Any, device: torch.device) -> Task:
    """A model whose output is scores of classes, or has a loss of its own; labels are random."""

    def loss(output: Any) -> Tensor:
        if hasattr(output, "loss") and output.loss is not None:
            value: Tensor = output.loss
            return value
        scores: Tensor = output[0] if isinstance(output, tuple) else output
        scores = scores.flatten(0, -2) if scores.dim() > 1 else scores[None]
        labels = torch.arange(len(scores), device=scores.device) % scores.shape[-1]
        return nn.functional.cross_entropy(scores.float(), labels)

    return Task(model=model, example=moved(inputs, device), loss=loss)


def moved(inputs: Any, device: torch.device) -> Any:
    """Move inputs to the device; a lone tensor as a tuple."""
    if isinstance(inputs, Tensor):
        return (inputs.to(device),)
    if isinstance(inputs, Mapping):
        return {
            name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()
        }
    return tuple(value.to(device) if isinstance(value, Tensor) else value for value in inputs)


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters are made without memory, so that a rank never holds more than its shards; buffers are
    real."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        kept = module._parameters.get(name)
        if kept is not None and not kept.is_meta:
            module._parameters[name] = nn.Parameter(kept.to("meta"), requires_grad=kept.requires_grad)

    nn.Module.register_parameter = on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
