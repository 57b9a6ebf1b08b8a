"""Lays out for the terminal what measured runs say of a forecast, and the forecasts of several predictors
beside one another."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from foretrain.predictors.evidence import Evidence, Neighbour
from foretrain.predictors.side_by_side import PredictorAnswer, SideBySide
from foretrain.report.figures import describe_cluster, describe_model
from foretrain.report.tables import table
from foretrain.units import format_bytes, format_seconds

NONE_KEPT = "no evidence kept: this predictor has no measured runs with its forecasts of them"


def evidence_table(evidence: Evidence | None) -> RenderableType:
    """The nearest measured runs in full."""
    if evidence is None:
        return Text(NONE_KEPT)
    headings = ("distance", "measured", "predicted", "off", "memory off", "run", "from")
    rows = [_row(one, evidence.quantity) for one in evidence.nearest]
    return Group(
        Text(),
        Text("nearest measured runs", style="bold"),
        table(headings, rows, right=headings[:5]),
        *(Text(f"- {note}", style="dim") for note in _notes(evidence)),
    )


def _row(neighbour: Neighbour, quantity: str) -> list[str]:
    outcome = neighbour.outcome
    form = format_seconds if quantity.endswith("_s") else "{:.3g}".format
    several = neighbour.measured is None
    memory = outcome.memory_error
    return [
        f"{neighbour.distance:.2f}",
        "" if neighbour.measured is None else form(neighbour.measured),
        "" if neighbour.predicted is None else form(neighbour.predicted),
        f"{outcome.error:.0%}" if several else f"{outcome.error:+.0%}",
        "" if memory is None else f"{memory:.0%}" if several else f"{memory:+.0%}",
        neighbour.about if not several else f"{neighbour.about} (median of {neighbour.runs:,} runs)",
        neighbour.source + (" (left out)" if neighbour.left_out else ""),
    ]


def _notes(evidence: Evidence) -> list[str]:
    inside = f"{evidence.coverage:.0%} of them lay in their 80 % intervals"
    of_quantity = "" if evidence.quantity == "step_time_s" else f" of {evidence.quantity}"
    notes = [f"median error{of_quantity} {evidence.median_error:.0%}; {inside}"]
    if any(one.left_out for one in evidence.nearest):
        notes.append("left out: forecast without having learned from the architecture's family")
    if evidence.learned_from:
        notes.append("the predictor learned from these very runs, so new ones will be farther off")
    if evidence.flag is not None:
        notes.append(evidence.flag)
    return notes


def side_by_side_table(answers: SideBySide) -> RenderableType:
    """Lay out what each predictor gives, which of them knows such jobs, and where they disagree."""
    headings = ("predictor", "step", "80 % interval", "reserved", "training", "runs like it", "error", "held")
    parts: list[RenderableType] = [
        Text(describe_model(answers.job), style="bold"),
        Text(describe_cluster(answers.job)),
        table(headings, [_entry(one) for one in answers.entries if one.forecast], right=headings[5:]),
        Text("reserved: memory that the allocator holds, on the fullest device", "dim"),
        Text("error: median on runs like it; held: share of them in the predictor's 80 % intervals", "dim"),
        Text(),
    ]
    parts += [Text(line, style="bold yellow") for line in answers.disagreements]
    parts += [Text(answers.why_default), Text()]
    for one in answers.entries:
        if one.forecast is None:
            said = f"refuses: {str(one.refusal).removeprefix(f'{one.predictor}: ')}"
        else:
            said = NONE_KEPT if one.evidence is None else one.evidence.line
        parts.append(Text(f"- {one.predictor}: {said}", style="dim"))
    return Group(*parts)


def _entry(answer: PredictorAnswer) -> list[str]:
    forecast, evidence, step = answer.forecast, answer.evidence, answer.step_time
    assert forecast is not None
    scores = ["none kept", "", ""]
    if evidence is not None:
        runs = "none (far)" if evidence.is_far else f"{evidence.runs:,}"
        scores = [runs, f"{evidence.median_error:.0%}", f"{evidence.coverage:.0%}"]
    need, total = forecast.fullest, forecast.quantities.get("total_time_s")
    reserved = "reserved_memory_bytes" in forecast.quantities
    return [
        answer.predictor,
        "" if step is None else format_seconds(step.median),
        "" if step is None else f"{format_seconds(step.low)} to {format_seconds(step.high)}",
        "" if need is None else format_bytes(need.median) + ("" if reserved else " (peak)"),
        "" if total is None else format_seconds(total.median),
        *scores,
    ]
