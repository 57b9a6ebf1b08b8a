"""Writes a job held against its limits: lines for the terminal, and a comment for a pull request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from foretrain.estimate import Estimate
from foretrain.forecast import Forecast
from foretrain.planner.checking import JobCheck, LimitVerdict
from foretrain.report import figures
from foretrain.report.explain import ComparedFigure, Explanation
from foretrain.units import format_bytes, format_dollars, format_seconds

Form = Callable[[float], str]

NAMES = ("the base", "this job")
"""What the sentences of an explanation call the two jobs."""

_FORMS: dict[str, Form] = {
    "time": format_seconds,
    "cost": format_dollars,
    "memory": format_bytes,
    "fits": format_bytes,
}
_MOST_FIELDS = 12
_MOST_NOTES = 6
"""Assumptions in a comment."""
_SAME = 0.005
"""Changes below this share are not told."""
_TOLD_AS_RATIO = 3.0


def check_lines(check: JobCheck, base: Explanation | None = None) -> Iterator[str]:
    """A line for each limit, then what is different from the base."""
    width = max((len(verdict.name) for verdict in check.verdicts), default=0)
    for verdict in check.verdicts:
        mark = "ok    " if verdict.holds else "missed"
        form = _FORMS[verdict.name]
        yield (
            f"{mark}  {verdict.name:<{width}}  {form(verdict.value.median)}{_which(check, verdict)} "
            f"[{_interval(verdict, form)}], "
            f"limit {_limit(verdict)}, chance to miss it {_chances(verdict)}"
        )
    yield from reasons(check, base)
    yield from remedy_lines(check.forecast)
    for change, form in [] if base is None else changes(base):
        yield f"{change.name}: {form(change.a)} -> {form(change.b)} ({_percent(change)})"


def check_markdown(check: JobCheck, base: Explanation | None = None) -> str:
    """A comment for a pull request: the limits, what is different from the base, a sentence why; details can
    be opened below."""
    missed = [verdict.name for verdict in check.verdicts if not verdict.holds]
    heading = f"missed: {', '.join(missed)}" if missed else "all limits hold"
    rows = [
        [
            f"{':white_check_mark:' if verdict.holds else ':x:'} {verdict.name}",
            form(verdict.value.median) + _which(check, verdict),
            _interval(verdict, form),
            _limit(verdict),
            _chances(verdict),
        ]
        for verdict in check.verdicts
        for form in [_FORMS[verdict.name]]
    ]
    parts = [
        f"### Training forecast: {heading}",
        _markdown_table(("", "forecast", "80 % interval", "limit", "chance to miss it"), rows),
    ]
    if base is not None:
        rows = [
            [change.name, form(change.a), form(change.b), _percent(change)] for change, form in changes(base)
        ]
        parts.append(_markdown_table(("", "base", "this job", "change"), rows))
    parts.append(
        " ".join(f"{sentence}." for sentence in [*reasons(check, base), *remedy_lines(check.forecast)])
    )
    parts.append("\n".join(_details(check, base)))
    return "\n\n".join(part for part in parts if part)


def _details(check: JobCheck, base: Explanation | None) -> Iterator[str]:
    """Write what can be opened: the job, fields that differ, what a step and memory go to, assumptions."""
    forecast, job = check.forecast, check.forecast.job
    yield "<details><summary>Details</summary>\n"
    yield f"- {_escaped(figures.describe_model(job))}, {_escaped(figures.describe_cluster(job))}"
    for title, parts, form in (
        ("a step", figures.step_parts(forecast), format_seconds),
        ("memory of the fullest device", figures.category_sizes(forecast), format_bytes),
    ):
        if parts:
            yield f"- {title}: {', '.join(f'{name} {form(size)}' for name, size in parts.items())}"
    fields = [] if base is None else list(base.fields.items())
    for name, (before, after) in fields[:_MOST_FIELDS]:
        yield f"- `{name}`: {_field(before)} → {_field(after)}"
    if len(fields) > _MOST_FIELDS:
        yield f"- {len(fields) - _MOST_FIELDS} more fields differ"
    for note in [f"predicted by {forecast.predictor}", *forecast.all_assumptions[:_MOST_NOTES]]:
        yield f"- {_escaped(note)}"
    yield "\n</details>"


# In words


def reasons(check: JobCheck, base: Explanation | None = None) -> list[str]:
    """Why it is so: against the base, or by what a step and memory mostly are."""
    if base is not None:
        return base.sentences
    forecast = check.forecast
    lines = []
    if "step_time_s" in forecast:
        parts = figures.step_parts(forecast)
        most = ", {} of it {}".format(*_largest(parts)) if parts else ""
        bound = f"; bound by {forecast.bound}" if forecast.bound else ""
        lines.append(f"A step takes {format_seconds(forecast['step_time_s'].median)}{most}{bound}")
    sizes = figures.category_sizes(forecast)
    if sizes and not all(one.holds for one in check.verdicts if one.name in ("memory", "fits")):
        lines.append("{} of memory is {}".format(*_largest(sizes)))
    return lines


def remedy_lines(forecast: Forecast) -> list[str]:
    """The changes that would make the job fit, in one sentence; none where it fits or nobody asked."""
    changes = [
        f"{one.value} ({one.detail})" if one.detail else one.value for one in figures.remedies(forecast)
    ]
    return [f"It would fit with {'; or '.join(changes)}"] if changes else []


def changes(explained: Explanation) -> list[tuple[ComparedFigure, Form]]:
    """Time, cost and memory of the base and of this job, as far as both are known."""
    a, b = explained.a, explained.b
    totals = [(one.quantities.get("total_time_s"), one.cost) for one in (a, b)]
    (time_a, cost_a), (time_b, cost_b) = totals
    rows: list[tuple[ComparedFigure | None, Form]] = [
        (explained.time.whole, format_seconds),
        (_change("whole training", time_a, time_b), format_seconds),
        (_change("cost", cost_a, cost_b), format_dollars),
        (explained.memory.whole if explained.memory.parts else None, format_bytes),
    ]
    return [(change, form) for change, form in rows if change is not None]


def _change(name: str, a: Estimate | None, b: Estimate | None) -> ComparedFigure | None:
    return None if a is None or b is None else ComparedFigure(name, a.median, b.median)


def _largest(parts: Mapping[str, float]) -> tuple[str, str]:
    """``62%`` and ``activations``."""
    name = max(parts, key=lambda one: parts[one])
    return f"{parts[name] / sum(parts.values()):.0%}", name


def _interval(verdict: LimitVerdict, form: Form) -> str:
    return f"{form(verdict.value.low)} to {form(verdict.value.high)}"


def _which(check: JobCheck, verdict: LimitVerdict) -> str:
    """Say which memory ``--max-memory`` is of: what the allocator holds, or the peak where only that is
    forecast."""
    if verdict.name != "memory":
        return ""
    return " reserved" if "reserved_memory_bytes" in check.forecast.quantities else " at peak"


def _limit(verdict: LimitVerdict) -> str:
    limit = _FORMS[verdict.name](verdict.limit)
    return f"{limit} (device)" if verdict.name == "fits" else limit


def _chances(verdict: LimitVerdict) -> str:
    """``3% (10% allowed)``."""
    return f"{figures.chance_words(verdict.chance)} ({100 * verdict.allowed:.3g}% allowed)"


def _percent(change: ComparedFigure) -> str:
    """``+12%``, ``3.1x``."""
    if not change.a or abs(change.difference) < _SAME * change.a:
        return "the same"
    ratio = change.b / change.a
    return f"{ratio:.3g}x" if ratio >= _TOLD_AS_RATIO else f"{ratio - 1:+.0%}"


# As Markdown


def _markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _field(value: object) -> str:
    return "not given" if value is None else "`" + str(value).replace("`", "'") + "`"


def _escaped(text: str) -> str:
    """Words that may have been a user's, without marks that Markdown would read."""
    for mark in "\\`*_<>|#":
        text = text.replace(mark, f"\\{mark}")
    return text
