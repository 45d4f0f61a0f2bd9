"""A model that is changed in every way while it is trained."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
        self.head = nn.Linear(24, 3)

    def forward(self, x):
        return self.head(self.b(x))


m = Net()
opt = torch.optim.SGD(m.parameters(), 0.1)


def go(tag, n=3, dt=torch.float32):
    for i in range(n):
        x, y = torch.randn(8, 8).to(dt), torch.randint(0, m.head.out_features, (8,))
        opt.zero_grad()
        l = F.cross_entropy(m(x), y)
        l.backward()
        opt.step()
        print(f"{tag} {i} {l.item():.5f} {sum(p.grad is not None for p in m.parameters())}")


go("plain")
m.b.requires_grad_(False)
go("frozen")
m.b.requires_grad_(True)
go("again")
m.head = nn.Linear(24, 5)
opt = torch.optim.SGD(m.parameters(), 0.1)
go("head")
m.b.append(nn.Linear(24, 24))
opt.add_param_group({"params": m.b[-1].parameters(), "lr": 0.05})
go("layer")
sd = {k: torch.randn_like(v) * 0.1 for k, v in m.state_dict().items()}
m.load_state_dict(sd)
go("loaded")
m.load_state_dict({k: v * 0.5 for k, v in sd.items()}, assign=True)
opt = torch.optim.SGD(m.parameters(), 0.1)
go("assigned")
m.double()
go("double", dt=torch.float64)
m.float()
go("float")
del m.b[4]
opt = torch.optim.SGD(m.parameters(), 0.1)
go("removed")
m.b[0].weight.data = m.b[0].weight.data * 0.5
go("data")
m.b[2] = nn.Identity()
opt = torch.optim.Adam(m.parameters(), 1e-2)
go("identity")
m.forward = lambda x: m.head(m.b(x) * 2)
go("forward")
nn.init.xavier_uniform_(m.head.weight)
go("init")
torch.save(m.state_dict(), "checkpoint.pt")
