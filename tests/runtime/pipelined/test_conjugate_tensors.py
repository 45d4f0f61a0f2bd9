"""Lazy conjugates work as inputs, as outputs and between modules."""

from __future__ import annotations

import copy

import torch
from torch import nn

from gemini.runtime.call_outcome import CallPath
from gemini.runtime.pool.worker_pool import WorkerPool
from tests.programs.pipelined_runs import manage


class Turn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.cfloat) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).conj()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turns = nn.Sequential(Turn(), Turn(), Turn())

    def forward(self, x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        return self.turns(x * part)


def losses(model: nn.Module) -> list[float]:
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(8, 6, dtype=torch.cfloat).conj()
    seen = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(x, x).abs().mean()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


def test_conjugates_overlap(pool: WorkerPool) -> None:
    torch.manual_seed(2)
    model = Net()
    reference = copy.deepcopy(model)
    story = manage(model, pool)
    torch.testing.assert_close(losses(model), losses(reference), rtol=1e-5, atol=1e-5)
    assert story.steps.get(CallPath.OVERLAPPED, 0) >= 3, str(story)
