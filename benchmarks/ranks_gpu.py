"""Measures one rank of FSDP2, tensor and context plans on one GPU: torch's fake process group stands in for
the others.

    python benchmarks/ranks_gpu.py --out ranks.jsonl [--seconds 240] [--only NAME ...] [--jobs jobs.jsonl]

Collectives return at once and move nothing, so that kernels, host time and the allocator are those of a rank
whose network costs nothing. Every case runs in a process of its own. A line of ``--jobs`` is a job, or a run,
with a ``"name"`` beside it; models are those of transformers. What is written are runs whose cluster has a
network of no cost; ``provenance`` has what the kernels of FSDP's own take, by where they are launched.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

WARM_UP, TIMED = 3, 6
FREE_LINK = {"kind": "nvswitch", "bandwidth": "1000000 GB/s", "latency": "0 us"}


def llama(hidden: int, inner: int, heads: int, layers: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "num_hidden_layers": layers,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **more,
    }


MODELS = {
    "1b": llama(2048, 8192, 32, 16, tie_word_embeddings=True),
    "8b": llama(4096, 14336, 32, 4),
    "70b": llama(8192, 28672, 64, 2),
    "tiny": llama(64, 128, 8, 3, vocab_size=512),
}


def case(
    model: str,
    *,
    data: int,
    sequence: int = 8192,
    micro_batch: int = 1,
    accumulation: int = 1,
    precision: str = "amp-bf16",
    framework: str = "torchtitan",
    training: dict[str, Any] | None = None,
    **plan: Any,
) -> dict[str, Any]:
    """A job of ``data`` ranks beside those of the plan, on one large node without network costs."""
    plan = {"data": data, "shard": "zero3" if data > 1 else "none", "micro_batch": micro_batch, **plan}
    world = data * plan.get("tensor", 1) * plan.get("context", 1)
    return {
        "model": {"source": "transformers", "task": "causal-lm", "config": MODELS[model]},
        "training": {
            "mode": "train",
            "global_batch": data * micro_batch * accumulation,
            "sequence": sequence,
            "precision": precision,
            "optimizer": "adamw-fused",
            "framework": framework,
            **(training or {}),
        },
        "cluster": {
            "device": "h200-sxm-141gb",
            "devices_per_node": world,
            "nodes": 1,
            **({"intra_node": FREE_LINK} if world > 1 else {}),
        },
        "plan": plan,
    }


CASES: dict[str, dict[str, Any]] = {
    "8b alone": case("8b", data=1, precision="bf16", framework="pytorch"),
    "8b of 8": case("8b", data=8),
    "8b of 64": case("8b", data=64),
    "1b alone": case("1b", data=1, precision="bf16", framework="pytorch", sequence=2048, micro_batch=2),
    "1b of 8": case("1b", data=8, sequence=2048, micro_batch=2),
    "8b of 8, kept": case("8b", data=8, reshard=False),
    "8b of 8, bf16 reduce": case("8b", data=8, reduce_precision="bf16"),
    "8b of 8, bf16 weights": case("8b", data=8, precision="bf16"),
    "8b of 8, operators": case("8b", data=8, recompute="operators"),
    "8b of 8, full": case("8b", data=8, recompute="full"),
    "8b of 8, full, 4 micro-batches": case("8b", data=8, recompute="full", accumulation=4),
    "8b of 32, 4 copies": case("8b", data=32, replicate=4, recompute="full"),
    "70b of 64, full": case("70b", data=64, recompute="full"),
    "8b of 8, foreach": case("8b", data=8, training={"optimizer": "adamw"}),
    "8b of 8, tensor 2": case("8b", data=8, tensor=2, recompute="full"),
    "8b of 8, tensor 8": case("8b", data=8, tensor=8),
    "8b of 8, context 4": case("8b", data=8, context=4, sequence=32768, recompute="full"),
    "8b of 8, expandable": case(
        "8b", data=8, recompute="full", training={"allocator": "expandable_segments:True"}
    ),
    "8b of 8, compiled": case("8b", data=8, recompute="operators", training={"compile": True}),
}


# One rank


def run_rank(job: dict[str, Any], device: str) -> dict[str, Any]:
    """The run of a job's first rank in this process, which has not used the device before."""
    allocator = job["training"].get("allocator")
    if allocator:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = allocator
    import torch
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if allocator and device == "cuda":
        with contextlib.suppress(AttributeError, RuntimeError, ValueError):
            torch.cuda.memory._set_allocator_settings(allocator)
    torch.manual_seed(0)
    plan = job["plan"]
    world = plan["data"] * plan.get("tensor", 1) * plan.get("context", 1)
    distributed.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    rank = Rank(job, device)
    built = rank.held()
    for _ in range(WARM_UP):
        rank.step()
    rank.wait()
    times, issued = [], []
    for _ in range(TIMED):
        began = time.perf_counter()
        rank.step()
        issued.append(time.perf_counter() - began)
        rank.wait()
        times.append(time.perf_counter() - began)
    together = time.perf_counter()
    for _ in range(TIMED):
        rank.step()
    rank.wait()
    together = (time.perf_counter() - together) / TIMED
    phases = rank.phases()
    measured = {"step_time_s": statistics.median(times), "host_issue_s": statistics.median(issued)}
    if device == "cuda":
        measured |= {
            "peak_memory_bytes": max(phase["peak"] for phase in phases.values()),
            "reserved_memory_bytes": rank.held()["peak_reserved"],
        }
    provenance = {
        "source": "benchmarks/ranks_gpu.py",
        "torch": torch.__version__,
        "step_time_min_s": min(times),
        "step_time_max_s": max(times),
        "step_time_in_a_row_s": together,
        "built": built,
        "phases": phases,
    }
    if device == "cuda":
        profiled = profile(rank)
        measured |= {name: profiled.pop(name) for name in ("device_busy_s", "kernels")}
        provenance |= profiled
    return {"job": job, "measured": measured, "provenance": provenance}


def sharding_options(plan: Mapping[str, Any], *, low: bool) -> dict[str, Any]:
    """How FSDP2 shards by a plan, where it computes in bf16 with weights in fp32 (``low``) or as they are."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    reduce = {"fp32": torch.float32, "bf16": torch.bfloat16, None: torch.float32 if low else None}
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if low else None, reduce_dtype=reduce[plan.get("reduce_precision")]
    )
    reshard = plan.get("reshard")
    return {"mp_policy": policy} | ({} if reshard is None else {"reshard_after_forward": reshard})


class Rank:
    """A model of transformers as the plan spreads it, and its training step."""

    def __init__(self, job: dict[str, Any], device: str) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from transformers import AutoConfig, AutoModelForCausalLM

        self.torch, self.job, self.device = torch, job, device
        self.plan, self.training = job["plan"], job["training"]
        self.low = self.training["precision"] == "amp-bf16"
        sharded = self.plan.get("shard", "none") == "zero3"
        with torch.device("meta"):
            config = AutoConfig.for_model(**job["model"]["config"], use_cache=False)
            self.model = AutoModelForCausalLM.from_config(config)
        copies = self.plan.get("replicate", 1)
        tensor, context = self.plan.get("tensor", 1), self.plan.get("context", 1)
        shards = self.plan["data"] * context // copies
        self.mesh = init_device_mesh(
            device, (copies, shards, tensor), mesh_dim_names=("copies", "shards", "tensor")
        )
        self.context = None
        if context > 1:
            self.context = init_device_mesh(
                device, (self.plan["data"], context, tensor), mesh_dim_names=("data", "context", "tensor")
            )["context"]
        self.model.to(torch.float32 if self.low and sharded else torch.bfloat16)
        if tensor > 1:
            self._cut()
        self._recompute()
        if self.training.get("compile"):
            for layer in self.model.model.layers:
                layer.compile()
        if sharded:
            self._shard(copies)
        self.model.to_empty(device=device)
        with torch.no_grad():
            for parameter in self.model.parameters():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                local.normal_(0.0, 0.02)
        rotary = self.model.model.rotary_emb
        if hasattr(rotary, "inv_freq"):
            half = rotary.inv_freq.shape[0]
            rotary.inv_freq.copy_(torch.logspace(0, -4, half, device=device))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-6, fused=self.training["optimizer"] == "adamw-fused" or None
        )
        self.micro_batches = self.training["global_batch"] // (self.plan["data"] * self.plan["micro_batch"])
        shape = (self.plan["micro_batch"], self.training["sequence"])
        self.tokens = torch.randint(0, job["model"]["config"]["vocab_size"], shape, device=device)

    def _shard(self, copies: int) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = self.mesh["copies", "shards"] if copies > 1 else self.mesh["shards"]
        options = sharding_options(self.plan, low=self.low)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(self.model, mesh=mesh, **options)

    def _cut(self) -> None:
        from torch.distributed.tensor import DTensor, Replicate, distribute_module
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            ParallelStyle,
            RowwiseParallel,
            parallelize_module,
        )

        mesh, attention, mlp = self.mesh["tensor"], "self_attn", "mlp"
        columns = [f"{attention}.{one}_proj" for one in "qkv"] + [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
        plan |= {f"{attention}.o_proj": RowwiseParallel(), f"{mlp}.down_proj": RowwiseParallel()}

        def replicated(_: Any, inputs: Any, mesh: Any) -> tuple[DTensor]:
            return (DTensor.from_local(inputs[0], mesh, [Replicate()]),)

        def whole(norm: Any) -> None:
            distribute_module(
                norm,
                mesh,
                input_fn=replicated,  # type: ignore[arg-type]  # what it returns becomes the inputs
                output_fn=lambda _, output, __: output.to_local(),
            )

        for layer in self.model.model.layers:
            parallelize_module(layer, mesh, plan)
            whole(layer.input_layernorm)
            whole(layer.post_attention_layernorm)
        whole(self.model.model.norm)
        outer = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(self.model, mesh, outer)

    def _recompute(self) -> None:
        if self.plan.get("recompute", "none") == "none":
            return
        from foretrain.capture.recomputing import recompute_layers
        from foretrain.plan import Plan

        recompute_layers(self.model, Plan(recompute=self.plan["recompute"]))

    @contextlib.contextmanager
    def _attending(self) -> Iterator[None]:
        if self.context is None:
            yield
            return
        from torch.distributed.tensor.experimental import context_parallel
        from torch.nn.attention import SDPBackend, sdpa_kernel

        cut = context_parallel(self.context, buffers=[self.tokens], buffer_seq_dims=[1])
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]), cut:
            yield

    def forward(self) -> Any:
        return self.model(input_ids=self.tokens, labels=self.tokens).loss

    def update(self) -> None:
        torch = self.torch
        if self.training["framework"] != "pytorch":
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        with self._attending():
            for _ in range(self.micro_batches):
                (self.forward() / self.micro_batches).backward()
        self.update()

    def wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def phases(self) -> dict[str, Any]:
        """Of a step with a micro-batch, phase by phase from a standstill: time, issue and memory."""
        kept: list[Any] = []
        steps: dict[str, Callable[[], Any]] = {
            "forward": lambda: kept.append(self.forward()),
            "backward": lambda: kept.pop().backward(),
            "optimizer": self.update,
        }
        found: dict[str, Any] = {}
        with self._attending():
            for name, phase in steps.items():
                if self.device == "cuda":
                    self.torch.cuda.reset_peak_memory_stats()
                began = time.perf_counter()
                phase()
                issued = time.perf_counter() - began
                self.wait()
                took = time.perf_counter() - began
                found[name] = {"time_s": took, "issue_s": issued, **self.held()}
        return found

    def held(self) -> dict[str, int]:
        if self.device != "cuda":
            return {}
        stats = self.torch.cuda.memory_stats()
        return {
            "allocated": stats["allocated_bytes.all.current"],
            "peak": stats["allocated_bytes.all.peak"],
            "reserved": stats["reserved_bytes.all.current"],
            "peak_reserved": stats["reserved_bytes.all.peak"],
        }


# Kernels by where they are launched


def profile(rank: Rank) -> dict[str, Any]:
    """Kernels of a step: how many, how long, by name, and those that are launched inside of FSDP's ranges."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as traced:
        rank.step()
        rank.wait()
    by_name: dict[str, list[float]] = {}
    by_range: dict[str, list[float]] = {}
    launched: Counter[str] = Counter()
    busy: list[tuple[float, float]] = []
    for event in traced.events():
        if str(event.device_type).endswith("CUDA"):
            if event.name.startswith(("FSDP::", "Optimizer.", "nccl:")) or "Context Sync" in event.name:
                continue
            one = by_name.setdefault(event.name[:120], [0, 0.0])
            one[0], one[1] = one[0] + 1, one[1] + event.time_range.elapsed_us() * 1e-6
            busy.append((event.time_range.start, event.time_range.end))
        elif event.name.startswith(("FSDP::", "Optimizer.")):
            name = event.name.split(" ")[0]
            one = by_range.setdefault(name, [0, 0.0, 0.0])
            one[0] += 1
            one[1] += event.cpu_time_total * 1e-6
            for kernel, seconds in _kernels(event):
                one[2] += seconds
                launched[f"{name} {kernel[:60]}"] += 1
    together, end = 0.0, 0.0
    for start, stop in sorted(busy):
        together += max(0.0, stop - max(start, end))
        end = max(end, stop)
    longest = sorted(by_name.items(), key=lambda item: -item[1][1])
    return {
        "device_busy_s": together * 1e-6,
        "kernels": sum(int(count) for count, _ in by_name.values()),
        "kernels_by_name": dict(longest[:48]),
        "ranges": {
            name: {"calls": calls, "host_s": host_s, "device_s": device_s}
            for name, (calls, host_s, device_s) in by_range.items()
        },
        "launched_in_ranges": dict(launched),
    }


def _kernels(event: Any) -> Iterator[tuple[str, float]]:
    for kernel in event.kernels:
        yield kernel.name, kernel.duration * 1e-6
    for child in event.cpu_children:
        yield from _kernels(child)


# All cases


def _in_process(job: dict[str, Any], device: str, answer: Any) -> None:
    try:
        answer.send(run_rank(job, device))
    except BaseException:
        answer.send({"error": traceback.format_exc(limit=-6)})


def run_case(job: dict[str, Any], device: str, limit_s: float) -> dict[str, Any]:
    """The run, or what went wrong, from a process of its own."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_in_process, args=(job, device, there), daemon=True)
    process.start()
    there.close()
    try:
        found = here.recv() if here.poll(limit_s) else {"error": f"not done in {limit_s:.0f} s"}
    except EOFError:
        found = {"error": "the process ended"}
    process.kill()
    process.join()
    return dict(found)


def tiny(job: dict[str, Any]) -> dict[str, Any]:
    """The same plan with a model and a batch that a CPU runs in a second."""
    work = {**job["model"], "config": MODELS["tiny"]}
    return {**job, "model": work, "training": {**job["training"], "sequence": 64}}


def main() -> None:
    """Run the cases one after the other while there is time, and write each as it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--jobs", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model in each, to try it on a CPU")
    options = parser.parse_args()
    cases = CASES
    if options.jobs:
        lines = [json.loads(line) for line in options.jobs.read_text().splitlines() if line.strip()]
        cases = {line.get("name", f"line {i}"): line.get("job", line) for i, line in enumerate(lines, 1)}
    from foretrain.capture.sources.zoo import import_zoo

    import_zoo("torchvision")  # all of it once, before the processes of the cases
    from torch.distributed.fsdp import fully_shard  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    end = time.monotonic() + options.seconds
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as lines_out:
        for name, job in cases.items():
            left = end - time.monotonic()
            if left < 5 or (options.only and name not in options.only):
                continue
            began = time.monotonic()
            found = run_case(tiny(job) if options.tiny else job, options.device, min(left, 90.0))
            found.setdefault("provenance", {})["label"] = name
            lines_out.write(json.dumps(found) + "\n")
            lines_out.flush()
            said = found.get("error") or json.dumps(found["measured"])
            print(f"{name}: {time.monotonic() - began:.1f} s, {said}", flush=True)


if __name__ == "__main__":
    main()
