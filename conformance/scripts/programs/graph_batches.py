"""Message passing over batches of small dense graphs, with a padding mask."""

import torch
from torch import nn


class MessageLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.message = nn.Linear(width, width)
        self.update = nn.GRUCell(width, width)

    def forward(self, h, adjacency):
        m = torch.bmm(adjacency, self.message(h))
        b, n, d = h.shape
        return self.update(m.reshape(b * n, d), h.reshape(b * n, d)).view(b, n, d)


class GraphNet(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.layers = nn.ModuleList(MessageLayer(width) for _ in range(depth))
        self.readout = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x, adjacency, mask):
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h, adjacency)
        pooled = (h * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return self.readout(pooled).squeeze(-1)


torch.manual_seed(6)
model = GraphNet()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(12):
    sizes = torch.randint(3, 9, (12,))
    mask = (torch.arange(8) < sizes[:, None]).float()
    pairs = mask[:, :, None] * mask[:, None, :]
    adjacency = (torch.rand(12, 8, 8) < 0.4).float() * pairs
    x = torch.randn(12, 8, 4) * mask[..., None]
    target = adjacency.sum((1, 2)) / sizes
    loss = nn.functional.l1_loss(model(x, adjacency, mask), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{step:3d} mae {loss.item():.6f}")
torch.save(model.state_dict(), "checkpoint.pt")
