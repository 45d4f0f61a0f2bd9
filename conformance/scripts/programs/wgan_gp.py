"""WGAN with a gradient penalty: the gradient of a gradient."""

import torch
from torch import autograd, nn

torch.manual_seed(1)
G = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 6))
D = nn.Sequential(nn.Linear(6, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
opt_G = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.0, 0.9))
opt_D = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.0, 0.9))


def gradient_penalty(real, fake):
    alpha = torch.rand(real.size(0), 1)
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = D(mixed)
    gradients = autograd.grad(
        outputs=scores, inputs=mixed, grad_outputs=torch.ones_like(scores), create_graph=True, retain_graph=True
    )[0]
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


for i in range(10):
    real = torch.randn(16, 6) * 0.5 + 1
    opt_D.zero_grad()
    fake = G(torch.randn(16, 4)).detach()
    penalty = gradient_penalty(real, fake)
    d_loss = D(fake).mean() - D(real).mean() + 10 * penalty
    d_loss.backward()
    opt_D.step()
    line = f"{i} critic {d_loss.item():.6f} penalty {penalty.item():.6f}"
    if i % 2 == 0:
        opt_G.zero_grad()
        g_loss = -D(G(torch.randn(16, 4))).mean()
        g_loss.backward()
        opt_G.step()
        line += f" generator {g_loss.item():.6f}"
    print(line)
torch.save({"G": G.state_dict(), "D": D.state_dict()}, "checkpoint.pt")
