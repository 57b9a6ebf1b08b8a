"""Describes low-rank adapters beside frozen weights: LoRA (Hu et al. 2021), QLoRA (Dettmers et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from foretrain.errors import InputError, invalid
from foretrain.schema import convert, read
from foretrain.spellings import Spellings

Kind = Literal["lora", "qlora"]
Format = Literal["fp32", "bf16", "fp16"]

ALL_LINEAR = "all-linear"
"""Every linear layer but the one that gives the output."""

_KINDS = Spellings(
    get_args(Kind),
    {"lora": "low-rank lora-adapter peft", "qlora": "q-lora lora-4bit 4bit-lora lora-nf4"},
    {"dora adalora loha lokr ia3 oft vera rslora": "is not modelled; give lora or qlora"},
)
_FORMATS = Spellings(
    get_args(Format), {"fp32": "float32 float 32", "bf16": "bfloat16", "fp16": "float16 half"}
)
_WEIGHTS: dict[str, Format] = {"bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
"""What weights are kept in where that is not fp32, by the precision of the training."""
_ALSO = {
    "r": "rank", "lora_rank": "rank", "lora_r": "rank", "target_modules": "targets", "lora_target": "targets",
    "lora_dropout": "dropout", "dtype": "precision",
}  # fmt: skip
"""What peft and others call the fields."""
_NO_MATTER = ("alpha", "lora_alpha", "use_rslora", "task_type", "init_lora_weights")
"""Settings of peft that change neither time nor memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Says which layers get an adapter, of what rank, and what the frozen weights are kept in."""

    kind: Kind
    rank: int = 8
    targets: str | tuple[str, ...] = ALL_LINEAR
    """``all-linear``, endings of the layers' names (``q_proj``), or a pattern of whole names."""
    dropout: float = 0.0
    precision: Format | None = None
    """What the adapters' own weights are kept in. Unless it is told otherwise, peft keeps them in fp32; other
    frameworks make them as they make other weights."""
    base: Format | None = None
    """What frozen weights are kept in under autocast, where that is not fp32."""
    modules_to_save: tuple[str, ...] = ()
    """Names of modules that are trained whole beside the adapters."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise invalid("training.adapter.rank", self.rank, "1 or more")
        if not self.targets:
            raise invalid("training.adapter.targets", self.targets, "all-linear or names of layers")
        if not 0 <= self.dropout < 1:
            raise invalid("training.adapter.dropout", self.dropout, "from 0 to below 1")

    @property
    def quantises(self) -> bool:
        """Whether the frozen linear layers are kept in 4 bits."""
        return self.kind == "qlora"

    @property
    def words(self) -> str:
        """Describe it in a few words: ``lora 16``."""
        named = "" if self.targets == ALL_LINEAR else f" on {'+'.join(self.listed)}"
        return f"{self.kind} {self.rank}{named}"

    @property
    def listed(self) -> tuple[str, ...]:
        return (self.targets,) if isinstance(self.targets, str) else self.targets

    def kept_in(self, precision: str, framework: str) -> Format:
        """Name the format that the adapters' own weights are kept in where a framework trains in this
        precision."""
        if self.precision is not None:
            return self.precision
        weights = _WEIGHTS.get(precision, "fp32")
        return "fp32" if framework == "pytorch" else weights

    def check(self, precision: str, *, master_weights: bool, framework: str = "pytorch") -> None:
        """Refuse what cannot go with the precision of the training."""
        if precision == "fp8" and self.quantises:
            raise InputError("training.adapter.kind: 'qlora' keeps weights in 4 bits, not in fp8; give lora")
        mixed = precision.startswith("amp-")
        if self.base is not None and not mixed:
            what = f"precision = {precision!r} says what weights are kept in"
            raise InputError(f"training.adapter.base: {self.base!r} is for autocast; {what}")
        if precision in ("fp32", "tf32") and self.precision not in (None, "fp32"):
            what = f"{self.precision!r} beside weights in fp32"
            raise InputError(f"training.adapter.precision: {what} is not modelled; leave it out")
        if master_weights and self.kept_in(precision, framework) == "fp32":
            raise InputError("training.master_weights: true, but adapters are kept in fp32 already")


def parse_adapter(value: Any, where: str) -> Adapter:
    """An adapter from its table, from what peft is configured with, or from a text.

    >>> parse_adapter("lora:16", "adapter") == Adapter(kind="lora", rank=16)
    True
    >>> parse_adapter("qlora:64,targets=q_proj+v_proj,dropout=0.05", "adapter").targets
    ('q_proj', 'v_proj')
    """
    if isinstance(value, Adapter):
        return value
    if isinstance(value, str):
        value = _table(value, where)
    elif not isinstance(value, Mapping) and hasattr(value, "peft_type"):
        value = _of_peft(value, where)
    if not isinstance(value, Mapping):
        raise invalid(where, value, 'a table such as { kind = "lora", rank = 16 }, or a text such as lora:16')
    table = {_ALSO.get(key, key): one for key, one in value.items() if key not in _NO_MATTER}
    for name, spelled in (("kind", _KINDS), ("precision", _FORMATS), ("base", _FORMATS)):
        if table.get(name) is not None:
            table[name] = spelled(table[name], f"{where}.{name}")
    if "bits" in table:
        _check_bits(table.pop("bits"), table.get("kind"), where)
    if table.get("bias", "none") != "none":
        raise InputError(f"{where}.bias: {table['bias']!r} is not modelled; biases stay frozen ('none')")
    table.pop("bias", None)
    return read(Adapter, table, where)


def _check_bits(bits: Any, kind: Any, where: str) -> None:
    """Refuse other bits of the frozen weights than QLoRA's four, and LoRA's those of the precision."""
    if convert(bits, int, f"{where}.bits") != 4 or kind != "qlora":
        raise InputError(f"{where}.bits: {bits} with kind = {kind!r} is not modelled; qlora has 4")


def _table(text: str, where: str) -> dict[str, Any]:
    """``lora:16,dropout=0.05`` as the table that it stands for."""
    first, *more = [part.strip() for part in text.split(",")]
    kind, given, rank = first.partition(":")
    table: dict[str, Any] = {"kind": kind}
    if given:
        table["rank"] = _number(rank, f"{where}.rank")
    for part in more:
        key, _, value = (one.strip() for one in part.partition("="))
        name = _ALSO.get(key, key)
        if name in ("rank", "dropout", "bits"):
            table[name] = _number(value, f"{where}.{name}")
        elif name == "targets":
            table[name] = value if value == ALL_LINEAR else value.split("+")
        else:
            table[name] = value.split("+") if name == "modules_to_save" else value
    return table


def _number(text: str, where: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise invalid(where, text, "a number") from None
    return int(number) if number.is_integer() and "." not in text else number


def _of_peft(config: Any, where: str) -> dict[str, Any]:
    """The table that a ``LoraConfig`` stands for."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if getattr(config, "use_dora", False):
        kind = "dora"
    if (targets := config.target_modules) is None:
        raise InputError(f"{where}.target_modules: missing; all-linear, or names of layers")
    return {
        "kind": kind,
        "rank": config.r,
        "targets": targets if isinstance(targets, str) else sorted(targets),
        "dropout": float(config.lora_dropout),
        "modules_to_save": list(config.modules_to_save or ()),
        "bias": config.bias,
    }
