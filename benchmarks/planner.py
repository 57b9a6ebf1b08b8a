"""Holds the planner against public sweeps: what its choice loses, how sure it is, recipes, and speed.

    python benchmarks/planner.py --data DIR [--only regret recipes speed] [--limit 0]

DIR holds runs/ with the public files (README.md there).

regret     of each model, batch and cluster with at least five measured plans: what the plan that is forecast
           to be the fastest takes over the fastest measured; whether that one is among the first five;
           how often the interval of the best time holds it; and how often the first is the best, beside the
           chance that was given for it. llm-analysis ranks the same plans where it is installed.
recipes    NVIDIA's plans for their models, held against the best plan found for the same cluster.
speed      plans a second for a Llama of 8B, and searches over 8 to 512 devices.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import io
import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

import foretrain
import reading
from foretrain import predictors
from foretrain.errors import ForetrainError
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.planner.abilities import ability_of
from foretrain.planner.certainty import drawn_s, first_is_best, of_the_best
from foretrain.planner.clusters import Wanted
from foretrain.planner.goal import Goal
from foretrain.planner.outcome import Plans
from foretrain.planner.planning import Effort, make_plans, prepared, space_on
from foretrain.planner.rating import rate_cut
from foretrain.predictors.base import Predictor
from foretrain.report.explain import explain
from foretrain.run import read_runs

SWEEPS = (
    "nanotron_h100",
    "vtrain_a100_single_node",
    "llm_foundry_mpt_a100",
    "megatron_ci_a100",
    "sailor_gh200",
    "dgxc_h100",
)
LEAST_PLANS = 5
FIRST = 5
Row = tuple[float, bool, float, bool, bool, bool, float]
"""Of a group: regret, the best among the first, Spearman, the first's interval and that of the best time hold
the best, the first is the best, and the chance that was given for it."""
BETTER = 0.10
"""By how much our plan must be the faster for the difference to be explained."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A plan with the mean of what was measured, and its forecast."""

    line: int
    job: Job
    seconds: float
    forecast: Forecast

    @property
    def forecast_s(self) -> float:
        return self.forecast["step_time_s"].median


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=reading.existing, required=True)
    parser.add_argument("--only", nargs="*", default=["regret", "recipes", "speed"])
    parser.add_argument("--limit", type=int, default=0, help="recipes to look at; 0 for all")
    options = parser.parse_args()
    predictor = predictors.get(predictors.DEFAULT)
    if "regret" in options.only:
        groups = {name: list(groups_of(predictor, options.data, name)) for name in SWEEPS}
        print_regret(predictor, groups)
    if "recipes" in options.only:
        print_recipes(predictor, options.data, options.limit)
    if "speed" in options.only:
        print_speed(predictor)


# Sweeps


def groups_of(predictor: Predictor, data: Path, name: str) -> Iterator[list[Measured]]:
    """Plans of one model, training and cluster that were measured in one environment."""
    found: dict[str, dict[str, list[tuple[int, Any]]]] = defaultdict(lambda: defaultdict(list))
    for line, run in read_runs(data / "runs" / f"{name}.jsonl"):
        if "step_time_s" not in run.measured:
            continue
        tables = run.job.to_dict()
        about = [run.provenance.get(key) for key in ("environment", "container")]
        setting = json.dumps([tables["model"], tables["training"], tables["cluster"], about], sort_keys=True)
        found[setting][json.dumps(tables.get("plan"), sort_keys=True)].append((line, run))
    for plans in found.values():
        if len(plans) < LEAST_PLANS:
            continue
        group: list[Measured] = []
        for runs in plans.values():
            line, run = runs[0]
            seconds = float(np.mean([one.measured["step_time_s"] for _, one in runs]))
            with contextlib.suppress(ForetrainError):
                forecast = predictor.predict(run.job)
                group.append(Measured(line=line, job=run.job, seconds=seconds, forecast=forecast))
        yield group


def print_regret(predictor: Predictor, groups: dict[str, list[list[Measured]]]) -> None:
    print(
        f"{'sweep':26s} {'groups':>6s} {'regret':>7s} {'p90':>6s} {'first 5':>7s} {'Spearman':>8s} "
        f"{'interval':>8s} {'of the best':>11s} {'best':>5s} {'said':>5s}"
    )
    rows: list[Row] = []
    for name, of_file in groups.items():
        own = [_scored(predictor, group) for group in of_file]
        rows += own
        _print_rows(name, own)
    _print_rows("all", rows)
    peer = _llm_analysis()
    if peer is None:
        print("llm-analysis: not installed")
    else:
        _print_peer(peer, groups["nanotron_h100"])
    for name, of_file in groups.items():
        for group in of_file:
            chosen, best = _chosen(group), min(group, key=lambda one: one.seconds)
            if (lost := chosen.seconds / best.seconds - 1) > 0.05:
                print(
                    f"  {name}: line {chosen.line} ({chosen.seconds:.3f} s, forecast "
                    f"{chosen.forecast_s:.3f}) instead of {best.line} "
                    f"({best.seconds:.3f} s, {best.forecast_s:.3f}): {lost:.0%}"
                )


def _chosen(group: Sequence[Measured]) -> Measured:
    return min(group, key=lambda one: one.forecast_s)


def _scored(predictor: Predictor, group: Sequence[Measured]) -> Row:
    ranked = sorted(group, key=lambda one: one.forecast_s)
    best = min(group, key=lambda one: one.seconds)
    first = ranked[0].forecast["step_time_s"]
    times_s = drawn_s(predictor, [one.forecast for one in ranked])
    of_best = of_the_best(times_s)
    order = spearmanr([one.seconds for one in group], [one.forecast_s for one in group])[0]
    return (
        ranked[0].seconds / best.seconds - 1.0,
        best in ranked[:FIRST],
        float(order),
        first.low <= best.seconds <= first.high,
        of_best.low <= best.seconds <= of_best.high,
        ranked[0] is best,
        first_is_best(times_s, [1.0] * len(ranked)),
    )


def _print_rows(name: str, rows: Sequence[Row]) -> None:
    if not rows:
        print(f"{name:26s} {0:6d}  none with {LEAST_PLANS} plans")
        return
    columns = (np.array(column, float) for column in zip(*rows, strict=True))
    regrets, among, orders, first, best, was, said = columns
    print(
        f"{name:26s} {len(rows):6d} {regrets.mean():7.1%} {np.quantile(regrets, 0.9):6.1%} "
        f"{among.mean():7.0%} {orders.mean():8.3f} {first.mean():8.0%} {best.mean():11.0%} "
        f"{was.mean():5.0%} {said.mean():5.0%}",
        flush=True,
    )


# Another tool


def _llm_analysis() -> Any:
    logging.disable(logging.CRITICAL)
    try:
        return importlib.import_module("llm_analysis.analysis")
    except ImportError:
        return None


def _print_peer(module: Any, groups: Sequence[Sequence[Measured]]) -> None:
    config = importlib.import_module("llm_analysis.config")
    regrets, orders, refused, plans, began_s = [], [], 0, 0, time.process_time()
    for group in groups:
        rated = []
        for one in group:
            plans += 1
            try:
                rated.append((_peer_s(module, config, one.job), one.seconds))
            except (AssertionError, ValueError, KeyError, TypeError, ZeroDivisionError):
                refused += 1
        if len(rated) >= LEAST_PLANS:
            regrets.append(min(rated)[1] / min(seconds for _, seconds in rated) - 1.0)
            orders.append(float(spearmanr([a for a, _ in rated], [b for _, b in rated])[0]))
    spent_s = time.process_time() - began_s
    if regrets:
        print(
            f"llm-analysis (its forward pass) on nanotron: {len(regrets)} groups, mean regret "
            f"{np.mean(regrets):.1%}, p90 {np.quantile(regrets, 0.9):.1%}, "
            f"Spearman {np.mean(orders):.3f}, {refused} plans refused, {plans / spent_s:.0f} plans/s"
        )


def _peer_s(module: Any, config: Any, job: Job) -> float:
    own, plan, training = job.workload.model.config, job.plan, job.workload.training
    assert own is not None
    name = f"{own['hidden_size']}-{own['num_hidden_layers']}-{own['intermediate_size']}"
    hidden = int(own["hidden_size"])
    config.model_configs[name] = config.ModelConfig(
        name=name,
        num_layers=own["num_hidden_layers"],
        n_head=own["num_attention_heads"],
        hidden_dim=hidden,
        vocab_size=own["vocab_size"],
        num_key_value_heads=own.get("num_key_value_heads"),
        ffn_embed_dim=own["intermediate_size"],
        expansion_ratio=own["intermediate_size"] / hidden,
        max_seq_len=training.sequence,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        found = module.train(
            model_name=name,
            gpu_name="h100-sxm-80gb",
            batch_size_per_gpu=job.micro_batch,
            global_batch_size=training.global_batch,
            seq_len=training.sequence,
            ds_zero=1 if plan.shard == "zero1" else 0,
            dp_size=plan.data,
            tp_size=plan.tensor,
            pp_size=plan.pipeline,
            total_num_gpus=job.cluster.world_size,
            total_num_tokens=training.global_batch * (training.sequence or 1),
            mlp_gated_linear_units=True,
            flops_efficiency=0.5,
            log_level="ERROR",
        )
    # its time of a whole step comes from FLOPs alone, the same for every plan
    return float(found["latency_fwd"]) * job.accumulation


# Recipes


def print_recipes(predictor: Predictor, data: Path, limit: int) -> None:
    """What NVIDIA runs, over the best that is found for the same devices, both forecast."""
    seen: set[str] = set()
    rows: list[float] = []
    for line, run in read_runs(data / "runs" / "nvidia_llm.jsonl"):
        job = run.job
        key = json.dumps([job.to_dict()[part] for part in ("model", "training", "cluster", "plan")])
        if key in seen or job.workload.training.framework not in ("megatron", "pytorch"):
            continue
        seen.add(key)
        if limit and len(rows) >= limit:
            break
        found = _recipe(predictor, line, job)
        rows += [found] if found is not None else []
    gains = np.array(rows)
    if len(gains):
        print(
            f"recipes: {len(gains)}; as good as ours or within {BETTER:.0%} in "
            f"{np.mean(gains <= BETTER):.0%}, median {np.median(gains):.1%}, "
            f"p90 {np.quantile(gains, 0.9):.1%}, least {gains.min():.1%}"
        )


def _recipe(predictor: Predictor, line: int, job: Job) -> float | None:
    began_s = time.monotonic()
    ability = ability_of(None, job.workload.training.framework)
    planned, _ = prepared(job, ability)
    try:
        recipe = predictor.predict(dataclasses.replace(planned, plan=job.plan))
        plans = _search(predictor, job, Wanted(), None)
    except ForetrainError as error:
        print(f"  line {line}: {error}")
        return None
    chance = recipe.out_of_memory_chance
    if not plans:
        print(f"  line {line}: no plan found; the recipe's chance to run out of memory is {chance}")
        return None
    best = plans[0]
    gain = recipe["step_time_s"].median / best.step_time_s.median - 1.0
    short = f", the recipe may not fit ({chance:.0%})" if (chance or 0.0) > 1.0 - Goal().fits else ""
    model = job.workload.model
    name = f"{model.name or (model.config or {}).get('model_type')}"
    print(
        f"  line {line}: {name} {job.workload.training.precision} on {job.cluster.world_size} x "
        f"{job.cluster.device.name}: recipe {_words(job)} {recipe['step_time_s'].median:.2f} s, ours "
        f"{_words(best.job)} {best.step_time_s.median:.2f} s: {gain:+.1%}{short} "
        f"({time.monotonic() - began_s:.1f} s)",
        flush=True,
    )
    if gain > BETTER:
        print(f"      {next(iter(explain(best.forecast, recipe).sentences), '')} (A: ours, B: the recipe)")
    return gain


def _words(job: Job) -> str:
    plan = job.plan
    degrees = f"tp{plan.tensor} pp{plan.pipeline} cp{plan.context} ep{plan.expert}"
    return f"{degrees} vp{plan.virtual_stages or 1} mbs{job.micro_batch} {plan.recompute}"


def _search(predictor: Predictor, job: Job, wanted: Wanted, framework: str | None) -> Plans:
    return make_plans(
        job, predictor, goal=Goal(), wanted=wanted, target=framework, effort=Effort(cached=False)
    )


# Speed


def print_speed(predictor: Predictor) -> None:
    options: dict[str, Any] = {"precision": "bf16", "optimizer": "adamw", "sequence": 4096}
    options["node"] = "dgx-h100"
    ability = ability_of("megatron", "megatron")
    job, _ = prepared(
        foretrain.make_job("Llama-3.1-8B", batch=512, nodes=8, framework="megatron", **options), ability
    )
    space = space_on(job.cluster, job, ability, {})
    cuts = space.cuts()
    for _ in range(2):  # the first time traces the model
        began_s, considered, costed = time.process_time(), 0, 0
        for cut in cuts:
            rated = rate_cut(predictor, space, cut, most=5, below_s=math.inf, risk=0.1)
            considered, costed = considered + rated.considered, costed + rated.costed
        spent_s = time.process_time() - began_s
        print(
            f"speed: Llama 3.1 8B on 64 H100: {considered} plans ({costed} costed) in {spent_s:.1f} s of one "
            f"core: {considered / spent_s:.0f} plans/s, {costed / spent_s:.0f} costed/s",
            flush=True,
        )
    for model, batch in (("Llama-3.1-70B", 1024), ("Qwen3-235B-A22B", 1024)):
        wanted = Wanted(counts=(8, 16, 32, 64, 128, 256, 512))
        large = foretrain.make_job(model, batch=batch, nodes=1, framework="megatron", **options)
        for how in ("cold", "traced before"):
            began_s = time.monotonic()
            plans = _search(predictor, large, wanted, "megatron")
            print(
                f"speed: {model} on 8 to 512 H100, {how}: {time.monotonic() - began_s:.1f} s, "
                f"{plans.considered} plans, {plans.costed} costed",
                flush=True,
            )


if __name__ == "__main__":
    reading.run(main)
