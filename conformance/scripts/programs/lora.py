"""Low-rank adapters on a frozen base model; only the adapters are saved."""

import math

import torch
from torch import nn


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8):
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scaling = alpha / rank

    def forward(self, x):
        return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


def add_adapters(module):
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, LoRALinear(child))
        else:
            add_adapters(child)


class Encoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(40, dim)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
            for _ in range(4)
        )
        self.head = nn.Linear(dim, 4)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean(1))


torch.manual_seed(0)
model = Encoder()
for p in model.parameters():
    p.requires_grad_(False)
add_adapters(model)
trainable = [p for p in model.parameters() if p.requires_grad]
everything = sum(p.numel() for p in model.parameters())
print(f"trainable {sum(p.numel() for p in trainable)} of {everything}")
optimizer = torch.optim.AdamW(trainable, lr=1e-2)
for step in range(12):
    tokens = torch.randint(0, 40, (16, 10))
    loss = nn.functional.cross_entropy(model(tokens), tokens[:, 0] % 4)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.6f}")
torch.save({n: p for n, p in model.state_dict().items() if "lora_" in n}, "checkpoint.pt")
