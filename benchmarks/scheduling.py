"""Times the cluster simulator, and compares its round-based mode with Gavel's own simulator.

    python benchmarks/scheduling.py speed --data DIR [--cluster 60x8xv100] [--jobs 10000,20000,40000,80000]
                                          [--policy fifo,srtf,backfill,tiresias]
    python benchmarks/scheduling.py gavel --data DIR [--seeds 8]

DIR holds traces/. ``speed`` prints seconds of one core and peak memory per policy and number of jobs of the
Philly trace, 0 standing for all, and exits 1 when the whole trace takes more than 60 s or 2 GB. ``gavel``
prints average completion times beside those of gavel_reference.csv: of seed 0, and the mean and spread over
seeds, since policies that ignore the kind of device fill kinds in random order; it exits 1 when seed 0 is off
by more than 5 %.
"""

from __future__ import annotations

import argparse
import csv
import math
import resource
import sys
import time
from pathlib import Path

import numpy as np

import reading
from foretrain.scheduling import Simulation, metrics, policies
from foretrain.scheduling.clusters import read_machines
from foretrain.scheduling.programmes import has_ecos
from foretrain.scheduling.round_policies import round_policy
from foretrain.scheduling.rounds import Rounds
from foretrain.scheduling.speeds import ThroughputTable
from foretrain.scheduling.traces import read_trace

MOST_S, MOST_BYTES = 60.0, 2e9


def speed(data: Path, cluster: str, names: list[str], counts: list[int]) -> bool:
    """Whether the whole trace is simulated in time."""
    trace = read_trace(data / "traces" / "philly_sia_processed.csv.gz")
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
            good &= took <= MOST_S and peak <= MOST_BYTES
    return good


def gavel(data: Path, seeds: int) -> bool:
    """Whether all are within 5 %."""
    folder, good = data / "traces", True
    table = ThroughputTable.load(folder / "gavel_simulation_throughputs.json.gz")
    print(
        f"shares of time by {'ECOS, as in Gavel' if has_ecos() else 'our own solver; ECOS is not installed'}"
    )
    print(f"{'trace':32} {'policy':22} {'Gavel':>9} {'seed 0':>9} {'error':>7} {'mean':>9} {'spread':>7}")
    for row in csv.DictReader((folder / "gavel_reference.csv").read_text().splitlines()):
        counts = zip(("v100", "p100", "k80"), row["cluster_v100_p100_k80"].split(":"), strict=True)
        machines = read_machines(",".join(f"{device}={count}" for device, count in counts))
        jobs = read_trace(folder / row["trace"]).jobs
        found = []
        for seed in range(seeds):
            policy = round_policy(row["policy"], seed)
            result = Rounds(
                jobs, machines, policy, table, round_s=float(row["seconds_per_round"]), seed=seed
            ).run()
            found.append(metrics(result).average_jct_s)
        wanted = float(row["average_jct_s"])
        error = found[0] / wanted - 1
        print(
            f"{row['trace']:32} {row['policy']:22} {wanted:9.1f} "
            f"{found[0]:9.1f} {error:+7.1%} {np.mean(found):9.1f} {np.std(found) / wanted:7.1%}"
        )
        good &= abs(error) <= 0.05
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("speed", "gavel"))
    parser.add_argument("--data", type=reading.existing, required=True)
    parser.add_argument("--cluster", default="60x8xv100")
    parser.add_argument("--policy", default="fifo,srtf,backfill,tiresias")
    parser.add_argument("--jobs", default="10000,20000,40000,80000,0")
    parser.add_argument("--seeds", type=int, default=8)
    given = parser.parse_args()
    if given.what == "speed":
        good = speed(
            given.data,
            given.cluster,
            given.policy.split(","),
            [int(count) for count in given.jobs.split(",")],
        )
    else:
        good = gavel(given.data, given.seeds)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    reading.run(main)
