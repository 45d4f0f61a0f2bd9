"""Gradient accumulation, clipping and logging of the gradient norm."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(11)
ACCUMULATION = 3

embedding = nn.EmbeddingBag(100, 32, mode="mean")
model = nn.Sequential(embedding, nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

optimizer.zero_grad()
running = 0.0
for micro_step in range(24):
    tokens = torch.randint(0, 100, (12, 9))
    labels = tokens[:, 0] % 4
    loss = F.cross_entropy(model(tokens), labels) / ACCUMULATION
    loss.backward()
    running += loss.item()
    if (micro_step + 1) % ACCUMULATION == 0:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        print(f"update {micro_step // ACCUMULATION}: loss {running:.6f}, grad norm {norm.item():.6f}")
        running = 0.0

torch.save(model.state_dict(), "checkpoint.pt")
