"""A batch size memoized by a library in an earlier call does not prevent splitting."""

from __future__ import annotations

import torch
from torch import nn

from gemini.planner.plan_request import PlanRequest
from gemini.planner.step_planner import plan_step
from tests.planner.memoized_sizes import repeated


class WithToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.body, self.head = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat((repeated(self.token, x.shape[0]), x), 1)
        return self.head((x + self.body(x))[:, 0])


def test_a_batch_whose_size_was_seen_before_is_split() -> None:
    model, x = WithToken(), torch.randn(8, 4, 8)
    model(x)
    assert (
        plan_step(model, (x,), {}, PlanRequest(workers=2, micro_batches=2, cache=False)).single_micro_batch_reason == ""
    )
