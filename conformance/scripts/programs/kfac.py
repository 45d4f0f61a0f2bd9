"""A Kronecker-factored step from hooks on layers, then plain SGD without them."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
acts, grads, order = {}, {}, []


def pre(m, i):
    acts[m] = i[0].detach()


def full(m, gi, go):
    grads[m] = go[0].detach()
    order.append(type(m).__name__)


hs = []
for m in net:
    if isinstance(m, nn.Linear):
        hs.append(m.register_forward_pre_hook(pre))
        hs.append(m.register_full_backward_hook(full))


def step(lr=0.5):
    for m in acts:
        a, g = acts[m], grads[m] * len(acts[m])
        A = a.T @ a / len(a) + 0.3 * torch.eye(a.shape[1])
        G = g.T @ g / len(g) + 0.3 * torch.eye(g.shape[1])
        m.weight.data -= lr * torch.linalg.solve(G, m.weight.grad) @ torch.linalg.inv(A)
        m.bias.data -= lr * m.bias.grad


x, y = torch.randn(16, 8), torch.randint(0, 3, (16,))
for i in range(5):
    net.zero_grad()
    l = F.cross_entropy(net(x), y)
    l.backward()
    step()
    print(f"{i} {l.item():.6f} {len(order)}")
for h in hs:
    h.remove()
opt = torch.optim.SGD(net.parameters(), 0.1)
for i in range(5):
    opt.zero_grad()
    l = F.cross_entropy(net(x), y)
    l.backward()
    opt.step()
    print(f"{i} {l.item():.6f} {len(order)}")
torch.save(net.state_dict(), "checkpoint.pt")
