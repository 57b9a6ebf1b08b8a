"""A text classifier that stops at the layer where it is sure, and a training that stops when it is good."""

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, CLASSES, LENGTH = 20000, 4, 128
THRESHOLD = 0.9
device = "cuda" if torch.cuda.is_available() else "cpu"


class EarlyExitEncoder(nn.Module):
    def __init__(self, width=256, depth=8, heads=4):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.position = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True) for _ in range(depth)]
        )
        self.exits = nn.ModuleList([nn.Linear(width, CLASSES) for _ in range(depth)])

    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        all_logits = []
        for layer, head in zip(self.layers, self.exits):
            x = layer(x)
            logits = head(x.mean(dim=1))
            all_logits.append(logits)
            confidence = logits.softmax(dim=-1).amax(dim=-1).mean()
            if confidence > THRESHOLD:
                break
        return all_logits


def loss_of(all_logits, labels):
    total, weight = 0.0, 0.0
    for depth, logits in enumerate(all_logits, start=1):
        total = total + depth * F.cross_entropy(logits, labels)
        weight += depth
    return total / weight


def batches(size):
    while True:
        tokens = torch.randint(0, VOCAB, (size, LENGTH), device=device)
        yield tokens, tokens[:, 0] % CLASSES


model = EarlyExitEncoder().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
best, patience = float("inf"), 0

for step, (tokens, labels) in enumerate(batches(64)):
    all_logits = model(tokens)
    loss = loss_of(all_logits, labels)
    if torch.isnan(loss):
        raise RuntimeError("diverged")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

    current = loss.item()
    if current < best - 1e-3:
        best, patience = current, 0
    else:
        patience += 1
    if step % 10 == 0:
        print(f"step {step}: loss {current:.4f}, left after {len(all_logits)} layers")
    if current < 0.05 or patience > 200 or step >= 2000:
        break
