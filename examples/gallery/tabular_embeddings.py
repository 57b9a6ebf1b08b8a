"""Which customers leave? Embeddings for the categories, batch-normalised numbers, an MLP on both."""

import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CARDINALITIES = {"country": 190, "device": 40, "plan": 6, "month": 12, "store": 3000, "browser": 25}
NUMBERS = [f"f{i}" for i in range(20)]
BATCH_SIZE = 1024
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def read_table(rows=50_000):
    generator = torch.Generator().manual_seed(0)
    columns = {
        name: torch.randint(0, n, (rows,), generator=generator).numpy() for name, n in CARDINALITIES.items()
    }
    columns.update({name: torch.randn(rows, generator=generator).numpy() for name in NUMBERS})
    columns["left"] = (torch.rand(rows, generator=generator) < 0.1).float().numpy()
    return pd.DataFrame(columns)


class Customers(Dataset):
    def __init__(self, table):
        self.categories = table[list(CARDINALITIES)].to_numpy("int64")
        self.numbers = table[NUMBERS].to_numpy("float32")
        self.left = table["left"].to_numpy("float32")

    def __len__(self):
        return len(self.left)

    def __getitem__(self, i):
        return self.categories[i], self.numbers[i], self.left[i]


class TabularNet(nn.Module):
    def __init__(self, cardinalities, numbers, hidden=(512, 256, 128)):
        super().__init__()
        self.embeddings = nn.ModuleList(
            [nn.Embedding(n, min(50, (n + 1) // 2)) for n in cardinalities.values()]
        )
        self.embedding_drop = nn.Dropout(0.05)
        self.bn = nn.BatchNorm1d(len(numbers))
        size = sum(e.embedding_dim for e in self.embeddings) + len(numbers)
        layers = []
        for width in hidden:
            layers += [nn.Linear(size, width), nn.ReLU(), nn.BatchNorm1d(width), nn.Dropout(0.2)]
            size = width
        self.mlp = nn.Sequential(*layers, nn.Linear(size, 1))

    def forward(self, categories, numbers):
        embedded = [e(categories[:, i]) for i, e in enumerate(self.embeddings)]
        x = torch.cat([self.embedding_drop(torch.cat(embedded, 1)), self.bn(numbers)], 1)
        return self.mlp(x).squeeze(-1)


loader = DataLoader(Customers(read_table()), batch_size=BATCH_SIZE, shuffle=True, drop_last=True)
model = TabularNet(CARDINALITIES, NUMBERS).to(DEVICE)
criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([9.0], device=DEVICE))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5)
batches = iter(loader)


def train_step():
    global batches
    try:
        categories, numbers, left = next(batches)
    except StopIteration:
        batches = iter(loader)
        categories, numbers, left = next(batches)
    model.train()
    optimizer.zero_grad()
    logits = model(categories.to(DEVICE), numbers.to(DEVICE))
    loss = criterion(logits, left.to(DEVICE))
    loss.backward()
    optimizer.step()
    return loss.item()


if __name__ == "__main__":
    for step in range(500):
        loss = train_step()
        if step % 50 == 0:
            print(f"step {step}: {loss:.4f}")
