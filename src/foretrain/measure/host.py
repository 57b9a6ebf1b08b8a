"""Measures how fast this machine issues operators: Python, the dispatcher, autograd and optimizers."""

from __future__ import annotations

import datetime
import gc
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from foretrain.catalog.hosts import PARTS, HostProfile
from foretrain.measure.ops import device_name
from foretrain.measure.tasks import processor

_CALLS = 100
"""Of an operator in one sample: a GPU's queue takes ten times as many before the host waits."""
_NODES = 100
"""Of the chain that backward passes are timed with."""
_BLOCKS = 8
"""Of each network: some 400 kernels in a step."""
_FEW, _MANY = 8, 108
"""Tensors of the optimizers whose times tell a call from a tensor."""
_LEAST_ROUNDS = 5
_WARM_UPS = 3
_MOST_CORES = 64
_TURNS = 400
"""Of interpreted code on each core: some 8 ms."""

Run = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Something that is timed: what comes before each sample, what is timed, and how many calls it is."""

    run: Run
    calls: int = 1
    before: Run | None = None


def measure_host(seconds: float = 12.0) -> HostProfile:
    """The profile of this machine, in about ``seconds`` after torch is there: on tensors of a few numbers on
    the CPU, and on those of a GPU where there is one."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    core_s = _by_core()
    samples = {device: _samples(device, seconds / len(devices)) for device in devices}
    return HostProfile(
        cpu=processor(),
        cores=os.cpu_count() or 1,
        torch=torch.__version__,
        python=platform.python_version(),
        date=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        device=device_name("cuda") if "cuda" in devices else None,
        seconds={
            device: {name: float(np.median(times)) for name, times in of.items()}
            for device, of in samples.items()
        },
        spread={device: _spread(of) for device, of in samples.items()},
        rounds={device: len(next(iter(of.values()))) for device, of in samples.items()},
        core_s=core_s,
    )


# Cores


def _cores() -> list[int]:
    """List the cores that this process may use, spread out where there are many; none where that cannot be
    told."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return allowed[:: -(-len(allowed) // _MOST_CORES)] if allowed else []


@contextmanager
def _on(cores: set[int]) -> Iterator[None]:
    """Keep every thread of this process on some cores; without a choice where a system has none."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    _move(cores)
    try:
        yield
    finally:
        _move(before)


def _move(cores: set[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread.name), cores)


def _by_core() -> dict[str, float]:
    """Seconds of a call of interpreted code on each core: in a virtual machine some share theirs with the
    threads of others."""
    time_of_core = {}
    for core in _cores():
        with _on({core}):
            begin = time.perf_counter()
            for _ in range(_TURNS):
                _interpret()
            time_of_core[str(core)] = (time.perf_counter() - begin) / (_TURNS * _CALLS)
    return time_of_core


def _spread(samples: dict[str, list[float]]) -> dict[str, tuple[float, float]]:
    """Say, of each part of a step, between which multiples of the median eight in ten rounds lie."""
    spread_of = {}
    for part, names in PARTS.items():
        rounds = np.mean([np.log(samples[name]) for name in names], axis=0)
        low, high = np.quantile(rounds - np.median(rounds), (0.1, 0.9))
        spread_of[part] = (float(np.exp(low)), float(np.exp(high)))
    return spread_of


def _samples(device: str, seconds: float) -> dict[str, list[float]]:
    """Seconds per call of each benchmark, once in every round, so that all see the machine alike; each round
    on the next two cores, as a training keeps to those that it happens to get."""
    sync: Run = torch.cuda.synchronize if device == "cuda" else lambda: None
    with _one_thread():
        benchmarks = _benchmarks(torch.device(device))
        for one in benchmarks.values():
            for _ in range(_WARM_UPS):
                _time(one, sync)
        samples: dict[str, list[float]] = {name: [] for name in benchmarks}
        cores, start, rounds = _cores(), time.perf_counter(), 0
        while rounds < _LEAST_ROUNDS or time.perf_counter() - start < seconds:
            with _on({cores[(rounds + i) % len(cores)] for i in range(2)} if cores else set()):
                for name, one in benchmarks.items():
                    samples[name].append(_time(one, sync))
            rounds += 1
    return samples


def _time(benchmark: Benchmark, sync: Run) -> float:
    if benchmark.before is not None:
        benchmark.before()
    sync()
    begin = time.perf_counter()
    benchmark.run()
    took = time.perf_counter() - begin
    sync()
    return took / benchmark.calls


@contextmanager
def _one_thread() -> Iterator[None]:
    """Operators on the CPU by the thread that calls them, and no collection of garbage beside them."""
    threads, collects = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if collects:
            gc.enable()


def _benchmarks(device: torch.device) -> dict[str, Benchmark]:
    return {
        "interpreter": Benchmark(_interpret, _CALLS),
        **{f"dispatch.{name}": _repeated(call) for name, call in _operators(device).items()},
        **_autograd(device),
        **_optimizers(device),
        **_network("convolutions", _Convolutions().to(device), torch.randn(2, 8, 8, 8, device=device)),
        **_network("transformer", _Transformer().to(device), torch.randn(2, 16, 32, device=device)),
        **_network("checkpoints", _Transformer(True).to(device), torch.randn(2, 16, 32, device=device)),
        **(_only_on_a_gpu(device) if device.type == "cuda" else {}),
    }


class _InterpretedPart:
    """Does what interpreted code does: an attribute, a dictionary, a call."""

    def __init__(self) -> None:
        self.table = {"a": 1.0, "b": 2.0}

    def call(self, name: str, *, scale: float = 1.0) -> float:
        return self.table[name] * scale if name in self.table else 0.0


def _interpret() -> None:
    part, total = _InterpretedPart(), 0.0
    for i in range(_CALLS):
        total += part.call("a" if i % 2 else "b", scale=0.5)


def _repeated(call: Callable[[], object]) -> Benchmark:
    def run() -> None:
        with torch.no_grad():
            for _ in range(_CALLS):
                call()

    return Benchmark(run, _CALLS)


def _operators(device: torch.device) -> dict[str, Callable[[], object]]:
    """Calls of operators on a few numbers, by what they are called."""
    x, y = torch.randn(8, 8, device=device), torch.randn(8, 8, device=device)
    image, kernel = torch.randn(1, 8, 8, 8, device=device), torch.randn(8, 8, 3, 3, device=device)
    ones, zeros = torch.ones(8, device=device), torch.zeros(8, device=device)
    heads, table = torch.randn(1, 2, 8, 16, device=device), torch.randn(16, 8, device=device)
    index, identity = torch.arange(8, device=device), nn.Identity()
    half = torch.bfloat16
    return {
        "view": lambda: x.view(64),
        "transpose": lambda: x.transpose(0, 1),
        "module": lambda: identity(x),
        "empty": lambda: torch.empty(8, device=device),
        "add": lambda: x + y,
        "add_": lambda: x.add_(y, alpha=0.0),
        "mul": lambda: x * y,
        "relu": lambda: functional.relu(x),
        "gelu": lambda: functional.gelu(x),
        "copy": lambda: x.to(half),
        "cat": lambda: torch.cat((x, y)),
        "sum": lambda: x.sum(),
        "softmax": lambda: x.softmax(-1),
        "mm": lambda: x @ y,
        "linear": lambda: functional.linear(x, y, ones),
        "convolution": lambda: functional.conv2d(image, kernel, padding=1),
        "batch_norm": lambda: functional.batch_norm(image, zeros, ones, ones, zeros, training=True),
        "layer_norm": lambda: functional.layer_norm(x, (8,), ones, zeros),
        "attention": lambda: functional.scaled_dot_product_attention(heads, heads, heads),
        "embedding": lambda: functional.embedding(index, table),
    }


def _autograd(device: torch.device) -> dict[str, Benchmark]:
    """An operator that is recorded, and a node of a backward pass."""
    weight = torch.ones(8, device=device, requires_grad=True)
    chain: list[Tensor] = []

    def record() -> None:
        value = weight
        for _ in range(_NODES):
            value = value * 1.0
        chain[:] = [value.sum()]

    def replay() -> None:
        chain.pop().backward()
        weight.grad = None

    return {
        "autograd.forward": Benchmark(record, _NODES),
        "autograd.backward": Benchmark(replay, _NODES, before=record),
    }


def _optimizers(device: torch.device) -> dict[str, Benchmark]:
    """Steps of optimizers over few tensors and many."""
    forms = {"adamw": {"foreach": True}, **({"fused": {"fused": True}} if device.type == "cuda" else {})}
    benchmarks = {}
    for form, options in forms.items():
        for count in (_FEW, _MANY):
            weights = [nn.Parameter(torch.ones(8, device=device)) for _ in range(count)]
            for weight in weights:
                weight.grad = torch.zeros(8, device=device)
            step = torch.optim.AdamW(weights, **options).step  # type: ignore[arg-type]
            benchmarks[f"optimizer.{form}.{count}"] = Benchmark(step)
    return benchmarks


class _Convolutions(nn.Module):
    """Residual blocks of convolutions and batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
            for _ in range(2 * _BLOCKS)
        )
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class _AttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + projected


class _Transformer(nn.Module):
    """Blocks of attention and a perceptron each, with or without activation checkpointing."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.attentions = nn.ModuleList(_AttentionBlock() for _ in range(_BLOCKS))
        self.perceptrons = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
            for _ in range(_BLOCKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for i in range(_BLOCKS):
            x = checkpoint(self._block, x, i, use_reentrant=False) if self.checkpoints else self._block(x, i)
        return x.mean(1)

    def _block(self, x: Tensor, i: int) -> Tensor:
        x = self.attentions[i](x)
        mixed: Tensor = x + self.perceptrons[i](x)
        return mixed


def _network(name: str, network: nn.Module, inputs: Tensor) -> dict[str, Benchmark]:
    """The phases of a training step, each from an idle device, and of a forward pass without autograd."""
    optimizer = torch.optim.AdamW(network.parameters(), foreach=True)
    targets = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
    losses: list[Tensor] = []

    def forward() -> None:
        losses[:] = [functional.cross_entropy(network(inputs), targets)]

    def backward() -> None:
        losses.pop().backward()

    def both() -> None:
        forward()
        backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def infer() -> None:
        with torch.no_grad():
            network(inputs)

    passes = {
        f"{name}.forward": Benchmark(forward),
        f"{name}.backward": Benchmark(backward, before=forward),
    }
    if name == "checkpoints":
        return passes
    return {
        **passes,
        f"{name}.optimizer": Benchmark(update, before=both),
        f"{name}.infer": Benchmark(infer),
    }


def _only_on_a_gpu(device: torch.device) -> dict[str, Benchmark]:
    """Launches, waits, and what autocast and a gradient scaler add."""
    x = torch.ones(8, device=device)
    network, inputs = _Transformer().to(device), torch.randn(2, 16, 32, device=device)
    losses: list[Tensor] = []

    def wait() -> None:
        x.add_(0.0)
        torch.cuda.synchronize()

    def read() -> None:
        float(x[0])

    def casting() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            losses[:] = [network(inputs).sum()]

    def backward() -> None:
        losses.pop().backward()

    scaler = torch.amp.GradScaler("cuda", init_scale=1.0)
    weights = [nn.Parameter(torch.ones(8, device=device)) for _ in range(_MANY)]
    optimizer = torch.optim.AdamW(weights, foreach=True)

    def graded() -> None:
        for parameter in weights:
            parameter.grad = torch.zeros(8, device=device)
        scaler.scale(x)

    def scaled() -> None:
        scaler.step(optimizer)
        scaler.update()

    return {
        "launch": _repeated(lambda: torch.cuda._sleep(0)),
        "wait": Benchmark(wait),
        "item": Benchmark(read),
        "autocast.forward": Benchmark(casting),
        "autocast.backward": Benchmark(backward, before=casting),
        f"scaler.{_MANY}": Benchmark(scaled, before=graded),
    }
