"""The model itself raises for a bad batch; the script catches it, skips the batch and fails on the last."""

import torch
from torch import nn


class Checked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 32)
        self.second = nn.Linear(32, 32)
        self.last = nn.Linear(32, 2)

    def forward(self, x):
        if x.shape[1] != 6:
            raise ValueError(f"expected 6 features, got {x.shape[1]}")
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


torch.manual_seed(0)
model = Checked()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    x = torch.randn(12, 5 if step in (5, 11) else 6)
    try:
        loss = nn.functional.mse_loss(model(x), x[:, :2])
    except ValueError as error:
        print("skipped:", error)
        if step == 11:
            torch.save(model.state_dict(), "checkpoint.pt")
            raise
        continue
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: {loss.item():.6f}")
