"""Two-layer classifier on blobs: the loop of the first tutorial."""

import torch
from torch import nn

torch.manual_seed(0)

model = nn.Sequential(
    nn.Linear(20, 64),
    nn.ReLU(),
    nn.Linear(64, 64),
    nn.ReLU(),
    nn.Linear(64, 5),
)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

centers = torch.randn(5, 20)
for step in range(15):
    labels = torch.randint(0, 5, (32,))
    inputs = centers[labels] + 0.5 * torch.randn(32, 20)

    optimizer.zero_grad()
    outputs = model(inputs)
    loss = criterion(outputs, labels)
    loss.backward()
    optimizer.step()

    print(f"step {step:2d}  loss {loss.item():.6f}")

torch.save(model.state_dict(), "checkpoint.pt")
print("done")
