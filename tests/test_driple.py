"""Driple: figures are scaled and back, steps become small graphs, networks learn and are tailored, the white
box samples its schedule."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretrain import predictors
from foretrain.capture import capture_job
from foretrain.cluster import ServerNodes
from foretrain.errors import InputError, UnsupportedJob
from foretrain.evaluate import evaluate
from foretrain.forecast import Estimate, Forecast
from foretrain.job import Job
from foretrain.measure.resources import Series, twelve_figures
from foretrain.predictors.base import Table
from foretrain.predictors.deletepop import DeletePopPredictor
from foretrain.predictors.driple.cases import Cases, network_module, tailoring_module
from foretrain.predictors.driple.features import (
    GROUPS,
    MEANS,
    NETWORK_FIGURES,
    NODE_COLUMNS,
    RESOURCES,
    SETTING_COLUMNS,
    TARGETS,
    TWELVE,
    WHOLE_COLUMNS,
    certain,
    directed_groups,
    figures_of,
    graph_key,
    reference_groups,
    scaled,
    setting_columns,
    setting_of,
    unscaled,
    without_network,
)  # fmt: skip
from foretrain.predictors.driple.predictor import DriplePredictor
from foretrain.predictors.driple.resources import resource_figures, resources
from foretrain.predictors.driple.whitebox import GPU_PERIOD_S, ResourceUse, Whitebox, figures_in, loaded_bytes
from foretrain.predictors.seen import workload_key
from foretrain.quantities import QUANTITIES
from foretrain.run import Run

MODELS = """
import torch

def net(batch, depth=2):
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(depth)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 10)), (torch.zeros(batch, 64),)

a = b = c = d = e = net
"""
BUSY = TARGETS.index("device_utilization")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("driple")
    (made / "models.py").write_text(MODELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETRAIN_CACHE", str(made / "cache"))
        yield made


def job(
    base: Path, kind: str = "net", *, depth: int = 2, workers: int = 1, servers: int = 0, device: str = "cpu"
) -> Job:
    cores = {"cores_per_device": 1} if device == "cpu" else {}
    return Job.read(
        {
            "model": {"source": "python", "name": f"models.py:{kind}", "args": {"depth": depth}},
            "training": {"global_batch": 8 * workers},
            "cluster": {"device": device, "devices_per_node": workers, **cores},
            "plan": {"data": workers, **({"servers": servers} if servers else {})},
        },
        base=base,
    )


def run(one: Job, busy: float) -> Run:
    """A run that was busy so much, with all figures of a window of two seconds."""
    figures = {name: 0.5 if name.endswith("_s") else 1e8 if "network" in name else busy for name in TWELVE}
    return Run(
        job=one,
        measured={
            "device_utilization": busy,
            "memory_utilization": 0.01,
            "network_rx_bytes_per_s": 1e7,
            "network_tx_bytes_per_s": 1e7,
        },
        provenance={
            "resources": {
                "figures": figures,
                "series": {"ends_s": [1.0, 2.0]},
                "memory_limit_bytes": 1e11,
                "network_shared_by": 1,
            }
        },
    )


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[Run]:
    """Deeper networks are busier."""
    jobs = [job(folder, kind, depth=depth, workers=2) for kind in "abcde" for depth in (1, 3)]
    return [run(one, 0.2 + 0.2 * one.workload.model.args["depth"]) for one in jobs]


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Little is learned, and soon."""
    module = network_module()
    short = module.Schedule(epochs=40, patience=40, rates=(1e-2,), decay=1e-2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.SCHEDULES, "improved", short)
        patch.setattr(
            module,
            "REFERENCE_SCHEDULE",
            module.Schedule(epochs=4, patience=4, rates=(3e-3, 1e-3), decay=0.0, batch=3),
        )
        yield


@pytest.fixture(scope="module")
def fitted(runs: list[Run]) -> DriplePredictor:
    return DriplePredictor().fit(runs)


# Figures


def test_spans_are_shares_of_the_window_and_what_was_not_measured_is_no_number(folder: Path) -> None:
    found = figures_of(run(job(folder), 0.7))
    assert found is not None
    assert found[TARGETS.index("network_rx_idle_s")] == 0.25
    averages = figures_of(Run(job=job(folder), measured={"device_utilization": 0.5}))
    assert averages is not None
    assert averages[BUSY] == 0.5
    assert np.isnan(averages).sum() == len(TARGETS) - 1
    assert figures_of(Run(job=job(folder), measured={"step_time_s": 0.5})) is None


def test_scaling_goes_back_and_keeps_within_what_is_possible(folder: Path) -> None:
    figures = figures_of(run(job(folder), 0.7))
    assert figures is not None
    np.testing.assert_allclose(unscaled(scaled(figures)), figures)
    assert (unscaled(np.full(len(TARGETS), 9.0)) >= 0).all()
    assert unscaled(np.full(len(TARGETS), 9.0))[BUSY] == 1.0
    quiet = without_network(figures)
    assert quiet[TARGETS.index("network_tx_idle_s")] == 1.0
    assert quiet[TARGETS.index("network_tx_peak")] == 0.0


def test_a_setting_is_device_workers_and_how_they_synchronise(folder: Path) -> None:
    assert setting_of(job(folder, workers=4)) == "cpu allreduce 4"
    assert setting_of(job(folder, workers=2, servers=1)) == "cpu ps 2"
    served = job(folder, workers=2, servers=1)
    cluster = dataclasses.replace(served.cluster, servers=ServerNodes(nodes=1))
    assert setting_of(dataclasses.replace(served, cluster=cluster)) == "cpu ps 2 100Gbit"
    assert len(setting_columns(job(folder), capture_job(job(folder)))) == len(SETTING_COLUMNS)


# Graphs


def test_jobs_share_a_graph_only_where_one_is_traced_for_both(folder: Path) -> None:
    document = job(folder, device="h100").to_dict()
    ways: list[dict[str, dict[str, Any]]] = [
        {}, {"plan": {"recompute": "full"}}, {"plan": {"recompute": "full", "recompute_every": 2}},
        {"training": {"precision": "fp8"}}, {"training": {"precision": "fp8", "fp8": "rowwise"}},
        {"training": {"precision": "amp-fp16"}},
        {"training": {"precision": "amp-fp16", "grad_scaler": False}},
    ]  # fmt: skip
    jobs = [
        Job.read({**document, **{name: {**document[name], **fields} for name, fields in way.items()}})
        for way in ways
    ]
    assert len({graph_key(one) for one in jobs}) == len(ways)
    assert len({workload_key(one) for one in jobs[:5]}) == 5


def test_the_directed_graph_has_a_node_per_layer_and_phase(folder: Path) -> None:
    groups = directed_groups(capture_job(job(folder)))
    assert groups.nodes.shape[1] == len(NODE_COLUMNS)
    assert len(groups.whole) == len(WHOLE_COLUMNS)
    assert len(groups.nodes) <= GROUPS
    assert groups.share.sum() == pytest.approx(1.0)
    assert groups.edges.max() < len(groups.nodes)
    assert len(directed_groups(capture_job(job(folder)), groups=4).nodes) == 4


def test_the_reference_groups_are_connected_both_ways_and_the_same_each_time(folder: Path) -> None:
    graph = capture_job(job(folder, depth=3))
    first, again = reference_groups(graph, groups=6), reference_groups(graph, groups=6)
    assert first.nodes.shape == (6, 3)
    np.testing.assert_array_equal(first.nodes, again.nodes)
    pairs = set(map(tuple, first.edges.T.tolist()))
    assert pairs == {(b, a) for a, b in pairs}


# The white box


def test_the_figures_of_samples_are_those_of_a_measured_series() -> None:
    draw = np.random.default_rng(0)
    values = {
        name: np.round(draw.random(40) * (draw.random(40) > 0.4), 3) * (1e8 if "network" in name else 1.0)
        for name in RESOURCES
    }
    series = Series(
        ends_s=tuple((0.05 * np.arange(1, 41)).tolist()),
        **{name: tuple(value.tolist()) for name, value in values.items()},
    )
    found = dict(zip(TARGETS, figures_in(ResourceUse(period_s=0.05, values=values)), strict=True))
    for name, value in twelve_figures(series).items():
        assert found[name] * (2.0 if name.endswith("_s") else 1.0) == pytest.approx(value)
    assert found["device_utilization"] == pytest.approx(series.mean("device_utilization"))


def test_without_exchange_the_white_box_has_a_busy_device_and_a_silent_network(folder: Path) -> None:
    found = dict(zip(TARGETS, Whitebox(DeletePopPredictor()).figures(job(folder)), strict=True))
    assert found["network_tx_idle_s"] == 1.0
    assert found["network_tx_bytes_per_s"] == 0.0
    assert found["device_utilization"] > 0.9


def test_each_worker_sends_its_gradients_to_the_servers_once(folder: Path) -> None:
    box, predictor = Whitebox(DeletePopPredictor()), DeletePopPredictor()
    for workers in (1, 2, 4):
        forecast = predictor.predict(job(folder, workers=workers, servers=1))
        use = box.use(forecast, steps=3)
        sent = use.values["network_tx"].sum() * use.period_s
        assert sent == pytest.approx(3 * forecast.inside("bytes").sent_bytes)
        assert sent == pytest.approx(3 * 4 * forecast.inside("bytes").layout.graph.parameters)


@pytest.mark.parametrize("device", ["cpu", "h100-sxm-80gb"])
@pytest.mark.parametrize("workers", [1, 2])
def test_averages_of_the_white_box_are_those_of_the_forecast(folder: Path, device: str, workers: int) -> None:
    forecast = DeletePopPredictor().predict(job(folder, workers=workers, device=device))
    found = dict(zip(TARGETS, figures_in(Whitebox(DeletePopPredictor()).use(forecast)), strict=True))
    names = {"device_utilization", "network_rx_bytes_per_s", "network_tx_bytes_per_s", "memory_busy"}
    for name in names & set(forecast.quantities):
        assert found[name] == pytest.approx(forecast[name].median)


def test_memory_is_what_is_held_on_one_gpu_and_on_two(folder: Path) -> None:
    box = Whitebox(DeletePopPredictor())
    for workers in (1, 2):
        forecast = DeletePopPredictor().predict(job(folder, workers=workers, device="h100-sxm-80gb"))
        assert forecast.fullest is not None
        held = (box.levels.context_bytes + forecast.fullest.median) / forecast.memory_capacity_bytes
        assert box.use(forecast).values["memory_utilization"].tolist() == pytest.approx(
            [held] * len(box.use(forecast).values["network_tx"])
        )


def test_bytes_of_an_interface_are_not_learned_as_those_of_a_rank(folder: Path) -> None:
    one = run(job(folder, workers=2), 0.5)
    resources_of = dict(one.provenance["resources"])
    del resources_of["network_shared_by"]
    unknown = figures_of(dataclasses.replace(one, provenance={"resources": resources_of}))
    known = figures_of(one)
    assert known is not None
    assert unknown is not None
    assert np.isfinite(known[TARGETS.index("network_tx_peak")])
    assert np.isnan(unknown[TARGETS.index("network_tx_peak")])
    assert np.isfinite(unknown[BUSY])


def with_loader(one: Job, rate: float, workers: int = 1) -> Job:
    document = one.to_dict()
    document["training"] = {**document["training"], "loader_rate": rate, "loader_workers": workers}
    return Job.read(document, base=one.workload.base)


def test_a_device_that_waits_for_its_loader_is_idle_and_receives_each_batch(folder: Path) -> None:
    gpu = job(folder, device="h200")
    whitebox = Whitebox(DeletePopPredictor())
    alone, slow = whitebox.figures(gpu), whitebox.figures(with_loader(gpu, 40.0))
    names = ("device_utilization_idle_s", "device_utilization", "network_rx_bytes_per_s", "network_rx_peak")
    idle, busy, received, peak = (TARGETS.index(name) for name in names)
    assert alone[idle] == 0.0
    step_s = whitebox.predictor.predict(gpu)["step_time_s"].median
    assert slow[busy] == pytest.approx(alone[busy] * step_s / 0.2, rel=0.01)
    assert slow[idle] > 0.2
    assert slow[received] < alone[received]
    assert slow[peak] - slow[received] > 0.9 * loaded_bytes(gpu) / GPU_PERIOD_S
    fast = whitebox.figures(with_loader(gpu, 1e9))
    assert fast[busy] == pytest.approx(alone[busy], rel=0.01)


def test_the_window_of_a_job_that_waits_for_data_is_longer(folder: Path) -> None:
    gpu, whitebox = job(folder, device="h200"), Whitebox(DeletePopPredictor())
    assert whitebox.window_s(with_loader(gpu, 8.0)).median == pytest.approx(3.0)
    assert 0.5 <= whitebox.window_s(gpu).median < 0.6


def test_batches_of_several_workers_come_together(folder: Path) -> None:
    gpu, whitebox = job(folder, device="h200"), Whitebox(DeletePopPredictor())
    one, two = (whitebox.figures(with_loader(gpu, 80.0 / n, n)) for n in (1, 2))
    mean, peak = TARGETS.index("network_rx_bytes_per_s"), TARGETS.index("network_rx_peak")
    assert two[mean] == pytest.approx(one[mean], rel=0.01)
    assert two[peak] - two[mean] == pytest.approx(2 * (one[peak] - one[mean]), rel=0.1)


def test_only_of_a_lonely_cpu_worker_something_is_certain(folder: Path) -> None:
    alone = certain(job(folder))
    assert alone.sum() > certain(with_loader(job(folder), 40.0)).sum() == NETWORK_FIGURES.sum()
    for other in (job(folder, device="h200"), job(folder, workers=2)):
        assert not certain(other).any()


def test_the_constants_of_the_white_box_follow_the_runs(runs: list[Run]) -> None:
    levels = Whitebox(DeletePopPredictor()).fit(runs).levels
    assert levels.limit_bytes == 1e11
    assert levels.process_bytes + levels.tensors > 0


# Networks


def test_deeper_networks_are_forecast_to_be_busier(fitted: DriplePredictor, folder: Path) -> None:
    found = [
        fitted.predict(job(folder, "net", depth=depth, workers=2))["device_utilization"] for depth in (1, 3)
    ]
    assert found[0].median < found[1].median
    assert found[1].low <= found[1].median <= found[1].high
    assert np.isfinite(fitted.figures(job(folder, workers=2))[:-1]).all()


def test_a_device_without_runs_and_a_plan_without_replicas_are_refused(
    fitted: DriplePredictor, folder: Path
) -> None:
    with pytest.raises(UnsupportedJob, match="no run of h100-sxm-80gb, only of cpu"):
        fitted.predict(job(folder, device="h100-sxm-80gb"))
    with pytest.raises(UnsupportedJob, match="no runs yet"):
        DriplePredictor().without().predict(job(folder))


def test_a_folder_keeps_it_and_fitting_what_was_loaded_is_a_transfer(
    fitted: DriplePredictor, folder: Path, tmp_path: Path
) -> None:
    fitted.save(tmp_path)
    loaded = DriplePredictor.load(tmp_path)
    wanted = job(folder, workers=2)
    np.testing.assert_allclose(loaded.figures(wanted), fitted.figures(wanted))
    new = [run(job(folder, kind, depth=depth, workers=4), 0.95) for kind in "abc" for depth in (1, 2)]
    before = loaded.figures(job(folder, "d", workers=4))[BUSY]
    after = loaded.fit(new).figures(job(folder, "d", workers=4))[BUSY]
    assert abs(after - 0.95) < abs(before - 0.95)
    assert loaded.learned_ is not None
    assert {"cpu allreduce 2", "cpu allreduce 4"} <= loaded.learned_.settings


def test_a_transfer_is_checked_on_runs_that_were_left_out(
    fitted: DriplePredictor, folder: Path, tmp_path: Path
) -> None:
    fitted.save(tmp_path)
    new = [run(job(folder, kind, depth=depth, workers=4), 0.95) for kind in "abcd" for depth in (1, 2)]
    loaded = DriplePredictor.load(tmp_path).fit([*new, run(job(folder, "e", workers=4), 0.9)])
    (check,) = loaded.transfers_
    before, after = check.errors["device_utilization"]
    assert (check.network, check.runs) == ("cpu", 9)
    assert after < before
    words, table = loaded.report()
    assert "left out in turn, 9 runs" in str(words)
    assert isinstance(table, Table)
    assert table.headings[1:] == ("as it was", "tailored")
    assert table.rows[-1][0] == "mean"


def test_repeats_of_a_step_are_left_out_of_a_transfer_together(
    fitted: DriplePredictor, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all runs are of one family, so that its steps are left out in turn."""
    fitted.save(tmp_path)
    parts: list[Sequence[str]] = []
    transfer = tailoring_module().transfer

    def watched(network: Any, data: Any, groups: Sequence[str]) -> Any:
        parts.append(groups)
        return transfer(network, data, groups)

    monkeypatch.setattr(tailoring_module(), "transfer", watched)
    steps = [run(job(folder, "a", depth=depth, workers=4), 0.95) for depth in (1, 2, 3)]
    DriplePredictor.load(tmp_path).fit([*steps, *steps])
    assert parts[0][:3] == parts[0][3:]
    assert len(set(parts[0])) == 3


def test_a_transfer_knows_the_memory_of_its_own_machine(
    fitted: DriplePredictor, folder: Path, tmp_path: Path
) -> None:
    """The same processes are five times the share of a fifth of the memory."""
    fitted.save(tmp_path)
    known = fitted.state().levels
    for few in (1, 6):
        new = [run(job(folder, "abcde"[i % 5], depth=1 + i), 0.5) for i in range(few)]
        smaller = [
            dataclasses.replace(
                one,
                measured={**one.measured, "memory_utilization": 0.05},
                provenance={"resources": {
                    **one.provenance["resources"],
                    "memory_limit_bytes": 2e10,
                    "figures": {**one.provenance["resources"]["figures"], "memory_utilization_peak": 0.05},
                }},
            )
            for one in new
        ]  # fmt: skip
        there = DriplePredictor.load(tmp_path).fit(smaller).state().levels
        assert known.limit_bytes == 1e11
        assert there.limit_bytes == 2e10
        assert there.process_bytes == pytest.approx(1e9, rel=0.01)
        assert there.context_bytes == known.context_bytes


def test_for_another_device_a_transfer_starts_from_the_schedule(
    fitted: DriplePredictor, folder: Path, tmp_path: Path
) -> None:
    fitted.save(tmp_path)
    gpu = [job(folder, kind, device="h200") for kind in "abc"]
    loaded = DriplePredictor.load(tmp_path).fit([run(one, 0.9) for one in gpu])
    whitebox = Whitebox(DeletePopPredictor(), loaded.state().levels).figures(gpu[0])[BUSY]
    before, after = loaded.transfers_[0].errors.get("device_utilization", (0.0, 0.0))
    assert set(loaded.state().networks) == {"cpu", "h200-sxm-141gb"}
    assert whitebox < loaded.figures(gpu[0])[BUSY] < 0.9
    assert after <= before


def test_a_transfer_leaves_the_body_as_it_was(runs: list[Run]) -> None:
    network, data = known_network(runs)
    tailored, _ = tailoring_module().transfer(network, data.part([0, 1, 2]), "abc")
    before, after = (one.members[0].state_dict() for one in (network, tailored))
    assert bool((before["body.enter.weight"] == after["body.enter.weight"]).all())
    assert bool((before["head.0.weight"] == after["head.0.weight"]).all())
    assert not bool((before["direct.weight"] == after["direct.weight"]).all())


def known_network(runs: list[Run]) -> tuple[Any, Any]:
    """A network and the samples that it has learned from."""
    data = Cases.of(
        [one.job for one in runs], [found for one in runs if (found := figures_of(one)) is not None]
    ).samples()
    network, _ = network_module().train(data, ["x"] * len(runs), seed=1)
    return network, data


def test_a_transfer_with_few_runs_stays_near_what_it_was_and_with_many_follows_them(runs: list[Run]) -> None:
    network, data = known_network(runs)
    shifted = dataclasses.replace(data, targets=data.targets + 0.3)
    off = []
    for some in (shifted.part([0]), shifted, shifted.part(list(range(len(runs))) * 10)):
        tailored, _ = tailoring_module().transfer(network, some, ["x"] * len(some))
        off.append(np.abs(network.figures(data) + 0.3 - tailored.figures(data))[:, BUSY].mean())
    assert 0.3 > off[0] > off[1] > off[2]


def test_a_transfer_starts_from_the_white_box_where_the_network_does_not_hold(runs: list[Run]) -> None:
    """Left-out runs choose: a run that says nothing of the network's corrections is nearer to none at all."""
    network, data = known_network(runs)
    tailoring, groups = tailoring_module(), [str(i) for i in range(len(runs))]
    wrong = tailoring.silenced(network)
    for member in wrong.members:
        member.target_mean.fill_(5.0)
    alone, _ = tailoring.transfer(wrong, data, ["x"] * len(runs))
    chosen, held_out = tailoring.transfer(wrong, data, groups)
    errors = [np.nanmean(np.abs(one - data.targets)) for one in (alone.figures(data), chosen.figures(data))]
    assert errors[1] < errors[0]
    assert np.nanmean(np.abs(held_out - data.targets)) < 1.0
    assert wrong.members[0].target_mean[0] == 5.0


def test_what_left_out_runs_do_not_bear_out_of_a_transfer_counts_less(runs: list[Run]) -> None:
    network, data = known_network(runs)
    many = data.part([i % len(runs) for i in range(24)])
    noise = np.random.default_rng(0).normal(size=many.targets.shape)
    odd = dataclasses.replace(many, targets=noise)
    silent = tailoring_module().silenced(network)
    tailored, held_out = tailoring_module().transfer(silent, odd, [str(i) for i in range(24)])
    plain, _ = tailoring_module().transfer(silent, odd, ["x"] * 24)
    assert np.abs(tailored.figures(odd)).mean() < 0.5 * np.abs(plain.figures(odd)).mean()
    assert np.abs(held_out).mean() < np.abs(noise).mean()


@pytest.mark.parametrize("kind", ["gcn", "gin", "gat", "mpnn"])
def test_the_reference_has_a_network_per_setting(kind: Any, runs: list[Run], folder: Path) -> None:
    predictor = DriplePredictor("reference", kind).fit(runs[:6])
    assert np.isfinite(predictor.figures(job(folder, workers=2))[:-1]).all()
    with pytest.raises(UnsupportedJob, match="cpu ps 2"):
        predictor.figures(job(folder, workers=2, servers=1))


def test_the_same_runs_give_the_same_network(runs: list[Run], folder: Path) -> None:
    one, two = (DriplePredictor(seed=3).fit(runs[:4]).figures(job(folder, workers=2)) for _ in range(2))
    np.testing.assert_array_equal(one, two)


def test_runs_without_figures_are_told_of(runs: list[Run], folder: Path) -> None:
    predictor = DriplePredictor().fit([*runs[:2], Run(job=job(folder), measured={"step_time_s": 1.0})])
    assert len(predictor.left_out_) == 1
    with pytest.raises(InputError, match="none has resource figures"):
        DriplePredictor().fit([Run(job=job(folder), measured={"step_time_s": 1.0})])


def test_what_no_network_has_learned_the_white_box_tells(folder: Path) -> None:
    from foretrain.report.resources import document, panels, resource_table

    forecast = DeletePopPredictor().predict(job(folder, workers=2, device="h100-sxm-80gb"))
    found = resources(forecast)
    assert set(found.by.values()) == {"deletepop"}
    assert found.figures["device_utilization_active_s"] <= found.window_s
    assert found.steps.values["network_tx"].max() > 0
    drawn = json.loads(json.dumps(panels(found), allow_nan=False))
    assert len(drawn["panels"]) == len(RESOURCES)
    assert all(len(panel["values"]) == len(drawn["times_ms"]) for panel in drawn["panels"])
    assert len(drawn["ends_ms"]) == found.drawn_steps - 1
    assert json.loads(json.dumps(document(found), allow_nan=False))["window_s"] > 0
    assert resource_table(found)


def test_where_averages_and_a_network_disagree_the_schedule_tells(folder: Path) -> None:
    one = job(folder, workers=2)
    usual = resources(DeletePopPredictor().predict(one))
    assert set(usual.by.values()) <= {"driple", "deletepop"}
    for resource, mean in zip(RESOURCES, MEANS, strict=True):
        assert usual.figures[f"{resource}_peak"] >= usual.figures[mean]
        assert (usual.figures[f"{resource}_active_s"] > 0) == (usual.figures[mean] > 0)
    assert set(resources(predictors.get("driple").predict(one)).by.values()) == {"driple"}


def test_figures_of_a_job_are_remembered(folder: Path) -> None:
    one = job(folder, device="h200")
    figures = resource_figures(one)
    assert resource_figures(job(folder, device="h200")) is figures
    assert set(TWELVE) <= set(figures)
    assert 0 < figures["device_utilization"] <= 1


def test_the_package_ships_a_network() -> None:
    shipped = predictors.get("driple")
    assert isinstance(shipped, DriplePredictor)
    assert "cpu ps 4" in shipped.state().settings


def test_the_twelve_figures_are_quantities_like_any_other(folder: Path) -> None:
    """A run that measured them, in provenance as campaigns write them, is scored in each that is not zero."""
    figures = dict.fromkeys(TWELVE, 0.5)
    document = {
        "job": job(folder, workers=2).to_dict(),
        "measured": {"step_time_s": 0.1},
        "provenance": {"resources": {"figures": figures, "series": {"ends_s": [1.0]}}},
    }
    path = folder / "runs.jsonl"
    path.write_text(json.dumps(document) + "\n")
    evaluation = evaluate([path], predictors=["driple"])
    assert {result.quantity for result in evaluation.results if result.n == 1} == set(TWELVE)
    forecast = predictors.get("driple").predict(job(folder, workers=2))
    assert {name for name in TWELVE if QUANTITIES[name] == "s"} == {
        name for name in TWELVE if name.endswith("_s")
    }
    assert forecast["device_utilization_active_s"].median > 0


def test_resources_are_those_of_the_predictor_that_is_asked(folder: Path) -> None:
    names = [name for name in TARGETS if name.startswith("device")]
    given = {
        name: Estimate(value, value, value) for name, value in zip(names, (0.1, 0.3, 0.4, 0.25), strict=True)
    }
    asked = resources(Forecast(job=job(folder, workers=2), predictor="new", quantities=given))
    assert [asked.figures[name] for name in names] == [0.1, 0.3, 0.4, 0.25]
    assert {name for name in asked.by if asked.by[name] == "new"} == set(names)


def test_schedules_forget_too_and_stay_so_in_a_folder(
    runs: list[Run], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or else operators of the held-out family would tell through the white box."""
    faster = dataclasses.replace(DeletePopPredictor().host, step_overhead_s=1.0)
    monkeypatch.setattr(
        DeletePopPredictor, "without", lambda self, families, devices: DeletePopPredictor(self.costs, faster)
    )
    forgetful = DriplePredictor().without(frozenset({"a"})).fit(runs[:4])
    plain = DriplePredictor().fit(runs[:4])
    one = job(folder, workers=2, device="h100-sxm-80gb")
    assert (
        forgetful._schedules().predict(one)["step_time_s"] != plain._schedules().predict(one)["step_time_s"]
    )
    forgetful.save(tmp_path / "kept")
    again = DriplePredictor.load(tmp_path / "kept")
    assert again._schedules().predict(one).quantities == forgetful._schedules().predict(one).quantities


# What no run had


@pytest.mark.parametrize(
    ("section", "key", "value", "named"),
    [
        ("training", "compile", True, "training.compile: True"),
        ("training", "precision", "bf16", "training.precision: bf16"),
        ("training", "optimizer", "lamb", "training.optimizer: lamb"),
        ("training", "channels_last", True, "training.channels_last: True"),
        ("training", "global_batch", 160, "batch of a worker: 80, they have 8"),
        ("plan", "micro_batch", 2, "micro-batches: 4, they have 1"),
        ("cluster", "cores_per_device", 4, "cores: 4, they have 1"),
    ],
)
def test_what_no_run_had_is_named_and_widens_the_intervals(
    fitted: DriplePredictor, folder: Path, section: str, key: str, value: Any, named: str
) -> None:
    usual = job(folder, workers=2)
    document = usual.to_dict()
    document[section] = {**document.get(section, {}), key: value}
    other = Job.read(document, base=folder)
    assert not fitted.predict(usual).assumptions
    forecast, schedule = fitted.predict(other), DeletePopPredictor().predict(other)["device_utilization"]
    assert any(named in note for note in forecast.assumptions)
    found = forecast["device_utilization"]
    assert found.median == pytest.approx(fitted.figures(other)[BUSY])
    spread = fitted.state().spread["cpu"][BUSY]
    assert found.low <= max(0.0, found.median + 1.4 * spread[1])
    assert found.high >= min(1.0, found.median + 1.4 * spread[2])
    assert found.low <= max(0.0, found.median - (schedule.median - schedule.low)) + 1e-9


def test_what_runs_had_is_kept_in_a_folder_and_joined_by_a_transfer(
    fitted: DriplePredictor, folder: Path, tmp_path: Path
) -> None:
    fitted.save(tmp_path)
    loaded, wanted = DriplePredictor.load(tmp_path), job(folder, workers=4)
    assert loaded.predict(wanted).assumptions == fitted.predict(wanted).assumptions != ()
    loaded.fit([run(job(folder, kind, workers=4), 0.9) for kind in "ab"])
    assert not loaded.predict(wanted).assumptions
    assert not loaded.predict(job(folder, workers=2)).assumptions
    document = json.loads((tmp_path / "predictor.json").read_text())
    del document["seen"]
    (tmp_path / "predictor.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match="fit it again"):
        DriplePredictor.load(tmp_path)


# Within what links carry


def over_ethernet(base: Path, bandwidth: str) -> Job:
    document = job(base, depth=4, workers=1).to_dict()
    document["training"]["global_batch"] = 128
    document["cluster"] |= {"nodes": 16, "inter_node": {"kind": "ethernet", "bandwidth": bandwidth}}
    document["plan"] = {"data": 16}
    return Job.read(document, base=base)


@pytest.mark.parametrize("bandwidth", ["1 Mb/s", "10 Mb/s", "1 Gb/s"])
@pytest.mark.parametrize("predictor", ["deletepop", "driple"])
def test_resources_stay_within_the_link_and_fit_together(
    folder: Path, bandwidth: str, predictor: str
) -> None:
    one = over_ethernet(folder, bandwidth)
    found = resources(predictors.get(predictor).predict(one))
    link = one.cluster.inter_node.bandwidth_bytes_per_s
    for resource, mean in zip(RESOURCES, MEANS, strict=True):
        idle, active, peak = (found.figures[f"{resource}_{name}"] for name in ("idle_s", "active_s", "peak"))
        assert found.figures[mean] <= peak <= (link if "network" in resource else 1.0) * 1.001
        assert (idle == 0) == (active == pytest.approx(found.window_s))
        assert idle + active <= found.window_s * 1.001


def test_rates_beyond_the_link_are_the_schedules_and_the_rest_is_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, shipped = over_ethernet(folder, "10 Mb/s"), DriplePredictor()
    figures = shipped.figures(one)
    figures[[name.startswith("network") and not name.endswith("idle_s") for name in TARGETS]] = 2e6
    monkeypatch.setattr(DriplePredictor, "figures", lambda self, job: figures.copy())
    forecast, schedule = shipped.predict(one), DeletePopPredictor().predict(one)
    assert any("1.25 MB/s of the links" in note for note in forecast.assumptions)
    for name in ("network_rx_bytes_per_s", "network_tx_bytes_per_s"):
        assert forecast[name].median == pytest.approx(schedule[name].median)
    assert forecast["network_tx_peak"].high <= 1.25e6
    assert forecast["device_utilization"].median == pytest.approx(figures[BUSY])
