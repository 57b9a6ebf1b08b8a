"""Wasserstein GAN with gradient penalty: five critic updates for each update of the generator."""

import argparse
from itertools import chain, repeat

import torch
from torch import autograd, nn
from torch.utils.data import DataLoader, TensorDataset


class Generator(nn.Module):
    def __init__(self, latent, dim=128):
        super().__init__()
        self.dim = dim
        self.project = nn.Sequential(nn.Linear(latent, 4 * 4 * 4 * dim), nn.ReLU())
        self.net = nn.Sequential(
            nn.ConvTranspose2d(4 * dim, 2 * dim, 4, 2, 1),
            nn.BatchNorm2d(2 * dim),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * dim, dim, 4, 2, 1),
            nn.BatchNorm2d(dim),
            nn.ReLU(),
            nn.ConvTranspose2d(dim, 3, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.net(self.project(z).view(-1, 4 * self.dim, 4, 4))


class Critic(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, dim, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(dim, 2 * dim, 4, 2, 1),
            nn.InstanceNorm2d(2 * dim, affine=True),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * dim, 4 * dim, 4, 2, 1),
            nn.InstanceNorm2d(4 * dim, affine=True),
            nn.LeakyReLU(0.2),
        )
        self.score = nn.Linear(4 * 4 * 4 * dim, 1)

    def forward(self, x):
        return self.score(self.net(x).flatten(1)).squeeze(1)


def gradient_penalty(critic, real, fake):
    alpha = torch.rand(real.size(0), 1, 1, 1, device=real.device).expand_as(real)
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = critic(mixed)
    (gradients,) = autograd.grad(
        outputs=scores,
        inputs=mixed,
        grad_outputs=torch.ones_like(scores),
        create_graph=True,
        retain_graph=True,
    )
    return ((gradients.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--latent", type=int, default=128)
    p.add_argument("--n-critic", type=int, default=5)
    p.add_argument("--gp-weight", type=float, default=10.0)
    p.add_argument("--iterations", type=int, default=2000)
    p.add_argument("--lr", type=float, default=1e-4)
    return p.parse_args()


def main(opt):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = TensorDataset(torch.rand(2048, 3, 32, 32) * 2 - 1)
    loader = DataLoader(images, batch_size=opt.batch_size, shuffle=True, drop_last=True)
    stream = chain.from_iterable(repeat(loader))

    G, D = Generator(opt.latent).to(device), Critic().to(device)
    g_optim = torch.optim.Adam(G.parameters(), lr=opt.lr, betas=(0.5, 0.9))
    d_optim = torch.optim.Adam(D.parameters(), lr=opt.lr, betas=(0.5, 0.9))

    for it in range(opt.iterations):
        for p in D.parameters():
            p.requires_grad = True
        for _ in range(opt.n_critic):
            (real,) = next(stream)
            real = real.to(device)
            with torch.no_grad():
                fake = G(torch.randn(real.size(0), opt.latent, device=device))
            d_optim.zero_grad()
            wasserstein = D(fake).mean() - D(real).mean()
            d_loss = wasserstein + opt.gp_weight * gradient_penalty(D, real, fake)
            d_loss.backward()
            d_optim.step()

        for p in D.parameters():
            p.requires_grad = False
        g_optim.zero_grad()
        g_loss = -D(G(torch.randn(opt.batch_size, opt.latent, device=device))).mean()
        g_loss.backward()
        g_optim.step()
        if it % 10 == 0:
            print(
                f"{it}: critic {d_loss.item():.3f} distance {-wasserstein.item():.3f} G {g_loss.item():.3f}"
            )


if __name__ == "__main__":
    main(parse_args())
