"""Runs tasks from standard input, a line each, with Ray's TorchTrainer, and writes each result to a file."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

from foretrain.errors import ForetrainError, InputError
from foretrain.fanout.cluster import LOCAL, connect, losses
from foretrain.files import write_atomically
from foretrain.measure.tasks import WorkerTask
from foretrain.measure.worker import explain

NO_STATE_SERVER = {"RAY_API_SERVER_ADDRESS": "http://127.0.0.1:1"}
"""Environment of a cluster without a dashboard: says that nobody tells the states of actors, for which Ray
otherwise waits 12 s at the end of each training."""


def run(task: WorkerTask) -> dict[str, Any]:
    """Run a cell as one TorchTrainer run, which the loss of a worker or a node fails."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    on_gpu = not task.read_job().cluster.device.is_cpu
    _check_resources(task, on_gpu)
    with tempfile.TemporaryDirectory(prefix="foretrain-ray-", ignore_cleanup_errors=True) as storage:
        backend, once = "cpu:gloo,cuda:nccl" if on_gpu else "gloo", FailureConfig(max_failures=0)
        needs = _needs(task, on_gpu)
        trainer = TorchTrainer(
            _loop,
            train_loop_config={"task": task.to_json()},
            torch_config=TorchConfig(backend=backend, timeout_s=int(task.timeout_s)),
            scaling_config=ScalingConfig(
                num_workers=task.processes, use_gpu=on_gpu, resources_per_worker=needs
            ),
            run_config=RunConfig(name=uuid.uuid4().hex, storage_path=storage, failure_config=once),
        )
        result = trainer.fit()
    if result.error is not None:
        raise result.error
    if getattr(result, "return_value", None) is None:
        raise InputError(
            "on: this version of Ray does not return what a training function returns; install a newer one"
        )
    return dict(json.loads(result.return_value))


def _needs(task: WorkerTask, on_gpu: bool) -> dict[str, float]:
    return {"CPU": task.cores, **({"GPU": 1} if on_gpu else {})}


def _check_resources(task: WorkerTask, on_gpu: bool) -> None:
    import ray

    has = ray.cluster_resources()
    for name, amount in _needs(task, on_gpu).items():
        if amount * task.processes > has.get(name, 0):
            raise InputError(
                f"workers: {task.processes} x {amount:g} {name} "
                f"are more than the {has.get(name, 0):g} of the Ray cluster"
            )


def _loop(config: dict[str, str]) -> str:
    """Measure in a Ray worker; Ray has made the process group."""
    import ray.train

    from foretrain.measure.worker import measure, pin

    task = WorkerTask.from_json(config["task"])
    context = ray.train.get_context()
    cores = pin(context.get_local_rank(), task.cores)
    return json.dumps(measure(task, context.get_world_rank(), context.get_local_rank(), cores))


def main() -> int:
    """Run tasks from standard input one after the other on a Ray cluster, until that ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", default=LOCAL)
    parser.add_argument("--cpus", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if options.address == LOCAL:
        os.environ |= NO_STATE_SERVER
    try:
        connect(options.address, cpus=options.cpus, field="address")
    except ForetrainError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for line in sys.stdin:
        message = json.loads(line)
        before = _nodes()
        try:
            answer: dict[str, Any] = {"result": run(WorkerTask.from_json(message["task"]))}
        except Exception as error:
            answer = {"error": _cause(error), "lost": _is_loss(error) or not before <= _nodes()}
        write_atomically(Path(message["out"]), json.dumps(answer))
    import ray

    ray.shutdown()
    return 0


def _nodes() -> set[str]:
    """List the nodes that are alive."""
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def _is_loss(error: BaseException) -> bool:
    """Whether a worker or a node is behind it that is gone, anywhere in what Ray has wrapped."""
    inner = [getattr(error, name, None) for name in ("__cause__", "health_check_failure", "cause")]
    wrapped = [*getattr(error, "worker_failures", {}).values(), *inner]
    return isinstance(error, losses()) or any(
        _is_loss(each) for each in wrapped if isinstance(each, BaseException)
    )


def _cause(error: BaseException) -> str:
    """Ray wraps what a worker raised; the innermost error is what happened."""
    failures = getattr(error, "worker_failures", None)
    if failures:
        rank, first = next(iter(failures.items()))
        return f"process {rank}: {_cause(first)}"
    inner = error.__cause__ or getattr(error, "health_check_failure", None) or getattr(error, "cause", None)
    return _cause(inner) if isinstance(inner, BaseException) else explain(error)


if __name__ == "__main__":
    sys.exit(main())
