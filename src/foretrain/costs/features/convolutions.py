"""Describes convolutions: their sizes and layouts, and the products that they are made of."""

from __future__ import annotations

from foretrain.costs.features.scene import PRODUCT, Scene, alignment, log
from foretrain.costs.features.sizes import Convolution
from foretrain.graph.opset import traits


def _shape(scene: Scene, conv: Convolution) -> list[float]:
    """Sizes, layout, and how long each operand takes to be moved.

    A 1x1 convolution is one product over all samples where the channels lie side by side, else one for each,
    and groups and videos have kernels of their own in either layout.
    """
    per_us = scene.bandwidth / scene.item * 1e-6
    return [
        *(log(elements / per_us) for elements in conv.moved),
        log(1 + conv.convertible / per_us),
        *map(log, (conv.c, conv.k, conv.groups, conv.inside, conv.window)),
        float(conv.stride),
        float(conv.dilated),
        *map(alignment, (conv.c, conv.k, conv.inside)),
        log(1 + conv.repacked / per_us),
        log(1 + conv.added / per_us),
        log(max(scene.compute_s, scene.memory_s) / conv.groups / 1e-6),
        log(conv.n),
        float(conv.channels_last and conv.own_kernels),
        float(conv.channels_last and not conv.own_kernels),
        float(conv.rank),
        log(conv.k / conv.c),
        float(conv.transposed),
    ]


SHAPE = tuple(
    "input_us output_us weight_us convertible_us channels filters groups inside window stride dilated "
    "align_channels align_filters align_inside repacked_us added_us group_us samples "
    "last dense_last rank widening transposed".split()
)
ONE_DEVICE = frozenset({"dense_last"})
"""Figures that hold on the device alone that they were measured on: what dense convolutions gain in NHWC is
another thing on each generation."""


def convolution(scene: Scene) -> list[float]:
    conv = scene.convolution
    assert conv is not None
    return [
        *_shape(scene, conv),
        *scene.product(conv.n * conv.outside, conv.k, conv.c * conv.window, conv.groups),
    ]


def convolution_backward(scene: Scene) -> list[float]:
    """The gradients of a convolution that are asked for, each as the product that it is."""
    conv = scene.convolution
    assert conv is not None
    mask: list[bool] = scene.call.args["output_mask"]
    return [
        *_shape(scene, conv),
        *(float(wanted) for wanted in mask),
        *scene.product(conv.n * conv.inside, conv.c, conv.k * conv.window, conv.groups),
        *scene.product(conv.k, conv.c * conv.window, conv.n * conv.outside, conv.groups),
    ]


BACKWARD = (
    *SHAPE,
    *("to_input", "to_weight", "to_bias"),
    *(f"input_{name}" for name in PRODUCT),
    *(f"weight_{name}" for name in PRODUCT),
)


def depthwise(scene: Scene) -> list[float]:
    """Describe a depthwise convolution, with its layout: the kernels of either have nothing in common."""
    conv = scene.convolution
    assert conv is not None
    return [
        *(convolution_backward if traits(scene.call.name).backward else convolution)(scene),
        float(conv.channels_last),
    ]
