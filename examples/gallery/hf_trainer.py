"""Classifies short texts with DistilBERT and the Hugging Face Trainer, from scratch."""

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import DistilBertConfig, DistilBertForSequenceClassification, Trainer, TrainingArguments

LABELS = ["world", "sports", "business", "science"]


class News(Dataset):
    def __init__(self, n, length=128, vocab=30522, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(1000, vocab, (n, length), generator=generator)
        self.labels = torch.randint(0, len(LABELS), (n,), generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {
            "input_ids": self.ids[i],
            "attention_mask": torch.ones_like(self.ids[i]),
            "labels": self.labels[i],
        }


def compute_metrics(prediction):
    logits, labels = prediction
    return {"accuracy": float((np.argmax(logits, axis=-1) == labels).mean())}


config = DistilBertConfig(num_labels=len(LABELS), id2label=dict(enumerate(LABELS)))
model = DistilBertForSequenceClassification(config)

training_args = TrainingArguments(
    output_dir="out/news",
    num_train_epochs=3,
    per_device_train_batch_size=16,
    per_device_eval_batch_size=64,
    learning_rate=5e-5,
    warmup_steps=100,
    weight_decay=0.01,
    logging_steps=10,
    save_strategy="no",
    report_to="none",
)

trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=News(2000),
    eval_dataset=News(200, seed=1),
    compute_metrics=compute_metrics,
)

if __name__ == "__main__":
    trainer.train()
    print(trainer.evaluate())
