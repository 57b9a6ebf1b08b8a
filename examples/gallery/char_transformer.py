"""A small character-level transformer; `make` gives the model, a batch and the loss."""

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB = 96
CONTEXT = 256
SMOOTHING = 0.1


class Block(nn.Module):
    def __init__(self, width, heads, dropout=0.1):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask):
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-2, -1) / (C // self.heads) ** 0.5
        scores = scores.masked_fill(mask[:T, :T] == 0, float("-inf"))
        attended = self.dropout(scores.softmax(dim=-1)) @ v
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(B, T, C)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class CharTransformer(nn.Module):
    def __init__(self, vocab=VOCAB, width=384, depth=6, heads=6, context=CONTEXT):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        T = ids.shape[1]
        x = self.tokens(ids) + self.positions(torch.arange(T, device=ids.device))
        mask = torch.tril(torch.ones(T, T, device=ids.device))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def draw(batch):
    text = torch.randint(0, VOCAB, (batch, CONTEXT + 1))
    return text[:, :-1], text[:, 1:]


def loss_against(targets):
    def loss(logits):
        hot = F.one_hot(targets, VOCAB).float()
        smooth = hot * (1 - SMOOTHING) + torch.full_like(hot, SMOOTHING / VOCAB)
        weight = torch.arange(CONTEXT, device=logits.device) >= 8  # the first few have no context to speak of
        per_token = -(smooth * logits.log_softmax(dim=-1)).sum(dim=-1)
        return (per_token * weight).sum() / (weight.sum() * targets.shape[0])

    return loss


def make(batch):
    ids, targets = draw(batch)
    return CharTransformer(), (ids,), loss_against(targets)


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = CharTransformer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(100):
        ids, targets = (t.to(device) for t in draw(64))
        optimizer.zero_grad()
        loss = loss_against(targets)(model(ids))
        loss.backward()
        optimizer.step()
        print(step, loss.item())
