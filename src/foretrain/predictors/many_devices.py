"""The forecast of a job on many devices: the schedule of its ranks with intervals, cost and what was assumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from foretrain.costs.base import CostModel
from foretrain.costs.host import DispatchHost
from foretrain.errors import UnsupportedJob
from foretrain.forecast import Forecast, whole_training
from foretrain.job import Job
from foretrain.predictors.deletepop.rank_calibration import Calibration
from foretrain.predictors.whitebox import IDLE_POWER, Spread, assumptions, host_beside
from foretrain.step.layout import Layout, lay_out
from foretrain.step.partition import virtual_stages
from foretrain.step.play import RanksForecast, play
from foretrain.step.playback import Step
from foretrain.step.rank_memory import RankMemory, fullest_of, logged_of


def forecast_ranks(
    job: Job, costs: CostModel, host: DispatchHost, spread: Callable[[Job], Spread], *, predictor: str, gap_s: float = 0.0,
    calibration: Calibration | None = None,
) -> Forecast:  # fmt: skip
    """Time, memory and network of every rank; the plan is refused with the numbers that do not fit."""
    layout, overhead_s = layout_of(job, costs, host, gap_s=gap_s)
    found = play(layout if calibration is None else layout.tuned(calibration.tuning), overhead_s)
    if calibration is not None and calibration.residuals is not None:
        found = dataclasses.replace(found, step=found.step.scaled(calibration.residuals.factor(job)))
    around = spread(job)
    quantities = whole_training(job, around.around("step_time_s", found.step.time_s))
    quantities.update({name: around.around(name, value) for name, value in _medians(job, found).items()})
    price = job.cluster.price_per_hour
    total = quantities.get("total_time_s")
    power = quantities.get("power_w")
    return Forecast(
        job=job,
        predictor=predictor,
        quantities=quantities,
        cost=total * (price / 3600) if total is not None and price is not None else None,
        energy_j=total * (power.median * job.cluster.world_size)
        if total is not None and power is not None
        else None,
        price_per_hour=price,
        memory_by_category={name: int(size) for name, size in _fullest(found).items()},
        memory_capacity_bytes=min(group.device.memory_bytes for group in job.cluster.groups),
        bound=_bound(found.step),
        assumptions=_assumptions(job, layout, price),
        step=found.step,
        rank_memory=found.memory,
    )


def layout_of(job: Job, costs: CostModel, host: DispatchHost, *, gap_s: float = 0.0) -> tuple[Layout, float]:
    """The job laid out on the hosts that its nodes have, and the host's time per step."""
    if job.workload.training.mode != "train":
        raise UnsupportedJob(
            "training.mode: 'infer' on many devices; forecasts of many devices are of training"
        )
    own = host_beside(job, host)
    return lay_out(job, costs, own, gap_s=gap_s), own.step_overhead_s


def _medians(job: Job, found: RanksForecast) -> dict[str, float]:
    step = found.step
    utilization = min(1.0, found.device_busy_s / step.time_s)
    powers = [group.device.tdp_w for group in job.cluster.groups]
    sent = found.sent_bytes / step.time_s
    rank = logged(found.layout, found.memory)
    return {
        "forward_time_s": found.forward_s,
        "backward_time_s": found.backward_s,
        "optimizer_time_s": found.optimizer_s,
        "device_busy_s": found.device_busy_s,
        "host_issue_s": found.host_issue_s,
        "kernels": found.kernels,
        "device_utilization": utilization,
        "peak_memory_bytes": rank.allocated_bytes,
        "reserved_memory_bytes": rank.reserved_bytes,
        "network_tx_bytes_per_s": sent,
        "network_rx_bytes_per_s": sent,
        **({"power_w": max(power for power in powers if power) * (IDLE_POWER + (1 - IDLE_POWER) * utilization)} if all(powers) else {}),
    }  # fmt: skip


def logged(layout: Layout, memory: Sequence[RankMemory]) -> RankMemory:
    """The rank whose memory the framework would report."""
    return logged_of(memory, layout.profile)


def _fullest(found: RanksForecast) -> dict[str, float]:
    return dict(fullest_of(found.memory).by_category)


def _bound(step: Step) -> str:
    """In words: what takes most of the step beside computation, or computation."""
    parts = {
        "exposed communication": step.exposed_s,
        "the pipeline's bubble": step.bubble_s,
        "the host": step.host_s,
    }
    name, seconds = max(parts.items(), key=lambda item: item[1])
    share = step.computing_s / step.time_s
    if seconds > 0.3 * step.time_s:
        return f"{name} ({seconds / step.time_s:.0%} of the step)"
    return f"computation ({min(share, 1.0):.0%} of the step)"


def _assumptions(job: Job, layout: Layout, price: float | None) -> tuple[str, ...]:
    notes = list(assumptions(job, layout.graph, price))
    plan = job.plan
    if plan.schedule == "interleaved" and plan.virtual_stages is None and plan.pipeline > 1:
        count = virtual_stages(plan, sum(block.is_layer for stage in layout.stages for block in stage.blocks))
        notes.append(f"plan.virtual_stages is not given: {count} chunks per rank are assumed")
    if plan.micro_batch is None and job.micro_batch > 1:
        notes.append(
            f"plan.micro_batch is not given: all {job.micro_batch} samples of a rank are handled at once"
        )
    if job.cluster.nodes > 1 and any(
        group.inter_node.kind == "ethernet" and not group.device.is_cpu for group in job.cluster.groups
    ):
        notes.append(
            "cluster.inter_node: ethernet is used through TCP sockets, below its rate; give kind = 'roce' where it has RDMA"
        )
    if plan.expert > 1:
        notes.append("tokens are spread evenly over the experts")
    if len({group.device.name for group in job.cluster.groups}) > 1:
        even = "every device gets the same share of the batch: the others wait for the slowest"
        notes.append(
            even if plan.balance == "even" else "the batch is split in proportion to the devices' speed"
        )
    return tuple(notes)
