"""Images as transformers' models take them: whole, cut into patches that are packed, in tiles, as videos."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from foretrain.capture.sources.transformers.shapes import Shapes
from foretrain.capture.tracing.probing import probe

_FRAMES = 8


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


def _grids(shapes: Shapes) -> torch.Tensor:
    return shapes.known([_grid(shapes)] * shapes.batch)


def _packed(shapes: Shapes) -> torch.Tensor:
    """The patches of all images in one dimension, each as a row of numbers."""
    frames, rows, columns = _grid(shapes)
    vision = shapes.vision
    channels = shapes.image[0]
    depth = int(getattr(vision, "temporal_patch_size", 1) or 1)
    return shapes.numbers(
        shapes.batch * frames * rows * columns, channels * depth * _side(vision.patch_size) ** 2
    )


def _pixel_values(shapes: Shapes) -> torch.Tensor:
    if {"image_grid_thw", "grid_thw"} & set(shapes.signature):
        return _packed(shapes)
    if (frames := shapes.size("num_frames")) is not None:
        return _video(shapes, frames)
    return shapes.pixels()


def _video(shapes: Shapes, frames: int | None = None) -> torch.Tensor:
    frames = frames or shapes.size("num_frames", "frames_per_clip", default=_FRAMES)
    return shapes.numbers(shapes.batch, int(frames), *shapes.image)


def _image_sizes(shapes: Shapes) -> torch.Tensor:
    _, height, width = shapes.image
    return shapes.known([(height, width)] * shapes.batch)


def _hidden_states(shapes: Shapes) -> torch.Tensor | None:
    return _packed(shapes) if "grid_thw" in shapes.signature else None


IMAGES: dict[str, Callable[[Shapes], Any]] = {
    "pixel_values": _pixel_values,
    "pixel_values_videos": _video,
    "hidden_states": _hidden_states,
    "grid_thw": _grids,
    "image_grid_thw": _grids,
    "image_sizes": _image_sizes,
}
"""What makes an input of this name; None where the model can do without."""


def image_tokens(shapes: Shapes, features: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The tokens that stand for images and sound in a text, with how many of each a sample has."""
    found = []
    for kind, first in (("image", "pixel_values"), ("audio", "input_features"), ("audio", "input_values")):
        token = shapes.size(f"{kind}_token_id", f"{kind}_token_index")
        if token is None or first not in features:
            continue
        for owner in (shapes.module, getattr(shapes.module, "model", None)):
            method = getattr(owner, f"get_{kind}_features", None)
            if method is not None:
                found.append((_in_vocabulary(shapes, kind, token), _rows(shapes, method, features) // shapes.batch))
                break
    return found


def _in_vocabulary(shapes: Shapes, kind: str, token: int) -> int:
    """A default configuration may name a token that its vocabulary does not have: then its last ones stand
    in."""
    rows = shapes.vocabulary
    embedding = shapes.module.get_input_embeddings()
    rows = getattr(embedding, "num_embeddings", rows)
    if token < rows:
        return token
    token = rows - (1 if kind == "image" else 2)
    for part in shapes.parts:
        for name in (f"{kind}_token_id", f"{kind}_token_index"):
            if isinstance(getattr(part, name, None), int):
                setattr(part, name, token)
    return token


def _rows(shapes: Shapes, method: Callable[..., Any], features: Mapping[str, Any]) -> int:
    """Rows that a tower gives for these features."""
    import inspect

    names = inspect.signature(method).parameters
    given = {name: value for name, value in features.items() if name in names}
    if shapes.device == "meta":
        output = probe(shapes.module, method, given)
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
