"""What no forecast may say: a step faster than its arithmetic, memory below its parameters, rates beyond the
links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from foretrain.duration import start_up
from foretrain.errors import UnsupportedJob
from foretrain.forecast import Estimate, Forecast, whole_training
from foretrain.graph import Buffer, Op, OpGraph, Phase, Weight
from foretrain.job import Job
from foretrain.predictors import blackbox, physics
from foretrain.predictors.base import Predictor
from foretrain.run import Run
from foretrain.step.graph import step_graph
from foretrain.step.state import model_size
from made_up import call, product, spec

SIDE = 4096
FLOPS = 2 * SIDE**3
H100_FP32 = 66.9e12
WEIGHT_BYTES = SIDE * SIDE * 4


class Says(Predictor):
    """Forecasts what it is told to."""

    name = "says"
    quantities: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, **told: Estimate) -> None:
        self.told = told

    def fit(self, runs: Iterable[Run]) -> Self:
        return self

    def predict(self, job: Job) -> Forecast:
        return Forecast(job=job, predictor=self.name, quantities=self.told)


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    """A step of three products of one parameter, with momentum."""
    multiply, update = product(SIDE, SIDE, SIDE), call("_foreach_add_", spec(SIDE, SIDE))
    phases: tuple[Phase, ...] = ("forward", "backward", "backward", "optimizer")
    ops = tuple(Op(update if phase == "optimizer" else multiply, phase, "layer", (), ()) for phase in phases)
    buffers = (
        Buffer(WEIGHT_BYTES, "weights", -1, 4),
        Buffer(WEIGHT_BYTES, "optimizer_state", -1, 4),
        Buffer(WEIGHT_BYTES, "gradients", 2, 4),
        Buffer(WEIGHT_BYTES, "activations", 0, 2),
    )
    graph = OpGraph(
        ops=ops, buffers=buffers, samples=SIDE, weights=(Weight("layer.weight", SIDE * SIDE, "float32"),)
    )
    graph.save(tmp_path / "step.json.zst")
    return tmp_path / "step.json.zst"


def job(graph: Path, plan: Mapping[str, Any] | None = None, devices: int = 1, **training: Any) -> Job:
    data = devices // (plan or {}).get("pipeline", 1)
    return Job.read({
        "model": {"source": "graph", "name": str(graph)},
        "training": {"global_batch": SIDE * data, **training},
        "cluster": {"device": "h100-sxm-80gb", "devices_per_node": devices},
        "plan": plan or {},
    })  # fmt: skip


def around(value: float) -> Estimate:
    return Estimate(value, 0.5 * value, 2 * value, 0.25 * value, 4 * value)


def test_a_step_takes_as_long_as_its_arithmetic(graph_file: Path) -> None:
    asked = job(graph_file, steps=10, samples=2 * SIDE)
    least_s = 3 * FLOPS / (H100_FP32 * physics.ABOVE_DATA_SHEET)
    with pytest.raises(UnsupportedJob, match=r"step_time_s: says forecasts .* cannot be: the arithmetic"):
        Says(**whole_training(asked, around(0.99 * least_s))).predict(asked)
    forecast = Says(**whole_training(asked, around(1.5 * least_s))).predict(asked)
    assert forecast["step_time_s"].median == pytest.approx(1.5 * least_s)
    for name, count in (("step_time_s", 1), ("epoch_time_s", 2)):
        assert forecast[name].low == pytest.approx(count * least_s)
        assert forecast[name].low_95 == pytest.approx(count * least_s)
        assert forecast[name].high == pytest.approx(count * 3 * least_s)
    assert forecast["samples_per_s"].high == pytest.approx(SIDE / least_s)


@pytest.mark.parametrize("name", ["epoch_time_s", "total_time_s"])
def test_a_training_takes_as_long_as_its_arithmetic(graph_file: Path, name: str) -> None:
    asked = job(graph_file, steps=10, samples=2 * SIDE)
    with pytest.raises(UnsupportedJob, match=name):
        Says(**{name: around(3 * FLOPS / H100_FP32)}).predict(asked)  # what one step takes


def test_micro_batches_add_up_and_stages_share(graph_file: Path) -> None:
    graph = OpGraph.load(graph_file)
    once_s = physics.shortest_step_s(job(graph_file), graph)
    twice = job(graph_file, plan={"micro_batch": SIDE}, devices=2)
    assert physics.shortest_step_s(twice, graph) == once_s
    several = Job.read({
        **job(graph_file).to_dict(),
        "training": {"global_batch": 2 * SIDE},
        "plan": {"micro_batch": SIDE},
    })  # fmt: skip
    assert physics.shortest_step_s(several, graph) == pytest.approx(2 * once_s)


def test_algorithms_with_fewer_multiplications_are_allowed_for() -> None:
    filters = {
        size: call(
            "convolution", spec(8, 64, 56, 56), spec(64, 64, size, size), outputs=(spec(8, 64, 56, 56),),
            input="%0", weight="%1",
        )
        for size in (1, 3)
    }  # fmt: skip
    device = job_device()
    least = {size: physics._least_s(one, device, "fp32") for size, one in filters.items()}
    assert least[3] == pytest.approx(9 * physics.WINOGRAD_SHARE * least[1])


def job_device() -> Any:
    from foretrain.cluster import Catalog

    return Catalog.load().device("v100-sxm-32gb")


def test_memory_holds_the_parameters_and_what_is_kept_for_them(graph_file: Path) -> None:
    asked, least = job(graph_file), 3 * WEIGHT_BYTES
    for name in ("peak_memory_bytes", "reserved_memory_bytes"):
        with pytest.raises(UnsupportedJob, match=f"{name}: .* parameters, gradients and optimizer state"):
            Says(**{name: around(0.9 * least)}).predict(asked)
        assert Says(**{name: around(1.1 * least)}).predict(asked)[name].low == pytest.approx(least)


@pytest.mark.parametrize(
    ("plan", "shares"),
    [
        ({"shard": "none"}, 3.0),
        ({"shard": "zero1"}, 2.0 + 1 / 4),
        ({"shard": "zero2"}, 1.0 + 2 / 4),
        ({"shard": "zero3"}, 3 / 4),
        ({"offload": True}, 1.0),
        ({"servers": 2}, 2.0),
    ],
)
def test_a_plan_shards_what_a_rank_keeps(graph_file: Path, plan: dict[str, Any], shares: float) -> None:
    asked = job(graph_file, plan, devices=4)
    assert physics.least_memory_bytes(asked, OpGraph.load(graph_file)) == pytest.approx(shares * WEIGHT_BYTES)


def test_a_network_rate_is_at_most_that_of_the_links() -> None:
    def over(nodes: int, per_node: int) -> Job:
        return Job.read({
            "model": {"source": "timm", "name": "resnet18"},
            "training": {"global_batch": nodes * per_node},
            "cluster": {"device": "t4", "nodes": nodes, "devices_per_node": per_node,
                        "inter_node": "1 GB/s", "intra_node": "4 GB/s"},
        })  # fmt: skip

    for nodes, per_node, most in ((2, 1, 1e9), (1, 2, 4e9), (2, 2, 5e9)):
        asked = over(nodes, per_node)
        assert physics.link_bytes_per_s(asked) == most
        for name in ("network_tx_bytes_per_s", "network_rx_bytes_per_s"):
            with pytest.raises(UnsupportedJob, match=f"{name}: .* the links of a rank carry"):
                Says(**{name: around(1.01 * most)}).predict(asked)
            assert Says(**{name: around(0.9 * most)}).predict(asked)[name].high == most


def test_parameter_servers_are_reached_over_the_links_that_lead_to_them() -> None:
    cluster = {"device": "t4", "inter_node": "1 GB/s", "intra_node": "4 GB/s"}

    def rate(**servers: Any) -> float:
        return physics.link_bytes_per_s(Job.read({
            "model": {"source": "timm", "name": "resnet18"}, "training": {"global_batch": 1},
            "cluster": {**cluster, **servers}, "plan": {"servers": 1},
        }))  # fmt: skip

    assert rate() == 4e9
    assert rate(servers={"nodes": 1}) == 5e9


@pytest.mark.parametrize("name", ["device_utilization", "memory_utilization", "memory_busy"])
def test_a_share_is_at_most_all(name: str, graph_file: Path) -> None:
    with pytest.raises(UnsupportedJob, match=f"{name}: says forecasts 1.2"):
        Says(**{name: around(1.2)}).predict(job(graph_file))


def test_power_is_at_most_that_of_the_board(graph_file: Path) -> None:
    cut = Says(power_w=around(500.0)).predict(job(graph_file)).quantities["power_w"]
    assert (cut.median, cut.high, cut.high_95) == (500.0, 700.0, 700.0)


def resnet(**training: Any) -> Job:
    return Job.read({
        "model": {"source": "torchvision", "name": "resnet18"},
        "training": {"global_batch": 8, "image": 32, **training},
        "cluster": {"device": "t4"},
    })  # fmt: skip


def test_the_check_does_not_depend_on_what_was_traced_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETRAIN_CACHE", str(tmp_path))
    for _ in range(2):
        with pytest.raises(UnsupportedJob, match="which cannot be"):
            Says(step_time_s=around(1e-12)).predict(resnet(global_batch=7))


def test_totals_do_not_depend_on_what_was_traced_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start-up of a compiled model does, by its operators."""
    monkeypatch.setenv("FORETRAIN_CACHE", str(tmp_path))
    asked = resnet(global_batch=9, compile=True, steps=100)
    first = blackbox.forecast_around(asked, "says", 1.0, blackbox.UNSURE)
    size = model_size(asked, step_graph(asked))
    assert first.duration is not None
    assert first.duration.parts[0] == start_up(asked, size)
    assert blackbox.forecast_around(asked, "says", 1.0, blackbox.UNSURE) == first


def test_a_model_that_cannot_be_traced_is_not_checked_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    told = Says(step_time_s=around(1e-12)).predict(resnet(global_batch=11))
    assert told.assumptions == (physics.UNCHECKED,)
    compiled = blackbox.forecast_around(
        resnet(global_batch=11, compile=True, steps=100), "says", 1.0, blackbox.UNSURE
    )
    assert compiled.duration is not None
    assert compiled.duration.parts[0] == start_up(compiled.job, None)
