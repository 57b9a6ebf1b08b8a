"""What holds for random jobs and plans by every predictor: a refusal in one line, or a forecast that physics
allows."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretrain import predictors
from foretrain.errors import InputError, UnsupportedJob
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.predictors.base import Predictor
from foretrain.predictors.checks import check_forecast, made_up_runs
from foretrain.predictors.ray_models import RayModelsPredictor
from foretrain.predictors.ray_models.search import STARTERS, Budget
from foretrain.predictors.roofline import RooflinePredictor
from foretrain.run import Run

WIDTH, LAYERS, VOCABULARY, SEQUENCE = 1024, 4, 8192, 512
LLAMA = {
    "source": "transformers",
    "task": "causal-lm",
    "config": {
        "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": VOCABULARY,
    },
}  # fmt: skip
LLAMA_PRODUCTS = LAYERS * (4 * WIDTH**2 + 6 * WIDTH**2) + VOCABULARY * WIDTH
"""Parameters that every token is multiplied with; the embedding, of as many as the last layer, is a table."""
LLAMA_PARAMETERS = LLAMA_PRODUCTS + VOCABULARY * WIDTH
MLP = {"source": "python", "name": "mlp.py:make"}
CNN = {"source": "torchvision", "name": "squeezenet1_1"}
CNN_PARAMETERS = 727_626
"""With ten classes."""
CNN_FLOPS = 2 * 10e6
"""Of the forward pass of an image of 32x32, at least."""
MLP_PARAMETERS = 8 * 2048**2
MLP_FILE = """
import torch

def make(batch):
    layers = [torch.nn.Linear(2048, 2048, bias=False) for _ in range(8)]
    return torch.nn.Sequential(*layers), (torch.zeros(batch, 2048),), lambda output: output.sum()
"""
PARAMETERS = {
    "transformers": LLAMA_PARAMETERS, "python": MLP_PARAMETERS, "torchvision": CNN_PARAMETERS,
}  # fmt: skip
PLAIN = {"optimizer": "sgd", "precision": "fp32"}
TRAININGS = (
    PLAIN,
    {"optimizer": "adamw", "precision": "amp-bf16"},
    {"optimizer": "adamw", "precision": "bf16", "master_weights": True},
    {"optimizer": "sgd", "precision": "fp32", "mode": "infer"},
)
FRAMEWORKS = ("pytorch", "megatron", "nanotron", "llm-foundry")
DEVICES = ("h100-sxm-80gb", "a100-sxm-80gb", "v100-sxm-32gb", "t4", "h200-sxm-141gb", "cpu")
LINKS = ("10 Mbit/s", "1 Gbit/s", "100 Gbit/s")
LENGTHS: tuple[dict[str, Any], ...] = ({}, {"steps": 100}, {"samples": 10_000, "epochs": 2})
OPTIMIZER_STATES = {"sgd": 1, "adamw": 2}


@st.composite
def plain_jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Data parallelism of small images and products, as the campaigns have it that shipped predictors learned
    from, and a little beyond."""
    device = draw(st.sampled_from(("cpu", "cpu", "h200-sxm-141gb", "t4")))
    per_node, nodes = draw(st.sampled_from((1, 2, 4, 16))), draw(st.sampled_from((1, 1, 2, 4)))
    model = draw(st.sampled_from((CNN, CNN, MLP)))
    batch = per_node * nodes * draw(st.sampled_from((2, 16, 32)))
    training = {**PLAIN, "global_batch": batch, **draw(st.sampled_from(LENGTHS))}
    training |= {"image": 32, "classes": 10} if model is CNN else {}
    return {
        "model": model, "training": training, "cluster": draw(clusters(device, per_node, nodes)),
        "plan": {"servers": draw(st.sampled_from((0, 0, 1)))},
    }  # fmt: skip


@st.composite
def clusters(draw: st.DrawFn, device: str, per_node: int, nodes: int) -> dict[str, Any]:
    cluster: dict[str, Any] = {"device": device, "devices_per_node": per_node, "nodes": nodes}
    cluster |= {"cores_per_device": draw(st.sampled_from((1, 2)))} if device == "cpu" else {}
    return cluster | ({"inter_node": draw(st.sampled_from(LINKS))} if nodes > 1 else {})


@st.composite
def split_jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Any plan that fits its cluster."""
    device = draw(st.sampled_from(DEVICES))
    per_node, nodes = draw(st.sampled_from((1, 2, 4, 8))), draw(st.sampled_from((1, 1, 2, 4)))
    world = per_node * nodes
    plan: dict[str, Any] = {}
    model = draw(st.sampled_from((LLAMA, LLAMA, MLP)))
    left = world
    if model is LLAMA:
        for name in ("tensor", "pipeline", "context"):
            plan[name] = draw(st.sampled_from([degree for degree in (1, 1, 2, 4) if left % degree == 0]))
            left //= plan[name]
    plan["shard"] = draw(st.sampled_from(("none", "none", "zero1", "zero2", "zero3")))
    plan["recompute"] = draw(st.sampled_from(("none", "none", "full", "selective")))
    plan["offload"] = draw(st.sampled_from((False, False, False, True)))
    plan["servers"] = draw(st.sampled_from((0, 0, 0, 2)))
    if plan.get("pipeline", 1) > 1:
        plan["schedule"] = draw(st.sampled_from(("gpipe", "1f1b", "interleaved")))
    plan["micro_batch"] = 2
    training: dict[str, Any] = dict(draw(st.sampled_from(TRAININGS)))
    training["global_batch"] = 2 * left * draw(st.sampled_from((1, 2, 8)))
    if model is LLAMA:
        training |= {"sequence": SEQUENCE, "framework": draw(st.sampled_from(FRAMEWORKS))}
    training |= draw(st.sampled_from(LENGTHS))
    cluster = draw(clusters(device, per_node, nodes))
    return {"model": model, "training": training, "cluster": cluster, "plan": plan}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model of the user's own, and a cache that all jobs share."""
    path = tmp_path_factory.mktemp("properties")
    (path / "mlp.py").write_text(MLP_FILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETRAIN_CACHE", str(path / "cache"))
        yield path


def read(tables: Mapping[str, Any], base: Path) -> Job | None:
    try:
        return Job.read(tables, base=base)
    except InputError:
        return None


@functools.cache
def predictor(name: str, base: Path) -> Predictor:
    """As it is shipped, or where nothing is, taught by made-up runs."""
    made = (
        RayModelsPredictor(budget=Budget(starters=STARTERS[:2]))
        if name == "ray_models"
        else predictors.get(name)
    )
    if name in ("cherrypick", "ernest", "flops", "ray_models"):
        runs = []
        for nodes in (1, 2, 4):
            job = Job.read({
                "model": CNN, "training": {**PLAIN, "global_batch": 8 * nodes, "image": 32, "classes": 10},
                "cluster": {"device": "cpu", "cores_per_device": 2, "nodes": nodes},
            }, base=base)  # fmt: skip
            runs += [slow_run(one.job) for one in made_up_runs(made, job, count=3)]
        made.fit(runs)
    return made


def slow_run(job: Job) -> Run:
    """A run that takes three times as long as the data sheet allows."""
    forecast = RooflinePredictor().predict(job)
    return Run(job=job, measured={"step_time_s": 3 * forecast["step_time_s"].median})


def forecast_of(name: str, job: Job) -> Forecast | None:
    """The forecast, or None where it is refused, in one line."""
    one = predictor(name, job.workload.base)
    refusal = None
    try:
        forecast = one.predict(job)
    except UnsupportedJob as error:
        refusal = str(error)
    if refusal is not None:
        assert len(refusal.splitlines()) == 1
        return None
    check_forecast(one, forecast, job)
    return forecast


quickly = settings(
    max_examples=20,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
    database=None,
)
WHITE = ("deletepop", "roofline")
"""Those that forecast any plan."""


@pytest.mark.parametrize("name", predictors.names())
@quickly
@given(tables=plain_jobs())
def test_every_forecast_of_data_parallelism_is_possible(
    name: str, folder: Path, tables: dict[str, Any]
) -> None:
    check_job(name, read(tables, folder))


@pytest.mark.parametrize("name", WHITE)
@quickly
@given(tables=split_jobs())
def test_every_forecast_of_a_plan_is_possible(name: str, folder: Path, tables: dict[str, Any]) -> None:
    check_job(name, read(tables, folder))


@pytest.mark.parametrize("name", [name for name in predictors.names() if name not in WHITE])
@settings(parent=quickly, max_examples=10)
@given(tables=split_jobs())
def test_the_others_refuse_plans_that_they_do_not_know(
    name: str, folder: Path, tables: dict[str, Any]
) -> None:
    check_job(name, read(tables, folder))


def check_job(name: str, job: Job | None) -> None:
    forecast = None if job is None else forecast_of(name, job)
    if job is None or forecast is None:
        return
    check_arithmetic(forecast)
    check_memory(forecast)
    check_rates(forecast)
    check_laws(name, forecast)


def check_arithmetic(forecast: Forecast) -> None:
    """A step is no shorter than its matrix products at the peak rate of all devices together."""
    if "step_time_s" not in forecast.quantities:
        return
    job = forecast.job
    training = job.workload.training
    passes = 1 if training.mode == "infer" else 3
    samples, source = training.global_batch, job.workload.model.source
    if source == "transformers":
        work: float = passes * 2 * LLAMA_PRODUCTS * samples * SEQUENCE
    elif source == "torchvision":
        work = CNN_FLOPS * samples
    else:  # the first layer's input needs no gradient
        work = (passes * 2 - (passes == 3) / 4) * MLP_PARAMETERS * samples
    device = job.cluster.device
    fastest = max(
        device.peak_flops(kind) for kind in ("tf32" if training.precision == "fp32" else "bf16", "fp16")
    )
    if device.is_cpu:
        fastest = max(fastest, device.cores * 400e9)
    step_s = forecast["step_time_s"].median
    assert step_s >= work / (fastest * job.cluster.world_size), f"{work / step_s:.3g} FLOP/s"


def check_memory(forecast: Forecast) -> None:
    """The fullest rank holds at least the mean of what all hold of parameters, gradients and optimizer state."""
    job, need = forecast.job, forecast.fullest
    if need is None:
        return
    training, plan = job.workload.training, job.plan
    parameters = PARAMETERS[job.workload.model.source]
    item = 2 if training.precision == "bf16" else 4
    replicas = (plan.data or 1) * plan.context
    share = {"none": (1, 1, 1), "zero1": (1, 1, replicas), "zero2": (1, replicas, replicas),
             "zero3": (replicas, replicas, replicas)}[plan.shard]  # fmt: skip
    held = item / share[0]
    if training.mode == "train" and not plan.offload:
        held += item / share[1]
        held += 0 if plan.servers else item * OPTIMIZER_STATES[training.optimizer] / share[2]
    least = parameters * held / (plan.tensor * plan.pipeline)
    assert need.median >= 0.999 * least, f"{need.median:.4g} bytes where {least:.4g} are held"


def check_rates(forecast: Forecast) -> None:
    """Shares are at most one, the device is busy no longer than the step, links carry no more than they can,
    and rates and totals follow from the step time."""
    job, given = forecast.job, forecast.quantities
    for name in ("device_utilization", "memory_utilization"):
        assert name not in given or given[name].median <= 1.0
    if "step_time_s" not in given:
        return
    step_s = given["step_time_s"].median
    if "device_busy_s" in given:
        assert given["device_busy_s"].median <= step_s * 1.000001
    training = job.workload.training
    assert given["samples_per_s"].median * step_s == pytest.approx(training.global_batch)
    if training.total_steps is not None:
        assert given["total_time_s"].median >= training.total_steps * step_s * 0.999999
    group = job.cluster.groups[0]
    inside = (
        group.device.memory_bytes_per_s if group.device.is_cpu else group.intra_node.bandwidth_bytes_per_s
    )
    links = inside * (group.domain > 1 or job.plan.servers > 0) + group.inter_node.bandwidth_bytes_per_s * (
        group.nodes > 1
    )
    for name in ("network_tx_bytes_per_s", "network_rx_bytes_per_s"):
        assert name not in given or given[name].median <= links * 1.000001, name


def check_laws(name: str, forecast: Forecast) -> None:
    """A slower network makes no step shorter, nor do more samples, nor more nodes with as much for each, which
    send no less."""
    job = forecast.job
    if "step_time_s" not in forecast.quantities:
        return
    sections = job.to_dict()
    twice = {**sections["training"], "global_batch": 2 * job.workload.training.global_batch}
    check_no_shorter(name, forecast, changed(name, job, training=twice), "twice the samples")
    if job.cluster.nodes == 1:
        return
    slower = changed(name, job, cluster={**sections["cluster"], "inter_node": "1 Mbit/s"})
    check_no_shorter(name, forecast, slower, "a slower network")
    if job.plan.servers:
        return
    nodes = {**sections["cluster"], "nodes": 2 * job.cluster.nodes}
    plan = {**sections["plan"], "data": 2 * (job.plan.data or 1)}
    wider = changed(name, job, training=twice, cluster=nodes, plan=plan)
    check_no_shorter(name, forecast, wider, "more nodes with as much each")
    sent = "network_tx_bytes_per_s"
    if wider is not None and sent in forecast.quantities:
        before, after = (one[sent].median * one["step_time_s"].median for one in (forecast, wider))
        assert after >= 0.999 * before, "more nodes send less"


def check_no_shorter(name: str, forecast: Forecast, other: Forecast | None, what: str) -> None:
    """Of what is computed, by the median, but for kernels that like a size better; of what is learned from
    runs, beyond doubt."""
    if other is None:
        return
    before, after = forecast["step_time_s"], other["step_time_s"]
    if name in WHITE:
        assert after.median >= 0.9 * before.median, f"{what} in less time"
    else:
        assert after.high >= before.low, f"{what} in less time, for certain"


def changed(name: str, job: Job, **sections: Any) -> Forecast | None:
    """The forecast with other sections; None where there is none."""
    other = read({**job.to_dict(), **sections}, job.workload.base)
    return None if other is None else forecast_of(name, other)
