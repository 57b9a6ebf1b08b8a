"""Models of the jobs that benchmarks/sharing_gpu.py runs beside each other, where no library has them."""

import torch
import torch.nn.functional as F
from torch import nn


def cnn(batch):
    """A small network on small images: many short kernels, so the host is the bound."""
    widths = (3, 32, 32, 64, 64, 128, 128)
    layers = [
        layer
        for i, (a, b) in enumerate(zip(widths, widths[1:]))
        for layer in (nn.Conv2d(a, b, 3, 1 + i % 2, 1), nn.BatchNorm2d(b), nn.ReLU())
    ]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    targets = torch.randint(0, 10, (batch,))
    return net, (torch.randn(batch, 3, 32, 32),), lambda out: F.cross_entropy(out.float(), targets)


class Language(nn.Module):
    def __init__(self, vocab, width):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.rnn = nn.LSTM(width, width, 2, batch_first=True, dropout=0.5)
        self.out = nn.Linear(width, vocab)

    def forward(self, x):
        return self.out(self.rnn(self.embed(x))[0])


def lstm(batch):
    """A recurrent language model: small products one after another."""
    x, targets = (torch.randint(0, 10000, (batch, 70)) for _ in range(2))
    return Language(10000, 650), (x,), lambda out: F.cross_entropy(out.float().flatten(0, 1), targets.flatten())


class Block(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, inner), nn.GroupNorm(8, outer)])
        self.convs = nn.ModuleList([nn.Conv2d(inner, outer, 3, 1, 1), nn.Conv2d(outer, outer, 3, 1, 1)])
        self.skip = nn.Conv2d(inner, outer, 1)

    def forward(self, x):
        h = self.convs[0](F.silu(self.norms[0](x)))
        return self.skip(x) + self.convs[1](F.silu(self.norms[1](h)))


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(8, width), nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x):
        batch, width, rows, columns = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(batch, 3, 4, width // 4, rows * columns).transpose(-1, -2).unbind(1)
        found = F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(batch, width, rows, columns)
        return x + self.out(found)


class UNet(nn.Module):
    """Of a diffusion model: convolutions, group norms and attention at four resolutions."""

    def __init__(self, widths=(128, 256, 256, 512)):
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, 1, 1)
        pairs = list(zip((widths[0], *widths), widths))
        self.down = nn.ModuleList([nn.Sequential(Block(a, b), Block(b, b)) for a, b in pairs])
        self.middle = nn.Sequential(Block(widths[-1], widths[-1]), Attention(widths[-1]), Block(widths[-1], widths[-1]))
        self.up = nn.ModuleList([nn.Sequential(Block(2 * b, a), Block(a, a)) for a, b in reversed(pairs)])
        self.out = nn.Conv2d(widths[0], 3, 3, 1, 1)

    def forward(self, x):
        x, kept = self.stem(x), []
        for stage in self.down:
            x = stage(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for stage in self.up:
            x = stage(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        return self.out(x)


def unet(batch):
    noise = torch.randn(batch, 3, 64, 64)
    return UNet(), (torch.randn(batch, 3, 64, 64),), lambda out: F.mse_loss(out.float(), noise)


class Recommender(nn.Module):
    """Tables whose gradients are dense, and small products: memory is the bound."""

    def __init__(self, tables=8, rows=500_000, width=64):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(rows, width) for _ in range(tables)])
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        crossed = (tables + 1) ** 2 + width
        self.top = nn.Sequential(nn.Linear(crossed, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, dense, sparse):
        low = self.bottom(dense)
        rows = torch.stack([low, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        return self.top(torch.cat([low, (rows @ rows.transpose(1, 2)).flatten(1)], 1)).squeeze(1)


def recommender(batch):
    clicked = torch.randint(0, 2, (batch,)).float()
    inputs = (torch.randn(batch, 13), torch.randint(0, 500_000, (batch, 8)))
    return Recommender(), inputs, lambda out: F.binary_cross_entropy_with_logits(out.float(), clicked)


def tiny(batch):
    """For trying the programme out without a GPU."""
    targets = torch.randint(0, 10, (batch,))
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return net, (torch.randn(batch, 64),), lambda out: F.cross_entropy(out, targets)
