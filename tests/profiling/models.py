"""Small models, each with something that profiling must get right."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(functional.relu_(self.up(self.norm(x)))))


class Tied(nn.Module):
    """Equal layers, tied embeddings, an in-place op, dropout, a loss."""

    def __init__(self, layers: int = 4, width: int = 16, vocabulary: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor | tuple[torch.Tensor, ...]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        if labels is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class Images(nn.Module):
    """BatchNorm statistics, an in-place module, a frozen part, a long skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.last = nn.Conv2d(16, 2, 1)
        for parameter in self.first.parameters():
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.first(x)
        return self.last(torch.cat([early, self.second(early)], 1))


class Odd(nn.Module):
    """A region without gradients, a value written by index, views, a custom count kept in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.inside(x).abs().mean()
        y = self.outside(x).clone()
        y[:, 0] = y[:, 1] * 2
        self.seen.add_(1)
        return (y * scale).view(-1, 4).transpose(0, 1).sum()


class Checkpointed(nn.Module):
    """Layers that the model itself recomputes."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(8) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x.sum()


class Writer(nn.Module):
    """Writes its own parameter in forward, as running estimates that are trained do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.mul_(0.9)
        return x * self.scale


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, 2, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def tokens() -> torch.Tensor:
    return torch.arange(24).reshape(4, 6)


CASES = {
    "tied": lambda: (Tied(), (tokens(),), {"labels": tokens()}),
    "no loss": lambda: (Tied(), (tokens(),), {}),
    "images": lambda: (Images(), (torch.randn(4, 3, 8, 8),), {}),
    "odd": lambda: (Odd(), (torch.randn(4, 8),), {}),
    "checkpoint": lambda: (Checkpointed(False), (torch.randn(4, 8, requires_grad=True),), {}),
    "reentrant checkpoint": lambda: (Checkpointed(True), (torch.randn(4, 8, requires_grad=True),), {}),
    "writer": lambda: (nn.Sequential(nn.Linear(4, 4), Writer(), Writer()), (torch.randn(4, 4),), {}),
    "recurrent": lambda: (Recurrent(), (torch.randn(4, 5, 4),), {}),
    "evaluated": lambda: (Images().eval(), (torch.randn(4, 3, 8, 8),), {}),
    "transformer": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2),
        (torch.randn(4, 6, 16),),
        {},
    ),
}
