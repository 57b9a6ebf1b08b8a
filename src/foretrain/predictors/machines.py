"""Tells the machines of CPU workers apart by the words for them."""

from __future__ import annotations

from foretrain.cluster import host_cores
from foretrain.job import Job

MACHINE_DEVIATION = 0.35
"""How far step times on two machines lie apart, in e-folds, as far as is known before runs of several are
seen: Xeon and EPYC of the campaigns in ``data/`` are 0.36 apart."""
_PROCESSORS = ("xeon", "epyc", "ryzen", "opteron", "threadripper", "graviton", "altra", "grace", "apple")
"""Names by which a machine is known, whatever else is said of it."""


def machine_of(job: Job) -> str:
    """The kind of machine whose cores do the work: processor and cores, as far as the words for it tell;
    '' where they are missing, and of other devices.

    In virtual machines that is all that is recorded.
    """
    host = (job.cluster.host or "") if job.cluster.device.is_cpu else ""
    name = next((one for one in _PROCESSORS if one in host.lower()), None)
    return host if name is None else f"{name}, {host_cores(host) or '?'} cores"
