"""Says by what jobs are like one another: the settings they share or not, and how far their sizes are
apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretrain.architectures import family
from foretrain.job import Job

if TYPE_CHECKING:
    from foretrain.step.layout import Layout

FIELDS = (
    "device", "family", "mode", "precision", "optimizer", "compile", "channels_last", "recompute",
    "framework", "plan", "link",
)  # fmt: skip
"""Settings that runs share or do not."""
SIZES = (
    "devices", "nodes", "bandwidth", "cores", "micro_batch", "accumulation", "length", "parameters", "flops",
)  # fmt: skip
"""Settings that runs have more or less of; their distance is the logarithm of the ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """The settings and sizes of a job by which its distance to others is told."""

    fields: Mapping[str, str]
    sizes: Mapping[str, float]
    """Those that are known and apply."""

    @classmethod
    def of(cls, job: Job, layout: Layout | None = None) -> Key:
        """Read the key of a job; ``layout`` tells parameters and FLOPs of a rank, which are not compared
        without it. A device alone exchanges at the rate of its memory."""
        training, plan, groups = job.workload.training, job.plan, job.cluster.groups
        away, nodes = job.over_network, job.cluster.nodes
        several = away or job.cluster.world_size > 1
        links = [group.inter_node if away else group.intra_node for group in groups] if several else []
        rates = [link.bandwidth_bytes_per_s for link in links]
        fields = {
            "device": "+".join(sorted({group.device.name for group in groups})),
            "family": family(job.workload.model),
            "mode": training.mode + (f" with {training.adapter.kind}" if training.adapter else ""),
            "precision": training.precision,
            "optimizer": training.optimizer if training.mode == "train" else "none",
            "compile": str(training.compile).lower(),
            "channels_last": str(training.channels_last).lower(),
            "recompute": plan.recompute,
            "framework": training.framework,
            "plan": plan_words(job),
            "link": "+".join(sorted({link.kind for link in links})) or "none",
        }
        image = training.image_shape
        length = training.sequence or (max(image[1:]) if image else None)
        device = groups[0].device
        sizes = {
            "devices": job.cluster.world_size,
            "nodes": nodes,
            "bandwidth": min(rates or [group.device.memory_bytes_per_s for group in groups]),
            "cores": device.cores if device.is_cpu else None,
            "micro_batch": job.micro_batch,
            "accumulation": job.accumulation,
            "length": length,
        }
        if layout is not None:
            flops = layout.graph.column("flops")
            work = sum(float(flops[stage.calls].sum()) for stage in layout.stages) / len(layout.stages)
            sizes |= {"parameters": layout.graph.parameters, "flops": work * job.accumulation}
        return cls(fields=fields, sizes={name: float(value) for name, value in sizes.items() if value})


def plan_words(job: Job) -> str:
    """Name the ways in which a plan splits the work: ``data``, ``data+tensor+zero1``, ``none`` on one
    device."""
    plan = job.plan
    words = [name for name in ("data", "tensor", "pipeline", "context", "expert") if getattr(plan, name) > 1]
    words += [plan.shard] if plan.shard != "none" else []
    words += ["servers"] if plan.servers else []
    words += ["asynchronous"] if plan.asynchronous else []
    words += ["offload"] if plan.offload else []
    return "+".join(words) or "none"


def describe(job: Job) -> str:
    """Describe a run in a few words: ``resnet50 batch 64 fp32 on h200-sxm-141gb``."""
    training, key = job.workload.training, Key.of(job)
    config = job.workload.model.config or {}
    width = next((config[name] for name in ("hidden_size", "n_embd", "d_model") if name in config), None)
    words = [job.workload.model.label + (f" (width {width})" if width else "")]
    words += ["inference"] if training.mode == "infer" else []
    words += [f"batch {training.global_batch:,}"]
    words += [f"sequence {training.sequence:,}"] if training.sequence else []
    words += [f"image {training.image_shape[1]}"] if training.image_shape else []
    words += [training.precision]
    words += ["compiled"] if training.compile else []
    words += ["channels last"] if training.channels_last else []
    words += [training.adapter.words] if training.adapter else []
    words += [f"recompute {job.plan.recompute}"] if job.plan.recompute != "none" else []
    words += [training.framework] if training.framework != "pytorch" else []
    cluster, world = key.fields["device"], job.cluster.world_size
    words += [f"on {world} x {cluster}, {key.fields['plan']}" if world > 1 else f"on {cluster}"]
    return " ".join(words)
