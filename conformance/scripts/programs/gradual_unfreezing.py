"""Fine-tuning: the body is frozen at first, then unfrozen from the top; the head is replaced."""

import torch
from torch import nn

torch.manual_seed(1)
body = nn.Sequential(*[nn.Sequential(nn.Linear(24, 24), nn.ReLU()) for _ in range(4)])
model = nn.Sequential(body, nn.Linear(24, 10))
model[1] = nn.Linear(24, 3)
for p in body.parameters():
    p.requires_grad = False
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
for epoch in range(4):
    if epoch:
        layer = body[-epoch]
        for p in layer.parameters():
            p.requires_grad = True
        optimizer.add_param_group({"params": layer.parameters(), "lr": 0.003})
    for batch in range(5):
        x = torch.randn(12, 24)
        loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"epoch {epoch} batch {batch} loss {loss.item():.6f}")
torch.save(model.state_dict(), "checkpoint.pt")
