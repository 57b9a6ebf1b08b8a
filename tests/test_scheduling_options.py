"""Every option is honoured or refused by name: what a policy accepts changes what happens."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from foretrain.errors import InputError
from foretrain.scheduling import Machine, Result, Settings, Trace, TraceJob, policies
from foretrain.scheduling.capabilities import CANNOT
from foretrain.scheduling.failures import FailureModel, Outage
from foretrain.scheduling.rounds.policies import ROUND_POLICIES
from foretrain.scheduling.rules import Queue, Reservation, Rules
from foretrain.scheduling.sharing.interference import Manners, MannersOfKinds
from foretrain.scheduling.spot import Spot
from foretrain.scheduling.study import Scenario, SpeedSource

MACHINES = [
    *[Machine(device="v100-sxm-16gb", gpus=2)] * 2,
    *[Machine(device="a100-sxm-80gb", gpus=2, rack=1)] * 2,
]
PAIRS = MannersOfKinds({"k0": Manners(needs=0.5, bears=0.4)}, Manners(needs=0.4, bears=0.5))
GPUS = (1, 2, 1, 4, 1, 3, 2, 1, 1, 2, 1, 4, 2, 1, 1, 1)
JOBS = [
    TraceJob(
        name=f"j{number}",
        arrival_s=35.0 * number,
        gpus=gpus,
        duration_s=60.0 + 97.0 * (number * 7 % 11),
        group=f"g{number % 3}",
        user=f"u{number % 2}",
        kind=f"k{number % 2}",
        priority=float(number % 4),
        share=0.5 if gpus == 1 else 1.0,
        least_gpus=1 if gpus == 2 else None,
        most_gpus=4 if gpus == 2 else None,
    )
    for number, gpus in enumerate(GPUS)
]


def traced(jobs: Iterable[TraceJob]) -> Trace:
    return Trace(name="t", format="made", jobs=list(jobs))


TRACE = traced(JOBS)
LIMITED = traced(
    dataclasses.replace(job, limit_s=(job.duration_s or 0) * (0.5, 1.5, 4.0)[number % 3])
    for number, job in enumerate(JOBS)
)
ELSEWHERE = [*MACHINES[:3], dataclasses.replace(MACHINES[3], partition="debug")]

World = tuple[dict[str, Any], dict[str, Any], Trace]
"""What a scenario says without an option and with it, and the trace that it is about."""


def rules(**values: Any) -> dict[str, Any]:
    return {"settings": Settings(rules=Rules(**values))}


def failing(**values: Any) -> dict[str, Any]:
    """Nodes fail, so that what a restart costs is asked for whatever the policy."""
    outages = [Outage(time_s=150.0, node=node, repair_s=90.0) for node in (0, 2)]
    return {"settings": Settings(failures=FailureModel(outages=outages), **values)}


def worlds(folder: Path) -> Mapping[str, World]:
    """By option."""
    by_table = SpeedSource(throughputs=table(folder / "table.json"))
    evaluation = residuals(folder / "evaluation.json")
    steps = traced(
        dataclasses.replace(job, steps=job.duration_s, arrival_s=5 * job.arrival_s) for job in JOBS
    )
    gangs = traced(dataclasses.replace(job, gpus=2, share=1.0, least_gpus=2, most_gpus=2) for job in JOBS)
    long = traced(dataclasses.replace(job, duration_s=20 * (job.duration_s or 0)) for job in JOBS)
    apart = {"queues": {"g0": Queue(gpus=4), "g1": Queue(gpus=4), "g2": Queue(gpus=4)}}
    lent = {"queues": {name: Queue(gpus=4, cohort="all") for name in ("g0", "g1", "g2")}}
    writes = SpeedSource(checkpoint_write_s=15.0, checkpoint_every_s=40.0)
    by_residuals = {"residuals": evaluation, "residuals_of": "p"}
    return {
        "sharing": ({}, {"settings": Settings(sharing=True)}, TRACE),
        "pairs": ({}, {"settings": Settings(pairs=PAIRS)}, TRACE),
        "quotas": ({}, rules(**apart), TRACE),
        "cohorts": (rules(**apart), rules(**lent), TRACE),
        "shares": ({}, rules(queues={"g1": Queue(shares=50.0)}), TRACE),
        "reservations": (
            {},
            rules(reservations=(Reservation(start_s=100, end_s=900, gpus=6, group="g2"),)),
            TRACE,
        ),
        "preempt": ({}, rules(preempt=True), TRACE),
        "migrate": ({"speeds": by_table}, {"speeds": by_table, "settings": Settings(migrate=True)}, steps),
        "mixed_gangs": ({}, {"settings": Settings(mixed_gangs=True)}, TRACE),
        "limits": ({}, rules(kill=True), LIMITED),
        "partitions": ({}, {"machines": ELSEWHERE}, TRACE),
        "placement": (
            {"speeds": SpeedSource(slowdown_per_node=0.5)},
            {"speeds": SpeedSource(slowdown_per_node=0.5), "placement": "spread"},
            gangs,
        ),
        "slowdown_per_node": ({}, {"speeds": SpeedSource(slowdown_per_node=0.5)}, TRACE),
        "checkpoint": (
            {"settings": Settings(restart_s=1.0)},
            {"settings": Settings(restart_s=1.0, checkpoint_s=30.0)},
            long,
        ),
        "restart": (failing(), failing(restart_s=30.0), TRACE),
        "job_mtbf": ({}, {"settings": Settings(failures=FailureModel(job_mtbf_gpu_s=2000.0))}, TRACE),
        "node_mtbf": (
            {},
            {"settings": Settings(failures=FailureModel(node_mtbf_s=500.0, repair_s=60.0))},
            TRACE,
        ),
        "outages": ({}, failing(), TRACE),
        "spot": ({}, {"spot": Spot(nodes=2, mean_s=200.0, away_s=100.0)}, TRACE),
        "checkpoint_write": ({}, {"speeds": writes}, TRACE),
        "errors": ({}, {"error": 0.9}, TRACE),
        "estimates": ({}, {"beliefs": "history"}, TRACE),
        "residuals": ({}, by_residuals, TRACE),
        "truth": (by_residuals, {**by_residuals, "truth_of": "p"}, TRACE),
        "rounds": ({}, {"rounds_s": 100.0}, long),
    }


def table(file: Path) -> Path:
    """Speeds by which A100s are twice as fast."""
    speeds = {
        str((kind, gpus)): {"null": speed} for kind in ("k0", "k1") for gpus in (1, 2, 3, 4) for speed in (1,)
    }
    doubled = {key: {"null": 2} for key in speeds}
    file.write_text(json.dumps({"v100-sxm-16gb": speeds, "a100-sxm-80gb": doubled}))
    return file


def residuals(file: Path) -> Path:
    runs = [
        {"quantity": "step_time_s", "predictor": "p", "predicted": ratio, "measured": 1.0, "runs_file": "r"}
        for ratio in (0.2, 0.6, 1.0, 1.8, 4.0)
    ]
    file.write_text(json.dumps({"runs": runs}))
    return file


NAMES = (*policies.names(), *ROUND_POLICIES)
LOOKS_AT_NONE = ("fifo", "tiresias", "pollux", "gandiva", "gittins", "edf", "kueue", "sia", "oracle")
"""Policies that decide alike whatever the estimates."""
TAKES_NONE_OFF = (
    *("fifo", "sjf", "qssf", "edf", "lucid", "backfill", "conservative"),
    *("kueue", "multifactor"),
)
"""Policies that preempt nobody here, so that no checkpoint is paid for."""
ALIKE = {
    **dict.fromkeys(("errors", "estimates", "residuals"), LOOKS_AT_NONE),
    "checkpoint": TAKES_NONE_OFF,
}


def played(policy: str, said: Mapping[str, Any], trace: Trace) -> tuple[list[float], int, float]:
    values = {"policy": policy, "machines": MACHINES, **said}
    if policy in ROUND_POLICIES and ROUND_POLICIES[policy].packs:
        values["settings"] = dataclasses.replace(values.get("settings", Settings()), pairs=PAIRS)
    result: Result = Scenario(**values).run(trace)
    assert (result.finish_s >= result.arrival_s).all(), "no job is lost"
    return result.finish_s.tolist(), int(result.preemptions.sum()), float(result.overhead_gpu_s.sum())


def test_there_is_a_world_for_every_option(tmp_path: Path) -> None:
    assert worlds(tmp_path).keys() == CANNOT.keys()


@pytest.mark.parametrize("policy", NAMES)
def test_an_option_is_refused_by_name_or_changes_what_happens(policy: str, tmp_path: Path) -> None:
    without: dict[str, tuple[list[float], int, float]] = {}
    for option, (before, after, trace) in worlds(tmp_path).items():
        if policy in CANNOT[option]:
            values: dict[str, Any] = {"policy": policy, "machines": MACHINES, **after}
            with pytest.raises(InputError, match=f"policy {policy} cannot honour it"):
                Scenario(**values).check()
            continue
        if option == "pairs" and policy in ROUND_POLICIES:
            continue  # they need pairs, which is a test of its own
        key = f"{before}/{id(trace)}"
        if key not in without:
            without[key] = played(policy, before, trace)
        changed = played(policy, after, trace) != without[key]
        assert changed is (policy not in ALIKE.get(option, ())), option
