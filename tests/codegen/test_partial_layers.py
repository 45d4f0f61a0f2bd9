"""Equivalent layers of which a stage holds different parts are not generated as one loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gemini.capture import capture
from gemini.codegen import generate_stages
from gemini.pipe import Piped
from tests.codegen.cutting import cut, flat_problem, flat_profile


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for part in self.parts[:2]:
            x = torch.tanh(part(x) + x)
        return x


class Model(nn.Module):
    """The last part of every layer runs after all layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return sum(layer.parts[2](x) for layer in self.layers)


def test_layers_held_in_different_ways_are_not_one_loop():
    model, x = Model(), torch.randn(3, 4)
    graph = capture(model, (x,))
    problem = flat_problem(graph, 2)
    targets = [[graph.nodes[node].target for node in item.nodes] for item in problem.items]
    late = [at for at, names in enumerate(targets) if any(name.endswith("parts.2") for name in names)]
    for first in range(1, len(late)):  # the first few late parts in the first stage, the others in the second
        stage_of = [int(at >= late[first]) for at in range(len(problem.items))]
        partition = cut(graph, problem, stage_of)
        piped = Piped(model, graph, flat_profile(graph), partition, generate_stages(graph, partition))
        report = piped.check((x,))
        assert report.is_right, f"{report}\n{piped.sources['stage_0.py']}"
        assert report.fallbacks == ()


class Shifted(nn.Module):
    """A layer whose glue needs none of its weights, and whose weights need all of the glue."""

    def __init__(self, odd: bool):
        super().__init__()
        self.odd = odd
        self.dense = nn.Linear(4, 4)

    def forward(self, x, shift):
        shift = torch.sigmoid(shift) - 3 if self.odd else torch.tanh(shift) * 2 + 1
        return torch.relu(self.dense(x) + shift), shift


class Decoder(nn.Module):
    def __init__(self, count: int, alternating: bool):
        super().__init__()
        self.block = nn.ModuleList(Shifted(alternating and at % 2 == 1) for at in range(count))

    def forward(self, x, shift):
        for block in self.block:
            x, shift = block(x, shift)
        return x


class Around(nn.Module):
    def __init__(self, count: int, alternating: bool):
        super().__init__()
        self.first, self.decoder = nn.Linear(4, 4), Decoder(count, alternating)

    def forward(self, x):
        return self.decoder(x, self.first(x))


@pytest.mark.parametrize("alternating", [False, True])
def test_a_stage_with_only_the_glue_of_layers_names_none_of_them(alternating):
    model, x = Around(8, alternating), torch.randn(3, 4)
    graph = capture(model, (x,))
    problem = flat_problem(graph, 2)
    stage_of, held = [], set()
    for item in problem.items:  # the layers' weights, and what follows from them, in the second stage
        nodes = [graph.nodes[node] for node in item.nodes]
        after = any(node.target.endswith("dense") or held.intersection(node.dependencies) for node in nodes)
        held |= {node.id for node in nodes} if after else set()
        stage_of.append(int(after))
    partition = cut(graph, problem, stage_of)
    piped = Piped(model, graph, flat_profile(graph), partition, generate_stages(graph, partition))
    source = piped.sources["stage_0.py"]
    assert "for _ in range(" in source
    assert "self.decoder" not in source
    report = piped.check((x,))
    assert report.is_right, f"{report}\n{source}"
    assert report.fallbacks == ()
