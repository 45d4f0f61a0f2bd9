"""MAML with torch.func.functional_call: gradients through an inner step."""

import torch
from torch import nn
from torch.func import functional_call

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)


def sample(amplitude, phase):
    x = torch.rand(10, 1) * 6 - 3
    return x, amplitude * torch.sin(x + phase)


for iteration in range(8):
    optimizer.zero_grad()
    total = 0.0
    for _ in range(3):
        amplitude, phase = torch.rand(1) * 2, torch.rand(1) * 3
        x, y = sample(amplitude, phase)
        weights = dict(model.named_parameters())
        inner = nn.functional.mse_loss(functional_call(model, weights, (x,)), y)
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        adapted = {name: w - 0.05 * g for (name, w), g in zip(weights.items(), gradients)}
        x, y = sample(amplitude, phase)
        outer = nn.functional.mse_loss(functional_call(model, adapted, (x,)), y)
        outer.backward()
        total += outer.item()
    optimizer.step()
    print(f"iteration {iteration} loss {total / 3:.6f}")
torch.save(model.state_dict(), "checkpoint.pt")
