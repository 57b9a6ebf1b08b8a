"""Tells machines apart by the words for them, and how many of their cores a job keeps busy."""

from __future__ import annotations

import re

from foretrain.job import Job

_PROCESSORS = ("xeon", "epyc", "ryzen", "opteron", "threadripper", "graviton", "altra", "grace", "apple")
"""Names by which a machine is known, whatever else is said of it."""


def host_cores(host: str | None) -> int | None:
    """The cores of a machine, where the words for it tell them.

    >>> host_cores("AMD EPYC, 2 cores"), host_cores("16-core Xeon"), host_cores("laptop")
    (2, 16, None)
    """
    found = re.search(r"(\d+)[ -]cores?\b", host or "")
    return int(found.group(1)) if found else None


def machine_of(job: Job) -> str:
    """The kind of machine whose cores do the work: processor and cores, as far as the words for it tell;
    '' where they are missing, and of other devices.

    In virtual machines that is all that is recorded.
    """
    host = (job.cluster.host or "") if job.cluster.device.is_cpu else ""
    name = next((one for one in _PROCESSORS if one in host.lower()), None)
    return host if name is None else f"{name}, {host_cores(host) or '?'} cores"


def busy_cores(job: Job) -> float:
    """Cores that the workers of a job want on each machine; of devices that are no CPU, workers."""
    cluster = job.cluster
    cores = cluster.device.cores if cluster.device.is_cpu else 1
    return cluster.world_size * cores / (cluster.machines or cluster.nodes)


def sharing(job: Job) -> float:
    """Processes for each core of the machine, at least 1; servers wait while workers compute."""
    cores = host_cores(job.cluster.host)
    return 1.0 if cores is None or not job.cluster.device.is_cpu else max(1.0, busy_cores(job) / cores)
