"""Masked language modelling by hand: random masks, a masked mean as loss, tied output weights."""

import torch
import torch.nn.functional as F
from torch import nn


class MaskedLM(nn.Module):
    def __init__(self, vocab=60, dim=32, depth=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.position = nn.Embedding(20, dim)
        layer = nn.TransformerEncoderLayer(
            dim, 4, 64, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        self.bias = nn.Parameter(torch.zeros(vocab))

    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        return F.linear(self.norm(self.encoder(x)), self.embed.weight, self.bias)


torch.manual_seed(0)
model = MaskedLM()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(10):
    tokens = (torch.randint(1, 59, (8, 1)) + torch.arange(16)) % 58 + 1
    masked = torch.rand(tokens.shape) < 0.2
    masked[:, 0] = True
    logits = model(tokens.masked_fill(masked, 0))
    per_token = F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")
    loss = (per_token * masked).sum() / masked.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} masked {masked.sum().item()} loss {loss.item():.6f}")
torch.save(model.state_dict(), "checkpoint.pt")
