"""Gathers the runs that ScaleDL is studied on as graphs of forecasts that have not seen their family.

    python benchmarks/scaledl_cases.py --data DIR --cache DIR

Families are dealt out to five folds; each run is forecast by operator models that were learned without its
fold. DIR of --data holds runs/ with the public files. About an hour on one core, once; a second call goes on
where the first one was interrupted.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import reading
from foretrain.architectures import family
from foretrain.errors import ForetrainError
from foretrain.predictors.deletepop import DeletePopPredictor
from foretrain.predictors.scaledl.graph import LayerGraph, layer_graph
from foretrain.run import Run, read_runs

FOLDS = 5
MOST = 200
"""Runs of a source, drawn at random, so that none decides alone."""
SOURCES: Mapping[str, tuple[str, int]] = {
    "nanotron": ("runs/nanotron_h100.jsonl", MOST),
    "vtrain": ("runs/vtrain_a100_single_node.jsonl", MOST),
    "mpt": ("runs/llm_foundry_mpt_a100.jsonl", MOST),
    "megatron_ci": ("runs/megatron_ci_a100.jsonl", MOST),
    "pollux": ("runs/pollux_t4.jsonl", MOST),
    "nvidia_llm": ("runs/nvidia_llm.jsonl", MOST),
    "dgxc": ("runs/dgxc_h100.jsonl", MOST),
    "deeplearningexamples": ("runs/nvidia_deeplearningexamples.jsonl", MOST),
    "automodel": ("runs/automodel_h100.jsonl", MOST),
    "sailor": ("runs/sailor_gh200.jsonl", MOST),
    "h200_fsdp": ("data/h200_fsdp.jsonl", MOST),
    "neusight": ("runs/neusight_transformers.jsonl", MOST),
    "h200_inference": ("data/h200_inference.jsonl", MOST),
    "h200_random": ("data/h200_random_steps.jsonl", 245),
    "h200_modern": ("data/h200_modern.jsonl", MOST),
    "h200_steps": ("data/h200_steps.jsonl", 150),
    "rtx3090": ("runs/timm_rtx3090.jsonl", 80),
    "ets_t4": ("runs/ets_t4.jsonl", 60),
}
"""Files below the folder of public runs (``runs/``) or the repository (``data/``), and how many runs of
each."""


@dataclass(frozen=True, kw_only=True)
class Case:
    source: str
    number: int
    """The line of its file."""
    run: Run

    @property
    def key(self) -> str:
        return f"{self.source}:{self.number}"

    @property
    def family(self) -> str:
        return family(self.run.job.workload.model)


def cases(data: Path, only: Sequence[str] = ()) -> list[Case]:
    """The sampled runs that measured a step time."""
    found = []
    for source, (name, most) in SOURCES.items():
        if only and source not in only:
            continue
        path = Path(name) if name.startswith("data/") else data / name
        mine = [
            Case(source=source, number=line, run=run)
            for line, run in read_runs(path)
            if run.measured.get("step_time_s", 0.0) > 0 and not run.job.cluster.device.is_cpu
        ]
        if len(mine) > most:
            mine = sorted(random.Random(0).sample(mine, most), key=lambda case: case.number)
        found += mine
    return found


def folds_of(found: Sequence[Case]) -> dict[str, int]:
    """The fold of each family: dealt out by the number of their runs, large ones first."""
    counts = Counter(case.family for case in found)
    filled, dealt = [0] * FOLDS, {}
    for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        fold = min(range(FOLDS), key=lambda i: filled[i])
        dealt[name], filled[fold] = fold, filled[fold] + count
    return dealt


def kept_folds(cache: Path, data: Path) -> dict[str, int]:
    """The folds, kept so that operator models go with them."""
    path = cache / "folds.json"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(folds_of(cases(data)), indent=1))
    found: dict[str, int] = json.loads(path.read_text())
    return found


def operators_without(fold: int, folds: Mapping[str, int], cache: Path) -> DeletePopPredictor:
    """Operator models that have seen no family of a fold."""
    folder = cache / f"operators{fold}"
    if (folder / "predictor.json").exists():
        return DeletePopPredictor.load(folder)
    left_out = frozenset(name for name, own in folds.items() if own == fold)
    learned = DeletePopPredictor().without(families=left_out)
    learned.save(folder)
    return learned


# Graphs of all runs


@dataclass(frozen=True, kw_only=True, eq=False)
class Known:
    """A run: what a forecast without its family says of it, and what was measured."""

    graph: LayerGraph
    facts: Mapping[str, Any]
    """Source, family, fold, device, devices, framework, mode, measured seconds and busy seconds."""


def facts_of(case: Case, fold: int) -> dict[str, Any]:
    job = case.run.job
    return {
        "key": case.key, "source": case.source, "family": case.family, "fold": fold,
        "device": job.cluster.device.name, "devices": job.cluster.world_size,
        "framework": job.workload.training.framework, "mode": job.workload.training.mode,
        "batch": job.workload.training.global_batch,
        "measured_s": case.run.measured["step_time_s"],
        "measured_busy_s": case.run.measured.get("device_busy_s", 0.0),
    }  # fmt: skip


def gather(data: Path, cache: Path, only: Sequence[str] = (), shipped: bool = False) -> None:
    """Write a file of graphs for every source and fold that has none yet; ``shipped``: by operator models
    that have seen all families."""
    folds = kept_folds(cache, data)
    everything = cases(data, only)
    for fold in range(FOLDS):
        for source in SOURCES:
            mine = [case for case in everything if case.source == source and folds.get(case.family) == fold]
            path = cache / f"{source}-{'shipped' if shipped else fold}.npz"
            if shipped:
                mine = [case for case in everything if case.source == source and case.family in folds]
            if not mine or path.exists():
                continue
            predictor = DeletePopPredictor() if shipped else operators_without(fold, folds, cache)
            found, refused = [], []
            for case in mine:
                try:
                    step = predictor.step(case.run.job)
                    spread = (
                        predictor.spread_of(step).quantities.get("step_time_s")
                        or predictor.spread_of(step).time
                    )
                    facts = {**facts_of(case, folds[case.family]), "spread": list(spread)}
                    found.append(Known(graph=layer_graph(step), facts=facts))
                except ForetrainError as error:
                    refused.append(f"{case.key}: {error}")
            write(path, found)
            print(f"{path.name}: {len(found)} runs, {len(refused)} refused {refused[:1]}", flush=True)


_ARRAYS = ("nodes", "edges", "share", "run")


def write(path: Path, found: Sequence[Known]) -> None:
    arrays = {f"{i}/{name}": getattr(one.graph, name) for i, one in enumerate(found) for name in _ARRAYS}
    numbers = [[one.graph.base_s, one.graph.additive_s, one.graph.busy_s] for one in found]
    facts = np.array(json.dumps([dict(one.facts) for one in found]))
    partial = path.with_suffix(".part.npz")
    np.savez_compressed(partial, **arrays, numbers=np.array(numbers), facts=facts)
    partial.rename(path)


def read(path: Path) -> Iterator[Known]:
    with np.load(path) as file:
        for i, facts in enumerate(json.loads(str(file["facts"]))):
            base_s, additive_s, busy_s = file["numbers"][i].tolist()
            graph = LayerGraph(
                **{name: file[f"{i}/{name}"] for name in _ARRAYS},
                base_s=base_s, additive_s=additive_s, busy_s=busy_s,
            )  # fmt: skip
            yield Known(graph=graph, facts=facts)


def read_all(cache: Path, shipped: bool = False) -> list[Known]:
    """Every run that was gathered, by source."""
    return [
        one
        for source in SOURCES
        for path in sorted(cache.glob(f"{source}-*.npz"))
        if path.stem.endswith("shipped") == shipped and path.stem.rpartition("-")[0] == source
        for one in read(path)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=reading.existing, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], help="sources")
    parser.add_argument("--shipped", action="store_true", help="by operator models that have seen all")
    options = parser.parse_args()
    gather(options.data, options.cache, options.only, options.shipped)


if __name__ == "__main__":
    reading.run(main)
