"""A vision transformer from scratch, with an averaged copy of its weights and a cosine schedule."""

import math

import torch
import torch.nn as nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from torchvision.datasets import FakeData
from torchvision.transforms import ToTensor


class PatchEmbedding(nn.Module):
    def __init__(self, image=224, patch=16, dim=384):
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, dim) * 0.02)

    def forward(self, x):
        x = self.proj(x).flatten(2).transpose(1, 2)
        return torch.cat([self.cls.expand(x.size(0), -1, -1), x], dim=1) + self.pos


class MultiHeadAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q @ k.transpose(-2, -1) * self.scale).softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, d))


class DropPath(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training or self.p == 0:
            return x
        keep = torch.rand(x.shape[0], 1, 1, device=x.device) >= self.p
        return x * keep / (1 - self.p)


class Layer(nn.Module):
    def __init__(self, dim, heads, drop_path):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = MultiHeadAttention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.drop_path = DropPath(drop_path)

    def forward(self, x):
        x = x + self.drop_path(self.attn(self.n1(x)))
        return x + self.drop_path(self.mlp(self.n2(x)))


class ViT(nn.Module):
    def __init__(self, classes=1000, dim=384, depth=12, heads=6, drop_path=0.1):
        super().__init__()
        self.embed = PatchEmbedding(dim=dim)
        rates = [x.item() for x in torch.linspace(0, drop_path, depth)]
        self.layers = nn.Sequential(*[Layer(dim, heads, rate) for rate in rates])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        return self.head(self.norm(self.layers(self.embed(x)))[:, 0])


class Trainer:
    def __init__(self, model, loader, epochs=10, warmup=2, lr=1e-3):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
        self.loader, self.epochs = loader, epochs
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.05)
        total, warm = epochs * len(loader), warmup * len(loader)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda s: s / warm if s < warm else 0.5 * (1 + math.cos(math.pi * (s - warm) / (total - warm))),
        )

    def step(self, images, labels):
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = self.criterion(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.ema.update_parameters(self.model)
        return loss.item()

    def fit(self):
        for epoch in range(self.epochs):
            self.model.train()
            for i, (images, labels) in enumerate(self.loader):
                loss = self.step(images.to(self.device), labels.to(self.device))
                print(f"epoch {epoch} [{i}/{len(self.loader)}] {loss:.4f}")


if __name__ == "__main__":
    data = FakeData(1280, (3, 224, 224), 1000, transform=ToTensor())
    Trainer(ViT(), DataLoader(data, batch_size=64, shuffle=True, num_workers=4)).fit()
