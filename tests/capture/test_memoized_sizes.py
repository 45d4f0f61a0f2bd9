"""Sizes memoized inside an opaque module do not leak into the traced code around it."""

from __future__ import annotations

import functools

import torch
from torch import nn

from gemini.capture import capture


@functools.lru_cache
def flat(shape: torch.Size) -> tuple[int, int]:
    """As einops remembers what to make of a shape."""
    return shape[0] * shape[1], shape[2]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x.reshape(flat(x.shape)))).reshape(x.shape)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


def test_parts_after_one_that_is_kept_whole_are_followed_for_any_number_of_samples() -> None:
    torch.manual_seed(0)
    model = Net()
    graph = capture(model, (torch.randn(8, 3, 4),), basic_blocks=("parts.0",))
    assert {node.target for node in graph.nodes if node.kind == "block"} == {"parts.0"}, graph.blocks
    other = torch.randn(5, 3, 4)
    assert torch.equal(graph.run(other), model(other))
