"""Gives the terms of an exchange of gradients, as the white box sees it on the slowest link of a job."""

from __future__ import annotations

import math

import numpy as np

from foretrain.costs.collectives import Collectives, team
from foretrain.job import Job

LINK_TERMS = tuple(
    f"{exchange}: {term}"
    for exchange in ("all-reduce", "servers")
    for term in (
        "bytes in a node",
        "bytes above the network's rate",
        "bytes per neighbour",
        "delay",
        "messages",
    )
)

_GRADIENT_BYTES = 4
"""Of a parameter: gradients are exchanged in fp32."""
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20
"""Bytes of the gradients that torch's DistributedDataParallel sends at once."""
_MEMORY_BYTES_PER_S = 1e9
_NEIGHBOURS = 8
"""Further workers on a machine for which the guess of what an exchange takes for each holds."""


def exchange(parameters: float, job: Job) -> tuple[float, ...]:
    """The terms of the exchange of gradients that a job makes, by the white box; zeros where there is
    none."""
    cluster, plan = job.cluster, job.plan
    if cluster.world_size == 1 and not plan.servers:
        return (0.0,) * (len(LINK_TERMS) // 2)
    sent_bytes = parameters * _GRADIENT_BYTES
    network, sizes = Collectives(cluster), np.array([sent_bytes, 0.0])
    if plan.servers:
        workers = 1 if plan.asynchronous else cluster.world_size
        own = 0 if cluster.servers is None else cluster.servers.nodes
        times = network.parameter_server_s(
            sizes, workers=workers, servers=plan.servers, nodes=cluster.nodes, server_nodes=own
        )
        messages_s = float(times[1])
    else:
        everyone = team(cluster.world_size, 1, cluster.devices_per_node)
        times = network.time_s("all_reduce", sizes, everyone)
        messages_s = float(times[1]) * (1 + math.ceil(max(sent_bytes - _FIRST_BUCKET, 0.0) / _BUCKET))
    moving_s = float(times[0] - times[1])
    inside, outside = (0.0, moving_s) if job.over_network else (moving_s, 0.0)
    neighbours = cluster.world_size / (cluster.machines or cluster.nodes) - 1
    return inside, outside, sent_bytes / _MEMORY_BYTES_PER_S * neighbours / _NEIGHBOURS, 1.0, messages_s
