"""Stands in for what a training program would download: weights, configurations, tokenizers, datasets."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import unittest.mock
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from foretrain.capture.programs.surroundings import checkpoints, trackers
from foretrain.capture.sources.zoo import installed
from foretrain.errors import InputError

_DATASETS: dict[str, tuple[int, int, tuple[int, int], str, int]] = {
    "MNIST": (60_000, 10_000, (28, 28), "L", 10),
    "FashionMNIST": (60_000, 10_000, (28, 28), "L", 10),
    "KMNIST": (60_000, 10_000, (28, 28), "L", 10),
    "EMNIST": (697_932, 116_323, (28, 28), "L", 62),
    "USPS": (7_291, 2_007, (16, 16), "L", 10),
    "CIFAR10": (50_000, 10_000, (32, 32), "RGB", 10),
    "CIFAR100": (50_000, 10_000, (32, 32), "RGB", 100),
    "SVHN": (73_257, 26_032, (32, 32), "RGB", 10),
    "STL10": (5_000, 8_000, (96, 96), "RGB", 10),
    "GTSRB": (26_640, 12_630, (50, 50), "RGB", 43),
    "Flowers102": (1_020, 6_149, (500, 500), "RGB", 102),
    "Food101": (75_750, 25_250, (512, 512), "RGB", 101),
    "OxfordIIITPet": (3_680, 3_669, (500, 375), "RGB", 37),
    "ImageNet": (1_281_167, 50_000, (500, 375), "RGB", 1000),
    "ImageFolder": (1_281_167, 50_000, (500, 375), "RGB", 1000),
}
"""Images for training and testing, their width and height, mode and classes, as torchvision's documentation
and the datasets' papers give them; where sizes differ, a usual one. A folder of images is like ImageNet."""


@contextlib.contextmanager
def standing_in(text: str, note: Callable[[str], None]) -> Iterator[None]:
    """Inside of this block nothing is downloaded: libraries that the text of a program names give models
    without their weights, and data of the right form. ``note`` is told what was made up."""
    patches: list[Any] = [
        unittest.mock.patch("torch.hub.load_state_dict_from_url", _no_weights),
        unittest.mock.patch("torch.hub.download_url_to_file", _no_weights),
    ]
    patches += [*trackers(text), *checkpoints(note)]
    if "torchvision" in text and installed("torchvision"):
        patches += _torchvision(note)
    if "timm" in text and installed("timm"):
        builder = importlib.import_module("timm.models._builder")
        patches.append(unittest.mock.patch.object(builder, "load_pretrained", _no_weights))
    if "transformers" in text and installed("transformers"):
        patches += _transformers(note)
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def _no_weights(*_args: Any, **_kwargs: Any) -> dict[str, Any]:
    return {}


# torchvision


def _torchvision(note: Callable[[str], None]) -> list[Any]:
    api = importlib.import_module("torchvision.models._api")
    datasets = importlib.import_module("torchvision.datasets")
    patches: list[Any] = [unittest.mock.patch.object(api.WeightsEnum, "get_state_dict", _no_weights)]
    for name in _DATASETS:
        if (kind := getattr(datasets, name, None)) is not None:
            patches.append(unittest.mock.patch.object(kind, "__init__", _absent_or_own(kind, name, note)))
            patches.append(unittest.mock.patch.object(kind, "__getitem__", _item_or_own(kind)))
            patches.append(unittest.mock.patch.object(kind, "__len__", _length_or_own(kind)))
    return patches


def _absent_or_own(kind: Any, name: str, note: Callable[[str], None]) -> Callable[..., None]:
    original = kind.__init__

    def init(self: Any, root: Any = None, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, root, *args, **{**kwargs, **({"download": False} if "download" in kwargs else {})})
        except (RuntimeError, OSError, ValueError):
            training, testing, size, mode, classes = _DATASETS[name]
            trains = kwargs.get("train", kwargs.get("split", "train")) in (True, "train", "trainval")
            if args and isinstance(args[0], bool | str):
                trains = args[0] in (True, "train", "trainval")
            self.made_up = (training if trains else testing, size, mode, classes)
            given = inspect.signature(original).bind_partial(self, root, *args, **kwargs).arguments
            self.transform = given.get("transform", kwargs.get("transform"))
            self.target_transform = given.get("target_transform", kwargs.get("target_transform"))
            self.transforms, self.root = None, root
            labels = [str(number) for number in range(classes)]
            for field, value in (
                ("classes", labels),
                ("class_to_idx", {name: number for number, name in enumerate(labels)}),
                ("targets", [number % classes for number in range(self.made_up[0])]),
            ):
                with contextlib.suppress(AttributeError):  # a property, which is made of the others
                    setattr(self, field, value)
            missing, whose = (root, "ImageNet's") if name == "ImageFolder" else (name, "its")
            note(f"{missing} is not here: images of {whose} size and number stand in for it")

    return init


def _item_or_own(kind: Any) -> Callable[..., Any]:
    original = kind.__getitem__

    def item(self: Any, index: int) -> Any:
        if not hasattr(self, "made_up"):
            return original(self, index)
        from PIL import Image

        _, size, mode, classes = self.made_up
        image: Any = Image.new(mode, size)
        label: Any = int(index) % classes
        image = image if self.transform is None else self.transform(image)
        return image, label if self.target_transform is None else self.target_transform(label)

    return item


def _length_or_own(kind: Any) -> Callable[[Any], int]:
    original = kind.__len__
    return lambda self: self.made_up[0] if hasattr(self, "made_up") else original(self)


# transformers


def _transformers(note: Callable[[str], None]) -> list[Any]:
    import transformers
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    configuration = _configurations(note)

    def auto(cls: Any, name: Any, /, *_args: Any, config: Any = None, **kwargs: Any) -> Any:
        config = configuration(name, config, kwargs)
        return _cast(cls.from_config(config, **_attention(kwargs)), kwargs)

    def own(cls: Any, name: Any, /, *_args: Any, config: Any = None, **kwargs: Any) -> Any:
        config = configuration(name, config, kwargs)
        return _cast(cls._from_config(config, **_attention(kwargs)), kwargs)

    def of_config(_cls: Any, name: Any, **kwargs: Any) -> Any:
        return configuration(name, None, kwargs)

    def tokenizer(_cls: Any, name: Any, *_args: Any, **_kwargs: Any) -> Any:
        return Tokenizer(configuration(name, None, {}), note)

    tokenizers = [transformers.AutoTokenizer, transformers.PreTrainedTokenizerBase]
    return [
        *(
            unittest.mock.patch.object(kind, "from_pretrained", classmethod(auto))
            for kind in (_BaseAutoModelClass, *_subclasses(_BaseAutoModelClass))
            if "from_pretrained" in vars(kind)
        ),
        unittest.mock.patch.object(transformers.PreTrainedModel, "from_pretrained", classmethod(own)),
        unittest.mock.patch.object(
            transformers.AutoConfig, "from_pretrained", staticmethod(_first(of_config))
        ),
        *(_where_absent(kind, tokenizer) for kind in tokenizers),
    ]


def _subclasses(kind: type) -> Iterator[type]:
    below: type
    for below in kind.__subclasses__():
        yield below
        yield from _subclasses(below)


def _first(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(None, *args, **kwargs)


def _where_absent(kind: Any, stand_in: Callable[..., Any]) -> Any:
    original = kind.from_pretrained.__func__ if hasattr(kind.from_pretrained, "__func__") else None

    def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        if original is not None and Path(str(name)).exists():
            return original(cls, name, *args, **kwargs)
        return stand_in(cls, name, *args, **kwargs)

    return unittest.mock.patch.object(kind, "from_pretrained", classmethod(from_pretrained))


def _configurations(note: Callable[[str], None]) -> Callable[[Any, Any, Mapping[str, Any]], Any]:
    import transformers

    original = transformers.AutoConfig.from_pretrained

    def configuration(name: Any, config: Any, kwargs: Mapping[str, Any]) -> Any:
        """Of a model by name: a folder's, or a preset's; without its weights."""
        if config is not None:
            return config
        more = {
            key: value
            for key, value in kwargs.items()
            if key not in _NOT_OF_CONFIG and isinstance(value, bool | int | float | str | dict | list)
        }
        if Path(str(name)).exists():
            return original(str(name), **more)
        from foretrain.model_names import find_preset

        preset = find_preset(str(name))
        if preset is None or preset["source"] != "transformers":
            raise InputError(
                f"model {name!r}: is neither a folder nor one of `foretrain catalog models`, and nothing is "
                "downloaded; save its config.json in a folder of that name"
            )
        fields = dict(preset["config"])
        note(f"{name}: made from its configuration, without its weights")
        made = transformers.AutoConfig.for_model(fields.pop("model_type"), **{**fields, **more})
        if (
            getattr(made, "is_encoder_decoder", False)
            and getattr(made, "decoder_start_token_id", None) is None
        ):
            made.decoder_start_token_id = getattr(made, "pad_token_id", None) or 0
        return made

    return configuration


_NOT_OF_CONFIG = frozenset(
    "torch_dtype dtype device_map attn_implementation trust_remote_code revision cache_dir token "
    "low_cpu_mem_usage local_files_only force_download quantization_config ignore_mismatched_sizes "
    "use_safetensors variant use_auth_token subfolder offload_folder max_memory".split()
)


def _attention(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    wanted = kwargs.get("attn_implementation")
    return {} if wanted is None or "flash" in wanted else {"attn_implementation": wanted}


def _cast(model: Any, kwargs: Mapping[str, Any]) -> Any:
    dtype = kwargs.get("torch_dtype", kwargs.get("dtype"))
    if isinstance(dtype, str) and dtype != "auto":
        dtype = getattr(torch, dtype)
    return model.to(dtype) if isinstance(dtype, torch.dtype) else model


class Tokenizer:
    """Gives as many tokens as a text has words and a half, or as many as the program pads or cuts to."""

    padding_side = "right"
    pad_token = eos_token = unk_token = bos_token = cls_token = sep_token = mask_token = "<s>"
    pad_token_id, eos_token_id, bos_token_id, mask_token_id = 0, 1, 1, 2
    is_fast = False

    def __init__(self, config: Any, note: Callable[[str], None]) -> None:
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.vocab_size = int(getattr(text, "vocab_size", 30_000))
        self.model_max_length = int(getattr(text, "max_position_embeddings", 512) or 512)
        self._two_parts = getattr(text, "type_vocab_size", 0) == 2
        note("its tokenizer is not here: token ids of the same length stand in for texts")

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(
        self,
        text: Any = None,
        _pair: Any = None,
        *,
        text_target: Any = None,
        padding: Any = False,
        truncation: Any = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        **_kwargs: Any,
    ) -> Any:
        from transformers import BatchEncoding

        if text_target is not None:
            asked = {"padding": padding, "truncation": truncation, "max_length": max_length,
                     "return_tensors": return_tensors}  # fmt: skip
            target = self(text_target, **asked)
            return (
                target
                if text is None
                else BatchEncoding({**self(text, **asked), "labels": target["input_ids"]})
            )
        texts = [text] if isinstance(text, str) else list(text)
        longest = max_length or self.model_max_length
        lengths = [self._tokens(one) for one in texts]
        if truncation:
            lengths = [min(length, longest) for length in lengths]
        padded = longest if padding == "max_length" else max(lengths, default=1) if padding else None
        ids = [
            [3 + place % (self.vocab_size - 3) for place in range(length)]
            + [self.pad_token_id] * ((padded or length) - length)
            for length in lengths
        ]
        masks = [[1] * length + [0] * (len(row) - length) for length, row in zip(lengths, ids, strict=True)]
        data: dict[str, Any] = {"input_ids": ids, "attention_mask": masks}
        if self._two_parts:
            data["token_type_ids"] = [[0] * len(row) for row in ids]
        if isinstance(text, str) and return_tensors is None:
            data = {name: rows[0] for name, rows in data.items()}
        return BatchEncoding(data, tensor_type=return_tensors)

    def encode(self, text: str, **kwargs: Any) -> Any:
        return self(text, **kwargs)["input_ids"]

    def decode(self, *_args: Any, **_kwargs: Any) -> str:
        return ""

    def batch_decode(self, rows: Any, **_kwargs: Any) -> list[str]:
        return ["" for _ in rows]

    def pad(self, features: Any, padding: Any = True, max_length: int | None = None,
            return_tensors: str | None = None, **_kwargs: Any) -> Any:  # fmt: skip
        from transformers import BatchEncoding

        if isinstance(features, Mapping):
            return BatchEncoding(dict(features), tensor_type=return_tensors)
        longest = max(len(one["input_ids"]) for one in features)
        longest = max_length or longest if padding == "max_length" else longest
        rows = {
            name: [list(one[name]) + [0] * (longest - len(one[name])) for one in features]
            if name in ("input_ids", "attention_mask", "token_type_ids")
            else [one[name] for one in features]
            for name in features[0]
        }
        return BatchEncoding(rows, tensor_type=return_tensors)

    def add_special_tokens(self, *_args: Any, **_kwargs: Any) -> int:
        return 0

    def add_tokens(self, *_args: Any, **_kwargs: Any) -> int:
        return 0

    def apply_chat_template(self, messages: Any, tokenize: bool = True, **kwargs: Any) -> Any:
        text = " ".join(str(one.get("content", "")) for one in messages)
        return self.encode(text, **kwargs) if tokenize else text

    def save_pretrained(self, *_args: Any, **_kwargs: Any) -> tuple[str, ...]:
        return ()

    @staticmethod
    def _tokens(text: Any) -> int:
        return max(2, round(1.5 * len(str(text).split())))
