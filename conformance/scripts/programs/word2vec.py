"""Skip-gram with negative sampling."""

import torch
import torch.nn.functional as F
from torch import nn


class SkipGram(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.centre = nn.Embedding(vocab, dim)
        self.context = nn.Embedding(vocab, dim)
        self.centre.weight.data.uniform_(-0.5 / dim, 0.5 / dim)
        self.context.weight.data.zero_()

    def forward(self, centre, positive, negative):
        v = self.centre(centre)
        good = F.logsigmoid((v * self.context(positive)).sum(1))
        bad = F.logsigmoid(-torch.bmm(self.context(negative), v.unsqueeze(2)).squeeze(2)).sum(1)
        return -(good + bad).mean()


torch.manual_seed(0)
model = SkipGram(100, 32)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
for step in range(12):
    centre = torch.randint(0, 100, (32,))
    positive = (centre + torch.randint(1, 4, (32,))) % 100
    negative = torch.randint(0, 100, (32, 5))
    loss = model(centre, positive, negative)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f}")
torch.save(model.state_dict(), "checkpoint.pt")
