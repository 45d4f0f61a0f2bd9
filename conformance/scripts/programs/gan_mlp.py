"""The original GAN on points of a circle: multi-layer perceptrons, alternating steps."""

import torch
from torch import nn

torch.manual_seed(0)
latent = 8
generator = nn.Sequential(
    nn.Linear(latent, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2)
)
discriminator = nn.Sequential(
    nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)
)
adversarial_loss = nn.BCEWithLogitsLoss()
optimizer_G = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))

for batch in range(10):
    angle = torch.rand(32, 1) * 6.283
    real = torch.cat([angle.cos(), angle.sin()], dim=1)
    valid, fake = torch.ones(32, 1), torch.zeros(32, 1)

    optimizer_G.zero_grad()
    z = torch.randn(32, latent)
    made = generator(z)
    g_loss = adversarial_loss(discriminator(made), valid)
    g_loss.backward()
    optimizer_G.step()

    optimizer_D.zero_grad()
    real_loss = adversarial_loss(discriminator(real), valid)
    fake_loss = adversarial_loss(discriminator(made.detach()), fake)
    d_loss = (real_loss + fake_loss) / 2
    d_loss.backward()
    optimizer_D.step()
    print(f"[Batch {batch}/10] [D loss: {d_loss.item():.6f}] [G loss: {g_loss.item():.6f}]")
torch.save({"G": generator.state_dict(), "D": discriminator.state_dict()}, "checkpoint.pt")
