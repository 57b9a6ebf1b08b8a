"""Simulates how a cluster runs a trace of jobs under a policy, as DLTSim."""

from foretrain.scheduling.jobs import Trace, TraceJob
from foretrain.scheduling.machines import Machine
from foretrain.scheduling.metrics import Metrics, metrics
from foretrain.scheduling.policies.base import Policy
from foretrain.scheduling.result import Result
from foretrain.scheduling.simulator import PolicyError, Settings, Simulation

__all__ = [
    "Machine",
    "Metrics",
    "Policy",
    "PolicyError",
    "Result",
    "Settings",
    "Simulation",
    "Trace",
    "TraceJob",
    "metrics",
]
