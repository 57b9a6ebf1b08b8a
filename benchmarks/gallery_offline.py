"""Stands in for what the scripts of the gallery download: datasets, weights and tokenizers."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

IMAGES = {"MNIST": ((1, 28, 28), 60_000, 10_000), "CIFAR10": ((3, 32, 32), 50_000, 10_000)}
CONFIGS = {"bert-base-uncased": "BertConfig", "gpt2": "GPT2Config"}
"""Configuration classes of transformers whose defaults are these checkpoints."""

IMPORT_TORCHVISION = ("torchvision", "timm", "transformers", "lightning")


def stand_in(script: Path) -> None:
    """Replace the downloads of the libraries that a script names."""
    text = script.read_text()
    if any(library in text for library in IMPORT_TORCHVISION):
        _torchvision()
    if "timm" in text:
        _timm()
    if "transformers" in text:
        _transformers()


def _torchvision() -> None:
    if importlib.util.find_spec("torchvision") is None:
        return
    torchvision = _import_torchvision()
    for name, (shape, train, test) in IMAGES.items():
        setattr(torchvision.datasets, name, _images(torchvision.datasets.FakeData, shape, train, test))
    for name in ("resnet18", "resnet50"):
        build = getattr(torchvision.models, name)
        setattr(torchvision.models, name, _without(build, "weights", None))


def _import_torchvision() -> Any:
    """Import torchvision, also one that was built for another torch."""
    try:
        import torchvision
    except RuntimeError:
        from foretrain.capture.sources.zoo import import_zoo

        torchvision = import_zoo("torchvision")
    return torchvision


def _images(fake: type, shape: tuple[int, ...], train_size: int, test_size: int) -> Any:
    def dataset(root: str, train: bool = True, download: bool = False, transform: Any = None) -> Any:
        return fake(train_size if train else test_size, shape, 10, transform=transform)

    return dataset


def _without(build: Any, name: str, value: Any) -> Any:
    """A constructor that is given ``value`` whatever it is called with."""

    @functools.wraps(build)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return build(*args, **({**kwargs, name: value} if name in kwargs else kwargs))

    return wrapped


def _timm() -> None:
    import timm

    timm.create_model = _without(timm.create_model, "pretrained", False)


def _transformers() -> None:
    import transformers

    def from_pretrained(cls: Any, /, name: str, **options: Any) -> Any:
        return cls.from_config(getattr(transformers, CONFIGS[name])(**options))

    for auto in ("AutoModelForCausalLM", "AutoModelForSequenceClassification"):
        getattr(transformers, auto).from_pretrained = classmethod(from_pretrained)
    transformers.AutoTokenizer.from_pretrained = lambda name, **_: Tokenizer()


class Tokenizer:
    """Turns words into numbers and pads them to one length."""

    def __call__(self, texts: list[str], max_length: int, **_: Any) -> dict[str, Any]:
        import torch

        ids = torch.zeros(len(texts), max_length, dtype=torch.long)
        for row, text in enumerate(texts):
            words = torch.tensor([sum(map(ord, word)) % 30_000 for word in text.split()[:max_length]])
            ids[row, : len(words)] = words
        return {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "attention_mask": (ids > 0).long()}
