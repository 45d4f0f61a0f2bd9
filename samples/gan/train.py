"""Train a generative adversarial network on small handwritten digits."""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader

LATENT = 16


class Generator(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.start = nn.Linear(LATENT, 4 * width * 4)
        self.layers = nn.Sequential(
            nn.GroupNorm(4, 4 * width),
            nn.SiLU(),
            nn.ConvTranspose2d(4 * width, 2 * width, 4, stride=2, padding=1),
            nn.GroupNorm(4, 2 * width),
            nn.SiLU(),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1),
            nn.GroupNorm(4, width),
            nn.SiLU(),
            nn.Conv2d(width, 1, 3, padding=1),
            nn.Tanh(),
        )

    def forward(self, noise):
        return self.layers(self.start(noise).view(noise.shape[0], -1, 2, 2))


class Discriminator(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(2 * width, 4 * width, 4, stride=2, padding=1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(4 * width * 4, 1),
        )

    def forward(self, images):
        return self.layers(images).squeeze(1)


def draw(image):
    """An image in letters, dark to light."""
    return "\n".join("".join(" .:-=+*#%@"[int(v * 9.99)] * 2 for v in row) for row in (image.clamp(-1, 1) + 1) / 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--samples", type=Path, help="write drawings of made-up digits here")
    args = parser.parse_args()

    torch.manual_seed(0)
    images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    loader = DataLoader(images, batch_size=args.batch_size, shuffle=True, drop_last=True)
    generator, discriminator = Generator(args.width), Discriminator(args.width)
    # With the usual eps of 1e-8, weights whose gradient is next to nothing move as fast as all others, and at random.
    adam = {"lr": args.lr, "betas": (0.5, 0.999), "eps": 1e-4}
    optimizer_g = torch.optim.Adam(generator.parameters(), **adam)
    optimizer_d = torch.optim.Adam(discriminator.parameters(), **adam)
    criterion = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(args.batch_size), torch.zeros(args.batch_size)

    step = 0
    while step < args.steps:
        for real in loader:
            fake = generator(torch.randn(args.batch_size, LATENT))
            optimizer_d.zero_grad()
            loss_real = criterion(discriminator(real), ones)
            loss_fake = criterion(discriminator(fake.detach()), zeros)
            loss_d = loss_real + loss_fake
            loss_d.backward()
            optimizer_d.step()

            optimizer_g.zero_grad()
            loss_g = criterion(discriminator(fake), ones)
            loss_g.backward()
            optimizer_g.step()
            if step % 10 == 0 or step == args.steps - 1:
                print(f"step {step:4d}  discriminator {loss_d.item():.6f}  generator loss {loss_g.item():.6f}")
            step += 1
            if step == args.steps:
                break

    if args.save:
        torch.save({"generator": generator.state_dict(), "discriminator": discriminator.state_dict()}, args.save)
    if args.samples:
        with torch.no_grad():
            made = generator(torch.randn(4, LATENT)).squeeze(1)
        args.samples.write_text("\n\n".join(draw(image) for image in made) + "\n")


if __name__ == "__main__":
    main()
