"""Values: what goes in and out besides tensors, in every shape Python allows."""

from __future__ import annotations

import enum
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from conformance.zoo.registry import Made, classic

Point = namedtuple("Point", ["x", "y"])


@dataclass
class Batch:
    features: torch.Tensor
    targets: torch.Tensor
    name: str = "batch"
    weight: torch.Tensor | None = None


@dataclass
class Result:
    loss: torch.Tensor
    parts: dict[str, torch.Tensor]
    name: str


class Pooling(enum.Enum):
    MEAN = "mean"
    MAX = "max"


class DataclassModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, batch):
        logits = self.body(batch.features)
        loss = F.cross_entropy(logits, batch.targets, weight=batch.weight, reduction="sum", label_smoothing=0.1)
        return Result(loss, {"logits": logits, "probabilities": logits.softmax(-1)}, batch.name)


@classic
def dataclass_in_and_out() -> Made:
    return DataclassModel(), (Batch(torch.randn(4, 8), torch.randint(0, 3, (4,))),), {}


class DictModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(8, 8), nn.Embedding(20, 8)
        self.mix, self.head = nn.Linear(16, 8), nn.Linear(8, 2)

    def forward(self, inputs, *, scale=1.0, pooling=Pooling.MEAN, extra=None):
        image = self.image(inputs["image"]["pixels"])
        tokens = self.text(inputs["tokens"])
        text = tokens.mean(1) if pooling is Pooling.MEAN else tokens.amax(1)
        x = F.relu(self.mix(torch.cat([image, text], dim=-1))) * scale
        if extra is not None:
            x = x + extra[0]
        out = self.head(x)
        return OrderedDict(out=out, pair=Point(image, [text, None]), label="done", count=3)


@classic
def nested_dict() -> Made:
    inputs = {"image": {"pixels": torch.randn(4, 8)}, "tokens": torch.randint(0, 20, (4, 5))}
    return DictModel(), (inputs,), {"scale": 0.5, "pooling": Pooling.MAX, "extra": (torch.randn(8), "unused")}


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, bias=None, *, gate=None, mode="relu", dtype=torch.float32, part=slice(None)):
        for layer in self.layers:
            x = getattr(F, mode)(layer(x))
            if bias is not None:
                x = x + bias
            if gate is not None:
                x = x * gate
        return x.to(dtype)[:, part], None


@classic
def optional_and_none() -> Made:
    return (
        Optional(),
        (torch.randn(4, 8), None),
        {"gate": torch.rand(8), "mode": "silu", "dtype": torch.float64, "part": slice(1, 5)},
    )


class Graph(nn.Module):
    """Message passing over an edge list: no input dimension counts samples in all inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, nodes, edges):
        source, target = edges
        degree = torch.zeros(nodes.shape[0]).index_add_(0, target, torch.ones(target.numel())).clamp(min=1)
        for layer in self.layers:
            messages = layer(nodes)[source]
            nodes = nodes + torch.zeros_like(nodes).index_add_(0, target, messages) / degree[:, None]
        return nodes


@classic
def graph_network() -> Made:
    return Graph(), (torch.randn(6, 8), torch.randint(0, 6, (2, 14))), {}


class Cache:
    """A mutable object that the layers fill."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.seen = 0

    def update(self, key):
        self.keys.append(key)
        self.seen += key.shape[1]
        return torch.cat(self.keys, 1)


class CachedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, cache):
        return x + self.out(cache.update(self.key(x)).mean(1, keepdim=True))


class CachedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CachedLayer() for _ in range(4))

    def forward(self, x):
        cache = Cache()
        for layer in self.layers:
            x = layer(x, cache)
        return x, cache


@classic
def mutable_cache() -> Made:
    return CachedModel(), (torch.randn(4, 3, 8),), {}


class Flattened(nn.Module):
    """The batch is flattened with time, and unflattened by sizes read elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x):
        b, t = x.size(0), x.size(1)
        flat = self.layers(x.reshape(b * t, -1))
        mask = torch.ones(b, t).tril()
        return (flat.view(b, t, -1) * mask.unsqueeze(-1)).sum() / (b * t), flat


@classic
def flattened_batch() -> Made:
    return Flattened(), (torch.randn(4, 5, 8),), {}


class SlicedSequential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))

    def forward(self, x):
        x = self.layers[:2](x)
        return self.layers[2:-1](x) + self.layers[-1](x)


@classic
def sequential_slices() -> Made:
    return SlicedSequential(), (torch.randn(4, 8),), {}


class SameTensorTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, query, key, value):
        return torch.softmax(self.a(query) @ self.b(key).t(), -1) @ self.c(value)


@classic
def same_tensor_twice() -> Made:
    x = torch.randn(4, 8, requires_grad=True)
    return SameTensorTwice(), (x, x, x), {}


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(20, 8, mode="sum")
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 1))

    def forward(self, indices, offsets):
        return self.layers(self.embed(indices, offsets)).squeeze(-1)


@classic
def embedding_bag() -> Made:
    return Sparse(), (torch.randint(0, 20, (11,)), torch.tensor([0, 3, 4, 9])), {}
