"""Makes a job and its forecast from whatever describes a training: a module in hand, a name, a job."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrain.capture import cache_folder, capture
from foretrain.capture.keys import accumulates
from foretrain.checkpoints import is_checkpoint
from foretrain.cluster import Catalog, Cluster
from foretrain.errors import CaptureError, InputError, UnsupportedJob
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.launchers import SUFFIXES, Launch, read_launch
from foretrain.model_names import check_file, model_section
from foretrain.options import DEFAULT_DEVICE, check_names, lists_options, overridden, overriding, plain
from foretrain.run import Run
from foretrain.schema import convert, read
from foretrain.workload import Model, Training

if TYPE_CHECKING:
    import torch

    from foretrain.capture.sources.in_hand import Example
    from foretrain.graph import OpGraph
    from foretrain.predictors.base import Predictor

_USUAL_BATCH = 32
_JOB_FILES = (".toml", ".json")
_IMAGE_SOURCES = ("timm", "torchvision")


@lists_options
def predict(
    model: str | os.PathLike[str] | Job | Run | Launch | Mapping[str, Any] | torch.nn.Module,
    inputs: Any = None,
    loss: Callable[..., Any] | None = None,
    *,
    targets: Any = None,
    predictor: str | Path | Predictor | None = None,
    catalog: Catalog | str | Path | None = None,
    **options: Any,
) -> Forecast:
    """Forecast a training.

    ``model`` is a ``torch.nn.Module``, with ``inputs`` of one (micro-)batch; the name of a model; a Job, a
    Run, the tables of a job as a dict, or the path of a job file or of a shell script or YAML that launches
    it (others with ``read_launch``). A name is one of ``foretrain catalog
    models``, a torchvision or timm name, ``file.py:function``, an ``.onnx`` file or a captured graph.

    ``options`` are the fields of a job by name (``device``, ``precision``, ``shard``, ...), with ``batch``
    for the samples per optimizer step over all devices and ``devices`` for all of these. Where a job is
    given, they go over its fields.

    The loss of a module takes its output, or, with ``targets``, its output and these. Inputs and targets with
    another number of samples than a device takes at once are resized. ``predictor`` is a predictor, its name,
    ``file.py:Class``, or the folder of a saved one (``file.py:Class@FOLDER``).

    >>> import torch
    >>> module, inputs = torch.nn.Linear(64, 10), torch.zeros(8, 64)
    >>> forecast = predict(module, inputs, device="a100", devices=4, batch=64, optimizer=torch.optim.AdamW)
    >>> forecast.job.micro_batch, forecast.job.workload.training.optimizer, forecast.fits
    (16, 'adamw', True)
    >>> predict(forecast.job, device="h100").job.cluster.device.name
    'h100-sxm-80gb'
    """
    from foretrain import predictors
    from foretrain.predictors.answering import answer
    from foretrain.predictors.base import Predictor

    check_names(options, beside=("inputs", "loss", "targets", "predictor", "catalog"))
    _check_kind("catalog", catalog, (Catalog, str, Path), "a catalogue, or the path of one")
    _check_kind("predictor", predictor, (Predictor, str, Path), "a predictor, its name, or the path of one")
    known = (
        catalog if isinstance(catalog, Catalog) else Catalog.load(None if catalog is None else Path(catalog))
    )
    if _is_module(model):
        job = _job_of_module(model, inputs, loss, targets, options, known)
    else:
        for name, value in (("inputs", inputs), ("loss", loss), ("targets", targets)):
            if value is not None:
                raise InputError(f"{name}: only a module in hand takes them, not {_kind(model)}")
        job = job_of(model, options, known)
    chosen = (
        predictors.get(predictor or predictors.DEFAULT)
        if predictor is None or isinstance(predictor, str | Path)
        else predictor
    )
    forecast = answer(chosen, job)
    return forecast if _is_module(model) else _saying_what_is_left_out(forecast, options.get("optimizer"))


def _saying_what_is_left_out(forecast: Forecast, optimizer: Any) -> Forecast:
    """A model by name is trained with what its optimizer's name stands for, however one in hand is set."""
    if optimizer is None or isinstance(optimizer, str):
        return forecast
    from foretrain.capture.sources.in_hand import settings_of

    said = settings_of(optimizer)[1]
    note = f"training.optimizer: as the name stands for, and not {said}"
    return dataclasses.replace(forecast, assumptions=(*forecast.assumptions, note)) if said else forecast


def job_of(target: Any, options: Mapping[str, Any] | None = None, catalog: Catalog | None = None) -> Job:
    """The job that is meant: a job, a run, tables or a file, each with the options over it, or a model's name
    with the options around it."""
    given = plain(options or {})
    catalog = catalog or Catalog.load()
    if isinstance(target, Run | Launch):
        target = target.job
    if isinstance(target, Job):
        if not given:
            return target
        return Job.read(
            overridden(target.to_dict(), given, catalog), catalog=catalog, base=target.workload.base
        )
    if isinstance(target, Mapping):
        return Job.read(overriding(given, catalog)(target.get("job", target)), catalog=catalog)
    if not isinstance(target, str | os.PathLike):
        raise InputError(f"model: {_kind(target)} is not a module, a job, a path or a model's name")
    path = Path(target)
    if path.suffix in SUFFIXES:
        return read_launch(path, catalog=catalog, **given).job
    if path.name.endswith((".jsonl", ".jsonl.zst")):
        raise InputError(f"{path}: a file of many jobs, and one is forecast here")
    if path.suffix in _JOB_FILES and not is_checkpoint(path):
        return Job.load(path, catalog=catalog, edit=overriding(given, catalog))
    check_file(os.fspath(target))
    return make_job(os.fspath(target), catalog=catalog, **given)


def _check_kind(name: str, value: object, kinds: tuple[type, ...], allowed: str) -> None:
    if value is not None and not isinstance(value, kinds):
        raise InputError(f"{name}: {_kind(value)} is not {allowed}")


def _kind(target: object) -> str:
    """Describe a thing in words, with what would do where that is near."""
    if inspect.isclass(target):
        return f"the class {target.__name__} (an instance of it would do)"
    if callable(target):
        return f"the function {getattr(target, '__name__', target)} (in a file, file.py:function would do)"
    name = type(target).__name__
    return "a model's name" if isinstance(target, str) else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


@lists_options
def make_job(model: str, *, source: str | None = None, catalog: Catalog | None = None, **options: Any) -> Job:
    """A job from a model's name and options, which are the fields of a job by name.

    ``batch`` counts the samples of an optimizer step (32), ``devices`` all devices; ``nodes`` says over how
    many nodes they are spread. Without ``device`` and ``node`` it is one H100; a ``node`` alone is used
    whole.

    >>> make_job("resnet50", node="dgx-a100", batch=256).cluster.world_size
    8
    """
    check_names(options, beside=("source", "catalog"))
    given, catalog = plain(options), catalog or Catalog.load()
    section, defaults = model_section(model, source)
    own = _own_training(section, given)
    tables = _tables(section, {"global_batch": _USUAL_BATCH, **defaults, **own}, given, catalog)
    if section["source"] == "graph":
        own = _follow_graph(Path(model), tables, given)
    if "global_batch" in own and not {"batch", "global_batch"} & set(given):
        tables["training"]["global_batch"] = own["global_batch"] * _data_ranks(tables, catalog)
    return _with_defaults(Job.read(tables, catalog=catalog), {*given, *own}, defaults)


def _with_defaults(job: Job, given: Set[str], defaults: Mapping[str, Any]) -> Job:
    """The job with what was taken because no option gave it."""
    training, source = job.workload.training, job.workload.model.source
    taken = []
    if not {"batch", "global_batch"} & given and source != "graph":
        taken.append(f"batch {training.global_batch}")
    for name in ("image", "sequence") if training.mode == "infer" else ("image", "sequence", "optimizer"):
        if name in defaults and name not in given:
            taken.append(f"{name} {getattr(training, name)}")
    if source in _IMAGE_SOURCES and training.image is None:
        taken.append("images of the model's own size")
    if not {"device", "node", "groups"} & given:
        taken.append(f"device {job.cluster.groups[0].device.name}")
    return dataclasses.replace(job, assumed=(*taken, *job.assumed))


def _own_training(section: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Read what a user's program decides of its training; its batch is that of one device."""
    if section["source"] != "python" or options.get("mode", "train") != "train":
        return {}
    from foretrain.capture.programs.settings import own_training
    from foretrain.capture.programs.targets import split_name

    if not Path(split_name(section["name"])[0]).is_file():
        return {}  # it starts elsewhere, or is missing: the job tells when it is read from there
    sizes = {name: options[name] for name in ("image", "sequence", "classes") if name in options}
    asked = read(Training, {"global_batch": _USUAL_BATCH, **sizes}, "training")
    args = {"args": options["args"]} if "args" in options else {}
    model = read(Model, {**section, **args}, "model")
    return own_training(model, Path(), {name: getattr(asked, name) for name in sizes})


def _tables(
    model: Mapping[str, Any], training: Mapping[str, Any], options: Mapping[str, Any], catalog: Catalog
) -> dict[str, Any]:
    """The tables of a job that has nothing but a model yet, on one H100 where nothing else is said."""
    tables = overridden({"model": model, "training": training, "plan": {}}, options, catalog)
    cluster = tables.setdefault("cluster", {})
    if not {"device", "node", "groups"} & set(cluster):
        cluster["device"] = DEFAULT_DEVICE
    return tables


def _data_ranks(tables: Mapping[str, Any], catalog: Catalog) -> int:
    """Ranks that have a part of the batch each."""
    degrees: dict[str, int] = {
        name: convert(degree, int, f"plan.{name}")
        for name, degree in tables["plan"].items()
        if name in ("data", "tensor", "pipeline", "context")
    }
    data = degrees.pop("data", 0)
    split = math.prod(degrees.values())
    return data or max(1, Cluster.read(tables["cluster"], catalog).world_size // max(1, split))


def _follow_graph(path: Path, tables: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Put what a graph was captured with into the job; an option that contradicts it is an error."""
    from foretrain.graph import OpGraph
    from foretrain.graph.storage import checked

    graph, training = checked(OpGraph.load(path), path), tables["training"]
    follows = ("mode", "precision", "fp8", "optimizer")
    held = {name: graph.info[name] for name in follows if name in graph.info}
    for name, value in held.items():
        if options.get(name, value) != value:
            raise InputError(
                f"training.{name}: the graph {path.name} was captured with {value!r}, not {options[name]!r}"
            )
    training |= held
    if graph.info.get("compile"):
        training.setdefault("compile", True)
    return {"global_batch": graph.samples}


# A module in hand


def _is_module(value: object) -> bool:
    """Whether it is one of torch's, which is not imported for it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


_CUT = ("tensor", "context", "expert")


def _job_of_module(
    module: Any, inputs: Any, loss: Any, targets: Any, options: Mapping[str, Any], catalog: Catalog
) -> Job:
    """Capture the module at the job's micro-batch, keep the graph, and make the job that refers to it."""
    from foretrain.capture.sources import in_hand

    given = plain(options)
    if "source" in given:
        raise InputError(f"source: {given['source']!r} is for a model's name, not for a module in hand")
    module = in_hand.unwrapped(module)
    example = None if inputs is None else in_hand.Example.of(module, inputs)
    sequence = None if example is None else example.sequence
    given = {"precision": in_hand.precision_of(module), "sequence": sequence, **given}
    given = plain({"title": in_hand.title_of(module), **given})
    model = {"source": "graph", "name": "module"}
    tables = _tables(model, {"global_batch": _USUAL_BATCH}, given, catalog)
    if "batch" not in given and "global_batch" not in given and example is not None:
        at_once = tables["plan"].get("micro_batch", example.samples or 1)
        tables["training"]["global_batch"] = at_once * _data_ranks(tables, catalog)
    job = Job.read(tables, catalog=catalog)
    for name in _CUT:
        if (degree := getattr(job.plan, name)) > 1:
            raise UnsupportedJob(
                f"plan.{name}: {degree} cuts layers, and a module in hand is captured whole; put what builds "
                "it into a function and give file.py:function"
            )
    example = example or in_hand.Example.made(job.workload.training, job.micro_batch)
    graph = _captured(module, example, loss, targets, options.get("optimizer"), job)
    tables["model"]["name"] = str(_kept(graph))
    if graph.info.get("compile"):
        tables["training"].setdefault("compile", True)
    return Job.read(tables, catalog=catalog)


def _captured(module: Any, example: Example, loss: Any, targets: Any, optimizer: Any, job: Job) -> OpGraph:
    """The graph of one micro-batch of the job."""
    from foretrain.capture.sources import in_hand
    from foretrain.capture.sources.inputs import check_inputs

    training, wanted, samples = job.workload.training, job.micro_batch, example.samples
    sequence, image = training.sequence, training.image_shape
    check_inputs("the module", example.inputs, samples or wanted, sequence=sequence, image=image)
    settings, said = in_hand.settings_of(optimizer)
    judged = in_hand.loss_of(loss, None if targets is None else example.like(targets, wanted))
    trace = functools.partial(
        capture, module, mode=training.mode, precision=training.precision, fp8=training.fp8_recipe,
        optimizer=training.optimizer, optimizer_settings=settings,
        updated=None if training.adapter else in_hand.updated_by(optimizer, module),
        master_weights=training.master_weights, grad_scaler=training.grad_scaler,
        channels_last=training.channels_last, adapter=training.adapter, accumulate=accumulates(job),
        tokens=wanted * (sequence or 0),
    )  # fmt: skip
    try:
        graph = trace(example.at(wanted), in_hand.loss_at(judged, example, wanted), samples=wanted)
    except CaptureError as error:
        if samples in (None, wanted):
            raise
        trace(example.inputs, in_hand.loss_of(loss, targets))  # what fails as it is, is told as it is
        raise in_hand.at_other_size(error, example, wanted) from error
    notes = [*graph.info.get("assumptions", ()), *([f"the optimizer as given: {said}"] if said else ())]
    return dataclasses.replace(graph, info={**graph.info, **({"assumptions": notes} if notes else {})})


def _kept(graph: OpGraph) -> Path:
    """The file that a graph is written to: in the cache, or where that cannot be written, a temporary one."""
    name = f"module-{graph.digest()[:32]}.json.zst"
    try:
        graph.save(cache_folder() / name)
    except InputError:
        graph.save(_folder_of_process() / name)
        return _folder_of_process() / name
    return cache_folder() / name


@functools.cache
def _folder_of_process() -> Path:
    """A folder that is gone when this process ends."""
    import atexit
    import tempfile

    folder = tempfile.TemporaryDirectory(prefix="foretrain-")
    atexit.register(folder.cleanup)
    return Path(folder.name)
