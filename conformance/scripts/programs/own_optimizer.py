"""An optimizer and an autograd function of one's own."""

import torch
from torch import nn
from torch.optim import Optimizer


class Lion(Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.mul_(1 - group["lr"] * group["weight_decay"])
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                beta1, beta2 = group["betas"]
                # the square root keeps the step smooth where the original takes the sign
                update = average * beta1 + p.grad * (1 - beta1)
                p.add_(update / (update.abs() + 1e-2).sqrt(), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - beta2)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradient * (s + x * s * (1 - s))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(9, 40), nn.Linear(40, 40), nn.Linear(40, 40)])
        self.out = nn.Linear(40, 2)

    def forward(self, x):
        for layer in self.layers:
            x = Swish.apply(layer(x))
        return self.out(x)


torch.manual_seed(0)
model = Net()
optimizer = Lion(model.parameters(), lr=0.05, weight_decay=0.01)
for step in range(12):
    x = torch.randn(16, 9)
    loss = nn.functional.mse_loss(model(x), torch.stack([x.mean(1), x.std(1)], dim=1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f}")
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
