"""Tensor and sequence parallelism: the layers of a model narrowed to one rank's part, with the collectives
between them.

Column layers give part of their outputs, row layers sum over the group (Shoeybi et al. 2019). With sequence
parallelism, what lies between holds its part of the sequence (Korthikanti et al. 2022): gathered before
column layers, reduce-scattered after row layers. The vocabulary is cut over the group, and the loss is taken
without gathering logits; inference, which has no loss, gathers them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from foretrain.capture.parallel.collectives import (
    all_gather,
    copy_to,
    gather,
    reduce_from,
    scatter,
    take_slice,
    vocabulary_cross_entropy,
)
from foretrain.capture.parallel.experts import expert_modules, takes_routes
from foretrain.capture.parallel.narrowing import Narrowing
from foretrain.capture.parallel.stacks import block_lists
from foretrain.capture.parallel.tensor_plan import is_linear, layer_roles, seen_layers
from foretrain.capture.parallel.whole_sizes import WholeSizes, cut, head_counts, uncut
from foretrain.capture.parallel.wrapping import Shared, after, at_exit, before, keeping_parts
from foretrain.errors import CaptureError, ForetrainError, InputError, UnsupportedJob
from foretrain.job import Job

KEEPS_PARTS = ("megatron", "nanotron")
"""Frameworks that keep a rank's part of what sequence parallelism gathers, and gather it again for the
weights' gradients."""


class TensorParallel:
    """The tensor-parallel form of a module, which is changed in place. A degree of 1 leaves it as it is."""

    def __init__(
        self,
        module: nn.Module,
        degree: int,
        *,
        by_sequence: bool,
        keeps_parts: bool = False,
        whole_experts: bool = False,
        given: Mapping[str, str] | None = None,
        keeps_sizes: bool = False,
        whole_logits: bool = False,
    ) -> None:
        self._module, self._degree = module, degree
        self._whole_logits = whole_logits
        self._keeps_sizes = keeps_sizes
        self.notes: list[str] = []
        """What a forecast should say of how it was cut."""
        self._heads = head_counts(module) if keeps_sizes else set()
        self._by_sequence = by_sequence and degree > 1
        self._keeps_parts = keeps_parts
        self._vocabulary: set[int] = set()
        self._regions: list[nn.Module] = []
        self._embeds_parts = False
        if degree > 1:
            roles = layer_roles(module, given)
            self._check_cover(roles)
            if "vocab" not in roles.values() and any(isinstance(m, nn.Embedding) for m in module.modules()):
                self.notes.append(
                    "plan.tensor: the embedding and the layer of the logits are whole on every rank; "
                    'plan.tensor_plan can cut them as "vocab"'
                )
            self._split({path: role for path, role in roles.items() if role != "replicate"}, whole_experts)

    @classmethod
    def of(
        cls, job: Job, module: nn.Module, *, whole_experts: bool = False, keeps_sizes: bool = False
    ) -> TensorParallel:
        """As the job's plan has it; with ``whole_experts``, but for experts; with ``keeps_sizes``, for code
        that is written for whole layers."""
        plan = job.plan
        return cls(
            module,
            plan.tensor,
            by_sequence=plan.sequence_parallel,
            keeps_parts=job.workload.training.framework in KEEPS_PARTS,
            whole_experts=whole_experts,
            given=plan.tensor_plan,
            keeps_sizes=keeps_sizes,
            whole_logits=not job.trains,
        )

    def explain(self, error: CaptureError) -> ForetrainError:
        """Why a model that was cut does not run."""
        if self._degree == 1:
            return error
        return UnsupportedJob(
            f"plan.tensor: {type(self._module).__name__} does "
            f"not run when cut by the layers known for it ({error});"
            " say in plan.tensor_plan how its layers are cut, by column, row, vocab or replicate"
        )

    # Cutting

    def _check_cover(self, roles: Mapping[str, str]) -> None:
        """Refuse to leave a good part of the blocks' work on every rank because its layers have unknown
        names."""
        for path, child in self._module.named_modules():
            if isinstance(child, nn.MultiheadAttention) and roles.get(f"{path}.out_proj") == "row":
                raise UnsupportedJob(
                    f"plan.tensor: {seen_layers([path])} is torch's nn.MultiheadAttention, which is not cut; "
                    "write it with linear layers of its own, or leave it whole by plan.tensor_plan = "
                    f'{{"*.{path.rpartition(".")[2]}.out_proj" = "replicate"}}'
                )
        blocks = tuple(f"{path}." for path in block_lists(self._module))
        sizes = {
            path: child.weight.numel()
            for path, child in self._module.named_modules()
            if is_linear(child) and path.startswith(blocks)
        }
        unknown = [path for path in sizes if path not in roles]
        if (
            "column" not in roles.values()
            or "row" not in roles.values()
            or 4 * sum(sizes[path] for path in unknown) > sum(sizes.values())
        ):
            listed = seen_layers(unknown or sizes)
            raise UnsupportedJob(
                f"plan.tensor: it is not known how to cut {listed} of {type(self._module).__name__};"
                " say it in plan.tensor_plan, by column, row, vocab or replicate"
            )

    def _split(self, roles: Mapping[str, str], whole_experts: bool) -> None:
        columns, rows = (
            [path for path, role in roles.items() if role == wanted] for wanted in ("column", "row")
        )
        holders = {} if whole_experts else expert_modules(self._module)
        narrowing = Narrowing(self._module, self._degree, keeps_sizes=self._keeps_sizes)
        narrowing.narrow(columns, rows)
        self._connect_columns(columns)
        for path in rows:
            after(self._module.get_submodule(path), self._leave)
        if self._keeps_sizes:
            for path in columns:
                after(self._module.get_submodule(path), cut(narrowing.ratio(path)))
            for path in rows:
                after(self._module.get_submodule(path), uncut)
        for path, holder in holders.items():
            if not takes_routes(holder):
                raise UnsupportedJob(
                    f"plan.tensor: {path} ({type(holder).__name__}) "
                    "is not called with the experts that tokens chose"
                )
            narrowing.narrow_experts(path, holder)
            self._connect_experts(holder)
        for path in [path for path, role in roles.items() if role == "vocab"]:
            self._split_vocabulary(self._module.get_submodule(path), narrowing)

    def _split_vocabulary(self, layer: nn.Module, narrowing: Narrowing) -> None:
        first = narrowing.narrow_vocabulary(layer)
        if isinstance(layer, nn.Embedding):
            self._embeds_parts = True
            _mask_others(layer, first)
            if not self._by_sequence:
                after(layer, self._leave)
        else:
            self._vocabulary.add(first)
            if not self._by_sequence:
                before(layer, lambda x: copy_to(x, "tensor"))
            if self._whole_logits:
                after(layer, lambda x: all_gather(x, x.dim() - 1, self._degree, "tensor"))

    # Communication

    def _enter(self, x: torch.Tensor) -> torch.Tensor:
        return (
            gather(x, _sequence_dim(x), self._degree, "tensor") if self._by_sequence else copy_to(x, "tensor")
        )

    def _leave(self, x: torch.Tensor) -> torch.Tensor:
        return (
            scatter(x, _sequence_dim(x), self._degree, "tensor")
            if self._by_sequence
            else reduce_from(x, "tensor")
        )

    def _connect_columns(self, columns: list[str]) -> None:
        """Column layers with the same input share its communication.

        With sequence parallelism the module around them gets the whole sequence, as its shapes follow from
        its input; a block that holds such layers itself does not, as it works on its part of the sequence in
        between.
        """
        blocks = {id(block) for members in block_lists(self._module).values() for block in members}
        families: dict[str, list[nn.Module]] = {}
        for path in columns:
            families.setdefault(path.rpartition(".")[0], []).append(self._module.get_submodule(path))
        for parent_path, layers in families.items():
            parent = self._module.get_submodule(parent_path)
            self._regions.append(parent)
            if self._by_sequence and id(parent) not in blocks:
                self._enter_region(parent, layers)
                continue
            shared = Shared(self._enter)
            for layer in layers:
                before(layer, shared)
            shared.within(parent)

    def _enter_region(self, region: nn.Module, layers: list[nn.Module]) -> None:
        if self._keeps_parts:
            keeping_parts(
                region, layers, self._enter, lambda x: all_gather(x, _sequence_dim(x), self._degree, "tensor")
            )
        else:
            before(region, self._enter)

    def _connect_experts(self, holder: nn.Module) -> None:
        compute = holder.forward

        def forward(
            hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, *rest: Any
        ) -> torch.Tensor:
            if self._by_sequence:
                index = gather(index, 0, self._degree, "tensor")
                weights = gather(weights, 0, self._degree, "tensor")
            return self._leave(compute(self._enter(hidden), index, weights, *rest))

        holder.forward = forward

    def bound_sequence(self) -> None:
        """Where blocks begin, the sequence is cut over the group; after the last one and the norm behind it,
        it is whole again."""
        if not self._by_sequence:
            return
        inside = {id(region) for region in self._regions}
        lists = {
            path: b
            for path, b in block_lists(self._module).items()
            if any(id(m) in inside for m in b.modules())
        }
        if not lists:
            raise UnsupportedJob(
                f"plan.sequence_parallel: {type(self._module).__name__} has no list of repeated blocks"
            )
        for path, blocks in lists.items():
            members = list(blocks.children())
            if getattr(blocks, "within_sequence", False):  # each takes parts and is followed by logits
                for member in members:
                    at_exit(member, self._enter)
                continue
            before(members[0], self._begin)
            last = _norm_behind(self._module, path) or members[-1]
            at_exit(last, self._enter)

    def _begin(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[_sequence_dim(x)] % self._degree:
            raise InputError(
                f"plan.sequence_parallel: plan.tensor = {self._degree} "
                f"does not divide the {x.shape[1]} positions of a sequence"
            )
        return (scatter if self._embeds_parts else take_slice)(x, _sequence_dim(x), self._degree, "tensor")

    def sizes(self) -> contextlib.AbstractContextManager[Any]:
        """While this is open, code that is written for whole layers runs on parts of them."""
        return WholeSizes(self._heads) if self._keeps_sizes and self._degree > 1 else contextlib.nullcontext()

    @contextlib.contextmanager
    def losses(self, *, needed: bool) -> Iterator[None]:
        """While this is open, cross-entropy knows that the vocabulary is cut; at the end it has been called,
        if it is ``needed``."""
        if not self._vocabulary:
            yield
            return
        with _VocabularyLoss(self._vocabulary) as loss:
            yield
        if needed and not loss.calls:
            raise UnsupportedJob(
                f"plan.tensor: the loss of {type(self._module).__name__} "
                "is not the cross-entropy of its logits, so its vocabulary cannot be cut;"
                ' give the embedding and the last layer as "replicate" in plan.tensor_plan'
            )


class _VocabularyLoss(TorchFunctionMode):
    def __init__(self, widths: set[int]) -> None:
        super().__init__()
        self._widths = widths
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.cross_entropy:
            logits = args[0] if args else kwargs["input"]
            target = args[1] if len(args) > 1 else kwargs["target"]
            if logits.dim() == 2 and logits.shape[1] in self._widths and not target.is_floating_point():
                self.calls += 1
                return vocabulary_cross_entropy(logits, target)
        return func(*args, **kwargs)


def _mask_others(embedding: nn.Module, rows: int) -> None:
    """Look up the tokens that the rank has; the others' rows are zero."""
    embed = embedding.forward

    def forward(ids: torch.Tensor) -> torch.Tensor:
        elsewhere = (ids < 0) | (ids >= rows)
        found: torch.Tensor = embed(ids.masked_fill(elsewhere, 0))
        return found.masked_fill_(elsewhere.unsqueeze(-1), 0.0)

    embedding.forward = forward


def _sequence_dim(x: torch.Tensor) -> int:
    """Of (batch, sequence, ...), or of (tokens, ...)."""
    return 1 if x.dim() > 2 else 0


def _norm_behind(module: nn.Module, path: str) -> nn.Module | None:
    """The norm that a model applies to the output of its blocks, where it stands beside them."""
    parent, _, name = path.rpartition(".")
    siblings = list(module.get_submodule(parent).named_children())
    position = [sibling for sibling, _ in siblings].index(name)
    for i, (sibling, child) in enumerate(siblings):
        if "norm" in type(child).__name__.lower() and (i > position or "final" in sibling):
            return child
    return None
