"""Compares D-optimal and random choice of operators to measure, by regressors' errors on unseen operators.

    python benchmarks/design_study.py [--plot docs/img/design_study.svg]
    python benchmarks/design_study.py --data DIR --device a100-pcie-40gb

The first studies our own data/ops_h200.parquet; DIR/ops/neusight_fp32.csv.gz holds operator times of NeuSight
(MIT licence). Operators whose shape, batch apart, is in a held-out set are never candidates.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pandas as pd

import reading
from foretrain.catalog import Catalog
from foretrain.costs.measured import load_columns
from foretrain.evaluate import Scores
from foretrain.measure.candidates import Array, Candidates, operator_candidates, table_candidates
from foretrain.measure.design import design
from foretrain.measure.design.controls import cheap_random_design, grid_design, random_design
from foretrain.measure.design.criteria import Indices
from foretrain.measure.design.d_optimal import greedy, half_d_optimal

POOL = 16_000
"""Candidates to choose from, drawn anew for every seed."""
COUNTS = (100, 200, 500, 1000, 2000, 5000)
PRICED_COUNTS = COUNTS[:3]
"""Budgets in time are what so many operators take on average."""
COUNTED = ("random", "grid", "D linear", "D quadratic", "D kernel", "half D, half random")
PRICED = ("random", "cheap random", "grid", "D linear", "D quadratic", "half D, half random")
SETUP_S, REPEATS = 0.005, 100
"""What a measurement takes: its set-up, and repeats of the operator at its roofline time."""
DIMS = {
    "bmm": ("B", "M", "N", "K"),
    "linear": ("M", "N", "K"),
    "conv": ("B", "c_in", "c_out", "kernel", "size", "stride"),
    "rows": ("B", "H"),
}
KINDS = {"convolution": "convolution", "convolution_backward": "convolution backward"}
KINDS |= dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), "matrix product")
FIGURES = {"LightGBM": "mape", "log-quadratic": "median"}
"""The error shown: the mean, but the median where a few extrapolations of a polynomial in logarithms would
decide the mean."""
OPERANDS = {"add": 3, "div": 3, "mul": 3, "pow": 3}


@dataclass(frozen=True)
class Operators:
    """Measured operators: what a predictor may know of them, times, shape groups and the source's tests."""

    rows: list[dict[str, Any]]
    time_s: Array
    roofline_s: Array
    groups: np.ndarray[Any, np.dtype[Any]]
    real: np.ndarray[Any, np.dtype[np.bool_]]

    def __getitem__(self, mask: Any) -> Operators:
        places = np.arange(len(self.rows))[mask]
        return Operators(
            [self.rows[i] for i in places],
            self.time_s[mask],
            self.roofline_s[mask],
            self.groups[mask],
            self.real[mask],
        )


# Data


def neusight(path: Path, device: str) -> Operators:
    """The operators of one device; its test set holds the shapes of real models, the rest random shapes."""
    table = pd.read_csv(path)
    table = table[table.device == device].drop_duplicates(
        subset=[name for name in table.columns if name not in ("latency_s", "split")]
    )
    known = Catalog.load().device(device, "device")
    rows, groups = [], []
    for row in table.to_dict("records"):
        family = row["op"] if row["op"] in DIMS else "rows"
        dims = [int(row[name]) for name in DIMS[family]]
        flops, size = WORK[family](row["op"], *dims)
        roofline = max(flops / (known.fp32 or math.inf), size / known.memory_bytes_per_s)
        rows.append(
            {
                "op": row["op"],
                "family": family,
                "dims": dims,
                "flops": flops,
                "bytes": size,
                "cost_s": SETUP_S + REPEATS * roofline,
            }
        )
        groups.append(f"{family} {dims[1:]}")
    cost = np.array([row["cost_s"] for row in rows])
    return Operators(
        rows,
        table.latency_s.to_numpy(),
        (cost - SETUP_S) / REPEATS,
        np.array(groups),
        (table.split == "test").to_numpy(),
    )


def _bmm(op: str, b: int, m: int, n: int, k: int) -> tuple[float, float]:
    return 2.0 * b * m * n * k, 4.0 * b * (m * n + n * k + m * k)


def _linear(op: str, m: int, n: int, k: int) -> tuple[float, float]:
    return _bmm(op, 1, m, n, k)


def _conv(op: str, b: int, c_in: int, c_out: int, kernel: int, size: int, stride: int) -> tuple[float, float]:
    out = math.ceil(size / stride)
    return 2.0 * b * c_in * c_out * (kernel * out) ** 2, 4.0 * (
        b * c_in * size**2 + b * c_out * out**2 + c_in * c_out * kernel**2
    )


def _rows(op: str, b: int, h: int) -> tuple[float, float]:
    return float(b * h), 4.0 * b * h * OPERANDS.get(op, 2)


WORK: dict[str, Callable[..., tuple[float, float]]] = {
    "bmm": _bmm,
    "linear": _linear,
    "conv": _conv,
    "rows": _rows,
}


def h200(path: Path) -> Operators:
    """Our own measurements (``foretrain measure ops``) of all phases in four precisions."""
    known = Catalog.load().device("h200", "device")
    peaks = {"float32": known.fp32, "float32tf32": known.tf32, "bfloat16": known.bf16, "float16": known.fp16}
    columns = load_columns(path)
    table = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    table = [row for row in table if row["inputs"] and row["cold_s"] > 0]
    common = {name for name, count in Counter(row["name"] for row in table).items() if count >= 400}
    rows, groups = [], []
    for row in table:
        shapes = [shape for shape, *_ in row["inputs"]]
        dtype = row["inputs"][0][1] + row["precision"]
        roofline = max(
            row["flops"] / (peaks.get(dtype) or peaks["float32"] or math.inf),
            row["bytes"] / known.memory_bytes_per_s,
            1e-9,
        )
        rows.append(
            {
                "op": row["name"] if row["name"] in common else "other",
                "name": row["name"],
                "family": KINDS.get(row["name"], "memory"),
                "dtype": dtype if dtype in peaks else "other",
                "dims": [dim for shape in shapes[:2] for dim in shape][:6],
                "flops": float(row["flops"]),
                "bytes": float(row["bytes"]),
                "cost_s": SETUP_S + REPEATS * roofline,
            }
        )
        groups.append(f"{row['name']} {[shape[1:] or shape for shape in shapes[:3]]}")
    cost = np.array([row["cost_s"] for row in rows])
    times = np.array([row["cold_s"] for row in table])
    return Operators(
        rows, times, (cost - SETUP_S) / REPEATS, np.array(groups), np.zeros(len(rows), dtype=bool)
    )


def split(operators: Operators, seed: int, share: float = 0.2) -> tuple[Operators, dict[str, Operators]]:
    """Candidates, and what they are tested on: a share of the shape groups, and the shapes of real models."""
    names = np.unique(operators.groups[~operators.real])
    held = np.random.default_rng(seed).choice(names, int(share * len(names)), replace=False)
    out = np.isin(operators.groups, held) & ~operators.real
    seen = ~out & ~np.isin(operators.groups, operators.groups[operators.real])
    tests = {"unseen shapes": operators[out]} | (
        {"real models": operators[operators.real]} if operators.real.any() else {}
    )
    candidates = np.flatnonzero(seen)
    if len(candidates) > POOL:
        candidates = np.sort(np.random.default_rng(seed).choice(candidates, POOL, replace=False))
    return operators[candidates], tests


# Methods: the candidates and a budget in seconds or in operators, to the chosen rows


class Choice:
    """The bases of one set of candidates, computed once."""

    def __init__(self, operators: Operators, seed: int) -> None:
        rows = operators.rows
        self.seed = seed
        self.linear = operator_candidates(rows)
        self.quadratic = operator_candidates(rows, quadratic=True, per_family=True)
        self.fourier = fourier_candidates(rows, self.linear, seed)
        self.space = table_candidates(
            {
                name: column
                for name, column in zip(self.linear.names, self.linear.features.T, strict=True)
                if "dim" in name or "op" in name
            },
            self.linear.cost_s,
            rows,
        )
        self._path: Indices | None = None

    def choose(self, method: str, count: int, budget_s: float | None) -> Indices:
        return METHODS[method](self, count, budget_s)

    def limit(self, count: int, budget_s: float | None) -> tuple[Array, float]:
        cost = self.linear.cost_s
        return (np.ones_like(cost), float(count)) if budget_s is None else (cost, budget_s)

    def random(self, count: int, budget_s: float | None) -> Indices:
        return random_design(self.space.features, *self.limit(count, budget_s), seed=self.seed)

    def cheap(self, count: int, budget_s: float | None) -> Indices:
        return cheap_random_design(self.space.features, *self.limit(count, budget_s), seed=self.seed)

    def grid(self, count: int, budget_s: float | None) -> Indices:
        return grid_design(self.space.features, *self.limit(count, budget_s), seed=self.seed)

    def d_optimal(self, candidates: Candidates, count: int, budget_s: float | None) -> Indices:
        limits: dict[str, Any] = {"count": count} if budget_s is None else {"budget_s": budget_s}
        return design("d-optimal", candidates, **limits, seed=self.seed).chosen

    def half(self, count: int, budget_s: float | None) -> Indices:
        """Half of the budget D-optimal, the rest random."""
        return half_d_optimal(self.quadratic.features, *self.limit(count, budget_s), seed=self.seed)

    def kernel(self, count: int, budget_s: float | None) -> Indices:
        """Greedy only, along one path: a smaller budget is its beginning."""
        cost, budget = self.limit(count, budget_s)
        if budget_s is not None:
            return greedy(self.fourier.features, cost, budget, ridge=0.01)
        if self._path is None:
            self._path = greedy(self.fourier.features, cost, COUNTS[-1], ridge=0.01)
        return self._path[:count]


def fourier_candidates(
    rows: list[dict[str, Any]], linear: Candidates, seed: int, size: int = 128
) -> Candidates:
    """Random Fourier features (Rahimi and Recht 2007) of a Gaussian kernel, for a nonparametric model."""
    random = np.random.default_rng(seed)
    points = linear.features[:, 1:]
    sample = points[random.choice(len(points), min(500, len(points)), replace=False)]
    width = np.median(np.sqrt(((sample[:, None] - sample[None]) ** 2).sum(axis=-1))) / 2
    waves = points @ (random.normal(size=(points.shape[1], size)) / width) + random.uniform(
        0, 2 * np.pi, size
    )
    names = tuple(f"wave {place}" for place in range(size))
    return Candidates(
        names=names, features=math.sqrt(2 / size) * np.cos(waves), cost_s=linear.cost_s, labels=rows
    )


METHODS: dict[str, Callable[[Choice, int, float | None], Indices]] = {
    "random": Choice.random,
    "cheap random": Choice.cheap,
    "grid": Choice.grid,
    "D linear": lambda choice, count, budget_s: choice.d_optimal(choice.linear, count, budget_s),
    "D quadratic": lambda choice, count, budget_s: choice.d_optimal(choice.quadratic, count, budget_s),
    "D kernel": Choice.kernel,
    "half D, half random": Choice.half,
}


# Regressors: measured operators in, a function from operators to log time out


def _name(row: dict[str, Any]) -> str:
    return str(row.get("name", row["op"]))


def tree_features(operators: Operators, kinds: dict[str, int]) -> Array:
    rank = max(kinds["rank"], 1)
    dims = np.full((len(operators.rows), rank), np.nan)
    for place, row in enumerate(operators.rows):
        known = row["dims"][:rank]
        dims[place, : len(known)] = np.log(np.maximum(known, 1))
    flops, size = (np.array([max(row[name], 1.0) for row in operators.rows]) for name in ("flops", "bytes"))
    marks = [[kinds[f"name {_name(row)}"], kinds[f"dtype {row.get('dtype')}"]] for row in operators.rows]
    return np.column_stack(
        [np.array(marks, dtype=float), dims, np.log(flops), np.log(size), np.log(flops / size)]
    )


def fit_trees(train: Operators, kinds: dict[str, int], seed: int) -> Callable[[Operators], Array]:
    """LightGBM on the logarithm of time over roofline time."""
    settings = {
        "objective": "l2",
        "learning_rate": 0.05,
        "num_leaves": 31,
        "min_data_in_leaf": 5,
        "verbose": -1,
        "seed": seed,
        "num_threads": 1,
        "feature_fraction": 0.9,
        "bagging_fraction": 0.9,
        "bagging_freq": 1,
        "deterministic": True,
        "force_row_wise": True,
    }
    target = np.log(train.time_s / train.roofline_s)
    data = lightgbm.Dataset(
        tree_features(train, kinds), target, categorical_feature=[0, 1], free_raw_data=True
    )
    model = lightgbm.train(settings, data, num_boost_round=300)
    return lambda test: np.asarray(model.predict(tree_features(test, kinds))) + np.log(test.roofline_s)


def fit_quadratic(train: Array, target: Array) -> Callable[[Array], Array]:
    """Ridge regression on the per-family quadratic basis: the model for which "D quadratic" is optimal."""
    moment = train.T @ train
    moment.flat[:: len(moment) + 1] += 0.1
    coefficients = np.linalg.solve(moment, train.T @ target)
    return lambda test: test @ coefficients


# The study


def study(operators: Operators, seeds: int, methods: list[str]) -> Iterator[dict[str, Any]]:
    """Errors by budget (operators, or the time of so many on average), method, regressor and test set."""
    names, dtypes = (
        sorted({_name(row) for row in operators.rows}),
        sorted({str(row.get("dtype")) for row in operators.rows}),
    )
    kinds = {f"name {name}": code for code, name in enumerate(names)} | {
        f"dtype {name}": code for code, name in enumerate(dtypes)
    }
    kinds["rank"] = max(len(row["dims"]) for row in operators.rows)
    basis = operator_candidates(operators.rows, quadratic=True, per_family=True).features
    places = {id(row): place for place, row in enumerate(operators.rows)}
    for seed in range(seeds):
        pool, tests = split(operators, seed)
        choice = Choice(pool, seed)
        for priced in (False, True):
            for count in PRICED_COUNTS if priced else COUNTS:
                budget_s = float(choice.linear.cost_s.mean()) * count if priced else None
                for method in [one for one in (PRICED if priced else COUNTED) if one in methods]:
                    chosen = choice.choose(method, count, budget_s)
                    train = pool[chosen]
                    trees = fit_trees(train, kinds, seed)
                    at = [places[id(row)] for row in train.rows]
                    quadratic = fit_quadratic(basis[at], np.log(train.time_s / train.roofline_s))
                    for name, test in tests.items():
                        to = [places[id(row)] for row in test.rows]
                        answers = {
                            "LightGBM": trees(test),
                            "log-quadratic": quadratic(basis[to]) + np.log(test.roofline_s),
                        }
                        for regressor, answer in answers.items():
                            scores = Scores.of(test.time_s, np.exp(np.clip(answer, -30, 10)))
                            yield {
                                "seed": seed,
                                "priced": priced,
                                "count": count,
                                "method": method,
                                "regressor": regressor,
                                "test": name,
                                "n": len(chosen),
                                "mape": scores.mape,
                                "median": scores.median_ape,
                            }
        print(
            f"seed {seed}: {len(pool.rows):,} candidates, "
            f"{', '.join(f'{len(test.rows):,} {name}' for name, test in tests.items())}",
            flush=True,
        )


def markdown(
    results: list[dict[str, Any]], methods: list[str], priced: bool, regressor: str, test: str
) -> str:
    """A table of errors, mean and standard deviation over the seeds; the best of a line is bold."""
    cells = _cells(results, priced, regressor, test)
    methods = [method for method in (PRICED if priced else COUNTED) if method in methods]
    unit = "time of so many on average" if priced else "operators"
    lines = [f"| {unit} | {' | '.join(methods)} |", "|---" * (len(methods) + 1) + "|"]
    for count in sorted({key[0] for key in cells}):
        means = {method: np.mean(cells[count, method]) for method in methods}
        best = min(means, key=lambda method: means[method])
        shown = [f"{means[method]:.1%} ± {np.std(cells[count, method]):.1%}" for method in methods]
        lines.append(
            f"| {count:,} | "
            + " | ".join(
                f"**{text}**" if method == best else text for method, text in zip(methods, shown, strict=True)
            )
            + " |"
        )
    return "\n".join(lines)


def _cells(
    results: list[dict[str, Any]], priced: bool, regressor: str, test: str
) -> dict[tuple[int, str], list[float]]:
    cells: dict[tuple[int, str], list[float]] = defaultdict(list)
    for one in results:
        if (one["priced"], one["regressor"], one["test"]) == (priced, regressor, test):
            cells[one["count"], one["method"]].append(one[FIGURES[regressor]])
    return cells


# The plot, as SVG by hand: it needs no browser and no library

COLORS = ("#444444", "#999999", "#c77cff", "#1f77b4", "#2ca02c", "#d62728")


def svg(results: list[dict[str, Any]], methods: list[str], device: str) -> str:
    panels = [
        (regressor, test) for regressor in FIGURES for test in dict.fromkeys(one["test"] for one in results)
    ]
    width, height = 420, 300
    parts = []
    for place, (regressor, test) in enumerate(panels):
        x, y = 20 + place % 2 * width, 40 + place // 2 * height
        heading = f"{regressor}, {test}, {FIGURES[regressor]}"
        panel = _panel(_cells(results, False, regressor, test), methods, heading)
        parts.append(f'<g transform="translate({x},{y})">{panel}</g>')
    rows = math.ceil(len(panels) / 2)
    for place, method in enumerate(methods):
        x, y = 60 + place % 6 * 135, 60 + rows * height
        parts.append(
            f'<path d="M{x},{y - 4}h22" stroke="{COLORS[place]}" '
            f'stroke-width="2.5"/><text x="{x + 27}" y="{y}">{method}</text>'
        )
    words = f"Absolute percentage error by operators measured, {device}"
    title = f'<text x="20" y="24" font-size="15" font-weight="bold">{words}</text>'
    size = f'width="{2 * width + 40}" height="{rows * height + 80}"'
    style = 'font-family="Helvetica,Arial,sans-serif" font-size="12" fill="#222"'
    body = f'<rect width="100%" height="100%" fill="white"/>{title}{"".join(parts)}'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{body}</svg>\n'


def _panel(cells: dict[tuple[int, str], list[float]], methods: list[str], title: str) -> str:
    """Both axes logarithmic; bars show the standard deviation over the seeds."""
    means = {key: float(np.mean(values)) for key, values in cells.items()}
    low, high = math.log(min(means.values()) * 0.85), math.log(min(max(means.values()), 3.0) * 1.15)

    def at(count: float, error: float) -> tuple[float, float]:
        across = math.log(count / COUNTS[0]) / math.log(COUNTS[-1] / COUNTS[0])
        return 45 + 345 * across, 230 - 200 * (min(max(math.log(error), low), high) - low) / (high - low)

    parts = [
        f'<text x="45" y="18" font-weight="bold">{title}</text><rect '
        'x="45" y="30" width="345" height="200" fill="none" stroke="#bbb"/>'
    ]
    for count in COUNTS:
        x, _ = at(count, math.exp(low))
        parts.append(
            f'<path d="M{x:.1f},30v200" stroke="#eee"/><text x="{x:.1f}" '
            f'y="246" text-anchor="middle">{count:,}</text>'
        )
    for tick in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0):
        if low < math.log(tick) < high:
            _, y = at(COUNTS[0], tick)
            parts.append(
                f'<path d="M45,{y:.1f}h345" stroke="#eee"/><text '
                f'x="40" y="{y + 4:.1f}" text-anchor="end">{tick:.0%}</text>'
            )
    for color, method in zip(COLORS, methods, strict=False):
        points = [at(count, means[count, method]) for count in COUNTS]
        parts.append(
            f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" '
            f'fill="none" stroke="{color}" stroke-width="2"/>'
        )
        for count in COUNTS:
            mean, spread = means[count, method], float(np.std(cells[count, method]))
            (x, top), (_, bottom) = at(count, mean + spread), at(count, max(mean - spread, mean / 10))
            parts.append(f'<path d="M{x:.1f},{top:.1f}V{bottom:.1f}" stroke="{color}"/>')
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=reading.existing, default=Path(), help="folder with ops/neusight_fp32.csv.gz"
    )
    parser.add_argument(
        "--device", default="h200", help="h200: data/ops_h200.parquet; else a device of the file in --data"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--plot", type=Path, help="write the plot (SVG)")
    parser.add_argument("--results", type=Path, help="write every figure (JSON)")
    options = parser.parse_args()
    own = Path("data/ops_h200.parquet")
    operators = (
        h200(own)
        if options.device == "h200"
        else neusight(options.data / "ops" / "neusight_fp32.csv.gz", options.device)
    )
    results = list(study(operators, options.seeds, options.methods))
    for regressor in FIGURES:
        for test in dict.fromkeys(one["test"] for one in results):
            for priced in (False, True):
                print(
                    f"\n{options.device}, {regressor} ({FIGURES[regressor]} "
                    f"error), {test}, equal {'time' if priced else 'number'}:\n"
                )
                print(markdown(results, options.methods, priced, regressor, test))
    if options.results:
        options.results.write_text(json.dumps(results))
    if options.plot:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        options.plot.write_text(
            svg(results, [method for method in COUNTED if method in options.methods], options.device)
        )


if __name__ == "__main__":
    reading.run(main)
