"""Finds the largest batch, sequence, depth or model that still fits a cluster under some plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from foretrain.errors import ForetrainError, InputError, first_line, unknown
from foretrain.job import Job
from foretrain.model_names import model_presets
from foretrain.plan import Plan
from foretrain.planner.facts import Facts, layer_names
from foretrain.planner.outcome import Option, Plans
from foretrain.progress import tell

What = Literal["batch", "sequence", "layers", "model"]
WHAT: tuple[What, ...] = get_args(What)
_TOKENS = 1024
"""Sequences are told to so many tokens."""
_MOST_DOUBLINGS = 24

Planned = Callable[[Job, Mapping[str, Any]], Plans]
"""Plans of a job with axes held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest value that fits, with its plan."""

    what: What
    value: int | str
    option: Option | None
    """None where not even the smallest fits."""
    next_value: int | str | None
    """The one after it, which does not."""
    why: str = ""
    """Why that one does not."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "value": None if self.option is None else self.value,
            "plan": None if self.option is None else self.option.to_dict(),
            "next": self.next_value,
            "why": self.why,
        }


def largest(quantity: str, job: Job, planned: Planned, devices: int | None = None) -> Largest:
    """Find the largest by doubling and halving what is asked for; a batch is one that a step takes without
    adding up the gradients of several micro-batches, in multiples of the ``devices`` that are planned for:
    the job's own where nothing is said."""
    if quantity not in WHAT:
        raise unknown("largest", quantity, WHAT)
    if quantity == "model":
        return _model(job, planned)
    step, start, change = _scale(quantity, job, devices or job.cluster.world_size)
    held = {"accumulation": (1,)} if quantity == "batch" else {}

    def tried(value: int) -> tuple[Option | None, str]:
        tell(f"{quantity} {value:,}")
        try:
            plans = planned(change(value), held)
        except ForetrainError as error:
            return None, first_line(error)
        why = next((one.why for one in plans.by_cluster if not isinstance(one, Option)), "")
        return (plans[0] if len(plans) else None), why

    low, fitting, why = 0, None, ""
    high = max(1, start // step)
    for _ in range(_MOST_DOUBLINGS):
        option, why = tried(high * step)
        if option is None:
            break
        low, fitting, high = high, option, 2 * high
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        option, reason = tried(middle * step)
        if option is None:
            high, why = middle, reason
        else:
            low, fitting = middle, option
    return Largest(what=quantity, value=low * step, option=fitting, next_value=high * step, why=why)


def _scale(quantity: str, job: Job, devices: int) -> tuple[int, int, Callable[[int], Job]]:
    """The unit that a size is counted in, where it begins, and the job of another size."""
    training, facts = job.workload.training, Facts.of(job.workload)
    if quantity == "batch":
        return devices, devices, lambda value: _with_training(job, global_batch=value)
    if quantity == "sequence":
        if training.sequence is None:
            raise InputError("largest: 'sequence', but the job has no training.sequence")
        return _TOKENS, training.sequence, lambda value: _longer(job, value)
    if facts.layers is None or not layer_names(job.workload):
        raise InputError("largest: 'layers' needs a transformers model whose config names its layers")
    return 1, facts.layers, lambda value: _deeper(job, value)


def _with_training(job: Job, **fields: Any) -> Job:
    training = dataclasses.replace(job.workload.training, **fields)
    workload = dataclasses.replace(job.workload, training=training)
    world = job.cluster.world_size
    plan = Plan(data=1, pipeline=world)  # what the planner replaces
    return dataclasses.replace(job, workload=workload, plan=plan)


def _longer(job: Job, sequence: int) -> Job:
    """Give the model positions for so many tokens, where it has a table or a limit of them."""
    longer = _with_training(job, sequence=sequence)
    config = longer.workload.model.config
    known = None if config is None else config.get("max_position_embeddings")
    if not isinstance(known, int) or known >= sequence:
        return longer
    return _with_config(longer, max_position_embeddings=sequence)


def _deeper(job: Job, layers: int) -> Job:
    config = job.workload.model.config or {}
    names = layer_names(job.workload)
    changes: dict[str, Any] = dict.fromkeys(names, layers)
    per_layer = {
        name: value
        for name, value in config.items()
        if isinstance(value, list) and len(value) == config.get(names[0])
    }
    for name, value in per_layer.items():
        changes[name] = [value[i % len(value)] for i in range(layers)]
    return _with_config(job, **changes)


def _with_config(job: Job, **changes: Any) -> Job:
    model = job.workload.model
    model = dataclasses.replace(model, config={**(model.config or {}), **changes}, title=None)
    return dataclasses.replace(job, workload=dataclasses.replace(job.workload, model=model))


def _model(job: Job, planned: Planned) -> Largest:
    """Find, of the presets of the same type, the one with most parameters."""
    largest_model: tuple[str, Option] | None = None
    next_name, why = None, ""
    for name, larger in _presets(job):
        tell(f"model {name}")
        try:
            plans = planned(larger, {})
        except ForetrainError as error:
            next_name, why = name, first_line(error)
            continue
        if len(plans):
            largest_model = name, plans[0]
            break
        next_name = name
        why = next((one.why for one in plans.by_cluster if not isinstance(one, Option)), "")
    value, option = largest_model or ("", None)
    return Largest(what="model", value=value, option=option, next_value=next_name, why=why)


def _presets(job: Job) -> Iterator[tuple[str, Job]]:
    """Names of the catalogue's models of the job's type, the largest first."""
    kind = job.workload.model.model_type
    if kind is None:
        raise InputError("largest: 'model' needs a transformers model, whose type has presets")
    alike = [
        (float(preset.get("parameters", 0.0)), name, preset["config"])
        for name, preset in model_presets().items()
        if preset.get("config", {}).get("model_type") == kind
    ]
    for _, name, config in sorted(alike, key=lambda one: (-one[0], one[1])):
        model = dataclasses.replace(job.workload.model, config=config, title=name, name=None, args={})
        yield name, dataclasses.replace(job, workload=dataclasses.replace(job.workload, model=model))
