"""Traces one rank of a job: its share under tensor, context and expert parallelism, by distinct layers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from foretrain.capture.parallel.context import ContextParallel
from foretrain.capture.parallel.experts import route_in_low_precision, route_tokens, split_experts
from foretrain.capture.parallel.latent import fuse_rotations
from foretrain.capture.parallel.permutation import LIBRARY_CODE
from foretrain.capture.parallel.stacks import CallOrder, find_stack, truncate
from foretrain.capture.parallel.tensor import TensorParallel
from foretrain.capture.parallel.tensor_plan import is_of_library
from foretrain.capture.programs.pretence import beside_a_gpu
from foretrain.capture.recomputing import OWN_SWITCH, recompute_layers
from foretrain.capture.sources.adapters import own_precision
from foretrain.capture.sources.loaded import WEIGHT_DTYPES, LoadedModel, parameter_counts
from foretrain.capture.sources.models import load_model
from foretrain.capture.sources.quantised import packed_away
from foretrain.capture.sources.transformers.configuration import check_positions
from foretrain.capture.tracing.constants import Constants
from foretrain.capture.tracing.failures import DEPENDS_ON_DATA
from foretrain.capture.tracing.guesses import same_draws
from foretrain.capture.tracing.recorder import DTYPES
from foretrain.capture.tracing.tracer import trace_step
from foretrain.capture.tracing.values import with_values_if_needed
from foretrain.errors import CaptureError, ForetrainError, InputError, UnsupportedJob
from foretrain.graph import OpGraph, Stack, Weight
from foretrain.job import Job
from foretrain.plan import Plan


def trace_rank(
    job: Job,
    batch: int | None = None,
    *,
    accumulate: bool,
    info: Mapping[str, Any],
    by_layers: bool = True,
    own_gradients: bool = True,
    recomputes: bool = False,
) -> OpGraph:
    """Trace one rank of a job, at another micro-batch with ``batch``.

    ``by_layers`` off traces every layer of a deep model; with ``own_gradients``, adding to a gradient belongs
    to the layer of its parameter; with ``recomputes``, what the plan recomputes runs again.
    """
    trace = functools.partial(
        _trace, job, batch or job.micro_batch, accumulate, info, own_gradients, recomputes=recomputes
    )
    if job.workload.model.source != "python":
        return _by_layers(trace, by_layers)
    with beside_a_gpu():
        return _trace_users(job, trace, by_layers)


def _trace_users(job: Job, trace: Callable[..., OpGraph], by_layers: bool) -> OpGraph:
    """A model that a user has written: cut for layers of whole sizes where it is written so."""
    if job.plan.tensor == 1:
        return _by_layers(trace, by_layers)
    try:
        return _by_layers(functools.partial(trace, keeps_sizes=True), by_layers)
    except UnsupportedJob as error:
        with contextlib.suppress(ForetrainError):
            return _by_layers(trace, by_layers)
        raise error


def _by_layers(trace: Callable[..., OpGraph], by_layers: bool) -> OpGraph:
    if by_layers:
        with contextlib.suppress(_NotByLayers):
            return trace(by_layers=True)
    return with_values_if_needed(lambda values: trace(by_layers=False, with_values=values))


class _NotByLayers(Exception):
    """The model does not run its blocks one after the other, so that it cannot be traced by a few of them, or
    its way depends on data."""


def _trace(
    job: Job,
    batch: int,
    accumulate: bool,
    info: Mapping[str, Any],
    own_gradients: bool,
    *,
    by_layers: bool,
    recomputes: bool = False,
    keeps_sizes: bool = False,
    with_values: bool = False,
) -> OpGraph:
    training, plan = job.workload.training, job.plan
    _check_adapter(job)
    _check_predicted(job)
    with same_draws():
        loaded = _load(job, batch)
    module = loaded.module
    info = {**info, "model_parameters": parameter_counts(module)}
    _run_as_the_framework(module, job)
    split = split_experts(module, job)
    tensor = TensorParallel.of(
        job,
        module,
        whole_experts=split is not None,
        keeps_sizes=keeps_sizes and not is_of_library(module),
    )
    weights = tuple(_weights(module, split or frozenset(), training.precision))
    parameters = sum(weight.elements for weight in weights) + packed_away(module)
    stack = find_stack(module)
    if stack is not None and by_layers:
        truncate(module, stack)
    elif stack is not None:
        stack = Stack(stack.path, stack.layers, stack.layers, tuple(range(stack.layers)))
    switched = recompute_layers(module, plan) if recomputes else None
    order = CallOrder(module.get_submodule(stack.path)) if stack is not None else None
    context = ContextParallel(plan.context, plan.exchange_of_context(training.framework))
    context.exchange_states(module)
    tensor.bound_sequence()
    try:
        graph = trace_step(
            module,
            loaded.inputs,
            loaded.loss,
            samples=batch,
            tokens=loaded.tokens,
            mode=training.mode,
            precision=training.precision,
            optimizer=training.optimizer,
            master_weights=training.master_weights,
            scales_loss=training.scales_loss,
            channels_last=training.channels_last,
            accumulate=accumulate,
            info=info,
            around=_both(module, tensor, context, training.mode),
            own_gradients=own_gradients,
            constants=_values(loaded, with_values),
        )
    except CaptureError as error:
        if by_layers and (stack is not None or DEPENDS_ON_DATA in str(error)):
            raise _NotByLayers from error
        raise tensor.explain(error) from error
    if order is not None and not order.is_plain():
        if by_layers:
            raise _NotByLayers
        stack = None
    context.check(job.workload.model.label)
    info = {
        **graph.info,
        **({"assumptions": notes} if (notes := _assumptions(plan, graph, loaded, tensor, switched)) else {}),
        **({"compile": True} if loaded.compiled else {}),
        **({"windows": windows} if (windows := _windows(module, training.sequence)) else {}),
    }
    return dataclasses.replace(graph, weights=weights, stack=stack, parameters=parameters, info=info)


def _run_as_the_framework(module: torch.nn.Module, job: Job) -> None:
    """Have experts and rotations of a module run as the job's framework runs them."""
    training, plan = job.workload.training, job.plan
    if training.framework != "pytorch" or plan.expert > 1 or plan.tensor > 1:
        route_tokens(module)
    if training.framework not in LIBRARY_CODE:
        route_in_low_precision(module)
    if training.framework == "megatron" and job.trains:
        fuse_rotations(module)


def _check_adapter(job: Job) -> None:
    """Blocks of 4-bit weights belong together: nobody cuts them by rows or columns."""
    adapter, tensor = job.workload.training.adapter, job.plan.tensor
    if adapter is not None and adapter.quantises and tensor > 1:
        what = f"plan.tensor: {tensor} cuts layers, and weights in 4 bits are not cut"
        raise UnsupportedJob(f'{what}; give training.adapter.kind = "lora", or plan.shard = "zero3" instead')


def _check_predicted(job: Job) -> None:
    """Which of the masked tokens of a sample a rank has of its sequence depends on the data."""
    predicted, context = job.workload.training.predicted_tokens, job.plan.context
    if predicted is not None and context > 1:
        raise UnsupportedJob(
            f"plan.context: {context} cuts sequences, of which {predicted} tokens are answered for"
        )


def _values(loaded: LoadedModel, everything: bool) -> Constants:
    constants = loaded.constants or Constants()
    constants.everything = everything
    return constants


@contextlib.contextmanager
def _both(
    module: torch.nn.Module, tensor: TensorParallel, context: ContextParallel, mode: str
) -> Iterator[None]:
    with tensor.sizes(), tensor.losses(needed=mode == "train"), context.attention(module):
        yield


def _assumptions(
    plan: Plan, graph: OpGraph, loaded: LoadedModel, tensor: TensorParallel, switched: str | None
) -> list[str]:
    of_loss = getattr(loaded.loss, "notes", ())
    notes = [*dict.fromkeys(loaded.notes), *of_loss, *graph.info.get("assumptions", ()), *tensor.notes]
    if switched not in (None, OWN_SWITCH):
        notes.append(f"plan.recompute: {switched}")
    if plan.expert_capacity is not None:
        notes.append(
            f"every expert gets {plan.expert_capacity:g} times its even share of rows, padded to that"
        )
    elif plan.expert > 1:
        notes.append(_of_routing(plan))
    if plan.context > 1:
        notes.append("causal attention is balanced over the context ranks")
    return notes


def _windows(module: torch.nn.Module, sequence: int | None) -> dict[str, int]:
    """Keys that a query sees at most, by the attention that has such a window, where sequences are longer."""
    found = ((path, getattr(child, "sliding_window", None)) for path, child in module.named_modules())
    return {path: window for path, window in found if type(window) is int and 0 < window < (sequence or 0)}


def _of_routing(plan: Plan) -> str:
    if plan.expert_imbalance is not None:
        return f"the fullest expert rank gets {plan.expert_imbalance:g} times as many rows as it sends"
    return (
        "every expert rank gets as many rows as it sends, as benchmarks force it; under an auxiliary loss "
        "the fullest of 64 experts had 1.5 to 1.7 times the mean (arXiv 2408.15664): plan.expert_imbalance"
    )


def _load(job: Job, batch: int) -> LoadedModel:
    """The whole model, with the inputs of the rank: its part of every sequence under context parallelism."""
    training, context = job.workload.training, job.plan.context
    if context == 1:
        return load_model(job.workload, batch)
    if training.sequence is None:
        raise InputError(f"plan.context: {context} splits sequences, but the job has no training.sequence")
    if training.sequence % context:
        raise InputError(
            f"plan.context: {context} does not divide the {training.sequence} tokens of training.sequence"
        )
    local = training.sequence // context
    workload = job.workload
    if workload.model.source != "python":  # a user's function makes whole sequences
        workload = dataclasses.replace(workload, training=dataclasses.replace(training, sequence=local))
    loaded = load_model(workload, batch)
    check_positions(loaded.module, training.sequence)
    inputs = _cut_sequences(loaded.inputs, training.sequence, local)
    return dataclasses.replace(loaded, inputs=inputs, tokens=batch * local)


def _cut_sequences(inputs: Any, whole: int, local: int) -> Any:
    """A model's own inputs, which know nothing of the plan: those that hold whole sequences are cut."""

    def part(value: Any) -> Any:
        is_sequence = isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == whole
        return value[:, :local].contiguous() if is_sequence else value

    return tree_map(part, inputs)


def _weights(module: torch.nn.Module, split: frozenset[int], precision: str) -> Iterator[Weight]:
    dtype, apart = WEIGHT_DTYPES.get(precision), own_precision(module)
    for name, parameter in module.named_parameters():
        cast = dtype is not None and parameter.is_floating_point() and id(parameter) not in apart
        kept = dtype if dtype is not None and cast else parameter.dtype
        yield Weight(name, parameter.numel(), DTYPES[kept], parameter.requires_grad, id(parameter) in split)
