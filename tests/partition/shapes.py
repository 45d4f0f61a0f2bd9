"""Small models of the shapes that are cut: a stack of layers, an encoder and a decoder, a U with long skips."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from gemini.capture import capture
from gemini.ir.graph import Graph
from gemini.partition.partition_options import Options
from gemini.partition.partition_problem import Problem
from gemini.partition.problem_builder import build_problem
from gemini.profiling import profile
from gemini.profiling.profile_result import Profile


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.out, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query = self.query(x).view(batch, length, self.heads, -1).transpose(1, 2)
        key = self.key(memory).view(batch, memory.shape[1], self.heads, -1).transpose(1, 2)
        value = self.value(memory).view(batch, memory.shape[1], self.heads, -1).transpose(1, 2)
        scores = torch.softmax(query @ key.transpose(-1, -2) / (width // self.heads) ** 0.5 + mask, dim=-1)
        return self.norm(x + self.out((scores @ value).transpose(1, 2).reshape(batch, length, width)))


class Feed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(nn.functional.gelu(self.up(x))))


class Layer(nn.Module):
    def __init__(self, width: int, crossing: bool = False) -> None:
        super().__init__()
        self.attention, self.feed = Attention(width), Feed(width)
        self.crossing = Attention(width) if crossing else None

    def forward(self, x: torch.Tensor, mask: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        x = self.attention(x, x, mask)
        if self.crossing is not None and memory is not None:
            x = self.crossing(x, memory, mask)
        return self.feed(x)


class Stack(nn.Module):
    """Embedding, equal layers that share a mask, a head."""

    def __init__(self, layers: int = 12, width: int = 64, vocabulary: int = 1000) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = (ids == 0)[:, None, None, :].float() * -1e4
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


class Translator(nn.Module):
    """Encoder and decoder: every layer of the one reads the end of the other."""

    def __init__(self, layers: int = 6, width: int = 64, vocabulary: int = 1000) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.encoder = nn.ModuleList(Layer(width) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(width, crossing=True) for _ in range(layers))

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = (source == 0)[:, None, None, :].float() * -1e4
        memory, x = self.embed(source), self.embed(target)
        for layer in self.encoder:
            memory = layer(memory, mask)
        for layer in self.decoder:
            x = layer(x, mask, memory)
        return self.head(x)


class Double(nn.Sequential):
    def __init__(self, before: int, after: int) -> None:
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1),
            nn.ReLU(),
        )


class U(nn.Module):
    """Ever smaller pictures, then ever larger ones, with skips across; the work is uneven."""

    def __init__(self, depth: int = 4, width: int = 8) -> None:
        super().__init__()
        sizes = [width * 2**at for at in range(depth + 1)]
        self.down = nn.ModuleList(Double(3 if at == 0 else sizes[at - 1], sizes[at]) for at in range(depth))
        self.middle = Double(sizes[-2], sizes[-1])
        self.wider = nn.ModuleList(nn.ConvTranspose2d(sizes[at + 1], sizes[at], 2, 2) for at in reversed(range(depth)))
        self.up = nn.ModuleList(Double(2 * sizes[at], sizes[at]) for at in reversed(range(depth)))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.middle(x)
        for wider, block in zip(self.wider, self.up, strict=True):
            x = block(torch.cat([wider(x), skips.pop()], 1))
        return self.head(x)


def _ids(length: int) -> torch.Tensor:
    return torch.randint(0, 1000, (8, length), generator=torch.Generator().manual_seed(0))


MODELS = {
    "stack": (Stack, lambda: (_ids(32),)),
    "translator": (Translator, lambda: (_ids(32), _ids(32))),
    "u": (U, lambda: (torch.zeros(4, 3, 64, 64),)),
}


@cache
def captured(name: str) -> tuple[Graph, Profile]:
    """A model's graph and analytic profile."""
    cls, inputs = MODELS[name]
    torch.manual_seed(0)
    graph = capture(cls(), inputs())
    return graph, profile(graph, analytic="cpu")


def problem_of(name: str, nparts: int, options: Options | None = None) -> Problem:
    """The problem of cutting one of the models."""
    graph, costs = captured(name)
    return build_problem(graph, costs, nparts, options or Options())
