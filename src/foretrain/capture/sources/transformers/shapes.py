"""Gives the sizes and tensors that the inputs of transformers' models are made of: by the configuration, and
by the job where it says."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from foretrain.capture.tracing.constants import Constants
from foretrain.errors import InputError
from foretrain.workload import Training

OBJECTS = 7
"""Objects in an image: the mean of COCO's training set (860,001 boxes in 118,287 images)."""

_SIDE = 224
_DETECTION_SIDE = 640
_DOCUMENT_SIDE = 448
_LINE_OF_TEXT = (48, 320)
_CAPTION = 77


class Shapes:
    """The tensors of one batch: random on a device.

    On meta whole numbers are real, as a model may look at them (for padding or images, say).
    """

    def __init__(
        self, module: Any, config: Any, training: Training, batch: int, task: str, device: str,
        constants: Constants,
    ) -> None:  # fmt: skip
        self.module, self.config, self.training, self.batch, self.task, self.device = (
            module,
            config,
            training,
            batch,
            task,
            device,
        )
        self.constants = constants
        """Values on meta that are known from building the module."""
        self.parts = list(_parts(config))
        self.signature = inspect.signature(module.forward).parameters
        self.used: set[str] = set()
        """Fields of the training that shaped a tensor."""
        self.notes: list[str] = []
        """Sizes that neither the job nor the configuration gives."""

    # Numbers

    def numbers(self, *shape: int) -> torch.Tensor:
        return (torch.empty if self.device == "meta" else torch.randn)(shape, device=self.device)

    def integers(self, below: int, *shape: int) -> torch.Tensor:
        """From 1, which leaves out the blank of CTC and the commonest padding."""
        if self.device == "meta":
            return torch.empty(shape, dtype=torch.long, device="meta")
        return torch.randint(min(1, below - 1), below, shape, device=self.device)

    def known(self, values: Any, dtype: torch.dtype = torch.long) -> torch.Tensor:
        """A tensor that the model may look at: real, on the CPU where the rest is on meta."""
        device = "cpu" if self.device == "meta" else self.device
        if isinstance(values, torch.Tensor):
            return values.to(device, dtype)
        return torch.tensor(values, dtype=dtype, device=device)

    def ones(self, *shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
        return self.known(torch.ones(shape), dtype)

    # Sizes

    def size(self, *names: str, default: int | None = None) -> Any:
        """The first of these keys that the configuration or one of its parts has."""
        for part in self.parts:
            for name in names:
                value = getattr(part, name, None)
                if value is not None and not isinstance(value, bool | dict):
                    return value
        return default

    @property
    def text(self) -> Any:
        return self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config

    @property
    def vision(self) -> Any:
        """The part of the configuration that says how images are cut."""
        for name in ("patch_size", "image_size", "spatial_merge_size", "num_channels", "in_channels"):
            for part in self.parts:
                if getattr(part, name, None) is not None:
                    return part
        return self.config

    @property
    def vocabulary(self) -> int:
        text = getattr(self.config, "text_config", None) or self.config
        return int(getattr(text, "vocab_size", None) or self.size("vocab_size") or 2)

    @property
    def labels(self) -> int:
        return int(getattr(self.config, "num_labels", None) or 2)

    @property
    def hidden(self) -> int:
        return int(self.size("hidden_size", "d_model", "embed_dim", "hidden_dim", "dim", default=8))

    # Text

    @property
    def length(self) -> int:
        """Tokens of a sample; of a caption beside images, as many as its tower takes."""
        if self.training.sequence is not None:
            self.used.add("sequence")
            return self.training.sequence
        if self.is_captioned:
            longest = getattr(self.text, "max_position_embeddings", None) or self.size(
                "max_position_embeddings", default=_CAPTION
            )
            length = min(int(longest), _CAPTION)
            self.note(f"training.sequence: {length} tokens of text taken")
            return length
        raise InputError("training.sequence: missing; a language model needs its sequence length")

    @property
    def is_captioned(self) -> bool:
        """Whether text stands beside something else and no language is modelled."""
        others = {name for name in self.signature if name.startswith(("pixel_values", "input_features"))}
        return self.task in CAPTIONED and bool(others)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def ids(self) -> torch.Tensor:
        length = self.length
        if self.device == "meta":
            return torch.ones(self.batch, length, dtype=torch.long)
        ids = self.integers(self.vocabulary, self.batch, length)
        padding = getattr(self.config, "pad_token_id", None)
        return ids if padding is None else ids.masked_fill(ids == padding, (padding + 1) % self.vocabulary)

    def tokens(self, length: int) -> torch.Tensor:
        """What a decoder writes, or is to write."""
        shape = (self.batch, length)
        return self.ones(*shape) if self.device == "meta" else self.integers(self.vocabulary, *shape)

    def label(self) -> torch.Tensor:
        return self.integers(self.labels, self.batch)

    def position(self) -> torch.Tensor:
        return self.integers(self.training.sequence or 2, self.batch)

    # Images

    @property
    def image(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        self.used.add("image")
        if self.training.image_shape is not None:
            return self.training.image_shape
        vision = self.vision
        channels = next(
            (
                value
                for name in ("num_channels", "in_channels", "in_chans")
                if isinstance(value := getattr(vision, name, None), int)
            ),
            3,
        )
        side: Any = getattr(self.config, "image_size", None)
        of_backbone = vision is getattr(self.config, "backbone_config", None)  # trained on other sizes
        if side is None and not (self.task in DETECTS and of_backbone):
            side = getattr(vision, "image_size", None)
        if isinstance(side, dict):
            side = (side["height"], side["width"])
        if side is None or side == 0:
            side = self._side_of_parts() or self._usual_side()
            self.note(f"training.image: {side} taken")
        height, width = side if isinstance(side, list | tuple) else (side, side)
        return channels, int(height), int(width)

    def _side_of_parts(self) -> Any:
        """The side that a part made for images of one size tells, or that its smallest copy needs."""
        if (ratios := self.size("scaled_images_ratios")) is not None:
            return int(self.config.patch_size / min(ratios))
        fixed = (getattr(module, "img_size", None) for module in self.module.modules())
        return self.size("max_img_size") or next(
            (tuple(size) for size in fixed if isinstance(size, tuple)), None
        )

    def _usual_side(self) -> Any:
        if self.task == "text-recognition":
            return _LINE_OF_TEXT
        if self.task in DETECTS:
            windows = self.size("num_windows", default=1) * self.size("patch_size", default=1)
            return _DETECTION_SIDE // windows * windows if isinstance(windows, int) else _DETECTION_SIDE
        return _DOCUMENT_SIDE if self.size("image_token_id", "image_token_index") is not None else _SIDE

    def pixels(self) -> torch.Tensor:
        return self.numbers(self.batch, *self.image)


DETECTS = frozenset(
    "object-detection zero-shot-object-detection universal-segmentation instance-segmentation "
    "image-segmentation".split()
)
"""Tasks that find the objects of an image."""

CAPTIONED = frozenset(
    "zero-shot-image-classification zero-shot-object-detection visual-question-answering".split()
) | {"base", "pretraining"}


def _parts(config: Any) -> Iterator[Any]:
    """The configuration and those inside it, outer ones first."""
    waiting = [config]
    while waiting:
        part = waiting.pop(0)
        yield part
        waiting += [
            value
            for name in getattr(part, "sub_configs", ())
            if hasattr(value := getattr(part, name, None), "sub_configs")
        ]
