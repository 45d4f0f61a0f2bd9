"""A graph assigns the attributes that the model's own Python assigns during its forward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gemini.capture import Graph, capture


class Reads(nn.Module):
    """A leaf that reads what others put into its attribute."""

    def __init__(self):
        super().__init__()
        self.weight, self.mask = nn.Parameter(torch.randn(8)), None

    def forward(self, x):
        return x * self.weight if self.mask is None else x * self.weight * self.mask


class SetsMasks(nn.Module):
    """The mask travels in attributes, not in arguments."""

    def __init__(self):
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList(Reads() for _ in range(4))

    def forward(self, x):
        mask = torch.sigmoid(self.first(x))
        for layer in self.layers:
            layer.mask = mask
        for layer in self.layers:
            x = layer(x)
        return x


class Remembers(nn.Module):
    """The state of the last call takes part in the next."""

    def __init__(self):
        super().__init__()
        self.cell, self.out, self.state = nn.Linear(8, 8), nn.Linear(8, 8), torch.zeros(8)

    def forward(self, x):
        h = torch.tanh(self.cell(x) + self.state)
        self.state = h.mean(0).detach()
        return self.out(h)


class Forgets(nn.Module):
    """Clears what a child kept, each time before it runs."""

    def __init__(self):
        super().__init__()
        self.first, self.child = nn.Linear(8, 8), Keeps()

    def forward(self, x):
        self.child.kept = None
        return self.child(self.child(self.first(x)))


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.kept = nn.Parameter(torch.randn(8)), None

    def forward(self, x):
        y = x * self.weight if self.kept is None else x + self.kept
        self.kept = y
        return y


class SetsBuffer(nn.Module):
    """Replaces a buffer by a new tensor."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        y = self.first(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return self.last(y - self.mean)


class Counts(nn.Module):
    """Sets a plain number that a graph could not compute again."""

    def __init__(self):
        super().__init__()
        self.first, self.child, self.steps = nn.Linear(8, 8), Scaled(), 0

    def forward(self, x):
        self.steps += 1
        self.child.scale = 1.0 / self.steps
        return self.child(self.first(x))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(8)), 1.0

    def forward(self, x):
        return x * self.weight * self.scale


@pytest.mark.parametrize("cls", [SetsMasks, Remembers, Forgets, SetsBuffer, Counts])
def test_graph_and_model_stay_in_step(cls):
    torch.manual_seed(0)
    model = cls().train()
    twin = copy.deepcopy(model)
    graph = capture(model, (torch.randn(6, 8),))
    for step, rows in enumerate((6, 6, 4, 2, 6)):
        x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(step))
        expected, found = twin(x), graph.run(x)
        torch.testing.assert_close(expected, found)
        found.sum().backward()
        expected.sum().backward()
        for a, b in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("cls", [SetsMasks, Remembers, Forgets, SetsBuffer])
def test_what_can_be_assigned_keeps_nothing_whole(cls, tmp_path):
    torch.manual_seed(0)
    model, x = cls().train(), torch.randn(6, 8)
    graph = capture(model, (x,))
    assert graph.blocks == {}
    setters = [node for node in graph.nodes if node.target.endswith("attribute_writes.assign")]
    assert setters
    assert all(node.changes for node in setters)
    for node in graph.nodes:
        assert all(earlier < node.id for earlier in node.dependencies)
    graph.save(tmp_path / "graph.json")
    twin = copy.deepcopy(model)
    torch.testing.assert_close(Graph.load(tmp_path / "graph.json", model).run(x), twin(x))
