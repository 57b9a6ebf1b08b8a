"""Models behind published measurements that no library has under a name: each function takes the batch and
returns (module, inputs, loss), as job files name them (``source = "python"``).

``benchmarks/tables.py`` puts a copy of this file beside the runs that it writes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Made = tuple[nn.Module, Any, Callable[[Any], torch.Tensor]]


# Single-shot detector of NVIDIA's DeepLearningExamples: ResNet-50 up to its third stage, 8,732 boxes

_SSD_EXTRAS = ((256, 512, 2), (256, 512, 2), (128, 256, 2), (128, 256, 1), (128, 256, 1))
"""Inner width, width and stride of the layers behind the backbone."""
_SSD_BOXES = (4, 6, 6, 6, 4, 4)
_SSD_CLASSES = 81


class Ssd300(nn.Module):
    """Predicts classes and places of boxes at six scales."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models import resnet50

        resnet = resnet50(weights=None)
        for block in (resnet.layer3[0],):
            block.conv1.stride = block.conv2.stride = block.downsample[0].stride = (1, 1)
        self.features = nn.Sequential(
            resnet.conv1, resnet.bn1, resnet.relu, resnet.maxpool, resnet.layer1, resnet.layer2, resnet.layer3
        )
        widths = [1024, *(width for _, width, _ in _SSD_EXTRAS)]
        self.extras = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(before, inner, 1, bias=False),
                nn.BatchNorm2d(inner),
                nn.ReLU(inplace=True),
                nn.Conv2d(inner, width, 3, stride=stride, padding=1 if stride == 2 else 0, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            )
            for before, (inner, width, stride) in zip(widths[:-1], _SSD_EXTRAS, strict=True)
        )
        pairs = list(zip(widths, _SSD_BOXES, strict=True))
        self.places = nn.ModuleList(nn.Conv2d(width, boxes * 4, 3, padding=1) for width, boxes in pairs)
        self.classes = nn.ModuleList(
            nn.Conv2d(width, boxes * _SSD_CLASSES, 3, padding=1) for width, boxes in pairs
        )

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        maps = [self.features(images)]
        for layer in self.extras:
            maps.append(layer(maps[-1]))
        places = [head(one).flatten(2) for head, one in zip(self.places, maps, strict=True)]
        classes = [head(one).flatten(2) for head, one in zip(self.classes, maps, strict=True)]
        batch = images.shape[0]
        return (
            torch.cat([one.reshape(batch, 4, -1) for one in places], 2),
            torch.cat([one.reshape(batch, _SSD_CLASSES, -1) for one in classes], 2),
        )


def ssd300(batch: int) -> Made:
    places = torch.randn(batch, 4, 8732)
    labels = torch.randint(0, _SSD_CLASSES, (batch, 8732))

    def loss(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Three negatives to a positive, those that are classified worst."""
        mask = labels > 0
        positives = mask.sum(1)
        place_loss = F.smooth_l1_loss(output[0].float(), places, reduction="none").sum(1)
        place_loss = (mask.float() * place_loss).sum(1)
        class_loss = F.cross_entropy(output[1].float(), labels, reduction="none")
        negatives = class_loss.clone()
        negatives[mask] = 0
        _, order = negatives.sort(dim=1, descending=True)
        _, rank = order.sort(dim=1)
        mined = rank < torch.clamp(3 * positives, max=mask.size(1)).unsqueeze(-1)
        closed = (class_loss * (mask.float() + mined.float())).sum(1)
        present = (positives > 0).float()
        return ((place_loss + closed) * present / positives.float().clamp(min=1e-6)).mean()

    return Ssd300(), (torch.randn(batch, 3, 300, 300),), loss


# Neural collaborative filtering of the same, over MovieLens-20M


class NeuMf(nn.Module):
    """Tables of users and items for a product and for a perceptron."""

    def __init__(self, users: int = 138_493, items: int = 26_744, factors: int = 64) -> None:
        super().__init__()
        widths = (256, 256, 128, 64)
        self.user, self.item = nn.Embedding(users, factors), nn.Embedding(items, factors)
        self.deep_user = nn.Embedding(users, widths[0] // 2)
        self.deep_item = nn.Embedding(items, widths[0] // 2)
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in itertools.pairwise(widths))
        self.last = nn.Linear(widths[-1] + factors, 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        product = self.user(user) * self.item(item)
        deep = torch.cat((self.deep_user(user), self.deep_item(item)), dim=1)
        for layer in self.layers:
            deep = F.dropout(F.relu(layer(deep)), p=0.5, training=self.training)
        scores: torch.Tensor = self.last(torch.cat((product, deep), dim=1))
        return scores


def neumf(batch: int) -> Made:
    users, items = torch.randint(0, 138_493, (batch,)), torch.randint(0, 26_744, (batch,))
    wanted = torch.rand(batch)
    return (
        NeuMf(),
        (users, items),
        lambda scores: F.binary_cross_entropy_with_logits(scores.squeeze(1).float(), wanted),
    )


# WaveGlow of the same: twelve invertible steps over segments of 8,000 audio samples

SEGMENT = 8_000
_MELS, _HOP = 80, 256


class _Gates(nn.Module):
    """The network inside of a coupling: eight dilated convolutions with gates."""

    def __init__(self, inputs: int, width: int = 512, depth: int = 8) -> None:
        super().__init__()
        self.width = width
        self.start = nn.utils.parametrizations.weight_norm(nn.Conv1d(inputs, width, 1))
        self.end = nn.Conv1d(width, 2 * inputs, 1)
        norm = nn.utils.parametrizations.weight_norm
        self.inner = nn.ModuleList(
            norm(nn.Conv1d(width, 2 * width, 3, dilation=2**i, padding=2**i)) for i in range(depth)
        )
        self.conditions = nn.ModuleList(norm(nn.Conv1d(_MELS * 8, 2 * width, 1)) for _ in range(depth))
        self.skips = nn.ModuleList(
            norm(nn.Conv1d(width, width * (1 if i == depth - 1 else 2), 1)) for i in range(depth)
        )

    def forward(self, audio: torch.Tensor, mels: torch.Tensor) -> torch.Tensor:
        audio = self.start(audio)
        total: torch.Tensor | int = 0
        for i, (inner, condition, skip) in enumerate(
            zip(self.inner, self.conditions, self.skips, strict=True)
        ):
            both = inner(audio) + condition(mels)
            gated = torch.tanh(both[:, : self.width]) * torch.sigmoid(both[:, self.width :])
            out = skip(gated)
            if i < len(self.inner) - 1:
                audio = out[:, : self.width] + audio
                out = out[:, self.width :]
            total = out + total
        result: torch.Tensor = self.end(total)
        return result


class WaveGlow(nn.Module):
    """A flow from audio to noise, conditioned on a mel spectrogram."""

    def __init__(self, flows: int = 12, group: int = 8) -> None:
        super().__init__()
        self.flows, self.group = flows, group
        self.upsample = nn.ConvTranspose1d(_MELS, _MELS, 1024, stride=_HOP)
        self.mixes, self.couplings = nn.ParameterList(), nn.ModuleList()
        channels = group
        for i in range(flows):
            if i % 4 == 0 and i:
                channels -= 2
            self.mixes.append(nn.Parameter(torch.eye(channels)))
            self.couplings.append(_Gates(channels // 2))

    def forward(self, mels: torch.Tensor, audio: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        mels = self.upsample(mels)[:, :, : audio.size(1)]
        mels = mels.unfold(2, self.group, self.group).permute(0, 2, 1, 3)
        mels = mels.contiguous().view(mels.size(0), mels.size(1), -1).permute(0, 2, 1)
        audio = audio.unfold(1, self.group, self.group).permute(0, 2, 1)
        early, terms = [], []
        for i in range(self.flows):
            if i % 4 == 0 and i:
                early.append(audio[:, :2])
                audio = audio[:, 2:]
            terms.append(audio.size(0) * audio.size(2) * torch.logdet(self.mixes[i].unsqueeze(0).float())[0])
            audio = F.conv1d(audio, self.mixes[i].unsqueeze(-1))
            half = audio.size(1) // 2
            first, second = audio[:, :half], audio[:, half:]
            both = self.couplings[i](first, mels)
            scale, shift = both[:, half:], both[:, :half]
            audio = torch.cat([first, torch.exp(scale) * second + shift], 1)
            terms.append(torch.sum(scale.float()))
        return torch.cat([*early, audio], 1), terms


def waveglow(batch: int) -> Made:
    mels, audio = torch.randn(batch, _MELS, SEGMENT // _HOP + 1), torch.randn(batch, SEGMENT)

    def loss(output: tuple[torch.Tensor, list[torch.Tensor]]) -> torch.Tensor:
        noise, terms = output
        total = torch.sum(noise.float() * noise.float()) / 2
        for term in terms:
            total = total - term
        return total / noise.numel()

    return WaveGlow(), (mels, audio), loss


# Detectors as mmdetection and MLPerf train them, of torchvision's parts


def _kept(module: nn.Module, _mode: bool = True) -> nn.Module:
    return module


def _eval_norms(module: nn.Module, trained: bool) -> None:
    """Batch norms stand still (``norm_eval``); their scales are trained or not."""
    for one in module.modules():
        if isinstance(one, nn.BatchNorm2d):
            one.eval()
            vars(one)["train"] = functools.partial(_kept, one)
            one.requires_grad_(trained)


def _backbone(name: str, caffe: bool, levels: list[int], extra: Any, frozen_norm: bool) -> nn.Module:
    from torchvision.models import resnet
    from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor
    from torchvision.ops import FrozenBatchNorm2d

    norm = FrozenBatchNorm2d if frozen_norm else nn.BatchNorm2d
    depth, _, shape = name.partition("-")
    blocks = {"r18": [2, 2, 2, 2], "r50": [3, 4, 6, 3], "r101": [3, 4, 23, 3]}[depth.replace("x", "r")]
    groups, width = (int(one) for one in shape.removesuffix("d").split("x")) if shape else (1, 64)
    block = resnet.BasicBlock if depth == "r18" else resnet.Bottleneck
    body = resnet.ResNet(block, blocks, groups=groups, width_per_group=width, norm_layer=norm)
    if caffe:
        for layer in (body.layer2, body.layer3, body.layer4):
            layer[0].conv1.stride, layer[0].conv2.stride = (2, 2), (1, 1)
    if not frozen_norm:
        _eval_norms(body, trained=not caffe)
    made: nn.Module = _resnet_fpn_extractor(body, 3, returned_layers=levels, extra_blocks=extra)
    return made


def detector(
    batch: int,
    kind: str,
    backbone: str = "r50",
    *,
    caffe: bool = False,
    height: int = 800,
    width: int = 1333,
    classes: int = 80,
    objects: int = 7,
) -> Made:
    """A detector with images of one size and COCO's seven objects in each."""
    from torchvision.models import detection
    from torchvision.models.detection.fcos import FCOS
    from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7

    sizes = {"min_size": min(height, width), "max_size": max(height, width)}
    if kind == "fcos":
        body = _backbone(backbone, caffe, [2, 3, 4], LastLevelP6P7(256, 256), False)
        module: nn.Module = FCOS(body, classes, **sizes)
    else:
        body = _backbone(backbone, caffe, [1, 2, 3, 4], LastLevelMaxPool(), False)
        two_stage = {"faster": detection.FasterRCNN, "mask": detection.MaskRCNN}[kind]
        module = two_stage(body, classes + 1, rpn_post_nms_top_n_train=1000, **sizes)
    images = [torch.rand(3, height, width) for _ in range(batch)]
    targets = []
    for _ in range(batch):
        corner = torch.rand(objects, 2) * torch.tensor([width * 0.5, height * 0.5])
        target = {
            "boxes": torch.cat([corner, corner + 16 + torch.rand(objects, 2) * height * 0.4], 1),
            "labels": torch.ones(objects, dtype=torch.long),
        }
        if kind == "mask":
            target["masks"] = torch.zeros(objects, height, width, dtype=torch.uint8)
        targets.append(target)
    return module, (images, targets), lambda losses: torch.stack(list(losses.values())).sum()


class BatchedRetinaNet(nn.Module):
    """RetinaNet whose losses are those of the whole batch at once, given what each anchor stands for.

    With ``one_kernel`` an element-wise operator that reads and writes the same tensors stands for a focal
    loss in one kernel, as mmdetection has it.
    """

    def __init__(self, body: nn.Module, classes: int, one_kernel: bool) -> None:
        super().__init__()
        from torchvision.models.detection.retinanet import RetinaNetHead

        self.backbone, self.head = body, RetinaNetHead(256, 9, classes)
        self.classes, self.one_kernel = classes, one_kernel

    def forward(self, images: torch.Tensor, labels: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        found = self.head(list(self.backbone(images).values()))
        near = (labels >= 0).float().unsqueeze(-1)
        places = ((found["bbox_regression"].float() - boxes).abs() * near).sum()
        logits = found["cls_logits"].float()
        focal = F.softplus(logits).sum() if self.one_kernel else self._focal(logits, labels)
        loss: torch.Tensor = (focal + places) / near.sum().clamp(min=1)
        return loss

    def _focal(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        wanted = (labels.unsqueeze(-1) == torch.arange(self.classes, device=labels.device)).float()
        entropy = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
        likely = torch.sigmoid(logits)
        right = likely * wanted + (1 - likely) * (1 - wanted)
        balance = 0.25 * wanted + 0.75 * (1 - wanted)
        kept = (labels >= -1).float().unsqueeze(-1)
        return (balance * entropy * (1 - right) ** 2 * kept).sum()


def batched_retinanet(
    batch: int,
    backbone: str = "r50",
    *,
    caffe: bool = False,
    height: int = 800,
    width: int = 800,
    classes: int = 80,
    frozen_norm: bool = False,
    one_kernel: bool = False,
) -> Made:
    """Images are padded to whole strides of 32."""
    from torchvision.ops.feature_pyramid_network import LastLevelP6P7

    extra = LastLevelP6P7(512 if backbone == "r18" else 2048, 256)
    body = _backbone(backbone, caffe, [2, 3, 4], extra, frozen_norm)
    sides = [-(-side // 32) * 32 for side in (height, width)]
    anchors = sum(9 * math.prod(-(-side // stride) for side in sides) for stride in (8, 16, 32, 64, 128))
    return (
        BatchedRetinaNet(body, classes, one_kernel),
        (
            torch.rand(batch, 3, *sides),
            torch.randint(-2, classes, (batch, anchors)),
            torch.randn(batch, anchors, 4),
        ),
        lambda loss: loss,
    )


# GPT-2 of modded-nanogpt's records, as their scripts have it


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, normed: bool) -> None:
        super().__init__()
        self.heads, self.normed = heads, normed
        self.queries, self.keys, self.values, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        size = width // heads
        self.register_buffer("frequencies", 1 / 10_000 ** (torch.arange(0, size, 2) / size), persistent=False)

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(torch.arange(x.size(1), device=x.device).float(), self.get_buffer("frequencies"))
        cos, sin = angles.cos().bfloat16()[None, :, None], angles.sin().bfloat16()[None, :, None]
        first, second = x.chunk(2, 3)
        return torch.cat([first * cos + second * sin, second * cos - first * sin], 3).type_as(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (*x.shape[:2], self.heads, -1)
        queries, keys = self._rotated(self.queries(x).view(rows)), self._rotated(self.keys(x).view(rows))
        if self.normed:
            queries, keys = (F.rms_norm(one, (one.size(-1),)) for one in (queries, keys))
        values = self.values(x).view(rows)
        mixed = F.scaled_dot_product_attention(
            queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), is_causal=True
        )
        result: torch.Tensor = self.out(mixed.transpose(1, 2).contiguous().view_as(x))
        return result


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, modern: bool) -> None:
        super().__init__()
        self.modern = modern
        self.attention = _Attention(width, heads, normed=modern)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = 1.0 if self.modern else 1 / math.sqrt(2 * 12)
        x = x + share * self.attention(F.rms_norm(x, (x.size(-1),)))
        inner = self.up(F.rms_norm(x, (x.size(-1),)))
        inner = F.relu(inner).square() if self.modern else F.gelu(inner)
        result: torch.Tensor = x + self.down(inner)
        return result


class SpeedGpt(nn.Module):
    """GPT-2 with rotary positions and norms without weights; later records norm queries and keys too."""

    def __init__(self, vocabulary: int, heads: int, modern: bool, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, 768)
        self.blocks = nn.ModuleList(_Block(768, heads, modern) for _ in range(12))
        self.scores = nn.Linear(768, vocabulary, bias=False)
        if tied:
            self.words.weight = self.scores.weight

    def forward(self, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        scores = self.scores(F.rms_norm(x, (x.size(-1),))).float()
        return F.cross_entropy(scores.flatten(0, 1), wanted.flatten())


def speed_gpt(
    batch: int, vocabulary: int = 50_304, heads: int = 6, modern: bool = True, tied: bool = True
) -> Made:
    tokens, wanted = (torch.randint(0, 50_257, (batch, 1024)) for _ in range(2))
    return SpeedGpt(vocabulary, heads, modern, tied), (tokens, wanted), lambda loss: loss
