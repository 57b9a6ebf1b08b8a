"""Shows the answers of ``schedule``: when a job starts, what more GPUs change, what a search found."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from foretrain.cli.app import show
from foretrain.errors import InputError
from foretrain.units import counted

if TYPE_CHECKING:
    from foretrain.scheduling.answers.buying import Change
    from foretrain.scheduling.answers.when import Eta, Times
    from foretrain.scheduling.jobs import Trace
    from foretrain.scheduling.study import Scenario


def answer_when(
    jobs: Trace, scenarios: Sequence[Scenario], name: str, draws: int,
    *, errors_told: bool, as_json: bool, **how: Any,
) -> None:  # fmt: skip
    """For every policy and kind of errors, when the job starts and ends; exact estimates count as a kind only
    where errors were told."""
    from foretrain.report import dump
    from foretrain.report.screen import progress
    from foretrain.report.tables import table
    from foretrain.scheduling.answers.when import USUAL_ERROR, etas

    in_rounds = next((each.policy for each in scenarios if each.in_rounds), None)
    if in_rounds is not None:
        why = "in rounds policies know how many steps jobs have, and lengths that are drawn would be no news"
        raise InputError(f"when: policy {in_rounds} cannot honour it; {why}")
    chosen = [each for each in scenarios if errors_told or each.error > 0]
    errors_given = bool(chosen)
    if not errors_given:
        chosen = [dataclasses.replace(each, error=USUAL_ERROR) for each in scenarios]
    total = len(chosen) * draws
    with progress("draws") as advance:
        answers = etas(jobs, chosen, name, draws=draws, done=lambda count: advance(count, total), **how)
    if as_json:
        typer.echo(dump({"when": [each.to_dict() for each in answers]}))
        return
    several = len({each.estimates for each in answers}) > 1
    heads = ["policy", *(["estimates"] if several else []), *_WHEN_HEADS]
    rows = [
        [each.policy, *([each.estimates] if several else []), *_cells(each.waits), *_cells(each.ends)]
        for each in answers
    ]
    show(table(heads, rows, right=heads[1:]), _about(answers[0], errors_given=errors_given, several=several))


_WHEN_HEADS = ("starts after", "80 % of draws", "ends after", "80 % of draws")


def _cells(times: Times) -> list[str]:
    from foretrain.units import format_seconds

    return [
        format_seconds(times.median_s),
        f"{format_seconds(times.low_s)} to {format_seconds(times.high_s)}",
    ]


def _about(eta: Eta, *, errors_given: bool, several: bool) -> str:
    assumed = "" if errors_given else " (assumed; --errors or --residuals say more)"
    gpus = counted(eta.job.gpus, "GPU")
    estimates = "" if several else f", estimates {eta.estimates}{assumed}"
    return f"{eta.job.name}: {gpus}, from its arrival on; {eta.draws} draws{estimates}"


def answer_buy(
    jobs: Trace, scenarios: Sequence[Scenario], text: str, rack: int, *, as_json: bool, **how: Any
) -> None:
    """What more GPUs change, policy by policy; so many nodes make a rack."""
    from foretrain.report import dump
    from foretrain.report.screen import progress
    from foretrain.report.tables import table
    from foretrain.scheduling.answers.buying import Change, bought
    from foretrain.scheduling.study import EXACT, run_all
    from foretrain.scheduling.summary import mean_outcomes

    more = bought(text, scenarios[0].machines, rack=rack)
    grown = [dataclasses.replace(each, machines=[*each.machines, *more]) for each in scenarios]
    with progress("simulations") as advance:
        outcomes = run_all(
            jobs, [*scenarios, *grown], **how, done=lambda count: advance(count, 2 * len(scenarios))
        )
    before, after = mean_outcomes(outcomes[: len(scenarios)]), mean_outcomes(outcomes[len(scenarios) :])
    changes = [
        Change(
            policy=policy if quality == EXACT else f"{policy}, {quality.text}",
            before=found,
            after=after[key],
        )
        for key, found in before.items()
        for policy, quality in [key]
    ]
    gpus = sum(machine.gpus for machine in more)
    prices = [machine.price_per_hour for machine in more]
    per_hour = None if None in prices else sum(price for price in prices if price is not None)
    if as_json:
        document = {"buy": text, "gpus": gpus, "price_per_hour": per_hour}
        typer.echo(dump({**document, "changes": [each.to_dict() for each in changes]}))
        return
    heads = ["policy", "average JCT", "then", "change", "queueing", "then ", "utilisation", "then  "]
    rows = [[each.policy, *_cells_of(each)] for each in changes]
    cost = "" if per_hour is None else f", ${per_hour:,.2f} an hour more"
    show(table(heads, rows, right=heads[1:]), f"{jobs.name}: {counted(gpus, 'GPU')} more ({text}){cost}")


def _cells_of(change: Change) -> list[str]:
    from foretrain.units import format_seconds

    before, after = change.before, change.after
    return [
        format_seconds(before.average_jct_s),
        format_seconds(after.average_jct_s),
        f"{change.part('average_jct_s'):+.0%}",
        format_seconds(before.average_queueing_s),
        format_seconds(after.average_queueing_s),
        f"{before.utilization:.0%}",
        f"{after.utilization:.0%}",
    ]


def _shown(value: float | tuple[float, ...]) -> str:
    return ", ".join(f"{each:.4g}" for each in value) if isinstance(value, tuple) else f"{value:.4g}"


def answer_search(
    jobs: Trace, scenarios: Sequence[Scenario], trials: int, *, as_json: bool, **how: Any
) -> None:
    """The best parameters of every policy, and what they are worth on jobs that they were not tuned on."""
    from foretrain.report import dump
    from foretrain.report.screen import progress
    from foretrain.report.tables import table
    from foretrain.scheduling.answers.search import search
    from foretrain.units import format_seconds

    kinds = list(dict.fromkeys(each.quality for each in scenarios))
    if len(kinds) > 1:
        found_kinds = ", ".join(each.text for each in kinds)
        raise InputError(f"search: tunes for one kind of estimates, and here are {found_kinds}")
    chosen = list({each.policy: each for each in scenarios}.values())
    total = len(chosen) * trials
    with progress("trials") as advance:
        answers = search(jobs, chosen, trials=trials, done=lambda count: advance(count, total), **how)
    if as_json:
        typer.echo(dump({"search": [each.to_dict() for each in answers]}))
        return
    rows = [
        [
            each.policy,
            *(format_seconds(value) for value in (each.default_s, each.tuned_s)),
            *(format_seconds(value) for value in (each.unseen_default_s, each.unseen_s)),
            f"{each.unseen_s / each.unseen_default_s - 1:+.1%}",
        ]
        for each in answers
    ]
    heads = ["policy", "first half", "tuned", "second half", "tuned there", "change"]
    lines = [
        f"{each.policy}: " + ", ".join(f"{name} = {_shown(value)}" for name, value in each.parameters.items())
        for each in answers
    ]
    show(table(heads, rows, right=heads[1:]), *lines)
    show(
        f"average completion times; tuned on the first half of {jobs.name} by {trials} trials of each policy"
    )
