"""A tqdm bar on standard error whose postfix shows the loss; an uneven last batch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
from tqdm import tqdm

torch.manual_seed(0)
x = torch.randn(103, 10)
y = (x[:, 0] > 0.8).long()
weights = torch.where(y == 1, 4.0, 1.0)
sampler = WeightedRandomSampler(weights, len(x))
loader = DataLoader(TensorDataset(x, y), batch_size=16, sampler=sampler)
model = nn.Sequential(nn.Linear(10, 32), nn.Mish(), nn.Linear(32, 32), nn.Mish(), nn.Linear(32, 2))
optimizer = torch.optim.RAdam(model.parameters(), lr=0.02)
for epoch in range(3):
    with tqdm(loader, desc=f"epoch {epoch}", leave=False) as bar:
        total = 0.0
        for inputs, labels in bar:
            loss = nn.functional.cross_entropy(model(inputs), labels, reduction="none").mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            bar.set_postfix(loss=f"{loss.item():.4f}")
            total += loss.item() * len(labels)
    print(f"epoch {epoch} loss {total / len(x):.6f}")
torch.save(model.state_dict(), "checkpoint.pt")
