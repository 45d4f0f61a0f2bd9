"""One body, three heads, a dictionary of outputs and learned task weights outside the model."""

import torch
from torch import nn


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(14, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.heads = nn.ModuleDict({"class": nn.Linear(64, 4), "value": nn.Linear(64, 1), "flags": nn.Linear(64, 5)})

    def forward(self, x):
        h = self.body(x)
        return {name: head(h) for name, head in self.heads.items()}


torch.manual_seed(0)
model = MultiTask()
log_variances = nn.Parameter(torch.zeros(3))
optimizer = torch.optim.Adam([{"params": model.parameters()}, {"params": [log_variances], "lr": 0.05}], lr=3e-3)
for step in range(12):
    x = torch.randn(15, 14)
    out = model(x)
    losses = torch.stack(
        [
            nn.functional.cross_entropy(out["class"], x[:, :4].argmax(1)),
            nn.functional.smooth_l1_loss(out["value"].squeeze(1), x.sum(1)),
            nn.functional.multilabel_soft_margin_loss(out["flags"], (x[:, 4:9] > 0).float()),
        ]
    )
    loss = (losses * torch.exp(-log_variances) + log_variances).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} total {loss.item():.6f} parts {[round(v, 5) for v in losses.tolist()]}")
torch.save({"model": model.state_dict(), "weights": log_variances.detach()}, "checkpoint.pt")
