"""Fine-tunes BERT on reviews, with gradient accumulation, clipping and warm-up (downloads bert-base-uncased)."""

import math
import random

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForSequenceClassification, AutoTokenizer

MODEL = "bert-base-uncased"
MAX_LENGTH = 128
BATCH_SIZE = 8
ACCUMULATE = 4
EPOCHS = 3
LR = 2e-5
WARMUP = 0.1


def load_reviews(n=800):
    random.seed(0)
    good = "a warm and funny film with a cast that never puts a foot wrong".split()
    bad = "two dull hours of noise that i would like to have back from the director".split()
    rows = []
    for i in range(n):
        words = random.choices(good if i % 2 else bad, k=random.randint(20, 150))
        rows.append({"text": " ".join(words), "label": i % 2})
    return rows


def main():
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=2).to(device)

    def collate(rows):
        batch = tokenizer(
            [row["text"] for row in rows],
            padding="max_length",
            truncation=True,
            max_length=MAX_LENGTH,
            return_tensors="pt",
        )
        batch["labels"] = torch.tensor([row["label"] for row in rows])
        return batch

    loader = DataLoader(load_reviews(), batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate)
    no_decay = ("bias", "LayerNorm.weight")
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not n.endswith(no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if n.endswith(no_decay)], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=LR)
    total = EPOCHS * len(loader) // ACCUMULATE

    def factor(step):
        warm = WARMUP * total
        if step < warm:
            return step / max(1, warm)
        done = (step - warm) / max(1, total - warm)
        return 0.5 * (1 + math.cos(math.pi * done))

    scheduler = LambdaLR(optimizer, factor)
    for epoch in range(EPOCHS):
        model.train()
        bar = tqdm(loader, desc=f"epoch {epoch}")
        for i, batch in enumerate(bar):
            batch = {k: v.to(device) for k, v in batch.items()}
            loss = model(**batch).loss / ACCUMULATE
            loss.backward()
            if (i + 1) % ACCUMULATE == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                bar.set_postfix(loss=loss.item() * ACCUMULATE, lr=scheduler.get_last_lr()[0])


if __name__ == "__main__":
    main()
