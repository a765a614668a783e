"""A training script for Lightning: script_lightning.py BACKEND FOLDER."""

from __future__ import annotations

import sys

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from report import batches, report


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


torch.manual_seed(0)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(process_group_backend=sys.argv[1]),
    max_epochs=2,
    default_root_dir=sys.argv[2],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Module()
trainer.fit(model, torch.utils.data.DataLoader(batches(), batch_size=4))
assert trainer.world_size == 2
assert trainer.global_step == 8
report(model)
