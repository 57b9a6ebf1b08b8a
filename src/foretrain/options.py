"""Puts options, which are the fields of a job by their names alone, over the tables of a job."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from foretrain.cluster import Catalog, ClusterSpec
from foretrain.errors import InputError, invalid, unknown
from foretrain.job import SPELLED, Edit
from foretrain.plan import Plan
from foretrain.workload import OPTIMIZERS, Model, Training

Options = Mapping[str, Any]
"""What was given, by name."""

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_DEVICE = "h100-sxm-80gb"
"""Where nothing is said of the device."""
USUAL_IN_NODE = 8
"""GPUs in a node, where the job does not say."""

_TABLES = {"model": Model, "training": Training, "cluster": ClusterSpec, "plan": Plan}
_SHORT = {"batch": "global_batch"}
"""Options that are called otherwise than their fields."""

_INSTEAD = {"epochs": "steps", "steps": "epochs"}
"""An option that is given replaces the field of the file that would contradict it."""

_SPREAD = ("devices", "nodes", "node", "devices_per_node", "groups", "tensor", "pipeline", "context")
"""Options that decide how many data-parallel ranks there are."""

_MEANT = {
    "batch": "batch_size batchsize bs bsz global_batch_size train_batch_size total_batch_size",
    "micro_batch": "micro_batch_size mbs per_device_batch_size per_device_train_batch_size batch_per_device "
    "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches grad_accum accumulation",
    "devices": "gpus num_gpus n_gpus ngpus gpu_count num_devices n_devices world_size workers",
    "device": "gpu gpu_type gpu_name accelerator hardware device_type",
    "devices_per_node": "gpus_per_node nproc_per_node",
    "nodes": "num_nodes nnodes n_nodes",
    "sequence": "seq seq_len seqlen seq_length sequence_length max_length max_seq_len max_seq_length "
    "block_size context_length",
    "image": "image_size img_size resolution input_size",
    "classes": "num_classes n_classes num_labels",
    "precision": "dtype torch_dtype amp mixed_precision bf16 fp16",
    "optimizer": "optim opt optimizer_class",
    "samples": "dataset_size num_samples n_samples examples",
    "epochs": "epoch num_epochs n_epochs max_epochs num_train_epochs",
    "steps": "max_steps num_steps n_steps total_steps iterations",
    "loader_workers": "num_workers",
    "data": "dp ddp data_parallel dp_size",
    "tensor": "tp tp_size tensor_parallel tensor_parallel_size",
    "pipeline": "pp pp_size pipeline_parallel pipeline_parallel_size",
    "context": "cp cp_size context_parallel",
    "expert": "ep ep_size expert_parallel",
    "expert_tensor": "etp etp_size expert_tensor_parallel expert_tensor_parallel_size",
    "mtp_layers": "mtp mtp_num_layers",
    "predicted_tokens": "max_predictions_per_seq max_predictions masked_tokens",
    "shard": "fsdp zero zero_stage sharding sharding_strategy strategy deepspeed",
    "recompute": "checkpointing gradient_checkpointing activation_checkpointing remat",
    "offload": "cpu_offload offload_optimizer",
    "compile": "torch_compile compiled",
    "channels_last": "memory_format",
    "allocator": "alloc_conf pytorch_cuda_alloc_conf pytorch_alloc_conf cuda_alloc_conf expandable_segments",
    "adapter": "lora qlora peft peft_config lora_config lora_rank lora_r adapters",
    "title": "name model_name label",
    "args": "kwargs model_args model_kwargs",
    "inputs": "x input args_example example_inputs example inputs_example batch_inputs",
    "targets": "y target labels label_ids",
    "loss": "criterion loss_fn loss_function objective",
}
"""What people write for an option."""

_NO_MATTER = {
    word: words
    for listed, words in (
        ("lr learning_rate", "the learning rate changes neither time nor memory; leave it out"),
        ("seed", "a forecast has nothing random in it; leave it out"),
        ("verbose", "forecasts print nothing; leave it out"),
    )
    for word in listed.split()
}


@functools.cache
def places() -> dict[str, tuple[str, ...]]:
    """The sections that have a field of each name; ``servers`` is a number in a plan and a table in a
    cluster.

    >>> places()["tensor"], places()["image"]
    (('plan',), ('training',))
    """
    sections: dict[str, tuple[str, ...]] = {}
    for section, noun in _TABLES.items():
        for field in dataclasses.fields(noun):
            sections[field.name] = (*sections.get(field.name, ()), section)
    del sections["name"]
    return {**sections, **{short: sections[field] for short, field in _SHORT.items()}}


class Within(dict[str, Any]):
    """Holds some fields of a table, whose others stay as they are."""

    def merged(self, more: Mapping[str, Any]) -> Within:
        return Within(
            self
            | {
                name: Within(self[name]).merged(value)
                if isinstance(value, Within) and name in self
                else value
                for name, value in more.items()
            }
        )


def section_of(section: str, field: str) -> None:
    """Refuse a field that a section of a job does not have."""
    if section not in _TABLES:
        raise unknown(f"{section}.{field}", section, _TABLES, "a section of a job; these are")
    names = [one.name for one in dataclasses.fields(_TABLES[section])]
    if field not in names:
        raise unknown(f"{section}.{field}", field, names, "a known key; allowed are")


@functools.cache
def option_names() -> tuple[str, ...]:
    """List every option: the fields of a job, and how many devices there are in all."""
    return ("devices", *places())


def check_names(given: Iterable[str], *, beside: Iterable[str] = ()) -> None:
    """Refuse an option that there is not, with the one that was meant.

    >>> check_names(["batch_size"])
    Traceback (most recent call last):
    foretrain.errors.InputError: batch_size: unknown; did you mean batch?
    """
    known = {*option_names(), *beside}
    for name in given:
        if name in known:
            continue
        if name in _NO_MATTER:
            raise InputError(f"{name}: unknown; {_NO_MATTER[name]}")
        meant = [option for option, words in _MEANT.items() if name.lower() in words.split()]
        near = [one for one in meant if one in known] or difflib.get_close_matches(
            name, known - set(_SHORT.values()), n=1, cutoff=0.7
        )
        hint = f"did you mean {' or '.join(near)}?" if near else "options are the fields of a job by name"
        raise InputError(f"{name}: unknown; {hint}")


def plain(options: Options) -> dict[str, Any]:
    """The options that are given, with values as jobs have them: names of optimizers and precisions, numbers
    of Python's own."""
    fields = {name: _plain(value) for name, value in options.items() if value is not None}
    if "optimizer" in fields:
        fields["optimizer"] = optimizer_name(fields["optimizer"])
    if "precision" in fields:
        fields["precision"] = precision_name(fields["precision"])
    for name in ("mode", "precision", "optimizer"):
        if isinstance(fields.get(name), str):
            fields[name] = SPELLED[name](fields[name], f"training.{name}")
    for short, field in _SHORT.items():
        if short in fields and field in fields and fields[field] != fields[short]:
            raise InputError(
                f"{short}: {fields[short]!r} and {field}: {fields[field]!r} are the same; give one"
            )
    return fields


def _plain(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    return str(value) if type(value).__module__ == "torch" and type(value).__name__ == "device" else value


# Precisions and optimizers, as torch has them

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8",
           "float8_e5m2": "fp8"}  # fmt: skip


def precision_name(precision: Any) -> Any:
    """The precision that keeps weights in a ``torch.dtype``; anything else as it is."""
    name = str(precision).removeprefix("torch.")
    if isinstance(precision, str) or name == str(precision):
        return precision
    if name not in _DTYPES:
        raise unknown("training.precision", precision, [f"torch.{one}" for one in _DTYPES])
    return _DTYPES[name]


_FUSED = ("adam", "adamw")
_OTHER_NAMES = {"fusedadam": "adam-fused", "fusedlamb": "lamb", "fusedsgd": "sgd"}
"""Optimizers of other libraries that are one of ours."""


def unwrapped_optimizer(optimizer: Any) -> Any:
    """The optimizer inside of what accelerate and others wrap around it."""
    while not isinstance(optimizer, type) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """Read what an optimizer is set to: of an instance, or of a class its defaults (``functools.partial``
    over them)."""
    optimizer = unwrapped_optimizer(optimizer)
    if isinstance(optimizer, functools.partial):
        return {**optimizer_settings(optimizer.func), **optimizer.keywords}
    if isinstance(optimizer, type):
        parameters = inspect.signature(optimizer).parameters.values()
        return {one.name: one.default for one in parameters if one.default is not one.empty}
    settings = dict(getattr(optimizer, "defaults", {}))
    for group in getattr(optimizer, "param_groups", ()):
        settings |= {name: value for name in settings if (value := group.get(name))}
    return settings


def optimizer_name(optimizer: Any) -> str:
    """The name that jobs use for an optimizer: a class, an instance, or a text, which is left as it is."""
    optimizer = unwrapped_optimizer(optimizer)
    if isinstance(optimizer, str):
        return optimizer
    settings = optimizer_settings(optimizer)
    kind = optimizer.func if isinstance(optimizer, functools.partial) else optimizer
    kind = kind if isinstance(kind, type) else type(kind)
    names = [one.__name__.lower() for one in getattr(kind, "__mro__", ())]
    name = next((_OTHER_NAMES.get(one, one) for one in names if one in (*OPTIMIZERS, *_OTHER_NAMES)), None)
    if name is None:
        raise InputError(f"training.optimizer: {kind.__name__} is not one of {', '.join(OPTIMIZERS)}")
    if name in _FUSED and settings.get("fused"):
        return f"{name}-fused"
    return "sgd-plain" if name == "sgd" and not settings.get("momentum", 0.9) else name


# Options over tables


def overriding(options: Options, catalog: Catalog | None = None) -> Edit:
    """Puts the options over the tables of a job; what is no table is left to be refused."""
    return lambda data: overridden(data, options, catalog) if isinstance(data, Mapping) else data


def overridden(data: Mapping[str, Any], options: Options, catalog: Catalog | None = None) -> dict[str, Any]:
    """The tables of a job with the options in place of their fields."""
    job = {name: dict(section) if isinstance(section, Mapping) else section for name, section in data.items()}
    for name, value in options.items():
        sections = places().get(name, ())
        if not sections:
            continue
        section = job.setdefault(sections[0 if isinstance(value, Mapping) else -1], {})
        if isinstance(section, dict):
            before = section.get(_SHORT.get(name, name))
            if isinstance(value, Within) and isinstance(before, Mapping):
                value = Within(before).merged(value)
            section[_SHORT.get(name, name)] = value
            if (other := _INSTEAD.get(name)) is not None and other not in options:
                section.pop(other, None)
    cluster, plan = job.setdefault("cluster", {}), job.get("plan")
    if isinstance(cluster, dict):
        if "node" in options and "device" not in options:
            cluster.pop("device", None)
        if "devices" in options:
            cluster.update(_spread(cluster, options, catalog))
        if not cluster:
            del job["cluster"]
    if isinstance(plan, dict) and "data" not in options and any(name in options for name in _SPREAD):
        plan.pop("data", None)
    return job


def _spread(cluster: Mapping[str, Any], options: Options, catalog: Catalog | None) -> dict[str, int]:
    """Nodes, and devices of each, for so many devices in all.

    Several nodes of a file stay as large as they are; one node takes what one has.
    """
    devices, nodes, per_node = options["devices"], cluster.get("nodes"), cluster.get("devices_per_node")
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise invalid("devices", devices, "a whole number of at least 1")
    if "devices_per_node" in options:
        if not isinstance(per_node, int) or per_node < 1 or devices % per_node:
            raise InputError(f"devices: {devices} does not divide over devices_per_node = {per_node}")
        if options.get("nodes", devices // per_node) != devices // per_node:
            raise InputError(f"devices: {devices} is not devices_per_node {per_node} x nodes {nodes}")
        return {"nodes": devices // per_node}
    if "nodes" not in options:
        several = isinstance(nodes, int) and nodes > 1
        if several and isinstance(per_node, int) and per_node > 0 and devices % per_node == 0:
            return {"nodes": devices // per_node}
        if not several or (isinstance(per_node, int) and devices < per_node):
            nodes = nodes_for(devices, cluster.get("node"), cluster.get("device"), catalog)
    if not isinstance(nodes, int) or nodes < 1 or devices % nodes:
        raise InputError(f"devices: {devices} does not divide over nodes = {nodes}")
    return {"nodes": nodes, "devices_per_node": devices // nodes}


def nodes_for(devices: int, node: str | None, device: str | None, catalog: Catalog | None) -> int:
    """Nodes that so many devices fill: those of the named node, else of eight GPUs; a rest is refused."""
    known = catalog or Catalog.load()
    in_node = known.node(node, "cluster.node").devices if node is not None else USUAL_IN_NODE
    on_cpu = device is not None and known.device(device, "cluster.device").is_cpu
    if devices <= in_node or on_cpu:
        return 1
    if devices % in_node:
        even = next(n for n in range(devices // in_node + 1, devices + 1) if devices % n == 0)
        raise InputError(
            f"devices: {devices} does not fill nodes of {in_node}; give nodes, such as {even} "
            f"of {devices // even} each"
        )
    return devices // in_node


def lists_options(function: F) -> F:
    """Give a function whose ``**options`` are those of a job a signature that names them all."""
    signature = inspect.signature(function)
    kept = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    annotations = {field.name: field.type for noun in _TABLES.values() for field in dataclasses.fields(noun)}
    named = {one.name for one in kept}
    more = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=annotations.get(_SHORT.get(name, name), "int"),
        )
        for name in option_names()
        if name not in named and name not in _SHORT.values()
    ]
    vars(function)["__signature__"] = signature.replace(parameters=[*kept, *more])
    return function
