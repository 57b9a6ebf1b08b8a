"""Writes what schedulers and clouds start launch.sh with: Slurm, Kubeflow with Kueue, SkyPilot."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from foretrain.job import Job
from foretrain.launchers.writing.devices import SKYPILOT, cloud_of, kubernetes_resource
from foretrain.launchers.writing.expected import Expected
from foretrain.launchers.writing.versions import stamp
from foretrain.launchers.writing.yaml_text import yaml_text

FOLDER_IN_IMAGE = "/workspace/plan"
"""Where a container is expected to have the folder."""


def job_name(job: Job) -> str:
    """Name the job by its model, in letters, digits and dashes."""
    label = job.workload.model.label.rpartition("/")[2].rpartition(":")[2]
    return re.sub(r"[^a-z0-9]+", "-", f"{label}-{job.cluster.world_size}x".lower()).strip("-") or "plan"


# Slurm


def slurm_script(job: Job, expected: Expected) -> str:
    """The batch script of Slurm that starts launch.sh on each node."""
    cluster = job.cluster
    headers = [
        f"--job-name={job_name(job)}",
        f"--nodes={cluster.nodes}",
        "--ntasks-per-node=1",
        *_slurm_devices(job),
        "--exclusive",
        f"--time={slurm_time(expected.limit_s(job))}",
        "--output=%x-%j.out",
    ]
    if (segment := nodes_in_segment(job)) is not None:
        headers.append(f"--segment={segment}")
    lines = [
        "#!/bin/bash",
        f"# {stamp('slurm')}",
        "# sbatch --account=A --partition=P slurm.sbatch; with PROGRAM='python benchmark.py' it measures.",
        *(f"#SBATCH {header}" for header in headers),
        "set -euo pipefail",
        'MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
        "export MASTER_ADDR",
        'export RUN_ID="$SLURM_JOB_ID"',
        'PROGRAM="${PROGRAM:-bash launch.sh}"',
        "# shellcheck disable=SC2086",
        "srun $PROGRAM",
    ]
    return "\n".join(lines) + "\n"


def _slurm_devices(job: Job) -> list[str]:
    cluster = job.cluster
    if cluster.device.is_cpu:
        return [f"--cpus-per-task={cluster.devices_per_node * (cluster.device.cores or 1)}"]
    return [f"--gpus-per-node={cluster.devices_per_node}"]


def slurm_time(limit_s: int) -> str:
    """Days, hours, minutes and seconds.

    >>> slurm_time(93_780), slurm_time(3_600)
    ('1-02:03:00', '01:00:00')
    """
    days, rest = divmod(limit_s, 86_400)
    hours, rest = divmod(rest, 3_600)
    clock = f"{hours:02d}:{rest // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def nodes_in_segment(job: Job) -> int | None:
    """Nodes that are to lie in one NVLink domain: the most that divide the job's; None where a domain is a
    node."""
    group, nodes = job.cluster.groups[0], job.cluster.nodes
    in_domain = group.domain // group.devices_per_node
    if in_domain <= 1 or nodes == 1:
        return None
    return max(count for count in range(1, min(in_domain, nodes) + 1) if nodes % count == 0)


# Kubernetes


def trainjob(job: Job, expected: Expected) -> str:
    """The TrainJob of Kubeflow, which waits in a queue of Kueue."""
    cluster, limit = job.cluster, expected.limit_s(job)
    resource, count = kubernetes_resource(cluster.device), cluster.devices_per_node
    if cluster.device.is_cpu:
        count *= cluster.device.cores or 1
    document: dict[str, Any] = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {
            "name": job_name(job),
            "labels": {
                "kueue.x-k8s.io/queue-name": "user-queue",
                "kueue.x-k8s.io/max-exec-time-seconds": str(limit),
            },
        },
        "spec": {
            "suspend": True,
            "activeDeadlineSeconds": limit,
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": "torch-distributed",
            },
            "trainer": {
                "image": "YOUR-IMAGE",
                "numNodes": cluster.nodes,
                "numProcPerNode": cluster.devices_per_node,
                "command": ["bash", f"{FOLDER_IN_IMAGE}/launch.sh"],
                "args": [],
                "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
                "resourcesPerNode": {"requests": {resource: str(count)}, "limits": {resource: str(count)}},
            },
        },
    }
    about = (
        f"# The image has the framework and this folder as {FOLDER_IN_IMAGE}. suspend: true is for Kueue.\n"
    )
    return f"# {stamp('kubeflow')}\n{about}{yaml_text(document)}"


# SkyPilot


def skypilot_task(job: Job, alternatives: Sequence[Job], packages: str) -> tuple[str, list[str]] | None:
    """The task, and what of the alternatives it leaves out; None where SkyPilot does not name the device."""
    if job.cluster.device.name not in SKYPILOT:
        return None
    ordered, left_out = [_resources(job)], list[str]()
    for other in alternatives:
        why = _why_not(job, other)
        if why is None and _resources(other) not in ordered:
            ordered.append(_resources(other))
        elif why is not None:
            left_out.append(why)
    resources: dict[str, Any] = ordered[0] if len(ordered) == 1 else {"ordered": ordered}
    document = {
        "name": job_name(job),
        "num_nodes": job.cluster.nodes,
        "workdir": ".",
        "resources": resources,
        "setup": f"pip install {packages}\n",
        "run": 'export MASTER_ADDR="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"\n'
        'export NODE_RANK="$SKYPILOT_NODE_RANK"\n'
        "bash launch.sh\n",
    }
    return f"# {stamp('skypilot')}\n{yaml_text(document)}", left_out


def _resources(job: Job) -> dict[str, Any]:
    cluster = job.cluster
    keys: dict[str, Any] = {}
    if (cloud := cloud_of(None if cluster.node is None else cluster.node.name)) is not None:
        keys["infra"] = cloud
    keys["accelerators"] = f"{SKYPILOT[cluster.device.name]}:{cluster.devices_per_node}"
    if cluster.nodes > 1:
        keys["network_tier"] = "best"
    return keys


def _why_not(job: Job, other: Job) -> str | None:
    """Why an alternative cannot run from this folder; None where it can."""
    if len(other.cluster.groups) > 1 or other.cluster.device.name not in SKYPILOT:
        return "an alternative has devices that SkyPilot has no name for"
    where = f"{other.cluster.nodes} x {other.cluster.devices_per_node} {other.cluster.device.name}"
    if (other.cluster.nodes, other.cluster.devices_per_node) != (
        job.cluster.nodes,
        job.cluster.devices_per_node,
    ):
        return f"{where} has another number of nodes or devices, and needs a folder of its own"
    same = dataclasses.replace(other, cluster=job.cluster)
    if (same.plan, same.workload.training) != (job.plan, job.workload.training):
        return f"{where} has another plan, and needs a folder of its own"
    return None
