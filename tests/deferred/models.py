"""Small models for programs."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

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
