"""Per-sample gradients with torch.func, clipped and noised; then plain steps."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call, grad, hessian, vmap

torch.manual_seed(0)


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3)
        self.fc1 = nn.Linear(6 * 9, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2).flatten(1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


model = CNN()
opt = torch.optim.SGD(model.parameters(), lr=0.1)


def compute_loss(params, buffers, s, t):
    return F.nll_loss(functional_call(model, (params, buffers), (s.unsqueeze(0),)), t.unsqueeze(0))


ft = vmap(grad(compute_loss), in_dims=(None, None, 0, 0))
for i in range(5):
    x, y = torch.randn(12, 1, 8, 8), torch.randint(0, 4, (12,))
    params = {k: v.detach() for k, v in model.named_parameters()}
    buffers = {k: v.detach() for k, v in model.named_buffers()}
    g = ft(params, buffers, x, y)
    norms = torch.stack([v.flatten(1).norm(dim=1) for v in g.values()]).norm(dim=0)
    f = (0.5 / (norms + 1e-6)).clamp(max=1.0)
    opt.zero_grad()
    for k, p in model.named_parameters():
        p.grad = torch.einsum("n,n...->...", f, g[k]) / 12 + 0.01 * torch.randn_like(p)
    opt.step()
    loss = F.nll_loss(model(x), y)
    print(f"{i} {loss.item():.6f} {norms.mean().item():.6f}")
for i in range(4):  # plain steps afterwards, then one of both
    opt.zero_grad()
    loss = F.nll_loss(model(x), y)
    loss.backward()
    opt.step()
    g = ft(dict(model.named_parameters()), {}, x, y)
    print(f"plain {i} {loss.item():.6f} {sum(v.sum().item() for v in g.values()):.4f}")
w = model.fc2.weight.detach()
h = hessian(lambda w: F.cross_entropy(torch.ones(2, 16) @ w.T, torch.tensor([0, 1])))(w)
print(f"{h.sum().item():.4f} {h.norm().item():.5f}")
torch.save(model.state_dict(), "checkpoint.pt")
