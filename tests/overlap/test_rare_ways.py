"""Ways through branches on random numbers that are rarely gone: captured at two sizes, planned, and run at once."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from gemini.capture import capture
from gemini.report.journal import OVERLAPPED
from gemini.runtime.controller.crew import Crew
from tests.overlap.models import CLASSES
from tests.overlap.programs import batch
from tests.overlap.test_programs_overlapped import manage


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


def test_a_way_that_was_never_gone_before_runs_by_a_plan(crew: Crew) -> None:
    torch.manual_seed(1)
    model = Chancy().double()
    reference = copy.deepcopy(model)
    story, seen = manage(model, crew), []
    for one in (reference, model):
        torch.manual_seed(5)
        optimizer = torch.optim.SGD(one.parameters(), 0.1)
        seen.append([])
        for number in range(3):
            x, y = batch(number)
            loss = F.cross_entropy(one(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen[-1].append(loss.detach())
        seen[-1] += [torch.get_rng_state(), *one.state_dict().values()]
    for mine, other in zip(*seen, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-10)
    assert story.steps.get(OVERLAPPED, 0) >= 1, str(story)
