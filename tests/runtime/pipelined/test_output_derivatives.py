"""Derivatives with respect to values that a model both returns and uses equal those of one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gemini.runtime.pool.worker_pool import WorkerPool
from tests.programs.pipelined_runs import manage


class Field(nn.Module):
    """Returns its values with the points that they belong to, to be differentiated by."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by
        self.body = nn.Sequential(nn.Linear(2, 8), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        points = x.clone().detach().requires_grad_()
        features = self.body(points)
        return self.head(features), points if self.by == "points" else features


def train(model: Field) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(2)
    told = []
    for _ in range(4):
        values, by = model(torch.rand(6, 2, generator=generator, dtype=torch.float64))
        (slope,) = torch.autograd.grad(values, [by], torch.ones_like(values), create_graph=True)
        loss = slope.square().mean() + values.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        told += [loss.item(), by.sum().item()]
    return told


@pytest.mark.parametrize("by", ["points", "features"])
def test_they_are_those_of_one_process(by: str, pool: WorkerPool) -> None:
    torch.manual_seed(0)
    model = Field(by).double()
    expected = train(copy.deepcopy(model))
    manage(model, pool)
    assert train(model) == pytest.approx(expected, rel=1e-12)
