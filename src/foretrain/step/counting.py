"""Counts the parameters and the FLOPs of a job's step by the graph of one of its ranks."""

from __future__ import annotations

import functools

import numpy as np

from foretrain.costs.roofline import arithmetic
from foretrain.graph import Operator, OpGraph
from foretrain.graph.opset import traits
from foretrain.job import Job
from foretrain.model_flops import ModelFlops
from foretrain.plan import Plan
from foretrain.step.frameworks import Profile, profile
from foretrain.step.partition import blocks
from foretrain.step.passes import run_again

COUNTS = "model_parameters"
"""In the info of a graph: parameters of the whole model, and those of them that are trained."""
TF32_SHARE = 0.1
"""Of a step's FLOPs in fp32, from which on those that cuDNN computes in TF32 set the peak."""


def model_flops(job: Job, graph: OpGraph) -> ModelFlops:
    """Count the FLOPs and parameters of the whole job, whose ranks each run such a graph."""
    plan, training = job.plan, job.workload.training
    again_by = Plan(recompute=plan.recompute, recompute_every=plan.recompute_every)
    rank, again, tf32 = _of_micro_batch(graph, again_by, profile(job))
    passes = job.accumulation * (plan.data or 1) * plan.tensor * plan.context
    parameters, trainable = _parameters(job, graph)
    peak_format = training.precision.removeprefix("amp-")
    if peak_format == "fp32" and tf32 >= TF32_SHARE:
        peak_format = "tf32"
    groups = job.cluster.groups
    is_cpu = any(group.device.is_cpu for group in groups)
    peak = sum(group.device.peak_flops(peak_format) * group.world_size for group in groups)
    batch, sequence = training.global_batch, training.sequence
    return ModelFlops(
        parameters=parameters,
        trainable=trainable,
        flops=rank * passes,
        recomputed=again * passes if training.mode == "train" else 0.0,
        samples=batch,
        tokens=batch * sequence if sequence else None,
        devices=job.cluster.world_size,
        peak_flops_per_s=None if is_cpu else peak,
        peak_format=groups[0].device.costed_as(peak_format),
    )


def _parameters(job: Job, graph: OpGraph) -> tuple[int, int | None]:
    """Count parameters, all and trained ones: as the graph has them; else by what a rank holds."""
    if COUNTS in graph.info:
        total, trainable = graph.info[COUNTS]
        return total, trainable
    if not any(weight.name for weight in graph.weights):
        return graph.parameters, None
    parts = {False: job.plan.tensor, True: job.plan.expert * job.expert_tensor}
    held = [(w.elements * parts[w.expert], w.trainable) for w in graph.weights]
    return sum(size for size, _ in held), sum(size for size, trained in held if trained)


@functools.lru_cache(maxsize=256)
def _of_micro_batch(graph: OpGraph, plan: Plan, habits: Profile) -> tuple[float, float, float]:
    """FLOPs of a rank's micro-batch, those that are computed again, and the share of them that runs in TF32
    where fp32 is asked for."""
    operators, which = graph.operators, graph.operator_index
    if not len(which):
        return 0.0, 0.0, 0.0
    flops = np.array([_model_share(operator) * operator.flops for operator in operators])[which]
    in_tf32 = np.array([arithmetic(operator, "fp32") == "tf32" for operator in operators])[which]
    once = flops * ~graph.recomputed
    total = again = tf32 = 0.0
    for block in blocks(graph):
        for calls in (block.piece.forward, block.piece.backward):
            total += float(once[calls].sum())
            tf32 += float((once * in_tf32)[calls].sum())
            again += float((flops - once)[calls].sum())
        again += float(flops[run_again(plan, habits, graph, block)].sum())
    return total, again, tf32 / (total or 1.0)


def _model_share(operator: Operator) -> float:
    """Give the share of an operator's FLOPs that are the model's: the backward pass of fused attention
    computes its scores again."""
    kind = traits(operator.name)
    if kind.kind != "attention" or not kind.backward or len(operator.inputs) < 4:
        return 1.0
    key, value = operator.inputs[1].shape[-1], operator.inputs[3].shape[-1]
    return (2 * key + 2 * value) / (3 * key + 2 * value)
