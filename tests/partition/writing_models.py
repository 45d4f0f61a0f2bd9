"""Models that write in place, in all the ways that could go wrong when values are copied between stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class WritesView(nn.Module):
    """A view of a result is written, the result read afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        before = x.sum(-1, keepdim=True)
        half = x[:, :4]
        half.mul_(2.0)
        after = x * 2
        half.add_(1.0)
        return self.two(after + x) + before


class Residual(nn.Module):
    """The usual in-place chain of residual networks."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += x
        return self.relu(y)


class Residuals(nn.Module):
    """Several of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.blocks = nn.Sequential(*(Residual() for _ in range(3)))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class WritesBuffers(nn.Module):
    """Buffers written in the glue and read again, also as the statistics of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + self.count
            self.count += 1
        x = F.batch_norm(x, self.mean, self.var, training=True)
        return self.layers[0](x) * self.mean.detach()


class SharedNorm(nn.Module):
    """One batch norm, run three times; its statistics read by the glue."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(self.norm(layer(x)))
        return x + self.norm.running_mean


class Counting(nn.Module):
    """Counts its calls in Python and does something else each time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.weight * (1.0 + self.calls % 3)


class SharedCounter(nn.Module):
    """A module with a state in Python, run three times."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = Counting()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.counter(torch.tanh(layer(x)))
        return x


class WritesInput(nn.Module):
    """The caller's tensor is written and read again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers[0](x * 2)
        view = x[1:]
        x.mul_(0.5)
        y = self.layers[1](y) + x
        view += 1
        return self.layers[2](y) + x.sum()


class SetsItems(nn.Module):
    """A fresh tensor filled piece by piece by results of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(4, x.shape[0], 8)
        for at, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            out[at] = x
        return out.sum(0) + x


class FillsMask(nn.Module):
    """A mask filled in place, then used by all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros_like(x)
        early = mask + 1
        mask.masked_fill_(x > 0, -2.0)
        for layer in self.layers:
            x = layer(x + mask) * early
        x.masked_fill_(mask < 0, 0.25)
        return x


class Drops(nn.Module):
    """Dropout in place and not; the draws keep their order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.3, inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.drop(layer(x))
        left = F.dropout(self.left(x), 0.5)
        right = F.dropout(self.right(x), 0.5)
        return left * right + F.dropout(x, 0.1)


class Cache:
    """A mutable object that layers fill."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.total: torch.Tensor | None = None

    def update(self, key: torch.Tensor) -> torch.Tensor:
        self.keys.append(key)
        self.total = key.clone() if self.total is None else self.total.add_(key)
        return torch.stack(self.keys).mean(0) + self.total


class CachedLayer(nn.Module):
    """Reads and fills the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        return torch.tanh(self.linear(x) + cache.update(x))


class Caches(nn.Module):
    """Layers that share a cache made in the call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CachedLayer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = Cache()
        for layer in self.layers:
            x = layer(x, cache)
        return x + cache.total


class WritesData(nn.Module):
    """Parameters changed under `no_grad`, through `.data` and through a view, between their uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layers[1].weight[0].mul_(0.5)
        y = self.layers[0](x).add_(0.5)
        flat = y.reshape(-1)
        flat += 1
        y = self.layers[1](y)
        out = torch.empty_like(y)
        with torch.no_grad():
            torch.add(y, self.scale, out=out.detach())
        return self.layers[2](y) + out.detach() * self.scale


class WritesAliases(nn.Module):
    """Results that are their argument, or may be: written through one name, read through another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.same, self.off, self.clip = nn.Identity(), nn.Dropout(0.0), nn.Hardtanh(inplace=True)
        self.flat = nn.Flatten(0, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.layers[0](x)
        b = self.same(a).contiguous().to(a.dtype)
        a = a + 0
        b += 1
        both = self.layers[1](b)
        left, right = both[:, :4], both[:, 4:]
        left.add_(right.detach())
        c = self.layers[2](torch.cat((left, right), -1))
        d = self.flat(self.off(c))
        d.T.mul_(2)
        e = self.clip(self.layers[3](c))
        f = self.layers[4](e.clone())
        f.detach().add_(1.0)
        f.index_put_((torch.tensor([0]),), torch.ones(8))
        wide = f[:, None, :].expand(-1, 3, -1)
        f.clamp_(-3, 3)
        return self.layers[5](wide.sum(1)) + c + b + a


class FirstInPlace(nn.Module):
    """The first layer writes into the caller's tensor, which a later one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.one, self.two = nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = x * 2
        y = self.one(self.relu(x))
        return self.two(y) + x + start


class KeepsLast(nn.Module):
    """Keeps its last result as an attribute and adds it the next time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        found = y if self.last is None else y + self.last
        self.last = y.detach()
        return found


class Remembers(nn.Module):
    """A module with a memory, run twice a call with something between."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.layers = KeepsLast(), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.memory.last = None
        x = self.layers[1](self.memory(self.layers[0](x)))
        x = self.memory(x)
        self.memory.last = None
        return self.layers[2](x)


def batch() -> torch.Tensor:
    return torch.randn(6, 8)


def images() -> torch.Tensor:
    return torch.randn(2, 3, 6, 6)


CASES: dict[str, tuple[Any, Any]] = {
    "views": (WritesView, batch),
    "residuals": (Residuals, images),
    "buffers": (WritesBuffers, batch),
    "shared norm": (SharedNorm, batch),
    "shared counter": (SharedCounter, batch),
    "inputs": (WritesInput, batch),
    "items": (SetsItems, batch),
    "masks": (FillsMask, batch),
    "dropout": (Drops, batch),
    "caches": (Caches, batch),
    "data": (WritesData, batch),
    "aliases": (WritesAliases, batch),
    "first in place": (FirstInPlace, batch),
    "memory": (Remembers, batch),
}
