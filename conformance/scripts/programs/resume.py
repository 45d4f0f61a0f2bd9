"""Train, stop, build everything anew from the checkpoint and go on; random numbers included."""

import os

import torch
from torch import nn


def build():
    model = nn.Sequential(
        nn.Linear(12, 48), nn.GELU(), nn.Dropout(0.2), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 12)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    return model, optimizer, scheduler


def run(until, path):
    model, optimizer, scheduler = build()
    start = 0
    if os.path.exists(path):
        saved = torch.load(path, weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        torch.set_rng_state(saved["rng"])
        start = saved["step"]
        print(f"resumed at step {start}")
    for step in range(start, until):
        x = torch.randn(16, 12)
        loss = (model(x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        print(f"step {step} loss {loss.item():.6f} lr {scheduler.get_last_lr()[0]:.6f}")
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "step": until,
        },
        path,
    )


torch.manual_seed(0)
run(6, "checkpoint.pt")
run(12, "checkpoint.pt")
