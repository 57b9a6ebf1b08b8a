"""Builds the calls whose integer inputs mean something: recurrences, bags, experts, boxes and sequences of
labels."""

from __future__ import annotations

from typing import Any

import torch

from foretrain.errors import InputError
from foretrain.measure.calls import Call, builds, call_of, make_tensors
from foretrain.measure.instances import Instance

aten = torch.ops.aten


@builds("_cudnn_rnn", "_cudnn_rnn_backward")
def _recurrence(instance: Instance, device: str) -> Call:
    """Go through the module, so that the weights lie in one buffer as they do in a model."""
    args, x_spec = instance.args, instance.inputs[0]
    kinds: dict[int, Any] = {2: torch.nn.LSTM, 3: torch.nn.GRU}
    if args.get("proj_size"):
        raise InputError("operator: recurrences with projections are not replayed")
    options: dict[str, Any] = {"nonlinearity": "relu"} if args["mode"] == 0 else {}
    layers, hidden, both = args["num_layers"], args["hidden_size"], bool(args.get("bidirectional"))
    first, packed = bool(args.get("batch_first")), args.get("batch_sizes")
    module = kinds.get(args["mode"], torch.nn.RNN)(
        x_spec.shape[-1],
        hidden,
        layers,
        batch_first=first,
        dropout=args.get("dropout", 0.0) or 0.0,
        bidirectional=both,
        device=device,
        dtype=getattr(torch, x_spec.dtype),
        **options,
    )
    x = make_tensors(instance, device, 1)[0].requires_grad_()
    batch = packed[0] if packed else x_spec.shape[0 if first else 1]
    state: Any = torch.zeros(layers * (1 + both), batch, hidden, device=device, dtype=x.dtype)
    state = (state, state.clone()) if args["mode"] == 2 else state
    sequence: Any = torch.nn.utils.rnn.PackedSequence(x, torch.tensor(packed)) if packed else x

    def forward() -> Any:
        with torch.set_grad_enabled(args.get("train", True)):
            return module(sequence, state)

    if instance.name == "_cudnn_rnn":
        return forward
    with torch.enable_grad():
        output = module(sequence, state)[0]
    output = output.data if packed else output
    gradient = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, (x, *module.parameters()), gradient, retain_graph=True)


@builds("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(instance: Instance, device: str) -> Call:
    weight, indices, offsets = make_tensors(instance, device)[:3]
    offsets = _even(len(offsets), len(indices), device)
    mode = instance.args.get("mode", 0)
    return lambda: getattr(aten, instance.name).default(weight, indices, offsets, False, mode)


@builds("_embedding_bag_backward", "_embedding_bag_dense_backward")
def _embedding_bag_backward(instance: Instance, device: str) -> Call:
    """Go through autograd: the forward pass runs once, its backward pass again and again."""
    gradient, index_spec = make_tensors(instance, device, 1)[0], instance.inputs[1]
    rows, mode = int(instance.args["num_weights"]), instance.args.get("mode", 0)
    weight = torch.randn(rows, gradient.shape[1], device=device, dtype=gradient.dtype, requires_grad=True)
    indices = torch.randint(0, rows, index_spec.shape, device=device, dtype=getattr(torch, index_spec.dtype))
    offsets = _even(gradient.shape[0], len(indices), device)
    with torch.enable_grad():
        output = aten._embedding_bag.default(weight, indices, offsets, False, mode)[0]
    return lambda: torch.autograd.grad(output, weight, gradient, retain_graph=True)


def _even(bags: int, indices: int, device: str) -> torch.Tensor:
    """Say where each of so many bags of about one size begins."""
    return torch.arange(bags, device=device) * indices // max(1, bags)


@builds("_grouped_mm", "_scaled_grouped_mm")
def _grouped_product(instance: Instance, device: str) -> Call:
    """Call a grouped product with as many rows for each expert."""
    tensors = make_tensors(instance, device)
    offsets = tensors[int(instance.args["offs"][1:])]
    groups, rows = len(offsets), _grouped_rows(instance)
    ends = torch.arange(1, groups + 1, device=device) * rows // groups
    offsets.copy_(ends // _ROWS_TOGETHER * _ROWS_TOGETHER)
    offsets[-1:] = rows
    if instance.name == "_scaled_grouped_mm":
        for scale in tensors[2:4]:
            scale.fill_(1.0)
    return call_of(instance, tensors, device)


_ROWS_TOGETHER = 16
"""What the rows of an expert are a multiple of, as its kernels ask for."""


def _grouped_rows(instance: Instance) -> int:
    """The rows that are dealt out to experts: the outer size of a product with weights, the inner one of a
    product that gives their gradients."""
    first, second = instance.inputs[:2]
    return first.shape[0] if len(second.shape) == 3 else first.shape[1]


@builds("_ctc_loss", "_ctc_loss_backward")
def _ctc_loss(instance: Instance, device: str) -> Call:
    """Sequences of full length, labels of as many as the targets hold."""
    backward = instance.name.endswith("backward")
    tensors = make_tensors(instance, device)
    scores, targets = tensors[int(backward)].log_softmax(-1), tensors[1 + int(backward)]
    times, batch, classes = scores.shape
    targets = torch.randint(1, max(2, classes), targets.shape, device=device)
    labels = targets.shape[-1] if targets.dim() > 1 else targets.shape[0] // batch
    sizes = [times] * batch, [labels] * batch
    loss, alpha = aten._ctc_loss.default(scores, targets, *sizes)
    if not backward:
        return lambda: aten._ctc_loss.default(scores, targets, *sizes)
    gradient = tensors[0].expand(batch)
    return lambda: aten._ctc_loss_backward.default(gradient, scores, targets, *sizes, loss, alpha, 0)


@builds("torchvision.roi_align", "torchvision._roi_align_backward")
def _roi_align(instance: Instance, device: str) -> Call:
    """Boxes of an eighth to all of the first images."""
    args, tensors = instance.args, make_tensors(instance, device)
    rois = tensors[int(args["rois"][1:])]
    backward = instance.name.endswith("backward")
    images, sides = (
        (args["batch_size"], [args["height"], args["width"]])
        if backward
        else (
            tensors[0].shape[0],
            tensors[0].shape[2:],
        )
    )
    scale = args.get("spatial_scale", 1.0)
    start, size = torch.rand(len(rois), 2, device=device) * 0.5, torch.rand(len(rois), 2, device=device) * 0.5
    extent = torch.tensor([sides[1], sides[0]], device=device) / scale
    rois[:, 0] = torch.randint(0, images, (len(rois),), device=device).to(rois.dtype)
    rois[:, 1:3], rois[:, 3:5] = start * extent, (start + size).clamp(max=1.0) * extent
    return call_of(instance, tensors, device)
