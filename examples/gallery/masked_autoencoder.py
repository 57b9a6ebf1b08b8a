"""Pretrains an image encoder by filling in masked patches; the model computes its own loss."""

from dataclasses import dataclass

import torch
import torch.nn as nn


@dataclass
class MAEConfig:
    image_size: int = 128
    patch_size: int = 16
    width: int = 384
    depth: int = 8
    decoder_depth: int = 2
    heads: int = 6
    mask_ratio: float = 0.75

    @property
    def patches(self):
        return (self.image_size // self.patch_size) ** 2

    @property
    def patch_dim(self):
        return 3 * self.patch_size**2


@dataclass
class MAEOutput:
    loss: torch.Tensor
    reconstruction: torch.Tensor
    kept: torch.Tensor


def encoder(width, heads, depth):
    layer = nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


class MaskedAutoencoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Linear(config.patch_dim, config.width)
        self.position = nn.Parameter(0.02 * torch.randn(1, config.patches, config.width))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.encoder = encoder(config.width, config.heads, config.depth)
        self.decoder = encoder(config.width, config.heads, config.decoder_depth)
        self.to_pixels = nn.Linear(config.width, config.patch_dim)

    def patchify(self, images):
        B, C, H, W = images.shape
        p = self.config.patch_size
        x = images.reshape(B, C, H // p, p, W // p, p)
        return x.permute(0, 2, 4, 3, 5, 1).reshape(B, -1, p * p * C)

    def forward(self, pixel_values, noise=None):
        patches = self.patchify(pixel_values)
        B, N, _ = patches.shape
        if noise is None:
            noise = torch.rand(B, N, device=patches.device)
        order = noise.argsort(dim=1)
        restore = order.argsort(dim=1)
        keep = int(N * (1 - self.config.mask_ratio))
        kept = order[:, :keep]

        tokens = self.embed(patches) + self.position
        visible = tokens.gather(1, kept.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))
        visible = self.encoder(visible)

        full = torch.cat([visible, self.mask_token.expand(B, N - keep, -1)], dim=1)
        full = full.gather(1, restore.unsqueeze(-1).expand_as(full)) + self.position
        out = self.to_pixels(self.decoder(full))

        mean, var = patches.mean(-1, keepdim=True), patches.var(-1, keepdim=True)
        target = (patches - mean) / (var + 1e-6).sqrt()
        masked = torch.ones(B, N, device=out.device)
        masked[:, :keep] = 0
        masked = masked.gather(1, restore)
        loss = (((out - target) ** 2).mean(-1) * masked).sum() / masked.sum()
        return MAEOutput(loss=loss, reconstruction=out, kept=kept)


def make(batch):
    config = MAEConfig()
    model = MaskedAutoencoder(config)
    inputs = {
        "pixel_values": torch.randn(batch, 3, config.image_size, config.image_size),
        "noise": torch.rand(batch, config.patches),
    }
    return model, inputs


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, batch = make(64)
    model.to(device)
    batch = {name: value.to(device) for name, value in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-4, betas=(0.9, 0.95), weight_decay=0.05)
    for step in range(50):
        output = model(**batch)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step}: loss {output.loss.item():.4f}")
