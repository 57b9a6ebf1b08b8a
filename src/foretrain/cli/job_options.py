"""Turns the options that commands share, and a job file or a model's name, into a Job."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from foretrain.cli import completion
from foretrain.cli.lists import sides
from foretrain.errors import InputError, invalid

if TYPE_CHECKING:
    from foretrain.job import Edit, Job
    from foretrain.launchers import Launch


PREDICTOR_HELP = "Predictor by name, as file.py:Class, or a folder that fit made"
PredictorOption = Annotated[
    str | None,
    typer.Option("--predictor", help=f"{PREDICTOR_HELP}.", autocompletion=completion.predictor_names),
]


PAGE_SECONDS = 20.0
"""As ``web/table.py`` has it, which is not imported for a default."""
HtmlSeconds = Annotated[
    float | None,
    typer.Option(
        "--html-seconds",
        min=0.0,
        help=f"Time for the forecasts that the page of --html carries. [default: {PAGE_SECONDS:g}]",
    ),
]


TARGET = typer.Argument(
    metavar="JOB.toml|JOB.json|MODEL",
    help="A job file; or a model: its name (resnet50, Llama-3.1-8B), a script (train.py), "
    "file.py:function, an .onnx file, a captured graph.",
    show_default=False,
    autocompletion=completion.models,
)
Target = Annotated[str | None, TARGET]
_SECTIONS = {
    "source": "The model and its devices (over what the job file says)",
    "batch": "The training",
    "micro_batch": "How it is spread over the devices",
    "price": "Prices, storage and failures",
    "title": "Framework, compiler and the rest",
}
"""Titles in the help of commands, by the first option below each."""


def _use_catalog(ctx: typer.Context, path: Path | None) -> Path | None:
    """Use the user's catalogue for as long as the command runs, here and in all that it starts."""
    if path is None:
        return None
    from foretrain.catalog import VARIABLE, Catalog

    path, before = path.resolve(), os.environ.get(VARIABLE, "")
    Catalog.load(path)
    os.environ[VARIABLE] = os.pathsep.join(filter(None, (before, str(path))))
    ctx.call_on_close(lambda: os.environ.update({VARIABLE: before}))
    return path


def _use_refresh(ctx: typer.Context, wanted: bool | None) -> None:
    """Trace models anew for as long as the command runs, here and in all that it starts; no field of a
    job."""
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
    """The options that describe a job; each overrides the field of its name (``foretrain.options``)."""

    source: Annotated[
        str | None,
        typer.Option(
            help="Where MODEL comes from: timm, torchvision, transformers, diffusion, python, onnx, graph.",
            autocompletion=completion.setting("Source"),
        ),
    ]
    device: Annotated[
        str | None,
        typer.Option(
            help="Device of the catalogue, such as h100 or rtx-4090.", autocompletion=completion.devices
        ),
    ]
    devices: Annotated[int | None, typer.Option(help="Devices in all.")]
    nodes: Annotated[int | None, typer.Option(help="Nodes that the devices are spread over.")]
    node: Annotated[
        str | None,
        typer.Option(
            help="Node of the catalogue, such as dgx-h100: fills in the links.",
            autocompletion=completion.nodes,
        ),
    ]
    host: Annotated[
        str | None,
        typer.Option(
            help="The host: a file of measure host, a name of catalog hosts, or its CPU's name.",
            autocompletion=completion.hosts,
        ),
    ]
    cores_per_device: Annotated[int | None, typer.Option(help="Cores of each worker, for --device cpu.")]
    batch: Annotated[int | None, typer.Option(help="Samples per optimizer step, over all devices.")]
    image: Annotated[str | None, typer.Option(help="Image side, or channels,height,width.")]
    sequence: Annotated[int | None, typer.Option(help="Tokens per sample.")]
    classes: Annotated[int | None, typer.Option(help="Classes of a classifier.")]
    precision: Annotated[
        str | None,
        typer.Option(
            help="fp32, tf32, amp-bf16, amp-fp16, bf16, fp16 or fp8.",
            autocompletion=completion.setting("Precision"),
        ),
    ]
    fp8: Annotated[
        str | None,
        typer.Option(
            help="How numbers are scaled and cast, with --precision fp8: tensorwise, rowwise, delayed, ...",
            autocompletion=completion.setting("Fp8"),
        ),
    ]
    optimizer: Annotated[
        str | None,
        typer.Option(help="sgd, adamw, adam, adafactor, lamb, ...", autocompletion=completion.optimizers),
    ]
    mode: Annotated[
        str | None, typer.Option(help="train or infer.", autocompletion=completion.setting("Mode"))
    ]
    samples: Annotated[int | None, typer.Option(help="Samples per epoch.")]
    epochs: Annotated[float | None, typer.Option(help="Epochs of the whole training.")]
    steps: Annotated[int | None, typer.Option(help="Steps of the whole training, instead of epochs.")]
    loader_rate: Annotated[
        float | None, typer.Option(help="Samples per second that a data loader's worker delivers.")
    ]
    loader_workers: Annotated[int | None, typer.Option(help="Workers of each rank's data loader.")]
    evaluate_every: Annotated[
        str | None, typer.Option(help='Steps, "epoch" or a time such as 1h, with --evaluate-samples.')
    ]
    evaluate_samples: Annotated[int | None, typer.Option(help="Samples of an evaluation.")]
    checkpoint_every: Annotated[str | None, typer.Option(help='Steps, "epoch" or a time such as 1h.')]
    micro_batch: Annotated[int | None, typer.Option(help="Samples that a device handles at once.")]
    tensor: Annotated[int | None, typer.Option(help="Devices that share the layers of a model.")]
    pipeline: Annotated[int | None, typer.Option(help="Stages of a pipeline.")]
    context: Annotated[int | None, typer.Option(help="Devices that share a sequence.")]
    expert: Annotated[int | None, typer.Option(help="Devices that share the experts.")]
    shard: Annotated[
        str | None,
        typer.Option(help="none, zero1, zero2 or zero3.", autocompletion=completion.setting("Shard")),
    ]
    recompute: Annotated[
        str | None,
        typer.Option(
            help="none, selective, operators or full.", autocompletion=completion.setting("Recompute")
        ),
    ]
    recompute_every: Annotated[int | None, typer.Option(help="Of so many layers, one is recomputed.")]
    schedule: Annotated[
        str | None,
        typer.Option(
            help="gpipe, 1f1b, interleaved, zero-bubble, zbv, dualpipe.",
            autocompletion=completion.setting("Schedule"),
        ),
    ]
    sequence_parallel: Annotated[
        bool | None, typer.Option(help="Split norms by sequence, beside --tensor.", show_default=False)
    ]
    offload: Annotated[
        bool | None, typer.Option(help="The optimizer and its state on the host.", show_default=False)
    ]
    servers: Annotated[int | None, typer.Option(help="Parameter servers instead of all-reduce.")]
    price: Annotated[str | None, typer.Option(help="Of a device, such as $2.50/h.")]
    storage_bandwidth: Annotated[
        str | None, typer.Option(help="With which a node writes checkpoints, such as 2GB/s.")
    ]
    node_mtbf: Annotated[str | None, typer.Option(help="Mean time between failures of a node, such as 50d.")]
    restart_time: Annotated[str | None, typer.Option(help="From a failure until steps run again.")]
    title: Annotated[str | None, typer.Option(help="What reports call the model.")]
    framework: Annotated[
        str | None,
        typer.Option(
            help="pytorch, megatron, nanotron, llm-foundry, torchtitan, ...",
            autocompletion=completion.setting("Framework"),
        ),
    ]
    compile: Annotated[bool | None, typer.Option(help="With torch.compile.", show_default=False)]
    compile_mode: Annotated[
        str | None,
        typer.Option(
            help="With torch.compile in this mode, such as reduce-overhead.",
            autocompletion=completion.setting("CompileMode"),
        ),
    ]
    channels_last: Annotated[
        bool | None, typer.Option(help="Images in channels-last layout.", show_default=False)
    ]
    allocator: Annotated[
        str | None,
        typer.Option(help="Of torch's memory, as PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True."),
    ]
    adapter: Annotated[
        str | None,
        typer.Option(help="Low-rank adapters: lora:16, or qlora:64,targets=q_proj+v_proj,dropout=0.05."),
    ]
    master_weights: Annotated[
        bool | None, typer.Option(help="An fp32 copy of low-precision weights.", show_default=False)
    ]
    set: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SECTION.FIELD=VALUE",
            help="Any field of the job, such as plan.reshard=false or plan.overlap.tensor=true; repeatable.",
        ),
    ]
    catalog: CatalogOption
    refresh: Annotated[
        bool | None,
        typer.Option(
            "--refresh", callback=_use_refresh, help="Trace models anew, cached or not.", show_default=False
        ),
    ]


Options = dict[str, Any]
"""The options that were given, by name."""

Command = Callable[..., None]


def with_options(declared: type, without: Collection[str] = ()) -> Callable[[Command], Command]:
    """Give a command the options that a class declares, but those ``without``; it receives those that were
    given as ``options``."""
    declarations = get_type_hints(declared, include_extras=True)
    if declared is JobOptions:
        declarations = dict(_in_sections(declarations))
    hints = {name: hint for name, hint in declarations.items() if name not in without}

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


def _in_sections(declarations: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Give each option the title that it stands below; other commands have some of them too."""
    title = ""
    for name, hint in declarations.items():
        title = _SECTIONS.get(name, title)
        facts = copy.copy(hint.__metadata__[0])
        facts.rich_help_panel = title
        yield name, Annotated[hint.__origin__, facts]


with_job_options = with_options(JobOptions)


def job_from(target: str, options: Options) -> Job:
    """A job file with the options over it, or a model's name with the options around it."""
    from foretrain.api import job_of
    from foretrain.catalog import Catalog

    if target.endswith((".jsonl", ".jsonl.zst")):
        raise InputError(f"{target}: a file of many jobs is for foretrain predict --jobs")
    return job_of(target, _of_job(options), Catalog.load(options.get("catalog")))


def is_job_file(target: str) -> bool:
    """Whether it is named as a file that describes a whole job, or launches one."""
    from foretrain.launchers import SUFFIXES

    return target.endswith((".toml", ".json", *SUFFIXES))


def is_launch_file(target: str) -> bool:
    """Whether a file can be nothing but what launches a training."""
    from foretrain.launchers import SUFFIXES

    return target.endswith(SUFFIXES) and Path(target).is_file()


def target_and_launch_files(
    target: str | None, launch_files: list[str] | None
) -> tuple[str | None, list[str] | None]:
    """A launch file that is given as the target is one of ``--from``."""
    if target is not None and launch_files is None and is_launch_file(target):
        return None, [target]
    return target, launch_files


def one_job(target: str | None, launch_files: list[str] | None, options: Options) -> Job:
    """Read a job file, a model or launch files, with the options over it."""
    target, launch_files = target_and_launch_files(target, launch_files)
    if launch_files:
        return launch_from(launch_files, target, options).job
    if target is None:
        raise typer.BadParameter("give a job file, a model or --from")
    return job_from(target, options)


def launch_from(files: list[str], model: str | None, options: Options) -> Launch:
    """The job of launch files, with a model and options over it."""
    from foretrain.catalog import Catalog
    from foretrain.launchers import read_launch

    catalog = Catalog.load(options.get("catalog"))
    return read_launch(*files, model=model, catalog=catalog, **_of_job(options))


def overriding(options: Options) -> Edit:
    """Puts the options over the tables of a job; what is no table is left to be refused."""
    from foretrain.options import overriding

    return overriding(_of_job(options))


def _of_job(options: Options) -> Options:
    """The options that are fields of a job, with texts read where a field is more than one."""
    given = {name: value for name, value in options.items() if name not in ("catalog", "refresh")}
    if Path(given.get("host", "")).is_file():
        given["host"] = str(Path(given["host"]).resolve())
    if (mode := given.pop("compile_mode", None)) is not None:
        given["compile"] = mode
    if "image" in given:
        given["image"] = sides("training.image", given["image"])
    for setting in given.pop("set", []):
        _put(given, setting)
    for name in ("evaluate_every", "checkpoint_every"):
        if given.get(name, "").isdigit():
            given[name] = int(given[name])
    return given


def _put(given: Options, setting: str) -> None:
    """``plan.overlap.tensor=true`` among the options; what is set within a table leaves the rest of it."""
    from foretrain.options import Within, section_of

    path, equals, text = setting.partition("=")
    section, *names = (name.strip() for name in path.split("."))
    if not equals or not names:
        raise invalid("--set", setting, "of the form section.field=value, such as plan.reshard=false")
    field, *inner = names
    section_of(section, field)
    value: Any = setting_value(text) if field != "framework_version" else text
    if field in ("stages", "recompute_modules") and not isinstance(value, list):
        value = [setting_value(one) for one in text.split(",")]
    for name in reversed(inner):
        value = Within({name: value})
    before = given.get(field)
    given[field] = before.merged(value) if isinstance(before, Within) and inner else value


def setting_value(text: str) -> Any:
    """JSON, or a text."""
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False}.get(text, text)
