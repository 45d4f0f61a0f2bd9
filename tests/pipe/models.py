"""Small models, each with something that stages must get right."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Layer(nn.Module):
    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask=None, bias=None, memory=None):
        seen = x if memory is None else memory
        q, k, v = self.query(x), self.key(seen), self.value(seen)
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        if bias is not None:
            scores = scores + bias
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, :], -1e9)
        x = x + self.dropout(scores.softmax(-1)) @ v
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Bert(nn.Module):
    """Embeddings of several kinds, a mask that every layer reads, labels that may be missing, a head tied to words."""

    def __init__(self, layers: int = 6, width: int = 16, words: int = 40) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(32, width)
        self.cls = nn.Parameter(torch.randn(1, 1, width))
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("positions", torch.arange(32)[None], persistent=False)

    def forward(self, ids, mask=None, labels=None):
        x = self.words(ids) + self.places(self.positions[:, : ids.shape[1]]) + self.cls
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head(x)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class T5(nn.Module):
    """Encoder and decoder, one embedding in three places, a bias computed once and read by all layers."""

    def __init__(self, layers: int = 3, width: int = 16, words: int = 40) -> None:
        super().__init__()
        self.shared = nn.Embedding(words, width)
        self.bias = nn.Embedding(16, 1)
        self.encoder = nn.ModuleList(Layer(width) for _ in range(layers))
        self.decoder = nn.ModuleList(nn.ModuleList([Layer(width), Layer(width)]) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, ids, targets):
        x = self.shared(ids)
        length = ids.shape[1]
        at = torch.arange(length)
        bias = self.bias((at[:, None] - at[None]).abs())[None, :, :, 0]
        for layer in self.encoder:
            x = layer(x, bias=bias)
        y = self.shared(targets)
        for own, cross in self.decoder:
            y = cross(own(y, bias=bias), memory=x)
        return F.cross_entropy(self.head(y).flatten(0, 1), targets.flatten()), x


class UNet(nn.Module):
    """Long skips, BatchNorm, concatenation."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()

        def block(i, o):
            return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True))

        self.down = nn.ModuleList([block(3, width), block(width, 2 * width), block(2 * width, 4 * width)])
        self.up = nn.ModuleList([block(6 * width, 2 * width), block(3 * width, width)])
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x):
        kept = []
        for at, block in enumerate(self.down):
            x = block(x if at == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        for at, block in enumerate(self.up):
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = block(torch.cat([x, kept[1 - at]], 1))
        return self.last(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.first, self.second = nn.LSTM(8, 8, batch_first=True), nn.GRU(8, 8, 2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(8, 3)

    def forward(self, ids, state=None):
        x, (h, c) = self.first(self.words(ids), state)
        x, last = self.second(x)
        return self.head(x[:, -1]), (h, c), last


@dataclass
class Result:
    loss: torch.Tensor
    parts: dict[str, Any]
    name: str


class Nested(nn.Module):
    """Dictionaries and objects in and out, plain values, `None`, an early output, an input that is an output."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(8, 8), nn.Embedding(20, 8)
        self.body = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, inputs, *, scale=1.0, extra=None, labels=None):
        early = self.image(inputs["pixels"])
        x = early + self.text(inputs["tokens"]).mean(1)
        if extra is not None:
            x = x + extra
        hidden = []
        for layer in self.body:
            x = F.silu(layer(x)) * scale
            hidden.append(x)
        logits = self.head(x)
        best = logits.argmax(-1)
        parts = OrderedDict(
            early=early, hidden=tuple(hidden), best=best, same=inputs["pixels"], none=None, size=x.shape[0]
        )
        return Result(F.cross_entropy(logits, labels), parts, "done")


class Integers(nn.Module):
    """Booleans, integers and numbers cross between stages; values are transposed, expanded and sliced."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, ids):
        mask, lengths = ids > 3, (ids > 3).sum(1)
        x = self.words(ids)
        wide = x.transpose(1, 2)
        thin = x[:, ::2]
        flat = x[:, :1].expand(-1, x.shape[1], -1)
        for layer in self.layers:
            x = torch.relu(layer(x)) + wide.transpose(1, 2) * 0.1 + flat
            x = x * mask[..., None]
        x = x + thin.sum(1, keepdim=True)
        pooled = x.sum(1) / lengths.clamp(min=1)[:, None]
        return pooled.view(ids.shape[0], -1), lengths, mask.any(), x.shape[1] * 2


class Experts(nn.Module):
    """Routing by data: each expert stays a block that runs its Python."""

    def __init__(self, experts: int = 3, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Routed(experts, width) for _ in range(3))
        self.inner = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        balance = 0.0
        for layer, inner in zip(self.layers, self.inner, strict=True):
            x, load = layer(inner(x))
            balance = balance + load
        return x, balance


class Routed(nn.Module):
    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        choice = weights.argmax(-1)
        out = torch.zeros_like(x)
        for at, expert in enumerate(self.experts):
            chosen = (choice == at).nonzero()[:, 0]
            if len(chosen):
                out[chosen] = expert(x[chosen]) * weights[chosen, at, None]
        return x + out, weights.mean(0).square().sum()


class Held(nn.Module):
    """Own parameters on cut modules, a counter it writes, a frozen part, a part nobody uses, `no_grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.layers[1].requires_grad_(False)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        self.steps += 1
        with torch.no_grad():
            target = self.layers[0](x)
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale + self.shift
        return (x - target).square().mean()


def _words(*shape: int) -> torch.Tensor:
    return torch.randint(0, 20, shape)


CASES: dict[str, Callable[[], Made]] = {
    "bert": lambda: (Bert(), (_words(4, 6),), {"mask": _words(4, 6) > 2, "labels": _words(4, 6)}),
    "bert without labels": lambda: (Bert(), (_words(4, 6), None), {"labels": None}),
    "t5": lambda: (T5(), (_words(4, 6), _words(4, 6)), {}),
    "unet": lambda: (UNet(), (torch.randn(4, 3, 8, 8),), {}),
    "unet with gradient of its input": lambda: (UNet(), (torch.randn(4, 3, 8, 8, requires_grad=True),), {}),
    "recurrent": lambda: (Recurrent(), (_words(4, 6),), {}),
    "nested": lambda: (
        Nested(),
        ({"pixels": torch.randn(4, 8), "tokens": _words(4, 5)},),
        {"scale": 0.5, "extra": torch.randn(8), "labels": torch.randint(0, 3, (4,))},
    ),
    "integers": lambda: (Integers(), (_words(4, 6),), {}),
    "experts": lambda: (Experts(), (torch.randn(6, 8),), {}),
    "held": lambda: (Held(), (torch.randn(4, 8),), {}),
    "one sample": lambda: (Bert(4), (_words(1, 6),), {}),
    "sequential": lambda: (
        nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(8, 8), nn.ReLU()))),
        (torch.randn(4, 8),),
        {},
    ),
    "transformer": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3),
        (torch.randn(4, 6, 16),),
        {},
    ),
}


def make(name: str, seed: int = 0) -> Made:
    """A case, the same every time."""
    torch.manual_seed(seed)
    model, args, kwargs = CASES[name]()
    return model.train(), args, kwargs
