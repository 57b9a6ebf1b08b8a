"""The command that decides: ``plan`` searches devices, their number and plans for a deadline or a budget."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from foretrain.cli import completion
from foretrain.cli.app import JsonFlag, registry, say, show
from foretrain.cli.job_options import (
    PAGE_SECONDS,
    HtmlSeconds,
    JobOptions,
    Options,
    PredictorOption,
    Target,
    one_job,
    setting_value,
    with_options,
)
from foretrain.cli.lists import whole_numbers, words
from foretrain.cli.predict_checks import refuse_without
from foretrain.cli.scale_out import ProcessesOption, RayOption, ScaleOut, hush_ray
from foretrain.errors import InputError, invalid

if TYPE_CHECKING:
    from foretrain.job import Job
    from foretrain.planner.clusters import Wanted
    from foretrain.planner.goal import Goal
    from foretrain.planner.outcome import Plans
    from foretrain.planner.planning import Effort
    from foretrain.predictors.base import Predictor

_SEARCHED = (
    "devices", "micro_batch", "tensor", "pipeline", "context", "expert", "shard", "recompute",
    "recompute_every", "schedule", "sequence_parallel", "offload", "servers", "framework",
)  # fmt: skip
"""Options of a job that are what a search finds, or another here."""


@registry.command(cls=ScaleOut)
@with_options(JobOptions, without=_SEARCHED)
def plan(
    *,
    target: Target = None,
    launch_files: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="FILE", help="What launches the training now, as in predict."),
    ] = None,
    kinds: Annotated[
        str | None,
        typer.Option(
            "--devices",
            help="Devices or nodes of the catalogue to choose from, as h100,h200,b200.",
            autocompletion=completion.many(completion.devices_and_nodes),
        ),
    ] = None,
    max_devices: Annotated[
        int | None, typer.Option(min=1, help="The most devices; powers of two up to it are looked at.")
    ] = None,
    counts: Annotated[
        str | None, typer.Option(help="Numbers of devices to choose from, as 8,16,24, instead.")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(help="By when the training must have ended, such as 24h.")
    ] = None,
    budget: Annotated[str | None, typer.Option(help="Dollars that it may cost, such as 5000.")] = None,
    objective: Annotated[
        Literal["time", "cost", "energy"] | None,
        typer.Option(help="What to make small. [default: cost with a deadline, else time]"),
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(
            help="megatron, torchtitan, fsdp2, deepspeed, accelerate, ...: plans are what it can run.",
            autocompletion=completion.names_in("planner.abilities", "TARGETS"),
        ),
    ] = None,
    fits: Annotated[
        float, typer.Option(help="The least probability that memory is enough, from 0 to 1.")
    ] = 0.9,
    risk: Annotated[
        float, typer.Option(help="How likely deadline and budget may be missed, from 0 to 1.")
    ] = 0.1,
    top: Annotated[int, typer.Option(min=1, help="Plans to show.")] = 5,
    runs: Annotated[
        str | None,
        typer.Option(
            metavar="N|RUNS.jsonl",
            help="A number: so many such trainings, at once or in turn. A file: measured runs to plan with.",
        ),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probes", help="Which short runs would settle which plan is best.")
    ] = False,
    largest: Annotated[
        Literal["batch", "sequence", "layers", "model"] | None,
        typer.Option(help="The largest of these that the cluster can hold."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.0, help="End the search after so long, with the best so far.")
    ] = None,
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="Try every way to cut the model.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Search anew, cached or not.")] = False,
    processes: ProcessesOption = 1,
    ray: RayOption = None,
    predictor: PredictorOption = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page that explores the plans in a browser.")
    ] = None,
    html_seconds: HtmlSeconds = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="DIR", help="Write a folder for each plan, with the files that launch it."
        ),
    ] = None,
    as_json: JsonFlag = False,
    options: Options,
) -> None:
    """Find the best plans: which devices, how many, and how the model is spread over them."""
    from foretrain import predictors
    from foretrain.files import check_target
    from foretrain.planner.clusters import Wanted
    from foretrain.planner.goal import Goal
    from foretrain.planner.planning import Effort
    from foretrain.units import parse_dollars, parse_seconds

    if target is None and not launch_files:
        raise typer.BadParameter("give a job file, a model or --from")
    refuse_without("html_seconds", html_seconds, "--html", there=html is not None)
    if html is not None:
        check_target(html)
    if out is not None:
        check_target(out, folder=True)
    if ray is not None:
        hush_ray()
    held, swept = _settings(options.pop("set", []))
    deadline_s = None if deadline is None else parse_seconds(deadline, "deadline")
    goal = Goal(
        objective=objective or ("cost" if deadline_s is not None else "time"),
        deadline_s=deadline_s,
        budget=None if budget is None else parse_dollars(budget, "budget"),
        fits=fits,
        risk=risk,
    )
    wanted = Wanted(kinds=words("devices", kinds), most=max_devices, counts=whole_numbers("counts", counts))
    effort = Effort(seconds=seconds, exhaustive=exhaustive, processes=processes, ray=ray, cached=not fresh)
    chosen = predictors.get(predictor)
    number, measured = _runs(runs)
    if measured is not None:
        _learn(chosen, measured)
    asked = _Asked(
        target=target,
        launch_files=launch_files,
        options=options,
        predictor=chosen,
        goal=goal,
        wanted=wanted,
        framework=framework,
        held=held,
        top=top,
        effort=effort,
    )
    shown = _Shown(
        runs=number,
        probes=probe,
        html=html,
        html_seconds=PAGE_SECONDS if html_seconds is None else html_seconds,
        out=out,
        as_json=as_json,
    )
    if largest is not None:
        shown.check_alone("largest")
        _largest(asked, largest, as_json)
    elif any(len(values) > 1 for values in swept.values()):
        shown.check_alone("set with several values")
        _sweep(asked, swept, as_json)
    else:
        _one(asked, {name: values[0] for name, values in swept.items()}, shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Holds what is wanted, but for fields that are set."""

    target: str | None
    launch_files: list[str] | None
    options: Options
    predictor: Predictor
    goal: Goal
    wanted: Wanted
    framework: str | None
    held: Mapping[str, Sequence[Any]]
    top: int
    effort: Effort

    def job(self, settings: Mapping[str, Any]) -> Job:
        texts = [f"{name}={value}" for name, value in settings.items()]
        options = {**self.options, **({"set": texts} if texts else {})}
        return one_job(self.target, self.launch_files, options)

    def plans(self, job: Job, held: Mapping[str, Sequence[Any]] | None = None) -> Plans:
        from foretrain.catalog import Catalog
        from foretrain.planner.planning import make_plans
        from foretrain.predictors.plugins import told_in_one_line

        with told_in_one_line(type(self.predictor)):
            return make_plans(
                job,
                self.predictor,
                goal=self.goal,
                wanted=self.wanted,
                target=self.framework,
                allowed={**self.held, **(held or {})},
                top=self.top,
                effort=self.effort,
                catalog=Catalog.load(self.options.get("catalog")),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """Says what is wanted of the plans of one search."""

    runs: int | None
    probes: bool
    html: Path | None
    html_seconds: float
    out: Path | None
    as_json: bool

    def check_alone(self, other: str) -> None:
        """Refuse what goes with the plans of one search alone."""
        given = {"runs": self.runs is not None, "probes": self.probes}
        given |= {"html": self.html is not None, "out": self.out is not None}
        for name in (name for name, is_given in given.items() if is_given):
            raise InputError(f"{name}: goes with the plans of one search, not with {other}")


def _one(asked: _Asked, settings: Mapping[str, Any], wanted: _Shown) -> None:
    from foretrain.files import make_folder
    from foretrain.planner.abilities import ability_of
    from foretrain.planner.curves import curves, many_runs
    from foretrain.planner.launching import check_launchable
    from foretrain.planner.probes import probes
    from foretrain.report import dump
    from foretrain.report.plans import curve_tables, many_runs_table, probe_lines, shown

    job = asked.job(settings)
    if wanted.out is not None:
        check_launchable(ability_of(asked.framework, job.workload.training.framework).target)
        make_folder(wanted.out)
    plans = asked.plans(job)
    many = None
    if wanted.runs is not None:
        pool = asked.wanted.most or max([option.devices for option in plans], default=1)
        many = many_runs(plans, wanted.runs, pool)
    chosen = probes(asked.predictor, plans) if wanted.probes else None
    if wanted.as_json:
        document = plans.to_dict() | {"curves": [curve.to_dict() for curve in curves(plans)]}
        document |= {} if many is None else {"many_runs": [one.to_dict() for one in many]}
        document |= {} if chosen is None else {"probes": [one.to_dict() for one in chosen]}
        typer.echo(dump(document))
    else:
        show(shown(plans), *curve_tables(curves(plans)))
        if many is not None:
            show(many_runs_table(many[: asked.top]))
        if chosen is not None:
            show(*probe_lines(chosen))
    if wanted.out is not None:
        _write(plans, wanted.out)
    if wanted.html is not None:
        _write_page(asked, plans, wanted.html, wanted.html_seconds)
    if plans.best is None:
        if not wanted.as_json:
            _say_what_would_fit(asked, plans)
        raise typer.Exit(1)


def _write_page(asked: _Asked, plans: Plans, path: Path, seconds: float) -> None:
    from foretrain.catalog import Catalog
    from foretrain.predictors.plugins import told_in_one_line
    from foretrain.web import plan_table, write_page
    from foretrain.web.plans import plan_section

    with told_in_one_line(type(asked.predictor)):
        catalog = Catalog.load(asked.options.get("catalog"))
        table = plan_table(plans, asked.predictor, seconds=seconds, catalog=catalog)
    if table is None:
        write_page("no plan", {"title": "No plan was found", "plans": plan_section(plans)}, path)
        say(f"page in {path}")
        return
    size = write_page(plans[0].job.workload.model.label, table.to_dict(path.parent), path)
    say(f"page of {table.points:,} forecasts in {path} ({size / 1e6:.1f} MB)")


def _write(plans: Plans, folder: Path) -> None:
    from foretrain.planner.launching import write_plans

    for one in write_plans(plans, folder):
        say(f"{one.folder}: the job alone: {one.refused}" if one.refused else f"{one.folder}: launch files")


def _say_what_would_fit(asked: _Asked, plans: Plans) -> None:
    """The smallest changes with which the plan that comes nearest to fitting would."""
    from foretrain.planner.planning import remedies

    if len(plans):
        return
    for line in remedies(asked.predictor, plans):
        say(f"would fit with {line}")


def _sweep(asked: _Asked, swept: Mapping[str, Sequence[Any]], as_json: bool) -> None:
    """The best plan for each combination of the values that are set."""
    from foretrain.report import dump
    from foretrain.report.plans import sweep_table

    planned = []
    for values in itertools.product(*swept.values()):
        settings = dict(zip(swept, values, strict=True))
        planned.append((settings, asked.plans(asked.job(settings))))
    if as_json:
        typer.echo(dump({"sweep": [{"set": one, **plans.to_dict()} for one, plans in planned]}))
    else:
        show(sweep_table(planned))
    if not any(plans.best for _, plans in planned):
        raise typer.Exit(1)


def _largest(asked: _Asked, quantity: str, as_json: bool) -> None:
    from foretrain.planner.largest import largest
    from foretrain.report import dump
    from foretrain.report.plans import largest_lines

    wanted = asked.wanted
    largest_fit = largest(quantity, asked.job({}), asked.plans, max(wanted.counts, default=wanted.most))
    if as_json:
        typer.echo(dump(largest_fit.to_dict()))
    else:
        show(*largest_lines(largest_fit))
    if largest_fit.option is None:
        raise typer.Exit(1)


def _learn(predictor: Predictor, path: Path) -> None:
    """Calibrate to measured runs, such as probes."""
    from foretrain.cli.app import say_left_out
    from foretrain.run import runs_of_file

    if not predictor.learns:
        raise InputError(f"runs: {predictor.name} learns nothing from {path}")
    measured = runs_of_file(path)
    predictor.fit(measured)
    say_left_out(list(predictor.left_out_))
    say(f"calibrated to {len(measured) - len(predictor.left_out_)} runs of {path}")


# What options say


def _settings(texts: Sequence[str]) -> tuple[dict[str, tuple[Any, ...]], dict[str, tuple[Any, ...]]]:
    """Axes of the plan that are held, and other fields of the job, each with its values."""
    from foretrain.options import section_of
    from foretrain.planner.space import HELD

    held: dict[str, tuple[Any, ...]] = {}
    fields: dict[str, tuple[Any, ...]] = {}
    for setting in texts:
        path, equals, text = setting.partition("=")
        section, _, name = path.partition(".")
        if not equals or not name:
            raise invalid("--set", setting, "of the form section.field=value, such as plan.tensor=2,4")
        section_of(section, name.partition(".")[0])
        if section == "plan" and name in HELD:
            held[name] = tuple(_plan_value(name, one) for one in text.split(","))
        else:
            several = not text.startswith(("[", "{", '"')) and name not in ("stages", "recompute_modules")
            fields[path] = tuple(text.split(",")) if several else (text,)
    return held, fields


def _plan_value(name: str, text: str) -> Any:
    """Read the value of a field as a plan has it, or refuse it as a plan does."""
    from foretrain.plan import Plan
    from foretrain.schema import convert

    hint: Any = {"reshard": bool, "offload": bool}.get(name)
    if hint is None:
        hint = str if name in ("shard", "recompute", "schedule", "balance") else int
    value = convert(setting_value(text), hint, f"plan.{name}")
    needs: dict[str, dict[str, Any]] = {"virtual_stages": {"schedule": "interleaved"}}
    needs |= {"replicate": {"shard": "zero1"}, "reshard": {"shard": "zero3"}}
    from foretrain.schema import read

    read(Plan, {name: value, **needs.get(name, {})}, "plan")
    return value


def _runs(text: str | None) -> tuple[int | None, Path | None]:
    """A number of runs, or a file of measured ones."""
    if text is None:
        return None, None
    if text.removeprefix("-").isdigit():
        if int(text) < 1:
            raise invalid("runs", text, "a number of at least 1, or a file of runs")
        return int(text), None
    return None, Path(text)
