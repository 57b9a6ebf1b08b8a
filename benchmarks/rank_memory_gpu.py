"""Measures what one rank of a sharded or pipelined job holds on one GPU: torch's fake process group stands in
for the others.

    python benchmarks/rank_memory_gpu.py --out DIR [--seconds 100] [--only NAME ...] [--jobs jobs.jsonl]

A line of ``--jobs`` is ``{"name", "job", "held_gb", "rank"}``; models are transformers' causal ones whose
layers lie in ``model.layers``. FSDP2 shards each layer and the rest (the root); of a pipeline, stage ``rank``
runs its passes in the order of its schedule, with inputs and gradients that nobody has sent. Frameworks other
than "pytorch" have torch's fused RMS norm. Every job has a process of its own, and several run side by side
as far as the device's memory goes: nothing is timed. Writes ``DIR/rank_memory.jsonl``, a run per job; its
provenance has the peaks by phase and the largest groups of tensors at the peak by the lines of Python that
made them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ranks_gpu import sharding_options

STEPS = 4
DEVICE_GB = 128.0
"""Of the device's memory, what processes side by side may hold."""
CONTEXT_GB = 0.7
TOGETHER = 8
SHOWN_FRAMES = 5


PLAIN: dict[str, Any] = {"precision": "bf16", "framework": "pytorch"}
EXPANDABLE = {"allocator": "expandable_segments:True"}


def model(kind: str, sizes: tuple[int, int, int, int], vocabulary: int, **more: Any) -> dict[str, Any]:
    """A configuration without its number of layers; sizes: hidden, inner, heads, key and value heads."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    fields = {"model_type": kind, **dict(zip(names, sizes, strict=True)), "vocab_size": vocabulary}
    return {**fields, "max_position_embeddings": 131072, "tie_word_embeddings": False, **more}


MODELS = {
    "8b": model("llama", (4096, 14336, 32, 8), 128256),
    "1b": model("llama", (2048, 8192, 32, 8), 128256, tie_word_embeddings=True),
    "70b": model("llama", (8192, 28672, 64, 8), 128256),
    "qwen3": model("qwen3", (2560, 9728, 32, 8), 151936, head_dim=128, tie_word_embeddings=True),
    "qwen2": model("qwen2", (3584, 18944, 28, 4), 152064),
    "mistral": model("mistral", (4096, 14336, 32, 8), 32768, sliding_window=None),
    "phi3": model("phi3", (3072, 8192, 32, 32), 32064, pad_token_id=0),
}


def case(
    name: str,
    which: str,
    layers: int,
    *,
    held_gb: float,
    data: int,
    sequence: int = 4096,
    micro_batch: int = 1,
    accumulation: int = 1,
    precision: str = "amp-bf16",
    framework: str = "torchtitan",
    optimizer: str = "adamw-fused",
    rank: int = 0,
    training: dict[str, Any] | None = None,
    **plan: Any,
) -> dict[str, Any]:
    """A job on one large node, and about what its rank holds."""
    plan = {"data": data, "shard": "zero3" if data > 1 else "none", "micro_batch": micro_batch, **plan}
    config = {**MODELS[which], "num_hidden_layers": layers}
    job = {
        "model": {"source": "transformers", "task": "causal-lm", "config": config},
        "training": {
            "mode": "train",
            "global_batch": data * micro_batch * accumulation,
            "sequence": sequence,
            "precision": precision,
            "optimizer": optimizer,
            "framework": framework,
            **(training or {}),
        },
        "cluster": {
            "device": "h200-sxm-141gb",
            "devices_per_node": data * plan.get("pipeline", 1),
            "nodes": 1,
            "intra_node": {"kind": "nvswitch"},
        },
        "plan": plan,
    }
    return {"name": name, "job": job, "held_gb": held_gb, "rank": rank}


# fmt: off
CASES = (
    case("8b of 8", "8b", 8, held_gb=30, data=8),
    case("8b of 64 seq 8192 full", "8b", 32, held_gb=27, data=64, sequence=8192, recompute="full"),
    case("8b of 8 full mb2", "8b", 16, held_gb=33, data=8, micro_batch=2, recompute="full"),
    case("8b of 8 operators", "8b", 8, held_gb=27, data=8, recompute="operators"),
    case("8b of 8 kept", "8b", 8, held_gb=38, data=8, reshard=False),
    case("8b of 8 bf16 weights", "8b", 8, held_gb=25, data=8, **PLAIN),
    case("8b of 8 bf16 reduce", "8b", 8, held_gb=30, data=8, reduce_precision="bf16"),
    case("8b of 8 acc4", "8b", 8, held_gb=31, data=8, accumulation=4),
    case("8b of 8 foreach", "8b", 8, held_gb=30, data=8, optimizer="adamw"),
    case("8b of 16 hsdp2", "8b", 8, held_gb=27, data=16, replicate=2),
    case("8b of 8 expandable", "8b", 8, held_gb=30, data=8, training=EXPANDABLE),
    case("8b of 8 full acc2 expandable", "8b", 16, held_gb=29, data=8, accumulation=2, recompute="full",
         training=EXPANDABLE),
    case("8b of 8 pytorch", "8b", 8, held_gb=38, data=8, framework="pytorch"),
    case("70b of 64 full", "70b", 10, held_gb=38, data=64, recompute="full"),
    case("1b of 4", "1b", 16, held_gb=41, data=4, sequence=2048, micro_batch=4),
    case("8b pp4 st0", "8b", 16, held_gb=34, data=1, accumulation=8, pipeline=4, rank=0, **PLAIN),
    case("8b pp4 st3", "8b", 16, held_gb=29, data=1, accumulation=8, pipeline=4, rank=3, **PLAIN),
    case("8b pp4 dp8 st0", "8b", 16, held_gb=32, data=8, accumulation=8, pipeline=4, rank=0, reshard=False),
    case("8b pp4 dp8 st3", "8b", 16, held_gb=32, data=8, accumulation=8, pipeline=4, rank=3, reshard=False),
    case("8b pp2 interleaved st0", "8b", 8, held_gb=28, data=1, accumulation=4, pipeline=2,
         schedule="interleaved", virtual_stages=2, rank=0, **PLAIN),
    case("8b pp4 full st1", "8b", 16, held_gb=14, data=1, accumulation=8, pipeline=4, recompute="full",
         rank=1, **PLAIN),
    case("8b of 8 whole mb3", "8b", 32, held_gb=110, data=8, micro_batch=3),
    case("70b of 256 full seq 8192", "70b", 80, held_gb=56, data=256, sequence=8192, recompute="full"),
    case("1b of 2 long full", "1b", 16, held_gb=82, data=2, sequence=32768, recompute="full"),
    case("qwen3 of 16", "qwen3", 12, held_gb=24, data=16),
    case("qwen3 of 8 full mb4 seq 2048", "qwen3", 36, held_gb=35, data=8, micro_batch=4, sequence=2048,
         recompute="full"),
    case("qwen3 of 32 expandable acc2", "qwen3", 12, held_gb=23, data=32, accumulation=2,
         training=EXPANDABLE),
    case("mistral of 8", "mistral", 8, held_gb=29, data=8, sequence=8192),
    case("mistral of 32 full", "mistral", 32, held_gb=22, data=32, micro_batch=2, sequence=8192,
         recompute="full"),
    case("mistral of 8 operators", "mistral", 12, held_gb=21, data=8, recompute="operators"),
    case("mistral of 16 bf16 weights full", "mistral", 32, held_gb=11, data=16, recompute="full", **PLAIN),
    case("phi3 of 4", "phi3", 16, held_gb=27, data=4, sequence=2048, micro_batch=2),
    case("phi3 of 8 kept bf16 reduce", "phi3", 16, held_gb=31, data=8, reshard=False,
         reduce_precision="bf16"),
    case("phi3 of 16 hsdp4 full", "phi3", 32, held_gb=12, data=16, replicate=4, recompute="full"),
    case("phi3 of 8 foreach pytorch", "phi3", 16, held_gb=31, data=8, optimizer="adamw", framework="pytorch"),
    case("qwen2 of 64 full", "qwen2", 28, held_gb=29, data=64, micro_batch=2, recompute="full"),
    case("qwen2 of 8", "qwen2", 6, held_gb=42, data=8, micro_batch=2),
    case("mistral pp4 st0", "mistral", 16, held_gb=48, data=1, accumulation=8, micro_batch=2,
         pipeline=4, rank=0, **PLAIN),
    case("mistral pp8 dp4 st2 full", "mistral", 32, held_gb=19, data=4, accumulation=16, pipeline=8,
         rank=2, recompute="full", reshard=False),
    case("phi3 pp2 st1", "phi3", 16, held_gb=22, data=1, accumulation=4, pipeline=2, rank=1, **PLAIN),
    case("qwen2 pp4 dp8 st3", "qwen2", 16, held_gb=34, data=8, accumulation=8, pipeline=4, rank=3,
         reshard=False),
    case("mistral of 64 long full expandable", "mistral", 32, held_gb=61, data=64, sequence=65536,
         recompute="full", training=EXPANDABLE),
    case("phi3 of 32 whole mb4", "phi3", 32, held_gb=103, data=32, micro_batch=4),
)
# fmt: on


class Rank:
    """A rank of a job with its model, its optimizer and its step."""

    def __init__(self, task: Mapping[str, Any], device: str) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh

        self.torch, self.job, self.device = torch, task["job"], device
        self.plan, self.training = self.job["plan"], self.job["training"]
        self.stage = task.get("rank", 0)
        self.stages = self.plan.get("pipeline", 1)
        self.low = self.training["precision"].startswith("amp")
        copies = self.plan.get("replicate", 1)
        shards = self.plan["data"] // copies
        self.mesh = init_device_mesh(
            device, (self.stages, copies, shards), mesh_dim_names=("stages", "copies", "shards")
        )
        self.micro_batches = self.training["global_batch"] // (self.plan["data"] * self.plan["micro_batch"])
        self.shape = (self.plan["micro_batch"], self.training["sequence"])
        config = self.job["model"]["config"]
        self.tokens = torch.randint(0, config["vocab_size"], self.shape, device=device)
        self.parts = [self._part(chunk) for chunk in self._chunks()]
        for part in self.parts:
            self._prepare(part)
        parameters = [one for part in self.parts for one in part.parameters()]
        fused = self.training["optimizer"].endswith("fused")
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=fused or None)
        self.parameters = parameters

    def _chunks(self) -> list[int]:
        """Numbers of this rank's chunks of the model."""
        chunks = self.plan.get("virtual_stages", 1)
        return [self.stage + self.stages * chunk for chunk in range(chunks)]

    def _part(self, chunk: int) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch = self.torch
        with torch.device("meta"):
            config = AutoConfig.for_model(**self.job["model"]["config"], use_cache=False)
            model = AutoModelForCausalLM.from_config(config)
        if self.training["framework"] != "pytorch":
            _fuse_norms(torch, model)
        total = self.stages * self.plan.get("virtual_stages", 1)
        if total > 1:
            model = _part_class(torch)(model, chunk, total)
        return model.to(torch.float32 if self.low else torch.bfloat16)

    def _prepare(self, part: Any) -> None:
        torch = self.torch
        if self.plan.get("recompute", "none") != "none":
            from foretrain.capture.recomputing import recompute_layers
            from foretrain.plan import Plan

            recompute_layers(part, Plan(recompute=self.plan["recompute"]))
        if self.plan.get("shard") == "zero3":
            self._shard(part)
        part.to_empty(device=self.device)
        with torch.no_grad():
            for parameter in part.parameters():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                local.normal_(0.0, 0.02)
            for name, buffer in part.named_buffers():
                if name.endswith("inv_freq"):
                    buffer.copy_(torch.logspace(0, -4, buffer.shape[0], device=self.device))

    def _shard(self, part: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = self.mesh["copies", "shards"] if self.plan.get("replicate", 1) > 1 else self.mesh["shards"]
        options = sharding_options(self.plan, low=self.low)
        for layer in part.model.layers:
            fully_shard(layer, mesh=mesh, **options)
        tied = self.job["model"]["config"].get("tie_word_embeddings")
        if (
            self.training["framework"] == "torchtitan" and not tied
        ):  # its groups; others leave these to the root
            if hasattr(part.model, "embed_tokens"):
                fully_shard(part.model.embed_tokens, mesh=mesh, **options)
            if hasattr(part, "lm_head"):
                ends = [part.model.norm, part.lm_head]
                fully_shard(ends, mesh=mesh, **{**options, "reshard_after_forward": False})
        fully_shard(part, mesh=mesh, **options)

    def _order(self) -> Iterator[tuple[str, int, int]]:
        """Passes of this rank as 1F1B, interleaved or not, and GPipe run them: which, of which of its chunks,
        of which micro-batch."""
        chunks, count = len(self.parts), self.micro_batches
        ahead = self.stages - self.stage - 1
        if chunks > 1:
            ahead = 2 * ahead + (chunks - 1) * self.stages
        if self.plan.get("schedule") == "gpipe":
            ahead = count
        total = count * chunks
        ahead = min(ahead, total)

        def turn(number: int, *, back: bool) -> tuple[int, int]:
            group, inside = divmod(number, self.stages * chunks)
            chunk = inside // self.stages
            micro = group * self.stages + inside % self.stages
            return (chunks - 1 - chunk if back else chunk), (micro if chunks > 1 else number)

        for number in range(total + ahead):
            if number < total:
                yield "forward", *turn(number, back=False)
            if number >= ahead:
                yield "backward", *turn(number - ahead, back=True)

    def _loss(self, logits: Any, labels: Any) -> Any:
        from transformers.loss.loss_utils import ForCausalLMLoss

        return ForCausalLMLoss(logits, labels, logits.shape[-1])

    def forward(self) -> Any:
        return self.parts[0](input_ids=self.tokens, labels=self.tokens).loss / self.micro_batches

    def passes(self) -> None:
        if self.stages == 1:
            for _ in range(self.micro_batches):
                self.forward().backward()
            return
        torch, last = self.torch, self.stages * len(self.parts) - 1
        hidden = (*self.shape, self.job["model"]["config"]["hidden_size"])
        kept: dict[tuple[int, int], tuple[Any, Any]] = {}
        left = [self.micro_batches] * len(self.parts)
        for kind, chunk, micro in self._order():
            part, number = self.parts[chunk], self._chunks()[chunk]
            if kind == "forward":
                came = self.tokens
                if number:
                    came = torch.empty(hidden, dtype=torch.bfloat16, device=self.device, requires_grad=True)
                made = part(came)
                made = self._loss(made, self.tokens) / self.micro_batches if number == last else made
                kept[chunk, micro] = came, made
                continue
            left[chunk] -= 1
            self._accumulate(part, last=left[chunk] == 0)
            came, made = kept.pop((chunk, micro))
            gradient = None if number == last else torch.empty_like(made)
            made.backward(gradient)
            del came, made, gradient

    def _accumulate(self, part: Any, *, last: bool) -> None:
        """As torch's pipelines do with FSDP: gradients of a step are summed up whole, and sharded with the
        last of them."""
        if hasattr(part, "set_is_last_backward"):
            part.set_is_last_backward(last)
            part.set_reshard_after_backward(last)
            part.set_requires_gradient_sync(last)

    def update(self) -> None:
        if self.training["framework"] != "pytorch":
            self.torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def phases(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Of a step; forward and backward apart where there is one micro-batch."""
        kept: list[Any] = []
        if self.stages == 1 and self.micro_batches == 1:
            yield "forward", lambda: kept.append(self.forward())
            yield "backward", lambda: kept.pop().backward()
        else:
            yield "passes", self.passes
        yield "optimizer", self.update


def _part_class(torch: Any) -> Any:
    class Part(torch.nn.Module):  # type: ignore[misc]
        """A chunk of a causal model: embedding, some layers, the head."""

        def __init__(self, whole: Any, chunk: int, chunks: int) -> None:
            super().__init__()
            layers = len(whole.model.layers)
            each, rest = divmod(layers, chunks)
            sizes = [each + (one < rest) for one in range(chunks)]
            first = sum(sizes[:chunk])
            self.model = torch.nn.Module()
            self.model.layers = whole.model.layers[first : first + sizes[chunk]]
            self.model.rotary_emb = whole.model.rotary_emb
            if chunk == 0:
                self.model.embed_tokens = whole.model.embed_tokens
            if chunk == chunks - 1:
                self.model.norm, self.lm_head = whole.model.norm, whole.lm_head

        def forward(self, hidden: Any) -> Any:
            if hasattr(self.model, "embed_tokens"):
                hidden = self.model.embed_tokens(hidden)
            places = torch.arange(hidden.shape[1], device=hidden.device)[None]
            around = self.model.rotary_emb(hidden, places)
            for layer in self.model.layers:
                hidden = layer(hidden, position_embeddings=around, attention_mask=None, position_ids=places)
                hidden = hidden[0] if isinstance(hidden, tuple) else hidden
            return self.lm_head(self.model.norm(hidden)) if hasattr(self, "lm_head") else hidden

    return Part


def _fuse_norms(torch: Any, model: Any) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm") and not isinstance(child, torch.nn.RMSNorm):
                size, eps = child.weight.shape, child.variance_epsilon
                setattr(module, name, torch.nn.RMSNorm(size, eps=eps, device="meta"))


# What is held


def held(torch: Any, device: str) -> dict[str, int]:
    if device != "cuda":
        return {}
    stats = torch.cuda.memory_stats()
    return {
        "allocated": stats["allocated_bytes.all.current"],
        "peak": stats["allocated_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.current"],
        "peak_reserved": stats["reserved_bytes.all.peak"],
    }


def at_peak(torch: Any) -> list[list[Any]]:
    """The largest groups of tensors at the peak: bytes, number, and the lines of Python that made them."""
    live: dict[int, tuple[int, tuple[str, ...]]] = {}
    total = highest = 0
    best: dict[int, tuple[int, tuple[str, ...]]] = {}
    rising = False
    for event in torch.cuda.memory._snapshot()["device_traces"][0]:
        if event["action"] == "alloc":
            live[event["addr"]] = (event["size"], _lines(event.get("frames", ())))
            total += event["size"]
            rising = rising or total > highest
            highest = max(highest, total)
        elif event["action"] == "free_requested" and event["addr"] in live:
            if rising:
                best, rising = dict(live), False
            total -= live.pop(event["addr"])[0]
    if rising:
        best = live
    sizes: Counter[tuple[str, ...]] = Counter()
    counts: Counter[tuple[str, ...]] = Counter()
    for size, lines in best.values():
        sizes[lines] += size
        counts[lines] += 1
    return [[size, counts[lines], list(lines)] for lines, size in sizes.most_common(40)]


def _lines(frames: Any) -> tuple[str, ...]:
    named = [
        f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"
        for frame in frames
        if frame["filename"].endswith(".py")
    ]
    own = [one for one in named if not one.startswith(("module.py", "_contextlib.py", "graph.py", "_ops.py"))]
    return tuple(own[:SHOWN_FRAMES])


def measure(task: dict[str, Any], device: str) -> dict[str, Any]:
    """The run of a job's rank in this process, which has not used the device before."""
    settings = task["job"]["training"].get("allocator")
    if settings:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = settings
    import torch
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    on_gpu = device == "cuda"
    if on_gpu:
        if settings:
            with contextlib.suppress(AttributeError, RuntimeError, ValueError):
                torch.cuda.memory._set_allocator_settings(settings)
        torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="python")
    torch.manual_seed(0)
    plan = task["job"]["plan"]
    each = plan["data"]
    world = each * plan.get("pipeline", 1)
    distributed.init_process_group(
        "fake", rank=task.get("rank", 0) * each, world_size=world, store=FakeStore()
    )
    rank = Rank(task, device)
    built, found = held(torch, device), dict[str, Any]()
    for _ in range(STEPS):
        for name, phase in rank.phases():
            if on_gpu:
                torch.cuda.synchronize()
                before = found.get(name, {}).get("peak_reserved", 0)
                torch.cuda.reset_peak_memory_stats()
            phase()
            found[name] = held(torch, device)
            if on_gpu:
                found[name]["peak_reserved"] = max(before, found[name]["peak_reserved"])
    measured = {}
    if on_gpu:
        measured = {
            "peak_memory_bytes": max(one["peak"] for one in found.values()),
            "reserved_memory_bytes": max(one["peak_reserved"] for one in found.values()),
        }
    provenance = {
        "source": "benchmarks/rank_memory_gpu.py",
        "torch": torch.__version__,
        "rank": task.get("rank", 0),
        "built": built,
        "phases": found,
        "at_peak": at_peak(torch) if on_gpu else [],
    }
    return {"job": task["job"], "measured": measured, "provenance": provenance}


# All jobs


def _in_process(task: dict[str, Any], device: str, answer: Any) -> None:
    try:
        answer.send(measure(task, device))
    except BaseException:  # told to the parent, which goes on
        answer.send({"job": task["job"], "error": traceback.format_exc(limit=-8)})


def tiny(task: dict[str, Any]) -> dict[str, Any]:
    """The same plan with a model and a batch that a CPU runs in a second."""
    job = task["job"]
    small = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512, "num_attention_heads": 8,
             "num_key_value_heads": 4, "head_dim": 8}  # fmt: skip
    model = {**job["model"], "config": {**job["model"]["config"], **small}}
    return {**task, "job": {**job, "model": model, "training": {**job["training"], "sequence": 64}}}


def main() -> None:
    """Run the jobs, several at a time, while there is time; write each as it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--together", type=int, default=TOGETHER)
    parser.add_argument("--tiny", action="store_true", help="a tiny model in each, to try it on a CPU")
    options = parser.parse_args()
    waiting = [task for task in CASES if not options.only or task["name"] in options.only]
    if options.jobs:
        waiting = [json.loads(line) for line in options.jobs.read_text().splitlines() if line.strip()]
    if options.tiny:
        waiting = [tiny(task) for task in waiting]
    _import_all({task["job"]["model"]["config"]["model_type"] for task in waiting})
    options.out.mkdir(parents=True, exist_ok=True)
    end, room = time.monotonic() + options.seconds, DEVICE_GB
    context = multiprocessing.get_context("fork")
    running: list[tuple[dict[str, Any], Any, Any, float]] = []
    with (options.out / "rank_memory.jsonl").open("a") as lines:
        while (waiting or running) and time.monotonic() < end:
            for task in list(waiting):
                needs = task["held_gb"] + CONTEXT_GB
                if needs <= room and len(running) < options.together and end - time.monotonic() > 10:
                    here, there = context.Pipe(duplex=False)
                    process = context.Process(
                        target=_in_process, args=(task, options.device, there), daemon=True
                    )
                    process.start()
                    there.close()
                    running.append((task, process, here, time.monotonic()))
                    waiting.remove(task)
                    room -= needs
            for one in list(running):
                task, process, here, began = one
                if not here.poll(0.02) and process.is_alive():
                    continue
                try:
                    found: dict[str, Any] = here.recv() if here.poll() else {"error": "the process ended"}
                except EOFError:
                    found = {"error": "the process ended"}
                process.kill()
                process.join()
                running.remove(one)
                room += task["held_gb"] + CONTEXT_GB
                found.setdefault("provenance", {})["label"] = task["name"]
                lines.write(json.dumps(found) + "\n")
                lines.flush()
                said = found.get("error") or json.dumps(found["measured"])
                print(f"{task['name']}: {time.monotonic() - began:.1f} s, {said}", flush=True)
            if end - time.monotonic() <= 10 and not running:
                break
    for _, process, _, _ in running:
        process.kill()


def _import_all(model_types: set[str]) -> None:
    """Once, before the processes of the jobs."""
    import importlib

    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    from foretrain.capture import recomputing  # noqa: F401
    from foretrain.capture.sources.zoo import import_zoo

    import_zoo("torchvision")
    for kind in model_types:
        importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")


if __name__ == "__main__":
    main()
