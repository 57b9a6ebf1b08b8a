"""Says what a block holds of a micro-batch as a plan and a framework have it: with what is computed again,
and with the loss that is used."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from foretrain.graph import ITEM_BYTES, OpGraph
from foretrain.graph.opset import traits
from foretrain.job import Job
from foretrain.plan import Plan
from foretrain.step.frameworks import Profile
from foretrain.step.partition import Block, Piece
from foretrain.step.passes import not_kept
from foretrain.step.recomputed_modules import WITHOUT_OUTPUT, calls_of
from foretrain.workload import Loss

_FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMemory:
    """Bytes of one micro-batch in a block."""

    kept: float
    """From its forward to its backward pass."""
    forward: float
    """Most at once in its forward pass, with what it keeps by then."""
    backward: float
    """Most at once in its backward pass, with what is left of what it kept, and without gradients of
    parameters."""
    with_gradients: float
    """The same with those gradients."""


def block_memory(job: Job, graph: OpGraph, block: Block, profile: Profile) -> BlockMemory:
    """Say what a block keeps of a micro-batch, and the most that it holds in each of its passes."""
    piece = block.piece
    kept, again = (
        kept_bytes(graph, block, job.plan, profile),
        not_kept(job.plan, profile.selective_recompute, graph, block),
    )
    first = piece.forward_bytes if len(again) else 0
    memory = BlockMemory(
        kept=kept,
        forward=min(float(piece.forward_bytes), kept + piece.forward_bytes - piece.kept_bytes)
        if len(again)
        else float(piece.forward_bytes),
        backward=float(max(first, piece.backward_bytes)),
        with_gradients=float(max(first, piece.gradient_bytes)),
    )
    return _with_loss(job, graph, block, profile, memory)


def kept_bytes(graph: OpGraph, block: Block, plan: Plan, profile: Profile) -> float:
    """Count the bytes of a micro-batch that a block keeps on its device from its forward to its backward
    pass."""
    if plan.offload_activations and block.is_layer:
        return 0.0
    again = not_kept(plan, profile.selective_recompute, graph, block)
    if not len(again):
        return float(block.piece.kept_bytes)
    if plan.recompute == "full":
        return float(block.piece.handed_on_bytes)
    calls = again.tobytes()
    if plan.recompute_modules:
        alone = tuple(module for module in plan.recompute_modules if module in WITHOUT_OUTPUT)
        return float(block.piece.kept_bytes - _let_go(graph, block.piece, calls, alone))
    if plan.recompute == "operators" or profile.selective_recompute == "half":
        return float(block.piece.handed_on_bytes + _results(graph, block.piece, calls))
    return float(block.piece.kept_bytes - _let_go(graph, block.piece, calls))


@functools.lru_cache(maxsize=256)
def _results(graph: OpGraph, piece: Piece, again: bytes) -> int:
    """Count the results of calls of a checkpoint that do not run again: they are kept."""
    repeated = set(np.frombuffer(again, dtype=np.int64).tolist())
    kept = {buffer for i in piece.forward.tolist() if i not in repeated for buffer in graph.ops[i].writes}
    return sum(graph.buffers[buffer].size_bytes for buffer in kept if graph.buffers[buffer].born >= 0)


@functools.lru_cache(maxsize=256)
def _let_go(graph: OpGraph, piece: Piece, again: bytes, modules: tuple[str, ...] = ()) -> int:
    """Count the bytes that a block does not keep: of calls which run again and that only they read, less what
    has to stay for them instead; of calls of ``modules``, all that they make."""
    forward = piece.forward.tolist()
    repeated, own = set(np.frombuffer(again, dtype=np.int64).tolist()), set(forward)
    dropped = set(calls_of(graph, piece, modules).tolist())
    readers: dict[int, set[int]] = {}
    for i in forward:
        for read in graph.ops[i].reads:
            readers.setdefault(read, set()).add(i)
    gone = 0
    for number, buffer in enumerate(graph.buffers):
        if buffer.born not in own:
            continue
        if buffer.category == "activations":
            inside = readers.get(number, set()) <= repeated
            if buffer.born in dropped or (buffer.born in repeated and inside):
                gone += buffer.size_bytes
        elif buffer.born not in repeated and readers.get(number, set()) & repeated:
            gone -= buffer.size_bytes
    return max(0, gone)


# The loss over a vocabulary


def _with_loss(job: Job, graph: OpGraph, block: Block, profile: Profile, memory: BlockMemory) -> BlockMemory:
    """Put in the loss that the job names, or that is the framework's own: it holds as many copies of the
    logits as it is known to."""
    loss = job.workload.training.loss
    if block.is_layer or (loss is None and profile.loss_copies is None):
        return memory
    logits = logits_bytes(graph, block)
    if not logits:
        return memory
    if loss is None:
        assert profile.loss_copies is not None
        most = memory.kept + (profile.loss_copies - 1) * logits
        return BlockMemory(kept=memory.kept, forward=most, backward=most, with_gradients=most)
    if loss == "plain":
        return memory
    kept = memory.kept - _logits_kept(graph, block, logits // _FP32)
    own = _own_logits(graph, block, logits, loss)
    gradients = memory.with_gradients - memory.backward
    kept += own if loss == "fused" else _width_bytes(graph, block)
    most = kept + own
    return BlockMemory(kept=kept, forward=most, backward=most, with_gradients=most + gradients)


def logits_bytes(graph: OpGraph, block: Block) -> int:
    """Size of the logits in fp32, where a block ends in a product whose result becomes fp32; else 0."""
    return 0 if block.is_layer else _fp32_logits(graph, block)


@functools.lru_cache(maxsize=64)
def _fp32_logits(graph: OpGraph, block: Block) -> int:
    if (last := _last_product(graph, block)) is None:
        return 0
    size = graph.ops[last].operator.outputs[0].numel * _FP32
    born = {buffer for i in block.piece.forward.tolist() for buffer in graph.ops[i].writes}
    return size if any(graph.buffers[buffer].size_bytes == size for buffer in born) else 0


def _last_product(graph: OpGraph, block: Block) -> int | None:
    products = [
        i for i in block.piece.forward.tolist() if traits(graph.ops[i].operator.name).kind == "product"
    ]
    return products[-1] if products else None


def _logits_kept(graph: OpGraph, block: Block, elements: int) -> int:
    """Count the tensors of the size of the logits among those that the block keeps."""
    own = set(block.piece.forward.tolist())
    sizes = {elements * width for width in (2, _FP32)}
    return sum(
        buffer.size_bytes
        for buffer in graph.buffers
        if buffer.born in own and buffer.category == "activations" and buffer.size_bytes in sizes
    )


def _own_logits(graph: OpGraph, block: Block, logits: int, loss: Loss) -> float:
    """Fused, the kernel writes the gradient over the logits, which are in the precision of the product;
    chunked (Liger's fused linear cross entropy), as many chunks as the vocabulary is times the width exist
    one at a time, with their gradient in fp32."""
    product = graph.ops[_last_product(graph, block) or 0].operator
    width = ITEM_BYTES[product.outputs[0].dtype]
    if loss == "fused":
        return logits // _FP32 * width
    rows, columns = product.inputs[0].shape[0], product.outputs[0].shape[-1]
    inner = max(1, product.inputs[0].shape[-1])
    chunk = 2 ** math.ceil(math.log2(max(1, rows / math.ceil(columns / inner))))
    return float(min(rows, chunk) * columns * (width + _FP32))


def _width_bytes(graph: OpGraph, block: Block) -> int:
    """Size the gradient of what goes into the last product, which chunks make in the forward pass."""
    operand = graph.ops[_last_product(graph, block) or 0].operator.inputs[0]
    return operand.numel * ITEM_BYTES[operand.dtype]
