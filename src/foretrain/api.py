"""Makes a job and its forecast from a model by name, or a module in hand, and a few options."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrain.capture import cache_folder, capture
from foretrain.cluster import Catalog
from foretrain.errors import InputError
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.model_names import model_section

if TYPE_CHECKING:
    import torch

    from foretrain.graph import OpGraph

DEFAULT_DEVICE = "h100-sxm-80gb"
_USUAL_IN_NODE = 8
"""GPUs in a node, where the job does not say."""


def make_job(
    model: str,
    *,
    source: str | None = None,
    device: str | None = None,
    devices: int | None = None,
    cores_per_device: int | None = None,
    nodes: int | None = None,
    node: str | None = None,
    batch: int | None = None,
    image: int | None = None,
    sequence: int | None = None,
    classes: int | None = None,
    precision: str = "fp32",
    optimizer: str | None = None,
    mode: str = "train",
    samples: int | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    micro_batch: int | None = None,
    framework: str | None = None,
    compile: bool | None = None,
    channels_last: bool = False,
    catalog: Catalog | None = None,
    **plan: Any,
) -> Job:
    """A job from a model's name and options.

    ``devices`` counts all devices; ``nodes`` says over how many nodes they are spread.

    Without ``device`` and ``node`` it is one H100; a ``node`` alone is used whole. Further options are fields
    of the plan.

    The name is one of ``foretrain catalog models``, a torchvision or timm name, ``file.py:function``, an
    ``.onnx`` file or a captured graph (``.json.zst``).
    """
    section, defaults = model_section(model, source)
    given = {name: value for name, value in (("image", image), ("sequence", sequence), ("classes", classes),
             ("precision", None if precision == "fp32" else precision), ("optimizer", optimizer))
             if value is not None}  # fmt: skip
    own = _own_training(section, given, mode)
    training = {
        "global_batch": 32 if batch is None else batch, "mode": mode, "precision": precision,
        "image": defaults.get("image") if image is None else image,
        "sequence": defaults.get("sequence") if sequence is None else sequence, "classes": classes,
        "optimizer": optimizer or defaults.get("optimizer"),
        "samples": samples, "epochs": epochs, "steps": steps, "channels_last": channels_last,
        "framework": framework, "compile": compile,
    }  # fmt: skip
    if section["source"] == "graph":
        training.update(_training_of_graph(Path(model), training, batch))
    for name, value in own.items():
        if training.get(name) is None or (name == "global_batch" and batch is None) or name == "precision":
            training[name] = value
    if training.get("steps") is not None and training.get("epochs") is not None:
        training["epochs" if steps is not None else "steps"] = None
    spread = nodes_for(devices, node, device, catalog) if nodes is None else nodes
    if spread < 1:
        raise InputError(f"nodes: {spread} is not 1 or more")
    if devices is not None and devices % spread:
        raise InputError(f"devices: {devices} does not divide over nodes = {spread}")
    per_node = devices // spread if devices is not None else (1 if node is None else None)
    if (section["source"] == "graph" or "global_batch" in own) and batch is None:
        in_node = per_node or (catalog or Catalog.load()).node(str(node), "cluster.node").devices
        split = max(1, math.prod(plan.get(name) or 1 for name in ("tensor", "pipeline", "context")))
        training["global_batch"] *= max(1, spread * in_node // split)
    cluster = {
        "device": device or (DEFAULT_DEVICE if node is None else None), "devices_per_node": per_node,
        "nodes": spread, "node": node,
        "cores_per_device": cores_per_device,
    }  # fmt: skip
    return Job.read(
        {
            "model": section,
            "training": {name: value for name, value in training.items() if value is not None},
            "cluster": {name: value for name, value in cluster.items() if value is not None},
            "plan": {
                name: value
                for name, value in {"micro_batch": micro_batch, **plan}.items()
                if value is not None
            },
        },
        catalog=catalog,
    )


def nodes_for(devices: int | None, node: str | None, device: str | None, catalog: Catalog | None) -> int:
    """Nodes that so many devices fill: those of the named node, else of eight GPUs; a rest is refused."""
    known = catalog or Catalog.load()
    in_node = known.node(node, "cluster.node").devices if node is not None else _USUAL_IN_NODE
    on_cpu = device is not None and known.device(device, "cluster.device").is_cpu
    if devices is None or devices <= in_node or on_cpu:
        return 1
    if devices % in_node:
        even = next(n for n in range(devices // in_node + 1, devices + 1) if devices % n == 0)
        raise InputError(
            f"devices: {devices} does not fill nodes of {in_node}; give nodes, such as {even} "
            f"of {devices // even} each"
        )
    return devices // in_node


def predict(
    model: str | torch.nn.Module,
    inputs: tuple[Any, ...] | Mapping[str, Any] | torch.Tensor | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    *,
    predictor: str | Path | None = None,
    **options: Any,
) -> Forecast:
    """Forecast a model by name, or a module with its inputs (and loss); ``options`` are those of
    ``make_job``.

    ``predictor`` is a name, ``file.py:Class``, or the folder of a saved one (``file.py:Class@FOLDER``).
    """
    from foretrain import predictors
    from foretrain.predictors.evidence import with_evidence

    job = (
        make_job(model, **options) if isinstance(model, str) else _job_of_module(model, inputs, loss, options)
    )
    chosen = predictors.get(predictor or predictors.DEFAULT)
    forecast = chosen.predict(job)
    return with_evidence(forecast, chosen.knows(forecast))


def _job_of_module(module: torch.nn.Module, inputs: Any, loss: Any, options: Mapping[str, Any]) -> Job:
    """Capture the module, keep the graph in the cache, and make the job that refers to it."""
    if inputs is None:
        raise InputError("inputs: missing; a module is captured with example inputs")
    captured = {
        name: options[name]
        for name in ("mode", "precision", "optimizer", "channels_last")
        if options.get(name) is not None
    }
    graph = capture(module, inputs, loss, **captured)
    batch = options.get("batch") or graph.samples
    if batch % graph.samples:
        raise InputError(f"batch: {batch} is not a multiple of the {graph.samples} samples in the inputs")
    if batch > graph.samples and graph.info["mode"] == "train":
        graph = capture(module, inputs, loss, **captured, accumulate=True)
    graph = _with_tokens(graph, inputs, options)
    path = _kept(graph)
    rest = {key: value for key, value in options.items() if key not in captured}
    return make_job(str(path), **{**rest, "batch": batch, "micro_batch": graph.samples})


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


def _with_tokens(graph: OpGraph, inputs: Any, options: Mapping[str, Any]) -> OpGraph:
    """The graph with the tokens of the sequence length that is given, which the inputs must have."""
    from foretrain.capture.sources.inputs import check_inputs

    sequence, image = options.get("sequence"), options.get("image")
    sides = (3, image, image) if isinstance(image, int) else image
    check_inputs("the module", inputs, graph.samples, sequence=sequence, image=sides)
    return graph if sequence is None else dataclasses.replace(graph, tokens=graph.samples * sequence)


def _own_training(section: Mapping[str, Any], given: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """What a user's program decides of its training."""
    if section["source"] != "python" or mode != "train":
        return {}
    from foretrain.capture.programs.settings import own_training
    from foretrain.job import Model

    return own_training(Model(**section), Path(), given)


def _training_of_graph(path: Path, training: dict[str, Any], batch: int | None) -> dict[str, Any]:
    """What the graph was captured with; an option that contradicts it is an error."""
    from foretrain.graph import OpGraph
    from foretrain.graph.ir import checked

    graph = checked(OpGraph.load(path), path)
    held = {name: graph.info[name] for name in ("mode", "precision", "optimizer") if name in graph.info}
    if graph.info.get("compile") and training["compile"] is None:
        held["compile"] = True
    for name, default in (("mode", "train"), ("precision", "fp32"), ("optimizer", None)):
        if name in held and training[name] not in (default, held[name]):
            raise InputError(
                f"training.{name}: the graph {path.name} was captured "
                f"with {held[name]!r}, not {training[name]!r}"
            )
    return held if batch is not None else {**held, "global_batch": graph.samples}
