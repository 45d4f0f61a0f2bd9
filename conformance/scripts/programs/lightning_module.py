"""PyTorch Lightning: a LightningModule with training, validation, a scheduler and clipping."""

import logging
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class LitClassifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 3))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        print(f"train {self.global_step} {loss.item():.6f}")
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        print(f"valid {F.cross_entropy(self(x), y).item():.6f}")

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


if __name__ == "__main__":
    L.seed_everything(7, verbose=False)
    x = torch.randn(96, 10)
    y = x[:, :3].argmax(1)
    model = LitClassifier()
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(
        model,
        DataLoader(TensorDataset(x[:80], y[:80]), 10, shuffle=True),
        DataLoader(TensorDataset(x[80:], y[80:]), 16),
    )
    torch.save(model.state_dict(), "checkpoint.pt")
