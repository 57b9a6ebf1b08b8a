"""Scores matrix products of devices left out: in bf16, fp8, fp8 by blocks and nvfp4.

    python benchmarks/products.py --data DIR/ops data/ops_h200.parquet

DIR/ops holds ``aic_gemm.csv.gz`` and, as they are learned from too, other published operators. Each device
of the former is left out of everything in turn, then each generation.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from foretrain.catalog import Catalog
from foretrain.costs.features import SCALED_PRODUCT, describe, family_of
from foretrain.costs.fitting import fit_costs
from foretrain.costs.learned import GENERAL
from foretrain.costs.measured import MeasuredOperator, load_measured
from foretrain.evaluate import Scores
from foretrain.measure.published import read_published

_LEFT_OUT = (
    ("a100-sxm-80gb",), ("h100-sxm-80gb",), ("h200-sxm-141gb",), ("b200",), ("gb200",),
    ("h100-sxm-80gb", "h200-sxm-141gb"), ("b200", "gb200"),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ops", nargs="*", type=Path, help="operator datasets of our own")
    parser.add_argument("--data", type=Path, required=True, help="folder of published operators")
    arguments = parser.parse_args()
    operators = [
        *read_published(arguments.data),
        *(one for path in arguments.ops for one in load_measured(path)),
    ]
    products = [one for one in operators if family_of(one) in ("product", SCALED_PRODUCT)]
    print(f"{len(products):,} products")
    for left_out in _LEFT_OUT:
        scored = [one for one in products if one.device in left_out and not one.key and kind_of(one)]
        print(f"without {', '.join(left_out)}")
        for kind, errors in score(scored, [one for one in products if one.device not in left_out]).items():
            scores = Scores.of_errors(errors)
            print(
                f"  {kind:34} n {scores.n:5}  MAPE {scores.mape:6.1%}  bias {scores.bias:+6.1%}", flush=True
            )


def kind_of(one: MeasuredOperator) -> str:
    """The format of a product and whose kernel it is; empty for what is not scored."""
    dtype = one.inputs[0].dtype if one.name == "mm" else one.inputs[1].dtype
    if dtype == "bfloat16":
        return dtype
    if family_of(one) != SCALED_PRODUCT:
        return ""
    cast = " with the cast of its input" if one.inputs[0].dtype == "bfloat16" else ""
    return f"{dtype.removesuffix('n_x2')}, {one.args['library']}{cast}"


def score(scored: Sequence[MeasuredOperator], learned: Iterable[MeasuredOperator]) -> dict[str, np.ndarray]:
    """Relative errors of operators by the models of others, by kind."""
    catalog, costs = Catalog.load(), fit_costs(learned)
    errors: dict[str, list[float]] = {}
    for family in ("product", SCALED_PRODUCT):
        members = [one for one in scored if family_of(one) == family]
        if not members:
            continue
        described = [describe(one, catalog.device(one.device, "device"), one.precision) for one in members]
        factors = costs.models[GENERAL][family].log_factors(
            [one.name for one in members], [one.figures for one in described]
        )
        for one, of, factor in zip(members, described, factors, strict=True):
            errors.setdefault(kind_of(one), []).append(of.ideal_s * np.exp(factor) / one.device_s - 1)
    return {kind: np.array(values) for kind, values in sorted(errors.items())}


if __name__ == "__main__":
    main()
