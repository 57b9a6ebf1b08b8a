"""Names every quantity that a run may carry and a forecast may give, with its SI unit."""

from __future__ import annotations

RESOURCE_FIGURES: dict[str, str] = {
    f"{resource}_{figure}": "s" if figure.endswith("_s") else rate
    for resource, rate in (("device_utilization", ""), ("memory_utilization", ""), ("network_rx", "B/s"),
    ("network_tx", "B/s"))
    for figure in ("idle_s", "active_s", "peak")
}  # fmt: skip
"""Driple's twelve, of the window that a run was sampled in: mean length of idle and of active spans, mean
peak of the active ones."""

QUANTITIES: dict[str, str] = {
    "step_time_s": "s", "step_time_without_sync_s": "s", "forward_time_s": "s", "backward_time_s": "s",
    "optimizer_time_s": "s",
    "device_busy_s": "s", "host_issue_s": "s", "kernels": "", "peak_memory_bytes": "B",
    "reserved_memory_bytes": "B",
    "samples_per_s": "/s", "tokens_per_s": "/s", "epoch_time_s": "s", "total_time_s": "s",
    "startup_time_s": "s",
    "device_utilization": "", "memory_utilization": "", "memory_busy": "", "power_w": "W",
    "network_tx_bytes_per_s": "B/s", "network_rx_bytes_per_s": "B/s", **RESOURCE_FIGURES,
}  # fmt: skip
"""Every quantity that a run may carry and a forecast may give, with its SI unit."""
