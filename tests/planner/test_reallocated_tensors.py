"""A forward that reallocates a parameter or buffer is not planned; planning preserves all storages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gemini.planner.plan_request import PlanRequest
from gemini.planner.step_plan import UnplannableError
from gemini.planner.step_planner import plan_step


class Momentum(nn.Module):
    """Its keys follow its queries, as in momentum contrast."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(6, 4), nn.Linear(6, 4)
        self.key.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for ours, theirs in zip(self.query.parameters(), self.key.parameters(), strict=True):
                theirs.data = theirs.data * 0.9 + ours.data * 0.1
            keys = self.key(x)
        return (self.query(x) * keys).sum(1)


def test_it_is_not_planned() -> None:
    model = Momentum()
    before = {name: (one.data_ptr(), one.clone()) for name, one in model.named_parameters()}
    with pytest.raises(UnplannableError, match=r"its forward assigns new memory to key\.bias"):
        plan_step(model, (torch.randn(8, 6),), {}, PlanRequest(workers=2, micro_batches=2))
    for name, one in model.named_parameters():
        assert one.data_ptr() == before[name][0]
        assert torch.equal(one, before[name][1])


class Counting(nn.Module):
    """Sets the memory of a buffer, and of a tensor in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.last = nn.Linear(6, 4), torch.zeros(4)
        self.register_buffer("count", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.data = self.count.data + 1
        y = self.fc(x)
        self.last.data = y.detach().mean(0)
        return y / self.count


def test_buffers_have_their_memory_again() -> None:
    model = Counting()
    before = [(one.data_ptr(), one.clone()) for one in (model.count, model.last)]
    with pytest.raises(UnplannableError, match="its forward assigns new memory to count"):
        plan_step(model, (torch.randn(8, 6),), {}, PlanRequest(workers=2, micro_batches=2))
    for one, (place, contents) in zip((model.count, model.last), before, strict=True):
        assert one.data_ptr() == place
        assert torch.equal(one, contents)
