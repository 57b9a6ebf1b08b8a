"""Checks the inputs of a model against what its job says of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from foretrain.capture.sources.loaded import numbers
from foretrain.errors import InputError
from foretrain.workload import Training


def tensors_of(inputs: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(inputs) if isinstance(value, torch.Tensor) and value.dim()]


def holds(inputs: Any, batch: int) -> bool:
    """Whether the first input has one row per sample; any batch does where there is no tensor to tell."""
    tensors = tensors_of(inputs)
    return not tensors or tensors[0].shape[0] == batch


def check_batch(name: str, batch: int, inputs: Any, twice: Any) -> None:
    """Inputs that are laid out otherwise (time first, all nodes of several graphs) must at least grow with
    the batch; a whole dataset at once is a batch of one."""
    shapes, others = ([tuple(tensor.shape) for tensor in tensors_of(value)] for value in (inputs, twice))
    if shapes == others and batch > 1:
        raise InputError(
            f"training.global_batch: model {name} returns inputs of shape {list(shapes[0])} "
            f"whatever the batch is; the job asks for {batch} samples at once "
            "(a whole dataset at once is a batch of 1)"
        )


def check_inputs(
    what: str, inputs: Any, batch: int, *, sequence: int | None, image: tuple[int, ...] | None
) -> None:
    """Refuse a sequence length or an image size of the job that a model's own inputs do not have; rows of
    features are no sequences."""
    tensors = list(tensors_of(inputs))
    shapes = [tuple(tensor.shape) for tensor in tensors]
    shown = " and ".join(str(list(shape)) for shape in shapes[:3]) or "no shape"
    tokens = [tuple(one.shape) for one in tensors if one.dim() > 2 or not one.is_floating_point()]
    if sequence is not None and not any({sequence, batch * sequence} & set(shape) for shape in tokens):
        raise InputError(f"training.sequence: {sequence} is not what {what} is given: inputs of {shown}")
    if image is not None and not any(shape[-3:] == tuple(image) for shape in shapes):
        raise InputError(f"training.image: {list(image)} is not what {what} is given: inputs of {shown}")


def check_classes(what: str, module: torch.nn.Module, classes: int | None) -> None:
    """Refuse a number of classes that no weight of a model, which the job does not build, has."""
    if classes is not None and not any(classes in weight.shape for weight in module.parameters()):
        raise InputError(f"training.classes: {classes} is not what {what} has: no weight is {classes} wide")


def default_inputs(training: Training, batch: int, device: str) -> tuple[torch.Tensor, ...]:
    """What a model is given where it brings no inputs: images or token ids, as the job says."""
    if training.image_shape is not None and training.sequence is not None:
        raise InputError(
            "training.sequence: not used beside training.image; the model has one of the two inputs"
        )
    if training.image_shape is not None:
        return (numbers((batch, *training.image_shape), device),)
    if training.sequence is not None:
        make = torch.empty if device == "meta" else torch.zeros
        return (make(batch, training.sequence, dtype=torch.long, device=device),)
    raise InputError(
        "training.image: missing; the model function returned "
        "no inputs, so give training.image or training.sequence"
    )
