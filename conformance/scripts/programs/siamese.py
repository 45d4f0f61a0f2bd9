"""A siamese network: the same weights called twice, a contrastive margin loss."""

import torch
import torch.nn.functional as F
from torch import nn


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.fc = nn.Sequential(nn.Flatten(), nn.Linear(16 * 16, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward_once(self, x):
        return self.fc(self.cnn(x))

    def forward(self, a, b):
        return self.forward_once(a), self.forward_once(b)


class ContrastiveLoss(nn.Module):
    def __init__(self, margin=2.0):
        super().__init__()
        self.margin = margin

    def forward(self, a, b, label):
        distance = F.pairwise_distance(a, b)
        return torch.mean((1 - label) * distance.pow(2) + label * torch.clamp(self.margin - distance, min=0.0).pow(2))


torch.manual_seed(0)
net = SiameseNetwork()
criterion = ContrastiveLoss()
optimizer = torch.optim.Adam(net.parameters(), lr=0.001)
for step in range(12):
    first = torch.rand(12, 1, 16, 16)
    label = torch.randint(0, 2, (12,)).float()
    second = torch.where(label.view(-1, 1, 1, 1) > 0, torch.rand_like(first), first + 0.05 * torch.randn_like(first))
    optimizer.zero_grad()
    a, b = net(first, second)
    loss = criterion(a, b, label)
    loss.backward()
    optimizer.step()
    print(f"Step {step} Current loss {loss.item():.6f}")
torch.save(net.state_dict(), "checkpoint.pt")
