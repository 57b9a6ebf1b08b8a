"""Retrieval for a shop: a tower for users, a tower for items, other items of the batch as negatives."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

N_USERS, N_ITEMS, N_CATEGORIES, HISTORY = 200_000, 50_000, 400, 20


class UserFeatures(NamedTuple):
    user_id: Tensor
    history: Tensor
    age: Tensor


class ItemFeatures(NamedTuple):
    item_id: Tensor
    category: Tensor
    price: Tensor


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class UserTower(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.ids = nn.Embedding(N_USERS, dim)
        self.items = nn.Embedding(N_ITEMS + 1, dim, padding_idx=0)
        self.mlp = mlp(2 * dim + 1, 256, 128, dim)

    def forward(self, f: UserFeatures):
        seen = (f.history > 0).float()
        history = self.items(f.history).sum(1) / seen.sum(1, keepdim=True).clamp(min=1)
        return self.mlp(torch.cat([self.ids(f.user_id), history, f.age[:, None]], dim=1))


class ItemTower(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.ids = nn.Embedding(N_ITEMS + 1, dim)
        self.categories = nn.Embedding(N_CATEGORIES, 16)
        self.mlp = mlp(dim + 17, 256, 128, dim)

    def forward(self, f: ItemFeatures):
        parts = [self.ids(f.item_id), self.categories(f.category), f.price[:, None]]
        return self.mlp(torch.cat(parts, dim=1))


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user_tower, self.item_tower = UserTower(), ItemTower()
        self.temperature = nn.Parameter(torch.tensor(0.05))

    def forward(self, users, items):
        u = nn.functional.normalize(self.user_tower(users), dim=1)
        i = nn.functional.normalize(self.item_tower(items), dim=1)
        return u @ i.T / self.temperature.clamp(min=0.01)


def clicks(n=50_000):
    history = torch.randint(1, N_ITEMS + 1, (n, HISTORY)) * (torch.rand(n, HISTORY) < 0.6)
    return TensorDataset(
        torch.randint(0, N_USERS, (n,)),
        history,
        torch.rand(n),
        torch.randint(1, N_ITEMS + 1, (n,)),
        torch.randint(0, N_CATEGORIES, (n,)),
        torch.rand(n),
    )


device = "cuda" if torch.cuda.is_available() else "cpu"
model = TwoTower().to(device)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)


def train_step(users: UserFeatures, items: ItemFeatures):
    scores = model(users, items)
    # an item that occurs twice in the batch is no negative of its twin
    same = items.item_id[:, None] == items.item_id[None, :]
    same.fill_diagonal_(False)
    scores = scores.masked_fill(same, float("-inf"))
    labels = torch.arange(len(scores), device=scores.device)
    loss = nn.functional.cross_entropy(scores, labels)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        hits = (scores.topk(10, dim=1).indices == labels[:, None]).any(1).float().mean()
    return loss.item(), hits.item()


if __name__ == "__main__":
    loader = DataLoader(clicks(), batch_size=2048, shuffle=True, drop_last=True)
    for epoch in range(3):
        for batch in loader:
            batch = [column.to(device) for column in batch]
            loss, hits = train_step(UserFeatures(*batch[:3]), ItemFeatures(*batch[3:]))
            print(f"loss {loss:.3f}, hit rate at 10 {hits:.2%}")
