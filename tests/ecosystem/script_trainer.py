"""A training script for the Hugging Face Trainer: script_trainer.py BACKEND FOLDER."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from report import report
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

dist.init_process_group(sys.argv[1])
torch.manual_seed(0)
config = BertConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
model = BertForSequenceClassification(config)
rows = [
    {"input_ids": torch.arange(i, i + 8) % 50, "attention_mask": torch.ones(8, dtype=torch.long), "labels": i % 2}
    for i in range(32)
]
arguments = TrainingArguments(
    output_dir=sys.argv[2], use_cpu=True, per_device_train_batch_size=4, num_train_epochs=2, learning_rate=1e-3,
    report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
result = trainer.train()
assert arguments.world_size == dist.get_world_size() == 2
assert result.global_step == 8  # 32 rows, 4 a process, 2 processes, 2 epochs
assert trainer.evaluate()["eval_loss"] > 0
report(model)
dist.destroy_process_group()
