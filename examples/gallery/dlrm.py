"""Click-through rate with a DLRM: embedding bags with sparse gradients, pairwise products, two MLPs."""

import argparse

import numpy as np
import torch
import torch.nn as nn


def make_mlp(sizes, last=None):
    layers = []
    for n, m in zip(sizes[:-1], sizes[1:]):
        linear = nn.Linear(n, m)
        nn.init.normal_(linear.weight, 0.0, np.sqrt(2 / (m + n)))
        nn.init.normal_(linear.bias, 0.0, np.sqrt(1 / m))
        layers += [linear, nn.ReLU()]
    if last is not None:
        layers[-1] = last
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    def __init__(self, tables, dim, dense, bottom, top):
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(n, dim, mode="sum", sparse=True) for n in tables])
        for n, table in zip(tables, self.tables):
            nn.init.uniform_(table.weight, -np.sqrt(1 / n), np.sqrt(1 / n))
        self.bottom = make_mlp([dense, *bottom, dim])
        pairs = (len(tables) + 1) * len(tables) // 2
        self.top = make_mlp([dim + pairs, *top, 1], last=nn.Sigmoid())
        rows, cols = np.tril_indices(len(tables) + 1, k=-1)
        self.rows, self.cols = torch.tensor(rows), torch.tensor(cols)

    def interact(self, x, sparse):
        stacked = torch.stack([x, *sparse], dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        flat = products[:, self.rows.to(x.device), self.cols.to(x.device)]
        return torch.cat([x, flat], dim=1)

    def forward(self, dense, indices, offsets):
        x = self.bottom(dense)
        sparse = [table(i, o) for table, i, o in zip(self.tables, indices, offsets)]
        return self.top(self.interact(x, sparse)).squeeze(1)


def random_batch(rng, size, tables, dense, longest):
    """Each sample names a few rows of each table."""
    indices, offsets = [], []
    for n in tables:
        lengths = rng.integers(1, longest + 1, size)
        offsets.append(torch.from_numpy(np.concatenate([[0], lengths.cumsum()[:-1]])))
        indices.append(torch.from_numpy(rng.integers(0, n, lengths.sum())))
    clicked = torch.from_numpy(rng.random(size, dtype=np.float32)).round()
    return torch.from_numpy(rng.random((size, dense), dtype=np.float32)), indices, offsets, clicked


def main():
    parser = argparse.ArgumentParser(description="deep learning recommendation model")
    parser.add_argument("--tables", default="100000-50000-20000-5000-1000-500-100-20")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dense", type=int, default=13)
    parser.add_argument("--bottom", default="512-256")
    parser.add_argument("--top", default="1024-512-256")
    parser.add_argument("--bag", type=int, default=10)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    sizes = {name: [int(n) for n in getattr(args, name).split("-")] for name in ("tables", "bottom", "top")}

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = DLRM(sizes["tables"], args.dim, args.dense, sizes["bottom"], sizes["top"]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    criterion = nn.BCELoss()
    rng = np.random.default_rng(2)
    for i in range(args.batches):
        dense, indices, offsets, clicked = random_batch(
            rng, args.batch, sizes["tables"], args.dense, args.bag
        )
        predicted = model(
            dense.to(device), [x.to(device) for x in indices], [x.to(device) for x in offsets]
        ).clamp(1e-6, 1 - 1e-6)
        loss = criterion(predicted, clicked.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 10 == 0:
            correct = (predicted.detach().cpu().numpy().round() == clicked.numpy()).mean()
            print(f"batch {i}: loss {loss.detach().cpu().numpy():.4f}, accuracy {correct:.3f}")


if __name__ == "__main__":
    main()
