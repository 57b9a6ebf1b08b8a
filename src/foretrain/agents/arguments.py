"""Lists the arguments of tools, each with its type and what it means, and reads them."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from foretrain.errors import InputError
from foretrain.options import check_names
from foretrain.schema import convert


class Argument(NamedTuple):
    """The type of an argument, and what to tell a language model of it."""

    hint: Any
    words: str


Arguments = Mapping[str, Argument]
Table = Mapping[str, Any]

JOB: Arguments = {
    "model": Argument(
        str,
        "Name of a model: a published one (Llama-3.1-8B, meta-llama/Llama-3.1-8B, Qwen3-8B), one of "
        "torchvision or timm (resnet50, vit_base_patch16_224), or a transformers model type "
        "(transformers:llama). The tool catalog lists them.",
    ),
    "job": Argument(
        Table,
        "Instead of model: the tables of a whole job (model, training, cluster, plan), such as the tool plan "
        "returns. For a model of your own: "
        '{"model": {"source": "transformers", "task": "causal-lm", "config": {"model_type": "llama", ...}}, '
        '"training": {"global_batch": 64, "sequence": 4096}, "cluster": {"device": "h100"}}.',
    ),
    "device": Argument(str, "Device of the catalogue, such as h100, a100-sxm-40gb, rtx-4090."),
    "devices": Argument(int, "Devices in all."),
    "node": Argument(str, "Node of the catalogue, such as dgx-h100: fills in its links."),
    "nodes": Argument(int, "Nodes that the devices are spread over."),
    "batch": Argument(int, "Samples per optimizer step over all devices (the global batch)."),
    "micro_batch": Argument(int, "Samples that a device takes at once; gradients are accumulated."),
    "sequence": Argument(int, "Tokens per sample."),
    "image": Argument(int | tuple[int, ...], "Side of images, or [channels, height, width]."),
    "precision": Argument(str, "fp32, tf32, amp-bf16, amp-fp16, bf16, fp16 or fp8."),
    "optimizer": Argument(str, "sgd, adamw, adam, adafactor, lamb, ..."),
    "mode": Argument(Literal["train", "infer"], "train (the default), or infer for forward passes alone."),
    "steps": Argument(int, "Optimizer steps of the whole training: total time and cost need its length."),
    "samples": Argument(int, "Samples per epoch, instead of steps, with epochs."),
    "epochs": Argument(float, "Epochs of the whole training."),
    "tensor": Argument(int, "Devices that share each layer."),
    "pipeline": Argument(int, "Stages of the pipeline."),
    "context": Argument(int, "Devices that share a sequence."),
    "expert": Argument(int, "Devices that share the experts."),
    "shard": Argument(str, "none (DDP), zero1, zero2 or zero3 (FSDP)."),
    "recompute": Argument(str, "none, selective, operators or full: activation checkpointing."),
    "adapter": Argument(str, "Low-rank adapters beside frozen weights: lora:16, qlora:64."),
    "framework": Argument(str, "pytorch, megatron, torchtitan, deepspeed, nanotron, ..."),
    "compile": Argument(bool, "With torch.compile."),
    "price": Argument(str | float, "Of a device in an hour, as $2.50/h; else the catalogue's."),
}
"""What describes a job; other fields of a job are taken by their names too."""

PREDICTOR: Arguments = {
    "predictor": Argument(str, "deletepop (the default) or roofline; others need measured runs first.")
}
LIMITS: Arguments = {
    "max_time": Argument(str | float, "That the whole training may take: 24h, or seconds."),
    "max_cost": Argument(str | float, "Dollars that the whole training may cost."),
    "max_memory": Argument(str | float, "That the fullest device may need: 70GiB, or bytes."),
    "fits": Argument(float, "The least probability that memory is enough, from 0 to 1 (0.9)."),
    "risk": Argument(float, "How likely the other limits may be missed, from 0 to 1 (0.1)."),
    "base": Argument(Table, "A job to compare with, described by the same arguments as this one."),
}
SEARCH: Arguments = {
    "kinds": Argument(tuple[str, ...], "Devices or nodes to choose from, as [h100, h200, b200]."),
    "max_devices": Argument(int, "The most devices; powers of two up to it are looked at."),
    "counts": Argument(tuple[int, ...], "Numbers of devices to choose from, instead."),
    "deadline": Argument(str | float, "By when the training must have ended: 24h, or seconds."),
    "budget": Argument(str | float, "Dollars that it may cost."),
    "objective": Argument(Literal["time", "cost", "energy"], "What to make small."),
    "framework": Argument(str, "What the plans must be runnable with: megatron, torchtitan, fsdp2, ..."),
    "fits": LIMITS["fits"],
    "risk": LIMITS["risk"],
    "top": Argument(int, "Plans to return (3)."),
}
PAIR: Arguments = {
    "a": Argument(Table, "The first job, described by model or job and options, as in predict."),
    "b": Argument(Table, "The second; with neither model nor job, what it has different from the first."),
}
ENTRY: Arguments = {
    "kind": Argument(Literal["devices", "nodes", "hosts", "models", "prices"], "What to list."),
    "name": Argument(str, "All that is known of one of them."),
    "search": Argument(str, "List only names with this text in them."),
}


def schema(arguments: Arguments, *, required: tuple[str, ...] = (), others: bool = False) -> dict[str, Any]:
    """The JSON schema of arguments."""
    return {
        "type": "object",
        "properties": {
            name: {**_type(hint), "description": words} for name, (hint, words) in arguments.items()
        },
        "required": list(required),
        "additionalProperties": others,
    }


def _type(hint: Any) -> dict[str, Any]:
    """
    >>> _type(str | float)
    {'type': ['string', 'number']}
    """
    names = {str: "string", int: "integer", float: "number", bool: "boolean", Table: "object"}
    if hint in names:
        return {"type": names[hint]}
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(inner)}
    if origin is tuple:
        return {"type": "array", "items": _type(inner[0])}
    assert origin in (Union, UnionType)
    kinds = [_type(one) for one in inner]
    return (
        {"type": [kind["type"] for kind in kinds]}
        if all(len(kind) == 1 for kind in kinds)
        else {"anyOf": kinds}
    )


def read(given: Mapping[str, Any], arguments: Arguments) -> dict[str, Any]:
    """The arguments that are given, checked by their types; empty ones are left out."""
    return {
        name: convert(given[name], hint, name)
        for name, (hint, _) in arguments.items()
        if given.get(name) is not None
    }


def rest(given: Mapping[str, Any], *known: Arguments) -> dict[str, Any]:
    """The options of a job that are among the arguments; anything else is refused."""
    own = {name for arguments in known for name in arguments} | {"model", "job"}
    options = {name: value for name, value in given.items() if name not in own and value is not None}
    check_names(options, beside=own)
    return options


def only(given: Mapping[str, Any], arguments: Arguments) -> None:
    """Refuse arguments that there are not."""
    for name in given:
        if name not in arguments:
            raise InputError(f"{name}: unknown; arguments are {', '.join(arguments)}")
