"""Writes a leaderboard as Markdown: scores by file, family, device and size, calibration, the worst runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from foretrain.evaluate import PredictorScore
from foretrain.leaderboard import SPLITS, Board, Point, PointGroup, calibration, groups, source, worst
from foretrain.units import format_quantity

SHOWN_GROUPS = 12
"""Families, devices and sizes are listed up to this number, the largest first."""
_WORST = 5
"""Runs of a file that are listed as farthest off, for each quantity."""
_SIZES = (1, 8, 64, 512)
"""Upper ends of the groups of device counts; the last one is open."""


def markdown(board: Board) -> str:
    """Write the whole board as a page."""
    return "\n".join(("# Leaderboard", "", *_lines(board))) + "\n"


def _lines(board: Board) -> Iterator[str]:
    yield from (lines := [f"- {line}" for line in overall(board)])
    if lines:
        yield ""
    yield from _table(SCORE_COLUMNS, score_rows(board))
    for heading, by in GROUPINGS.items():
        yield from _groups(board, heading, by)
    yield from _calibration(board)
    yield from _worst(board)
    if board.missing:
        yield from ("", "## Not scored", "", *(f"- {line}" for line in board.missing))


def overall(board: Board) -> Iterator[str]:
    """Sum up each predictor in a line: all of its step times, each counting alike."""
    own = step_times(board)
    for name, points in own.items():
        [every] = groups(points, lambda point: "")
        sources = len({point.source for point in points})
        words = (
            f"{every.n:,} step times of {sources} source{'s' if sources > 1 else ''}",
            f"median error {percent(every.median_ape)}",
            f"MAPE {percent(every.mape)}",
            f"bias {percent(every.bias, '+')}",
            f"{percent(every.coverage)} in the 80 % interval",
        )
        yield f"{name}: {', '.join(words)}"


SCORE_COLUMNS = (
    "predictor", "runs", "how", "quantity", "n", "refused", "MAPE", "median", "p90", "bias",
    "in the 80 % interval", "noise of repeats",
)  # fmt: skip


def score_rows(board: Board) -> Iterator[tuple[str, ...]]:
    """List the scores as rows below ``SCORE_COLUMNS``."""
    noise = {(score.source, score.quantity): score for score in board.noise}
    for score in board.results:
        own = noise.get((source(score.runs_file), score.quantity))
        repeats = percent(None if own is None or score.bound else own.mean)
        yield (*_names(score), f"{score.n:,}", f"{score.unsupported:,}", *_figures(score), repeats)


def _names(score: PredictorScore) -> tuple[str, ...]:
    quantity = f"`{score.quantity}`" + ("" if score.bound is None else f", {score.bound}-bound")
    return score.predictor, source(score.runs_file), SPLITS.get(score.split, str(score.split)), quantity


def _figures(score: PredictorScore) -> tuple[str, ...]:
    return (
        percent(score.mape),
        percent(score.median_ape),
        percent(score.p90_ape),
        percent(score.bias, "+"),
        percent(score.coverage),
    )


def size_of(point: Point) -> str:
    """Name the group that a point's number of devices belongs to."""
    least = 1
    for most in _SIZES:
        if point.devices <= most:
            return f"{least:,} to {most:,} devices" if most > least else "one device"
        least = most + 1
    return f"more than {_SIZES[-1]:,} devices"


GROUPINGS: Mapping[str, Callable[[Point], str]] = {
    "By architecture family": lambda point: point.family,
    "By device": lambda point: point.device,
    "By number of devices": size_of,
    "By what bounds the step": lambda point: point.bound or "not known",
}
"""Ways to group the step times of a predictor."""


def step_times(board: Board) -> dict[str, list[Point]]:
    """Gather the step times of each predictor; none of a split that asks for more than it saw."""
    points_of: dict[str, list[Point]] = {}
    for point in board.points:
        if point.quantity == "step_time_s" and not (point.split or "").startswith("extrapolate"):
            points_of.setdefault(point.predictor, []).append(point)
    return points_of


def _groups(board: Board, heading: str, by: Callable[[Point], str]) -> Iterator[str]:
    own = {name: groups(points, by) for name, points in step_times(board).items()}
    if not own:
        return
    yield from ("", f"## {heading}", "", "Step times.", "")
    yield from _table(
        ("predictor", "group", "n", "MAPE", "median", "bias", "in the 80 % interval"),
        ((name, *_group(one)) for name, members in own.items() for one in members[:SHOWN_GROUPS]),
    )


def _group(group: PointGroup) -> tuple[str, ...]:
    figures = (
        percent(group.mape),
        percent(group.median_ape),
        percent(group.bias, "+"),
        percent(group.coverage),
    )
    return group.label, f"{group.n:,}", *figures


def _calibration(board: Board) -> Iterator[str]:
    own = {name: calibration(points) for name, points in step_times(board).items()}
    if not own:
        return
    levels = [f"{level:.0%}" for level, _ in next(iter(own.values()))]
    yield from ("", "## Calibration", "")
    yield "Share of measured step times within each part of the way from the median to the interval's end."
    yield ""
    yield from _table(
        ("predictor", *levels), ((name, *(percent(held) for _, held in line)) for name, line in own.items())
    )


def _worst(board: Board) -> Iterator[str]:
    own: dict[tuple[str, str], list[Point]] = {}
    for point in board.points:
        if point.split is None or not point.split.startswith("extrapolate"):
            own.setdefault((point.source, point.quantity), []).append(point)
    if not own:
        return
    yield from ("", "## The runs that are farthest off", "")
    yield from _table(
        ("runs", "line", "quantity", "predictor", "model", "device", "measured", "forecast", "error"),
        (
            (point.source, str(point.line), f"`{point.quantity}`", point.predictor, point.model,
             f"{point.devices:,} x {point.device}", format_quantity(point.quantity, point.measured),
             format_quantity(point.quantity, point.predicted), percent(point.error, "+"))
            for points in own.values() for point in worst(points, _WORST)
        ),
    )  # fmt: skip


def percent(share: float | None, sign: str = "") -> str:
    """A share as a percentage; nothing where it is not known."""
    return "" if share is None else f"{share:{sign}.1%}"


def _table(headings: Sequence[str], rows: Iterator[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield "|" + "---|" * len(headings)
    for row in rows:
        yield f"| {' | '.join(row)} |"
