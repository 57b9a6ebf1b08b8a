"""Captures a job or a module as an OpGraph: from the cache, or traced with torch, which is imported only
then."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import io
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrain.adapter import Adapter
from foretrain.capture.cache import cache_folder, found_or_traced, read_graph
from foretrain.capture.keys import accumulates, earlier_behaviour, library_versions
from foretrain.capture.programs import settings as programs
from foretrain.dispatching import dispatcher
from foretrain.errors import CaptureError, InputError, UnsupportedJob, first_line, missing
from foretrain.graph import OpGraph, Weight
from foretrain.graph.storage import checked
from foretrain.job import Job
from foretrain.plan import Plan
from foretrain.progress import tell
from foretrain.workload import OWN_MODELS, Fp8, Training

if TYPE_CHECKING:
    import torch

    from foretrain.capture.tracing.constants import Constants

__all__ = ["cache_folder", "capture", "capture_job", "capture_rank", "needs_torch"]

_RANK_REVISION = 10
"""Raised when what ``capture_rank`` adds to a graph changes, so that older cached ones are made anew."""
_TENSOR_REVISION = 1
"""As that, of layers that torch's own styles cut."""


def capture(
    module: torch.nn.Module,
    inputs: tuple[Any, ...] | Mapping[str, Any] | torch.Tensor,
    loss: Callable[[Any], torch.Tensor] | None = None,
    *,
    mode: str = "train",
    precision: str = "fp32",
    fp8: Fp8 = "tensorwise",
    optimizer: str = "sgd",
    optimizer_settings: Mapping[str, Any] | None = None,
    updated: frozenset[str] | None = None,
    master_weights: bool = False,
    grad_scaler: bool | None = None,
    channels_last: bool = False,
    accumulate: bool = False,
    adapter: Adapter | None = None,
    samples: int | None = None,
    tokens: int = 0,
) -> OpGraph:
    """Trace one step of a module.

    It is copied to the meta device: neither its weights nor its state are touched.

    One that ``torch.compile`` was applied to is traced as it was before; ``info["compile"]`` says so.

    Without ``loss``, an output with a ``.loss`` uses it and logits get cross-entropy. ``samples`` defaults to
    the length of the first input. ``fp8`` says how layers are scaled and cast in that precision.
    ``optimizer_settings`` are keyword arguments in place of those that the optimizer's name stands for;
    ``updated`` names the parameters that it was given, where these are not all. The loss of amp-fp16 is
    scaled unless ``grad_scaler`` is false.
    """
    needs_torch("capture")
    import torch

    from foretrain.capture.programs.pretence import beside_a_gpu
    from foretrain.capture.sources.loaded import classifier_loss, parameter_counts
    from foretrain.capture.sources.models import with_own_layers
    from foretrain.capture.sources.wrapped import is_compiled, is_lazy, without_compile
    from foretrain.capture.tracing.constants import Constants
    from foretrain.capture.tracing.nested import tensors_in
    from foretrain.capture.tracing.tracer import trace_step
    from foretrain.capture.tracing.values import with_values_if_needed

    arguments = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    first = next(tensors_in(arguments), None)
    batch = samples or (first.shape[0] if first is not None and first.dim() else 1)
    compiled = is_compiled(module)
    if is_lazy(module):
        raise CaptureError(
            f"module {type(module).__name__}: its lazy layers have no shapes yet; call it once before"
        )
    module = getattr(module, "_orig_mod", module)

    def trace(with_values: bool) -> OpGraph:
        constants = Constants(everything=with_values)
        copied = without_compile(_on_meta(module, constants))
        constants.assumptions += with_own_layers(copied, precision, fp8, adapter)
        graph = trace_step(
            copied, arguments, loss or classifier_loss(arguments),
            samples=batch, tokens=tokens, mode=mode, precision=precision, optimizer=optimizer,
            optimizer_settings=optimizer_settings, updated=updated,
            master_weights=master_weights, scales_loss=grad_scaler, channels_last=channels_last,
            accumulate=accumulate, constants=constants,
            info={
                "model": type(module).__name__, "mode": mode, "precision": precision, "optimizer": optimizer,
                "versions": library_versions(), "model_parameters": parameter_counts(copied),
                **({"fp8": fp8} if precision == "fp8" else {}),
                **({} if adapter is None else {"adapter": adapter.words}),
                **({"compile": True} if compiled else {}),
            },
        )  # fmt: skip
        return dataclasses.replace(graph, parameters=parameter_counts(copied)[0])

    with beside_a_gpu():
        return with_values_if_needed(trace)


def _on_meta(module: torch.nn.Module, constants: Constants) -> torch.nn.Module:
    """A copy of the module whose tensors are on meta, made without copying the weights; ``constants`` knows
    what its buffers hold."""
    import copy

    import torch

    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        twin = tensor.detach().to("meta")
        memo[id(tensor)] = (
            torch.nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else twin
        )
    for known in module.state_dict(keep_vars=True).values() if constants.everything else module.buffers():
        constants.learn(memo[id(known)], known)
    for value in (value for child in module.modules() for value in vars(child).values()):
        if isinstance(value, torch.Tensor) and not value.is_leaf:  # an activation that the module kept
            memo[id(value)] = value.detach().to("meta")
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise CaptureError(
            f"module {type(module).__name__}: cannot be copied ({first_line(error)})"
        ) from error


def capture_job(job: Job, *, refresh: bool = False) -> OpGraph:
    """The graph of one rank's micro-batch with every layer whole, from memory, from disk, or traced
    now."""
    if job.workload.model.source == "graph":
        return _with_weights(_given_graph(job))
    plan = job.plan
    again = {"recompute": [plan.recompute, plan.recompute_every]} if _traces_recomputation(job) else {}
    whole = {
        "whole": _RANK_REVISION,
        "framework": job.workload.training.framework,
        **again,
        **_unread(job),
    }
    return found_or_traced(functools.partial(_trace, job), job, whole, refresh=refresh)


def _traces_recomputation(job: Job) -> bool:
    """Whether what the plan recomputes is traced: on one device, where torch's own checkpointing does it."""
    training = job.workload.training
    return (
        job.cluster.world_size == 1
        and training.mode == "train"
        and training.framework == "pytorch"
        and job.plan.recompute in ("full", "operators")
        and not programs.is_program(job.workload)
    )


def _alone(job: Job) -> Job:
    """The micro-batches of one rank as a job of their own, on one device."""
    group = dataclasses.replace(job.cluster.groups[0], devices_per_node=1, nodes=1)
    training = dataclasses.replace(job.workload.training, global_batch=job.micro_batch * job.accumulation)
    return Job(
        workload=dataclasses.replace(job.workload, training=training),
        cluster=dataclasses.replace(job.cluster, groups=(group,)),
        plan=Plan(
            micro_batch=job.micro_batch,
            recompute=job.plan.recompute,
            recompute_every=job.plan.recompute_every,
        ),
    )


def capture_rank(job: Job, *, refresh: bool = False) -> OpGraph:
    """The graph of one rank's micro-batch under the job's tensor, context and expert parallelism, by the
    model's distinct layers.

    Its collectives are operators named ``all_reduce``, ``all_gather``, ``reduce_scatter`` and ``all_to_all``,
    with the group ("tensor", "context" or "expert") as overload. ``weights`` holds what the rank has of every
    parameter of the whole model (pipeline stages and sharding over the data group are not applied). Where
    ``stack`` is set, forward and backward hold its traced layers only, and so does the optimizer's step.
    """
    plan, framework = job.plan, job.workload.training.framework
    if job.workload.model.source == "graph":
        if max(plan.tensor, plan.context, plan.expert) > 1:
            raise UnsupportedJob(
                "plan: a graph that is given as a file cannot be "
                "cut; plan.tensor, plan.context and plan.expert must be 1"
            )
        return _with_weights(_given_graph(job))
    split = {
        "ranks": _RANK_REVISION, "by_layers": True, "tensor": plan.tensor, "context": _context(job),
        "expert": [plan.expert, job.expert_tensor, plan.expert_imbalance, plan.expert_capacity],
        "dispatcher": [dispatcher(job), plan.routing],
        "sequence_parallel": plan.sequence_parallel and plan.tensor > 1, "tensor_plan": plan.tensor_plan,
        "framework": framework, **({} if job.trains or plan.tensor == 1 else {"logits": "whole"}),
        **({"layers": _TENSOR_REVISION} if plan.tensor > 1 and framework == "pytorch" else {}),
        **_unread(job),
    }  # fmt: skip
    return found_or_traced(functools.partial(_trace_rank, job), job, split, refresh=refresh)


def _context(job: Job) -> object:
    """How context parallelism cuts attention, as part of a graph's key; a ring's is that of gathering."""
    by = job.plan.exchange_of_context(job.workload.training.framework)
    return [job.plan.context, "heads" if by == "alltoall" else "keys"] if job.plan.context > 1 else 1


def _unread(job: Job) -> dict[str, bool]:
    """Whether the model's library makes its masks as for a compiler, as part of a graph's key; frameworks
    with models of their own have none."""
    training = job.workload.training
    compiles = training.compile and job.workload.model.source == "transformers"
    return {"unread_masks": True} if compiles and training.framework not in OWN_MODELS else {}


@functools.lru_cache(maxsize=32)
def _with_weights(graph: OpGraph) -> OpGraph:
    """A graph that was captured for one device knows its parameters by their number only."""
    if graph.weights or not graph.parameters:
        return graph
    held = sum(buffer.size_bytes for buffer in graph.buffers if buffer.category == "weights")
    dtype = "bfloat16" if held < 3 * graph.parameters else "float32"
    return dataclasses.replace(graph, weights=(Weight("", graph.parameters, dtype),))


def _given_graph(job: Job) -> OpGraph:
    path = Path(str(job.workload.model.name))
    path = path if path.is_absolute() else job.workload.base / path
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise InputError(f"model.name: {str(path)!r} cannot be read ({error.strerror})") from error
    graph, name = checked(read_graph(path, changed), path), job.workload.model.label
    if graph.accumulates != accumulates(job):
        held = "adds to gradients of earlier micro-batches" if graph.accumulates else "is a whole step"
        raise InputError(
            f"plan.micro_batch: the graph {name} {held}, "
            f"the job has {job.accumulation} micro-batches per step"
        )
    if graph.samples != job.micro_batch:
        ranks = (job.plan.data or 1) * job.accumulation
        spread = f" of {job.workload.training.global_batch} over {ranks}" if ranks > 1 else ""
        raise InputError(
            f"training.global_batch: the graph {name} holds {graph.samples} samples per micro-batch, "
            f"the job asks for {job.micro_batch}{spread}; give the batch of all devices, "
            f"here {graph.samples * ranks}"
        )
    training = job.workload.training
    wanted = {field: getattr(training, field) for field in ("mode", "precision", "optimizer")}
    for field, value in {**wanted, "fp8": training.fp8_recipe}.items():
        if field in graph.info and graph.info[field] != value:
            raise InputError(
                f"training.{field}: the graph {name} was captured "
                f"with {graph.info[field]!r}, the job asks for {value!r}"
            )
    if training.adapter is not None and not graph.info.get("adapter"):
        raise InputError(f"training.adapter: the graph {name} was captured without; capture it with adapters")
    _check_shapes(graph, training, name)
    return graph


def _check_shapes(graph: OpGraph, training: Training, name: str) -> None:
    """Refuse what a job says of its inputs where the graph's are others."""
    if graph.info.get("compile") and not training.compile:
        raise InputError(f"training.compile: false, but the graph {name} is of a compiled module")
    if training.sequence is not None and graph.tokens != graph.samples * training.sequence:
        held = f"{graph.tokens // graph.samples} tokens per sample" if graph.tokens else "no sequences"
        raise InputError(f"training.sequence: {training.sequence}, but the graph {name} holds {held}")
    image, classes = training.image_shape, training.classes
    shapes = {spec.shape for operator in graph.operators for spec in operator.inputs}
    if image is not None and not any(shape[-3:] == image for shape in shapes):
        raise InputError(f"training.image: {list(image)}, but the graph {name} holds no such images")
    if classes is not None and not any(classes in shape for shape in shapes):
        raise InputError(f"training.classes: {classes}, but no tensor of the graph {name} is as wide")


OLDEST_TORCH = (2, 6)
"""The oldest that tracing was tried with."""


def needs_torch(what: str) -> None:
    """Refuse, in one line, what needs torch where it is not installed or too old; else it comes next."""
    if importlib.util.find_spec("torch") is None:
        raise missing("torch", what)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
        version = importlib.metadata.version("torch")
        if tuple(map(int, version.split(".")[:2])) < OLDEST_TORCH:
            oldest = ".".join(map(str, OLDEST_TORCH))
            raise CaptureError(f"{what}: torch {version} is too old; it needs torch {oldest} or newer")
    if "torch" not in sys.modules:
        tell("importing torch")


def _needs_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise CaptureError(
            "model: this graph is not in the cache and torch "
            "is not installed; install foretrain[capture,zoo] or give a captured graph"
        )
    needs_torch("model")


def _trace(job: Job, batch: int) -> OpGraph:
    trace = functools.partial(_trace_rank, _alone(job), batch, by_layers=False, own_gradients=False)
    if not _traces_recomputation(job):
        return trace()
    try:
        graph = trace(recomputes=True)
    except CaptureError:  # a checkpoint may come to something else the second time
        graph = trace()
    if graph.recomputes:
        return graph
    note = "plan.recompute: no checkpoint of the model could be traced; its blocks are taken to run again"
    notes = [*graph.info.get("assumptions", ()), note]
    return dataclasses.replace(graph, info={**graph.info, "assumptions": notes})


def _trace_rank(job: Job, batch: int, **how: bool) -> OpGraph:
    _needs_torch()
    with _quiet():
        if programs.is_program(job.workload):
            return _trace_program(job, batch)
        from foretrain.capture.parallel.ranks import trace_rank
        from foretrain.capture.sources.earlier import as_before

        with as_before(earlier_behaviour(job)), _masks(job):
            return trace_rank(job, batch, accumulate=accumulates(job), info=_job_info(job), **how)


def _masks(job: Job) -> contextlib.AbstractContextManager[None]:
    if not _unread(job):
        return contextlib.nullcontext()
    from foretrain.capture.sources.transformers.masks import unread_masks

    return unread_masks()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What a model's code prints and warns of is not the forecast, and nobody answers what it asks."""
    before, sys.stdin = sys.stdin, io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.stdin = before


def _trace_program(job: Job, batch: int) -> OpGraph:
    """The step of a user's own program, which replicas run alike."""
    split = {name: degree for name in ("tensor", "pipeline", "context", "expert")
             if (degree := getattr(job.plan, name)) > 1}  # fmt: skip
    for name, degree in split.items():
        raise UnsupportedJob(
            f"plan.{name}: {degree}, but {job.workload.model.label} is a whole program, which cannot be cut; "
            "name a function that returns the model"
        )
    if accumulates(job):
        raise InputError(
            f"plan.micro_batch: {job.micro_batch}, but {job.workload.model.label} makes whole steps itself; "
            "leave it out"
        )
    if job.workload.training.adapter is not None:
        label = job.workload.model.label
        raise InputError(f"training.adapter: {label} is a whole program, which has its own; leave it out")
    graph = programs.trace(job.workload, batch)
    programs.check(graph, job.workload.training, job.workload.model.label)
    return dataclasses.replace(graph, info={**graph.info, **_job_info(job)})


def _job_info(job: Job) -> dict[str, Any]:
    model, training = job.workload.model, job.workload.training
    return {
        "model": model.label,
        "mode": training.mode,
        "precision": training.precision,
        "optimizer": training.optimizer,
        "versions": library_versions(model),
    }
