"""GradNorm: losses stacked, weighted by a parameter of their own, and differentiated again after the step."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
        self.a, self.b = nn.Linear(24, 3), nn.Linear(24, 1)

    def forward(self, x):
        h = self.shared(x)
        return self.a(h), self.b(h)


net = Net()
optimizer = torch.optim.Adam(net.parameters(), 1e-2)
weights = nn.Parameter(torch.ones(2))
weights_optimizer = torch.optim.Adam([weights], 1e-2)
initial = None
for step in range(5):
    x, y, z = torch.randn(8, 10), torch.randint(0, 3, (8,)), torch.randn(8, 1)
    a, b = net(x)
    losses = torch.stack([F.cross_entropy(a, y), F.mse_loss(b, z)])
    if initial is None:
        initial = losses.detach()
    weighted = weights * losses
    optimizer.zero_grad()
    weighted.sum().backward(retain_graph=True)
    weights.grad = None
    norms = []
    for k in range(2):
        gradient = torch.autograd.grad(weighted[k], net.shared[2].weight, retain_graph=True, create_graph=True)
        norms.append(torch.norm(gradient[0]))
    norms = torch.stack(norms)
    rates = losses.detach() / initial
    target = (norms.mean() * (rates / rates.mean()) ** 0.5).detach()
    weights.grad = torch.autograd.grad((norms - target).abs().sum(), weights)[0]
    weights_optimizer.step()
    optimizer.step()
    weights.data = weights.data / weights.data.sum() * 2
    print(f"step {step} {losses.sum().item():.6f} {weights[0].item():.6f}")
torch.save({"net": net.state_dict(), "weights": weights.detach()}, "checkpoint.pt")
