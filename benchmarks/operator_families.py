"""Scores learned operator costs by form of operator, on operators that were not learned from.

    python benchmarks/operator_families.py [--data DIR] [--only shapes layers forms device]

Trained on operators of models (data/ops_h200.parquet, ops_h200_random.parquet) and tested on those of random
layers (ops_h200_layers.parquet): ``shapes``. With half of the layers learned too, each half in turn:
``layers``. With everything learned but forms of one kind: ``forms``. With the H200 left out, by the public
operators of DIR/ops of other devices: ``device``. The error is the mean of |forecast / measured - 1|, beside
it the same weighted by measured time; the bias is forecast over measured time, summed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

import reading
from foretrain.catalog import Catalog
from foretrain.cluster import Device
from foretrain.costs import fitting
from foretrain.costs.features import SERIAL, describe, family_of
from foretrain.costs.learned import GENERAL, LearnedCosts
from foretrain.costs.measured import MeasuredOperator, load_measured
from foretrain.graph import TensorSpec
from foretrain.graph.opset import traits
from foretrain.measure.published import read_published

DEVICE = "h200-sxm-141gb"
MODELS = ("ops_h200.parquet", "ops_h200_random.parquet")
LAYERS = "ops_h200_layers.parquet"
FEW_PIXELS = 1024
"""Of all samples together, below which a batch norm counts as one over few."""
LEAST = 20
"""Operators of a form that is shown."""
LEFT_OUT = (
    "grouped",
    "3-D",
    "transposed",
    "1-D",
    "few pixels",
    "group norm",
    "with bias",
    "bag",
    "recurrence",
)
"""Words of forms that are left out together."""


def form_of(operator: MeasuredOperator) -> str:
    """What people would call it; gradients apart."""
    of, name = traits(operator.name), operator.name
    form = _FORMS[of.kind](operator) if of.kind in _FORMS else of.kind
    if name.startswith("_ctc"):
        form = "CTC loss"
    return f"{form}, gradient" if of.backward else form


def _convolution(operator: MeasuredOperator) -> str:
    backward = int(traits(operator.name).backward)
    x, weight = operator.inputs[backward], operator.inputs[1 + backward]
    family, groups = family_of(operator), operator.args.get("groups", 1)
    grouped = "depthwise " if family.startswith("depthwise") else "grouped " if groups > 1 else ""
    rank = {3: "1-D ", 5: "3-D "}.get(len(x.shape), "1x1 " if math.prod(weight.shape[2:]) == 1 else "")
    transposed = "transposed " if operator.args.get("transposed") else ""
    return f"{transposed}{grouped}{rank}convolution{_layout(x)}"


def _norm(operator: MeasuredOperator) -> str:
    x = max(operator.inputs, key=lambda spec: spec.numel)
    if "batch_norm" not in operator.name:
        return f"group norm{_layout(x)}"
    few = x.numel // max(1, x.shape[1]) < FEW_PIXELS
    eval_mode = operator.args.get("training") is False or operator.args.get("train") is False
    return f"batch norm{', inference' if eval_mode else ''}{' over few pixels' if few else ''}{_layout(x)}"


def _layout(spec: TensorSpec) -> str:
    return ", channels last" if spec.channels_last else ""


_FORMS: dict[str, Callable[[MeasuredOperator], str]] = {
    "convolution": _convolution,
    "channel norm": _norm,
    "attention": lambda one: f"attention{' with bias' if one.args.get('attn_bias') is not None else ''}",
    "embedding": lambda one: "bag of embeddings" if "bag" in one.name else "embedding",
    "batched product": lambda one: "product",
    "vector product": lambda one: "product",
}


Rows = Sequence[MeasuredOperator]
Column = npt.NDArray[np.float64]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=reading.existing, help="the folder of public data")
    parser.add_argument("--only", nargs="*", default=["shapes", "layers", "forms"])
    options = parser.parse_args()
    models = [one for name in MODELS for one in load_measured(Path("data") / name)]
    layers = list(load_measured(Path("data") / LAYERS))
    forms = np.array([form_of(one) for one in layers])
    seconds = np.array([one.device_s for one in layers])
    device = Catalog.load().device(DEVICE)
    print(f"{'case':8s} {'form':56s} {'n':>6s} {'error':>7s} {'weighted':>8s} {'bias':>6s}")
    if "shapes" in options.only:
        show("shapes", forms, seconds, estimate(own_models(models), layers, device))
    if "layers" in options.only:
        show("layers", forms, seconds, by_halves(models, layers, device))
    if "forms" in options.only:
        show("forms", forms, seconds, each_form_out([*models, *layers], layers, forms, device))
    if "device" in options.only:
        costs = fitting.fit_costs(read_published(options.data / "ops"))
        show("device", forms, seconds, estimate(costs, layers, device))


def own_models(operators: Iterable[MeasuredOperator], families: frozenset[str] | None = None) -> LearnedCosts:
    """Models of the device alone, as ``fit_costs`` makes them for a device with many operators."""
    device = Catalog.load().device(DEVICE)
    samples: dict[str, list[fitting._Sample]] = {}
    for one in operators:
        if families is not None and family_of(one) not in families:
            continue
        described = describe(one, device, one.precision)
        samples.setdefault(described.family, []).append(fitting._Sample(one, described, one.device_s))
    models = {
        family: fitting._fit(family, group, fitting._FOR_ONE)
        for family, group in sorted(samples.items())
        if families is None or family in families | {SERIAL}
    }
    return LearnedCosts({GENERAL: models})


def estimate(costs: LearnedCosts, operators: Rows, device: Device) -> Column:
    """Seconds by the models; nothing is looked up."""
    described = [describe(one, device, one.precision) for one in operators]
    return costs._estimate([one.name for one in operators], described, device)


def by_halves(models: Rows, layers: Rows, device: Device) -> Column:
    half = np.array([int(one.key[-1], 16) % 2 for one in layers])
    times = np.zeros(len(layers))
    for side in (0, 1):
        learned = [one for one, of in zip(layers, half, strict=True) if of != side]
        tested = np.flatnonzero(half == side)
        times[tested] = estimate(
            own_models([*models, *learned]), [layers[i] for i in tested.tolist()], device
        )
    return times


def each_form_out(operators: Rows, layers: Rows, forms: npt.NDArray[np.str_], device: Device) -> Column:
    """Forms with each of some words by models that have learned from all other forms of their families."""
    known = np.array([form_of(one) for one in operators])
    times = np.full(len(layers), np.nan)
    for word in LEFT_OUT:
        tested = np.flatnonzero([word in form and bool(np.isnan(times[i])) for i, form in enumerate(forms)])
        families = frozenset(family_of(layers[i]) for i in tested.tolist())
        learned = [one for one, form in zip(operators, known, strict=True) if word not in form]
        times[tested] = estimate(own_models(learned, families), [layers[i] for i in tested.tolist()], device)
    return times


def show(case: str, forms: npt.NDArray[np.str_], seconds: Column, times: Column) -> None:
    """A line for each form with enough operators, and one for all."""
    told = ~np.isnan(times)
    forms, seconds, times = forms[told], seconds[told], times[told]
    kinds, counts = np.unique(forms, return_counts=True)
    for kind in [*kinds[counts >= LEAST], "all"]:
        rows = np.ones(len(forms), dtype=np.bool_) if kind == "all" else forms == kind
        apart = np.abs(times[rows] - seconds[rows])
        error, weighted = np.mean(apart / seconds[rows]), apart.sum() / seconds[rows].sum()
        bias = times[rows].sum() / seconds[rows].sum() - 1
        print(
            f"{case:8s} {kind:56s} {rows.sum():6d} {100 * error:6.1f}% {100 * weighted:7.1f}% "
            f"{100 * bias:+5.0f}%",
            flush=True,
        )


if __name__ == "__main__":
    reading.run(main)
