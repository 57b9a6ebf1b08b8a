"""Times the cluster simulator, and compares its round-based mode with Gavel's own simulator.

    python benchmarks/scheduling.py speed --data DIR [--cluster 60x8xv100] [--jobs 10000,20000,40000,80000]
                                          [--policy fifo,srtf,backfill,tiresias]
    python benchmarks/scheduling.py scale --data DIR [--policy fifo,srtf] [--jobs 1000000] [--cluster ...]
    python benchmarks/scheduling.py tiresias --data DIR [--jobs 3000,20000] [--cluster 60x8xv100]
    python benchmarks/scheduling.py gavel --data DIR [--seeds 8] [--without-ecos]

DIR holds traces/. ``speed`` prints seconds of one core and peak memory per policy and number of jobs of the
Philly trace, 0 standing for all, and exits 1 when the whole trace takes more than 6 s (conservative: 60 s) or
2 GB. ``scale`` does the same for the trace repeated, one copy after another, up to so many jobs, and exits 1
beyond 60 s or 2 GB; on more GPUs than 480 as many copies run at once. ``tiresias`` compares the policy with a
literal play of its authors' rule and exits 1 where they differ by more than 2 %. ``gavel``
prints average completion times beside those of gavel_reference.csv: of seed 0, and the mean and spread over
seeds, since policies that ignore the kind of device fill kinds in random order; it exits 1 when seed 0 is off
by more than 2 % or takes more than 10 s.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import reading
from foretrain.scheduling import Simulation, TraceJob, metrics, policies
from foretrain.scheduling.clusters import read_machines
from foretrain.scheduling.jobs import in_order
from foretrain.scheduling.rounds import programmes
from foretrain.scheduling.rounds.policies import round_policy
from foretrain.scheduling.rounds.simulation import Rounds
from foretrain.scheduling.speeds import ThroughputTable
from foretrain.scheduling.traces import read_trace
from tiresias_rule import completion_times

MOST_S, MOST_BYTES = 60.0, 2e9
MOST_S_PHILLY = {"conservative": 60.0}
"""For the Philly trace; 6 s for the others."""
PHILLY = "traces/philly_sia_processed.csv.gz"
PHILLY_GPUS = 480


DEFAULT_POLICIES = {"speed": "fifo,sjf,backfill,srtf,tiresias,conservative", "scale": "fifo,srtf"}
DEFAULT_JOBS = {"speed": "10000,20000,40000,80000,0", "scale": "1000000", "tiresias": "3000,20000"}


def repeated(jobs: Sequence[TraceJob], count: int, at_once: int) -> list[TraceJob]:
    """Copies of a trace, some at once and then one after another, up to so many jobs."""
    span_s = jobs[-1].arrival_s + 60.0
    copies = -(-count // len(jobs))
    made = [
        dataclasses.replace(
            job,
            name=f"{job.name}.{copy}",
            arrival_s=job.arrival_s + copy // at_once * span_s + copy % at_once * 7.0,
        )
        for copy in range(copies)
        for job in jobs
    ]
    return in_order(made)[:count]


def scale(data: Path, cluster: str, names: list[str], count: int) -> bool:
    """Whether so many jobs are simulated in time."""
    machines = read_machines(cluster)
    gpus = sum(machine.gpus for machine in machines)
    begin = time.process_time()
    jobs = repeated(read_trace(data / PHILLY).jobs, count, max(1, gpus // PHILLY_GPUS))
    print(f"{len(jobs):,} jobs made in {time.process_time() - begin:.1f} s, {gpus:,} GPUs")
    print(f"{'policy':12} {'seconds':>8} {'peak MB':>8} {'average JCT s':>14} {'preemptions':>12}")
    good = True
    for name in names:
        begin = time.process_time()
        result = Simulation(jobs, machines, policies.get(name)).run()
        took = time.process_time() - begin
        found = metrics(result)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(
            f"{name:12} {took:8.1f} {peak / 1e6:8.0f} {found.average_jct_s:14,.0f} {found.preemptions:12,}",
            flush=True,
        )
        good &= took <= MOST_S and peak <= MOST_BYTES
    return good


def tiresias(data: Path, cluster: str, counts: list[int]) -> bool:
    """Whether the policy does what its authors' rule does."""
    trace, machines, good = read_trace(data / PHILLY), read_machines(cluster), True
    gpus = sum(machine.gpus for machine in machines)
    print(f"{'jobs':>8} {'rule h':>8} {'ours h':>8} {'off':>7}")
    for count in counts:
        jobs = trace.jobs[:count]
        ours = metrics(Simulation(jobs, machines, policies.get("tiresias")).run()).average_jct_s / 3600
        rule = float(np.mean(completion_times(jobs, gpus))) / 3600
        print(f"{len(jobs):8,} {rule:8.2f} {ours:8.2f} {ours / rule - 1:+7.1%}", flush=True)
        good &= abs(ours / rule - 1) <= 0.02
    return good


def speed(data: Path, cluster: str, names: list[str], counts: list[int]) -> bool:
    """Whether the whole trace is simulated in time."""
    trace = read_trace(data / PHILLY)
    machines, good = read_machines(cluster), True
    print(
        f"{'policy':10} {'jobs':>8} {'seconds':>8} {'us/(n log n)':>13} {'peak MB':>8} {'average JCT s':>14}"
    )
    for name in names:
        for count in counts:
            jobs = trace.jobs[:count] if count else trace.jobs
            begin = time.process_time()
            result = Simulation(jobs, machines, policies.get(name)).run()
            took = time.process_time() - begin
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            scaled = took / (len(jobs) * math.log2(len(jobs))) * 1e6
            print(
                f"{name:10} {len(jobs):8,} {took:8.1f} {scaled:13.2f} "
                f"{peak / 1e6:8.0f} {metrics(result).average_jct_s:14,.0f}",
                flush=True,
            )
            good &= took <= MOST_S_PHILLY.get(name, 6.0) and peak <= MOST_BYTES
    return good


def gavel(data: Path, seeds: int) -> bool:
    """Whether all are within 2 %, in 10 s each."""
    folder, good = data / "traces", True
    table = ThroughputTable.load(folder / "gavel_simulation_throughputs.json.gz")
    print(f"shares of time by {'ECOS, as in Gavel' if programmes.has_ecos() else 'our own solver'}")
    figures = f"{'seed 0':>9} {'error':>7} {'mean':>9} {'spread':>7} {'s':>5}"
    print(f"{'trace':32} {'policy':22} {'Gavel':>9} {figures}")
    for row in csv.DictReader((folder / "gavel_reference.csv").read_text().splitlines()):
        counts = zip(("v100", "p100", "k80"), row["cluster_v100_p100_k80"].split(":"), strict=True)
        machines = read_machines(",".join(f"{device}={count}" for device, count in counts))
        jobs = read_trace(folder / row["trace"]).jobs
        found, begin = [], time.process_time()
        for seed in range(seeds):
            policy = round_policy(row["policy"], seed)
            result = Rounds(
                jobs, machines, policy, table, round_s=float(row["seconds_per_round"]), seed=seed
            ).run()
            found.append(metrics(result).average_jct_s)
        wanted = float(row["average_jct_s"])
        error, took = found[0] / wanted - 1, (time.process_time() - begin) / seeds
        print(
            f"{row['trace']:32} {row['policy']:22} {wanted:9.1f} "
            f"{found[0]:9.1f} {error:+7.1%} {np.mean(found):9.1f} {np.std(found) / wanted:7.1%} {took:5.1f}",
            flush=True,
        )
        good &= abs(error) <= 0.02 and took <= 10.0
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("speed", "scale", "tiresias", "gavel"))
    parser.add_argument("--data", type=reading.existing, required=True)
    parser.add_argument("--cluster", default="60x8xv100")
    parser.add_argument("--policy")
    parser.add_argument("--jobs")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--without-ecos", action="store_true")
    given = parser.parse_args()
    names = (given.policy or DEFAULT_POLICIES.get(given.what, "")).split(",")
    counts = [int(count) for count in (given.jobs or DEFAULT_JOBS.get(given.what, "0")).split(",")]
    if given.without_ecos:
        programmes.has_ecos = lambda: False
    if given.what == "speed":
        good = speed(given.data, given.cluster, names, counts)
    elif given.what == "scale":
        good = scale(given.data, given.cluster, names, counts[0])
    elif given.what == "tiresias":
        good = tiresias(given.data, given.cluster, counts)
    else:
        good = gavel(given.data, given.seeds)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    reading.run(main)
