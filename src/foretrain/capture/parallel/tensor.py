"""Narrows the layers of a model to one rank's part under tensor and sequence parallelism, with the
collectives between them.

Column layers give part of their outputs, row layers sum over the group (Shoeybi et al. 2019). With sequence
parallelism, what lies between holds its part of the sequence (Korthikanti et al. 2022): gathered before
column layers, reduce-scattered after row layers. The vocabulary is cut over the group, and the loss is taken
without gathering logits; inference, which has no loss, gathers them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from foretrain.capture.parallel.adapted import AdaptedLayer, Style, adapted_layers, is_linear
from foretrain.capture.parallel.collectives import (
    all_gather,
    copy_to,
    gather,
    gather_results,
    reduce_from,
    scatter,
    take_slice,
)
from foretrain.capture.parallel.experts import expert_modules, takes_routes
from foretrain.capture.parallel.narrowing import Narrowing
from foretrain.capture.parallel.stacks import block_lists
from foretrain.capture.parallel.tensor_plan import layer_roles, seen_layers
from foretrain.capture.parallel.vocabulary import VocabularyLoss, mask_others
from foretrain.capture.parallel.whole_sizes import WholeSizes, cut, head_counts, uncut
from foretrain.capture.parallel.wrapping import Shared, after, at_exit, before, keeping_parts
from foretrain.errors import CaptureError, ForetrainError, InputError, UnsupportedJob
from foretrain.job import Job

KEEPS_PARTS = ("megatron", "nanotron")
"""Frameworks that keep a rank's part of what sequence parallelism gathers, and gather it again for the
weights' gradients."""

SUMS_EACH = ("pytorch", "automodel")
"""Frameworks that cut layers by torch's ``ColwiseParallel``, each of which sums up the gradient of its
input."""


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
        style: Style = "torch",
        shares_inputs: bool = True,
    ) -> None:
        self._module, self._degree = module, degree
        self._whole_logits = whole_logits
        self._keeps_sizes = keeps_sizes
        self.notes: list[str] = []
        """What a forecast should say of how it was cut."""
        self._heads = head_counts(module) if keeps_sizes else set()
        self._by_sequence = by_sequence and degree > 1
        self._keeps_parts = keeps_parts
        self._shares_inputs = shares_inputs
        self._vocabulary: set[int] = set()
        self._regions: list[nn.Module] = []
        self._embeds_parts = False
        self._adapted: list[AdaptedLayer] = []
        self._towers = _towers(module) if self._by_sequence else ()
        self._in_tower = False
        if degree > 1:
            self._adapted = adapted_layers(module)
            roles = layer_roles(module, given, style)
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
            style="megatron" if job.workload.training.framework == "megatron" else "torch",
            shares_inputs=job.workload.training.framework not in SUMS_EACH,
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
        names = {layer.base: layer.path for layer in self._adapted}
        names |= {layer.up: layer.path for layer in self._adapted if roles.get(layer.base) == "column"}
        narrowing = Narrowing(self._module, self._degree, keeps_sizes=self._keeps_sizes, names=names)
        narrowing.narrow(columns, rows)
        beside = {path for layer in self._adapted for path in (layer.down, layer.up)}
        self._connect_columns([path for path in columns if path not in beside], narrowing)
        for path in rows:
            if path not in beside:
                inside = path.endswith(".x_proj")  # of Mamba, between layers that are cut
                after(self._module.get_submodule(path), self._sum_inside if inside else self._leave)
        inputs: dict[str, Shared] = {}
        for layer in self._adapted:
            owner = layer.path.rpartition(".")[0]
            if owner not in inputs:
                inputs[owner] = Shared(lambda x: copy_to(x, "tensor"))
                inputs[owner].within(self._module.get_submodule(owner))
            self._connect_adapter(layer, roles, inputs[owner])
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
            mask_others(layer, first)
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
        cuts = self._by_sequence and not self._in_tower
        return gather(x, _sequence_dim(x), self._degree, "tensor") if cuts else copy_to(x, "tensor")

    def _leave(self, x: torch.Tensor) -> torch.Tensor:
        cuts = self._by_sequence and not self._in_tower
        return scatter(x, _sequence_dim(x), self._degree, "tensor") if cuts else reduce_from(x, "tensor")

    def _leave_towers_whole(self) -> None:
        """Encoders of images and sound have every position on every rank: patches and a class token are
        rarely a multiple of the group, so Megatron's and others' sequence parallelism is for text alone."""
        for path in self._towers:
            tower = self._module.get_submodule(path)
            tower.forward = self._whole_in(tower.forward)

    def _whole_in(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def changed(*args: Any, **kwargs: Any) -> Any:
            self._in_tower = True
            try:
                return forward(*args, **kwargs)
            finally:
                self._in_tower = False

        return changed

    def _sum_inside(self, x: torch.Tensor) -> torch.Tensor:
        """What every rank reads as a whole between two layers that are cut."""
        return copy_to(reduce_from(x, "tensor"), "tensor")

    def _connect_adapter(self, layer: AdaptedLayer, roles: Mapping[str, str], enter: Shared) -> None:
        """What the thin layers beside a layer exchange: mostly as many numbers per token as they are wide.
        Megatron's first one reads the layer's input by itself; those of one input are one there."""
        down, up = (self._module.get_submodule(path) for path in (layer.down, layer.up))
        if roles.get(layer.down) == "column":
            if not self._by_sequence:
                before(down, enter)
            after(down, lambda x: gather_results(x, self._degree, "tensor"))
        if roles.get(layer.down) == "row":
            whole = roles.get(layer.up) == "column"
            after(down, (lambda x: reduce_from(x, "tensor")) if whole else self._leave)
        if roles.get(layer.up) == "column":
            before(up, lambda x: copy_to(x, "tensor"))
            if roles.get(layer.base) == "row":
                after(up, self._whole_results)

    def _whole_results(self, x: torch.Tensor) -> torch.Tensor:
        """The results of all ranks; with sequence parallelism, of the rank's part of the sequence."""
        whole = gather_results(x, self._degree, "tensor")
        if not self._by_sequence or self._in_tower:
            return whole
        return take_slice(whole, _sequence_dim(whole), self._degree, "tensor")

    def _connect_columns(self, columns: list[str], narrowing: Narrowing) -> None:
        """Column layers with the same input share its communication, but for torch's own parallel styles:
        there each sums up the gradient of its input by itself.

        With sequence parallelism the module around them gets the whole sequence, as its shapes follow from
        its input; a block that holds such layers itself does not, as it works on its part of the sequence in
        between.
        """
        blocks = {id(block) for members in block_lists(self._module).values() for block in members}
        families: dict[str, list[nn.Module]] = {}
        for path in columns:
            families.setdefault(narrowing.owner(path), []).append(self._module.get_submodule(path))
        for parent_path, layers in families.items():
            parent = self._module.get_submodule(parent_path)
            self._regions.append(parent)
            if self._by_sequence and id(parent) not in blocks:
                in_tower = parent_path.startswith(self._towers) if self._towers else False
                self._enter_region(parent, layers, keeps_parts=self._keeps_parts and not in_tower)
                continue
            if not (self._shares_inputs or self._by_sequence):
                for layer in layers:
                    before(layer, self._enter)
                continue
            shared = Shared(self._enter)
            for layer in layers:
                before(layer, shared)
            shared.within(parent)

    def _enter_region(self, region: nn.Module, layers: list[nn.Module], *, keeps_parts: bool) -> None:
        if keeps_parts and all(_weight(layer).requires_grad for layer in layers):
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
        self._leave_towers_whole()
        for path, blocks in lists.items():
            if self._towers and path.startswith(self._towers):
                continue
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
        with VocabularyLoss(self._vocabulary) as loss:
            yield
        if needed and not loss.calls:
            raise UnsupportedJob(
                f"plan.tensor: the loss of {type(self._module).__name__} "
                "is not the cross-entropy of its logits, so its vocabulary cannot be cut;"
                ' give the embedding and the last layer as "replicate" in plan.tensor_plan'
            )


def _sequence_dim(x: torch.Tensor) -> int:
    """Of (batch, sequence, ...), or of (tokens, ...)."""
    return 1 if x.dim() > 2 else 0


def _towers(module: nn.Module) -> tuple[str, ...]:
    """Paths of the encoders of images and sound in a model that reads text beside them."""
    named = [
        path
        for path, _ in module.named_modules()
        if path.rpartition(".")[2].startswith(("vision_tower", "vision_model", "visual", "audio_tower"))
    ]
    return tuple(path for path in named if not any(path.startswith(f"{one}.") for one in named))


def _weight(layer: nn.Module) -> torch.Tensor:
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def _norm_behind(module: nn.Module, path: str) -> nn.Module | None:
    """The norm that a model applies to the output of its blocks, where it stands beside them."""
    parent, _, name = path.rpartition(".")
    siblings = list(module.get_submodule(parent).named_children())
    position = [sibling for sibling, _ in siblings].index(name)
    for i, (sibling, child) in enumerate(siblings):
        if "norm" in type(child).__name__.lower() and (i > position or "final" in sibling):
            return child
    return None
