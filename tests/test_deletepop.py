"""DeletePop: forecasts follow the operator models, a few runs calibrate them, odd runs do not decide, and a
folder keeps it all."""

from __future__ import annotations

import copy
import dataclasses
import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import golden
from foretrain import predictors
from foretrain.catalog import Catalog
from foretrain.cluster import Cluster
from foretrain.errors import InputError, UnsupportedJob
from foretrain.forecast import Forecast, RankMemory
from foretrain.job import Job
from foretrain.predictors.base import FILE
from foretrain.predictors.checks import check_predictor, on_two_devices
from foretrain.predictors.deletepop import host_fit
from foretrain.predictors.deletepop.host_fit import HostTime, fit_host, rows_of, solve
from foretrain.predictors.deletepop.predictor import KERNEL_GAP_S, OPERATORS, SHIPPED, DeletePopPredictor
from foretrain.predictors.deletepop.spread import (
    ATTENTION,
    CONVOLUTIONS,
    EXPERTS,
    MEMORY_PARTS,
    ON_TOP,
    bounds,
    memory_bounds,
    memory_shares,
    shares,
    shipped_memory_widths,
    shipped_widths,
)
from foretrain.run import Run
from made_up import MODELS, job, made_up, measure


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("deletepop")
    (made / "models.py").write_text(MODELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETRAIN_CACHE", str(made / "cache"))
        yield made


def jobs(base: Path, device: str = "a100-sxm-80gb") -> list[Job]:
    """Steps bound by products, by convolutions and by the host."""
    return [
        *(job(base, "mlp", batch, 2048, device) for batch in (8, 2048, 4096, 16384)),
        *(job(base, "mlp", batch, 2048, device, precision="amp-bf16") for batch in (16, 8192)),
        *(job(base, "convolutions", batch, 64, device) for batch in (4, 256, 512, 2048)),
    ]


def ratios(predictor: DeletePopPredictor, wanted: list[Job]) -> list[float]:
    """Step times over those of the predictor as it is shipped."""
    shipped = DeletePopPredictor()
    return [
        predictor.predict(one)["step_time_s"].median / shipped.predict(one)["step_time_s"].median
        for one in wanted
    ]


def test_it_passes_the_conformance_checks(folder: Path) -> None:
    check_predictor(DeletePopPredictor(), job(folder, batch=64, width=64))
    check_predictor(DeletePopPredictor(), job(folder, batch=64, width=64, mode="infer"))


@pytest.mark.parametrize("device", ["h200", "h100", "t4", "mi210", "p4", "cpu"])
def test_every_kind_of_device_is_forecast(folder: Path, device: str) -> None:
    forecast = DeletePopPredictor().predict(job(folder, device=device, batch=512, width=512))
    assert 1e-5 < forecast["step_time_s"].median < 10


def test_two_devices_take_longer_than_one_for_twice_the_batch(folder: Path) -> None:
    one, two = job(folder), on_two_devices(job(folder))
    doubled = dataclasses.replace(two, workload=dataclasses.replace(two.workload,
    training=dataclasses.replace(two.workload.training, global_batch=2 * one.micro_batch)))  # fmt: skip
    assert (
        DeletePopPredictor().predict(doubled)["step_time_s"].median
        > DeletePopPredictor().predict(one)["step_time_s"].median
    )


def test_a_larger_batch_takes_longer(folder: Path) -> None:
    times = [
        DeletePopPredictor().predict(job(folder, batch=batch))["device_busy_s"].median
        for batch in (1024, 4096, 16384)
    ]
    assert times == sorted(times)
    assert times[2] > 2 * times[1]


# Calibration


@pytest.mark.parametrize("factor", [0.7, 1.3, 2.0])
def test_runs_that_take_longer_in_all_are_met(folder: Path, factor: float) -> None:
    predictor = DeletePopPredictor().fit([measure(one, factor) for one in jobs(folder)])
    others = [
        job(folder, "mlp", 3000),
        job(folder, "convolutions", 300, 64),
        job(folder, "convolutions", 8, 64),
    ]
    assert statistics.fmean(ratios(predictor, others)) == pytest.approx(factor, rel=0.05)
    assert ratios(predictor, others) == pytest.approx([factor] * 3, rel=0.1)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_few_runs_are_enough(folder: Path, count: int) -> None:
    learned_from = [job(folder, "mlp"), job(folder, "mlp", 16384), job(folder, "convolutions", 512, 64)][
        :count
    ]
    predictor = DeletePopPredictor().fit([measure(one, 1.3) for one in learned_from])
    assert ratios(predictor, [job(folder, "mlp", 6000)]) == pytest.approx([1.3], rel=0.05)
    assert (predictor.benefits_["a100-sxm-80gb"].error_after is None) == (count < 3)


def test_one_odd_run_does_not_decide(folder: Path) -> None:
    runs = [measure(one, 1.3) for one in jobs(folder)]
    runs[3] = measure(runs[3].job, 8.0)
    predictor = DeletePopPredictor().fit(runs)
    assert ratios(
        predictor, [job(folder, "mlp", 3000), job(folder, "convolutions", 300, 64)]
    ) == pytest.approx([1.3] * 2, rel=0.1)


def test_a_run_in_other_units_leaves_an_interval(folder: Path) -> None:
    """Its error, in the millions, is the mean of all."""
    runs = [measure(one, 1.3) for one in jobs(folder)]
    runs[3] = measure(runs[3].job, 1e-6)
    predictor = DeletePopPredictor().fit(runs)
    told = predictor.predict(job(folder, "mlp", 3000))["step_time_s"]
    assert 1 < told.high / told.median < 100


def test_the_benefit_is_told(folder: Path) -> None:
    predictor = DeletePopPredictor().fit([measure(one, 1.5) for one in jobs(folder)])
    benefit = predictor.benefits_["a100-sxm-80gb"]
    assert benefit.runs == 10
    assert benefit.error_before == pytest.approx(1 / 3, abs=0.05)
    assert benefit.error_after is not None
    assert benefit.error_after < 0.1
    assert predictor.calibrations_["a100-sxm-80gb"].benefit == predictor.benefits_["a100-sxm-80gb"]
    assert predictor.benefits_["a100-sxm-80gb"].runs == 10


def test_right_forecasts_are_left_alone(folder: Path) -> None:
    predictor = DeletePopPredictor().fit([measure(one, 1.0) for one in jobs(folder)])
    assert ratios(predictor, jobs(folder)) == pytest.approx([1.0] * 10, rel=0.06)


def test_another_device_keeps_its_device_times(folder: Path) -> None:
    predictor = DeletePopPredictor().fit([measure(one, 1.5) for one in jobs(folder)])
    elsewhere = job(folder, device="t4")
    assert (
        predictor.predict(elsewhere)["device_busy_s"]
        == DeletePopPredictor().predict(elsewhere)["device_busy_s"]
    )


def test_a_slow_host_of_one_device_does_not_slow_another(folder: Path) -> None:
    predictor = DeletePopPredictor().fit([measure(one, 1.5) for one in jobs(folder)])
    elsewhere = job(folder, batch=8, device="t4")
    assert (
        predictor.predict(elsewhere)["host_issue_s"]
        == DeletePopPredictor().predict(elsewhere)["host_issue_s"]
    )


def test_a_second_calibration_goes_on_from_the_first(folder: Path) -> None:
    runs = [measure(one, 1.3) for one in jobs(folder)]
    once = DeletePopPredictor().fit(runs)
    twice = copy.deepcopy(once).fit(runs)
    assert ratios(twice, [job(folder, "mlp", 3000)]) == pytest.approx(
        ratios(once, [job(folder, "mlp", 3000)]), rel=0.03
    )
    before = twice.benefits_["a100-sxm-80gb"].error_before
    assert before is not None
    assert before < 0.1


def test_a_calibration_to_noisy_runs_is_no_surer_than_they_bear_out(folder: Path) -> None:
    wanted = jobs(folder)
    quiet = DeletePopPredictor().fit(measure(one, 1.3) for one in wanted)
    factors = [0.5 if i % 2 else 2.0 for i in range(len(wanted))]
    noisy = DeletePopPredictor().fit(map(measure, wanted, factors))
    error = noisy.benefits_["a100-sxm-80gb"].error_after
    assert error is not None
    told, sure = (each.predict(wanted[0])["step_time_s"] for each in (noisy, quiet))
    assert told.high / told.median == pytest.approx(5**error)
    assert told.high / told.median > 1.5 * sure.high / sure.median


def test_runs_that_cannot_be_used_are_named(folder: Path) -> None:
    good = measure(job(folder), 1.2)
    gone = job(folder, "gone")
    silent = Run(job=job(folder, batch=32), measured={"peak_memory_bytes": 1e9})
    several = Run(job=on_two_devices(job(folder)), measured={"power_w": 300.0})
    predictor = DeletePopPredictor().fit(iter([good, dataclasses.replace(good, job=gone), silent, several]))
    reasons = "\n".join(predictor.left_out_)
    assert len(predictor.left_out_) == 3
    for words in ("gone", "no step_time_s or device_busy_s", "no step_time_s or peak_memory_bytes"):
        assert words in reasons
    assert predictor.benefits_["a100-sxm-80gb"].runs == 1


def test_without_a_usable_run_nothing_is_learned(folder: Path) -> None:
    with pytest.raises(InputError, match="runs: none has a step, phase or busy time"):
        DeletePopPredictor().fit([Run(job=job(folder, device="cpu"), measured={"power_w": 300.0})])


# The host


def test_the_host_is_found_from_phase_times(folder: Path) -> None:
    slow = dataclasses.replace(
        DeletePopPredictor().host, forward_s=30e-6, backward_s=25e-6, optimizer_s=100e-6
    )
    machine = DeletePopPredictor(DeletePopPredictor().costs, slow)
    times = ("step_time_s", "forward_time_s", "backward_time_s", "optimizer_time_s", "device_busy_s")
    small = [
        job(folder, model, batch, width)
        for model in ("mlp", "convolutions")
        for batch in (2, 8, 32)
        for width in (16, 64)
    ]
    host = fit_host(
        DeletePopPredictor().host,
        machine.costs,
        [measure(one, 1.0, machine, times) for one in small],
        KERNEL_GAP_S,
    )
    found = DeletePopPredictor(machine.costs, host)
    for one in small:
        assert found.predict(one)["step_time_s"].median == pytest.approx(
            machine.predict(one)["step_time_s"].median, rel=0.15
        )


def test_optimizers_that_a_busy_device_hides_do_not_count(folder: Path) -> None:
    """Of steps that the device bounds, phases say nothing of the host: it runs ahead."""
    predictor = DeletePopPredictor()
    run = measure(job(folder, batch=16384), 1.0, times=("step_time_s", "optimizer_time_s", "device_busy_s"))
    (row,) = rows_of(predictor.host, predictor.costs, run, KERNEL_GAP_S)
    assert row.measured_s == run.measured["step_time_s"]
    told = dataclasses.replace(run, provenance={"phases_apart_s": {"optimizer_time_s": 0.004}})
    *_, alone = rows_of(predictor.host, predictor.costs, told, KERNEL_GAP_S)
    assert (alone.measured_s, alone.device_s) == (0.004, 0.0)
    assert alone.counts[:5].tolist() == [0.0] * 5
    assert alone.counts[6] > 0


def test_machines_of_one_kind_differ_by_a_factor() -> None:
    """The host found is that of the machine with most runs."""
    true = dataclasses.replace(DeletePopPredictor().host, forward_s=20e-6)
    parts = np.array([getattr(true, part) for part in host_fit._PARTS])
    draw = np.random.default_rng(0)
    rows = [
        HostTime(counts=counts, device_s=0.0, measured_s=slower * float(counts @ parts), machine=machine)
        for machine, slower, count in (("", 1.0, 60), ("second", 1.6, 40))
        for counts in draw.uniform(0, 1, (count, 8)) * [0.01, 500, 500, 0.01, 800, 8, 2000, 1]
    ]
    found = solve(DeletePopPredictor().host, rows)
    times = [float(row.counts @ [getattr(found, part) for part in host_fit._PARTS]) for row in rows[:60]]
    assert times == pytest.approx([row.measured_s for row in rows[:60]], rel=0.1)


def test_too_few_phase_times_do_not_make_a_host(folder: Path) -> None:
    with pytest.raises(InputError, match="the host model needs 40 or more"):
        fit_host(
            DeletePopPredictor().host, DeletePopPredictor().costs, [measure(job(folder), 1.0)], KERNEL_GAP_S
        )


# Folders


def test_a_saved_predictor_is_found_by_its_folder(folder: Path, tmp_path: Path) -> None:
    fitted = DeletePopPredictor().fit([measure(one, 1.3) for one in jobs(folder)[:3]])
    fitted.save(tmp_path / "mine")
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == [OPERATORS, FILE]
    for which in (tmp_path / "mine", str(tmp_path / "mine")):
        again = predictors.get(which)
        assert isinstance(again, DeletePopPredictor)
        assert again.calibrations_ == fitted.calibrations_
        assert again.sources == fitted.sources
        assert again.predict(job(folder)).quantities == fitted.predict(job(folder)).quantities


def test_what_is_shipped_is_read_as_any_saved_state(folder: Path, tmp_path: Path) -> None:
    DeletePopPredictor().save(tmp_path)
    assert (tmp_path / OPERATORS).read_bytes() == SHIPPED.read_bytes()


def test_a_copy_shares_the_state_and_learns_by_itself(folder: Path) -> None:
    first = DeletePopPredictor()
    second = copy.deepcopy(first).fit([measure(job(folder), 2.0)])
    assert ratios(first, [job(folder)]) == [1.0]
    assert ratios(second, [job(folder)])[0] > 1.5


# What is said of it


def test_a_calibration_that_applies_is_said_with_its_runs(folder: Path) -> None:
    wanted = jobs(folder)
    learned = DeletePopPredictor().fit([measure(one, 2.0) for one in wanted])
    (note,) = [note for note in learned.predict(wanted[0]).assumptions if "calibrat" in note]
    assert note.startswith("calibrated to 10 runs of a100-sxm-80gb: mean error 5")
    two = on_two_devices(wanted[1])
    assert note in learned.predict(two).assumptions
    assert not any("calibrat" in note for note in DeletePopPredictor().predict(wanted[0]).assumptions)


def test_calibrations_that_do_not_apply_are_said(folder: Path) -> None:
    learned = DeletePopPredictor().fit([measure(one, 2.0) for one in jobs(folder)])
    notes = learned.predict(job(folder, device="t4")).assumptions
    said = "no calibration applies: the predictor's are of a100-sxm-80gb, the job is of t4"
    assert said in notes


def test_operators_of_cpus_alone_forecast_no_gpu(folder: Path) -> None:
    learned = DeletePopPredictor().relearn(made_up(Catalog.load().device("cpu"), count=10))
    with pytest.raises(UnsupportedJob, match=r"cluster.device: 'h100.*' needs operator models.*of a GPU"):
        learned.predict(job(folder, device="h100"))
    on_cpu = job(folder, device="cpu")
    same = DeletePopPredictor().predict(on_cpu)["step_time_s"].median
    assert learned.predict(on_cpu)["step_time_s"].median == pytest.approx(same, rel=0.01)


def test_operators_that_were_never_measured_are_named(folder: Path) -> None:
    learned = DeletePopPredictor().relearn(made_up(count=20))
    known, unknown = (learned.predict(one) for one in (job(folder), job(folder, "convolutions", 512, 64)))
    assert not any("by the roofline alone" in note for note in known.assumptions)
    (note,) = [note for note in unknown.assumptions if "by the roofline alone" in note]
    assert "convolution" in note
    shipped = DeletePopPredictor().predict(job(folder, "convolutions", 512, 64))
    assert not any("by the roofline alone" in note for note in shipped.assumptions)


# Intervals


def width(forecast: Forecast) -> float:
    step = forecast["step_time_s"]
    return step.high / step.low


def test_intervals_are_as_wide_as_little_was_measured_of_a_device(folder: Path) -> None:
    devices = ("h200", "a100-sxm-80gb", "rtx-4090", "mi300x")
    forecasts = [DeletePopPredictor().predict(job(folder, device=device)) for device in devices]
    widths = [width(forecast) for forecast in forecasts]
    assert widths[0] <= 1.02 * widths[1] < widths[2] < widths[3]
    notes = [[note for note in one.assumptions if "nothing was measured of" in note] for one in forecasts]
    assert notes[:2] == [[], []]
    assert "nvidia ada in fp32, other generations of nvidia were" in notes[2][0]
    assert "amd cdna3 in fp32, no device like it was" in notes[3][0]


def test_amd_was_measured_in_full_precision_alone(folder: Path) -> None:
    full, half = (
        DeletePopPredictor().predict(job(folder, device="mi210", precision=precision))
        for precision in ("fp32", "amp-bf16")
    )
    assert width(half) > 1.2 * width(full)
    assert any("amd cdna2 in amp-bf16" in note for note in half.assumptions)


def test_what_the_host_bounds_has_a_wide_interval_on_every_device(folder: Path) -> None:
    for device in ("h200", "a100-sxm-80gb"):
        by_host, by_device = (
            DeletePopPredictor().predict(job(folder, batch=batch, device=device)) for batch in (2, 16384)
        )
        assert width(by_host) > 1.25 * width(by_device)


def on_host(one: Job, host: dict[str, float] | str | None) -> Job:
    cluster = {**one.cluster.to_dict(), **({} if host is None else {"host": host})}
    return dataclasses.replace(one, cluster=Cluster.read(cluster))


def test_a_measured_host_is_told_and_narrows_the_interval(folder: Path) -> None:
    small = job(folder, batch=2)
    unknown, named, measured_ = (
        DeletePopPredictor().predict(on_host(small, host)) for host in (None, "epyc-rome", {"speed": 0.5})
    )
    hint = "; measure yours: foretrain measure host"
    assert [one.bound.endswith(hint) for one in (unknown, named, measured_)] == [True, True, False]
    assert all(one.bound.startswith("the host: the device is busy") for one in (unknown, named, measured_))
    assert any(note.startswith("cluster.node is not given") for note in unknown.assumptions)
    assert not any(note.startswith("cluster.node is not given") for note in named.assumptions)
    assert any(note.startswith("cluster.host: ") and "forward 0.50" in note for note in measured_.assumptions)
    assert width(measured_) < 0.8 * width(unknown)
    assert width(named) == pytest.approx(width(unknown))
    usual = small.cluster.issuer
    assert usual is not None
    steps = [one["step_time_s"].median for one in (unknown, named, measured_)]
    assert steps[0] < steps[1] == pytest.approx(steps[0] * usual.speed / 0.68, rel=0.02)
    assert steps[2] == pytest.approx(steps[0] * usual.speed / 0.5, rel=0.02)
    large = DeletePopPredictor().predict(job(folder, batch=16384))
    assert hint not in large.bound


def test_checkpoints_hand_every_saved_tensor_to_python(folder: Path) -> None:
    """Three times: as it is saved, as it is computed again, and as it is read; compiled they do not."""
    plain = job(folder, batch=2)
    again = dataclasses.replace(plain, plan=dataclasses.replace(plain.plan, recompute="full"))
    compiled = job(folder, batch=2, compile=True)
    compiled = dataclasses.replace(compiled, plan=again.plan)
    hooks = dataclasses.replace(DeletePopPredictor().host, hook_s=1.0)
    saved = {}
    for name, one in {"plain": plain, "again": again, "compiled": compiled}.items():
        with_, without = (
            DeletePopPredictor(DeletePopPredictor().costs, host).predict(one)["host_issue_s"].median
            for host in (hooks, dataclasses.replace(hooks, hook_s=0.0))
        )
        saved[name] = with_ - without
    assert (saved["plain"], saved["compiled"]) == (0.0, 0.0)
    assert 10 <= saved["again"] <= 100


def test_a_forward_pass_that_autograd_does_not_record_is_issued_faster(folder: Path) -> None:
    train, infer = (job(folder, batch=2, mode=mode) for mode in ("train", "infer"))
    forward_s = DeletePopPredictor().predict(train)["forward_time_s"].median
    host = infer.cluster.issuer
    assert host is not None
    overhead_s = DeletePopPredictor().host.step_overhead_s / host.speed
    assert DeletePopPredictor().predict(infer)["step_time_s"].median < 0.85 * forward_s + overhead_s


def test_other_operators_make_other_evidence(folder: Path) -> None:
    learned = DeletePopPredictor().relearn(made_up(count=20))
    assert learned.tier(job(folder, device="h100")) == "scored"
    assert learned.tier(job(folder, device="a100-sxm-80gb")) == "vendor"
    assert learned.tier(job(folder, device="mi210")) == "never"
    few = learned.predict(job(folder))
    assert any(note.startswith("only ") and "operators were learned from" in note for note in few.assumptions)
    assert width(few) > 1.5 * width(DeletePopPredictor().predict(job(folder)))


def test_families_that_were_not_measured_widen_the_interval(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretrain.predictors.deletepop.predictor._ENOUGH_OPERATORS", 1)
    learned = DeletePopPredictor().relearn(made_up(count=20))
    known, unknown = (learned.predict(one) for one in (job(folder), job(folder, "convolutions", 512, 64)))
    assert width(unknown) > 1.5 * width(known)


@pytest.mark.parametrize("name", ["one CPU", "tensor", "pipeline, gpipe", "four CPU workers", "ZeRO 3"])
def test_the_parts_of_a_step_are_all_of_it(name: str) -> None:
    given = golden.jobs()[name]
    predictor = DeletePopPredictor()
    parts = shares(predictor.step(given), predictor.costs, predictor.tier(given))
    assert min(parts.values()) >= 0
    assert sum(share for part, share in parts.items() if part not in ON_TOP) == pytest.approx(1.0)
    found = bounds(parts, shipped_widths())
    assert list(found) == sorted(found)
    assert found.low < 1 < found.high


def test_what_is_not_products_is_known_less() -> None:
    by_name = golden.jobs()
    predictor = DeletePopPredictor()
    tensor, images = (
        shares(predictor.step(given), predictor.costs, predictor.tier(given))
        for given in (by_name["tensor"], by_name["AdaptDL"])
    )
    assert tensor[ATTENTION] > 0 == tensor[CONVOLUTIONS] == tensor[EXPERTS]
    assert images[CONVOLUTIONS] > 0.2 > 0.01 > images[ATTENTION]
    widths = shipped_widths()
    assert all(widths[part].low < 0 < widths[part].high for part in ON_TOP)


def test_memory_is_known_as_well_as_what_it_is_made_of() -> None:
    widths = shipped_memory_widths()
    assert list(widths) == sorted(MEMORY_PARTS)
    states, mixed = (
        RankMemory(stage=0, by_category={"weights": 8.0, "optimizer_state": 8.0, "activations": kept},
                   cached_bytes=cached)
        for kept, cached in ((0.0, 0.0), (8.0, 4.0))
    )  # fmt: skip
    assert sum(memory_shares(mixed, reserved=True).values()) == pytest.approx(1.0)
    exact, allocated, reserved = (
        memory_bounds(states)["peak_memory_bytes"],
        memory_bounds(mixed)["peak_memory_bytes"],
        memory_bounds(mixed)["reserved_memory_bytes"],
    )
    assert reserved.low < allocated.low < exact.low < 1 < exact.high < allocated.high < reserved.high
