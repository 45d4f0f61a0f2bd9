"""optimizer.step(closure) with an ordinary optimizer and a quadratic fit."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(3, 40), nn.Softplus(), nn.Linear(40, 40), nn.Softplus(), nn.Linear(40, 1))
optimizer = torch.optim.NAdam(net.parameters(), lr=0.01)
for step in range(12):
    x = torch.rand(20, 3)
    y = (x**2).sum(dim=1, keepdim=True)

    def closure(x=x, y=y):
        optimizer.zero_grad()
        loss = ((net(x) - y) ** 2).mean()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    print(f"step {step} loss {float(loss):.7f}")
torch.save(net.state_dict(), "checkpoint.pt")
