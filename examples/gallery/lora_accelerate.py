"""Low-rank adapters for GPT-2, written by hand and trained with Accelerate (downloads gpt2)."""

import argparse
import math

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup
from transformers.pytorch_utils import Conv1D


class LoRA(nn.Module):
    """A frozen layer plus a product of two thin matrices."""

    def __init__(self, layer: Conv1D, rank: int, alpha: int, dropout: float = 0.05):
        super().__init__()
        self.layer = layer
        size_in, size_out = layer.weight.shape
        self.a = nn.Parameter(torch.empty(size_in, rank))
        self.b = nn.Parameter(torch.zeros(rank, size_out))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        self.scale, self.dropout = alpha / rank, nn.Dropout(dropout)

    def forward(self, x):
        return self.layer(x) + self.dropout(x) @ self.a @ self.b * self.scale


def add_adapters(model, rank, alpha):
    for p in model.parameters():
        p.requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = LoRA(block.attn.c_attn, rank, alpha)
        block.attn.c_proj = LoRA(block.attn.c_proj, rank, alpha)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    everything = sum(p.numel() for p in model.parameters())
    return f"{trained:,} of {everything:,} parameters are trained ({trained / everything:.2%})"


class Instructions(Dataset):
    def __init__(self, n=512, length=512, vocab=50257):
        self.rows = torch.randint(0, vocab, (n, length), generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids = self.rows[i]
        labels = ids.clone()
        labels[:64] = -100  # the instruction itself is not learned
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-4)
    args = parser.parse_args()

    set_seed(42)
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate, mixed_precision="bf16")
    model = AutoModelForCausalLM.from_pretrained(args.model)
    accelerator.print(add_adapters(model, args.rank, args.alpha))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    loader = DataLoader(Instructions(), batch_size=args.batch_size, shuffle=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, 10, args.epochs * len(loader) // args.accumulate)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    for epoch in range(args.epochs):
        model.train()
        for step, batch in enumerate(loader):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if step % 10 == 0:
                mean = accelerator.gather(loss.detach()).mean().item()
                accelerator.print(f"epoch {epoch} step {step}: loss {mean:.4f}")
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
