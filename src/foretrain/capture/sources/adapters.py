"""Freezes a model and gives its layers low-rank adapters, as peft does (LoRA, Hu et al. 2021)."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from foretrain.adapter import ALL_LINEAR, Adapter
from foretrain.capture.sources.loaded import AUTOCAST_DTYPES
from foretrain.capture.sources.quantised import QuantisedLinear
from foretrain.errors import InputError

_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_HEADS = {
    "ForSequenceClassification": ("classifier", "score"),
    "ForTokenClassification": ("classifier", "score"),
    "ForQuestionAnswering": ("qa_outputs",),
}
"""Modules that peft trains whole, by how the names of transformers' classes end."""
_SCALING = 2.0
"""Alpha over rank; that there is a factor counts, not which."""


def with_adapter(module: nn.Module, adapter: Adapter, precision: str) -> list[str]:
    """Freeze a module and give its layers adapters; returns what a forecast should say of it."""
    module.requires_grad_(False)
    if adapter.base is not None:
        _keep_in(module, _FORMATS[adapter.base])
    trained = adapter.modules_to_save or _heads(module)
    targets = [name for name in _targets(module, adapter) if not _is_in(name, trained)]
    if not targets:
        raise InputError(
            f"training.adapter.targets: {'+'.join(adapter.listed)!r} is no layer of {type(module).__name__}"
        )
    head, whole = _output_layer(module), (*trained, *(getattr(module, "_keep_in_fp32_modules", None) or ()))
    for name in _each(module, nn.Linear, _conv1d()) if adapter.quantises else ():
        if name != head and not _is_in(name, whole):
            _replace(module, name, _quantised(module.get_submodule(name), AUTOCAST_DTYPES.get(precision)))
    for name in targets:
        _replace(module, name, _adapted(name, module.get_submodule(name), adapter))
    for name in _matched(module, trained):
        _replace(module, name, TrainedWhole(module.get_submodule(name)))
    return _notes(adapter, precision, len(targets))


def _notes(adapter: Adapter, precision: str, layers: int) -> list[str]:
    weights = "fp32" if precision.startswith("amp-") else precision
    base, own = adapter.base or ("fp32" if weights == "tf32" else weights), adapter.precision or "fp32"
    held = (
        f"in 4 bits (NF4, blocks of 64), other frozen weights in {base}"
        if adapter.quantises
        else f"in {base}"
    )
    computes_in = "bf16" if weights == "fp8" else weights
    casts = (
        ": inputs are cast to fp32 and results back, as peft does "
        f"(adapter.precision = {computes_in} spares it)"
        if own == "fp32" and computes_in in ("bf16", "fp16")
        else ""
    )
    of = f"adapters of rank {adapter.rank} on {layers} layer{'s' * (layers != 1)}, in {own}"
    return [
        f"{of}; frozen weights {held}{casts}",
        *(["4-bit weights are brought back before each product"] if adapter.quantises else []),
    ]


# Which layers


def _conv1d() -> type[nn.Module]:
    """The linear layer of GPT-2, whose weight is transposed; transformers is not imported for it."""
    loaded = sys.modules.get("transformers.pytorch_utils")
    return nn.Linear if loaded is None else loaded.Conv1D


def _each(module: nn.Module, *kinds: type[nn.Module]) -> list[str]:
    """Names of the layers of these kinds; not of one that torch's attention reads without calling it."""
    unused = nn.modules.linear.NonDynamicallyQuantizableLinear
    found = module.named_modules()
    return [name for name, one in found if name and isinstance(one, kinds) and not isinstance(one, unused)]


def _targets(module: nn.Module, adapter: Adapter) -> list[str]:
    if adapter.targets == ALL_LINEAR:
        head = _output_layer(module)
        return [name for name in _each(module, nn.Linear, _conv1d()) if name != head]
    if isinstance(adapter.targets, str):
        pattern = adapter.targets
        return [name for name, _ in module.named_modules() if name and re.fullmatch(pattern, name)]
    return _matched(module, adapter.targets)


def _matched(module: nn.Module, endings: tuple[str, ...]) -> list[str]:
    """Names that are or end with one of these."""
    dotted = tuple(f".{ending}" for ending in endings)
    return [name for name, _ in module.named_modules() if name and f".{name}".endswith(dotted)]


def _is_in(name: str, trained: tuple[str, ...]) -> bool:
    return any(re.search(rf"(^|\.){re.escape(one)}($|\.)", name) for one in trained)


def _output_layer(module: nn.Module) -> str | None:
    """The layer of a language model that gives the scores of words."""
    given = getattr(module, "get_output_embeddings", None)
    head = given() if callable(given) else None
    return next((name for name, child in module.named_modules() if child is head and name), None)


def _heads(module: nn.Module) -> tuple[str, ...]:
    """Modules that peft trains whole without being told to."""
    named = type(module).__name__
    endings = next((heads for ending, heads in _HEADS.items() if named.endswith(ending)), ())
    return tuple(name for name, _ in module.named_children() if name in endings)


# What takes their place


def _keep_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Weights, and the statistics beside them, in another format; what is computed stays as it is."""
    for child in module.modules():
        own = [*child.parameters(recurse=False)]
        for tensor in (*own, *(child.buffers(recurse=False) if own else ())):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)


def _replace(module: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(module.get_submodule(parent), last, layer)


def _quantised(layer: nn.Module, compute: torch.dtype | None) -> QuantisedLinear:
    return QuantisedLinear(layer, *_sizes(layer), compute)


def _sizes(layer: Any) -> tuple[int, int]:
    """Results and inputs of a linear layer."""
    if isinstance(layer, nn.Linear | QuantisedLinear):
        return layer.out_features, layer.in_features
    columns, rows = layer.weight.shape
    return rows, columns


def _adapted(name: str, layer: nn.Module, adapter: Adapter) -> nn.Module:
    dtype, place = _FORMATS[adapter.precision or "fp32"], next(layer.parameters()).device
    made: dict[str, Any] = {"dtype": dtype, "device": place}
    if isinstance(layer, nn.Linear | QuantisedLinear | _conv1d()):
        rows, columns = _sizes(layer)
        pair: tuple[nn.Module, nn.Module] = (
            nn.Linear(columns, adapter.rank, bias=False, **made),
            nn.Linear(adapter.rank, rows, bias=False, **made),
        )
        return LowRank(layer, *pair, adapter.dropout)
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return LowRank(layer, *_thin_convolutions(name, layer, adapter.rank, made), adapter.dropout)
    if isinstance(layer, nn.Embedding):
        return LowRankEmbedding(layer, adapter.rank, made)
    allowed = "a linear layer, a convolution or an embedding"
    raise InputError(f"training.adapter.targets: {name!r} is a {type(layer).__name__}, not {allowed}")


def _thin_convolutions(name: str, layer: Any, rank: int, made: Any) -> tuple[nn.Module, nn.Module]:
    """The first has the window of the layer, the second none."""
    if rank % layer.groups:
        what = f"{rank} does not divide over the {layer.groups} groups of {name}"
        raise InputError(f"training.adapter.rank: {what}; leave it out of the targets")
    kind = type(layer)
    window = kind(layer.in_channels, rank, layer.kernel_size, layer.stride, layer.padding, bias=False, **made)
    return window, kind(rank, layer.out_channels, 1, groups=layer.groups, bias=False, **made)


class _Beside(nn.Module):
    """A frozen layer and what is trained beside it, which keeps its precision whatever the model is cast
    to."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = layer

    def __getattr__(self, name: str) -> Any:
        """Models read ``weight`` or ``in_features`` of their layers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_layer"), name)

    def trained_beside(self) -> Iterator[nn.Parameter]:
        base = {id(one) for one in self.base_layer.parameters()}
        return (one for one in self.parameters() if id(one) not in base)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> _Beside:
        kept = [one.dtype for one in self.trained_beside()]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for parameter, dtype in zip(self.trained_beside(), kept, strict=True):
            parameter.data = parameter.data.to(dtype)
        return self


class LowRank(_Beside):
    """A frozen layer plus two thin ones, one after the other."""

    def __init__(self, layer: nn.Module, first: nn.Module, second: nn.Module, dropout: float) -> None:
        super().__init__(layer)
        self.lora_A, self.lora_B = first, second
        nn.init.zeros_(second.weight)  # type: ignore[arg-type]
        self.lora_dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Names are bound as peft binds them, so that tensors live as long."""
        result: torch.Tensor = self.base_layer(x)
        dtype = result.dtype
        if not isinstance(self.base_layer, QuantisedLinear):
            x = self._cast(x)
            result = result + self._added(x)
            return result.to(dtype)
        result = result.clone()
        casts = not _autocasts()
        x = self._cast(x) if casts else x
        added = self._added(x)
        added = added.to(dtype) if casts else added
        return result + added

    def _cast(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.lora_A.weight.dtype)  # type: ignore[arg-type]

    def _added(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.lora_B(self.lora_A(self.lora_dropout(x))) * _SCALING
        return added


def _autocasts() -> bool:
    from foretrain.capture.tracing.cuda import casting_to

    return casting_to() is not None or torch.is_autocast_enabled()


class LowRankEmbedding(_Beside):
    """A frozen table plus a thin one, whose rows are widened after they are looked up."""

    def __init__(self, layer: nn.Embedding, rank: int, made: dict[str, Any]) -> None:
        super().__init__(layer)
        self.lora_embedding_A = nn.Parameter(torch.zeros(rank, layer.num_embeddings, **made))
        self.lora_embedding_B = nn.Parameter(torch.randn(layer.embedding_dim, rank, **made))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base_layer(x)
        rows = nn.functional.embedding(x, self.lora_embedding_A.T)
        return (result + (rows @ self.lora_embedding_B.T) * _SCALING).to(result.dtype)


class TrainedWhole(nn.Module):
    """A module that is trained; peft keeps it as it was beside."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original_module, self.trained = original, copy.deepcopy(original).requires_grad_(True)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("trained"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.trained(*args, **kwargs)


def own_precision(module: nn.Module) -> frozenset[int]:
    """Ids of the parameters that stay as they are when the model is cast."""
    return frozenset(
        id(one) for child in module.modules() if isinstance(child, _Beside) for one in child.trained_beside()
    )
