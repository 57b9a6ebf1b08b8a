"""Makes images as transformers' models take them: whole, cut into patches that are packed, in tiles, as
videos."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from foretrain.capture.sources.transformers.shapes import Shapes
from foretrain.capture.tracing.probing import probe
from foretrain.errors import InputError

_FRAMES = 8
REGIONS = 36
"""Regions of an image that a detector has described."""


def _side(value: Any) -> int:
    return int(value[-1] if isinstance(value, list | tuple) else value)


def _grid(shapes: Shapes) -> tuple[int, int, int]:
    """Frames, rows and columns of patches of an image; rows and columns are merged in squares."""
    vision = shapes.vision
    patch = _side(getattr(vision, "patch_size", 14))
    merge = int(shapes.size("spatial_merge_size", default=2))
    _, height, width = shapes.image
    rows, columns = (max(side // (patch * merge), 1) * merge for side in (height, width))
    return 1, rows, columns


def _grids(shapes: Shapes) -> torch.Tensor | None:
    if getattr(shapes.config, "vision_config", 0) is None:
        return None
    return shapes.known([_grid(shapes)] * shapes.batch)


def _packed(shapes: Shapes) -> torch.Tensor:
    """The patches of all images in one dimension, each as a row of numbers."""
    frames, rows, columns = _grid(shapes)
    vision = shapes.vision
    channels = shapes.image[0]
    depth = int(shapes.size("temporal_patch_size", "patch_temporal", default=1))
    patches, side = shapes.batch * frames * rows * columns, _side(vision.patch_size)
    if shapes.config.model_type.startswith(_SMALL_IMAGES):
        images = shapes.numbers(patches, channels, side, side)
        return images[None] if shapes.config.model_type == "paddleocr_vl_vision" else images
    return shapes.numbers(patches, channels * depth * side**2)


_SMALL_IMAGES = ("paddleocr_vl", "kimi_k25")
"""Types whose patches are given as images."""


def _pixel_values(shapes: Shapes) -> torch.Tensor | None:
    names = set(shapes.signature)
    if getattr(shapes.config, "vision_config", 0) is None:
        return None
    if shapes.config.model_type in _UNSEEN:
        shapes.note("text alone: the tokens of an image depend on data")
        return None
    pixels = shapes.image
    if {"image_grid_thw", "grid_thw"} & names:
        packed = _packed(shapes)
        padded = shapes.config.model_type in _PADDED
        return packed.view(shapes.batch, -1, packed.shape[-1]) if padded else packed
    if shapes.config.model_type in _ROWS:
        side = _side(shapes.vision.patch_size)
        patches = (pixels[1] // side) * (pixels[2] // side)
        return shapes.numbers(shapes.batch, patches, pixels[0] * side**2)
    if shapes.config.model_type.startswith(_CUBES):
        side, depth = _side(shapes.vision.patch_size), int(shapes.size("temporal_patch_size", default=1))
        patches = shapes.batch * (pixels[1] // side) * (pixels[2] // side)
        return shapes.numbers(patches, depth, side, side, pixels[0])
    if "prompt_pixel_values" in names:
        return _half(shapes)
    if {"target_sizes"} & names:
        return _strip(shapes)
    if {"image_position_ids", "pixel_position_ids"} & names:
        rows, columns = _pooled_patches(shapes)
        return shapes.numbers(shapes.batch, rows * columns, pixels[0] * _side(shapes.vision.patch_size) ** 2)
    if "spatial_shapes" in names:
        rows, columns = _patches(shapes)
        return shapes.numbers(shapes.batch, rows * columns, pixels[0] * _side(shapes.vision.patch_size) ** 2)
    if "aspect_ratio_ids" in names:
        return shapes.numbers(shapes.batch, 1, _tiles(shapes), *pixels)
    if (frames := shapes.size("num_frames")) is not None and shapes.config.model_type not in _FRAMES_APART:
        return _video(shapes, frames)
    if shapes.task == "keypoint-matching":
        return shapes.numbers(shapes.batch, 2, *pixels)
    if {"pixel_attention_mask", "perceiver_embeddings"} & names or shapes.config.model_type in _LISTED:
        return shapes.numbers(shapes.batch, 1, *pixels)
    if (crops := _crops(shapes)) is not None:
        return shapes.numbers(shapes.batch, crops, *pixels)
    return shapes.pixels()


_UNSEEN = ("chameleon", "emu3")
"""Types that write an image as tokens of their vocabulary."""

_PADDED = ("colqwen2",)
"""Types whose packed patches have a dimension for images again."""

_ROWS = ("fuyu", "molmo2_vision")
"""Types that take the patches of an image as rows."""

_CUBES = ("inkling",)
"""Types that take patches as short videos, colours last."""

_FRAMES_APART = ("xclip_vision_model",)
"""Types that take the frames of a video as images."""

_LISTED = ("colmodernvbert", "instructblipvideo")
"""Types that take a list of images for each text, though their code does not name a mask of them."""


def _half(shapes: Shapes) -> torch.Tensor:
    """An image beside which a model puts another of its size, one above the other."""
    channels, height, width = shapes.image
    return shapes.numbers(shapes.batch, channels, height // 2, width)


def _strip(shapes: Shapes) -> torch.Tensor:
    """The patches of all images one beside another, as one long image."""
    side = _side(shapes.vision.patch_size)
    rows, columns = _target(shapes)
    return shapes.numbers(1, shapes.image[0], side, shapes.batch * rows * columns * side)


def _target(shapes: Shapes) -> tuple[int, int]:
    """Rows and columns of patches; four by four of them are merged."""
    _, height, width = shapes.image
    side = 4 * _side(shapes.vision.patch_size)
    return 4 * max(height // side, 1), 4 * max(width // side, 1)


def _pooled_patches(shapes: Shapes) -> tuple[int, int]:
    pool = int(shapes.size("pooling_kernel_size", default=3))
    _, height, width = shapes.image
    side = pool * _side(shapes.vision.patch_size)
    return pool * max(height // side, 1), pool * max(width // side, 1)


def _patch_places(shapes: Shapes) -> torch.Tensor | None:
    if getattr(shapes.config, "vision_config", 0) is None:
        return None
    rows, columns = _pooled_patches(shapes)
    places = torch.cartesian_prod(torch.arange(columns), torch.arange(rows))
    return shapes.known(places.expand(shapes.batch, -1, -1))


def _patches(shapes: Shapes) -> tuple[int, int]:
    """Rows and columns of an image that is given as a list of patches."""
    side = math.isqrt(int(shapes.size("num_patches", default=256)))
    return side, side


def _tiles(shapes: Shapes) -> int:
    return int(shapes.size("max_num_tiles", default=4))


def _crops(shapes: Shapes) -> int | None:
    """Parts in which the model sees an image of its own size, and the whole beside them."""
    points = shapes.size("image_grid_pinpoints")
    count = getattr(sys.modules[type(shapes.module).__module__], "image_size_to_num_patches", None)
    if points is None or count is None:
        return None
    _, height, width = shapes.image
    return int(count((height, width), points, height))


def _video(shapes: Shapes, frames: int | None = None) -> torch.Tensor:
    frames = frames or shapes.size("num_frames", "frames_per_clip", default=_FRAMES)
    return shapes.numbers(shapes.batch, int(frames), *shapes.image)


def _image_sizes(shapes: Shapes) -> torch.Tensor | None:
    """For models that cut images of any size; a tower of fixed size is not told."""
    towers = {getattr(part, "model_type", None) for part in shapes.parts}
    if shapes.size("image_grid_pinpoints") is None and not towers & _ANY_SIZE:
        return None
    _, height, width = shapes.image
    return shapes.known([(height, width)] * shapes.batch)


_ANY_SIZE = {"pixtral", "emu3"}
"""Types whose images have sizes of their own."""


def _hidden_states(shapes: Shapes) -> torch.Tensor | None:
    """What the first layer of a tower is given where that is patches."""
    if "grid_thw" in shapes.signature:
        return _packed(shapes)
    return shapes.pixels() if shapes.config.model_type == "florence_vision" else None


def _patch_mask(shapes: Shapes) -> torch.Tensor | None:
    """Which patches of a list are there; a model of whole images needs none."""
    if "spatial_shapes" not in shapes.signature:
        return None
    rows, columns = _patches(shapes)
    return shapes.ones(shapes.batch, rows * columns)


def _flattened(shapes: Shapes) -> torch.Tensor:
    """Patches as rows, each led by its place."""
    width = int(shapes.size("patch_embed_hidden_size", default=768))
    return shapes.numbers(shapes.batch, int(shapes.size("max_num_patches", default=2048)), 2 + width)


def _tile_mask(shapes: Shapes) -> torch.Tensor | None:
    if "aspect_ratio_ids" not in shapes.signature:
        return None
    return shapes.ones(shapes.batch, shapes.length, 1, _tiles(shapes))


def _merges(shapes: Shapes) -> torch.Tensor:
    return shapes.known([int(shapes.size("spatial_merge_size", default=2))] * shapes.batch)


def _texts(shapes: Shapes) -> int:
    """Texts that a model of tasks compares its queries with, beside those that it has learnt."""
    return int(shapes.size("num_queries")) - int(shapes.size("text_encoder_n_ctx", default=16))


def _latent_places(shapes: Shapes) -> torch.Tensor:
    """The tokens whose places the vectors of an image take."""
    count = int(shapes.size("latent_query_num", default=64))
    if shapes.length <= count:
        raise too_short(shapes, shapes.length, count + 1)
    places = torch.zeros(shapes.batch, shapes.length, dtype=torch.long)
    places[:, 1 : 1 + count] = 1
    return shapes.known(places)


def too_short(shapes: Shapes, length: int, needed: int) -> InputError:
    return InputError(
        f"training.sequence: {length} is too short for the {needed - 1} tokens that images and sound take in "
        f"{shapes.config.model_type}; give {needed} or more"
    )


IMAGES: dict[str, Callable[[Shapes], Any]] = {
    "pixel_values": _pixel_values,
    "pixel_values_videos": _video,
    "hidden_states": _hidden_states,
    "grid_thw": _grids,
    "image_grid_thw": _grids,
    "image_sizes": _image_sizes,
    "spatial_shapes": lambda shapes: shapes.known([_patches(shapes)] * shapes.batch),
    "pixel_attention_mask": _patch_mask,
    "flattened_patches": _flattened,
    "aspect_ratio_ids": lambda shapes: shapes.ones(shapes.batch, 1),
    "aspect_ratio_mask": lambda shapes: shapes.ones(shapes.batch, 1, _tiles(shapes)),
    "cross_attention_mask": _tile_mask,
    "image": Shapes.pixels,
    "prompt_pixel_values": _half,
    "prompt_masks": _half,
    "image_attention_mask": lambda shapes: (
        shapes.ones(shapes.batch, shapes.length, 1) if "perceiver_embeddings" in shapes.signature else None
    ),
    "visual_embeds": lambda shapes: shapes.numbers(
        shapes.batch, REGIONS, int(shapes.size("visual_embedding_dim", default=512))
    ),
    "visual_attention_mask": lambda shapes: (
        shapes.ones(shapes.batch, REGIONS) if "visual_embeds" in shapes.signature else None
    ),
    "visual_feats": lambda shapes: shapes.numbers(shapes.batch, REGIONS, int(shapes.size("visual_feat_dim"))),
    "visual_pos": lambda shapes: shapes.numbers(shapes.batch, REGIONS, 4),
    "high_res_pixel_values": lambda shapes: shapes.numbers(shapes.batch, 3, 1024, 1024),
    "target_sizes": lambda shapes: shapes.known([_target(shapes)] * shapes.batch),
    "image_position_ids": _patch_places,
    "pixel_position_ids": _patch_places,
    "merge_sizes": _merges,
    "image_merge_sizes": _merges,
    "image_embeds_position_mask": _latent_places,
    "text_inputs": lambda shapes: (
        shapes.ones(shapes.batch, _texts(shapes), int(shapes.size("task_seq_len", default=77)))
        if "task_inputs" in shapes.signature
        else None
    ),
    "task_inputs": lambda shapes: shapes.known(
        torch.ones(shapes.batch, int(shapes.size("task_seq_len", default=77)))
    ),
}
"""What makes an input of this name; None where the model can do without."""


def image_tokens(shapes: Shapes, features: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The tokens that stand for images and sound in a text, with how many of each a sample has."""
    tokens = []
    for kind, first in (("image", "pixel_values"), ("audio", "input_features"), ("audio", "input_values")):
        names = (f"{kind}_token_id", f"{kind}_token_index")
        if first not in features or not any(hasattr(part, name) for part in shapes.parts for name in names):
            continue
        if kind == "audio" and shapes.config.model_type in _HALVED:
            tokens.append((_token(shapes, kind, names), int(shapes.size("max_source_positions")) // 2))
        elif (method := tower(shapes, kind)) is not None:
            tokens.append((_token(shapes, kind, names), _rows(shapes, method, features) // shapes.batch))
    return tokens


_HALVED = ("qwen2_audio",)
"""Types without a method for sound, which give a row for every second position of their encoder."""


def tower(shapes: Shapes, kind: str) -> Callable[..., Any] | None:
    """The method that turns images or sound into rows among those of the text."""
    for owner in (getattr(shapes.module, "model", None), getattr(shapes.module, "vlm", None), shapes.module):
        method: Callable[..., Any] | None = getattr(owner, f"get_{kind}_features", None)
        if method is not None:
            return method
    return None


def _token(shapes: Shapes, kind: str, names: tuple[str, str]) -> int:
    """The token that stands for an image; a default configuration may name none, or one that its vocabulary
    does not have: then one of its last."""
    token = shapes.size(*names)
    rows = getattr(shapes.module.get_input_embeddings(), "num_embeddings", shapes.vocabulary)
    if token is not None and 0 <= token < rows:
        return int(token)
    token = rows - (1 if kind == "image" else 2)
    for part in shapes.parts:
        for name in names:
            if hasattr(part, name):
                setattr(part, name, token)
    return int(token)


def _rows(shapes: Shapes, method: Callable[..., Any], features: Mapping[str, Any]) -> int:
    """Rows that a tower gives for these features."""
    names = inspect.signature(method).parameters
    given = {name: value for name, value in features.items() if name in names}
    if shapes.device == "meta":
        output = probe(shapes.module, method, given, shapes.constants)
    else:
        with torch.no_grad():
            output = method(**given)
    return _count(output)


def _count(output: Any) -> int:
    for name in ("pooler_output", "last_hidden_state"):
        if getattr(output, name, None) is not None:
            return _count(getattr(output, name))
    if isinstance(output, list | tuple):
        return sum(map(_count, output))
    return int(output.numel() // output.shape[-1])
