"""A data-dependent size that coincides with another one during planning is guarded in later steps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini.runtime.pool.worker_pool import WorkerPool
from tests.models import CLASSES
from tests.programs.pipelined_runs import manage

LENGTH, WIDTH = 6, 8


class Distinct(nn.Module):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.unique(ids)


class Asks(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.distinct, self.words = way, Distinct(), nn.Embedding(20, WIDTH)
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def count(self, ids: torch.Tensor) -> int:
        if self.way == "leaf":
            return self.distinct(ids).shape[0]
        if self.way == "number":
            return torch.arange(ids.max() + 1).shape[0]
        return self.words.weight[:LENGTH][ids == torch.arange(LENGTH)].flatten().shape[0] // WIDTH

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        if self.count(ids) > 4:
            h = h * 2
        return self.last(torch.tanh(self.second(h)).mean(1))


def train(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(0)
    optimizer, seen = torch.optim.SGD(model.parameters(), 0.1), []
    for count in (6, 6, 6, 6, 3, 3, 6):
        x, labels = torch.randn(8, LENGTH, WIDTH).double(), torch.randint(CLASSES, (8,))
        loss = F.cross_entropy(model(x, torch.arange(LENGTH) % count), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.detach())
    return [*seen, *(value.clone() for value in model.state_dict().values())]


@pytest.mark.parametrize("way", ["leaf", "number", "mask"])
def test_a_size_that_is_another_later_is_seen(pool: WorkerPool, way: str) -> None:
    torch.manual_seed(1)
    model = Asks(way).double()
    expected = train(copy.deepcopy(model))
    manage(model, pool)
    for one, other in zip(train(model), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
