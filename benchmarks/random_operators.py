"""Lists operators of random layers to measure, balanced over kinds, layouts and dtypes at every point.

``python benchmarks/random_operators.py --bags 800 --known data/ops_h200.parquet --out operators.jsonl``, then
``foretrain measure ops operators.jsonl``. The layers are those of ``random_layers.py``.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from pathlib import Path

import reading
from foretrain.capture import capture_job
from foretrain.catalog import Catalog
from foretrain.costs.features import describe, family_of
from foretrain.costs.learned import load_costs
from foretrain.costs.measured import load_columns
from foretrain.errors import ForetrainError
from foretrain.graph.opset import traits
from foretrain.job import Job
from foretrain.measure.instances import Instance, collect, save_instances
from foretrain.predictors.deletepop.predictor import SHIPPED

DEVICE = "h200-sxm-141gb"
LAYERS = Path(__file__).with_name("random_layers.py")
PRECISIONS = {
    "fp32": "float32", "tf32": "float32", "amp-bf16": "bfloat16", "amp-fp16": "float16", "bf16": "bfloat16",
}  # fmt: skip
SHARES = {
    "convolution": 46, "norm": 12, "attention": 6, "recurrence": 4, "product": 5, "softmax": 4,
    "reduction": 5, "pointwise": 6, "copy": 5, "lookup": 4, "pooling": 6, "other": 3,
}  # fmt: skip
"""Of the operators, by group, in percent."""
LONGEST_S = 4e-3
"""Of an operator that is kept, by the shipped models."""


def jobs(bags: int, seed: int, rare: bool) -> list[Job]:
    """A training step for each bag, forward only in one of seven."""

    draw, precisions = random.Random(seed), list(PRECISIONS)
    made = []
    for number in range(bags):
        precision = precisions[number % len(precisions)]
        args = {"seed": draw.randrange(1 << 30), "count": 40, "dtype": PRECISIONS[precision]}
        if rare:
            args["rare"] = True
        training = {
            "mode": "infer" if number % 7 == 3 else "train",
            "precision": precision,
            "global_batch": 1,
            "optimizer": "sgd",
        }
        model = {"source": "python", "name": f"{LAYERS.name}:bag", "args": args}
        table = {"model": model, "training": training, "cluster": {"device": DEVICE}}
        made.append(Job.read(table, base=LAYERS.parent))
    return made


def group_of(instance: Instance) -> tuple[str, str]:
    """The group whose share it counts in, and what must be balanced inside of the group."""

    family, of = family_of(instance), traits(instance.name)
    group = family.removesuffix("_backward").replace("depthwise", "convolution")
    if of.kind in ("interpolation", "histogram", "transform", "loss", "unknown", "selection"):
        group = "other"
    spec = max(instance.inputs, key=lambda one: one.numel, default=None)
    layout = "" if spec is None else f"{len(spec.shape)}{'last' if spec.channels_last else ''}/{spec.dtype}"
    kind = instance.name
    if of.kind == "convolution":
        weight, groups = instance.inputs[1 + int(of.backward)], instance.args.get("groups", 1)
        form = "dense" if groups == 1 else "depthwise" if family.startswith("depthwise") else "grouped"
        pointwise = math.prod(weight.shape[2:]) == 1
        kind = f"{kind}/{form}/{instance.args.get('transposed')}/{pointwise}"
    return group if group in SHARES else "other", f"{kind}/{layout}"


def balanced(instances: list[Instance], seed: int) -> list[Instance]:
    """In an order of which every beginning has the shares of the groups, and inside of a group as much of
    each name, form, layout and dtype as there is (the square root of how many were drawn)."""
    by_group: dict[str, dict[str, list[Instance]]] = {}
    for instance in instances:
        group, kind = group_of(instance)
        by_group.setdefault(group, {}).setdefault(kind, []).append(instance)
    draw = random.Random(seed)
    placed = []
    for group, kinds in by_group.items():
        weights = {kind: math.sqrt(len(members)) for kind, members in kinds.items()}
        whole = sum(weights.values())
        for kind, members in kinds.items():
            draw.shuffle(members)
            rate = SHARES[group] * weights[kind] / whole
            placed += [((rank + draw.random()) / rate, member) for rank, member in enumerate(members)]
    return [member for _, member in sorted(placed, key=lambda item: item[0])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bags", type=int, default=800)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rare", action="store_true", help="Layers of sizes that few models have.")
    parser.add_argument("--count", type=int, default=60000, help="Operators to write at most.")
    parser.add_argument("--known", type=Path, nargs="*", default=[], help="Datasets of measured operators.")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()

    known = {key for path in arguments.known for key in load_columns(path)["key"]}
    graphs = []
    for job in jobs(arguments.bags, arguments.seed, arguments.rare):
        try:
            graphs.append((capture_job(job), job.workload.training.precision))
        except ForetrainError as error:
            print(f"left out: {error}", file=sys.stderr)
    drawn = [one for one in collect(graphs) if one.phase != "optimizer" and one.key not in known]
    costs, _, _ = load_costs(SHIPPED)
    device = Catalog.load().device(DEVICE)
    described = [describe(one, device, one.precision or "fp32") for one in drawn]
    times = costs._estimate([one.name for one in drawn], described, device)
    kept = [one for one, time_s in zip(drawn, times, strict=True) if time_s < LONGEST_S]
    save_instances(arguments.out, balanced(kept, arguments.seed)[: arguments.count])


if __name__ == "__main__":
    reading.run(main)
