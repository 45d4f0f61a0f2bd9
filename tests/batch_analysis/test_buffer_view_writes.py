"""Buffers written through views and `.data` are detected as written."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gemini.batch_analysis.side_effects import written_buffers
from gemini.capture import capture
from tests.batch_analysis.recorder import Step

N, D = 7, 4


def average(old: torch.Tensor, new: torch.Tensor) -> None:
    """As codebooks are kept up to date: it returns nothing, and reads what is no tensor's content."""
    if old.grad is not None:
        new = new + old.grad
    old.data.lerp_(new, 0.2)


class Counting(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.fc, self.way = nn.Linear(D, D), way
        self.register_buffer("count", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "data":
            self.count.data.add_(1)
        elif self.way == "detached":
            self.count.detach().view(-1).add_(1)
        else:
            self.count[:1].add_(1)
        return torch.tanh(self.fc(x)) / self.count.sum()


class Averaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(D, D)
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.fc(x))
        average(self.mean, y.detach().mean(0))
        return y


@pytest.mark.parametrize("way", ["data", "detached", "part"])
def test_a_buffer_that_is_written_by_a_view_counts_as_written(way: str) -> None:
    graph = capture(Counting(way), (torch.randn(N, D),))
    assert written_buffers(graph) == {"count"}


def test_a_function_that_returns_nothing_and_writes_of_the_samples_is_in_the_way() -> None:
    step = Step(Averaging(), (torch.randn(N, D),), lambda y: y.square().mean())
    assert "mean" in written_buffers(step.graph)
    assert step.reason


def test_a_leaf_that_writes_its_buffer_by_data_keeps_something_of_every_run() -> None:
    graph = capture(nn.Sequential(nn.Linear(D, D), Averaging()), (torch.randn(N, D),), basic_blocks=("1",))
    (leaf,) = (node for node in graph.nodes if node.target == "1")
    assert leaf.changes == ("1",)
