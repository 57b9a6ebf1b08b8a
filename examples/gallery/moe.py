"""A language model with mixture-of-experts layers by hand: top-2 routing, a loop over experts, a balance loss."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Experts(nn.Module):
    def __init__(self, dim, hidden, experts=8, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(dim, hidden), nn.SiLU(), nn.Linear(hidden, dim)) for _ in range(experts)]
        )

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        probs = self.gate(x).softmax(dim=-1)
        weights, chosen = probs.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == i)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        share = F.one_hot(chosen, len(self.experts)).float().mean(dim=(0, 1))
        balance = len(self.experts) * (share * probs.mean(dim=0)).sum()
        return out.view(shape), balance


class MoEBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.experts = Experts(dim, 4 * dim)

    def forward(self, x, mask):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False, is_causal=True)[0]
        out, balance = self.experts(self.norm2(x))
        return x + out, balance


class MoELM(nn.Module):
    def __init__(self, vocab=32000, dim=512, depth=6, heads=8, context=512):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.position = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList([MoEBlock(dim, heads) for _ in range(depth)])
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, tokens):
        T = tokens.size(1)
        x = self.embed(tokens) + self.position.weight[:T]
        balance = 0.0
        for block in self.blocks:
            x, b = block(x, self.mask[:T, :T])
            balance = balance + b
        return self.head(self.norm(x)), balance / len(self.blocks)


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = MoELM().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    tokens = torch.randint(0, 32000, (256, 513))
    for step in range(1000):
        rows = torch.randint(0, len(tokens), (8,))
        batch = tokens[rows].to(device)
        logits, balance = model(batch[:, :-1])
        lm_loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss = lm_loss + 0.01 * balance
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: lm {lm_loss.item():.3f}, balance {balance.item():.3f}")


if __name__ == "__main__":
    main()
