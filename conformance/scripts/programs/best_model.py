"""Early stopping: the best weights are saved, and loaded again at the end."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(17)
x = torch.randn(140, 6)
y = x.pow(2).sum(1, keepdim=True) / 6
train_loader = DataLoader(TensorDataset(x[:100], y[:100]), batch_size=25, shuffle=True)
valid_x, valid_y = x[100:], y[100:]


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.ModuleList([nn.Linear(6, 48), nn.Linear(48, 48), nn.Linear(48, 48)])
        self.out = nn.Linear(48, 1)

    def forward(self, x):
        for layer in self.hidden:
            x = torch.nn.functional.elu(layer(x))
        return self.out(x)


model = MLP()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
criterion = nn.HuberLoss()
best, patience, waited = float("inf"), 3, 0
for epoch in range(10):
    model.train()
    for batch, target in train_loader:
        optimizer.zero_grad()
        criterion(model(batch), target).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        valid = criterion(model(valid_x), valid_y).item()
    marker = ""
    if valid < best:
        best, waited, marker = valid, 0, "  *"
        torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, "best.pt")
    else:
        waited += 1
    print(f"epoch {epoch} valid {valid:.6f}{marker}")
    if waited >= patience:
        print("early stop")
        break

state = torch.load("best.pt", weights_only=True)
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
with torch.no_grad():
    print(f"restored epoch {state['epoch']}: {criterion(model(valid_x), valid_y).item():.6f}")
model.train()
for step, (batch, target) in enumerate(train_loader):
    optimizer.zero_grad()
    loss = criterion(model(batch), target)
    loss.backward()
    optimizer.step()
    print(f"fine-tune {step} {loss.item():.6f}")
torch.save(model.state_dict(), "checkpoint.pt")
