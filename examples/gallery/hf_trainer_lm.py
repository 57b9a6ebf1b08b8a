"""Pretrains a small Llama with the Hugging Face Trainer: bf16, gradient checkpointing, accumulation."""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)


class PackedTokens(torch.utils.data.Dataset):
    """Documents packed to one length, so that there is no padding."""

    def __init__(self, blocks=512, length=1024, vocab=32000):
        self.data = torch.randint(0, vocab, (blocks, length), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return {"input_ids": self.data[i], "labels": self.data[i].clone()}


class TokensSeen(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * 1024
        print(f"{state.global_step * per_step:,} tokens: {logs}")


config = LlamaConfig(
    vocab_size=32000,
    hidden_size=512,
    intermediate_size=1376,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)
model = LlamaForCausalLM(config)
print(f"{model.num_parameters() / 1e6:.1f} M parameters")

args = TrainingArguments(
    output_dir="out/small-llama",
    max_steps=1000,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": False},
    bf16=torch.cuda.is_available(),
    learning_rate=6e-4,
    lr_scheduler_type="cosine",
    warmup_steps=50,
    max_grad_norm=1.0,
    adam_beta2=0.95,
    weight_decay=0.1,
    optim="adamw_torch",
    logging_steps=10,
    save_steps=500,
    report_to=[],
)

trainer = Trainer(
    model=model,
    args=args,
    train_dataset=PackedTokens(),
    data_collator=default_data_collator,
    callbacks=[TokensSeen()],
)

if __name__ == "__main__":
    trainer.train()
