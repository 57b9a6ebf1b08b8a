"""A one-stage detector: anchors matched to boxes by overlap, hard negatives mined, two losses."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.models import resnet18
from torchvision.models.feature_extraction import create_feature_extractor
from torchvision.ops import box_convert, box_iou, sigmoid_focal_loss

CLASSES = 20
SIZE = 320
STRIDES = (8, 16, 32)
SCALES, RATIOS = (1.0, 1.6), (0.5, 1.0, 2.0)


class Boxes(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        n = int(torch.randint(1, 6, (1,), generator=g))
        corner = torch.rand(n, 2, generator=g) * SIZE * 0.6
        extent = torch.rand(n, 2, generator=g) * SIZE * 0.3 + 16
        image = torch.rand(3, SIZE, SIZE, generator=g)
        boxes = torch.cat([corner, corner + extent], dim=1)
        return image, {"boxes": boxes, "labels": torch.randint(0, CLASSES, (n,), generator=g)}


def collate(items):
    images, targets = zip(*items)
    return torch.stack(images), list(targets)


def make_anchors(device):
    all_anchors = []
    for stride in STRIDES:
        n = SIZE // stride
        centres = (torch.arange(n, device=device) + 0.5) * stride
        cy, cx = torch.meshgrid(centres, centres, indexing="ij")
        shapes = [(4 * stride * s * r**0.5, 4 * stride * s / r**0.5) for s in SCALES for r in RATIOS]
        wh = torch.tensor(shapes, device=device)
        xy = torch.stack([cx, cy], dim=-1).view(-1, 1, 2).expand(-1, len(shapes), 2)
        all_anchors.append(torch.cat([xy, wh.expand_as(xy)], dim=-1).reshape(-1, 4))
    return torch.cat(all_anchors)


class Detector(nn.Module):
    def __init__(self, per_cell=len(SCALES) * len(RATIOS), width=128):
        super().__init__()
        layers = {"layer2": "c3", "layer3": "c4", "layer4": "c5"}
        self.backbone = create_feature_extractor(resnet18(weights=None), return_nodes=layers)
        self.reduce = nn.ModuleList([nn.Conv2d(c, width, 1) for c in (128, 256, 512)])
        self.tower = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.ReLU())
        self.classify = nn.Conv2d(width, per_cell * CLASSES, 3, padding=1)
        self.regress = nn.Conv2d(width, per_cell * 4, 3, padding=1)
        nn.init.constant_(self.classify.bias, -4.6)

    def forward(self, images):
        scores, offsets = [], []
        for reduce, feature in zip(self.reduce, self.backbone(images).values()):
            h = self.tower(reduce(feature))
            scores.append(self.classify(h).permute(0, 2, 3, 1).reshape(len(images), -1, CLASSES))
            offsets.append(self.regress(h).permute(0, 2, 3, 1).reshape(len(images), -1, 4))
        return torch.cat(scores, 1), torch.cat(offsets, 1)


def match(anchors, target):
    """For each anchor the class (-1: background, -2: neither) and the offsets to its box."""
    iou = box_iou(box_convert(anchors, "cxcywh", "xyxy"), target["boxes"])
    best, which = iou.max(dim=1)
    labels = torch.full_like(which, -2)
    labels[best < 0.4] = -1
    labels[best >= 0.5] = target["labels"][which[best >= 0.5]]
    labels[iou.argmax(dim=0)] = target["labels"]  # every box gets an anchor
    boxes = box_convert(target["boxes"], "xyxy", "cxcywh")[which]
    offsets = torch.cat(
        [(boxes[:, :2] - anchors[:, :2]) / anchors[:, 2:], torch.log(boxes[:, 2:] / anchors[:, 2:])], dim=1
    )
    return labels, offsets


def detection_loss(scores, offsets, anchors, targets):
    cls_loss, box_loss, positives = 0.0, 0.0, 0
    for score, offset, target in zip(scores, offsets, targets):
        labels, wanted = match(anchors, target)
        positive, counted = labels >= 0, labels != -2
        hot = torch.zeros_like(score)
        hot[positive, labels[positive]] = 1
        cls_loss += sigmoid_focal_loss(score[counted], hot[counted], reduction="sum")
        box_loss += F.smooth_l1_loss(offset[positive], wanted[positive], reduction="sum", beta=0.11)
        positives += positive.sum().item()
    return (cls_loss + box_loss) / max(1, positives)


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(Boxes(), batch_size=16, shuffle=True, collate_fn=collate)
    model, anchors = Detector().to(device), make_anchors(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    for epoch in range(12):
        for images, targets in loader:
            images = images.to(device)
            targets = [{k: v.to(device) for k, v in t.items()} for t in targets]
            scores, offsets = model(images)
            loss = detection_loss(scores, offsets, anchors, targets)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            print(f"{epoch}: {loss.item():.3f}")


if __name__ == "__main__":
    main()
