"""Rarely taken branches on random numbers are captured at two sizes, planned, and run at once."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from gemini.capture import capture
from gemini.runtime.call_outcome import CallPath
from gemini.runtime.pool.worker_pool import WorkerPool
from tests.models import CLASSES
from tests.programs.pipelined_runs import manage
from tests.programs.training_steps import batch


class Chancy(nn.Module):
    """Layers that are left out every other time: any one way through them is gone once in 64 times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(6))
        self.head = nn.Linear(9, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            if torch.rand([]) < 0.5:
                x = x + torch.dropout(torch.tanh(layer(x)), 0.1, self.training)
        return self.head(x)


def test_a_way_that_is_rarely_gone_is_captured_at_two_sizes() -> None:
    model = Chancy()
    for seed in range(3):
        torch.manual_seed(seed)
        graph = capture(model, (torch.randn(4, 9),))
        assert graph.batch_size == 4
        assert not graph.blocks


class Picking(nn.Module):
    """A layer that is left out at random, and rows that are picked at random by what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.tanh(self.first(x))
        if torch.rand([]) < 0.5:
            x = x + torch.tanh(self.second(x))
        picked = torch.multinomial(x.detach().square() + 0.1, 1)
        return self.head(x * picked)


def trained(model: nn.Module, steps: int) -> list[torch.Tensor]:
    torch.manual_seed(5)
    optimizer, seen = torch.optim.SGD(model.parameters(), 0.1), []
    for number in range(steps):
        x, y = batch(number)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.detach())
    return [*seen, torch.get_rng_state(), *model.state_dict().values()]


def test_draws_that_depend_on_contents_are_a_reason_and_no_failure(pool: WorkerPool) -> None:
    torch.manual_seed(1)
    model = Picking().double()
    reference = copy.deepcopy(model)
    story = manage(model, pool)
    for mine, other in zip(trained(model, 4), trained(reference, 4), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-10)
    assert any("depend on contents" in reason for reason in story.reasons), str(story)
    assert not any("failed" in reason for reason in story.reasons), str(story)


def test_a_way_that_was_never_gone_before_runs_by_a_plan(pool: WorkerPool) -> None:
    torch.manual_seed(1)
    model = Chancy().double()
    reference = copy.deepcopy(model)
    story = manage(model, pool)
    for mine, other in zip(trained(model, 3), trained(reference, 3), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-10)
    assert story.steps.get(CallPath.OVERLAPPED, 0) >= 1, str(story)
