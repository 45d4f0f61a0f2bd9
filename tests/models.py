"""Small models shared by tests of several packages."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH, LENGTH, CLASSES = 23, 12, 5, 7


class Layer(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Plain(nn.Module):
    """Samples to logits."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.enter = nn.Linear(9, WIDTH)
        self.layers = nn.Sequential(*(Layer(drop) for _ in range(4)))
        self.leave = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.layers(self.enter(x)))


class Text(nn.Module):
    """Words to words, tied, with its loss inside, as libraries do it."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(drop) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


class TwoHeads(nn.Module):
    """A body and two heads, one of them early."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.first = nn.Linear(9, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.Sequential(*(Layer(0.0) for _ in range(4)))
        self.second = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.enter(x)
        return self.first(x), self.second(self.layers(x))


class TimeFirst(nn.Module):
    """Samples in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.layers, self.leave = nn.Linear(9, WIDTH), nn.Sequential(*(Layer(0.0) for _ in range(3))), None
        self.rnn = nn.GRU(WIDTH, WIDTH)
        self.leave = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.rnn(self.layers(self.enter(x)))[0])


class Normed(nn.Module):
    """Statistics over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(9, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
            nn.Linear(WIDTH, CLASSES),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Skipping(nn.Module):
    """Layers that are left out at random, with dropout before, between and after."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(9, WIDTH)
        self.layers = nn.ModuleList(Layer(0.2) for _ in range(3))
        self.leave = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = F.dropout(self.enter(x), 0.1, self.training)
        seen = []
        for layer in self.layers:
            if self.training and torch.rand(()) < 0.3:
                continue
            x = layer(x)
            seen.append(x)
        return self.leave(x), *seen


class Counted(nn.Module):
    """Writes buffers that do not depend on the samples: a counter that it uses, and a power iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.utils.parametrizations.spectral_norm(nn.Linear(9, WIDTH))
        self.layers = nn.Sequential(*(Layer(0.0) for _ in range(2)))
        self.leave = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, CLASSES))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.enter(x))
        if self.training:
            self.steps += 1
        return self.leave(x) * (1 + 1 / (1 + self.steps))


class Checkpointed(nn.Module):
    """Layers with dropout, run again in backward."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.enter, self.leave, self.reentrant = nn.Linear(9, WIDTH), nn.Linear(WIDTH, CLASSES), reentrant
        self.layers = nn.ModuleList(Layer(0.3) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.enter(x), 0.1, self.training)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.leave(x)


_D = {"dtype": torch.float64}


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8, **_D), nn.Tanh(), nn.Linear(8, 3, **_D))


def single() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8, **_D), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3, **_D))


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8, **_D), nn.BatchNorm1d(8, **_D), nn.Linear(8, 3, **_D))


@dataclass
class ModelOutput(OrderedDict):  # as in transformers: a dictionary and a dataclass
    loss: Any = None
    logits: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        for one in fields(self):
            if getattr(self, one.name) is not None:
                super().__setitem__(one.name, getattr(self, one.name))

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else tuple(self.values())[key]


class Several(nn.Module):
    """Outputs in all kinds of containers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.body, self.a, self.b = kind, nn.Linear(4, 6, **_D), nn.Linear(6, 3, **_D), nn.Linear(6, 2, **_D)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.body(x).tanh()
        a, b = self.a(hidden), self.b(hidden)
        if self.kind == "tuple":
            return a, b
        if self.kind == "dict":
            return {"a": a, "b": [b, None], "n": 3}
        loss = None if labels is None else F.cross_entropy(a, labels)
        return ModelOutput(loss=loss, logits=a, hidden=(hidden, b))


def pair() -> nn.Module:
    return Several("tuple")


def nested() -> nn.Module:
    return Several("dict")


def hugging() -> nn.Module:
    return Several("output")


class Recurrent(nn.Module):
    """One step of a recurrent network: its second output is the next step's input."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(4, 4, **_D), nn.Linear(4, 3, **_D)

    def forward(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.cell(state).tanh()
        return self.head(state).log_softmax(-1), state
