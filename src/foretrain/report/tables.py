"""Lays catalogue entries, evaluations, fits and graphs out as Rich tables for the terminal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from foretrain.catalog import Catalog, Device, LinkSpec, Node
from foretrain.catalog.hosts import HostProfile
from foretrain.graph import PHASES, OpGraph
from foretrain.predictors.base import Table as Figures
from foretrain.quantities import RESOURCE_FIGURES
from foretrain.units import format_bytes, format_count, format_dollars, format_quantity, format_seconds

if TYPE_CHECKING:
    from foretrain.advice import Advice
    from foretrain.search import Turn
    from foretrain.validation import PublishedFigure


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()) -> Table:
    """A plain table; the columns named in ``right`` hold numbers, which are not broken but end in ``…`` where
    a line is too short."""
    numbers = set(right)
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        number = heading in numbers
        whole = number or heading == headings[0]
        result.add_column(
            heading,
            justify="right" if number else "left",
            no_wrap=whole,
            overflow="ellipsis" if whole else "fold",
        )
    for row in rows:
        result.add_row(*(Text(cell) for cell in row))
    return result


def evaluation_tables(results: Sequence[Mapping[str, Any]], *, wide: bool = False) -> Group:
    """The errors per predictor and quantity, as percentages; by what bounds the step below those of all. A
    table for each file of runs, under its name where there are several. With MRE and RMSE where there is
    room (``wide``)."""
    by_file: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        by_file.setdefault(result["runs_file"], []).append(result)
    tables = []
    for file, of_file in by_file.items():
        errors = _errors_table(of_file, wide=wide)
        if len(by_file) > 1:
            errors.title, errors.title_justify, errors.title_style = Text(file), "left", "bold"
        tables.append(errors)
    return Group(*tables)


def _errors_table(results: Sequence[Mapping[str, Any]], *, wide: bool) -> Table:
    places = {_whole(result): place for place, result in enumerate(results) if result["bound"] is None}
    results = sorted(results, key=lambda result: places[_whole(result)])
    failed = ["failed"] if any(result["failed"] for result in results) else []
    headings = [
        "predictor",
        "quantity",
        "n",
        "MAPE",
        "median",
        "p90",
        *(["MRE", "RMSE"] if wide else []),
        "bias",
        "coverage",
        "unsupported",
        *failed,
    ]
    rows = []
    for result in results:
        if not result["n"] and result["quantity"] in RESOURCE_FIGURES:
            continue  # twelve rows that only predictors of resources fill
        names = [
            _short(result["predictor"]),
            result["quantity"] if result["bound"] is None else f"  {result['bound']}-bound",
            f"{result['n']:,}",
        ]
        errors = [_percent(result[key]) for key in ("mape", "median_ape", "p90_ape")]
        rows.append(
            [
                *names,
                *errors,
                *([_percent(result["mre"]), _in_unit(result["quantity"], result["rmse"])] if wide else []),
                _percent(result["bias"], "+"),
                _percent(result["coverage"]),
                f"{result['unsupported']:,}",
                *(f"{result[key]:,}" for key in failed),
            ]
        )
    return table(headings, rows, right=headings[headings.index("n") :])


def validation_table(rows: Sequence[PublishedFigure]) -> Table:
    """Figures of one published table beside their forecasts."""
    headings = ("row", "quantity", "published", "forecast", "80 % interval", "error")
    lines = []
    for row in rows:
        one = row.comparison
        numbers = (one.measured, one.predicted, one.low, one.high)
        shown = [format_quantity(one.quantity, number) for number in numbers]
        interval = f"{shown[2]} to {shown[3]}"
        lines.append([row.label, one.quantity, *shown[:2], interval, _percent(one.error, "+")])
    return table(headings, lines, right=headings[2:])


def _in_unit(quantity: str, value: float | None) -> str:
    return "-" if value is None else format_quantity(quantity, value)


def _whole(result: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(result[key] for key in ("predictor", "runs_file", "quantity"))


_NAME_WIDTH = 24
"""Letters of a predictor's name that its column has room for."""


def _short(name: str) -> str:
    """Keep the end of a name that is too long for its column: the file, class or folder of a predictor."""
    return name if len(name) <= _NAME_WIDTH else f"…{name[1 - _NAME_WIDTH :]}"


def figures_table(figures: Figures) -> Table:
    """A table of a predictor's report."""
    right = [
        heading
        for heading, column in zip(figures.headings, zip(*figures.rows, strict=True), strict=True)
        if not any(isinstance(cell, str) for cell in column)
    ]
    return table(figures.headings, [[_cell(cell) for cell in row] for row in figures.rows], right=right)


def _cell(value: str | int | float | None) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else _percent(value)


def advice_table(advice: Advice, top: int) -> Table:
    """Configurations, the best first."""
    from foretrain.advice import machines

    shown = advice.options[:top]
    trainings = [option.job.workload.training for option in shown]
    sizes = len({training.samples for training in trainings}) > 1
    headings = (
        "machines",
        "workers",
        *(["samples"] if sizes else []),
        "batch",
        "time",
        "80 % interval",
        "cost",
        "late",
    )
    rows = []
    for option, training in zip(shown, trainings, strict=True):
        total = option.total_time_s
        rows.append([
            machines(option.job), f"{option.job.cluster.world_size:,}",
            *([f"{training.samples:,}"] if sizes else []), f"{training.global_batch:,}",
            format_seconds(total.median), f"{format_seconds(total.low)} to {format_seconds(total.high)}",
            "unknown" if option.cost is None else format_dollars(option.cost.median), f"{option.late:.0%}",
        ])  # fmt: skip
    return table(headings, rows, right=headings[1:])


def search_table(turn: Turn) -> Table:
    """Configurations that were measured, the cheapest in time first."""
    from foretrain.advice import machines

    headings = ("machines", "workers", "batch", "time", "cost", "in time", "runs")
    rows = []
    for tried in sorted(turn.tried, key=lambda tried: (not tried.in_time, tried.cost)):
        priced = tried.job.cluster.price_per_hour is not None
        rows.append([
            machines(tried.job), f"{tried.job.cluster.world_size:,}",
            f"{tried.job.workload.training.global_batch:,}", format_seconds(tried.time_s),
            format_dollars(tried.cost) if priced else f"{format_seconds(tried.cost)} of a device",
            "yes" if tried.in_time else "no", f"{tried.runs:,}",
        ])  # fmt: skip
    return table(headings, rows, right=headings[1:])


def _percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.1%}"


def graph_table(graph: OpGraph) -> Table:
    """The size of a captured graph."""
    flops = [
        (f"FLOPs {phase}", format_count(graph.total("flops", phase), "FLOP"))
        for phase in PHASES
        if graph.total("flops", phase)
    ]
    rows = [
        ("ops", f"{len(graph.ops):,}"),
        ("distinct operators", f"{len(graph.operators):,}"),
        ("parameters", format_count(graph.parameters)),
        ("samples", f"{graph.samples:,}"),
        *([("tokens", f"{graph.tokens:,}")] if graph.tokens else []),
        *flops,
        ("least traffic", format_bytes(graph.total("bytes"))),
        (
            "buffers",
            f"{len(graph.buffers):,}, {format_bytes(sum(buffer.size_bytes for buffer in graph.buffers))}",
        ),
    ]
    return _pairs(rows)


def _pairs(rows: Iterable[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(Text(label, style="dim"), Text(value))
    return grid


def details(entry: Mapping[str, Any]) -> RenderableType:
    """Lay out one catalogue entry: the fields that it has, its source last."""
    given = {key: value for key, value in entry.items() if value not in (None, "", [], (), {})}
    ordered = sorted(given.items(), key=lambda item: item[0] == "source")
    return _pairs((key.replace("_", " "), _readable(key, value)) for key, value in ordered)


def _readable(key: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(
            f"{inner} {_readable(inner, item)}" for inner, item in value.items() if item is not None
        )
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return _UNITS.get(key, _plain)(value)


def _plain(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


_UNITS: dict[str, Callable[[float], str]] = {
    "parameters": lambda count: _parameters(count),
    **dict.fromkeys(("memory_bytes", "l2_bytes", "l3_bytes", "shared_bytes_per_sm"), format_bytes),
    **dict.fromkeys(
        ("memory_bytes_per_s", "link_bytes_per_s", "bandwidth"), lambda rate: format_count(rate, "B/s")
    ),
    **dict.fromkeys(
        ("fp64", "fp32", "fp32_matrix", "tf32", "bf16", "fp16", "fp8", "fp4", "int8"),
        lambda rate: format_count(rate, "FLOP/s"),
    ),
    "clock_hz": lambda rate: format_count(rate, "Hz"),
    "latency": lambda time_s: f"{time_s * 1e6:g} us",
    "tdp_w": lambda power: f"{power:g} W",
    "per_hour": format_dollars,
}


def listing(kind: str, entries: Mapping[str, Mapping[str, Any]], catalog: Catalog) -> Table:
    """Lay out the entries of a kind, a row for each."""
    if kind == "devices":
        return _device_table(catalog.device(name) for name in entries)
    if kind == "nodes":
        return _node_table((catalog.node(name) for name in entries), catalog)
    if kind == "hosts":
        hosts = [catalog.host(name) for name in entries]
        rows = [
            [host.name, host.cpu, str(host.year or ""), f"{host.speed:.2f}", host.source] for host in hosts
        ]
        return table(("host", "cpu", "year", "speed", "source"), rows, right=("year", "speed"))
    if kind == "prices":
        rows = [
            [
                name,
                f"{price['per_hour']:,.2f}",
                *(str(price.get(key, "")) for key in ("date", "region", "source")),
            ]
            for name, price in entries.items()
        ]
        return table(("name", "$/h", "date", "region", "source"), rows, right=("$/h",))
    return _model_table(entries)


_LEAST_WORDS = 20
"""Characters of a column of sentences, for which long names give way."""


def _model_table(models: Mapping[str, Mapping[str, Any]]) -> Table:
    """A block for each kind of models."""
    headings = ("model", "parameters", "input", "about")
    result = table(headings, (), right=headings[1:3])
    first, last = result.columns[0], result.columns[-1]
    first.no_wrap, first.overflow, last.min_width = False, "fold", _LEAST_WORDS
    for kind, members in itertools.groupby(models.items(), key=lambda item: item[1]["kind"]):
        result.add_section()
        result.add_row(Text(kind.replace("_", " "), style="bold"))
        for name, model in members:
            tokens, side = model.get("sequence"), model.get("image")
            given = str(tokens) if tokens else f"{side}x{side}" if side else ""
            result.add_row(*map(Text, (name, _parameters(model["parameters"]), given, model["about"])))
    return result


def _parameters(count: float) -> str:
    """
    >>> _parameters(671e9), _parameters(110e6)
    ('671 B', '110 M')
    """
    return f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.3g} M"


def _device_table(devices: Iterable[Device]) -> Table:
    """Units are in the headings, so that every figure is whole where a line has 80 characters."""
    headings = ("device", "GiB", "GB/s", "TFLOP/s: fp32", "bf16", "fp16", "watt")
    rows = [
        [
            device.name,
            _in_units(device.memory_bytes, 2**30),
            _in_units(device.memory_bytes_per_s, 1e9),
            *(_in_units(getattr(device, dtype), 1e12) for dtype in ("fp32", "bf16", "fp16")),
            _in_units(device.tdp_w, 1.0),
        ]
        for device in devices
    ]
    return table(headings, rows, right=headings[1:])


def _in_units(value: float | None, unit: float) -> str:
    """
    >>> _in_units(3.35e12, 1e9), _in_units(7.97e9, 2**30), _in_units(None, 1.0)
    ('3,350', '7.42', '')
    """
    if not value:
        return ""
    figure = value / unit
    return f"{figure:,.0f}" if figure >= 1000 else f"{figure:.3g}"


def _node_table(nodes: Iterable[Node], catalog: Catalog) -> Table:
    rows = []
    for node in nodes:
        price = catalog.price(node.name)
        dollars = "" if price is None else f"{price.per_hour:,.2f}"
        rows.append(
            [
                node.name,
                f"{node.devices} x {node.device}",
                _link(node.intra_node),
                _link(node.inter_node),
                dollars,
            ]
        )
    return table(("node", "devices", "inside", "network", "$/h"), rows, right=("$/h",))


def _link(link: LinkSpec) -> str:
    return " ".join(
        part
        for part in (link.kind or "", format_count(link.bandwidth, "B/s") if link.bandwidth else "")
        if part
    )


def host_profile(profile: HostProfile) -> Table:
    """Lay out what benchmarks of a host took per call, on a GPU and on the CPU alone."""
    places = [place for place in ("cuda", "cpu") if place in profile.seconds]
    names = dict.fromkeys(name for place in places for name in profile.seconds[place])
    headings = {"cuda": f"on {profile.device}", "cpu": f"on {profile.cpu}"}
    rows = [
        (
            name,
            *(format_seconds(of[name]) if name in (of := profile.seconds[place]) else "" for place in places),
        )
        for name in names
    ]
    columns = [headings[place] for place in places]
    return table(("benchmark", *columns), rows, right=columns)
