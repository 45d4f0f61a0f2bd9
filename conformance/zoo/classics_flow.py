"""Control flow and modes: branches on data, routing, LayerDrop, randomness, regions, custom functions."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from conformance.zoo.registry import Made, classic


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    """Routing in Python: which tokens an expert gets depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == index)
            if rows.numel() == 0:
                continue
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, slots, None])
        return out


class MixtureModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(4))
        self.layers = nn.ModuleList(Mixture() for _ in range(4))

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x))
        return x.view(shape)


@classic
def mixture_of_experts() -> Made:
    return MixtureModel(), (torch.randn(4, 5, 8),), {}


class EarlyExit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.confidence = nn.Linear(8, 1)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if self.confidence(x).sigmoid().mean() > 0.9:
                break
        return x


@classic
def early_exit() -> Made:
    return EarlyExit(), (torch.randn(4, 8),), {}


class LayerDrop(nn.Module):
    def __init__(self, rate: float = 0.3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.rate = rate

    def forward(self, x):
        for layer in self.layers:
            if self.training and torch.rand(()) < self.rate:
                continue
            x = torch.relu(layer(x)) + x
        return x


@classic
def layer_drop() -> Made:
    return LayerDrop(), (torch.randn(4, 8),), {}


class PythonRandom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.noisy = nn.Sequential(Jitter(), nn.Linear(8, 8))

    def forward(self, x):
        return self.after(self.noisy(self.before(x)))


class Jitter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(8, 8)

    def forward(self, x):
        if random.random() < 0.5:
            x = -x
        return self.scale(x) * float(np.random.rand())


@classic
def python_randomness() -> Made:
    return PythonRandom(), (torch.randn(4, 8),), {}


class MaskTest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, mask=None):
        if mask is not None and bool(mask.all()):
            mask = None
        for layer in self.layers:
            x = torch.relu(layer(x))
            if mask is not None:
                x = x * mask[..., None]
        return x


@classic
def mask_test() -> Made:
    return MaskTest(), (torch.randn(4, 5, 8),), {"mask": torch.ones(4, 5, dtype=torch.bool)}


class Modes(nn.Module):
    """no_grad, autocast and detach regions."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student, self.low, self.last = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        with torch.no_grad():
            target = torch.tanh(self.teacher(x)) * 2
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.low(x) @ self.low.weight
            y = self.low(y)
        z = self.student(x) + y.float()
        with torch.set_grad_enabled(False):
            scale = z.abs().mean()
        return F.mse_loss(self.last(z / scale), target)


@classic
def grad_and_autocast_regions() -> Made:
    return Modes(), (torch.randn(4, 8),), {}


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, beta):
        ctx.save_for_backward(x)
        ctx.beta = beta
        return x * torch.sigmoid(beta * x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(ctx.beta * x)
        return grad * (s + ctx.beta * x * s * (1 - s)) * 2, None  # deliberately not the true derivative


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = Swish.apply(layer(x), 1.5)
        return x


@classic
def custom_function() -> Made:
    return CustomFunction(), (torch.randn(4, 8),), {}


class StraightThrough(nn.Module):
    """A vector quantizer with its codebook updated in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        self.codebook = nn.Embedding(10, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
        self.register_buffer("usage", torch.zeros(10))

    def forward(self, x):
        z = self.encoder(x)
        nearest = torch.cdist(z, self.codebook.weight).argmin(-1)
        quantized = self.codebook(nearest)
        self.usage.index_add_(0, nearest, torch.ones_like(nearest, dtype=torch.float))
        commit = F.mse_loss(z, quantized.detach()) + F.mse_loss(quantized, z.detach())
        return self.decoder(z + (quantized - z).detach()), commit


@classic
def vector_quantizer() -> Made:
    return StraightThrough(), (torch.randn(5, 6),), {}


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8)) for _ in range(4)
        )
        self.reentrant = reentrant

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@classic
def checkpointing() -> Made:
    return Checkpointed(reentrant=False), (torch.randn(4, 8),), {}


@classic
def reentrant_checkpointing() -> Made:
    return Checkpointed(reentrant=True), (torch.randn(4, 8),), {}


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 12))

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum() / x.size(0)
        return F.mse_loss(self.decoder(z), x, reduction="sum") / x.shape[0] + divergence


@classic
def variational_autoencoder() -> Made:
    return VAE(), (torch.randn(6, 12),), {}


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(4, 8, 4, 2, 1), nn.BatchNorm2d(8),
            nn.LeakyReLU(0.2, inplace=True), nn.Flatten(), nn.Linear(32, 1),
        )  # fmt: skip

    def forward(self, real, fake):
        return self.body(real).mean() - self.body(fake.detach()).mean()


@classic
def gan_discriminator() -> Made:
    return Discriminator(), (torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8)), {}


@classic
def gan_generator() -> Made:
    model = nn.Sequential(
        nn.Linear(4, 32), nn.Unflatten(1, (8, 2, 2)), nn.ConvTranspose2d(8, 4, 4, 2, 1), nn.BatchNorm2d(4),
        nn.ReLU(True), nn.ConvTranspose2d(4, 1, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip
    return model, (torch.randn(4, 4),), {}


class Hashing(nn.Module):
    """The number of samples decides how the Python runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.middle = PerSample()

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


class PerSample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.stack([self.linear(sample) / (index + 1) for index, sample in enumerate(x)])


@classic
def loop_over_samples() -> Made:
    return Hashing(), (torch.randn(6, 8),), {}


class Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.right = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8))
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, a, b):
        a, b = F.normalize(self.left(a), dim=-1), F.normalize(self.right(b), dim=-1)
        logits = a @ b.t() * self.temperature.exp()
        labels = torch.arange(len(a))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


@classic
def contrastive() -> Made:
    return Contrastive(), (torch.randn(4, 8), torch.randn(4, 6)), {}
