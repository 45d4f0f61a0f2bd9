"""Small models of several kinds for steps that run by a plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

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
