"""Applies a plan to the graph of a rank: blocks of the model in order, and stages of them."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretrain.errors import InputError
from foretrain.graph import ITEM_BYTES, PHASES, Buffer, OpGraph, Weight
from foretrain.graph.opset import is_product
from foretrain.job import Job
from foretrain.placing import stage_groups
from foretrain.step.dealing import Dealt, deal, fill, virtual_stages
from foretrain.step.frameworks import Profile
from foretrain.step.schedules import check, model_copies, place

Index = npt.NDArray[np.int64]

_NANOTRON_ENDS = 5
"""Blocks of its pipeline beside layers: embedding, norm, head, cast to fp32 and loss."""
_DEPTH = 2


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Piece:
    """A stretch of the graph: its calls forward and backward, and the memory that goes with one micro-batch
    of it."""

    forward: Index
    backward: Index
    kept_bytes: int
    """Kept from the forward pass for the backward pass; in inference to the end, as keys and values are."""
    forward_bytes: int
    """Most that it holds at once in its forward pass, with what it keeps by then."""
    backward_bytes: int
    """The same of its backward pass, with what is left of what it kept, and without gradients of
    parameters."""
    gradient_bytes: int
    """The same with the gradients of its parameters as far as they are made."""
    handed_on_bytes: int
    """What the next piece reads of its results."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Block:
    """A piece at its place in the model, with the parameters that lie there. Blocks alike share a piece."""

    piece: Piece
    weights: tuple[Weight, ...]
    is_layer: bool
    name: str = ""
    """The path of the layer; empty outside of layers."""
    number: int | None = None
    """Its place among the layers of the model."""

    @functools.cached_property
    def experts(self) -> int:
        """Parameters of the experts that this rank holds."""
        return sum(weight.elements for weight in self.weights if weight.expert)

    @functools.cached_property
    def trained(self) -> int:
        """Parameters that have gradients."""
        return sum(weight.elements for weight in self.weights if weight.trainable)

    @functools.cached_property
    def trained_experts(self) -> int:
        """Count the trained elements in experts."""
        return sum(weight.elements for weight in self.weights if weight.trainable and weight.expert)

    @functools.cached_property
    def weight_bytes(self) -> int:
        return sum(weight.elements * ITEM_BYTES[weight.dtype] for weight in self.weights)


Chunk = tuple[Block, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Stage:
    """Says what one rank of the pipeline runs: one chunk of blocks, or several that are interleaved."""

    index: int
    chunks: tuple[Chunk, ...]
    copies: int = 1
    """Of the model in the pipeline; each runs its part of the micro-batches."""
    group: int = 0
    """Which of the cluster's distinct groups its ranks are of."""

    @functools.cached_property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(block for chunk in self.chunks for block in chunk)

    @functools.cached_property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(weight for block in self.blocks for weight in block.weights)

    @functools.cached_property
    def calls(self) -> Index:
        """List all calls of a micro-batch."""
        pieces = (block.piece for block in self.blocks)
        none = np.zeros(0, dtype=np.int64)
        return np.concatenate([none, *(part for piece in pieces for part in (piece.forward, piece.backward))])


# Blocks


@functools.lru_cache(maxsize=256)
def blocks(graph: OpGraph) -> tuple[Block, ...]:
    """The blocks of the whole model in forward order; layers that were not traced use the piece of their
    equal."""
    keys = _forward_order(graph)
    pieces = _pieces(graph, keys)
    stack = graph.stack
    if stack is None:
        placed = _place_by_name(graph.weights, keys)
        layers = [key for key in keys if key]
        return tuple(
            Block(
                piece=piece,
                weights=tuple(placed[key]),
                is_layer=bool(key),
                name=key,
                number=layers.index(key) if key else None,
            )
            for key, piece in zip(keys, pieces, strict=True)
        )
    by_layer: dict[int | None, list[Weight]] = {}
    for weight in graph.weights:
        by_layer.setdefault(stack.layer_of(weight.name), []).append(weight)
    before, after = _around_stack(by_layer.get(None, []), graph, stack.path)
    stacked = [
        Block(
            piece=pieces[1 + equal],
            weights=tuple(by_layer.get(layer, ())),
            is_layer=True,
            name=f"{stack.path}.{layer}",
            number=layer,
        )
        for layer, equal in enumerate(stack.stands_for)
    ]
    first = Block(piece=pieces[0], weights=tuple(before), is_layer=False)
    last = Block(piece=pieces[-1], weights=tuple(after), is_layer=False)
    return (first, *stacked, last)


def _forward_order(graph: OpGraph) -> tuple[str, ...]:
    """Names of the pieces in the order in which the forward pass comes to them."""
    if graph.stack is not None:
        return ("before", *(f"{graph.stack.path}.{layer}" for layer in range(graph.stack.traced)), "after")
    forward = (op.layer for op in graph.ops if op.phase == "forward")
    return tuple(dict.fromkeys(_shortened(layer) for layer in forward)) or ("",)


def _shortened(path: str) -> str:
    """The module that a piece is made of: the first one of a list, or, above all lists, one of ``_DEPTH``."""
    names = path.split(".")
    first = next((i for i, name in enumerate(names) if name.isdigit()), 0)
    return ".".join(names[: max(_DEPTH, first + 1)])


def _pieces(graph: OpGraph, keys: Sequence[str]) -> list[Piece]:
    """Put each op into the piece that its layer belongs to; ops between layers into the piece that the stream
    is in."""
    number = _numbers(graph, keys)
    phase = graph.phase_index
    forward, backward = phase == PHASES.index("forward"), phase == PHASES.index("backward")
    sizes = _bytes(graph, number, len(keys))
    return [
        Piece(
            forward=np.flatnonzero(forward & (number == i)),
            backward=np.flatnonzero(backward & (number == i)),
            **{name: column[i] for name, column in sizes.items()},
        )
        for i in range(len(keys))
    ]


def _numbers(graph: OpGraph, keys: Sequence[str]) -> Index:
    position = {key: i for i, key in enumerate(keys)}
    number = np.empty(len(graph.ops), dtype=np.int64)
    current, phase = 0, "forward"
    last = _last_positions(graph, position) if graph.stack is not None else {}
    for i, op in enumerate(graph.ops):
        if op.phase != phase:
            phase, current = op.phase, len(keys) - 1
        own = _own(graph, op.layer, position)
        if own is not None:
            current = own
        elif graph.stack is not None and i > last.get(phase, i):  # past the last layer of this pass
            current = len(keys) - 1 if phase == "forward" else 0
        number[i] = current
    return number


def _own(graph: OpGraph, layer: str, position: Mapping[str, int]) -> int | None:
    if graph.stack is None:
        return position.get(_shortened(layer)) if layer else None
    layer_number = graph.stack.layer_of(layer)
    return None if layer_number is None else 1 + layer_number


def _last_positions(graph: OpGraph, position: Mapping[str, int]) -> dict[str, int]:
    last: dict[str, int] = {}
    for i, op in enumerate(graph.ops):
        if _own(graph, op.layer, position) is not None:
            last[op.phase] = i
    return last


def _bytes(graph: OpGraph, number: Index, count: int) -> dict[str, list[int]]:
    """Per piece: what it keeps of a micro-batch, what it holds at most forward and backward, and what the
    next piece reads."""
    ends = len(graph.ops)
    forward, backward = (graph.phase_index == PHASES.index(phase) for phase in ("forward", "backward"))
    begins = int(forward.sum())
    spare = _saved_in_shards(graph)
    own = np.zeros((count, ends + 1))
    made = np.zeros((count, ends + 1))
    others = np.zeros(ends + 1)
    kept = [0] * count
    for which, buffer in enumerate(graph.buffers):
        if buffer.born < 0:
            continue
        piece, size = int(number[buffer.born]), buffer.size_bytes - spare.get(which, 0)
        curve = others
        if buffer.category == "gradients" and graph.phase_index[buffer.born] == PHASES.index("backward"):
            curve = made[piece]
        elif _is_kept(graph, buffer, number, begins):
            kept[piece] += size
            curve = own[piece]
        curve[buffer.born] += size
        curve[min(buffer.dies + 1, ends)] -= size
    own, made = np.cumsum(own, axis=1)[:, :-1], np.cumsum(made, axis=1)[:, :-1]
    live = np.cumsum(others)[:-1] + own
    read_by = _first_readers(graph, number, forward)
    handed_on = [0] * count
    for i, op in enumerate(graph.ops[:begins]):
        for written in op.writes:
            if number[i] + 1 in read_by.get(written, ()):
                handed_on[number[i]] += graph.buffers[written].size_bytes
    places = [(number == i) for i in range(count)]
    return {
        "kept_bytes": kept,
        "forward_bytes": [int(live[i][place & forward].max(initial=0)) for i, place in enumerate(places)],
        "backward_bytes": [int(live[i][place & backward].max(initial=0)) for i, place in enumerate(places)],
        "gradient_bytes": [
            int((live[i] + made[i])[place & backward].max(initial=0)) for i, place in enumerate(places)
        ],
        "handed_on_bytes": handed_on,
    }


def _saved_in_shards(graph: OpGraph) -> dict[int, int]:
    """Bytes that layers of Transformer Engine do not keep of what tensor parallelism gathers for them: they
    save a rank's own part, in fp8, and gather it again in the backward pass."""
    forward = [op for op in graph.ops if op.phase == "forward"]
    if not any(op.operator.name.startswith("te.") for op in forward):
        return {}
    readers = Counter(buffer for op in graph.ops for buffer in op.reads)
    gathered: dict[int, tuple[int, Sequence[int]]] = {}  # by buffer: of how many parts, and the rank's own
    spare: dict[int, int] = {}
    for op in forward:
        if op.operator.name == "all_gather" and op.operator.overload == "tensor":
            parts = max(1, op.operator.outputs[0].numel // max(1, op.operator.inputs[0].numel))
            gathered.update(dict.fromkeys(op.writes, (parts, op.reads)))
            cast = [one for one in op.writes if graph.buffers[one].size_bytes <= op.operator.outputs[0].numel]
            spare.update({one: graph.buffers[one].size_bytes * (parts - 1) // parts for one in cast})
        elif op.operator.name.startswith("te."):
            for parts, sent in (gathered[one] for one in op.reads if one in gathered):
                spare.update({one: graph.buffers[one].size_bytes * (parts - 1) // parts for one in op.writes})
                spare.update({one: graph.buffers[one].size_bytes for one in sent if readers[one] == 1})
    return spare


def _is_kept(graph: OpGraph, buffer: Buffer, number: Index, backward_begins: int) -> bool:
    if buffer.category == "activations":
        return buffer.born < backward_begins
    last = len(graph.ops) - 1
    return backward_begins > last and buffer.dies >= last and bool(number[buffer.born] < number[last])


def _first_readers(graph: OpGraph, number: Index, forward: npt.NDArray[np.bool_]) -> dict[int, set[int]]:
    readers: dict[int, set[int]] = {}
    for i in np.flatnonzero(forward):
        for buffer in graph.ops[i].reads:
            readers.setdefault(buffer, set()).add(int(number[i]))
    return readers


def _place_by_name(weights: Iterable[Weight], keys: Sequence[str]) -> dict[str, list[Weight]]:
    placed: dict[str, list[Weight]] = {key: [] for key in keys}
    current = keys[0]
    for weight in weights:
        module = weight.name.rpartition(".")[0]
        current = _shortened(module) if _shortened(module) in placed else current
        placed[current].append(weight)
    return placed


def _around_stack(weights: Iterable[Weight], graph: OpGraph, path: str) -> tuple[list[Weight], list[Weight]]:
    """Parameters outside the stack: before it where their module runs before it, else after it."""
    assert graph.stack is not None
    early: set[str] = set()
    for op in graph.ops:
        if graph.stack.layer_of(op.layer) is not None:
            break
        early.add(op.layer)
    before: list[Weight] = []
    after: list[Weight] = []
    for weight in weights:
        (before if weight.name.rpartition(".")[0] in early else after).append(weight)
    return before, after


# Stages


def stages(job: Job, graph: OpGraph, habits: Profile) -> tuple[Stage, ...]:
    """The blocks dealt out to the ranks of the pipeline, as the plan says or as its framework does."""
    if job.plan.pipeline == 1:
        return (Stage(index=0, chunks=(blocks(graph),)),)
    check(job.plan, job.accumulation, trains=job.trains)
    return stages_of(job, graph, _deal(job, graph, habits).counts)


def stages_of(job: Job, graph: OpGraph, counts: Sequence[int]) -> tuple[Stage, ...]:
    """The stages of a pipeline whose chunks have so many layers, in the order of the model."""
    plan, parts = job.plan, _split(blocks(graph), counts)
    chunks = len(parts) * model_copies(plan) // plan.pipeline

    def chunk_at(stage: int, chunk: int) -> Chunk:
        return parts[place(plan.schedule, stage, chunk, plan.pipeline).number]

    return tuple(
        Stage(
            index=i,
            chunks=tuple(chunk_at(i, chunk) for chunk in range(chunks)),
            copies=model_copies(plan),
            group=group,
        )
        for i, group in enumerate(stage_groups(job.cluster, plan))
    )


def dealing_words(job: Job, graph: OpGraph, habits: Profile) -> str:
    """Say what was assumed of the layers of each chunk; empty where nothing was."""
    return _deal(job, graph, habits).because if job.plan.pipeline > 1 else ""


def _deal(job: Job, graph: OpGraph, habits: Profile) -> Dealt:
    plan, layers = job.plan, sum(block.is_layer for block in blocks(graph))
    if plan.stages is None and habits.balances_by == "work" and plan.schedule in ("gpipe", "1f1b"):
        return _by_work(graph, plan.pipeline)
    chunks = virtual_stages(plan, layers, habits.chunks)
    return deal(
        plan,
        layers,
        plan.pipeline * chunks // model_copies(plan),
        counts_ends=habits.balances_by == "ends",
        further=job.workload.training.mtp_layers,
    )


def _by_work(graph: OpGraph, parts: int) -> Dealt:
    """Deal blocks out as nanotron does, by the work of their products; stages at the end may stay empty."""
    everything = blocks(graph)
    layers = [block for block in everything if block.is_layer]
    if parts > len(layers) + _NANOTRON_ENDS:
        raise InputError(
            f"plan.pipeline: {parts} stages are more than the {len(layers)} layers of the model with "
            "embedding, norm, head, cast and loss"
        )
    flops = np.where(_products(graph), graph.column("flops"), 0.0)
    placed = fill([float(flops[block.piece.forward].sum()) for block in (*layers, everything[-1])], parts)
    return Dealt(counts=tuple(np.bincount(placed[: len(layers)], minlength=parts).tolist()))


def _products(graph: OpGraph) -> npt.NDArray[np.bool_]:
    return np.array([is_product(operator.name) for operator in graph.operators])[graph.operator_index]


def _split(everything: Sequence[Block], counts: Sequence[int]) -> list[Chunk]:
    """Consecutive blocks in chunks of so many layers; what comes before the layers goes to the first, what
    follows to the last, and what lies between them stays with the layer before it."""
    layers = [i for i, block in enumerate(everything) if block.is_layer]
    ends = np.cumsum(counts).tolist()
    starts = [0, *(layers[end] if end < len(layers) else layers[-1] + 1 for end in ends[:-1])]
    return [tuple(everything[start:end]) for start, end in itertools.pairwise([*starts, len(everything)])]


def layers_of_chunks(dealt: Sequence[Stage], schedule: str) -> tuple[int, ...]:
    """Count the layers of each chunk of a pipeline, in the order of the model."""
    layers_of = {
        place(schedule, stage.index, i, len(dealt)).number: sum(block.is_layer for block in chunk)
        for stage in dealt
        for i, chunk in enumerate(stage.chunks)
    }
    return tuple(layers_of[number] for number in sorted(layers_of))


def handed_on_bytes(chunk: Chunk, stages: Sequence[Stage]) -> int:
    """Count the bytes that a chunk hands on; of one without blocks, those that layers do."""
    if chunk:
        return chunk[-1].piece.handed_on_bytes
    layers = (block.piece for stage in stages for block in stage.blocks if block.is_layer)
    return max((piece.handed_on_bytes for piece in layers), default=0)
