"""Makes the graph of a job's step as its framework runs it: captured, with its attention, fused where a
compiler fuses."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

from foretrain.capture import capture_job, capture_rank
from foretrain.errors import ForetrainError
from foretrain.graph import OpGraph
from foretrain.graph.attention import with_flash_attention, with_fused_softmax
from foretrain.graph.fusion import Fusion, fuse
from foretrain.graph.merging import with_fused_accumulation, with_joined_projections
from foretrain.graph.repeats import without_repeats
from foretrain.graph.transformer_engine import (
    with_four_bits,
    with_gathers_in_fp8,
    with_kept_casts,
    without_transposed_copies,
)
from foretrain.job import Job
from foretrain.step.frameworks import as_framework_runs_it, profile
from foretrain.workload import TORCHAO, Training

_TAKES_OPERANDS_AS_THEY_LIE = 10.0
"""Compute capability from which on cuBLAS multiplies matrices in fp8 that lie either way (in Transformer
Engine ``is_non_tn_fp8_gemm_supported``)."""


def step_graph(job: Job) -> OpGraph:
    """Make the graph of one micro-batch of a rank, and the optimizer: every layer on one device, the distinct
    layers on several."""
    habits, run, several = profile(job), as_framework_runs_it(job), not job.runs_alone
    graph = (capture_rank if several else capture_job)(run)
    if habits.flash_attention:
        graph = with_flash_attention(graph, causal=job.workload.model.task == "causal-lm")
    elif habits.fuses_softmax:
        graph = with_fused_softmax(graph)
    if run.workload.training.precision == "fp8":
        least = min(float(group.device.capability or 0) for group in job.cluster.groups)
        as_they_lie = least >= _TAKES_OPERANDS_AS_THEY_LIE
        graph = _in_fp8(graph, run.workload.training, as_they_lie=as_they_lie)
    if habits.joins_projections:
        graph = with_joined_projections(graph)
    if habits.fuses_accumulation:
        graph = with_fused_accumulation(graph)
    return graph if habits.fusion == Fusion() else _fused(graph, habits.fusion, several)


def as_compiled(job: Job) -> Job:
    """The job with its module's own word on ``torch.compile``: a user's function may compile what it
    returns."""
    training = job.workload.training
    if training.compile or job.workload.model.source != "python":
        return job
    if not (capture_job if job.runs_alone else capture_rank)(as_framework_runs_it(job)).info.get("compile"):
        return job
    training = dataclasses.replace(training, compile=True)
    return dataclasses.replace(job, workload=dataclasses.replace(job.workload, training=training))


def possible_step_graph(job: Job) -> OpGraph | None:
    """The graph of the step; None where it cannot be made: without torch, of a model that is not at hand."""
    with contextlib.suppress(ForetrainError):
        return step_graph(job)
    return None


@functools.lru_cache(maxsize=256)
def _in_fp8(graph: OpGraph, training: Training, *, as_they_lie: bool) -> OpGraph:
    """Compilers compute a value once; layers of Transformer Engine that share an input are one there, which
    casts it once, keep their weights' casts for all micro-batches of a step, and gather in fp8."""
    fused = training.fp8_recipe not in TORCHAO
    if fused or training.compile:
        graph = without_repeats(graph)
    if as_they_lie and training.fp8_recipe in ("delayed", "current"):
        graph = without_transposed_copies(graph)
    if fused and graph.accumulates:
        graph = with_kept_casts(graph)
    if fused:
        graph = with_gathers_in_fp8(graph)
    return with_four_bits(graph) if training.fp8 == "nvfp4" else graph


@functools.lru_cache(maxsize=256)
def _fused(graph: OpGraph, fusion: Fusion, by_layer: bool) -> OpGraph:
    """Fuse the graph; where every layer is there, runs may go from one to the next."""
    if by_layer:
        return fuse(graph, fusion)
    return dataclasses.replace(fuse(dataclasses.replace(graph, stack=None), fusion), stack=graph.stack)
