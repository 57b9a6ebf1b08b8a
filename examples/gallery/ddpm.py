"""Trains a denoising diffusion model on 32 x 32 images, with an exponential average of its weights."""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm


def timestep_embedding(t, dim):
    half = dim // 2
    freqs = torch.exp(-math.log(10000) * torch.arange(half, device=t.device) / half)
    args = t[:, None].float() * freqs[None]
    return torch.cat([args.cos(), args.sin()], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, cin, cout, time_dim, dropout=0.1):
        super().__init__()
        self.norm1 = nn.GroupNorm(32, cin)
        self.conv1 = nn.Conv2d(cin, cout, 3, padding=1)
        self.time = nn.Linear(time_dim, cout)
        self.norm2 = nn.GroupNorm(32, cout)
        self.drop = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(t))[:, :, None, None]
        h = self.conv2(self.drop(F.silu(self.norm2(h))))
        return h + self.skip(x)


class Attention(nn.Module):
    def __init__(self, channels, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(32, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, self.heads, c // self.heads, h * w).unbind(1)
        attention = torch.einsum("bhdi,bhdj->bhij", q * (c // self.heads) ** -0.5, k).softmax(dim=-1)
        out = torch.einsum("bhij,bhdj->bhdi", attention, v).reshape(b, c, h, w)
        return x + self.proj(out)


class UNet(nn.Module):
    def __init__(self, base=128, mults=(1, 2, 2, 2), blocks=2, attend_at=(1,)):
        super().__init__()
        self.base, dim = base, 4 * base
        self.time = nn.Sequential(nn.Linear(base, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.inp = nn.Conv2d(3, base, 3, padding=1)
        self.down, self.up, skips, c = nn.ModuleList(), nn.ModuleList(), [base], base
        for level, mult in enumerate(mults):
            for _ in range(blocks):
                attention = Attention(base * mult) if level in attend_at else nn.Identity()
                self.down.append(nn.ModuleList([ResBlock(c, base * mult, dim), attention]))
                c = base * mult
                skips.append(c)
            if level < len(mults) - 1:
                self.down.append(nn.ModuleList([nn.Conv2d(c, c, 3, stride=2, padding=1)]))
                skips.append(c)
        self.mid = nn.ModuleList([ResBlock(c, c, dim), Attention(c), ResBlock(c, c, dim)])
        for level, mult in reversed(list(enumerate(mults))):
            for i in range(blocks + 1):
                attention = Attention(base * mult) if level in attend_at else nn.Identity()
                grow = nn.Upsample(scale_factor=2) if level > 0 and i == blocks else nn.Identity()
                self.up.append(nn.ModuleList([ResBlock(c + skips.pop(), base * mult, dim), attention, grow]))
                c = base * mult
        self.out = nn.Sequential(nn.GroupNorm(32, c), nn.SiLU(), nn.Conv2d(c, 3, 3, padding=1))

    def forward(self, x, t):
        t = self.time(timestep_embedding(t, self.base))
        h = self.inp(x)
        skips = [h]
        for modules in self.down:
            h = modules[0](h) if len(modules) == 1 else modules[1](modules[0](h, t))
            skips.append(h)
        h = self.mid[2](self.mid[1](self.mid[0](h, t)), t)
        for block, attention, grow in self.up:
            h = grow(attention(block(torch.cat([h, skips.pop()], dim=1), t)))
        return self.out(h)


class EMA:
    def __init__(self, model, decay=0.9999):
        self.decay = decay
        self.shadow = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for slow, fast in zip(self.shadow.parameters(), model.parameters()):
            slow.mul_(self.decay).add_(fast, alpha=1 - self.decay)
        for slow, fast in zip(self.shadow.buffers(), model.buffers()):
            slow.copy_(fast)


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    steps, batch_size = 1000, 64
    betas = torch.linspace(1e-4, 0.02, steps, device=device)
    alphas_bar = torch.cumprod(1 - betas, dim=0)

    model = UNet().to(device)
    ema = EMA(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 5000))
    loader = DataLoader(TensorDataset(torch.rand(1024, 3, 32, 32) * 2 - 1), batch_size, shuffle=True)

    for epoch in range(100):
        progress = tqdm(loader)
        for (x0,) in progress:
            x0 = x0.to(device)
            t = torch.randint(0, steps, (x0.shape[0],), device=device)
            noise = torch.randn_like(x0)
            a = alphas_bar[t].view(-1, 1, 1, 1)
            xt = a.sqrt() * x0 + (1 - a).sqrt() * noise
            loss = F.mse_loss(model(xt, t), noise)
            optimizer.zero_grad()
            loss.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warmup.step()
            ema.update(model)
            progress.set_description(f"epoch {epoch} loss {loss.item():.4f} norm {grad_norm:.2f}")


if __name__ == "__main__":
    main()
