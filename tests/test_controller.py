"""The controller: jobs are completed with what is there, checked, predicted and recorded, from many threads at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from foretrain.controller import Controller, Resources, local_resources, ray_resources
from foretrain.errors import InputError, UnsupportedJob
from foretrain.predictors.ernest import ErnestPredictor
from test_ernest import job, runs

FOUR = Resources(source="local", nodes=1, cores_per_node=4, memory_bytes=8e9)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETRAIN_CACHE", str(tmp_path / "cache"))
        yield


@pytest.fixture
def controller(tmp_path: Path) -> Controller:
    return Controller(ErnestPredictor().fit(runs((1.0, 0.1, 0.1, 0.1))), records=tmp_path / "records.jsonl")


def records(controller: Controller) -> list[dict[str, object]]:
    assert controller.records is not None
    return [json.loads(line) for line in controller.records.read_text().splitlines()]


def test_this_machine_is_found() -> None:
    found = local_resources()
    assert found.nodes == 1
    assert found.cores_per_node >= 1
    assert found.memory_bytes > 1e8


def test_a_ray_cluster_is_as_large_as_its_smallest_node() -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 8.0, "memory": 1e9}},
        {"Alive": True, "Resources": {"CPU": 4.0, "memory": 2e9}},
        {"Alive": False, "Resources": {}},
    ]
    found = ray_resources(nodes)
    assert (found.nodes, found.cores_per_node, found.memory_bytes, found.gpus_per_node) == (2, 4, 1e9, 0)
    with pytest.raises(InputError, match="no node that is alive"):
        ray_resources([])


def test_a_cluster_section_comes_from_resources() -> None:
    two = Resources(source="ray", nodes=2, cores_per_node=4, memory_bytes=8e9, link_bytes_per_s=1.25e9)
    assert two.cluster(cores_per_device=2) == {
        "device": "cpu", "devices_per_node": 2, "nodes": 2, "cores_per_device": 2, "inter_node": {"bandwidth": 1.25e9},
    }  # fmt: skip
    with pytest.raises(InputError, match=r"^cluster.cores_per_device: 8 is not at most the 4 cores of a node$"):
        two.cluster(cores_per_device=8)
    with pytest.raises(InputError, match=r"^cluster.device: missing; 8 GPUs were found"):
        Resources(source="local", nodes=1, cores_per_node=4, memory_bytes=8e9, gpus_per_node=8).cluster()


def test_a_job_without_a_cluster_runs_where_the_controller_is(controller: Controller) -> None:
    tables = job(workers=4).to_dict()
    answer = controller.ask({"model": tables["model"], "training": tables["training"]}, resources=FOUR)
    assert answer.resources == FOUR
    assert answer.forecast.job.cluster.world_size == 4
    assert records(controller)[0]["resources"] is not None


def test_refusals_are_recorded_and_raised(controller: Controller) -> None:
    with pytest.raises(UnsupportedJob):
        controller.ask(job("squeezenet1_1"))
    assert str(records(controller)[0]["refused"]).startswith("model: no run of 'squeezenet1_1'")


def test_many_threads_get_the_answers_of_one(controller: Controller) -> None:
    jobs = [job(workers=workers) for workers in (1, 2, 4, 8)] * 4
    alone = [controller.ask(one).forecast["step_time_s"] for one in jobs]
    with ThreadPoolExecutor(8) as pool:
        together = [answer.forecast["step_time_s"] for answer in pool.map(controller.ask, jobs)]
    assert together == alone
    assert len(records(controller)) == 2 * len(jobs)
