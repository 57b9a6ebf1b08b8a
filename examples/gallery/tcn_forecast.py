"""Forecasts the load of a power grid with a temporal convolutional network, from windows cut with numpy."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

HISTORY, HORIZON, SERIES = 336, 24, 32


class CausalBlock(nn.Module):
    def __init__(self, channels_in, channels_out, dilation, kernel=3, dropout=0.2):
        super().__init__()
        self.pad = (kernel - 1) * dilation
        conv = nn.utils.parametrizations.weight_norm
        self.conv1 = conv(nn.Conv1d(channels_in, channels_out, kernel, dilation=dilation))
        self.conv2 = conv(nn.Conv1d(channels_out, channels_out, kernel, dilation=dilation))
        self.drop = nn.Dropout(dropout)
        self.skip = nn.Conv1d(channels_in, channels_out, 1) if channels_in != channels_out else nn.Identity()

    def forward(self, x):
        y = self.drop(torch.relu(self.conv1(nn.functional.pad(x, (self.pad, 0)))))
        y = self.drop(torch.relu(self.conv2(nn.functional.pad(y, (self.pad, 0)))))
        return torch.relu(y + self.skip(x))


class TCN(nn.Module):
    def __init__(self, channels=(64, 64, 128, 128, 128, 128)):
        super().__init__()
        sizes = (SERIES, *channels)
        self.blocks = nn.Sequential(
            *[CausalBlock(a, b, 2**i) for i, (a, b) in enumerate(zip(sizes, sizes[1:]))]
        )
        self.head = nn.Linear(channels[-1], SERIES * HORIZON)

    def forward(self, x):
        last = self.blocks(x.transpose(1, 2))[:, :, -1]
        return self.head(last).view(-1, HORIZON, SERIES)


def windows(hours=24 * 400, seed=0):
    rng = np.random.default_rng(seed)
    t = np.arange(hours)[:, None]
    phase = rng.uniform(0, 24, size=(1, SERIES))
    load = np.sin(2 * np.pi * (t + phase) / 24) + 0.3 * np.sin(2 * np.pi * t / (24 * 7))
    load = (load + 0.1 * rng.standard_normal(load.shape)).astype(np.float32)
    starts = np.arange(0, hours - HISTORY - HORIZON, 6)
    past = np.stack([load[s : s + HISTORY] for s in starts])
    future = np.stack([load[s + HISTORY : s + HISTORY + HORIZON] for s in starts])
    return past, future


def make(batch):
    past, future = windows()
    dataset = TensorDataset(torch.from_numpy(past), torch.from_numpy(future))
    x, y = next(iter(DataLoader(dataset, batch_size=batch, shuffle=True)))
    hours = torch.from_numpy(np.linspace(1.0, 0.5, HORIZON, dtype=np.float32)).view(1, HORIZON, 1)
    huber = nn.HuberLoss(reduction="none")
    return TCN(), x, lambda forecast: (huber(forecast, y) * hours).mean()


if __name__ == "__main__":
    past, future = windows()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(
        TensorDataset(torch.from_numpy(past), torch.from_numpy(future)), batch_size=128, shuffle=True
    )
    net = TCN().to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(20):
        total = 0.0
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = nn.functional.huber_loss(net(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        print(f"epoch {epoch}: {total / len(loader.dataset):.4f}")
