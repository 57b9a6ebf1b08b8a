"""Defines the tools that agents call: predict, plan, check, explain and catalog."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from foretrain.agents.arguments import (
    ENTRY,
    JOB,
    LIMITS,
    PAIR,
    PREDICTOR,
    SEARCH,
    Arguments,
    only,
    read,
    rest,
    schema,
)
from foretrain.agents.terms import Terms
from foretrain.errors import ForetrainError, InputError, invalid, unknown

if TYPE_CHECKING:
    from foretrain.job import Job
    from foretrain.predictors.base import Predictor

Given = Mapping[str, Any]

INSTRUCTIONS = (
    "Forecasts deep-learning trainings before they run, without a GPU: time, memory and cost, each with an "
    "interval in which the measured value lies in 8 of 10 cases. predict answers how long, how much memory, "
    "does it fit, what does it cost; plan answers which GPUs, how many and how to parallelise; check answers "
    "whether limits hold; explain answers why one job is slower or needs more memory than another; catalog "
    "lists the names that the others take. Tell users the interval beside the median, and assumptions that "
    "they can correct. Values are in SI units: seconds, bytes, joules."
)
_PLANS = 3
"""That are returned where no number is asked for."""
_SEARCHING = 0.6
"""Of the time that an answer may take, what a search for plans has; the rest is for forecasts of the best."""
_MOST_NAMES = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A short text, and the same as JSON values."""

    text: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One question that can be asked."""

    name: str
    words: str
    """When to use it, for a language model."""
    arguments: Arguments
    required: tuple[str, ...] = ()
    reply: Callable[[Given, Terms], Reply] = field(repr=False)

    def schema(self) -> dict[str, Any]:
        """Describe its arguments; where a job is described, any field of one may be among them."""
        return schema(self.arguments, required=self.required, others="model" in self.arguments)


def reply(name: str, given: Given, terms: Terms) -> Reply:
    """The answer of the tool of this name."""
    if name not in TOOLS:
        raise unknown("tool", name, TOOLS)
    return TOOLS[name].reply(given, terms)


# Jobs


def _job(given: Given, terms: Terms, *beside: Arguments, over: Job | None = None) -> Job:
    """The job that the arguments describe: a model or tables with options, or options over another job."""
    from foretrain.api import job_of

    named = read(given, {name: JOB[name] for name in ("model", "job")})
    options = rest(given, *beside)
    if len(named) == 2 or not (named or over):
        raise InputError("model: give model or job, and only one of them")
    target = next(iter(named.values()), over)
    terms.check_names(target, options)
    job = job_of(target, options)
    terms.check_job(job)
    return job


def _inner_job(name: str, given: Given, terms: Terms, over: Job | None = None) -> Job:
    """A job that is an argument itself; what stands against it is told with the argument's name."""
    try:
        return _job(given, terms, over=over)
    except ForetrainError as error:
        raise InputError(f"{name}: {error}") from error


def _predictor(given: Given) -> Predictor:
    """Find a predictor by name alone: folders and files are none."""
    from foretrain import predictors

    name = read(given, PREDICTOR).get("predictor", predictors.DEFAULT)
    if name not in predictors.known():
        raise unknown("predictor", name, predictors.known())
    return predictors.get(name)


# Tools


def _predict(given: Given, terms: Terms) -> Reply:
    from foretrain.agents.compact import forecast_data, forecast_text
    from foretrain.api import predict

    forecast = predict(_job(given, terms, PREDICTOR), predictor=_predictor(given))
    return Reply(text=forecast_text(forecast), data=forecast_data(forecast))


def _plan(given: Given, terms: Terms) -> Reply:
    from foretrain.agents.compact import plans_data, plans_text
    from foretrain.planner import plan
    from foretrain.planner.space import HELD
    from foretrain.units import parse_dollars

    asked = read(given, SEARCH)
    if "budget" in asked:
        asked["budget"] = parse_dollars(asked["budget"], "budget")
    if asked.get("top", 1) < 1:
        raise invalid("top", asked["top"], "a whole number of at least 1")
    held = {name: given[name] for name in HELD if given.get(name) is not None}
    described = {name: value for name, value in given.items() if name not in held}
    plans = plan(
        _job(described, terms, PREDICTOR, SEARCH),
        predictor=_predictor(given),
        seconds=_SEARCHING * terms.seconds,
        **{"top": _PLANS, **asked},
        **held,
    )
    return Reply(text=plans_text(plans), data=plans_data(plans))


def _check(given: Given, terms: Terms) -> Reply:
    from foretrain.agents.compact import explanation_data, rounded
    from foretrain.planner.checking import JobLimits, check_job
    from foretrain.report.check import NAMES, check_lines
    from foretrain.report.explain import explain
    from foretrain.units import parse_dollars, parse_memory, parse_seconds

    asked = read(given, LIMITS)
    before = _inner_job("base", asked.pop("base"), terms) if "base" in asked else None
    parsed = {
        field: parse(asked[name], name.replace("_", "-"))
        for name, field, parse in (
            ("max_time", "max_time_s", parse_seconds),
            ("max_cost", "max_cost", parse_dollars),
            ("max_memory", "max_memory_bytes", parse_memory),
        )
        if name in asked
    }
    limits = JobLimits(**parsed, **{name: asked[name] for name in ("fits", "risk") if name in asked})
    predictor = _predictor(given)
    checked = check_job(_job(given, terms, PREDICTOR, LIMITS), predictor, limits)
    explained = None
    if before is not None:
        explained = explain(predictor.predict(before), checked.forecast, names=NAMES)
    data = rounded(checked.to_dict()) | (
        {} if explained is None else {"against_base": explanation_data(explained)}
    )
    return Reply(text="\n".join(check_lines(checked, explained)), data=data)


def _explain(given: Given, terms: Terms) -> Reply:
    from foretrain.agents.compact import explanation_data
    from foretrain.report.explain import explain

    only(given, {**PAIR, **PREDICTOR})
    asked = read(given, PAIR)
    for name in PAIR:
        if name not in asked:
            raise InputError(f"{name}: missing; give two jobs, a and b")
    predictor = _predictor(given)
    first = _inner_job("a", asked["a"], terms)
    second = _inner_job("b", asked["b"], terms, over=first)
    explained = explain(predictor.predict(first), predictor.predict(second))
    return Reply(text="\n".join(explained.sentences), data=explanation_data(explained))


def _catalog(given: Given, terms: Terms) -> Reply:
    from foretrain.agents.compact import rounded
    from foretrain.catalog import Catalog
    from foretrain.catalog_entries import entries

    only(given, ENTRY)
    asked = read(given, ENTRY)
    if "kind" not in asked:
        raise InputError(f"kind: missing; one of {', '.join(get_args(ENTRY['kind'].hint))}")
    kind, name = asked["kind"], asked.get("name")
    listed = entries(kind, name, Catalog.load())
    if name is not None:
        return Reply(text=f"{kind}: {name}", data=rounded(next(iter(listed.values()))))
    words = asked.get("search", "").lower()
    names = [one for one in listed if words in one.lower()]
    text = f"{len(names)} of {len(listed)} {kind}"
    if len(names) > _MOST_NAMES:
        text += f", the first {_MOST_NAMES}; search for a part of a name to see others"
    return Reply(text=text, data={kind: names[:_MOST_NAMES]})


_ALL = (
    Tool(
        name="predict",
        words="How long a training takes, how much memory it needs, whether it fits, and what it costs: one "
        "job on one cluster with one plan. Give model (or job), device, devices, batch, sequence or image, "
        "precision; with steps (or samples and epochs) also total time and cost. Where it does not fit, "
        "fits_with names the smallest changes that would help. To choose devices or degrees of "
        "parallelism use plan; to compare two jobs use explain.",
        arguments={**JOB, **PREDICTOR},
        reply=_predict,
    ),
    Tool(
        name="plan",
        words="Which devices, how many, and how to parallelise (data, tensor, pipeline, context, expert, "
        "sharding, micro-batch, recomputation) for the least time, cost or energy, within a deadline or a "
        "budget. Without kinds, max_devices and counts the cluster is the job's own. An axis that is given "
        "(tensor: 4) is held to it. Takes longer than predict: seconds to minutes.",
        arguments={**JOB, **PREDICTOR, **SEARCH},
        reply=_plan,
    ),
    Tool(
        name="check",
        words="Whether a job keeps within limits: yes or no for each of max_time, max_cost, max_memory and "
        "fits, with the chance to miss it. Use it for 'does it fit', 'can I afford it', 'is it done by "
        "tomorrow'. With base also what changed against another job.",
        arguments={**JOB, **PREDICTOR, **LIMITS},
        reply=_check,
    ),
    Tool(
        name="explain",
        words="Why job b is slower, faster or larger than job a: seconds of a step by cause, bytes by "
        "category, and the fields that differ. Use it for 'why is it slower', 'what would change if'.",
        arguments={**PAIR, **PREDICTOR},
        required=("a", "b"),
        reply=_explain,
    ),
    Tool(
        name="catalog",
        words="The devices, nodes, hosts, models and prices that are known, or all figures of one with "
        "their sources. Use it where another tool does not know a name.",
        arguments=ENTRY,
        required=("kind",),
        reply=_catalog,
    ),
)
TOOLS: Mapping[str, Tool] = {tool.name: tool for tool in _ALL}
