"""Sizes that C code reads from traced numbers are found; sizes read through their methods are none of these."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gemini.capture import capture
from gemini.capture.hidden_size_reads import find_hidden_size_read

TABLE = {16: 1.0, 12: 2.0}


class Net(nn.Module):
    """Layers, and Python code between them."""

    def __init__(self, glue: Callable[[Net, torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.glue = glue

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.glue(self, self.layers[0](x), x.shape[1])


def take_layers(net: Net, x: torch.Tensor, t: int) -> torch.Tensor:
    for layer in net.layers[: t // 10]:
        x = layer(x)
    return x


HIDDEN = {
    "slice of modules": take_layers,
    "index": lambda net, x, t: net.layers[t // 10](x),
    "math": lambda net, x, t: x * int(math.log2(t)),
    "number first": lambda net, x, t: x * int(0.1 * t),
    "text": lambda net, x, t: x * len(f"{t}" * t),
    "bits": lambda net, x, t: x * t.bit_length(),
    "length of a list": lambda net, x, t: x * len([0] * (t // 8)),
    "missing in a table": lambda net, x, t: x * TABLE.get(t, 3.0),
}
SEEN = {
    "product": lambda net, x, t: x.reshape(-1, t * 4).reshape(x.shape),
    "branch": lambda net, x, t: net.layers[1](x) if t > 10 else x,
    "least": lambda net, x, t: x + x[:, : min(t, 20)].mean(1, keepdim=True),
    "loop": lambda net, x, t: sum((x * i for i in range(t // 8)), x),
    "rounded": lambda net, x, t: torch.cat([x[:, math.ceil(t / 2) :], x[:, : math.ceil(t / 2)]], 1),
    "positions": lambda net, x, t: x + torch.arange(t)[:, None] / t**0.5,
    "message": lambda net, x, t: x if t else x * float(f"{t}"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_reads_by_c_code_are_found(name: str) -> None:
    assert find(HIDDEN[name])


@pytest.mark.parametrize("name", SEEN)
def test_reads_with_an_expression_are_not(name: str) -> None:
    assert not find(SEEN[name])


def test_only_the_number_of_samples_counts_where_that_is_asked() -> None:
    def glue(net: Net, x: torch.Tensor, t: int) -> torch.Tensor:
        return x * int(math.log2(t))

    def counting(net: Net, x: torch.Tensor, t: int) -> torch.Tensor:
        return net.layers[len(x) // 10](x)

    assert not find(glue, of_samples=True)
    assert find(counting, of_samples=True)


def find(glue: Callable[[Net, torch.Tensor, int], torch.Tensor], *, of_samples: bool = False) -> str:
    model, x = Net(glue), torch.randn(4, 24, 4)
    return find_hidden_size_read(capture(model, (x,)), model, ((x,), {}), of_samples=of_samples)
