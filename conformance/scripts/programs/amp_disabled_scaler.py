"""Mixed precision switches that stay off on a CPU: enabled=use_amp everywhere."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(5)
use_amp = torch.cuda.is_available()
device = torch.device("cuda:0" if use_amp else "cpu")


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(60, 32)
        self.conv1 = nn.Conv1d(32, 48, 3, padding=1)
        self.conv2 = nn.Conv1d(48, 48, 3, padding=1)
        self.out = nn.Linear(48, 6)

    def forward(self, tokens):
        x = self.embed(tokens).transpose(1, 2)
        x = F.gelu(self.conv1(x))
        x = F.gelu(self.conv2(x))
        return self.out(x.transpose(1, 2))


model = Tagger().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler(device.type, enabled=use_amp)
for iteration in range(12):
    tokens = torch.randint(0, 60, (10, 14), device=device)
    tags = tokens % 6
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(device.type, enabled=use_amp):
        logits = model(tokens)
        loss = F.cross_entropy(logits.view(-1, 6), tags.view(-1))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print("iter", iteration, "loss", round(loss.item(), 6))
torch.save(model.state_dict(), "checkpoint.pt")
