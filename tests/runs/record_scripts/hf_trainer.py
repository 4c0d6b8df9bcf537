"""Train a tiny GPT-2 by the Trainer of Hugging Face, with gradient accumulation."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
config.bos_token_id = config.eos_token_id = None
generator = torch.Generator().manual_seed(0)
tokens = torch.randint(0, 64, (96, 16), generator=generator)
dataset = [{"input_ids": row, "labels": row} for row in tokens]

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=12,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    torch.manual_seed(0)
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=dataset)
    result = trainer.train()
print(f"loss {result.training_loss!r}")
