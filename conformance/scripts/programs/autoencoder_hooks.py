"""A denoising autoencoder with hooks that watch activations and gradients."""

import torch
from torch import nn

torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 6))
decoder = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 40), nn.Sigmoid())
model = nn.Sequential(encoder, decoder)
seen = {}
encoder.register_forward_hook(
    lambda module, args, output: seen.__setitem__("code", output.detach().abs().mean().item())
)
decoder[0].weight.register_hook(lambda gradient: seen.__setitem__("gradient", gradient.norm().item()))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(12):
    clean = (torch.rand(16, 40) > 0.5).float()
    noisy = clean + 0.2 * torch.randn_like(clean)
    loss = nn.functional.binary_cross_entropy(model(noisy), clean)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f} code {seen['code']:.5f} gradient {seen['gradient']:.6f}")
torch.save(encoder.state_dict(), "checkpoint.pt")
