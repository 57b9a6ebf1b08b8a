"""Draws a leaderboard as one HTML file without scripts: scatters, errors by group, calibration, scores."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from foretrain.files import write_atomically
from foretrain.leaderboard import Board, Point, calibration, groups
from foretrain.report.board import (
    GROUPINGS,
    SCORE_COLUMNS,
    SHOWN_GROUPS,
    overall,
    percent,
    score_rows,
    step_times,
)
from foretrain.web.page import static

COLOURS = "#3567c9 #b45309 #15803d #7e3fa8 #be123c #0e7490 #a16207 #4b5563 #9d174d #3f6212".split()
"""Of sources, in turn."""
_SIDE, _PICTURE = 400, 460
_EDGE, _RIM = 64, 24
"""Left and below a scatter, where its axes are told, and right and above it."""
_BESIDE = 1.25
"""The dashed lines of a scatter: forecasts that are longer or shorter by this factor."""
_DASHES = ' stroke-dasharray="4 4"'
_ALONE = 'font-family="sans-serif" font-size="11" fill="#333" color="#333"'
"""What the style sheet of the page gives a scatter within it."""
_GROUND = '<rect width="100%" height="100%" fill="#fff"/>'
"""Of a picture of its own, which may be shown on any page."""
_NO_FILE_NAME = r"[^\w.-]+"
_MOST_POINTS = 1500
"""A scatter has so many points at most, evenly from the first to the last."""
_STYLE = """
.board { max-width: 1200px; margin: 0 auto; padding: 1.5rem } .board .wide { overflow-x: auto }
.board figure { display: inline-block; margin: 0 1rem 1rem 0 } .board svg { max-width: 100%; height: auto }
.board td, .board th { padding: .2rem .8rem .2rem 0; text-align: left } .board .bar { fill: #3567c9 }
.board section { margin-top: 2.2rem } .board h3 { margin: 1rem 0 .3rem }
.board .legend { columns: 14rem; padding: 0; list-style: none }
.board text { font: 11px system-ui, sans-serif; fill: currentColor }
"""


def write_board(board: Board, folder: Path) -> None:
    """Write the page, and the scatter of each predictor as a picture of its own."""
    write_atomically(folder / "board.html", board_page(board))
    for name, points in step_times(board).items():
        picture = scatter(points, _PICTURE).replace("<svg ", f"<svg {_ALONE} ", 1)
        picture = picture.replace(">", f">{_GROUND}", 1)
        write_atomically(folder / f"{re.sub(_NO_FILE_NAME, '-', name)}.svg", picture)


def board_page(board: Board) -> str:
    """The page as text; it runs nothing and loads nothing."""
    parts = (f"<section><h2>{heading}</h2>{content}</section>" for heading, content in _sections(board))
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>foretrain: leaderboard</title><style>{static('base.css')}{_STYLE}</style></head>\n"
        f'<body><main class="board"><h1>Leaderboard</h1>{_opening(board)}{"".join(parts)}'
        "</main></body></html>\n"
    )


def _opening(board: Board) -> str:
    """Say what the page is, and what each predictor comes to."""
    words = "Forecasts beside measured runs that predictors did not learn from."
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in overall(board))
    return f"<p>{words}</p><ul>{lines}</ul>"


def _sections(board: Board) -> Iterator[tuple[str, str]]:
    own = step_times(board)
    figures = "".join(
        f"<figure>{scatter(points)}"
        f"<figcaption>{html.escape(name)}, {len(points):,} step times</figcaption></figure>"
        for name, points in own.items()
    )
    words = f"A dot is a run; on the line both are equal, between the dashed ones within {_BESIDE - 1:.0%}."
    yield "Forecast against measured step time", f"<p>{words}</p>{figures}{_legend(board.points)}"
    for heading, by in GROUPINGS.items():
        yield heading, "".join(_bars(name, points, by) for name, points in own.items())
    yield "Calibration", _calibration(own)
    yield "Scores", _scores(board)
    if board.missing:
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in board.missing)
        yield "Not scored", f"<ul>{lines}</ul>"


def scatter(points: Sequence[Point], side: int = _SIDE) -> str:
    """Forecast over measured, both logarithmic, a colour for each source; on the line they are equal, on the
    dashed ones they differ by ``_BESIDE``."""
    values = [value for point in points for value in (point.measured, point.predicted) if value > 0]
    if not values:
        return ""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    decade = (side - _EDGE - _RIM) / (high - low)

    def at(value: float) -> float:
        return _EDGE + decade * (math.log10(value) - low)

    colours = _colours(points)
    every = max(1, len(points) // _MOST_POINTS)
    dots = "".join(
        f'<circle cx="{at(point.measured):.1f}" cy="{side - at(point.predicted):.1f}" r="2.2" '
        f'fill="{colours[point.source]}" fill-opacity=".55"/>'
        for point in points[::every]
        if point.predicted > 0
    )
    marks = {_power(power): at(10.0**power) for power in range(low, high + 1)}
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {side} {side}" width="{side}" role="img" '
        f'aria-label="forecast over measured">'
        f"{_lines(side, marks.values(), decade)}{dots}{_words(side, marks)}</svg>"
    )


def _lines(side: int, marks: Iterable[float], decade: float) -> str:
    """A grid, the diagonal, and a dashed line on either side of it."""
    grid = "".join(
        f'<path d="M{at:.0f} {_RIM} V{side - _EDGE} M{_EDGE} {side - at:.0f} H{side - _RIM}"/>'
        for at in marks
    )
    apart = decade * math.log10(_BESIDE)
    lines = "".join(
        f'<path d="M{_EDGE + right:.1f} {side - _EDGE - up:.1f} '
        f'L{side - _RIM - up:.1f} {_RIM + right:.1f}"{dashes}/>'
        for up, right, dashes in ((0.0, 0.0, ""), (apart, 0.0, _DASHES), (0.0, apart, _DASHES))
    )
    return (
        f'<g stroke="currentColor" stroke-opacity=".12">{grid}</g>'
        f'<g stroke="currentColor" stroke-opacity=".45">{lines}</g>'
    )


def _words(side: int, marks: Mapping[str, float]) -> str:
    """Write what the axes are, and their marks."""
    middle = (side + _EDGE - _RIM) // 2
    below = f'x="{middle}" y="{side - _EDGE + 36}"'
    beside = f'x="10" y="{side - middle}" transform="rotate(-90 10 {side - middle})"'
    labels = "".join(
        f'<text x="{at:.0f}" y="{side - _EDGE + 16}" text-anchor="middle">{mark}</text>'
        f'<text x="{_EDGE - 6}" y="{side - at + 4:.0f}" text-anchor="end">{mark}</text>'
        for mark, at in marks.items()
    )
    return (
        f'{labels}<text {below} text-anchor="middle">measured step time</text>'
        f'<text {beside} text-anchor="middle">forecast step time</text>'
    )


def _power(power: int) -> str:
    """A power of ten seconds, as it is read.

    >>> [_power(power) for power in (-7, -5, -2, 0, 3)]
    ['1e-7 s', '10 us', '10 ms', '1 s', '1,000 s']
    """
    for least, unit in ((0, "s"), (-3, "ms"), (-6, "us")):
        if power >= least:
            return f"{10 ** (power - least):,} {unit}"
    return f"1e{power} s"


def _colours(points: Sequence[Point]) -> dict[str, str]:
    sources = sorted({point.source for point in points})
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(sources)}


def _legend(points: Sequence[Point]) -> str:
    shown = [point for point in points if point.quantity == "step_time_s"]
    items = "".join(
        '<li><svg width="12" height="12" aria-hidden="true">'
        f'<circle cx="6" cy="6" r="5" fill="{colour}"/></svg> '
        f"{html.escape(name)}</li>"
        for name, colour in _colours(shown).items()
    )
    return f'<ul class="legend">{items}</ul>'


def _bars(name: str, points: Sequence[Point], by: Callable[[Point], str]) -> str:
    """Mean errors of the largest groups."""
    rows = groups(points, by)[:SHOWN_GROUPS]
    most = max((row.mape for row in rows), default=0.0) or 1.0
    lines = "".join(
        f"<tr><td>{html.escape(row.label)}</td><td>{row.n:,}</td><td>"
        '<svg width="160" height="12" aria-hidden="true">'
        f'<rect class="bar" width="{160 * row.mape / most:.1f}" height="12"/></svg></td>'
        f"<td>{percent(row.mape)}</td><td>{percent(row.bias, '+')}</td><td>{percent(row.coverage)}</td></tr>"
        for row in rows
    )
    head = (
        "<tr><th>group</th><th>runs</th><th></th><th>MAPE</th><th>bias</th><th>in the 80 % interval</th></tr>"
    )
    return f'<h3>{html.escape(name)}</h3><div class="wide"><table>{head}{lines}</table></div>'


def _calibration(own: dict[str, list[Point]]) -> str:
    lines = {name: calibration(points) for name, points in own.items() if points}
    if not lines:
        return ""
    levels = "".join(f"<th>{level:.0%}</th>" for level, _ in next(iter(lines.values())))
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td>{''.join(f'<td>{held:.0%}</td>' for _, held in line)}</tr>"
        for name, line in lines.items()
    )
    words = "Share of measured step times within each part of the way from the median to the interval's end."
    return f'<p>{words}</p><div class="wide"><table><tr><th>predictor</th>{levels}</tr>{rows}</table></div>'


def _scores(board: Board) -> str:
    head = "".join(f"<th>{name}</th>" for name in SCORE_COLUMNS)
    rows = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in score_rows(board)
    )
    return f'<div class="wide"><table><tr>{head}</tr>{rows.replace("`", "")}</table></div>'
