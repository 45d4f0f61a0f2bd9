"""Parameters without gradient that a model's code computes from tensors are traced, not kept as opaque modules."""

from __future__ import annotations

import torch
from torch import nn

from gemini.capture import capture


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.linspace(-1, 1, 24).reshape(3, 8)
        self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        x = x + nn.Parameter(self.table, requires_grad=False).to(x.device)
        return self.last(self.inner(x))


class OfAResult(Positions):
    def forward(self, x):
        y = self.inner(x)
        return self.last(y * nn.Parameter(y, requires_grad=False))


class WrittenInPlace(Positions):
    def forward(self, x):
        y = self.inner(x)
        frozen = nn.Parameter(y, False)
        frozen.mul_(2)
        return self.last(frozen + x)


class Trained(Positions):
    def forward(self, x):
        return self.last(self.inner(x) * nn.Parameter(self.table))


class Cast(Positions):
    def forward(self, x):
        self.inner.requires_grad_(False).double()
        return self.last(self.inner(x.double()).float())


def same_on_new_batches(model):
    graph = capture(model, (torch.randn(4, 3, 8),))
    for samples in (4, 4):
        x = torch.randn(samples, 3, 8)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        got, expected = graph.run(ours), model(theirs)
        assert torch.equal(got, expected)
        for mine, right in zip(*(torch.autograd.grad(y.sum(), v) for y, v in ((got, ours), (expected, theirs)))):
            assert torch.equal(mine, right)
    return graph


def test_what_a_frozen_parameter_is_made_of_is_followed():
    for cls in (Positions, OfAResult):
        graph = same_on_new_batches(cls())
        assert not graph.is_whole
        assert "detach" in {node.target.rpartition(".")[2] for node in graph.nodes if node.kind == "op"}
        assert not [node for node in graph.nodes if node.kind == "block"]


def test_a_table_that_was_changed_counts():
    model = Positions()
    graph = capture(model, (torch.randn(4, 3, 8),))
    model.table.add_(1)
    x = torch.randn(4, 3, 8)
    assert torch.equal(graph.run(x), model(x))


def test_others_stay_as_they_were():
    new = nn.Parameter.__dict__["__new__"]
    for cls in (WrittenInPlace, Trained, Cast):
        model = cls()
        graph = capture(model, (torch.randn(4, 3, 8),))
        x = torch.randn(4, 3, 8)
        assert torch.equal(graph.run(x), model(x))
    assert nn.Parameter.__dict__["__new__"] is new
