"""Layers and their state: convolutions, normalization, shared and tied weights, parametrizations, hooks."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from conformance.zoo.registry import Made, classic


@classic
def mlp() -> Made:
    return (
        nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(16, 16), nn.GELU()))),
        (torch.randn(8, 16),),
        {},
    )


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


@classic
def resnet() -> Made:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        *(Residual(8) for _ in range(4)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    return model, (torch.randn(4, 3, 16, 16),), {}


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [4, 8, 16, 32]
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in zip([3, *widths], widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairwise(widths))
        self.fuse = nn.ModuleList(nn.Conv2d(2 * a, a, 3, padding=1) for a in widths[:-1])
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        skips = []
        for index, layer in enumerate(self.down):
            x = F.relu(layer(x if index == 0 else F.max_pool2d(x, 2)))
            skips.append(x)
        for up, fuse, skip in zip(reversed(self.up), reversed(self.fuse), reversed(skips[:-1])):
            x = torch.cat([up(x), skip], dim=1)
            x = F.relu(fuse(x))
        return self.head(x)


@classic
def unet() -> Made:
    return UNet(), (torch.randn(4, 3, 16, 16),), {}


class TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16) * 0.1)
        self.bias = nn.Parameter(torch.zeros(16))
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x):
        return F.linear(self.middle(F.relu(F.linear(x, self.weight))), self.weight.t(), self.bias)


@classic
def tied_autoencoder() -> Made:
    return TiedAutoencoder(), (torch.randn(6, 16),), {}


class TiedLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, labels=None):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        logits = self.head(x)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


@classic
def tied_language_model() -> Made:
    tokens = torch.randint(0, 50, (4, 9))
    return TiedLM(), (tokens,), {"labels": tokens}


class Repeated(nn.Module):
    """One layer used several times (a universal transformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        for _ in range(4):
            x = self.layer(x)
        return self.norm(x)


@classic
def repeated_layer() -> Made:
    return Repeated(), (torch.randn(4, 6, 16),), {}


@classic
def weight_norm() -> Made:
    model = nn.Sequential(*(parametrizations.weight_norm(nn.Linear(8, 8)) for _ in range(4)))
    return model, (torch.randn(4, 8),), {}


@classic
def spectral_norm() -> Made:
    model = nn.Sequential(*(parametrizations.spectral_norm(nn.Linear(8, 8)) for _ in range(4)))
    return model, (torch.randn(4, 8),), {}


@classic
def old_weight_norm() -> Made:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(*(nn.utils.weight_norm(nn.Linear(8, 8)) for _ in range(4)))
    return model, (torch.randn(4, 8),), {}


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8))
        self.body[0].register_forward_hook(lambda module, args, output: output * 2)
        self.body[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        self.body[2].register_full_backward_hook(lambda module, grads, _: (grads[0] * 3,))

    def forward(self, x):
        return self.body(x)


@classic
def hooks() -> Made:
    return Hooked(), (torch.randn(4, 8, requires_grad=True),), {}


@classic
def root_hooks() -> Made:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.register_forward_hook(lambda module, args, output: output + 1)
    return model, (torch.randn(4, 8),), {}


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.a(x)
        part = x[:, :4]
        part.mul_(2)  # writes a view of x
        x[:, 4:] = 0.5
        y = self.b(x.clone())
        y.add_(x).relu_()
        buffer = torch.zeros(y.shape[0], 16)
        buffer[:, :8] = y
        buffer[:, 8:].copy_(self.c(y))
        return buffer


@classic
def in_place_and_views() -> Made:
    return InPlace(), (torch.randn(6, 8),), {}


class RunningMean(nn.Module):
    """Buffers written by the glue, and a counter in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.training:
            self.steps += 1
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


@classic
def buffers_in_glue() -> Made:
    return RunningMean(), (torch.randn(8, 8),), {}


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CountingLayer() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class CountingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) / self.calls


@classic
def python_counter() -> Made:
    return Counting(), (torch.randn(4, 8),), {}


class AuxiliaryLoss(nn.Module):
    """Layers leave a loss in an attribute; the model collects it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GateLayer() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x, sum(layer.auxiliary for layer in self.layers)


class GateLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)

    def forward(self, x):
        scores = torch.softmax(x @ self.weight, -1)
        self.auxiliary = scores.pow(2).mean()
        return x * scores


@classic
def loss_in_attribute() -> Made:
    return AuxiliaryLoss(), (torch.randn(4, 8),), {}


@classic
def depthwise_and_groups() -> Made:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=4),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.Conv2d(8, 8, 1),
        nn.InstanceNorm2d(8),
        nn.PixelShuffle(2),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(2, 2, 3),
        nn.Flatten(1),
        nn.LazyLinear(4),
    )
    return model, (torch.randn(4, 4, 8, 8),), {}
