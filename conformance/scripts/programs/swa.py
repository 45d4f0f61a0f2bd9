"""Stochastic weight averaging with torch.optim.swa_utils and update_bn."""

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(96, 12)
y = (x[:, :3].sum(1) > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)

model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
swa_model = AveragedModel(model)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
swa_scheduler = SWALR(optimizer, swa_lr=0.05)

for epoch in range(5):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    if epoch >= 2:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()
    print(f"Epoch {epoch}: loss {loss.item():.6f}")

update_bn(loader, swa_model)
swa_model.eval()
with torch.no_grad():
    print(f"SWA loss {nn.functional.cross_entropy(swa_model(x), y).item():.6f}")
torch.save(swa_model.state_dict(), "checkpoint.pt")
