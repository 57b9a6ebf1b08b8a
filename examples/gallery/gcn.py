"""Classifies the papers of a citation graph with a graph convolutional network (PyTorch Geometric)."""

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

NODES, EDGES, FEATURES, CLASSES = 20_000, 120_000, 500, 7


def citations():
    generator = torch.Generator().manual_seed(12)
    edge_index = torch.randint(0, NODES, (2, EDGES), generator=generator)
    edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    order = torch.randperm(NODES, generator=generator)
    train_mask = torch.zeros(NODES, dtype=torch.bool)
    train_mask[order[:2000]] = True
    test_mask = torch.zeros(NODES, dtype=torch.bool)
    test_mask[order[-4000:]] = True
    return Data(
        x=torch.rand(NODES, FEATURES, generator=generator),
        edge_index=edge_index,
        y=torch.randint(0, CLASSES, (NODES,), generator=generator),
        train_mask=train_mask,
        test_mask=test_mask,
    )


class GCN(torch.nn.Module):
    def __init__(self, hidden=256, layers=3):
        super().__init__()
        sizes = [FEATURES] + [hidden] * (layers - 1) + [CLASSES]
        self.convs = torch.nn.ModuleList([GCNConv(a, b) for a, b in zip(sizes, sizes[1:])])
        self.norms = torch.nn.ModuleList([torch.nn.BatchNorm1d(hidden) for _ in range(layers - 1)])

    def forward(self, x, edge_index):
        for conv, norm in zip(self.convs, self.norms):
            x = F.dropout(norm(conv(x, edge_index)).relu(), p=0.5, training=self.training)
        return self.convs[-1](x, edge_index)


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
data = citations().to(device)
model = GCN().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)


def train():
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    return loss


@torch.no_grad()
def test():
    model.eval()
    predicted = model(data.x, data.edge_index).argmax(dim=-1)
    correct = predicted[data.test_mask] == data.y[data.test_mask]
    return int(correct.sum()) / int(data.test_mask.sum())


if __name__ == "__main__":
    for epoch in range(1, 201):
        loss = train()
        accuracy = test()
        print(f"epoch {epoch:03d}: loss {loss:.4f}, test {accuracy:.4f}")
