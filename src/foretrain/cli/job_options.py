"""Turns the options that commands share, and a job file or a model's name, into a Job."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from foretrain.errors import InputError, invalid

if TYPE_CHECKING:
    from foretrain.job import Edit, Job


PREDICTOR_HELP = "Predictor by name, as file.py:Class, or a folder that fit made"
PredictorOption = Annotated[str | None, typer.Option("--predictor", help=f"{PREDICTOR_HELP}.")]


def _use_catalog(ctx: typer.Context, path: Path | None) -> Path | None:
    """For as long as the command runs, here and in all that it starts."""
    if path is None:
        return None
    from foretrain.catalog import VARIABLE, Catalog

    path, before = path.resolve(), os.environ.get(VARIABLE, "")
    Catalog.load(path)
    os.environ[VARIABLE] = os.pathsep.join(filter(None, (before, str(path))))
    ctx.call_on_close(lambda: os.environ.update({VARIABLE: before}))
    return path


def _use_refresh(ctx: typer.Context, wanted: bool | None) -> None:
    """For as long as the command runs, here and in all that it starts; no field of a job."""
    if wanted:
        from foretrain.capture.cache import REFRESH

        before = os.environ.get(REFRESH, "")
        os.environ[REFRESH] = "1"
        ctx.call_on_close(lambda: os.environ.update({REFRESH: before}))


CatalogOption = Annotated[
    Path | None,
    typer.Option("--catalog", callback=_use_catalog, help="Your own devices, nodes and prices (TOML)."),
]


class JobOptions:
    """The options that describe a job; each overrides the field of the job file that ``_PLACES`` names."""

    source: Annotated[
        str | None,
        typer.Option(help="Where MODEL comes from: timm, torchvision, transformers, python, onnx, graph."),
    ]
    device: Annotated[str | None, typer.Option(help="Device of the catalogue, such as h100 or rtx-4090.")]
    devices: Annotated[int | None, typer.Option(help="Devices in all.")]
    nodes: Annotated[int | None, typer.Option(help="Nodes that the devices are spread over.")]
    node: Annotated[
        str | None, typer.Option(help="Node of the catalogue, such as dgx-h100: fills in the links.")
    ]
    cores_per_device: Annotated[int | None, typer.Option(help="Cores of each worker, for --device cpu.")]
    batch: Annotated[int | None, typer.Option(help="Samples per optimizer step, over all devices.")]
    image: Annotated[str | None, typer.Option(help="Image side, or channels,height,width.")]
    sequence: Annotated[int | None, typer.Option(help="Tokens per sample.")]
    classes: Annotated[int | None, typer.Option(help="Classes of a classifier.")]
    precision: Annotated[str | None, typer.Option(help="fp32, tf32, amp-bf16, amp-fp16, bf16, fp16 or fp8.")]
    optimizer: Annotated[str | None, typer.Option(help="sgd, adamw, adam, adafactor, lamb, ...")]
    mode: Annotated[str | None, typer.Option(help="train or infer.")]
    samples: Annotated[int | None, typer.Option(help="Samples per epoch.")]
    epochs: Annotated[float | None, typer.Option(help="Epochs of the whole training.")]
    steps: Annotated[int | None, typer.Option(help="Steps of the whole training, instead of epochs.")]
    micro_batch: Annotated[int | None, typer.Option(help="Samples that a device handles at once.")]
    tensor: Annotated[int | None, typer.Option(help="Devices that share the layers of a model.")]
    pipeline: Annotated[int | None, typer.Option(help="Stages of a pipeline.")]
    context: Annotated[int | None, typer.Option(help="Devices that share a sequence.")]
    expert: Annotated[int | None, typer.Option(help="Devices that share the experts.")]
    shard: Annotated[str | None, typer.Option(help="none, zero1, zero2 or zero3.")]
    recompute: Annotated[str | None, typer.Option(help="none, selective or full.")]
    schedule: Annotated[str | None, typer.Option(help="gpipe, 1f1b or interleaved.")]
    sequence_parallel: Annotated[
        bool | None, typer.Option(help="Split norms by sequence, beside --tensor.", show_default=False)
    ]
    framework: Annotated[
        str | None, typer.Option(help="pytorch, megatron, nanotron, llm-foundry, torchtitan, ...")
    ]
    compile: Annotated[bool | None, typer.Option(help="With torch.compile.", show_default=False)]
    channels_last: Annotated[
        bool | None, typer.Option(help="Images in channels-last layout.", show_default=False)
    ]
    catalog: CatalogOption
    refresh: Annotated[
        bool | None,
        typer.Option(
            "--refresh", callback=_use_refresh, help="Trace models anew, cached or not.", show_default=False
        ),
    ]


_PLACES = {
    "source": "model", "device": "cluster", "node": "cluster", "nodes": "cluster",
    "cores_per_device": "cluster", "batch": "training", "image": "training",
    "sequence": "training", "classes": "training", "precision": "training", "optimizer": "training",
    "mode": "training",
    "samples": "training", "epochs": "training", "steps": "training", "channels_last": "training",
    "framework": "training", "compile": "training",
    **dict.fromkeys(("micro_batch", "tensor", "pipeline", "context", "expert", "shard", "recompute",
    "schedule", "sequence_parallel"), "plan"),
}  # fmt: skip
_FIELDS = {"batch": "global_batch"}
_INSTEAD = {"epochs": "steps", "steps": "epochs"}
"""An option that is given replaces the field of the file that would contradict it."""

Options = dict[str, Any]
"""The options that were given, by name."""

Command = Callable[..., None]


def with_options(declared: type) -> Callable[[Command], Command]:
    """Give a command the options that a class declares; it receives those that were given as ``options``."""
    hints = get_type_hints(declared, include_extras=True)

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            command(
                options={name: value for name in hints if (value := values.pop(name)) is not None}, **values
            )

        own = [
            parameter
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.name != "options"
        ]
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
            for name, hint in hints.items()
        ]
        named = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        vars(run)["__signature__"] = inspect.Signature(named + more)
        return run

    return decorate


with_job_options = with_options(JobOptions)


def job_from(target: str, options: Options) -> Job:
    """A job file with the options over it, or a model's name with the options around it."""
    from foretrain.api import make_job
    from foretrain.catalog import Catalog
    from foretrain.checkpoints import is_checkpoint
    from foretrain.job import Job
    from foretrain.model_names import check_file

    path = Path(target)
    catalog = Catalog.load(options.get("catalog"))
    if path.suffix == ".jsonl" or path.name.endswith(".jsonl.zst"):
        raise InputError(f"{target}: a file of many jobs is given with --jobs")
    if path.suffix not in (".toml", ".json") or is_checkpoint(path):
        check_file(target)
        given = {name: value for name, value in options.items() if name != "catalog"}
        if "image" in given:
            given["image"] = _image(given["image"])
        return make_job(target, **given, catalog=catalog)
    return Job.load(path, catalog=catalog, edit=overriding(options))


def overriding(options: Options) -> Edit:
    """Puts the options over the tables of a job; what is no table is left to be refused."""
    return lambda data: _overridden(data, options) if isinstance(data, Mapping) else data


def _overridden(data: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """The tables of a job file with the options in place of their fields."""
    from foretrain.api import nodes_for

    job = {name: dict(section) if isinstance(section, Mapping) else section for name, section in data.items()}
    for name, value in options.items():
        if name in _PLACES and isinstance(section := job.setdefault(_PLACES[name], {}), dict):
            section[_FIELDS.get(name, name)] = _image(value) if name == "image" else value
            section.pop(_INSTEAD.get(name), None)
    cluster = job.get("cluster")
    if isinstance(cluster, dict):
        if "node" in options and "device" not in options:
            cluster.pop("device", None)
        if "devices" in options:
            if "nodes" not in cluster:
                cluster["nodes"] = nodes_for(
                    options["devices"], cluster.get("node"), cluster.get("device"), None
                )
            cluster["devices_per_node"] = _spread(options["devices"], cluster["nodes"])
    return job


def _spread(devices: int, nodes: object) -> int:
    if not isinstance(nodes, int) or nodes < 1 or devices % nodes:
        raise InputError(f"devices: {devices} does not divide over nodes = {nodes}")
    return devices // nodes


def _image(text: str) -> int | list[int]:
    sides = text.replace("x", ",").split(",")
    if len(sides) not in (1, 3) or not all(side.strip().isdigit() for side in sides):
        raise invalid("training.image", text, "a side length or channels,height,width")
    return int(text) if len(sides) == 1 else [int(side) for side in sides]
