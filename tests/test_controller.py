"""The controller: jobs are completed with what is there, checked, predicted and recorded, from many threads
at once."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from foretrain.errors import InputError, UnsupportedJob
from foretrain.job import Job
from foretrain.predictors.ernest import ErnestPredictor
from foretrain.run import Run
from foretrain.serve.controller import (
    ClusterResources,
    Controller,
    NodeResources,
    local_resources,
    ray_resources,
)
from workloads import job, runs

TINY = """
import torch

def net(batch):
    return torch.nn.Linear(16, 4), torch.randn(batch, 16)
"""

pytestmark = pytest.mark.usefixtures("own_cache")


def machine(name: str = "a", cores: int = 4, **more: Any) -> NodeResources:
    return NodeResources(name=name, cores=cores, memory_bytes=8e9, **more)


def local(*nodes: NodeResources) -> ClusterResources:
    return ClusterResources(source="local", nodes=nodes or (machine(),))


@pytest.fixture
def controller(tmp_path: Path) -> Controller:
    return Controller(ErnestPredictor().fit(runs((1.0, 0.1, 0.1, 0.1))), records=tmp_path / "records.jsonl")


def records(controller: Controller) -> list[dict[str, Any]]:
    assert controller.records is not None
    return [json.loads(line) for line in controller.records.read_text().splitlines()]


def test_this_machine_is_found() -> None:
    [found] = local_resources().nodes
    assert found.cores >= 1
    assert found.memory_bytes > 1e8


def test_a_cluster_section_comes_from_resources() -> None:
    two = local(machine("a", link_bytes_per_s=1.25e9), machine("b", 9, link_bytes_per_s=5e9))
    assert two.cluster(cores_per_device=2) == {
        "device": "cpu", "devices_per_node": 2, "nodes": 2, "cores_per_device": 2,
        "inter_node": {"bandwidth": 1.25e9},
    }  # fmt: skip
    with pytest.raises(
        InputError, match=r"^cluster.cores_per_device: 16 is not at most the 9 cores of a node$"
    ):
        two.cluster(cores_per_device=16)
    with pytest.raises(InputError, match=r"^cluster.cores_per_device: 0 is not 1 or more$"):
        two.cluster(cores_per_device=0)
    with pytest.raises(InputError, match=r"^cluster.device: a GPU, but none was found$"):
        two.cluster("h100-sxm-80gb")


def test_gpus_must_be_named_and_nodes_without_any_are_left_out() -> None:
    mixed = local(
        machine("head"), machine("a", gpus=8, gpu_kind="H100"), machine("b", gpus=8, gpu_kind="H100")
    )
    with pytest.raises(
        InputError,
        match=r"^cluster.device: missing; 16 GPUs \(H100\) were found, name what they are, or cpu$",
    ):
        mixed.cluster()
    assert mixed.cluster("h100-sxm-80gb") == {"device": "h100-sxm-80gb", "devices_per_node": 8, "nodes": 2}
    assert mixed.cluster("cpu", 4)["nodes"] == 3


@pytest.fixture
def unlike_nodes(ray_cluster: Any) -> Iterator[str]:
    """The address of a Ray cluster of which one node is larger and has GPUs."""
    import ray

    larger = ray_cluster.add_node(
        num_cpus=5, num_gpus=2, memory=200 * 2**20, resources={"accelerator_type:H100": 1}
    )
    ray_cluster.wait_for_nodes(timeout=300)  # until those that other tests ended are known to be gone
    yield ray_cluster.address
    ray.shutdown()
    ray_cluster.remove_node(larger)


@pytest.mark.xdist_group("ray")
def test_a_live_ray_cluster_is_found_node_by_node(unlike_nodes: str, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"^address: missing, and this process is connected to no Ray cluster"
    ):
        ray_resources()
    controller = Controller(
        resources=functools.partial(ray_resources, unlike_nodes), records=tmp_path / "answers.jsonl"
    )
    (tmp_path / "tiny.py").write_text(TINY)
    tables = {
        "model": {"source": "python", "name": str(tmp_path / "tiny.py:net")},
        "training": {"global_batch": 12},
    }
    answer = controller.ask(tables, device="cpu", cores_per_device=1)
    assert answer.resources is not None
    nodes = answer.resources.nodes
    assert sorted(node.cores for node in nodes) == [0, 1, 1, 5]
    [larger] = [node for node in nodes if node.cores == 5]
    assert (larger.memory_bytes, larger.gpus, larger.gpu_kind) == (200 * 2**20, 2, "H100")
    assert sum(node.gpus for node in nodes) == 2
    assert all(node.memory_bytes > 0 for node in nodes)
    assert all(node.link_bytes_per_s is None or node.link_bytes_per_s > 0 for node in nodes)
    cluster = answer.forecast.job.cluster
    assert (cluster.nodes, cluster.devices_per_node) == (3, 1)
    assert {
        "cluster: 1 of 4 nodes have no room for a worker and are left out",
        "cluster: its nodes differ; 1 workers on each, as many as the smallest has room for",
    } <= set(answer.forecast.assumptions)
    on_gpus = {"device": "h100-sxm-80gb", "devices_per_node": 2, "nodes": 1}
    assert ray_resources().cluster("h100-sxm-80gb") == on_gpus
    with pytest.raises(InputError, match=r"^cluster.device: missing; 2 GPUs \(H100\) were found") as unnamed:
        controller.ask(tables)
    first, second = records(controller)
    assert first["quantities"]["step_time_s"][0] > 0
    assert [node["cores"] for node in first["resources"]["nodes"]] == [node.cores for node in nodes]
    assert second["refused"] == str(unnamed.value)


def test_a_job_without_a_cluster_runs_where_the_controller_is(tmp_path: Path) -> None:
    here = local()
    controller = Controller(
        ErnestPredictor().fit(runs((1.0, 0.1, 0.1, 0.1))),
        resources=lambda: here,
        records=tmp_path / "records.jsonl",
    )
    tables = job(workers=4).to_dict()
    answer = controller.ask({"model": tables["model"], "training": tables["training"]})
    assert answer.resources == here
    assert answer.forecast.job.cluster.world_size == 4
    assert answer.forecast.assumptions == ()
    assert records(controller)[0]["resources"] is not None


def test_nodes_without_room_for_a_worker_are_left_out_and_the_answer_says_so() -> None:
    unlike = local(machine("head", 0), machine("a", 2), machine("b", 5))
    tables = job().to_dict()
    several = [
        Job.read({
            "model": tables["model"],
            "training": {**tables["training"], "global_batch": 2 * workers * nodes},
            "cluster": {**tables["cluster"], "devices_per_node": workers, "nodes": nodes},
        })
        for workers, nodes in ((1, 1), (2, 1), (2, 2), (2, 4))
    ]  # fmt: skip
    learned = ErnestPredictor().fit([Run(job=one, measured={"step_time_s": 0.1}) for one in several])
    controller = Controller(learned, resources=lambda: unlike)
    answer = controller.ask({"model": tables["model"], "training": {**tables["training"], "global_batch": 8}})
    assert answer.forecast.job.cluster.world_size == 4
    assert answer.forecast.assumptions[-2:] == (
        "cluster: 1 of 3 nodes have no room for a worker and are left out",
        "cluster: its nodes differ; 2 workers on each, as many as the smallest has room for",
    )


def test_what_is_no_job_is_refused_in_one_line_and_recorded(controller: Controller) -> None:
    with pytest.raises(InputError, match=r"^job: \[1\] is not a table with model, training"):
        controller.ask([1])  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^training.global_batch"):
        controller.ask({**job().to_dict(), "training": {"global_batch": -1}})
    assert ["refused" in line for line in records(controller)] == [True, True]


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


def test_many_threads_share_one_predictddl_and_its_embeddings(tmp_path: Path) -> None:
    """Requests of two architectures, none of them traced before, from eight threads at once."""
    controller = Controller(records=tmp_path / "records.jsonl")
    jobs = [job(name, workers) for name in ("resnet18", "squeezenet1_1") for workers in (1, 2, 4, 8)] * 2
    with ThreadPoolExecutor(8) as pool:
        together = [answer.forecast["step_time_s"] for answer in pool.map(controller.ask, jobs)]
    assert together == [controller.ask(one).forecast["step_time_s"] for one in jobs]
    assert len(records(controller)) == 2 * len(jobs)
