"""Steps laid out by hand, for tests of the engine and of reports: calls with given times, and no model
captured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foretrain.costs.collectives import Collectives
from foretrain.graph import Buffer, Op, Operator, OpGraph, Phase, TensorSpec
from foretrain.job import Job
from foretrain.step.calls import Calls
from foretrain.step.frameworks import Profile
from foretrain.step.layout import Layout
from foretrain.step.partition import stages
from foretrain.step.play import Step, play
from foretrain.step.teams import Teams


def operator(name: str) -> Operator:
    return Operator(name, "default", (TensorSpec((2, 2), "float32"),), (), {}, 16, 8, 8, True)


def step(
    phases: Sequence[Phase],
    host_s: Sequence[float],
    device_s: Sequence[float],
    *,
    names: Sequence[str] | None = None,
    accumulation: int = 1,
    overhead_s: float = 0.0,
    gap_s: float = 0.0,
    buffers: tuple[Buffer, ...] = (),
    layers: Sequence[str] | None = None,
) -> Step:
    """One step on one device: calls of these phases, in their order."""
    names, layers = names or ["mm"] * len(phases), layers or [""] * len(phases)
    ops = tuple(
        Op(operator(name), phase, layer, (), ())
        for name, phase, layer in zip(names, phases, layers, strict=True)
    )
    graph = OpGraph(ops=ops, buffers=buffers, samples=1)
    job = Job.read({
        "model": {"source": "timm", "name": "made-up"},
        "training": {"global_batch": accumulation},
        "cluster": {"device": "h100"},
        "plan": {"micro_batch": 1},
    })  # fmt: skip
    none = np.zeros(len(ops), dtype=np.bool_)
    calls = Calls(
        host_s=np.array(host_s, dtype=np.float64),
        device_s=np.array(device_s, dtype=np.float64),
        kernels=np.ones(len(ops)),
        gap_s=gap_s,
        communicates=none,
        multiplies=none,
        attends=none,
        outside=none,
        waits=np.array([name == "_local_scalar_dense" for name in names], dtype=np.bool_),
    )
    layout = Layout(
        job=job,
        graph=graph,
        profile=Profile(),
        stages=stages(job, graph, Profile()),
        teams=Teams.of(job),
        calls=calls,
        network=Collectives(job.cluster),
        step_overhead_s=overhead_s,
    )
    return play(layout)
