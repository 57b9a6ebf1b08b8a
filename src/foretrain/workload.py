"""Describes what is trained: Model, Training and Workload."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from foretrain import spellings
from foretrain.adapter import Adapter, parse_adapter
from foretrain.allocator_settings import AllocatorSettings
from foretrain.errors import InputError, invalid, unknown
from foretrain.library_changes import LIBRARIES, libraries_that_matter
from foretrain.spellings import Spellings
from foretrain.units import parse_seconds

Source = Literal["timm", "torchvision", "transformers", "diffusion", "python", "onnx", "graph"]
Precision = Literal["fp32", "tf32", "amp-bf16", "amp-fp16", "bf16", "fp16", "fp8"]
Fp8 = Literal["tensorwise", "rowwise", "rowwise-gw-hp", "delayed", "current", "blockwise", "mxfp8", "nvfp4"]
TORCHAO: tuple[Fp8, ...] = ("tensorwise", "rowwise", "rowwise-gw-hp")
"""Ways of fp8 that are operators of torch; the others are kernels of Transformer Engine."""
Framework = Literal[
    "pytorch", "megatron", "nanotron", "llm-foundry", "torchtitan", "adaptdl", "internevo", "fms-fsdp",
    "deepspeed", "automodel",
]  # fmt: skip
OWN_MODELS: tuple[Framework, ...] = (
    "megatron", "nanotron", "llm-foundry", "torchtitan", "internevo", "fms-fsdp",
    "automodel",
)  # fmt: skip
"""Frameworks that run models of their own, whatever library a job describes them by."""
Mode = Literal["train", "infer"]
Attention = Literal["eager", "sdpa", "flash", "cudnn"]
Loss = Literal["plain", "fused", "chunked"]
Graphs = Literal["none", "layers", "step"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
"""What ``torch.compile`` calls its modes."""

PRECISIONS: tuple[str, ...] = get_args(Precision)

OPTIMIZERS = ("sgd", "sgd-plain", "adam", "adamw", "adam-fused", "adamw-fused", "adafactor", "lamb",
"adagrad", "rmsprop", "sparse-adam", "adamw-8bit",
              "nadam", "radam", "adamax", "adadelta", "asgd", "rprop", "muon")  # fmt: skip

_OWN_STATE = ("sgd-plain", "adafactor", "adamw-8bit")
"""Optimizers that have no state, or one in numbers of their own."""

FILE_SOURCES: tuple[Source, ...] = ("python", "onnx", "graph")
"""Sources whose models are named by the path of a file."""


_LENGTH = (
    "samples", "epochs", "steps", "loader_rate", "loader_workers", "evaluate_every", "evaluate_samples",
    "checkpoint_every",
)  # fmt: skip
"""What of a training says how long it is, and what it does between its steps."""

MOST = {
    "global_batch": 10**9,
    "sequence": 10**8,
    "predicted_tokens": 10**8,
    "classes": 10**9,
    "samples": 10**15,
    "epochs": 10**9,
    "steps": 10**12,
    "loader_rate": 10**12,
    "loader_workers": 10**6,
    "evaluate_samples": 10**15,
}
"""What each is at most, ten times and more beyond any training, so that what a forecast multiplies can be
counted."""
MOST_SIDE = 10**6
"""Pixels of a side of an image, and channels: slides of pathology have some 100,000."""
MOST_NUMBERS = 2**50
"""In the images or tokens that a device takes at once: what layers make of them is counted in 63 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Says which model, by the name its own library knows it by."""

    source: Source
    name: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict, hash=False)
    task: str | None = None
    config: Mapping[str, Any] | None = field(default=None, hash=False)
    title: str | None = None
    """What reports call it; no part of what it is."""
    libraries: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Versions of libraries that it runs with, where they are not those installed here."""

    def __post_init__(self) -> None:
        if self.source == "transformers":
            if self.config is None and self.name is None:
                raise InputError(
                    "model.config: missing; a transformers model "
                    "needs its configuration, with model_type in it"
                )
            if self.config is not None and "model_type" not in self.config and self.name is None:
                raise InputError('model.config.model_type: missing; for example "llama" or "bert"')
            if self.name is not None and self.config is not None and "model_type" in self.config:
                raise InputError(
                    f"model.name: {self.name!r} is not used; "
                    "model.config.model_type names a transformers model"
                )
            if self.args:
                raise InputError("model.args: a transformers model has its settings in model.config")
        else:
            if not self.name:
                raise InputError(f"model.name: missing; a {self.source} model is given by name")
            for key in ("task", "config"):
                if getattr(self, key) is not None:
                    raise InputError(
                        f"model.{key}: only a transformers model has it, not source = {self.source!r}"
                    )
        for library, version in self.libraries.items():
            if library not in LIBRARIES:
                raise unknown("model.libraries", library, LIBRARIES, "a library whose version matters;")
            if not re.fullmatch(r"\d+\.\d+(\..*)?", version):
                raise invalid(f"model.libraries.{library}", version, 'a version, such as "5.17"')
        if self.source == "python" and not (str(self.name).endswith(".py") or ":" in str(self.name)):
            raise invalid(
                "model.name", self.name, 'of the form "path/to/file.py:function" or "path/to/file.py"'
            )

    @property
    def label(self) -> str:
        """A short name for people."""
        if self.title is not None:
            return self.title
        if self.name is not None:
            return self.name.rpartition("/")[2] if self.source in FILE_SOURCES else self.name
        assert self.config is not None
        return str(self.config["model_type"])

    @property
    def model_type(self) -> str | None:
        """Name the type of a transformers model."""
        if self.source != "transformers":
            return None
        return str((self.config or {}).get("model_type", self.name))

    def measured_with(self, provenance: Mapping[str, Any]) -> Model:
        """The model with the versions of libraries that a run was measured with, where they matter and only
        its provenance tells them."""
        if self.libraries or self.source in ("graph", "onnx"):
            return self
        return dataclasses.replace(
            self, libraries=libraries_that_matter(provenance, self.source, self.model_type)
        )

    @property
    def key(self) -> str:
        """A text that models share when they are the same."""
        return json.dumps(
            [self.source, self.name, dict(self.args), self.task, self.config], sort_keys=True, default=str
        )


_GRAPHED_MODES = ("reduce-overhead", "max-autotune")
"""Modes of the compiler that launch CUDA graphs."""
_VERSION = re.compile(r"(?:core[-_]?)?[rv]?(\d+(?:\.\d+)*)(?:[-.+_]?[a-z].*)?")
"""Numbers with points, as tags and packages have them: 0.20.0, v0.2.2, core_r0.12.0, 1.15.0.dev0."""


def _compile_mode(value: Any, where: str) -> Any:
    """True, false, or a mode as people spell it."""
    modes = Spellings(get_args(CompileMode), spellings.COMPILE_MODES)
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or (mode := modes.meant(value)) is None:
        raise invalid(where, value, f"true, false or one of {', '.join(modes.names)}")
    return mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Says how the model is trained: batch, input size, precision, optimizer, and for how long."""

    global_batch: int
    mode: Mode = "train"
    sequence: int | None = None
    image: int | tuple[int, ...] | None = None
    classes: int | None = None
    precision: Precision = "fp32"
    fp8: Fp8 | None = None
    """How numbers are scaled and cast for products in fp8: None for what the framework does by itself."""
    master_weights: bool = False
    grad_scaler: bool | None = None
    """Whether amp-fp16 scales the loss, as torch's ``GradScaler`` does; None where nothing else is said: it
    does."""
    optimizer: str = "sgd"
    channels_last: bool = False
    compile: bool | CompileMode = dataclasses.field(default=False, metadata={"parse": _compile_mode})
    """Whether ``torch.compile`` is applied to the model, and in which mode; true is "default"."""
    framework: Framework = "pytorch"
    framework_version: str | None = None
    """Of the framework, where its habits changed; None for today's."""
    attention: Attention | None = None
    """How attention is computed: None for what the model or the framework does."""
    loss: Loss | None = None
    """How the loss over a vocabulary is computed: None for what the model or the framework does."""
    optimizer_state: Literal["fp32", "bf16", "fp16", "fp8"] | None = None
    """What the optimizer keeps its moments in; None for what the optimizer does."""
    gradient_precision: Literal["fp32", "bf16"] | None = None
    """What the gradients of micro-batches are added up in; None for what the framework does."""
    fused_accumulation: bool | None = None
    """Whether products add up weight gradients in fp32 themselves; None for what the framework does."""
    mtp_layers: int = 0
    """Layers that predict further tokens, each with its own output (DeepSeek-V3)."""
    predicted_tokens: int | None = None
    """Tokens of a sample that a masked language model answers for, as NVIDIA's and MLPerf's BERT do for the
    masked ones alone; None for all of them."""
    graphs: Graphs | None = None
    """What is launched as a CUDA graph: nothing, each layer, or the passes of a step; None for what
    ``compile`` does."""
    allocator: str | None = None
    """Settings of torch's CUDA allocator, as in ``PYTORCH_CUDA_ALLOC_CONF``."""
    samples: int | None = None
    epochs: float | None = None
    steps: int | None = None
    loader_rate: float | None = None
    """Samples per second that one worker of a data loader delivers; None where data is never waited for."""
    loader_workers: int | None = None
    """Of each data-parallel rank."""
    evaluate_every: int | str | None = None
    """Steps, "epoch", or a time such as "1h"."""
    evaluate_samples: int | None = None
    checkpoint_every: int | str | None = None
    """As ``evaluate_every``."""
    adapter: Adapter | None = field(default=None, metadata={"parse": parse_adapter})
    """What is trained beside frozen weights; None where all weights are trained."""

    @property
    def of_step(self) -> Training:
        """Leave out its length: what is left is what a step depends on."""
        if all(getattr(self, name) is None for name in _LENGTH):
            return self
        nothing: dict[str, Any] = dict.fromkeys(_LENGTH)
        return dataclasses.replace(self, **nothing)

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise invalid(f"training.{name}", value, "a number greater than zero")
            if value is not None and value > most:
                raise invalid(f"training.{name}", value, f"at most {most:,}")
        self._check_image()
        if self.optimizer not in OPTIMIZERS:
            raise unknown("training.optimizer", self.optimizer, OPTIMIZERS)
        if self.compile == "default":
            object.__setattr__(self, "compile", True)
        self._check_length()
        if self.mtp_layers < 0:
            raise invalid("training.mtp_layers", self.mtp_layers, "0 or more")
        if self.mtp_layers and self.mode == "infer":
            raise InputError(f'training.mtp_layers: {self.mtp_layers} needs mode = "train"')
        if self.predicted_tokens is not None:
            self._check_predicted(self.predicted_tokens)
        AllocatorSettings.read(self.allocator or "")
        if self.graphs == "none" and self.compile in _GRAPHED_MODES:
            raise InputError(f"training.graphs: 'none', but compile = {self.compile!r} launches CUDA graphs")
        if self.framework_version is not None and self.version is None:
            raise invalid("training.framework_version", self.framework_version, 'a version, such as "0.12.1"')
        self._check_interruptions()
        self._check_numbers_kept()
        if self.fp8 is not None and self.precision != "fp8":
            raise InputError(f"training.fp8: {self.fp8!r} needs precision fp8, not {self.precision}")
        if self.master_weights and self.precision not in ("bf16", "fp16", "fp8"):
            raise InputError(
                "training.master_weights: true needs precision "
                f"bf16, fp16 or fp8; {self.precision} already keeps fp32 weights"
            )
        if self.adapter is not None:
            self.adapter.check(self.precision, master_weights=self.master_weights, framework=self.framework)
        if self.grad_scaler and (self.precision != "amp-fp16" or self.mode != "train"):
            raise InputError("training.grad_scaler: true needs training with precision amp-fp16")

    def _check_image(self) -> None:
        given = list(self.image) if isinstance(self.image, tuple) else self.image
        if isinstance(self.image, tuple):
            if len(self.image) != 3 or min(self.image) <= 0:
                raise invalid("training.image", given, "a side length or [channels, height, width]")
        elif self.image is not None and self.image <= 0:
            raise invalid("training.image", given, "greater than zero")
        if self.image_shape is not None and max(self.image_shape) > MOST_SIDE:
            raise invalid("training.image", given, f"at most {MOST_SIDE:,} in each direction")

    def _check_length(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise InputError(
                f"training.steps: {self.steps} and training.epochs: {self.epochs} are both given; give one"
            )
        if self.epochs is not None and self.samples is None:
            raise InputError(
                "training.samples: missing; training.epochs needs the number of samples in an epoch"
            )

    def _check_predicted(self, count: int) -> None:
        if self.mode == "infer":
            raise InputError(f'training.predicted_tokens: {count} needs mode = "train"')
        if self.sequence is not None and count > self.sequence:
            raise invalid("training.predicted_tokens", count, f"at most training.sequence = {self.sequence}")

    @property
    def scales_loss(self) -> bool:
        return self.mode == "train" and self.precision == "amp-fp16" and self.grad_scaler is not False

    def _check_numbers_kept(self) -> None:
        """Check what only a training has: a loss, gradients, the state of an optimizer."""
        for name in ("loss", "optimizer_state", "gradient_precision"):
            if getattr(self, name) is not None and self.mode == "infer":
                raise InputError(f'training.{name}: {getattr(self, name)!r} needs mode = "train"')
        if self.optimizer_state is not None and self.optimizer in _OWN_STATE:
            raise InputError(
                f"training.optimizer_state: {self.optimizer_state!r} cannot be chosen for {self.optimizer}"
            )

    def _check_interruptions(self) -> None:
        """Check what happens beside the steps."""
        if self.loader_workers is not None and self.loader_rate is None:
            raise InputError("training.loader_rate: missing; training.loader_workers needs what one delivers")
        if (self.evaluate_every is None) != (self.evaluate_samples is None):
            missing, given = ("evaluate_every", "evaluate_samples")
            if self.evaluate_every is not None:
                missing, given = given, missing
            raise InputError(f"training.{missing}: missing; training.{given} needs it")
        for name in ("evaluate_every", "checkpoint_every"):
            every = getattr(self, name)
            if every is None:
                continue
            if self.mode == "infer":
                raise InputError(f'training.{name}: {every!r} needs mode = "train"')
            if every == "epoch":
                if self.samples is None:
                    raise InputError(f'training.samples: missing; training.{name} = "epoch" needs it')
            elif not (parse_seconds(every, f"training.{name}") if isinstance(every, str) else every) > 0:
                raise invalid(f"training.{name}", every, 'steps above zero, "epoch", or a time such as "1h"')

    @property
    def cuda_graphs(self) -> Graphs:
        """Say what is launched as CUDA graphs: as the job says, else as the mode of the compiler does."""
        return self.graphs or ("step" if self.compile in _GRAPHED_MODES else "none")

    @property
    def hides_pools(self) -> bool:
        """Whether the memory of passes is reserved and not allocated: in the pools of the compiler's graphs.
        Frameworks that capture graphs themselves log a peak from before, when it counted."""
        return bool(self.compile) and self.cuda_graphs != "none"

    @property
    def version(self) -> tuple[int, ...] | None:
        """Give the version of the framework as numbers.

        >>> Training(global_batch=1, framework="megatron", framework_version="core_v0.12.1").version
        (0, 12, 1)
        """
        match = _VERSION.fullmatch(self.framework_version or "")
        return None if match is None else tuple(map(int, match[1].split(".")))

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """Channels, height and width."""
        if self.image is None:
            return None
        if isinstance(self.image, tuple):
            channels, height, width = self.image
            return channels, height, width
        return 3, self.image, self.image

    @property
    def fp8_recipe(self) -> Fp8:
        """Name the recipe of the job, else the framework's own: Transformer Engine's first for Megatron,
        torchao's for others."""
        return self.fp8 or ("delayed" if self.framework == "megatron" else "tensorwise")

    @property
    def steps_per_epoch(self) -> int | None:
        return None if self.samples is None else math.ceil(self.samples / self.global_batch)

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole training, when it says how long it is."""
        if self.steps is not None:
            return self.steps
        if self.epochs is not None and self.steps_per_epoch is not None:
            return math.ceil(self.epochs * self.steps_per_epoch)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model plus how it is trained; ``base`` is the folder that relative model paths start from."""

    model: Model
    training: Training
    base: Path = Path()

    def __post_init__(self) -> None:
        further, source = self.training.mtp_layers, self.model.source
        if further and source != "transformers":
            raise InputError(f"training.mtp_layers: {further} needs a model of transformers, not {source}")
        predicted = self.training.predicted_tokens
        if predicted is not None and source != "transformers":
            raise InputError(
                f"training.predicted_tokens: {predicted} needs a model of transformers, not {source}"
            )
        if self.training.attention is not None and self.model.source != "transformers":
            raise InputError(
                f"training.attention: {self.training.attention!r} is a choice of transformers models, "
                f"not of source = {self.model.source!r}"
            )
        images = self.model.source in ("timm", "torchvision", "diffusion")
        if images and self.training.loss not in (None, "plain"):
            raise InputError(
                f"training.loss: {self.training.loss!r} is over a vocabulary, "
                f"which a {self.model.source} model has not"
            )
        if images and self.training.sequence is not None:
            raise InputError(
                f"training.sequence: {self.training.sequence} is not used by a {self.model.source} model"
            )
