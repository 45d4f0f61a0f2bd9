"""Denoising diffusion on two-dimensional points: random times, an embedding of time, sampling at the end."""

import torch
from torch import nn


class Denoiser(nn.Module):
    def __init__(self, steps=50, width=64):
        super().__init__()
        self.time = nn.Embedding(steps, width)
        self.inp = nn.Linear(2, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, 2)

    def forward(self, x, t):
        h = self.inp(x) + self.time(t)
        for layer in self.layers:
            h = h + nn.functional.silu(layer(h))
        return self.out(h)


torch.manual_seed(0)
steps = 50
beta = torch.linspace(1e-4, 0.05, steps)
alpha_bar = torch.cumprod(1 - beta, dim=0)
model = Denoiser()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for iteration in range(12):
    angle = torch.rand(32) * 6.2832
    x0 = torch.stack([angle.cos(), angle.sin()], dim=1)
    t = torch.randint(0, steps, (32,))
    noise = torch.randn_like(x0)
    a = alpha_bar[t].unsqueeze(1)
    predicted = model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t)
    loss = nn.functional.mse_loss(predicted, noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"iteration {iteration} loss {loss.item():.6f}")

model.eval()
with torch.no_grad():
    x = torch.randn(16, 2)
    for t in reversed(range(0, steps, 10)):
        z = torch.randn_like(x) if t else 0
        predicted = model(x, torch.full((16,), t))
        x = (x - beta[t] / (1 - alpha_bar[t]).sqrt() * predicted) / (1 - beta[t]).sqrt() + beta[t].sqrt() * z
print(f"samples: mean {x.mean():.5f} std {x.std():.5f}")
torch.save(model.state_dict(), "checkpoint.pt")
