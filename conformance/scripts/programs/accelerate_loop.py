"""An accelerate loop: prepare, accumulate, backward, clip, gather for metrics."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    set_seed(42)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    x = torch.randn(160, 12)
    y = (x[:, 0] * x[:, 1] > 0).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(2):
        model.train()
        for step, (inputs, labels) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            accelerator.print(f"epoch {epoch} step {step} loss {loss.item():.6f}")
        model.eval()
        with torch.no_grad():
            predictions = accelerator.gather_for_metrics(model(x.to(accelerator.device)).argmax(-1))
        accelerator.print(f"accuracy {(predictions.cpu() == y).float().mean().item():.4f}")
    accelerator.wait_for_everyone()
    torch.save(accelerator.unwrap_model(model).state_dict(), "checkpoint.pt")


if __name__ == "__main__":
    main()
