# A variational autoencoder for images of faces, as one plain script
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

LATENT = 128
BETA = 0.5
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class VAE(nn.Module):
    def __init__(self, latent=LATENT, channels=(32, 64, 128, 256)):
        super().__init__()
        down, cin = [], 3
        for c in channels:
            down += [nn.Conv2d(cin, c, 3, stride=2, padding=1), nn.BatchNorm2d(c), nn.LeakyReLU()]
            cin = c
        self.encoder = nn.Sequential(*down, nn.Flatten())
        self.mu = nn.Linear(cin * 4 * 4, latent)
        self.logvar = nn.Linear(cin * 4 * 4, latent)
        self.expand = nn.Linear(latent, cin * 4 * 4)
        up = []
        for c in (*reversed(channels[:-1]), 32):
            up += [
                nn.ConvTranspose2d(cin, c, 3, stride=2, padding=1, output_padding=1),
                nn.BatchNorm2d(c),
                nn.LeakyReLU(),
            ]
            cin = c
        self.decoder = nn.Sequential(*up, nn.Conv2d(cin, 3, 3, padding=1), nn.Sigmoid())

    def encode(self, x):
        h = self.encoder(x)
        return self.mu(h), self.logvar(h)

    def reparameterize(self, mu, logvar):
        if not self.training:
            return mu
        std = torch.exp(0.5 * logvar)
        return mu + std * torch.randn_like(std)

    def decode(self, z):
        return self.decoder(self.expand(z).view(z.size(0), -1, 4, 4))

    def forward(self, x):
        mu, logvar = self.encode(x)
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def vae_loss(recon, x, mu, logvar):
    rec = F.binary_cross_entropy(recon, x, reduction="sum") / x.size(0)
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / x.size(0)
    return rec + BETA * kld, rec, kld


data = TensorDataset(torch.rand(1024, 3, 64, 64))
loader = DataLoader(data, batch_size=144, shuffle=True)
model = VAE().to(device)
optimizer = optim.Adam(model.parameters(), lr=5e-3)
scheduler = optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)

for epoch in range(1, 11):
    model.train()
    total = 0
    for (x,) in loader:
        x = x.to(device)
        optimizer.zero_grad()
        recon, mu, logvar = model(x)
        loss, rec, kld = vae_loss(recon, x, mu, logvar)
        loss.backward()
        total += loss.item()
        optimizer.step()
    scheduler.step()
    print(f"epoch {epoch}: {total / len(loader):.1f} (rec {rec.item():.1f}, kl {kld.item():.1f})")

    model.eval()
    with torch.no_grad():
        sample = model.decode(torch.randn(16, LATENT, device=device)).cpu()
