"""Keypoints and depth from a feature pyramid: outputs, targets and losses are nested tuples per level."""

import torch
from torch import nn
from torch.nn import functional as F

LEVELS = (4, 8, 16)
KEYPOINTS = 17


def conv(cin, cout, stride=1):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout), nn.SiLU(inplace=True)
    )


class Pyramid(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.stem = nn.Sequential(conv(3, width // 2, 2), conv(width // 2, width, 2))
        self.down1 = nn.Sequential(conv(width, 2 * width, 2), conv(2 * width, 2 * width))
        self.down2 = nn.Sequential(conv(2 * width, 4 * width, 2), conv(4 * width, 4 * width))
        self.lateral = nn.ModuleList([nn.Conv2d(w * width, width, 1) for w in (1, 2, 4)])
        self.heat = nn.ModuleList([nn.Conv2d(width, KEYPOINTS, 1) for _ in LEVELS])
        self.depth = nn.ModuleList([nn.Conv2d(width, 2, 1) for _ in LEVELS])

    def forward(self, image):
        c1 = self.stem(image)
        c2 = self.down1(c1)
        c3 = self.down2(c2)
        p3 = self.lateral[2](c3)
        p2 = self.lateral[1](c2) + F.interpolate(p3, scale_factor=2, mode="nearest")
        p1 = self.lateral[0](c1) + F.interpolate(p2, scale_factor=2, mode="nearest")
        maps = (p1, p2, p3)
        heat = tuple(head(p) for head, p in zip(self.heat, maps))
        depth = tuple(tuple(head(p).chunk(2, dim=1)) for head, p in zip(self.depth, maps))
        return heat, depth, {"features": maps}


def targets_for(batch_size, size):
    heat = tuple(torch.rand(batch_size, KEYPOINTS, size // s, size // s) for s in LEVELS)
    depth = tuple(torch.rand(batch_size, 1, size // s, size // s) for s in LEVELS)
    valid = tuple(torch.rand(batch_size, 1, size // s, size // s) > 0.3 for s in LEVELS)
    return heat, (depth, valid)


def criterion(output, target):
    heat, depth, _ = output
    true_heat, (true_depth, valid) = target
    total = 0
    for level in range(len(LEVELS)):
        total = total + F.mse_loss(heat[level].sigmoid(), true_heat[level])
        mean, log_var = depth[level]
        error = (mean - true_depth[level]) ** 2 * torch.exp(-log_var) + log_var
        total = total + 0.5 * (error * valid[level]).sum() / valid[level].sum().clamp(min=1)
    return total


def build(batch_size: int, size: int = 256):
    images = torch.rand(batch_size, 3, size, size)
    target = targets_for(batch_size, size)
    return Pyramid(), (images,), lambda output: criterion(output, target)


if __name__ == "__main__":
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, (images,), _ = build(16)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    with device:
        target = targets_for(16, 256)
    for step in range(50):
        loss = criterion(model(images.to(device)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, float(loss))
