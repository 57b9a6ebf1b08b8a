"""Tailors Driple's network to a setting it has not seen with few runs, beside one that learns from scratch.

    python benchmarks/driple_transfer.py [--targets "cpu ps 4" ...] [--seeds 0 1 2] [--shares 0.1 0.2 0.5]
    python benchmarks/driple_transfer.py --gpu
    python benchmarks/driple_transfer.py --links

Scored on unseen families of the target setting, in the folds and units of ``driple.py``, as the mean over the
distinct figures. Which runs to measure is chosen before any is measured, by a D-optimal design within a share
of their number and of their forecast time. Seconds: of measuring, as the campaign noted them, and CPU seconds
of learning.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import reading
from driple import CAMPAIGN, H200, H200_FOLDS, SHOWN, Study, errors, folds, read, remembering
from foretrain.measure.design.d_optimal import d_optimal
from foretrain.predictors.driple import DriplePredictor
from foretrain.predictors.driple.cases import Cases, network_module, tailoring_module
from foretrain.predictors.driple.features import MEANS, TARGETS, TWELVE, Array

TARGET_SETTINGS = ("cpu ps 4", "cpu allreduce 2", "cpu allreduce 4", "cpu ps 1", "cpu ps 2")
"""The design and the share of runs were chosen on ``cpu ps 4``, the ridge of the transfer on
``cpu allreduce 2`` and ``cpu ps 1``, its loss on all."""
COLUMNS = [TARGETS.index(name) for name in SHOWN]
ALL_COLUMNS = [TARGETS.index(name) for name in (*TWELVE, *MEANS)]
LINKS = Path("data/links_idle.jsonl.zst")
RANDOM_DRAWS, FIFTH = 8, 0.2
_DESIGN_RIDGE = 0.1
Result = tuple[float, float, float, int]
"""Error, seconds of measuring and of learning, and runs scored."""


def chosen(network: Any, cases: Cases, rows: Sequence[int], cost_s: Array, share: float) -> list[int]:
    """What tells most of the figures, at most a share of the runs and of their time."""
    module = network_module()
    _, beside = network.members[0].inner(*module.batched(cases.part(rows).samples())[:3])
    features = beside.numpy().astype(np.float64) / np.sqrt(beside.shape[1])
    cost = cost_s + cost_s.mean()  # a run takes a while to start
    price = np.maximum(cost / cost.sum(), 1.0 / len(rows))
    return [rows[i] for i in d_optimal(features, price, share, ridge=_DESIGN_RIDGE)]


def tailored_to(study: Study, cases: Cases, start: Any, rows: Sequence[int]) -> Any:
    kin = [study.families[i] for i in rows]
    network, _ = tailoring_module().transfer(start, cases.part(rows).samples(), kin)
    return network


def tailored(
    study: Study, target: str, fold: set[int], shares: Sequence[float]
) -> dict[tuple[str, float], Result]:
    """By how it was learned and from which share of the runs."""
    module = network_module()
    known = [i for i in range(len(study.runs)) if i not in fold]
    theirs = [i for i in known if study.settings[i] == target]
    asked = [i for i in sorted(fold) if study.settings[i] == target]
    elsewhere = [i for i in known if study.settings[i] != target]
    cases = study.corrected(elsewhere)
    cost_s = np.array([study.schedules.predict(study.runs[i].job)["step_time_s"].median for i in theirs])

    def result(network: Any, rows: Sequence[int], learning_s: float) -> Result:
        found = cases.part(asked).figures(network.figures(cases.part(asked).samples()))
        measuring_s = float(sum(study.runs[i].provenance["seconds"] for i in rows))
        return (
            float(errors(found, study.measured[asked])[:, COLUMNS].mean()),
            measuring_s,
            learning_s,
            len(asked),
        )

    def scratch(rows: Sequence[int]) -> Result:
        start = time.process_time()
        made, _ = module.train(cases.part(rows).samples(), [study.families[i] for i in rows], seed=study.seed)
        return result(made, rows, time.process_time() - start)

    def transfer(rows: Sequence[int]) -> Result:
        start = time.process_time()
        made = tailored_to(study, cases, before, rows)
        return result(made, rows, time.process_time() - start)

    before, _ = module.train(
        cases.part(elsewhere).samples(), [study.families[i] for i in elsewhere], seed=study.seed
    )
    results = {
        ("as it is", 0.0): result(before, [], 0.0),
        ("from scratch", 1.0): scratch(theirs),
        ("transfer", 1.0): transfer(theirs),
    }
    draw = np.random.default_rng(study.seed)
    for share in shares:
        rows = chosen(before, cases, theirs, cost_s, share)
        results["transfer", share] = transfer(rows)
        if share == FIFTH:
            results["from scratch", share] = scratch(rows)
        tailored_runs = [
            transfer(draw.choice(theirs, int(share * len(theirs)), replace=False).tolist())
            for _ in range(RANDOM_DRAWS)
        ]
        results["transfer, random runs", share] = (
            *np.mean([one[:3] for one in tailored_runs], axis=0).tolist(),
            len(asked),
        )
    return results


def study_target(study: Study, target: str, seeds: Sequence[int], shares: Sequence[float]) -> None:
    rows: dict[tuple[str, float], list[Result]] = {}
    for seed in seeds:
        for fold in folds(study, "family"):
            for key, result in tailored(study.with_seed(seed), target, fold, shares).items():
                rows.setdefault(key, []).append(result)
    means = {
        key: np.average(np.array(found)[:, :3], axis=0, weights=[one[3] for one in found])
        for key, found in rows.items()
    }
    whole = means["from scratch", 1.0]
    for (how, share), (error, measuring, learning) in sorted(
        means.items(), key=lambda item: (item[0][1], item[0][0])
    ):
        spent = measuring + learning
        faster = f"{(whole[1] + whole[2]) / spent:.1f}x" if spent else ""
        cells = [
            target,
            how,
            f"{share:.0%}",
            f"{error:.4f}",
            f"{error / whole[0]:.2f}x",
            f"{measuring:.0f}",
            f"{learning:.2f}",
            faster,
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


# To and on a GPU, and to links


@dataclass(frozen=True, eq=False, kw_only=True)
class Target:
    """What is to be forecast: the rows of its runs, and the network that a transfer to it starts from."""

    name: str
    rows: Sequence[int]
    start: Any


Targets = Callable[[Cases, Sequence[int]], list[Target]]
"""Targets by the cases and the rows of the families that are known."""


def gpu_targets(study: Study, source: Any) -> Targets:
    """From CPU workers to a GPU, and from data at hand to loaders."""
    loads = [run.job.workload.training.loader_rate is not None for run in study.runs]

    def targets(cases: Cases, known: Sequence[int]) -> list[Target]:
        at_hand = _trained(study, cases, [i for i in known if not loads[i]])
        with_loader = [i for i, loaded in enumerate(loads) if loaded]
        return [
            Target(name="the H200, from CPU workers", rows=range(len(loads)), start=source),
            Target(name="loaders on the H200, from data at hand", rows=with_loader, start=at_hand),
        ]

    return targets


def link_targets(study: Study) -> Targets:
    """From workers on one machine to links between nodes, and from links of one rate to those of another."""
    over_links = [i for i, run in enumerate(study.runs) if run.job.over_network]
    rates = {i: study.runs[i].job.cluster.inter_node.bandwidth_bytes_per_s for i in over_links}
    slow, fast = ([i for i in over_links if rates[i] == rate] for rate in sorted(set(rates.values())))

    def targets(cases: Cases, known: Sequence[int]) -> list[Target]:
        local = _trained(study, cases, [i for i in known if i not in rates])
        from_slow, from_fast = (
            tailored_to(study, cases, local, [i for i in known if i in set(rows)]) for rows in (slow, fast)
        )
        return [
            Target(name="links of 1 and 10 Gbit/s, from one machine", rows=over_links, start=local),
            Target(name="links of 10 Gbit/s, from 1 Gbit/s", rows=fast, start=from_slow),
            Target(name="links of 1 Gbit/s, from 10 Gbit/s", rows=slow, start=from_fast),
        ]

    return targets


def score_targets(study: Study, families: Sequence[str], parts: int, targets: Targets) -> None:
    """Print the errors on unseen families: these families are left out in so many parts."""
    rows: dict[tuple[str, str, float], list[tuple[float, int]]] = {}
    for part in range(parts):
        apart = set(families[part::parts])
        known = [i for i, name in enumerate(study.families) if name not in apart]
        cases = study.corrected(known)
        for target in targets(cases, known):
            mine = [i for i in target.rows if study.families[i] not in apart]
            asked = [i for i in target.rows if study.families[i] in apart]
            for how, share, network in _ways(study, cases, target.start, mine):
                forecast = cases.part(asked).figures(network.figures(cases.part(asked).samples()))
                error = float(np.nanmean(errors(forecast, study.measured[asked])[:, ALL_COLUMNS]))
                rows.setdefault((target.name, how, share), []).append((error, len(asked)))
    means = {key: _mean(found) for key, found in rows.items()}
    for (name, how, share), error in sorted(means.items()):
        whole = means[name, "from scratch", 1.0]
        print(f"| {name} | {how} | {share:.0%} | {error:.4f} | {error / whole:.2f}x |", flush=True)


def _mean(found: Sequence[tuple[float, int]]) -> float:
    errors, counts = zip(*found, strict=True)
    return float(np.average(errors, weights=counts))


def _trained(study: Study, cases: Cases, rows: Sequence[int]) -> Any:
    found, _ = network_module().train(
        cases.part(rows).samples(), [study.families[i] for i in rows], seed=study.seed
    )
    return found


def _ways(
    study: Study, cases: Cases, start: Any, learned_from: list[int]
) -> Iterator[tuple[str, float, Any]]:
    """How it was learned, from which share of the runs, and the network."""
    draw = np.random.default_rng(study.seed)
    yield "white box alone", 0.0, tailoring_module().silenced(start)
    yield "as it is", 0.0, start
    for number in range(RANDOM_DRAWS // 2):
        rows = draw.choice(learned_from, round(FIFTH * len(learned_from)), replace=False).tolist()
        yield "transfer, random runs", FIFTH, tailored_to(study, cases, start, rows)
        if not number:
            yield "from scratch", FIFTH, _trained(study, cases, rows)
    yield "transfer", 1.0, tailored_to(study, cases, start, learned_from)
    yield "from scratch", 1.0, _trained(study, cases, learned_from)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", default=TARGET_SETTINGS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.15, 0.2, 0.5])
    parser.add_argument("--gpu", action="store_true", help="to the H200, and to loaders there")
    parser.add_argument("--links", action="store_true", help="to links between nodes, and to other rates")
    parser.add_argument("--source", type=Path, help="the fit of CPU workers, if not what the package ships")
    options = parser.parse_args()
    if options.gpu or options.links:
        print("| target | learned | runs | error | to scratch with all |\n|---|---|---|---|---|")
    if options.gpu:
        fitted = DriplePredictor() if options.source is None else DriplePredictor.load(options.source)
        source = tailoring_module().silenced(fitted.state().networks["cpu"])
        study = Study(read(H200), remembering())
        score_targets(study, sorted(set(study.families)), H200_FOLDS, gpu_targets(study, source))
        return
    if options.links:
        over_links = read(LINKS)
        study = Study([*read(CAMPAIGN), *over_links], remembering())
        families = sorted(set(study.families[-len(over_links) :]))
        score_targets(study, families, len(families), link_targets(study))
        return
    study = Study(read(CAMPAIGN), remembering())
    print(
        "| target | learned | runs | error | to scratch with "
        "all | measuring, s | learning, CPU s | faster by |\n|---|---|---|---|---|---|---|---|"
    )
    for target in options.targets:
        study_target(study, target, options.seeds, options.shares)


if __name__ == "__main__":
    reading.run(main)
