"""An exponential moving average of the weights, kept by hand and used for evaluation."""

import copy

import torch
from torch import nn


class EMA:
    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = copy.deepcopy(model).eval()
        for p in self.shadow.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for average, parameter in zip(self.shadow.parameters(), model.parameters()):
            average.lerp_(parameter, 1 - self.decay)
        for average, buffer in zip(self.shadow.buffers(), model.buffers()):
            average.copy_(buffer)


torch.manual_seed(9)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1),
    nn.GroupNorm(4, 16),
    nn.ReLU(),
    nn.Conv2d(16, 16, 3, stride=2),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(16, 4),
)
ema = EMA(model, decay=0.8)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
held_out = torch.randn(12, 3, 12, 12)
for step in range(12):
    images = torch.randn(12, 3, 12, 12)
    labels = images.mean(dim=(1, 2, 3)).mul(40).long().clamp(0, 3)
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update(model)
    if step % 2 == 1:
        with torch.no_grad():
            gap = (model(held_out) - ema.shadow(held_out)).abs().mean()
        print(f"step {step} loss {loss.item():.6f} distance of the average {gap.item():.6f}")
torch.save(ema.shadow.state_dict(), "checkpoint.pt")
