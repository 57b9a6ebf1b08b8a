"""Tests Ernest: a law of four terms is found again, and each workload has its own unless all are pooled."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain import predictors
from foretrain.errors import InputError, UnsupportedJob
from foretrain.job import Job
from foretrain.predictors.checks import check_predictor
from foretrain.predictors.conformal import Factors
from foretrain.predictors.ernest import TERMS, ErnestPredictor, law, terms
from foretrain.predictors.reach import LeftOutAlong, Reach
from foretrain.predictors.seen import Numbers
from foretrain.run import Run
from workloads import job, law_s, runs


def test_it_passes_the_conformance_checks() -> None:
    check_predictor(predictors.get("ernest"), job(samples=50_000, epochs=2))


def test_the_terms_are_those_of_the_paper() -> None:
    assert TERMS == ("1", "scale / machines", "log machines", "machines")
    assert terms(job(workers=4, batch=16)) == [1.0, 16.0, math.log(4), 4.0]


@given(st.tuples(*[st.floats(0.01, 1.0)] * 4))
def test_a_law_is_found_again(coefficients: tuple[float, ...]) -> None:
    known = runs(coefficients)
    found = law([run.job for run in known], np.array([run.measured["step_time_s"] for run in known]))
    assert law_s(job(workers=16), found) == pytest.approx(law_s(job(workers=16), coefficients), rel=1e-4)
    assert min(found) >= 0


def test_samples_per_second_tell_the_time_of_a_step() -> None:
    known = runs((1.0, 0.1, 0.1, 0.1))
    rates = [
        Run(
            job=run.job,
            measured={
                "samples_per_s": run.job.workload.training.global_batch / run.measured["step_time_s"],
                "peak_memory_bytes": 1e9,
            },
        )
        for run in known
    ]
    by_times, by_rates = ErnestPredictor().fit(known), ErnestPredictor().fit(rates)
    assert not by_rates.left_out_
    assert by_rates.predict(job(workers=16))["step_time_s"].median == pytest.approx(
        by_times.predict(job(workers=16))["step_time_s"].median
    )


def test_each_workload_has_its_own_law() -> None:
    slow, fast = (1.0, 0.1, 0.1, 0.1), (0.1, 0.01, 0.01, 0.01)
    ernest = ErnestPredictor().fit([*runs(slow), *runs(fast, "vgg11")])
    assert ernest.predict(job("vgg11", 16))["step_time_s"].median == pytest.approx(
        law_s(job(workers=16), fast), rel=1e-3
    )


def test_a_workload_without_runs_is_refused_unless_all_are_pooled() -> None:
    known = runs((1.0, 0.1, 0.1, 0.1))
    with pytest.raises(
        UnsupportedJob,
        match=r"^model: no run of 'vgg11' in this setting; ernest needs runs of every workload$",
    ):
        ErnestPredictor().fit(known).predict(job("vgg11"))
    assert ErnestPredictor(pooled=True).fit(known).predict(job("vgg11"))["step_time_s"].median > 0


def test_parameter_servers_are_a_workload_of_their_own() -> None:
    served = [job(workers=workers, plan={"servers": 1}) for workers in (1, 2, 4, 8)]
    ernest = ErnestPredictor().fit([Run(job=one, measured={"step_time_s": 1.0}) for one in served])
    assert ernest.predict(job(plan={"servers": 1}))["step_time_s"].median > 0
    with pytest.raises(UnsupportedJob):
        ernest.predict(job())


@pytest.mark.parametrize("name", ["ernest", "cherrypick", "flops", "ray_models"])
def test_a_machine_without_runs_is_named_and_less_sure(name: str, tmp_path: Path) -> None:
    def on(one: Job, host: str) -> Job:
        return dataclasses.replace(one, cluster=dataclasses.replace(one.cluster, host=host))

    known = [
        dataclasses.replace(run, job=on(run.job, "Intel Xeon, 16 cores"))
        for run in runs((1.0, 0.1, 0.1, 0.1))
    ]
    predictors.get(name).fit(known).save(tmp_path)
    learned, asked = predictors.get(tmp_path), job(workers=4)
    silent, same = learned.predict(asked), learned.predict(on(asked, "XEON (16 cores)"))
    other = learned.predict(on(asked, "AMD EPYC, 2 cores"))
    assert silent["step_time_s"] == same["step_time_s"]
    assert other["step_time_s"].median == same["step_time_s"].median
    assert other["step_time_s"].high > 1.5 * same["step_time_s"].high
    (note,) = set(other.assumptions) - set(same.assumptions)
    assert note.startswith("cluster.host: epyc, 2 cores, and runs were made on xeon, 16 cores")


def served(workers: int, **servers: int) -> Job:
    """Workers on one node, and two parameter servers, which may have nodes of their own."""
    own = job(workers=workers, plan={"servers": 2}).to_dict()
    link = {"inter_node": {"kind": "ethernet", "bandwidth": "10 Mb/s"}}
    return Job.read(
        {**own, "cluster": {**own["cluster"], **link, **({"servers": servers} if servers else {})}}
    )


@pytest.mark.parametrize("name", ["ernest", "cherrypick", "flops", "ray_models"])
def test_servers_on_nodes_of_their_own_are_a_setting_of_its_own(name: str, tmp_path: Path) -> None:
    def learned(**servers: int) -> Any:
        jobs = [served(workers, **servers) for workers in (1, 2, 4, 8)]
        fit = predictors.get(name).fit(Run(job=one, measured={"step_time_s": 10.0}) for one in jobs)
        fit.save(tmp_path / str(servers))
        return predictors.get(tmp_path / str(servers))

    beside, apart = learned(), learned(nodes=1)
    assert beside.predict(served(4))["step_time_s"].median > 0
    for predictor, asked in ((beside, served(4, nodes=1)), (apart, served(4))):
        with pytest.raises(UnsupportedJob, match=r"cluster\.|in this setting"):
            predictor.predict(asked)
    near, far = (apart.predict(served(4, nodes=nodes)) for nodes in (1, 2))
    assert any(note.startswith("beyond the runs in nodes of servers: 2") for note in far.assumptions)
    assert far["step_time_s"].high > near["step_time_s"].high


def over_nodes(bandwidth: str, workers: int = 4) -> Job:
    cluster = {"device": "cpu", "devices_per_node": 1, "nodes": workers, "cores_per_device": 1}
    link = {"kind": "ethernet", "bandwidth": bandwidth}
    return Job.read({**job(workers=workers).to_dict(), "cluster": {**cluster, "inter_node": link}})


@pytest.mark.parametrize("name", ["ernest", "cherrypick"])
def test_links_that_no_run_goes_over_are_refused(name: str) -> None:
    on_one_node = runs((1.0, 0.1, 0.1, 0.1))
    link = r"^cluster.inter_node: 'ethernet 1.25e\+06 B/s'; "
    with pytest.raises(
        UnsupportedJob, match=rf"{link}no run of this model goes over it, and {name} cannot tell$"
    ):
        predictors.get(name).fit(on_one_node).predict(over_nodes("10 Mb/s"))
    slow, fast = ([over_nodes(rate, workers) for workers in (2, 4, 8)] for rate in ("1 Gb/s", "10 Gb/s"))
    times = [(one, 10.0) for one in slow] + [(one, 1.0) for one in fast]
    learned = predictors.get(name).fit(
        Run(job=one, measured={"step_time_s": time_s}) for one, time_s in times
    )
    assert learned.predict(slow[1])["step_time_s"].median == pytest.approx(10.0, rel=0.2)
    assert learned.predict(fast[1])["step_time_s"].median == pytest.approx(1.0, rel=0.2)
    with pytest.raises(UnsupportedJob, match=f"{link}the runs of this model have 'ethernet 1.25e"):
        learned.predict(over_nodes("10 Mb/s"))


@pytest.mark.parametrize("name", ["ernest", "cherrypick"])
@pytest.mark.parametrize(
    "setting", [{"precision": "bf16"}, {"optimizer": "adamw"}, {"framework": "megatron"}, {"compile": True}]
)
def test_a_setting_that_no_run_has_is_refused(name: str, setting: dict[str, Any]) -> None:
    for options in ({}, {"pooled": True}):
        learned = type(predictors.get(name))(**options).fit(runs((1.0, 0.1, 0.1, 0.1)))
        with pytest.raises(UnsupportedJob):
            learned.predict(job(**setting))


@pytest.mark.parametrize("name", ["ernest", "cherrypick"])
def test_what_lies_beyond_the_runs_is_named_and_less_sure(name: str) -> None:
    learned = predictors.get(name).fit(runs((1.0, 0.1, 0.1, 0.1)))
    for far, note in (
        (job(workers=64), "beyond the runs in workers: 64, they have 1 to 8"),
        (job(batch=128), "beyond the runs in batch of a worker: 128, they have 8 to 16"),
        (cores(8), "beyond the runs in cores: 8, they have 1"),
    ):
        near, farther = learned.predict(job(workers=4)), learned.predict(far)
        assert note in farther.assumptions
        widths = [one["step_time_s"].high / one["step_time_s"].low for one in (near, farther)]
        assert widths[0] < widths[1]
        assert not near.assumptions


def cores(count: int) -> Job:
    document = job(workers=2).to_dict()
    document["cluster"]["cores_per_device"] = count
    return Job.read(document)


def test_growth_is_such_that_four_in_five_left_out_runs_are_held() -> None:
    misses = np.random.default_rng(0).normal(0, 1, 400)
    spread, numbers = Factors(0.5, 0.5, 2.0, 2.0), Numbers(values={"workers": (1.0, 2.0, 4.0)})
    away = [numbers.away({"workers": 4.0 * factor}) for factor in (2, 4, 8, 16) * 100]
    lengths = [one.beyond["workers"] for one in away]
    grown = [miss * (0.5 + length) for miss, length in zip(misses, lengths, strict=True)]
    reach = Reach.of(
        [LeftOutAlong.of("workers", one, miss, spread) for one, miss in zip(away, grown, strict=True)]
    )
    factors = [reach.grown(spread, one, numbers) for one in away]
    held = [math.log(one.low) <= miss <= math.log(one.high) for one, miss in zip(factors, grown, strict=True)]
    assert np.mean(held) == pytest.approx(0.8, abs=0.01)


def test_what_is_not_data_parallel_is_refused() -> None:
    ernest = ErnestPredictor().fit(runs((1.0, 0.1, 0.1, 0.1)))
    with pytest.raises(UnsupportedJob, match=r"^plan.tensor: 2; ernest forecasts plain data parallelism$"):
        ernest.predict(job(workers=2, plan={"tensor": 2}))


def test_runs_that_tell_nothing_are_named_and_none_at_all_is_an_error(tmp_path: Path) -> None:
    silent = Run(job=job(), measured={"kernels": 3.0})
    assert ErnestPredictor().fit([*runs((1.0, 0.1, 0.1, 0.1)), silent]).left_out_ == (
        "resnet18: no step_time_s",
    )
    with pytest.raises(InputError, match=r"^runs: none has a step time"):
        ErnestPredictor().fit([silent])
    with pytest.raises(InputError, match="nothing to save"):
        ErnestPredictor().save(tmp_path)
