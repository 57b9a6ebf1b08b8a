"""Says what ZeRO 3 holds beside its shards at each block of a stage: parameters that are gathered, and
gradients on their way to their shards, as torch's FSDP2 allocates and frees them.

Forward, a block's parameters are whole twice: as they were gathered, on a stream of their own, until the next
block has its own, and at their places. Backward, those of the next block come beside the ones in use; the
gradients of a block are whole until they are copied into the buffer that is reduced, which stays until the
next block is as far. What is outside of layers belongs to the root, which is whole from the first forward to
the last backward call, or is cut into an embedding and a head of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from foretrain.graph import ITEM_BYTES, Weight
from foretrain.job import Job
from foretrain.step.frameworks import Profile
from foretrain.step.held_states import Held
from foretrain.step.partition import Block
from foretrain.step.sharding import reshards, syncs_last


@dataclass(frozen=True, slots=True)
class Whole:
    """Bytes at a moment; ``aside`` are in the memory of another stream."""

    here: float
    aside: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardBuffers:
    """The blocks of a chunk with what each is when it is whole: parameters as they are gathered, gradients as
    they are made, and as they are reduced."""

    blocks: tuple[Block, ...]
    parameters: tuple[float, ...]
    gradients: tuple[float, ...]
    reduced: tuple[float, ...]
    before: tuple[float, ...]
    """Parameters of the blocks before each that are not the root's."""
    tensors: tuple[tuple[float, ...], ...]
    """Parameters of each block, one by one."""
    root: float
    """Parameters of blocks that belong to the root."""
    reshards: float
    """Share of a layer's parameters that is let go after its forward pass."""
    splits_root: bool
    sums_up: bool
    """Gradients are summed up whole until the last micro-batch, and parameters stay gathered."""

    @classmethod
    def of(
        cls,
        job: Job,
        blocks: Sequence[Block],
        profile: Profile,
        held: Held,
        *,
        reduce: float,
        tied: bool = False,
    ) -> ShardBuffers | None:
        """None where nothing is gathered. ``reduce`` are bytes of a gradient on the network, parameters are
        gathered as they are computed with; what is ``tied`` to both ends of a model is of the root."""
        plan = job.plan
        if plan.shard != "zero3" or max(held.replicas, held.expert_replicas) == 1:
            return None

        def each(block: Block, *, trained: bool) -> list[Weight]:
            return [
                weight
                for weight in block.weights
                if weight.trainable >= trained
                and (held.expert_replicas if weight.expert else held.replicas) > 1
            ]

        lets_go = float(reshards(job, profile))
        tensors = tuple(tuple(map(_own_bytes, each(block, trained=False))) for block in blocks)
        parameters = tuple(sum(block) for block in tensors)
        splits = profile.splits_root and not tied
        apart = [
            size if block.is_layer or splits else 0.0 for block, size in zip(blocks, parameters, strict=True)
        ]
        return cls(
            blocks=tuple(blocks),
            parameters=parameters,
            tensors=tensors,
            before=tuple(itertools.accumulate(apart[:-1], initial=0.0)),
            root=sum(parameters) - sum(apart),
            gradients=tuple(sum(map(_own_bytes, each(block, trained=True))) for block in blocks),
            reduced=tuple(
                reduce * sum(weight.elements for weight in each(block, trained=True)) for block in blocks
            ),
            reshards=1.0 - 1.0 / lets_go if lets_go > 1 else lets_go,
            splits_root=splits,
            sums_up=syncs_last(job, profile) and job.accumulation > 1,
        )

    @property
    def staying(self) -> float:
        """Bytes that are whole from one pass to the next, also while other chunks of the rank run."""
        return sum(self.parameters) + sum(self.reduced) if self.sums_up else 0.0

    def forward(self, i: int) -> Whole:
        """While block ``i`` runs forward."""
        if self.sums_up:
            return Whole(sum(self.parameters), 0.0)
        own = 0.0 if self._in_root(i) else self.parameters[i]
        aside = self.root if self._in_root(i) and i == 0 else self.parameters[i] if own else 0.0
        return Whole(own + self.root + self.before[i] * (1.0 - self.reshards), aside)

    def backward(self, i: int) -> Whole:
        """While block ``i`` runs backward, without the gradients of its own parameters."""
        if self.sums_up:
            return Whole(sum(self.parameters) + sum(self.reduced), 0.0)
        own = 0.0 if self._in_root(i) else self.parameters[i]
        fetches = i > 0 and (self.blocks[i].is_layer or self._in_root(i))  # a head comes after its loss
        fetched = self.parameters[i - 1] * self.reshards if fetches and not self._in_root(i - 1) else 0.0
        sent = self.reduced[i + 1] if i + 1 < len(self.blocks) and not self._in_root(i + 1) else 0.0
        last = len(self.blocks) - 1
        waiting = self.gradients[last] if i < last and self._in_root(last) else 0.0
        return Whole(own + self.root + self.before[i] * (1.0 - self.reshards) + sent + waiting, fetched)

    def after(self, i: int) -> Whole:
        """Say what is whole when block ``i`` has run backward and its gradients are copied to be reduced."""
        if self.sums_up or (self._in_root(i) and i):
            return self.backward(i)
        if self._in_root(i):
            root = [j for j in range(len(self.blocks)) if self._in_root(j)]
            return Whole(sum(self.gradients[j] + self.reduced[j] for j in root), 0.0)
        beside = self.backward(i)
        sent = self.reduced[i + 1] if i + 1 < len(self.blocks) and not self._in_root(i + 1) else 0.0
        on_stream = beside.here - self.parameters[i] - sent + self.gradients[i] + self.reduced[i]
        return Whole(on_stream, beside.aside)

    def _in_root(self, i: int) -> bool:
        return not self.splits_root and not self.blocks[i].is_layer

    def lets_go(self, i: int) -> bool:
        """Whether a block's parameters go after its forward pass; a head's backward pass follows at once."""
        inside = self.blocks[i].is_layer or (not self._in_root(i) and i == 0)
        return inside and self.reshards > 0 and not self.sums_up

    def fetched(self, i: int) -> float:
        """Count the bytes that are gathered before block ``i`` runs forward."""
        if self._in_root(i):
            return self.root if i == 0 else 0.0
        return self.parameters[i]

    def sent(self, i: int) -> float:
        """The buffer that is reduced after block ``i`` has run backward; of the root, after its first one."""
        if not self._in_root(i):
            return self.reduced[i]
        return sum(self.reduced[j] for j in range(len(self.blocks)) if self._in_root(j)) if i == 0 else 0.0


def _own_bytes(weight: Weight) -> float:
    return float(weight.elements * ITEM_BYTES[weight.dtype])
