"""Plays the parts of processes that train one model in unison: replicas, parameter servers, their workers.

Gradients go over gloo between CPU workers and over NCCL between GPU workers (all-reduce), or by way of host
memory (parameter server).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from foretrain.errors import InputError
from foretrain.measure.tasks import WorkerTask, shards

if TYPE_CHECKING:
    import torch

    from foretrain.job import Job
    from foretrain.measure.models import RealModel


class Participant:
    """A process's part in a step. A worker can also do its step alone, to tell what synchronising costs."""

    role: Literal["worker", "server"] = "worker"
    parameters = 0
    can_be_alone = True

    def step(self) -> None:
        raise NotImplementedError

    def step_alone(self) -> None:
        """The step without synchronising; a server has nothing to do meanwhile."""


class AllReduce(Participant):
    """A worker of DistributedDataParallel, with torch's defaults; a single worker trains the bare module."""

    def __init__(self, job: Job, device: str, workers: int) -> None:
        import torch

        self._model, self._trained = _trainable(job, device)
        self.parameters = sum(parameter.numel() for parameter in self._trained)
        self._job, self._device = job, device
        self.can_be_alone = workers > 1
        self._module: torch.nn.Module = self._model.module
        if workers > 1:
            index = None if device == "cpu" else [torch.device(device)]
            self._module = torch.nn.parallel.DistributedDataParallel(self._model.module, device_ids=index)
        self._optimizer = _optimizer(job, self._trained)

    def step(self) -> None:
        self._step(alone=False)

    def step_alone(self) -> None:
        self._step(alone=True)

    def _step(self, *, alone: bool) -> None:
        import torch

        for left in reversed(range(self._job.accumulation)):
            with self._unsynchronised() if alone or left else contextlib.nullcontext():
                _backward(self._model, self._job, self._device, self._module)
        with torch.no_grad():
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _unsynchronised(self) -> contextlib.AbstractContextManager[Any]:
        no_sync = getattr(self._module, "no_sync", contextlib.nullcontext)
        return no_sync()


class ParameterWorker(Participant):
    """A worker of a synchronous parameter server: pushes its gradients, pulls the weights.

    Buffers such as batch statistics stay its own. Alone, it does forward and backward: the optimizer is the
    servers' work.
    """

    def __init__(self, job: Job, device: str, rank: int, workers: int, servers: int) -> None:
        import torch
        import torch.distributed as dist

        self._model, trained = _trainable(job, device)
        self.parameters = sum(parameter.numel() for parameter in trained)
        self._job, self._device = job, device
        shapes = [tuple(parameter.shape) for parameter in trained]
        dist.broadcast_object_list([shapes], src=0)
        parts = shards([parameter.numel() for parameter in trained], servers)
        self._shards = [(workers + i, [trained[index] for index in part]) for i, part in enumerate(parts)]
        self._flat = [torch.empty(sum(p.numel() for p in part)) for _, part in self._shards]
        if rank == 0:
            for (server, part), flat in zip(self._shards, self._flat, strict=True):
                _fill(flat, [parameter.detach() for parameter in part])
                dist.send(flat, server)
        self._pull()

    def step(self) -> None:
        import torch
        import torch.distributed as dist

        self.step_alone(keep=True)
        pushed = []
        for (server, part), flat in zip(self._shards, self._flat, strict=True):
            _fill(flat, [torch.zeros_like(p) if p.grad is None else p.grad for p in part])
            pushed.append(dist.isend(flat, server))
        for push in pushed:
            _wait(push)
        self._pull()
        self._model.module.zero_grad(set_to_none=True)

    def step_alone(self, *, keep: bool = False) -> None:
        for _ in range(self._job.accumulation):
            _backward(self._model, self._job, self._device)
        if not keep:
            self._model.module.zero_grad(set_to_none=True)

    def _pull(self) -> None:
        import torch
        import torch.distributed as dist

        pulls = [dist.irecv(flat, server) for (server, _), flat in zip(self._shards, self._flat, strict=True)]
        for pull, (_, part), flat in zip(pulls, self._shards, self._flat, strict=True):
            _wait(pull)
            with torch.no_grad():
                for parameter, value in zip(part, _views(flat, [p.shape for p in part]), strict=True):
                    parameter.copy_(value)


class ShardServer(Participant):
    """Holds a shard of the weights: averages gradients, runs the optimizer, sends the weights back."""

    role = "server"
    can_be_alone = False

    def __init__(self, job: Job, rank: int, workers: int, servers: int) -> None:
        import torch
        import torch.distributed as dist

        message: list[Any] = [None]
        dist.broadcast_object_list(message, src=0)
        all_shapes = [torch.Size(shape) for shape in message[0]]
        shard = shards([shape.numel() for shape in all_shapes], servers)[rank - workers]
        shapes = [all_shapes[index] for index in shard]
        self._workers = range(workers)
        self._weights = torch.empty(sum(shape.numel() for shape in shapes))
        dist.recv(self._weights, 0)
        self._inbox = [torch.empty_like(self._weights) for _ in self._workers]
        self._gradient = torch.empty_like(self._weights)
        held = [torch.nn.Parameter(view) for view in _views(self._weights, shapes)]
        for parameter, gradient in zip(held, _views(self._gradient, shapes), strict=True):
            parameter.grad = gradient
        self._optimizer = _optimizer(job, held)
        self.parameters = self._weights.numel()
        self._send()

    def step(self) -> None:
        import torch
        import torch.distributed as dist

        arriving = [dist.irecv(box, worker) for box, worker in zip(self._inbox, self._workers, strict=True)]
        self._gradient.zero_()
        for message, box in zip(arriving, self._inbox, strict=True):
            _wait(message)
            self._gradient.add_(box, alpha=1 / len(self._inbox))
        with torch.no_grad():
            self._optimizer.step()
        self._send()

    def _send(self) -> None:
        import torch.distributed as dist

        for message in [dist.isend(self._weights, worker) for worker in self._workers]:
            _wait(message)


def participant_of(task: WorkerTask, job: Job, rank: int, device: str) -> Participant:
    """The part that a rank plays in a cell."""
    if not task.servers:
        return AllReduce(job, device, task.workers)
    if rank < task.workers:
        return ParameterWorker(job, device, rank, task.workers, task.servers)
    return ShardServer(job, rank, task.workers, task.servers)


def _trainable(job: Job, device: str) -> tuple[RealModel, list[torch.nn.Parameter]]:
    """The model and the parameters that its loss reaches; the others, an unused head say, are frozen."""
    from foretrain.measure.models import real_model

    model = real_model(job.workload, job.micro_batch, device)
    _backward(model, job, device)
    for parameter in model.module.parameters():
        parameter.requires_grad_(parameter.requires_grad and parameter.grad is not None)
    model.module.zero_grad(set_to_none=True)
    trained = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    if not trained:
        raise InputError("model: it has no trainable parameter")
    return model, trained


def _backward(model: RealModel, job: Job, device: str, through: torch.nn.Module | None = None) -> None:
    from foretrain.measure.models import autocast

    with autocast(job.workload.training.precision, device):
        loss = model.compute(through)
    loss.backward()


def _optimizer(job: Job, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    from foretrain.measure.models import real_optimizer

    return real_optimizer(job.workload.training.optimizer, parameters)


def _views(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    pieces = flat.split([shape.numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _fill(flat: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
    for view, value in zip(_views(flat, [value.shape for value in values]), values, strict=True):
        view.copy_(value)


def _wait(message: Any) -> None:
    if message is not None:
        message.wait()
