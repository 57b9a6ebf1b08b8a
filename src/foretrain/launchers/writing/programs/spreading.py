"""Spreads a model over processes: tensor parallelism, recomputation, compilation, FSDP2, HSDP, DDP."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from foretrain.launchers.writing.programs.models import DTYPES, Job, Task

Fill = Callable[[nn.Module], None]
"""What gives parameters their values."""


@dataclass
class Block:
    """A layer of the model that is sharded, recomputed and compiled by itself, and where it hangs."""

    parent: nn.Module
    name: str

    @property
    def module(self) -> nn.Module:
        return getattr(self.parent, self.name)  # type: ignore[no-any-return]

    @module.setter
    def module(self, module: nn.Module) -> None:
        setattr(self.parent, self.name, module)


def blocks_of(model: nn.Module) -> list[Block]:
    """Members of the outermost lists of layers: those that transformers names, or those of which a list has
    several of a kind."""
    named = set(getattr(model, "_no_split_modules", None) or ())

    def below(module: nn.Module) -> Iterator[Block]:
        children = list(module.named_children())
        kinds = Counter(type(child).__name__ for _, child in children)
        listed = isinstance(module, nn.ModuleList | nn.Sequential)
        for name, child in children:
            kind = type(child).__name__
            layer = kind in named if named else listed and kinds[kind] > 1
            if layer and any(True for _ in child.parameters()):
                yield Block(module, name)
            else:
                yield from below(child)

    return list(below(model))


def cut(model: nn.Module, job: Job, mesh: DeviceMesh) -> None:
    """Tensor parallelism: layers as the job's tensor_plan names them, or as transformers' own plan does."""
    roles: Mapping[str, str] = job.plan.get("tensor_plan") or getattr(model, "tp_plan", None) or {}
    makers: dict[str, Callable[[], ParallelStyle | None]] = {
        **dict.fromkeys(("column", "colwise"), ColwiseParallel),
        **dict.fromkeys(("row", "rowwise"), RowwiseParallel),
        **dict.fromkeys(
            ("colwise_gather_output", "colwise_rep"), lambda: ColwiseParallel(output_layouts=Replicate())
        ),
        **dict.fromkeys(("vocab", "embedding_rowwise"), lambda: RowwiseParallel(input_layouts=Replicate())),
        "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
        "replicate": lambda: None,
    }
    if not roles:
        raise SystemExit(f"plan.tensor: {type(model).__name__} has no tp_plan; give plan.tensor_plan")
    styles: dict[str, ParallelStyle] = {}
    for pattern, role in roles.items():
        if role not in makers:
            raise SystemExit(f"plan.tensor: {type(model).__name__} cuts {pattern} as {role!r}, not done here")
        for name, _ in model.named_modules():
            if fnmatch.fnmatchcase(name, pattern) and (style := makers[role]()) is not None:
                styles[name] = style
    parallelize_module(model, mesh, styles)
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # type: ignore[operator]


def recompute(blocks: list[Block], job: Job) -> None:
    kind = job.plan.get("recompute", "none")
    if kind == "none":
        return
    options: dict[str, Any] = {"context_fn": keeping_every_second_product} if kind == "operators" else {}
    for block in blocks[:: job.plan.get("recompute_every", 1)]:
        block.module = checkpoint_wrapper(block.module, **options)


def keeping_every_second_product() -> Any:
    """Keep what selective checkpointing keeps: attention and every second matrix product."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    seen: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name = str(operator)
        product = name.startswith(("aten.mm", "aten.addmm", "aten._scaled_mm"))
        seen[context.is_recompute] += product
        kept = "scaled_dot_product" in name or (product and seen[context.is_recompute] % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def shard(
    model: nn.Module, blocks: list[Block], job: Job, mesh: DeviceMesh, device: torch.device, fill: Fill
) -> None:
    """FSDP2, from the blocks up; with copies of the model (HSDP) where the mesh has two dimensions."""
    cast = DTYPES[job.precision.removeprefix("amp-")] if job.precision in _CAST else None
    reduce = job.plan.get("reduce_precision")
    policy = MixedPrecisionPolicy(
        param_dtype=cast if job.keeps_fp32 else None, reduce_dtype=DTYPES[reduce] if reduce else None
    )
    reshard, offload = job.plan.get("reshard"), OffloadPolicy()
    if job.plan.get("offload"):
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    for block in blocks:
        fully_shard(block.module, reshard_after_forward=reshard, **options)
    fully_shard(model, reshard_after_forward=reshard, **options)
    held = torch.device("cpu") if job.plan.get("offload") else device
    if any(parameter.is_meta for parameter in model.parameters()):
        model._apply(lambda one: torch.empty_like(one, device=held) if one.is_meta else one.to(device))
        with torch.no_grad():
            fill(model)


_CAST = ("amp-bf16", "amp-fp16", "bf16", "fp16", "fp8")


def into_fp8(model: nn.Module, job: Job) -> None:
    """Linear layers multiply in fp8 (torchao)."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = job.training.get("fp8", "tensorwise")
    if recipe == "tensorwise":
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=bool(job.plan.get("fp8_gather")))
    else:
        config = Float8LinearConfig.from_recipe_name(recipe.replace("-gw-hp", "_with_gw_hp"))
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "head" not in name)


def spread(task: Task, job: Job, device: torch.device, fill: Fill) -> tuple[nn.Module, int, int]:
    """The model as the plan spreads it, and which data-parallel rank this is of how many."""
    plan, world = job.plan, dist.get_world_size()
    tensor, copies = plan.get("tensor", 1), plan.get("replicate", 1)
    data = world // tensor
    if data * tensor != world or plan.get("data", data) != data or data % copies:
        needed = plan.get("data", "?")
        raise SystemExit(f"plan: data {needed} x tensor {tensor} is not the {world} processes that run")
    model = task.model
    mesh = init_device_mesh(
        device.type, (copies, data // copies, tensor), mesh_dim_names=("replicate", "shard", "tensor")
    )
    if not job.keeps_fp32:
        model.to(DTYPES[job.precision])
    if job.training.get("channels_last"):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if job.precision == "fp8":
        into_fp8(model, job)
    if tensor > 1:
        cut(model, job, mesh["tensor"])
    blocks = blocks_of(model)
    recompute(blocks, job)
    if compiled := job.training.get("compile", False):
        mode = None if compiled is True else compiled
        for module in [block.module for block in blocks] or [model]:
            module.compile(mode=mode)
    if job.sharded:
        shard(model, blocks, job, mesh["replicate", "shard"] if copies > 1 else mesh["shard"], device, fill)
    else:
        model.to(device)
        if data > 1:
            model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
            if plan.get("reduce_precision") == "bf16" and job.keeps_fp32:
                from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

                model.register_comm_hook(None, bf16_compress_hook)
    return model, dist.get_rank() // tensor, data
