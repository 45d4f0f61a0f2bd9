"""SimCLR: every sample of the batch is compared with every other."""

import torch
import torch.nn.functional as F
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.projector = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x):
        return self.projector(self.backbone(x))


def nt_xent(z, temperature=0.5):
    n = z.shape[0] // 2
    z = F.normalize(z, dim=1)
    similarity = z @ z.T / temperature
    similarity.masked_fill_(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
    targets = torch.arange(2 * n).roll(n)
    return F.cross_entropy(similarity, targets)


torch.manual_seed(3)
model = Encoder()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
for step in range(12):
    x = torch.randn(12, 32)
    views = torch.cat([x + 0.1 * torch.randn_like(x), x * (torch.rand_like(x) > 0.1)])
    loss = nt_xent(model(views))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: contrastive loss {loss.item():.6f}")
torch.save(model.backbone.state_dict(), "checkpoint.pt")
