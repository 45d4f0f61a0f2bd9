"""torch.compile: the compiled module is trained, the original's weights are saved."""

import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 64)
        self.fc2 = nn.Linear(64, 64)
        self.fc3 = nn.Linear(64, 4)

    def forward(self, x):
        x = torch.relu(self.fc1(x))
        x = x + torch.relu(self.fc2(x))
        return self.fc3(x)


model = Net()
compiled = torch.compile(model, backend="eager")
optimizer = torch.optim.Adam(compiled.parameters(), lr=1e-2)
for step in range(10):
    x = torch.randn(16, 16)
    y = x[:, :4].argmax(dim=1)
    loss = nn.functional.cross_entropy(compiled(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: {loss.item():.6f}")
torch.save(model.state_dict(), "checkpoint.pt")
