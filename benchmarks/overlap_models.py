# ruff: noqa: D101, D102
"""Models of the overlap benchmark, each a list of blocks that pass a tuple of tensors on.

The same model can thus be cut by Gemini wherever its graph allows, and by torch between blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

State = tuple[torch.Tensor, ...]


class Blocks(nn.Module):
    """Blocks in sequence; the result is the first tensor."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state: State = (x,)
        for block in self.blocks:
            state = block(*state)
        return state[0]


class Part(nn.Module):
    """Some of the blocks: a stage of a chain."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, *state: torch.Tensor) -> torch.Tensor | State:
        for block in self.blocks:
            state = block(*state)
        return state[0] if len(state) == 1 else state


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.heads, self.causal = nn.Linear(width, width), heads, causal

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        def split(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q, k, v = split(self.query(x)), split(self.key(memory)), split(self.value(memory))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A layer of a transformer on tensor `at` of the state; with `memory` it also looks at that one."""

    def __init__(self, width: int, at: int = 0, memory: int | None = None, causal: bool = True) -> None:
        super().__init__()
        self.norm, self.inner_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, 8, causal)
        self.cross = None if memory is None else Attention(width, 8, False)
        self.cross_norm = None if memory is None else nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.at, self.memory = at, memory

    def forward(self, *state: torch.Tensor) -> State:
        x = state[self.at]
        y = self.norm(x)
        x = x + self.attention(y, y)
        if self.cross is not None and self.cross_norm is not None:
            x = x + self.cross(self.cross_norm(x), state[self.memory])
        x = x + self.down(F.gelu(self.up(self.inner_norm(x))))
        return (*state[: self.at], x, *state[self.at + 1 :])


class Embed(nn.Module):
    """Words and places; `copies` of them begin the state."""

    def __init__(self, words: int, width: int, length: int, copies: int = 1) -> None:
        super().__init__()
        self.words, self.places, self.copies = nn.Embedding(words, width), nn.Embedding(length, width), copies
        self.register_buffer("positions", torch.arange(length), persistent=False)

    def forward(self, ids: torch.Tensor) -> State:
        parts = ids.chunk(self.copies, 1)
        return tuple(self.words(part) + self.places(self.positions[: part.shape[1]]) for part in parts)


class Head(nn.Module):
    def __init__(self, width: int, words: int, at: int = 0) -> None:
        super().__init__()
        self.norm, self.out, self.at = nn.LayerNorm(width), nn.Linear(width, words, bias=False), at

    def forward(self, *state: torch.Tensor) -> State:
        return (self.out(self.norm(state[self.at])),)


class Down(nn.Module):
    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(given, made, 3, padding=1), nn.Conv2d(made, made, 3, padding=1)

    def forward(self, x: torch.Tensor, *skips: torch.Tensor) -> State:
        x = F.relu(self.second(F.relu(self.first(x))))
        return (F.max_pool2d(x, 2), x, *skips)


class Up(nn.Module):
    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.wider = nn.ConvTranspose2d(given, made, 2, 2)
        self.first, self.second = nn.Conv2d(2 * made, made, 3, padding=1), nn.Conv2d(made, made, 3, padding=1)

    def forward(self, x: torch.Tensor, skip: torch.Tensor, *skips: torch.Tensor) -> State:
        x = torch.cat([self.wider(x), skip], 1)
        return (F.relu(self.second(F.relu(self.first(x)))), *skips)


class Last(nn.Module):
    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.out = nn.Conv2d(given, made, 1)

    def forward(self, x: torch.Tensor, *_: torch.Tensor) -> State:
        return (self.out(x),)


@dataclass(frozen=True)
class Workload:
    """A model of so many layers, batches of so many samples, and its loss."""

    make: Callable[[int], Blocks]
    batch: Callable[[int], torch.Tensor]
    targets: Callable[[int], torch.Tensor]

    @staticmethod
    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross entropy, of every token or of every pixel."""
        if logits.dim() == 3:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return F.cross_entropy(logits, targets)


def gpt(layers: int, words: int = 8192, width: int = 512, length: int = 128) -> Blocks:
    """33.7 M parameters with 8 layers."""
    return Blocks([Embed(words, width, length), *(Layer(width) for _ in range(layers)), Head(width, words)])


def t5(layers: int, words: int = 16064, width: int = 256, length: int = 96) -> Blocks:
    """T5-small at half its width and vocabulary: 6 layers or more in encoder and decoder, which has larger ones."""
    count = max(6, layers // 2)
    encoder = [Layer(width, 0, causal=False) for _ in range(count)]
    decoder = [Layer(width, 1, 0) for _ in range(count)]
    return Blocks([Embed(words, width, length, 2), *encoder, *decoder, Head(width, words, 1)])


def unet(_layers: int, width: int = 16, depth: int = 4) -> Blocks:
    """A level costs as much as any other on the way down, more on the way up; as deep as its pictures allow."""
    widths = [width << at for at in range(depth + 1)]
    downs = [Down(3 if not at else widths[at - 1], widths[at]) for at in range(depth)]
    middle = [Down(widths[depth - 1], widths[depth])]
    ups = [Up(widths[min(at + 1, depth)], widths[at]) for at in reversed(range(depth + 1))]
    return Blocks([*downs, *middle, *ups, Last(width, 4)])


WORKLOADS: dict[str, Workload] = {
    "gpt": Workload(gpt, lambda n: torch.randint(0, 8192, (n, 128)), lambda n: torch.randint(0, 8192, (n, 128))),
    "head": Workload(
        lambda layers: gpt(layers, words=32768, width=256, length=64),
        lambda n: torch.randint(0, 32768, (n, 64)),
        lambda n: torch.randint(0, 32768, (n, 64)),
    ),
    "t5": Workload(t5, lambda n: torch.randint(0, 16064, (n, 192)), lambda n: torch.randint(0, 16064, (n, 96))),
    "unet": Workload(unet, lambda n: torch.randn(n, 3, 64, 64), lambda n: torch.randint(0, 4, (n, 64, 64))),
}


def in_equal_parts(model: Blocks, count: int) -> list[Part]:
    """Stages with as many layers each, as users of a chain cut; what is before and after goes to the ends."""
    first, *layers, last = model.blocks
    if len(layers) < count:
        raise ValueError(f"{count} stages of {len(layers)} layers")
    cuts = [round(at * len(layers) / count) for at in range(count + 1)]
    parts = [list(layers[begin:end]) for begin, end in pairwise(cuts)]
    parts[0].insert(0, first)
    parts[-1].append(last)
    return [Part(part) for part in parts]
