"""Feeds a training with batches that worker processes make: pictures decoded and cut, text split into tokens,
or samples at a given rate."""

from __future__ import annotations

import io
import itertools
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from foretrain.errors import invalid

Kind = Literal["decode", "crop", "noise", "tokenize", "slice", "paced"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PREFETCH = 2
"""Batches that each worker makes ahead, torch's default."""
_STORED, _BORDER, _QUALITY = 64, 1.15, 90
"""Samples that are kept in memory and drawn from; stored pictures are a little larger than what is cut from
them."""
_MEAN, _DEVIATION = 118.0, 58.0
_WORDS, _TEXTS = 4000, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """Says how batches are made: the kind of work, and by how many processes."""

    kind: Kind
    workers: int = 1
    rate: float | None = None
    """Samples per second of one worker; of "paced" alone."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise invalid("loader", self.kind, f"one of {', '.join(KINDS)}")
        if (self.kind == "paced") != (self.rate is not None):
            raise invalid("loader rate", self.rate, 'a rate for "paced", and none for the others')


def fed_input(inputs: Any) -> tuple[Any, torch.Tensor]:
    """The input that is loaded, with its key or place: the largest tensor of what a model is called with."""
    items = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs)
    tensors = [(key, value) for key, value in items if isinstance(value, torch.Tensor) and value.dim()]
    if not tensors:
        raise invalid("inputs", "", "a tensor among them that can be loaded")
    return max(tensors, key=lambda item: (item[0] == "input_ids", item[1].numel()))


class Batches(Dataset[dict[str, torch.Tensor]]):
    """Batches of samples in the shape of ``like``, each made anew; with the seconds that it took."""

    def __init__(self, loader: Loader, like: torch.Tensor) -> None:
        self.loader, self.shape = loader, tuple(like.shape)
        self.floating = like.is_floating_point()
        make = getattr(self, f"_{loader.kind}")
        self._stored: list[Any] = list(self._store())
        self._make = make

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        begin = time.perf_counter()
        draw = random.Random(index)
        batch = torch.stack([self._make(draw) for _ in range(self.shape[0])])
        took_s = time.perf_counter() - begin
        if self.loader.rate is not None:
            wanted_s = self.shape[0] / self.loader.rate
            time.sleep(max(0.0, wanted_s - took_s))
            took_s = max(took_s, wanted_s)
        return {"batch": batch, "seconds": torch.tensor(took_s)}

    # What is drawn from

    def _store(self) -> Iterator[Any]:
        draw = np.random.default_rng(0)
        sample = self.shape[1:]
        if self.loader.kind in ("decode", "crop"):
            channels, height, width = sample[-3:]
            sides = round(height * _BORDER) + 8, round(width * _BORDER) + 8
            for _ in range(_STORED):
                coarse = draw.integers(
                    0, 256, (sides[0] // 8 + 1, sides[1] // 8 + 1, channels), dtype=np.uint8
                )
                picture = coarse.repeat(8, axis=0).repeat(8, axis=1)[: sides[0], : sides[1]]
                yield _jpeg(picture) if self.loader.kind == "decode" else picture
        elif self.loader.kind == "tokenize":
            letters = "etaoinshrdlucmfwyp"
            words = ["".join(draw.choice(list(letters), draw.integers(2, 11))) for _ in range(_WORDS)]
            for _ in range(_TEXTS):
                yield [words[i] for i in draw.integers(0, _WORDS, sample[-1])]
        elif self.floating:
            for _ in range(8):
                yield torch.from_numpy(draw.normal(size=sample).astype(np.float32))
        else:
            yield torch.from_numpy(draw.integers(0, 1000, (1 << 20,)))

    # A sample of each kind

    def _decode(self, draw: random.Random) -> torch.Tensor:
        """A JPEG picture, a random part of it in the model's size, perhaps mirrored, as numbers around 0."""
        from PIL import Image

        height, width = self.shape[-2:]
        picture = Image.open(io.BytesIO(draw.choice(self._stored))).convert("RGB")
        share = draw.uniform(0.6, 1.0)
        size = (picture.width * share, picture.height * share)
        left, top = (draw.uniform(0, whole - part) for whole, part in zip(picture.size, size, strict=True))
        box = (left, top, left + size[0], top + size[1])
        cut = picture.resize((width, height), Image.Resampling.BILINEAR, box=box)
        return self._numbers(np.asarray(cut), draw)

    def _crop(self, draw: random.Random) -> torch.Tensor:
        """A random part of a picture that is there already."""
        height, width = self.shape[-2:]
        picture = draw.choice(self._stored)
        top, left = draw.randrange(picture.shape[0] - height), draw.randrange(picture.shape[1] - width)
        return self._numbers(picture[top : top + height, left : left + width], draw)

    def _numbers(self, picture: Any, draw: random.Random) -> torch.Tensor:
        turned = torch.from_numpy(np.array(picture[:, ::-1] if draw.random() < 0.5 else picture))
        scaled = turned.permute(2, 0, 1).float().sub_(_MEAN).div_(_DEVIATION)
        return scaled.reshape(self.shape[1:]).contiguous()

    def _noise(self, draw: random.Random) -> torch.Tensor:
        """A stored sample with noise added."""
        stored: torch.Tensor = draw.choice(self._stored)
        return stored + 0.1 * torch.randn(stored.shape)

    def _slice(self, draw: random.Random) -> torch.Tensor:
        """A sample as it is stored: a copy, or so many tokens of a long text."""
        if self.floating:
            copied: torch.Tensor = draw.choice(self._stored).clone()
            return copied
        count = int(np.prod(self.shape[1:], dtype=np.int64))
        start = draw.randrange(len(self._stored[0]) - count)
        part: torch.Tensor = self._stored[0][start : start + count]
        return part.reshape(self.shape[1:]).clone()

    _paced = _slice

    def _tokenize(self, draw: random.Random) -> torch.Tensor:
        """A text split into pieces of words by merging pairs, as byte-pair encodings do."""
        words = draw.choice(self._stored)
        tokens: list[int] = []
        while len(tokens) < self.shape[-1]:
            tokens.extend(_pieces(words[draw.randrange(len(words))]))
        return torch.tensor(tokens[: self.shape[-1]])


def _jpeg(picture: Any) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture[..., :3]).save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def _pieces(word: str) -> list[int]:
    """Tokens of a word: the pair that ranks first is merged until three pieces are left."""
    pieces = list(word)
    while len(pieces) > 3:
        ranks = [_rank(a, b) for a, b in itertools.pairwise(pieces)]
        first = ranks.index(min(ranks))
        pieces[first : first + 2] = [pieces[first] + pieces[first + 1]]
    return [sum(map(ord, piece)) % 1000 for piece in pieces]


def _rank(a: str, b: str) -> int:
    return (31 * ord(a[0]) + 7 * ord(b[-1]) + len(a) * len(b)) % 997


class Feed:
    """Batches for a model in the ``with`` block, in pinned memory where they go to a GPU."""

    def __init__(self, loader: Loader, like: torch.Tensor) -> None:
        self._device, self._dtype = like.device, like.dtype
        self._loader = DataLoader(
            Batches(loader, like),
            batch_size=None,
            shuffle=False,
            sampler=range(1 << 30),
            num_workers=loader.workers,
            prefetch_factor=PREFETCH,
            pin_memory=like.is_cuda,
            multiprocessing_context="fork",
        )
        self._batches: Iterator[dict[str, torch.Tensor]] | None = None
        self.size_bytes = 0
        """Of the last batch, as it went to the device."""
        self.made_in_s: list[float] = []
        """What each batch took a worker."""

    def __enter__(self) -> Self:
        self._batches = iter(self._loader)
        return self

    def __exit__(self, *_: object) -> None:
        batches, self._batches = self._batches, None
        if batches is not None and hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()

    def next(self) -> torch.Tensor:
        """The next batch, on its way to the device."""
        assert self._batches is not None
        made = next(self._batches)
        self.made_in_s.append(float(made["seconds"]))
        self.size_bytes = made["batch"].nbytes
        return made["batch"].to(self._device, non_blocking=True).to(self._dtype)
