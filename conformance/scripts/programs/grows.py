"""A network that grows: a layer is added in the middle of training, the optimizer gets its parameters."""

import torch
from torch import nn

torch.manual_seed(0)


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 32)
        self.layers = nn.ModuleList([nn.Linear(32, 32)])
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(x)

    def grow(self):
        layer = nn.Linear(32, 32)
        nn.init.zeros_(layer.weight)
        self.layers.append(layer)
        return layer


model = Growing()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(18):
    if step in (6, 12):
        optimizer.add_param_group({"params": model.grow().parameters()})
        print("grown to", len(model.layers), "layers,", sum(p.numel() for p in model.parameters()), "parameters")
    x = torch.randn(16, 8)
    loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f}")
torch.save(model.state_dict(), "checkpoint.pt")
