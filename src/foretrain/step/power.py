"""Keeps a rank within its board's power limit: matrix products run at the clock that it leaves them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from foretrain.cluster import Cluster, Device
from foretrain.costs.roofline import arithmetic
from foretrain.graph import OpGraph
from foretrain.step.layout import Layout
from foretrain.step.partition import Index, Stage
from foretrain.step.playback import Work, play_rank
from foretrain.step.spans import Column
from foretrain.step.tuning import Tuning

_TRAFFIC_POWER, _WAITING_POWER = 0.75, 0.35
"""Power as a share of the limit: of kernels that move data, and of waiting for the network, the host or other
stages."""
_USUAL_SHARE = 0.75
"""Of the peak rate that large products in bf16 reach at full clock (``data/ops_h200.parquet``), at which they
draw what ``under_load`` says."""


def within_power(layout: Layout, works: Sequence[Work]) -> Layout:
    """Slow matrix products down so far that the average power of the busiest rank keeps within its limit; of
    a pipeline over groups that differ, that of each group.

    At full clock, products draw more than the limit (``Device.under_load``), in proportion to the share of
    the peak rate that they reach; other kernels, communication and waiting draw less. One device alone keeps
    its clock, as the single-device runs of ``data/h200_steps.jsonl`` show, unless its limit was lowered.
    """
    if not layout.by_group:
        return _limited(layout, layout.stages, works)
    views = []
    for group, view in enumerate(layout.by_group):
        own = [stage for stage in layout.stages if stage.group == group]
        views.append(_limited(view, own, works))
    if all(one is other for one, other in zip(views, layout.by_group, strict=True)):
        return layout
    return dataclasses.replace(layout, by_group=tuple(views))


def _limited(layout: Layout, own: Sequence[Stage], works: Sequence[Work]) -> Layout:
    """The layout of a group that has these stages, of a pipeline whose stages do such work."""
    lowered = lowered_power(layout.site)
    limit = lowered * (
        1.0 if layout.job.runs_alone else min(group.device.under_load for group in layout.site.groups)
    )
    if limit >= 1.0:
        return layout
    stage = max(own, key=lambda one: works[one.index].passes.device_s)
    busiest, slowest = works[stage.index], max(works, key=lambda work: work.passes.device_s)
    count = layout.job.accumulation // stage.copies
    plan, whole = layout.job.plan, layout.graph.recomputes or not layout.job.trains
    again = 1.0 + (plan.recompute == "full" and not whole) / 3 / plan.recompute_every
    multiplies = layout.calls.multiplies[stage.calls]
    seconds = (layout.calls.device_s + layout.calls.gaps_s)[stage.calls]
    products = float(seconds[multiplies].sum()) * count * again
    if len(works) > 1:
        passes = busiest.passes
        computing = (passes.device_s - passes.communication_s) * count
        paced_s = max(slowest.passes.device_s, slowest.passes.host_s)
        time_s = paced_s * (count + (len(works) - 1) / len(stage.chunks))
    else:
        step = play_rank(busiest, count)
        computing, time_s = step.computing_s, step.time_s
    others = max(0.0, computing - products)
    waiting = max(0.0, time_s - products - others)
    draw = _share_of_peak(layout, stage.calls[multiplies], products / (count * again)) / _USUAL_SHARE / limit
    energy = products * draw + (_TRAFFIC_POWER * others + _WAITING_POWER * waiting) / lowered
    if energy <= time_s or not products:
        return layout
    slower = 1.0 + (energy - time_s) / products
    return dataclasses.replace(layout, calls=layout.calls.tuned(Tuning(products=slower, attention=slower)))


def lowered_power(site: Cluster) -> float:
    """The limit of power that the cluster sets, as a share of the data sheet's."""
    given, boards = site.power_limit, [group.device.tdp_w for group in site.groups]
    if given is None:
        return 1.0
    return min((min(1.0, given / board) for board in boards if board), default=1.0)


def _share_of_peak(layout: Layout, calls: Index, seconds: float) -> float:
    """Give the share of the device's peak rates that products use in their time."""
    device, precision = layout.site.groups[0].device, layout.job.workload.training.precision
    at_peak = at_peak_s(layout.graph, device, precision)[calls]
    return min(1.0, float(at_peak.sum()) / seconds) if seconds else 0.0


@functools.lru_cache(maxsize=256)
def at_peak_s(graph: OpGraph, device: Device, precision: str) -> Column:
    """Time the arithmetic of each op at the device's peak rate for its numbers."""
    rates = np.array([device.peak_flops(arithmetic(operator, precision)) for operator in graph.operators])
    seconds: Column = graph.column("flops") / rates[graph.operator_index]
    return seconds
