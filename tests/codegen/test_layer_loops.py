"""Repeated calls of a module and alternating layers become loops with bitwise equal results."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from gemini.capture import capture
from gemini.codegen import generate_stages
from gemini.pipe import Piped
from tests.codegen.cutting import cut, even_cut, flat_problem, flat_profile, random_cut

WIDTH = 8


class Layer(nn.Module):
    def __init__(self, shifted: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.shifted = shifted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.roll(x, 1, dims=1) if self.shifted else x
        return x + torch.dropout(self.down(torch.relu(self.up(self.norm(seen)))), 0.1, True)


class Repeated(nn.Module):
    """One layer, called several times; `glue` is what comes between two calls."""

    def __init__(self, times: int = 6, *, glue: bool = False, numbered: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()]) if numbered else None
        self.layer = None if numbered else Layer()
        self.times, self.glue = times, glue
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x
        for _ in range(self.times):
            x = (self.layers[0] if self.layer is None else self.layer)(x)
            if self.glue:
                x = x * 0.5 + first
        return self.head(x)


class Collecting(Repeated):
    """Gives what every call gave."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        seen = []
        for _ in range(self.times):
            x = self.layer(x)
            seen.append(x)
        return [self.head(x) for x in seen]


class Alternating(nn.Module):
    def __init__(self, count: int = 8, period: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(shifted=at % period == period - 1) for at in range(count))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def stages(model: nn.Module, partition=None, x: torch.Tensor | None = None) -> list[str]:
    """The sources of a model's stages, in one if nothing else is said, after a check that they equal the model."""
    x = torch.randn(4, 5, WIDTH) if x is None else x
    graph = capture(model, (x,))
    made = cut(graph, flat_problem(graph, 1), [0] * len(flat_problem(graph, 1).items))
    made = made if partition is None else partition(graph)
    piped = Piped(model, graph, flat_profile(graph), made, generate_stages(graph, made))
    report = piped.check((x,))
    sources = list(piped.sources.values())
    order = [node for nodes in made.stages for node in nodes]
    exact = order == sorted(order)  # else branches run in another order, and sums of gradients too
    assert report.is_exact if exact else report.is_right, f"{report}\n" + "\n".join(sources)
    return sources


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("glue", [False, True])
def test_a_repeated_layer_is_a_loop(numbered, glue):
    (source,) = stages(Repeated(6, glue=glue, numbered=numbered))
    assert source.count("for _ in range(6):") == 1
    assert source.count(".up(") == 1


def test_what_every_turn_gave_is_collected():
    (source,) = stages(Collecting(5))
    assert source.count("for _ in range(5):") == 1
    assert source.count(".append(") == 1


def test_turns_begin_where_calls_do():
    x = torch.randn(4, 5, WIDTH)
    model = Repeated(8)
    count = len(flat_problem(capture(model, (x,)), 1).items)
    for at in range(count // 3, 2 * count // 3, 2):

        def halves(graph, at=at):
            return cut(graph, flat_problem(graph, 2), [int(item >= at) for item in range(count)])

        for source in stages(model, halves, x):
            body = source.split("for _ in range(")[1].splitlines()[1:]
            calls = [line for line in body if "norm(" in line or "up(" in line or "down(" in line]
            assert "norm(" in calls[0], source
            assert source.count("for _ in range(") == 1


@pytest.mark.parametrize("times", [1, 2, 3])
def test_few_calls(times):
    stages(Repeated(times))
    stages(Repeated(times, glue=True))


def test_a_module_that_is_called_twice_among_others_is_no_loop():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.one, self.two = nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(self.two(self.drop(self.one(x))))

    (source,) = stages(Twice())
    assert "for " not in source.split("def forward")[1]


def test_pairs_of_layers_are_the_turns_of_a_loop():
    (source,) = stages(Alternating(8))
    assert "for index in range(0, 8, 2):" in source
    assert "= self.blocks[index]\n" in source
    assert "next_block = self.blocks[index + 1]\n" in source
    assert source.count("torch.roll(") == 1


def test_three_at_a_time_and_one_left_over():
    (source,) = stages(Alternating(10, period=3))
    body = source.split("def forward")[1]
    assert body.count("torch.roll(") == 1
    assert len(body.splitlines()) < 60


@pytest.mark.parametrize("make", [Repeated, lambda: Repeated(7, glue=True), Collecting, Alternating])
def test_cuts_anywhere_keep_every_bit(make):
    rng = random.Random(3)
    model = make()
    for _ in range(4):
        stages(model, lambda graph: random_cut(graph, rng))
    for parts in (2, 3, 4):
        stages(model, lambda graph, parts=parts: even_cut(graph, parts))
