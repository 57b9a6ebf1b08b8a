"""Puts the figures of a forecast into words, the same for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from foretrain.duration import DATA
from foretrain.forecast import Estimate, Forecast, RankMemory, fullest_of
from foretrain.job import Job
from foretrain.step.frameworks import logged_stage as stage_that_logs
from foretrain.units import counted, format_bytes, format_count, format_dollars, format_seconds

if TYPE_CHECKING:
    from foretrain.predictors.fitting_changes import Remedy
    from foretrain.predictors.recomputation import LayerRecomputation


@dataclass(frozen=True, slots=True)
class Figure:
    """A label, its value, and the 80 % interval or another detail."""

    label: str
    value: str
    detail: str = ""


def describe_model(job: Job) -> str:
    """``resnet50 (torchvision), training, batch 256, image 3x224x224, amp-bf16, sgd``."""
    model, training = job.workload.model, job.workload.training
    words = [
        model.label if model.title else f"{model.label} ({model.source})",
        "training" if training.mode == "train" else "inference",
        f"batch {training.global_batch:,}",
    ]
    if training.image_shape is not None:
        words.append("image " + "x".join(map(str, training.image_shape)))
    if training.sequence is not None:
        words.append(f"sequence {training.sequence:,}")
    words.append(training.precision)
    if training.mode == "train":
        words.append(training.optimizer)
    if training.adapter is not None:
        words.append(training.adapter.words)
    return ", ".join(words)


def describe_work(forecast: Forecast) -> str:
    """``25.6 M parameters, 6.22 TFLOP per step, 24.3 GFLOP per sample``; empty where the model could not be
    traced."""
    flops = forecast.flops
    if flops is None:
        return ""
    words = [f"{_count(flops.parameters)} parameters"]
    if flops.trainable not in (None, flops.parameters):
        words[0] += f" ({_count(flops.trainable or 0)} trained)"
    if flops.flops:
        words.append(f"{format_count(flops.flops, 'FLOP')} per {'step' if forecast.job.trains else 'batch'}")
        words.append(f"{format_count(flops.per_sample, 'FLOP')} per sample")
    if flops.per_token:
        words[-1] = f"{format_count(flops.per_token, 'FLOP')} per token"
    return ", ".join(words)


def _count(parameters: int) -> str:
    """Write a count as models are called: 8.03 B, 25.6 M."""
    return format_count(parameters).replace("G", "B")


def describe_cluster(job: Job) -> str:
    """``on 16 x h100-sxm-80gb (2 nodes of 8), data 2 x tensor 8, 4 micro-batches of 2``."""
    groups = []
    for group in job.cluster.groups:
        cores = f" ({counted(group.device.cores, 'core')} each)" if group.device.is_cpu else ""
        spread = f" ({group.nodes} nodes of {group.devices_per_node})" if group.nodes > 1 else ""
        groups.append(f"{group.world_size} x {group.device.name}{cores}{spread}")
    words = [f"on {' and '.join(groups)}"]
    if job.cluster.world_size > 1:
        degrees = {
            name: getattr(job.plan, name) for name in ("data", "tensor", "pipeline", "context", "expert")
        }
        words.append(
            " x ".join(f"{name} {degree}" for name, degree in degrees.items() if name == "data" or degree > 1)
        )
        words += [] if job.plan.shard == "none" else [job.plan.shard]
    if job.accumulation > 1:
        words.append(f"{job.accumulation} micro-batches of {job.micro_batch}")
    return ", ".join(words)


def step_size(job: Job) -> tuple[int, int | None]:
    """Samples and, where they are sequences, tokens that a step trains on."""
    training = job.workload.training
    return training.global_batch, training.global_batch * training.sequence if training.sequence else None


def step_figure(forecast: Forecast) -> Figure | None:
    """Time per step; of inference the latency of a batch."""
    estimate = forecast.quantities.get("step_time_s")
    label = "time per step" if forecast.job.trains else "latency of a batch"
    return None if estimate is None else _figure(label, estimate, format_seconds)


def step_parts(forecast: Forecast) -> dict[str, float]:
    """List what a step goes to, in seconds: the parts that are not empty, where there are several."""
    parts = {} if forecast.step is None else forecast.step.causes_s
    shown = {name: seconds for name, seconds in parts.items() if seconds > 0}
    return shown if len(shown) > 1 else {}


def rate_figures(forecast: Forecast) -> Iterator[Figure]:
    """Throughput, the share of the devices' peak that it takes, how busy the device is, what a rank sends,
    and the time of each phase where there are several."""
    quantities = forecast.quantities
    for name, unit in (("samples_per_s", "samples/s"), ("tokens_per_s", "tokens/s")):
        if name in quantities:
            unit = f"{unit}, without waiting for data" if _waits_for_data(forecast) else unit
            yield _figure("throughput", quantities[name], _rate, unit)
    yield from _flops(forecast)
    if "device_utilization" in quantities:
        yield _figure("device busy", quantities["device_utilization"], "{:.0%}".format)
    yield from _network(forecast)
    phases = {
        phase: quantities[f"{phase}_time_s"].median
        for phase in ("forward", "backward", "optimizer")
        if f"{phase}_time_s" in quantities and forecast.job.trains
    }
    for number, (phase, seconds) in enumerate(phases.items()):
        words = "" if number else "by the device's clock, in a step that begins idle"
        yield Figure(phase, format_seconds(seconds), words)


def _flops(forecast: Forecast) -> Iterator[Figure]:
    """Write what one device does of the throughput and of the model's arithmetic, and in training the share
    of its peak."""
    flops, time = forecast.flops, forecast.quantities.get("step_time_s")
    if flops is None or time is None:
        return
    if flops.devices > 1:
        tokens = flops.tokens_per_device(time)
        rate, unit = (tokens, "tokens/s") if tokens else (flops.samples_per_device(time), "samples/s")
        yield _figure("  of each device", rate, _rate, unit)
    if not flops.flops:
        return
    yield _figure("FLOP/s per device", flops.rate(time), lambda rate: format_count(rate, "FLOP/s"))
    if not forecast.job.trains:
        return
    shares = {"MFU": flops.mfu(time), "HFU": flops.hfu(time) if flops.recomputed else None}
    for label, share in shares.items():
        if share is not None and flops.peak_per_device is not None:
            figure = _figure(label, share, "{:.1%}".format)
            of = f"of {format_count(flops.peak_per_device, 'FLOP/s')} ({flops.peak_format}, dense)"
            of = "with what is computed again" if label == "HFU" else of
            yield Figure(figure.label, figure.value, f"{figure.detail} {of}")


def _waits_for_data(forecast: Forecast) -> bool:
    parts = () if forecast.duration is None else forecast.duration.parts
    return any(part.name == DATA and part.time_s.median > 0 for part in parts)


def _network(forecast: Forecast) -> Iterator[Figure]:
    """Write what a rank sends and receives, as one figure where both are the same."""
    sent, received = (
        forecast.quantities.get(f"network_{direction}_bytes_per_s") for direction in ("tx", "rx")
    )
    rates = (
        {"network per rank, each way": sent}
        if sent == received
        else {"sent per rank": sent, "received per rank": received}
    )
    for label, estimate in rates.items():
        if estimate is not None and estimate.median:
            yield _figure(label, estimate, lambda rate: format_count(rate, "B/s"))


# Memory


def memory_figures(forecast: Forecast) -> Iterator[Figure]:
    """The peak that the categories make up, of the fullest stage; then that of the stage whose memory is
    logged; what the allocator holds."""
    peak, reserved = (
        forecast.quantities.get(name) for name in ("peak_memory_bytes", "reserved_memory_bytes")
    )
    logged, fullest = logged_stage(forecast), fullest_stage(forecast)
    if logged is None or fullest is None:
        each = forecast.job.cluster.world_size > 1
        titles = ("memory of each rank" if each else "memory at peak", "reserved")
    else:
        titles = (f"peak of stage {logged.stage} (logged)", f"reserved, stage {logged.stage}")
        if peak is not None and logged.stage == fullest.stage:
            titles = (f"peak of stage {fullest.stage} (fullest)", titles[1])
        elif peak is not None:
            share = fullest.allocated_bytes / logged.allocated_bytes
            yield _figure(f"peak of stage {fullest.stage} (fullest)", peak * share, format_bytes)
    for title, estimate in zip(titles, (peak, reserved), strict=True):
        if estimate is not None:
            yield _figure(title, estimate, format_bytes)


def peak_moment(forecast: Forecast) -> Figure | None:
    """Name the moment when the memory of the fullest rank is at its peak: the phase of the step, and what
    runs then."""
    moment = forecast.peak_moment
    if moment is None:
        return None
    names = {"forward": "in the forward pass", "backward": "in the backward pass",
             "optimizer": "in the optimizer's update"}  # fmt: skip
    runs = f"{moment.operator} of {moment.layer}" if moment.layer else moment.operator
    words = [names.get(moment.phase, moment.phase)] if forecast.job.trains else []
    return Figure("peak reached", ", ".join([*words, *([f"in {runs}"] if runs else [])]))


def fullest_stage(forecast: Forecast) -> RankMemory | None:
    """The stage with most memory; None without several stages."""
    return fullest_of(forecast.ranks) if len(forecast.ranks) > 1 else None


def logged_stage(forecast: Forecast) -> RankMemory | None:
    """The stage that the quantities are of, which is the one that the framework logs; None without several
    stages."""
    if len(forecast.ranks) < 2:
        return None
    stage = stage_that_logs(forecast.job)
    return fullest_of(forecast.ranks) if stage < 0 else forecast.ranks[stage]


def stage_sizes(forecast: Forecast) -> list[str]:
    """``0: 25.1 GiB (fullest)``, ``1: 21.6 GiB``, ``2: 19.4 GiB (logged)``; empty without several stages."""
    fullest, logged = fullest_stage(forecast), logged_stage(forecast)
    if fullest is None or logged is None:
        return []
    marks = {logged.stage: " (logged)", fullest.stage: " (fullest)"}
    return [
        f"{rank.stage}: {format_bytes(rank.allocated_bytes)}{marks.get(rank.stage, '')}"
        for rank in forecast.ranks
    ]


def category_sizes(forecast: Forecast) -> dict[str, int]:
    """Bytes at the peak by category, for people: those that are not empty."""
    return {name.replace("_", " "): size for name, size in forecast.memory_by_category.items() if size > 0}


def training_figures(forecast: Forecast) -> Iterator[Figure]:
    """An epoch, the whole training, its cost and its energy, as far as they are known."""
    for name, label in (("epoch_time_s", "one epoch"), ("total_time_s", "whole training")):
        if name in forecast.quantities:
            yield _figure(label, forecast.quantities[name], format_seconds)
    yield from _parts(forecast)
    if forecast.cost is not None:
        yield _figure("cost", forecast.cost, format_dollars)
    if forecast.price_per_hour is not None:
        price = format_dollars(forecast.price_per_hour)
        yield Figure("price per hour", price, forecast.job.cluster.price_source)
        yield from _price_of_many(forecast)
    if forecast.energy_j is not None:
        yield _figure("energy", forecast.energy_j, lambda joules: format_count(joules / 3600, "Wh"))


def _price_of_many(forecast: Forecast) -> Iterator[Figure]:
    """Price a million tokens, or samples, of inference where every batch follows the one before."""
    name = "tokens" if "tokens_per_s" in forecast.quantities else "samples"
    rate = forecast.quantities.get(f"{name}_per_s")
    if forecast.job.trains or rate is None or forecast.price_per_hour is None:
        return
    per_second = forecast.price_per_hour / 3600
    low, price, high = (format_dollars(1e6 * per_second / one) for one in (rate.high, rate.median, rate.low))
    yield Figure(f"price of 1 M {name}", price, f"[{low} to {high}]")


def _parts(forecast: Forecast) -> Iterator[Figure]:
    """List what the whole training goes to, with where each figure comes from."""
    for part in forecast.duration.parts if forecast.duration is not None else ():
        figure = _figure(f"  {part.name}", part.time_s, format_seconds)
        yield Figure(figure.label, figure.value, f"{figure.detail} {part.source}")


Verdict = Literal["yes", "perhaps", "no"]


def fits(forecast: Forecast) -> tuple[Verdict, Figure] | None:
    """Whether the memory of the fullest rank suffices, in words how likely it does not; None when it is not
    known."""
    need = forecast.fullest
    chance, capacity = forecast.out_of_memory_chance, forecast.memory_capacity_bytes
    if chance is None or need is None or not capacity:
        return None
    verdict: Verdict = "yes" if chance <= 0.1 else "perhaps" if chance <= 0.5 else "no"
    fullest = fullest_stage(forecast)
    share = f"{need.median / capacity:.0%} of {format_bytes(capacity)}"
    words = f"{verdict}: {chance_words(chance)} chance of running out of memory ({share})"
    if verdict == "no":
        needs = f"needs {format_bytes(need.median)} of {format_bytes(capacity)}"
        words = f"no: does not fit, {chance_words(chance)} sure: {needs} ({need.median / capacity:.0%})"
    words += _short_of(forecast)
    return verdict, Figure(f"fits, stage {fullest.stage}" if fullest else "fits", words)


def _short_of(forecast: Forecast) -> str:
    """Say what of the memory goes beyond the device: tensors, gaps between them, or the cache alone."""
    short = forecast.memory_short_of
    if short is None:
        return ""
    rank = fullest_of(forecast.ranks)
    tensors, reserved = format_bytes(rank.allocated_bytes), format_bytes(rank.reserved_bytes)
    if short == "tensors":
        saved = format_bytes(rank.open_bytes)
        settings = "recompute, gradient_precision or fp8_gather"
        may = f"; {settings}, which the job leaves open, may save {saved}" if rank.open_bytes else ""
        return f"; its tensors alone are {tensors}{may}"
    if short == "fragmentation":
        return f"; its tensors would fit ({tensors}), not what lies unused between them"
    return f"; torch would hold {reserved}, so it returns memory to the device {rank.returns}x in each step"


def remedies(forecast: Forecast) -> list[Figure]:
    """The changes that make the job fit, each with its memory and what it costs in time; empty where it fits
    or nobody asked."""
    remedied = forecast.remedies
    if remedied is None:
        return []
    none = [Figure("would fit with", "none of the changes that were tried")]
    return [
        Figure("" if number else "would fit with", one.change, _remedy(forecast, one))
        for number, one in enumerate(remedied)
    ] or none


def recomputation(forecast: Forecast) -> Iterator[Figure]:
    """Write what recomputation saves and costs: of the whole step, and of a layer of each kind."""
    recomputed = forecast.recomputation
    if recomputed is None:
        return
    costs = f"costs {format_seconds(recomputed.added_s)}"
    if recomputed.saved_bytes is None:
        yield Figure("recomputation", "by the model", f"{costs} on the device in a step")
    else:
        before_s = forecast["step_time_s"].median - recomputed.added_s
        share = f" ({_slower(recomputed.added_s / before_s)})" if before_s > 0 else ""
        yield Figure(
            "recomputation", f"saves {format_bytes(recomputed.saved_bytes)}", f"{costs} of a step{share}"
        )
    kinds: dict[str, list[LayerRecomputation]] = {}
    for layer in recomputed.layers:
        kind = ".".join("*" if part.isdigit() else part for part in layer.name.split("."))
        kinds.setdefault(kind, []).append(layer)
    for kind, layers in kinds.items():
        saved = sum(layer.saved_bytes for layer in layers) / len(layers)
        seconds = sum(layer.recomputed_s for layer in layers) / len(layers)
        each = f"costs {format_seconds(seconds)} on the device"
        many = f", each of {len(layers)}" if len(layers) > 1 else ""
        yield Figure(f"  {kind}", f"saves {format_bytes(saved)}", each + many)


def _remedy(forecast: Forecast, remedy: Remedy) -> str:
    """``71.2 GiB, +3% time``; with the capacity and the price where they are others."""
    size = format_bytes(remedy.memory.median)
    if remedy.capacity_bytes != forecast.memory_capacity_bytes:
        size += f" of {format_bytes(remedy.capacity_bytes)}"
    words = [size]
    if remedy.slower is not None:
        words.append(_slower(remedy.slower))
    if remedy.price_per_hour is not None and remedy.price_per_hour != forecast.price_per_hour:
        words.append(f"{format_dollars(remedy.price_per_hour)}/h")
    return ", ".join(words)


def _slower(share: float) -> str:
    """``+3% time``; where it is far from that, ``2.4x the time`` or ``3.1x as fast``."""
    if share >= 1.0:
        return f"{1 + share:.3g}x the time"
    if share <= -0.5:
        return f"{1 / (1 + share):.3g}x as fast"
    return f"{share:+.0%} time" if abs(share) >= 0.005 else "same time"


def chance_words(value: float) -> str:
    """Whole percents; never "0%" or "100%", as nothing is certain."""
    return "under 1%" if value < 0.01 else "over 99%" if value > 0.99 else f"{value:.0%}"


def notes(forecast: Forecast) -> list[str]:
    """List what to know when reading the figures."""
    logged, framework = logged_stage(forecast), forecast.job.workload.training.framework
    which = (
        []
        if logged == fullest_stage(forecast) or logged is None
        else [f"{framework} logs the memory of stage {logged.stage}"]
    )
    return [
        f"predicted by {forecast.predictor}; in brackets the 80 % interval",
        *([forecast.evidence.line] if forecast.evidence is not None else []),
        *which,
        *forecast.all_assumptions,
    ]


def _figure(label: str, estimate: Estimate, form: Callable[[float], str], unit: str = "") -> Figure:
    return Figure(
        label, f"{form(estimate.median)} {unit}".rstrip(), f"[{form(estimate.low)} to {form(estimate.high)}]"
    )


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
