"""A vision transformer with mixup, label smoothing and stochastic depth."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, dim, drop):
        super().__init__()
        self.norm1, self.norm2, self.drop = nn.LayerNorm(dim), nn.LayerNorm(dim), drop
        self.attention = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def keep(self, x):
        if not self.training or self.drop == 0.0:
            return x
        kept = 1 - self.drop
        return x * x.new_empty(x.shape[0], 1, 1).bernoulli_(kept) / kept

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.keep(self.attention(y, y, y, need_weights=False)[0])
        return x + self.keep(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    def __init__(self, dim=32, depth=4, classes=4):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, stride=4)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.position = nn.Parameter(torch.randn(1, 17, dim) * 0.02)
        self.blocks = nn.Sequential(*[Block(dim, 0.1 * i / depth) for i in range(depth)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


def mixup(x, y, alpha=0.4):
    share = torch.distributions.Beta(alpha, alpha).sample().item()
    order = torch.randperm(x.size(0))
    return share * x + (1 - share) * x[order], y, y[order], share


torch.manual_seed(0)
model = ViT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
for step in range(10):
    labels = torch.randint(0, 4, (12,))
    images = torch.rand(12, 3, 16, 16) + labels.view(-1, 1, 1, 1)
    images, a, b, share = mixup(images, labels)
    logits = model(images)
    loss = share * F.cross_entropy(logits, a, label_smoothing=0.1) + (1 - share) * F.cross_entropy(
        logits, b, label_smoothing=0.1
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} share {share:.4f} loss {loss.item():.6f}")
torch.save(model.state_dict(), "checkpoint.pt")
